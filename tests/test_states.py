"""The pipeline from forward to shard: what ends it, what it survives, and what it never computes."""

from __future__ import annotations

import functools
import inspect
import os
import signal
import subprocess
import sys
import threading
import time
import types

import numpy as np
import pytest
import torch
from conftest import write_config
from test_extract import KILLED, by_sample, quiet
from transformers.integrations import hub_kernels
from transformers.models.qwen3_5 import modeling_qwen3_5

from dflash_eval import cache as cachefile
from dflash_eval.bench.matmuls import Matmuls
from dflash_eval.cache import Cache, from_float8, to_float8
from dflash_eval.config import load_config
from dflash_eval.errors import RunError, Stopped, UserError
from dflash_eval.evaluate import evaluate
from dflash_eval.forward import compile_layers, forward
from dflash_eval.ranks import exit_status
from dflash_eval.signals import stoppable
from dflash_eval.states import _Worker
from dflash_eval.target import TargetFiles, _plain, kernels_of, load_target


@pytest.fixture
def config(tiny, tmp_path):
    return load_config(write_config(tmp_path, tiny.target, [("trained", tiny.drafter)], extract=KILLED))


def loaded(config):
    return load_target(TargetFiles.find(config.target), config.target)


def test_nothing_after_the_last_wanted_layer_is_computed_unless_the_head_is_wanted(tiny):
    target, samples = loaded(tiny.config), Cache(tiny.folder / "cache").samples[:2]
    flops = {}
    for layers, sampling in (((0,), None), ((0, 2), None), ((0, 5), None), ((0,), cachefile.Sampling())):
        with Matmuls() as counted:
            forward(target, samples, layers, "float32", sampling)
        flops[layers, sampling is not None] = counted.flops
    one_layer = flops[(0,), False]
    assert flops[(0, 2), False] == 3 * one_layer
    assert flops[(0, 5), False] == 6 * one_layer
    rows = sum(len(sample.completion_ids) for sample in samples)
    assert flops[(0,), True] == 6 * one_layer + 2 * rows * target.hidden_size * target.vocab_size


def test_the_head_in_pieces_gives_the_same_statistics(tiny, monkeypatch):
    target, samples = loaded(tiny.config), Cache(tiny.folder / "cache").samples
    whole = forward(target, samples, [0], "float32", cachefile.Sampling())
    monkeypatch.setattr("dflash_eval.forward.HEAD_ROWS", 7)
    pieces = forward(target, samples, [0], "float32", cachefile.Sampling())
    assert torch.equal(whole["argmax"], pieces["argmax"])
    torch.testing.assert_close(whole["logprob"], pieces["logprob"], equal_nan=True)


def test_memory_that_runs_out_halves_the_batch_said_once_and_the_rest_goes_on(tiny, tmp_path, monkeypatch, capsys):
    config = load_config(write_config(tmp_path, tiny.target, [("trained", tiny.drafter)]))

    def scarce(target, batch, *rest):
        if len(batch) * max(map(len, batch)) > 150:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return forward(target, batch, *rest)

    monkeypatch.setattr("dflash_eval.states.forward", scarce)
    cache = Cache(quiet(config))
    assert capsys.readouterr().err.count("out of memory") == 1
    first = Cache(tiny.folder / "cache")
    for sample in first.samples:
        torch.testing.assert_close(
            cache.features(sample.id, [0, 4]), first.features(sample.id, [0, 4]), rtol=1e-4, atol=1e-4
        )


