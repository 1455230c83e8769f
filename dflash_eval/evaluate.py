"""Phase 2: judge every drafter from the cache; the target is not needed.

A drafter drafts once at each anchor that any walk visits (`judge.py`). From that one draft come the chain's, the
width-K tree's and every budget's accepted drafts; the walks, and from them τ (`summary.py`), follow.
"""

from __future__ import annotations

import os
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from datetime import datetime, timezone
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from dflash_eval import ranks
from dflash_eval.acceptance.walks import Walk
from dflash_eval.cache import DTYPES, Cache, Manifest, differences, write_atomically
from dflash_eval.compatible import check_fits
from dflash_eval.config import Config, DrafterSpec
from dflash_eval.drafter.checkpoint import check_weights, load_drafter, read_config
from dflash_eval.drafter.config import DrafterConfig
from dflash_eval.errors import RunError, UserError, reason
from dflash_eval.history import append_history
from dflash_eval.html import html_report
from dflash_eval.judge import walk_samples
from dflash_eval.machine import commit, device_name, free_bytes, out_of_memory, pick_device, software
from dflash_eval.progress import bars, say
from dflash_eval.report import write_report
from dflash_eval.summary import compare, summarise
from dflash_eval.texts import piece_decoder

Drafter = tuple[DrafterSpec, DrafterConfig]
Walked = tuple[list[list[Walk]], NDArray[np.float64] | None]  # what walk_samples gives
Failures = dict[str, UserError | RunError]  # by the drafter's name


