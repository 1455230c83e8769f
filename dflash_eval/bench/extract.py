"""How fast `extract` is: against the machine's own matrix products, and against transformers' plain forward."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Qwen3_5TextConfig

from dflash_eval.bench.ceiling import matmul_ceiling, synchronize
from dflash_eval.bench.matmuls import Matmuls
from dflash_eval.bench.synthetic import SHAPES, random_samples
from dflash_eval.cache import Manifest, Sample, Shard, ShardWriter
from dflash_eval.config import Config
from dflash_eval.errors import UserError
from dflash_eval.extract import wanted_layers
from dflash_eval.forward import compile_layers, forward
from dflash_eval.machine import device_name, out_of_memory, pick_device
from dflash_eval.signals import Stop
from dflash_eval.states import Times, plan_shards, write_states
from dflash_eval.target import (
    Target,
    TargetFiles,
    find_layers,
    kernels_of,
    load_target,
    require_kernels,
    restore_kernels,
)

Say = Callable[[str], None]
# What the drafter's shape (synthetic.py) leaves open; layers are linear attention but for each fourth.
TARGETS: dict[str, dict[str, Any]] = {
    "qwen3.6-27b": {
        "num_hidden_layers": 64, "num_attention_heads": 24, "num_key_value_heads": 4, "head_dim": 256,
        "linear_num_key_heads": 16, "linear_num_value_heads": 48, "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
    },
    "qwen3.5-0.8b": {
        "num_hidden_layers": 24, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 256,
        "linear_num_key_heads": 16, "linear_num_value_heads": 16, "linear_key_head_dim": 128,
        "linear_value_head_dim": 128, "tie_word_embeddings": True,
    },
    "tiny": {
        "num_hidden_layers": 8, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
        "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
    },
}  # fmt: skip
PROMPT_TOKENS = 128
SHARD_BYTES = 2**31


@dataclass(frozen=True)
class Work:
    """What is measured: so many batches of random tokens, and which layers of the target are kept."""

    target: Target
    layers: list[int]
    dtype: str
    batches: list[list[Sample]]

    @property
    def tokens(self) -> int:
        return sum(len(sample) for batch in self.batches for sample in batch)

    @property
    def device(self) -> torch.device:
        return self.target.device

    def manifest(self, stats: bool) -> Manifest:
        rows, length = len(self.batches[0]), len(self.batches[0][0])
        return Manifest(
            name="bench", settings={"completions": {"temperature": 0.0}}, layers=self.layers,
            hidden_size=self.target.hidden_size, vocab_size=self.target.vocab_size, dtype=self.dtype,
            target_stats=stats, batch_tokens=rows * length, shard_bytes=SHARD_BYTES, provenance={},
        )  # fmt: skip


def bench_extract(
    where: Config | str, device: str, batches: int, batch_rows: int, length: int, profile: Path | None, say: Say
) -> dict[str, Any]:
    """Time the plain forward, which writes nothing, and ours with its shards on disk, one after the other in this
    process; `say` gets a line a figure, which the result holds too.

    where: a config, whose target is loaded, or the name of a shape, whose weights are random. batches of `batch_rows`
    random sequences of `length` tokens. profile: a folder for the profiler's tables; then the parts of ours are timed
    too.
    """
    target, layers, dtype = (
        _of_config(where) if isinstance(where, Config) else shaped_target(where, pick_device(device))
    )
    samples = random_samples(batches * batch_rows, min(PROMPT_TOKENS, length // 2), length, target.vocab_size)
    work = Work(target, layers, dtype, [samples[i : i + batch_rows] for i in range(0, len(samples), batch_rows)])
    ceiling = matmul_ceiling(work.device, target.model.dtype)
    say(f"{device_name(work.device)}, {dtype}: {_rate(ceiling)} in a large matrix product")
    say(f"{batches} batches of {batch_rows} x {length:,} tokens, layers {', '.join(map(str, layers))} kept; kernels: "
        + ", ".join(f"{name} {kernel}" for name, kernel in target.kernels.items()))  # fmt: skip
    figures: dict[str, Any] = {"ceiling": ceiling, "tokens": work.tokens, "kernels": target.kernels}

    def report(name: str, key: str, flops: float, seconds: float, more: str = "") -> None:
        rate = work.tokens / seconds
        figures[key] = {"seconds": seconds, "tokens_per_second": rate, "flops": flops, "peak_bytes": _peak(work.device)}
        peak = f", peak {_peak(work.device) / 2**30:.1f} GiB" if work.device.type == "cuda" else ""
        against = (
            f", {rate / figures['plain']['tokens_per_second']:.2f}x plain"
            if key != "plain" and "plain" in figures
            else ""
        )
        done = flops * len(work.batches) / seconds
        say(f"{name}: {rate:,.0f} tokens/s, {_rate(done)}, {done / ceiling:.0%} of the ceiling{against}{peak}{more}")

    try:
        flops = _flops(lambda: _plain(work, work.batches[:1]))
        _reset(work.device)
        report("plain output_hidden_states forward, nothing written", "plain", flops, _plain(work, work.batches))
    except (MemoryError, RuntimeError) as error:
        if not out_of_memory(error):
            raise
        say("plain output_hidden_states forward: out of memory")
    flops = _flops(lambda: _forwards(work, work.batches[:1]))
    with_head = _flops(lambda: _write(work, work.batches[:1], stats=True)) if profile is not None else 0.0
    if profile is not None:
        _reset(work.device)
        report("ours, uncompiled, nothing copied", "eager", flops, _forwards(work, work.batches))
    if work.device.type == "cuda":
        figures["compile_seconds"] = compile_layers(target, lambda: _forwards(work, work.batches[:1]), say)
        say(f"compiling the layers, apart from the rest: {figures['compile_seconds']:.1f} s")
        _write(work, work.batches[:2])  # takes the pinned memory
    if profile is not None:
        _parts(work, flops, with_head, report, profile)
    _reset(work.device)
    times = _write(work, work.batches)
    figures["shares"] = {"writer_idle": times.writer_idle / times.seconds,
                         "target_waited": times.target_waited / times.seconds}  # fmt: skip
    written = sum(shard.bytes for shard in times.shards) / times.seconds
    shares = f"the target waited for the writer {figures['shares']['target_waited']:.1%} of the time, "
    shares += f"the writer for the target {figures['shares']['writer_idle']:.1%}"
    report("ours, shards on disk", "ours", flops, times.seconds, f", {written / 1e9:.2f} GB/s written\n  {shares}")
    return figures


def shaped_target(shape: str, device: torch.device) -> tuple[Target, list[int], str]:
    """A target of random weights in TARGETS[shape], the layers that its drafter reads, and the target's dtype."""
    if shape not in TARGETS:
        raise UserError(f"--shape {shape}: not one of {', '.join(TARGETS)}")
    restore_kernels()
    drafter = SHAPES[shape]
    kept = {key: drafter[key] for key in ("vocab_size", "hidden_size", "intermediate_size")}
    dtype = "bfloat16" if device.type == "cuda" else "float32"
    with torch.device(device), torch.no_grad():
        model = AutoModelForCausalLM.from_config(
            Qwen3_5TextConfig(**kept, **TARGETS[shape]), dtype=getattr(torch, dtype)
        ).eval()
    return (
        Target(model, find_layers(model), device, kernels_of(model)),
        drafter["dflash_config"]["target_layer_ids"],
        dtype,
    )


