"""Do a target's kernels give other states than torch's fallbacks? Asked of random weights in a target's shape."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from dflash_eval.bench.extract import Work, shaped_target
from dflash_eval.bench.synthetic import random_samples
from dflash_eval.cache import Sample, write_completions, write_manifest
from dflash_eval.comparison import compare_caches
from dflash_eval.comparison_report import layer_table, verdict
from dflash_eval.machine import pick_device
from dflash_eval.signals import Stop
from dflash_eval.states import plan_shards, write_states
from dflash_eval.target import Target, kernels_of, use_fallbacks

PAIRS = (("kernels", "torch"), ("kernels", "float32"), ("torch", "float32"))


def bench_kernels(
    shape: str, device: str, rows: int, length: int, say: Callable[[str], None]
) -> dict[str, dict[str, Any]]:
    """Extract the same random tokens in bfloat16 with the kernels that are installed, in bfloat16 with torch's
    fallbacks, and in float32 with those, from the same weights; then compare the caches in pairs.

    rows: sequences of `length` tokens. Returns "A against B" → `compare_caches`' result.
    """
    target, layers, _ = shaped_target(shape, pick_device(device))
    target.model.bfloat16()
    samples = random_samples(rows, length // 2, length, target.vocab_size)
    results = {}
    with tempfile.TemporaryDirectory(prefix="dflash-eval-") as folder:
        for way in ("kernels", "torch", "float32"):
            if way == "torch":
                use_fallbacks(target.model)
            if way == "float32":
                target.model.float()
            _extract(Path(folder, way), target, layers, samples)
            used = ", ".join(f"{name} {kernel}" for name, kernel in kernels_of(target.model).items())
            say(f"{way}: {target.model.dtype}, {used}")
        for a, b in PAIRS:
            result = compare_caches(Path(folder, a), Path(folder, b))
            results[f"{a} against {b}"] = result
            say(f"{a} against {b}: {verdict(result)}")
            header, lines = layer_table(result, where=False)
            for line in [header, *lines]:
                say("  " + "  ".join(f"{cell:>14}" for cell in line))
    return results


def _extract(folder: Path, target: Target, layers: list[int], samples: Sequence[Sample]) -> None:
    folder.mkdir()
    dtype = str(target.model.dtype).removeprefix("torch.")
    manifest = Work(target, layers, dtype, [[sample] for sample in samples]).manifest(stats=True)
    manifest.provenance["kernels"] = kernels_of(target.model)
    times = write_states(folder, manifest, samples, target, plan_shards(manifest, samples, set()), stop=Stop())
    manifest.shards, manifest.complete = times.shards, True
    write_completions(folder, samples)
    write_manifest(folder, manifest)