def evaluate(config: Config, known: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
    """Judge the config's drafters; writes results.json and the reports to `config.results_dir`, returns them.

    What can be wrong with config, cache and checkpoints is looked for before the first draft is made. A drafter that
    fails, then or later, is said at once and stands under "failed" in the results; the others are judged all the
    same. Raises the first one's error when all fail. Under torchrun every rank walks its part of the samples; all
    return the same results, and rank 0 writes them.

    known: entries of the results of drafters that this cache and these settings have judged before; they are not again.
    """
    with ranks.group():
        return _evaluate(config, known)


def _evaluate(config: Config, known: Sequence[dict[str, Any]]) -> dict[str, Any]:
    if not config.drafters:
        raise UserError("no drafters to evaluate: list them under drafters in the config")
    ranks.from_first(lambda: check_writable(config.results_dir))
    cache = ranks.in_turn(lambda: fitting_cache(config))
    failures: Failures = {}
    asked = tuple(spec for spec in config.drafters if all(spec.name != entry["name"] for entry in known))
    new = judge_drafters(config.model_copy(update={"drafters": asked}), cache, failures)
    judged = [*known, *new]
    results = {
        "schema_version": 1,
        "name": config.name,
        "cache": {
            "fingerprint": cache.manifest.fingerprint(),
            "target": cache.manifest.settings["target"]["model"],
            "samples": len(cache.samples),
            "completion_tokens": sum(len(sample.completion_ids) for sample in cache.samples),
            "greedy_agreement": cache.greedy_agreement(),
            "settings": cache.manifest.settings,
            "provenance": cache.manifest.provenance,
        },
        "drafters": judged,
        "failed": [
            {"name": spec.name, "checkpoint": spec.checkpoint, "error": str(failures[spec.name])}
            for spec in config.drafters
            if spec.name in failures
        ],
        "comparisons": compare(judged, config.evaluate),
        # Without the server, whose URL may hold a password.
        "config": config.model_dump(mode="json", exclude={"completions": {"server"}}),
        "provenance": {
            "device": device_name(pick_device(config.evaluate.device)),
            "dtype": config.evaluate.dtype,
            "software": software(),
            "commit": commit(),
            "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "bootstrap": config.evaluate.bootstrap,
            "seed": config.evaluate.seed,
        },
    }
    ranks.from_first(lambda: _write(results, new, cache, config))
    return results


def _write(results: dict[str, Any], new: Sequence[dict[str, Any]], cache: Cache, config: Config) -> None:
    write_report(results, config.results_dir)
    page = html_report(results, cache.samples, piece_decoder(cache.folder, config.target))
    write_atomically(config.results_dir / "report.html", page)
    append_history({**results, "drafters": new}, config.results_dir.parent / "history.jsonl")


def judge_drafters(config: Config, cache: Cache, failures: Failures) -> list[dict[str, Any]]:
    """The entries in the results of the config's drafters, judged from `cache`, whichever config it was made with.

    One that fails is noted in `failures` instead; raises the first one's error when all do.
    """
    if config.evaluate.width > cache.manifest.vocab_size:
        raise UserError(
            f"evaluate.width {config.evaluate.width} is above the vocabulary of {cache.manifest.vocab_size}"
        )
    device, dtype = pick_device(config.evaluate.device), DTYPES[config.evaluate.dtype]
    drafters, weights = ranks.in_turn(lambda: _checked(config, cache.manifest, failures))
    shared = Counter(layer for _, drafter in drafters for layer in set(drafter.target_layer_ids))
    cache.hold([layer for layer, users in shared.items() if users > 1], free_bytes(torch.device("cpu")) // 4)
    embedding, lm_head = cache.head()
    # The embedding stays as it is stored: of a large vocabulary few rows are looked up, and they are cast then.
    embedding, lm_head = embedding.to(device), lm_head.to(device, dtype)

    part = cache.part(ranks.rank(), ranks.size())

    def judge(spec: DrafterSpec, drafter_config: DrafterConfig, advance: Callable[[int], None]) -> Walked:
        drafter = load_drafter(spec, drafter_config, device, dtype)
        return walk_samples(drafter, part, embedding, lm_head, config.evaluate, advance)

    own = _side_by_side(judge, drafters, part, _workers(len(drafters), weights * dtype.itemsize, device), failures)
    walked = _from_all_ranks(own, len(cache.samples), failures)
    return [
        summarise(spec, drafter_config, cache.samples, *walked[spec.name], config.evaluate)
        for spec, drafter_config in drafters
        if spec.name in walked
    ]


def fitting_cache(config: Config) -> Cache:
    """The config's cache, open. Raises UserError where it is not there, not whole, or of something else."""
    cache = Cache(config.cache_dir)
    _check_cache(cache, config)
    return cache


def _from_all_ranks(own: dict[str, Walked], samples: int, failures: Failures) -> dict[str, Walked]:
    """Each drafter's walks of all samples; one that failed on any rank has failed."""
    everywhere = ranks.gather((own, failures))
    for _, failed in everywhere:
        for name in failed.keys() - failures.keys():
            failures[name] = failed[name]
            if ranks.rank() == 0:
                say(f"{name} failed: {failed[name]}")
    whole: dict[str, Walked] = {}
    for name in own.keys() - failures.keys():
        walks: list[list[Walk]] = [[] for _ in range(samples)]
        expected = None if own[name][1] is None else np.full(samples, np.nan)
        for rank, (parts, _) in enumerate(everywhere):
            walks[rank :: len(everywhere)] = parts[name][0]
            if expected is not None:
                expected[rank :: len(everywhere)] = parts[name][1]
        whole[name] = walks, expected
    if failures and not whole:
        raise next(iter(failures.values()))
    return whole


def check_writable(folder: Path) -> None:
    """Make the folder of results; raises UserError where nothing can be written there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise UserError(f"{folder}: results cannot be written there ({os.strerror(error.errno or 0)})") from None


def _check_cache(cache: Cache, config: Config) -> None:
    different = differences(cache.manifest.settings, config.cache_settings())
    if different:
        raise UserError(
            f"{cache.folder} is the cache of something else: {different[0]}\n"
            "point cache_dir at the right cache, or extract again under another name"
        )


def _checked(config: Config, manifest: Manifest, failures: Failures) -> tuple[list[Drafter], int]:
    """The drafters whose checkpoints can be judged from the cache, and the most weights that one of them has."""
    drafters: list[Drafter] = []
    weights = 0
    for spec in config.drafters:
        try:
            drafter_config = read_config(spec)
            check_fits(spec, drafter_config, manifest, config.evaluate.width)
            weights = max(weights, check_weights(spec, drafter_config))
        except UserError as error:
            _fail(spec, error, failures, len(config.drafters))
        else:
            drafters.append((spec, drafter_config))
    return drafters, weights


def _fail(spec: DrafterSpec, error: UserError | RunError, failures: Failures, drafters: int) -> None:
    """Note that a drafter failed, and say so while others go on; raise where none is left to go on."""
    failures[spec.name] = error
    if len(failures) == drafters:
        first = next(iter(failures.values()))
        raise (
            first
            if drafters == 1
            else type(first)(f"none of the {drafters} drafters can be judged; the first: {first}")
        )
    if ranks.rank() == 0:
        say(f"{spec.name} failed, the others go on: {error}")


def _workers(drafters: int, weight_bytes: int, device: torch.device) -> int:
    """How many drafters to judge at a time: on a CPU as many as there are cores and a quarter of the memory allow.

    A round's matrix products are small, so that cores that work on one each get more done than all on the same.
    """
    if device.type != "cpu":
        return 1
    return max(1, min(drafters, torch.get_num_threads(), free_bytes(device) // 4 // weight_bytes))


def _side_by_side(
    judge: Callable[[DrafterSpec, DrafterConfig, Callable[[int], None]], Walked],
    drafters: Sequence[Drafter],
    cache: Cache,
    workers: int,
    failures: Failures,
) -> dict[str, Walked]:
    """`judge` for every drafter, in `workers` threads that share the cores; those that fail are left out."""
    threads, stop, failed_before = torch.get_num_threads(), Event(), len(failures)
    total = sum(len(sample.completion_ids) for sample in cache.samples)

    def work(spec: DrafterSpec, drafter_config: DrafterConfig) -> Walked:
        torch.set_num_threads(max(1, threads // workers))
        with bar(spec.name, total) as advance:

            def step(amount: int) -> None:
                if stop.is_set():
                    raise CancelledError
                advance(amount)

            return judge(spec, drafter_config, step)

    walked = {}
    with bars("anchors") as bar, ThreadPoolExecutor(workers) as pool:
        pending = [(drafter, pool.submit(work, *drafter)) for drafter in drafters]
        try:
            for (spec, _), future in pending:
                try:
                    walked[spec.name] = future.result()
                except (UserError, RunError) as error:
                    named = type(error)(f"{spec.name} ({spec.checkpoint}): {error}")
                    _fail(spec, named, failures, failed_before + len(drafters))
                except (MemoryError, RuntimeError) as error:
                    if not out_of_memory(error):
                        raise
                    named = RunError(f"{spec.name} ({spec.checkpoint}): out of memory; {reason(error)}")
                    _fail(spec, named, failures, failed_before + len(drafters))
        finally:
            stop.set()
            pool.shutdown(wait=True, cancel_futures=True)
            torch.set_num_threads(threads)
    return walked
