"""Any number of ranks gives the same samples, values and results; one that dies costs only what it had in work."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
from itertools import chain
from pathlib import Path

import pytest
from conftest import write_config
from test_extract import KILLED, assert_same_samples, quiet

from dflash_eval import ranks
from dflash_eval.cache import Cache
from dflash_eval.config import Config, load_config
from dflash_eval.errors import UserError
from dflash_eval.evaluate import evaluate
from dflash_eval.states import write_states

ENVIRONMENT = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def as_ranks(count: int, work, timeout: float = 60) -> list[int]:
    """`work()` in `count` forked processes with the environment that torchrun gives; their exit statuses."""
    port = free_port()

    def run(rank: int) -> None:
        values = (rank, rank, count, count, "127.0.0.1", port)
        os.environ.update(dict(zip(ENVIRONMENT, map(str, values), strict=True)))
        try:
            work()
        except UserError:
            os._exit(2)
        except BaseException as error:
            sys.stderr.write(f"{error!r}\n")
            os._exit(error.code if isinstance(error, SystemExit) else 1)
        os._exit(0)

    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=run, args=(rank,)) for rank in range(count)]
    for process in processes:
        process.start()
    deadline = time.monotonic() + timeout
    for process in processes:
        process.join(max(0, deadline - time.monotonic()))
    hung = [process for process in processes if process.is_alive()]
    for process in hung:
        process.kill()
    assert not hung, "ranks hang"
    return [process.exitcode for process in processes]


def config_in(folder: Path, tiny, **sections) -> Config:
    folder.mkdir(exist_ok=True)
    sections.setdefault("extract", KILLED)
    return load_config(write_config(folder, tiny.target, [("trained", tiny.drafter)], **sections))


@pytest.mark.parametrize("count", [2, 3])
def test_ranks_share_the_work_and_give_what_one_process_gives(tiny, tmp_path, count):
    alone = config_in(tmp_path / "alone", tiny)
    quiet(alone)
    config = config_in(tmp_path / "together", tiny)
    assert as_ranks(count, lambda: quiet(config)) == [0] * count
    assert_same_samples(config.cache_dir, alone.cache_dir)
    assert not list(config.cache_dir.glob(".completions-*"))
    manifest = Cache(config.cache_dir).manifest
    assert manifest.complete
    assert manifest.provenance["ranks"] == count


@pytest.mark.parametrize("count", [2, 7])
def test_evaluation_over_ranks_gives_the_same_results(tiny, tmp_path, count):
    """Seven ranks are more than there are samples."""
    alone = evaluate(tiny.config)
    config = tiny.config.model_copy(update={"results_dir": tmp_path / "results"})
    assert as_ranks(count, lambda: evaluate(config)) == [0] * count
    assert json.loads((tmp_path / "results" / "results.json").read_text())["drafters"] == json.loads(
        json.dumps(alone["drafters"])
    )


def test_a_rank_that_dies_leaves_whole_shards_and_the_rerun_fills_the_gap(tiny, tmp_path, monkeypatch):
    alone = config_in(tmp_path / "alone", tiny)
    quiet(alone)
    config = config_in(tmp_path / "together", tiny)

    def dies(folder, manifest, samples, target, shards, **options):
        if ranks.rank() == 1:
            write_states(folder, manifest, samples, target, shards[:1], **options)
            os.kill(os.getpid(), signal.SIGKILL)
        return write_states(folder, manifest, samples, target, shards, **options)

    monkeypatch.setattr("dflash_eval.extract.write_states", dies)
    assert as_ranks(3, lambda: quiet(config)) == [1, -signal.SIGKILL, 1]
    monkeypatch.undo()
    kept = {path.name: path.stat().st_mtime_ns for path in config.cache_dir.glob("states-*.h5")}
    assert 0 < len(kept) < len(list(alone.cache_dir.glob("states-*.h5")))
    quiet(config)
    assert_same_samples(config.cache_dir, alone.cache_dir)
    assert kept.items() <= {path.name: path.stat().st_mtime_ns for path in config.cache_dir.glob("states-*.h5")}.items()


def test_what_rank_0_finds_wrong_ends_all(tiny, tmp_path):
    config = config_in(tmp_path / "x", tiny, extract={"layers": [9]})
    assert as_ranks(2, lambda: quiet(config)) == [2, 2]


def test_torchrun_starts_it(tiny, tmp_path):
    path = tmp_path / "config.yaml"
    config = config_in(tmp_path, tiny, completions={"max_new_tokens": 4}, prompts={"limit": 2})
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "--master-port",
        str(free_port()),
    ]
    done = subprocess.run([*command, "-m", "dflash_eval", "extract", "-c", str(path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("samples,") == 1  # rank 0 speaks for all
    assert Cache(config.cache_dir).manifest.provenance["ranks"] == 2


def test_shares_cover_the_work_in_order_and_are_even(monkeypatch):
    weights = [5, 4, 4, 3, 2, 2, 2, 1, 1]
    for size in (1, 2, 3, 12):
        shares = []
        for rank in range(size):
            monkeypatch.setenv("RANK", str(rank))
            monkeypatch.setenv("WORLD_SIZE", str(size))
            shares.append(ranks.deal(range(9), weights))
        assert [*chain.from_iterable(shares)] == list(range(9))
        heaviest = max(sum(weights[i] for i in share) for share in shares)
        assert heaviest <= sum(weights) / size + max(weights)