def _of_config(config: Config) -> tuple[Target, list[int], str]:
    target, layers = load_target(TargetFiles.find(config.target), config.target), wanted_layers(config)
    require_kernels(target.model, config.target)
    return target, layers, config.target.dtype


@torch.inference_mode()
def _plain(work: Work, batches: Sequence[Sequence[Sample]]) -> float:
    """Seconds of the forward that one would write: all layers' states, all positions' logits."""
    synchronize(work.device)
    start = time.perf_counter()
    for batch in batches:
        ids = torch.tensor([sample.input_ids for sample in batch], device=work.device)
        work.target.model(input_ids=ids, output_hidden_states=True, use_cache=False)
    synchronize(work.device)
    return time.perf_counter() - start


def _forwards(work: Work, batches: Sequence[Sequence[Sample]]) -> float:
    """Seconds of our forward alone: the states stay where they are, and are dropped."""
    synchronize(work.device)
    start = time.perf_counter()
    for batch in batches:
        forward(work.target, batch, work.layers, work.dtype, None)
    synchronize(work.device)
    return time.perf_counter() - start


def _write(
    work: Work, batches: Sequence[Sequence[Sample]], stats: bool = False, open_shard: Callable[..., Any] = ShardWriter
) -> Times:
    samples, manifest = [sample for batch in batches for sample in batch], work.manifest(stats)
    with tempfile.TemporaryDirectory(prefix="dflash-eval-") as folder:
        return write_states(
            Path(folder), manifest, samples, work.target, plan_shards(manifest, samples, set()),
            stop=Stop(), open_shard=open_shard,
        )  # fmt: skip


