"""doctor tells what an extraction would run into; extract refuses the same before it loads a weight."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path

import pytest
import torch
from conftest import write_config
from typer.testing import CliRunner

from dflash_eval import gpu_memory
from dflash_eval.cli import app
from dflash_eval.config import load_config
from dflash_eval.doctor import doctor, server_answers
from dflash_eval.errors import UserError
from dflash_eval.extract import extract
from dflash_eval.gpu_memory import gpu_processes, needed_bytes
from dflash_eval.target import TargetFiles, how_to_have, load_target, skeleton

GIB = 2**30


@pytest.fixture
def nvidia_smi(tmp_path, monkeypatch):
    """Put an nvidia-smi on the PATH that prints `text`."""

    def put(text: str) -> None:
        folder = tmp_path / "bin"
        folder.mkdir(exist_ok=True)
        script = folder / "nvidia-smi"
        script.write_text(f"#!{sys.executable}\nprint({text!r}, end='')\n")
        script.chmod(0o755)
        monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)

    return put


@pytest.fixture
def one_gpu(monkeypatch):
    """A GPU that is not there: `free` of 49 GiB are free."""

    def put(free: float) -> None:
        for module in ("gpu_memory", "doctor"):
            monkeypatch.setattr(f"dflash_eval.{module}.pick_device", lambda _: torch.device("cuda", 0))
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (int(free * GIB), 49 * GIB))
        monkeypatch.setattr("dflash_eval.doctor.device_name", lambda _: "a GPU")

    return put


@pytest.fixture
def config(tiny, tmp_path):
    return load_config(write_config(tmp_path, tiny.target, [("a", tiny.drafter)]))


def page(config) -> tuple[int, str]:
    lines: list[str] = []
    return doctor(config, lines.append), "\n".join(lines)


def test_a_machine_that_has_all_is_told_so(config):
    wrong, said = page(config)
    assert wrong == 0
    for part in ("torch", "kernels: attention", "disk: ", "GPU memory is held by" if gpu_processes() else "nvidia-smi"):
        assert part in said
    assert CliRunner().invoke(app, ["doctor", "-c", str(config.cache_dir.parent / "config.yaml")]).exit_code == 0


def test_who_holds_the_gpus_is_read_from_nvidia_smi(nvidia_smi):
    nvidia_smi("4242, sglang::scheduler_TP0, 48128\n77, /usr/bin/python3, 600\n9, [Not Found], [N/A]\n")
    found = gpu_processes()
    assert [(process.pid, process.bytes) for process in found] == [(4242, 47 * GIB), (77, 600 << 20), (9, 0)]
    assert found[0].holds(49 * GIB) == "sglang::scheduler_TP0, pid 4242, holds 47.0 GiB of 49.0 GiB"
    nvidia_smi("")
    assert gpu_processes() == []


def test_no_nvidia_smi_is_not_nobody(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    assert gpu_processes() is None


def test_extract_names_who_holds_the_gpu_before_it_loads_the_target(config, one_gpu, nvidia_smi, monkeypatch):
    monkeypatch.setattr("dflash_eval.extract.load_target", lambda *_: pytest.fail("loaded the target"))
    one_gpu(free=0.001)
    nvidia_smi("4242, sglang::scheduler, 48128\n")
    with pytest.raises(UserError) as error:
        extract(config, say=lambda _: None)
    lines = str(error.value).splitlines()
    assert len(lines) == 2
    assert "of GPU memory (weights" in lines[0]
    assert lines[1] == "sglang::scheduler, pid 4242, holds 47.0 GiB of 49.0 GiB: stop it, extract, start it again"
    wrong, said = page(config)
    assert wrong == 1
    assert "sglang::scheduler, pid 4242" in said
    one_gpu(free=40)
    assert page(config)[0] == 0


def test_a_target_larger_than_the_gpu_is_sent_to_several(config, one_gpu, monkeypatch):
    one_gpu(free=49)
    monkeypatch.setattr(gpu_memory, "needed_bytes", lambda *_: (54 * GIB, 4 * GIB))
    with pytest.raises(UserError, match=r"needs 58\.0 GiB(.|\n)*target\.device_map: auto"):
        extract(config, say=lambda _: None)


def test_the_need_is_the_targets_weights_and_grows_with_the_batch(tiny, config):
    files = TargetFiles.find(config.target)
    model = skeleton(files, config.target)
    loaded = load_target(files, config.target).model
    assert needed_bytes(model, files, config, [0])[0] == sum(p.nbytes for p in loaded.parameters())
    twice = config.model_copy(update={"extract": config.extract.model_copy(update={"max_batch_tokens": 2 * 8192})})
    no_stats = config.extract.model_copy(update={"target_stats": False})
    assert needed_bytes(model, files, twice, [0])[1] > needed_bytes(model, files, config, [0])[1]
    assert needed_bytes(model, files, config, [0, 1])[1] > needed_bytes(model, files, config, [0])[1]
    without = config.model_copy(update={"extract": no_stats})
    assert needed_bytes(model, files, without, [0])[1] < needed_bytes(model, files, config, [0])[1]


def test_a_server_that_still_holds_the_gpus_is_in_the_way(tiny, tmp_path, one_gpu, nvidia_smi):
    nvidia_smi("4242, sglang::scheduler, 48128\n")
    with socket.create_server(("127.0.0.1", 0)) as listening:
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        completions = {"source": "server", "server": {"base_url": url}}
        config = load_config(write_config(tmp_path, tiny.target, [("a", tiny.drafter)], completions=completions))
        assert server_answers(url)
        one_gpu(free=0.001)
        wrong, said = page(config)
        assert wrong == 2
        assert "it still runs on the GPUs that the target needs" in said
        one_gpu(free=40)
        wrong, said = page(config)
        assert wrong == 0
        assert "leaves the target room enough" in said
    assert not server_answers(url)
    one_gpu(free=0.001)
    wrong, said = page(config)
    assert wrong == 1
    assert "does not answer" in said


def test_missing_kernels_and_a_small_disk_are_told_with_what_mends_them(tiny_hybrid, tmp_path, monkeypatch):
    path = write_config(tmp_path, tiny_hybrid.target, [("a", tiny_hybrid.drafter)])
    config = load_config(path, ["target.require_kernels=[fla, causal_conv1d]"])
    usage = __import__("shutil").disk_usage(tmp_path)
    monkeypatch.setattr("dflash_eval.doctor.shutil.disk_usage", lambda _: usage._replace(free=10))
    monkeypatch.setattr("dflash_eval.target._version", lambda _: "?")
    monkeypatch.setattr("dflash_eval.target._bound_functions", lambda *_: {
        "chunk_gated_delta_rule": ("fla", "fla"), "recurrent_gated_delta_rule": ("fla", None),
        "causal_conv1d_fn": ("causal_conv1d", "causal_conv1d"), "causal_conv1d_update": ("causal_conv1d", None),
    })  # fmt: skip
    wrong, said = page(config)
    assert wrong == 2
    assert "(pip install causal-conv1d flash-linear-attention); causal_conv1d_update, recurrent" in said
    assert "extract.store: float8" in said


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_cuda_asked_for_and_absent_is_one_plain_line(config):
    asked = load_config(config.cache_dir.parent / "config.yaml", ["target.device=cuda"])
    with pytest.raises(UserError, match="device 'cuda': PyTorch sees 0 CUDA devices here"):
        extract(asked, say=lambda _: None)
    assert page(asked)[0] == 1
    assert not Path(asked.cache_dir, "manifest.json").exists()


def test_kernels_that_are_installed_but_do_not_run_on_the_device_are_told_so(monkeypatch):
    monkeypatch.setattr("dflash_eval.target._version", lambda package: "0.6.0" if package == "fla" else "?")
    assert how_to_have(["fla"]) == "they run on a GPU alone: set target.device"
    assert how_to_have(["causal_conv1d", "fla"]) == "install what is missing (pip install causal-conv1d)"