def test_a_sequence_that_alone_is_too_much_ends_the_run_plainly(config, monkeypatch):
    def never(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("dflash_eval.states.forward", never)
    with pytest.raises(RunError, match="out of memory with one sequence of"):
        quiet(config)
    assert not list(config.cache_dir.glob(".states*"))


def test_an_error_in_writing_stops_the_run_at_once_and_keeps_whole_shards(config, monkeypatch):
    written, computed = cachefile.ShardWriter.write, []

    def full(self, first, columns):
        if self.path.name == "states-00001.h5":
            raise OSError(28, "No space left on device")
        written(self, first, columns)

    def slow(*arguments):
        time.sleep(0.05)
        computed.append(1)
        return forward(*arguments)

    monkeypatch.setattr(cachefile.ShardWriter, "write", full)
    monkeypatch.setattr("dflash_eval.states.forward", slow)
    with pytest.raises(UserError, match="no space left on the disk; finished shards are kept"):
        quiet(config)
    assert len(computed) < 5  # of 8 batches
    assert [path.name for path in config.cache_dir.glob("*states-*")] == ["states-00000.h5"]


def test_the_worker_hands_on_its_error_and_does_not_block_its_giver():
    before = threading.active_count()

    def give() -> None:
        with _Worker() as worker:
            for _ in range(100):
                worker.do(lambda: 1 / 0)

    with pytest.raises(ZeroDivisionError):
        give()
    assert threading.active_count() == before


def test_ctrl_c_finishes_the_shard_in_work_and_the_same_command_resumes(config):
    """Sent while a forward runs, to the real command."""
    code = f"""
import os, signal, sys
import dflash_eval.states as states
from dflash_eval.cli import main
calls, real = [], states.forward
def forward(*arguments):
    calls.append(1)
    if len(calls) == 3:
        os.kill(os.getpid(), signal.SIGINT)
    return real(*arguments)
states.forward = forward
sys.argv = ["dflash-eval", "extract", "-c", {str(config.cache_dir.parent / "config.yaml")!r}]
main()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 130, done.stderr
    assert "finishing the shard in work" in done.stderr
    assert done.stderr.strip().endswith("run the same command to resume")
    assert len(cachefile.read_manifest(config.cache_dir).shards) == len(list(config.cache_dir.glob("*.h5"))) == 3
    quiet(config)
    assert Cache(config.cache_dir).manifest.complete


def test_sigterm_finishes_the_shard_in_work_too(config, monkeypatch):
    def forward_and_signal(*arguments):
        os.kill(os.getpid(), signal.SIGTERM)
        return forward(*arguments)

    monkeypatch.setattr("dflash_eval.states.forward", forward_and_signal)
    with pytest.raises(Stopped, match="same command") as stopped:
        quiet(config)
    assert exit_status(stopped.value) == 143
    assert [path.name for path in config.cache_dir.glob("*states-*")] == ["states-00000.h5"]


def test_a_signal_outside_of_a_shard_stops_at_once_and_a_second_one_kills():
    def signalled() -> None:
        with stoppable():
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(1)

    with pytest.raises(Stopped) as stopped:
        signalled()
    assert stopped.value.signal == signal.SIGTERM
    code = """
import os, signal, time
from dflash_eval.ranks import exit_status
from dflash_eval.signals import stoppable
with stoppable() as stop:
    stop.patient = True
    os.kill(os.getpid(), signal.SIGINT)
    os.kill(os.getpid(), signal.SIGINT)  # the same Ctrl-C, passed on by a launcher
    time.sleep(1.1)
    print("still here", flush=True)
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(5)
    print("survived", flush=True)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "still here\n"
    assert done.returncode == -signal.SIGINT


def test_a_shard_that_was_not_listed_before_the_kill_is_adopted(config):
    quiet(config)
    manifest = cachefile.read_manifest(config.cache_dir)
    listed, manifest.complete = manifest.shards, False
    manifest.shards = listed[:1]
    cachefile.write_manifest(config.cache_dir, manifest)
    before = {path: path.stat().st_mtime_ns for path in config.cache_dir.glob("states-*.h5")}
    torn = config.cache_dir / listed[-1].file
    torn.write_bytes(torn.read_bytes()[:100])
    quiet(config)
    assert cachefile.read_manifest(config.cache_dir).shards == listed
    changed = {path for path, when in before.items() if path.stat().st_mtime_ns != when}
    assert changed == {torn}


def test_compiled_layers_say_the_same_and_a_failing_compiler_is_told(tiny, monkeypatch):
    target, samples = loaded(tiny.config), Cache(tiny.folder / "cache").samples
    plain = forward(target, samples, [0, 5], "float32", None)
    real, said = torch.compile, []
    monkeypatch.setattr(torch, "compile", lambda call: real(call, backend="eager"))
    assert compile_layers(target, lambda: forward(target, samples, [5], "float32", None), said.append) > 0
    assert not said
    assert all("forward" in vars(layer) for layer in target.layers)
    uncompiled = loaded(tiny.config)
    for batch in (samples, samples[:1], samples[2:4]):
        ours, theirs = (forward(model, batch, [0, 5], "float32", None) for model in (target, uncompiled))
        torch.testing.assert_close(ours, theirs)
    monkeypatch.setattr(torch, "compile", lambda call: real(call, backend=lambda *_: 1 / 0))
    torch._dynamo.reset()
    target = loaded(tiny.config)
    compile_layers(target, lambda: forward(target, samples, [5], "float32", None), said.append)
    assert "uncompiled" in said[0]
    torch.testing.assert_close(forward(target, samples, [0, 5], "float32", None), plain)


@pytest.fixture
def kernel_calls(monkeypatch):
    """Qwen3.5's chunked rule bound as to an installed package, and the list of the calls that reach it."""
    fallback, calls = inspect.unwrap(_plain(modeling_qwen3_5.torch_chunk_gated_delta_rule)), []

    @functools.wraps(fallback)
    def chunk_gated_delta_rule(query, *arguments, **named):
        calls.append(len(query))
        return fallback(query, *arguments, **named)

    chunk_gated_delta_rule.__module__ = "kernelpack.ops"
    package = types.ModuleType("kernelpack")
    package.chunk_gated_delta_rule = chunk_gated_delta_rule
    monkeypatch.setitem(sys.modules, "kernelpack", package)
    monkeypatch.setattr(hub_kernels, "_KERNELS_INTERNAL_PATH_MAPPINGS", {})
    bound = hub_kernels.use_kernel_func_from_hub_with_fallback("chunk_gated_delta_rule", "kernelpack")(fallback)
    monkeypatch.setattr(modeling_qwen3_5, "torch_chunk_gated_delta_rule", bound)
    return calls


def test_compiled_layers_call_the_kernels_that_the_manifest_names(tiny_hybrid, kernel_calls, monkeypatch):
    """Tracing that passes for an export, as any does in torch 2.11, makes transformers take its torch fallback."""
    monkeypatch.setattr(hub_kernels, "is_torchdynamo_exporting", torch.compiler.is_compiling)
    real = torch.compile
    monkeypatch.setattr(torch, "compile", lambda call: real(call, backend="eager"))
    torch._dynamo.reset()
    target, samples = loaded(tiny_hybrid.config), Cache(tiny_hybrid.folder / "cache").samples
    assert target.kernels["chunk_gated_delta_rule"].startswith("kernelpack")
    plain = forward(target, samples, [0, 2], "float32", None)
    uncompiled = list(kernel_calls)
    assert uncompiled
    kernel_calls.clear()
    compile_layers(target, lambda: forward(target, samples, [2], "float32", None), pytest.fail)
    compiled = forward(target, samples, [0, 2], "float32", None)
    assert kernel_calls == 2 * uncompiled
    torch.testing.assert_close(compiled, plain)
    assert kernels_of(target.model)["chunk_gated_delta_rule"].startswith("kernelpack")


def test_kernels_torch_takes_the_fallbacks_for_one_target_and_no_other(tiny_hybrid, kernel_calls):
    samples = Cache(tiny_hybrid.folder / "cache").samples
    target = loaded(load_config(tiny_hybrid.config_path, ["target.kernels=torch"]))
    assert target.kernels["chunk_gated_delta_rule"] == "torch"
    fallback = forward(target, samples, [0, 2], "float32", None)
    assert not kernel_calls
    target = loaded(tiny_hybrid.config)
    assert target.kernels["chunk_gated_delta_rule"].startswith("kernelpack")
    torch.testing.assert_close(forward(target, samples, [0, 2], "float32", None), fallback)
    assert kernel_calls


def test_a_package_that_does_not_run_on_the_targets_device_is_not_named(tiny_hybrid, kernel_calls, monkeypatch):
    """transformers from 5.25 on takes the torch fallback there."""
    devices = getattr(hub_kernels, "_PACKAGE_SUPPORTED_DEVICES", None)
    if devices is None:
        pytest.skip("this transformers calls an installed package on every device")
    monkeypatch.setitem(devices, "kernelpack", ("cuda",))
    ours = inspect.unwrap(_plain(modeling_qwen3_5.torch_chunk_gated_delta_rule))
    bind = hub_kernels.use_kernel_func_from_hub_with_fallback("chunk_gated_delta_rule", "kernelpack")
    monkeypatch.setattr(modeling_qwen3_5, "torch_chunk_gated_delta_rule", bind(ours))
    target = loaded(tiny_hybrid.config)
    assert target.kernels["chunk_gated_delta_rule"] == "torch"
    assert kernels_of(target.model, torch.device("cuda"))["chunk_gated_delta_rule"].startswith("kernelpack")
    forward(target, Cache(tiny_hybrid.folder / "cache").samples, [0], "float32", None)
    assert not kernel_calls


# Reduced storage


def test_float8_keeps_every_tokens_scale_and_three_bits_of_each_number():
    states = torch.randn(50, 64) * torch.logspace(-12, 12, 50)[:, None]
    states[7] = 0
    bits, scale = to_float8(states.bfloat16())
    back = from_float8(bits, scale, torch.float32)
    assert bits.dtype == torch.uint8
    assert scale.dtype == torch.float32
    largest = states.abs().amax(1, keepdim=True)
    assert (
        (back - states).abs() <= states.abs() / 14 + largest / 448 / 512 * 1.1
    ).all()  # half a step, bfloat16's added
    assert (back[7] == 0).all()


@pytest.mark.parametrize(("store", "relative"), [("float8", 0.05), ("bfloat16", 0.005)])
def test_reduced_storage_is_read_back_near_enough_to_judge_by(tiny, tmp_path, store, relative):
    path = write_config(tmp_path, tiny.target, [("trained", tiny.drafter)], extract={"store": store})
    config = load_config(path)
    cache, exact = Cache(quiet(config)), Cache(tiny.folder / "cache")
    layers = exact.manifest.layers
    for sample in exact.samples:
        ours, theirs = cache.features(sample.id, layers), exact.features(sample.id, layers)
        assert ours.dtype == (torch.float32 if store == "float8" else torch.bfloat16)
        assert 0 < (ours.float() - theirs).norm() / theirs.norm() < relative
    size = cache.manifest.shards[0].bytes / exact.manifest.shards[0].bytes
    assert size < (0.35 if store == "float8" else 0.6)
    held = Cache(config.cache_dir)
    held.hold(layers, 1 << 30)
    assert torch.equal(held.features("p1", layers), cache.features("p1", layers))
    tau = evaluate(config)["drafters"][0]["tau"]
    assert abs(tau - evaluate(tiny.config)["drafters"][0]["tau"]) < 0.5
    np.testing.assert_array_equal(by_sample(config.cache_dir, "argmax"), by_sample(tiny.folder / "cache", "argmax"))
    with pytest.raises(UserError, match=r"extract\.store"):
        quiet(load_config(path, ["extract.store=null"]))