class _Nowhere:
    """A shard that is not written."""

    def __init__(self, path: Path, samples: Sequence[Sample], *_: Any) -> None:
        self.samples = samples

    def write(self, first: int, columns: dict[str, torch.Tensor]) -> None:
        pass

    def sync(self) -> None:
        pass

    def close(self) -> Shard:
        return Shard("", len(self.samples), sum(map(len, self.samples)), 0, "")

    def discard(self) -> None:
        pass


class _Unsettled(ShardWriter):
    """A shard that is written but neither hashed nor made durable."""

    def sync(self) -> None:
        pass

    def close(self) -> Shard:
        self.discard()
        return Shard("", len(self.samples), int(self.offsets[-1]), 0, "")


def _parts(work: Work, flops: float, with_head: float, report: Callable[..., None], folder: Path) -> None:
    """Ours with one step more at a time, and the profiler's tables of one batch of each kind."""
    _reset(work.device)
    synchronize(work.device)
    start = time.perf_counter()
    forward(work.target, work.batches[0], work.layers, work.dtype, None)
    launched = time.perf_counter() - start
    synchronize(work.device)
    whole = time.perf_counter() - start
    more = f"\n  one batch: launched in {launched:.3f} s, done in {whole:.3f} s"
    report("ours, nothing copied", "computed", flops, _forwards(work, work.batches), more)
    for name, key, kind in (
        ("ours, copied and not written", "copied", _Nowhere),
        ("ours, written, neither hashed nor synced", "unsettled", _Unsettled),
    ):
        _reset(work.device)
        times = _write(work, work.batches, open_shard=kind)
        report(name, key, flops, times.seconds)
    _reset(work.device)
    report("ours, with target_stats", "stats", with_head, _write(work, work.batches, stats=True).seconds)
    folder.mkdir(parents=True, exist_ok=True)
    kinds = [torch.profiler.ProfilerActivity.CPU]
    kinds += [torch.profiler.ProfilerActivity.CUDA] if work.device.type == "cuda" else []
    with torch.profiler.profile(activities=kinds) as profiler:
        _forwards(work, work.batches[:1])
    order = "self_cuda_time_total" if work.device.type == "cuda" else "self_cpu_time_total"
    table = profiler.key_averages().table(sort_by=order, row_limit=60, max_name_column_width=90)
    (folder / "extract-profile.txt").write_text(table)


def _flops(run: Callable[[], object]) -> float:
    """The matrix products of `run`, which also warms it up. Those inside attention and recurrence are not seen."""
    with Matmuls() as counted:
        run()
    return counted.flops


def _reset(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def _peak(device: torch.device) -> int:
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0


def _rate(flops: float) -> str:
    return f"{flops / 1e12:,.1f} TFLOP/s" if flops > 1e12 else f"{flops / 1e9:,.1f} GFLOP/s"
