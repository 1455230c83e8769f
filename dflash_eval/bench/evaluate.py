"""How fast `evaluate` is: against the machine's own matrix products, and against the ways one would do without it."""

from __future__ import annotations

import resource
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from dflash_eval.acceptance.tree import accepted_in_tree
from dflash_eval.bench import baselines
from dflash_eval.bench.ceiling import matmul_ceiling, synchronize
from dflash_eval.bench.matmuls import Matmuls
from dflash_eval.bench.synthetic import SHAPES, synthetic
from dflash_eval.cache import DTYPES, Cache
from dflash_eval.config import Config, DrafterSpec
from dflash_eval.drafter.checkpoint import load_drafter, read_config
from dflash_eval.drafter.model import DFlashDrafter
from dflash_eval.drafter.scoring import Scorer
from dflash_eval.errors import UserError
from dflash_eval.evaluate import evaluate
from dflash_eval.judge import judges, walk_samples
from dflash_eval.machine import device_name, pick_device
from dflash_eval.prompts import stop_token_ids
from dflash_eval.sources import resolve
from dflash_eval.target import TargetFiles, load_target, load_tokenizer

T = TypeVar("T")
Say = Callable[[str], None]
HEAP_ANCHORS = 200  # whose trees are grown from a heap; the time for all follows in proportion


def bench_evaluate(config: Config, say: Say, against: bool = False) -> dict[str, Any]:
    """Time drafting and trees of the config's first drafter, and the whole evaluation of all; `say` gets a line a
    figure, which the result holds too.

    against: also run the baselines, which take minutes: the public package's model class block by block, its online
    loop (which loads the target), and a heap for each tree. Their numbers must agree.
    """
    device, dtype = pick_device(config.evaluate.device), DTYPES[config.evaluate.dtype]
    cache, spec = Cache(config.cache_dir), config.drafters[0]
    embedding, head = cache.head()
    embedding, lm_head = embedding.to(device), head.to(device, dtype)
    drafter = load_drafter(spec, read_config(spec), device, dtype)
    ceiling = matmul_ceiling(device, dtype)
    figures: dict[str, Any] = {"device": device_name(device), "dtype": config.evaluate.dtype, "ceiling": ceiling}
    say(f"{figures['device']}, {config.evaluate.dtype}: {_rate(ceiling)} in a large matrix product")

    figures["drafting"] = _drafting(drafter, cache, embedding, lm_head, config, ceiling, say)
    figures["trees"] = _trees(figures["drafting"].pop("scores"), config, say, against)
    del drafter, embedding, lm_head
    _clear(device)
    with tempfile.TemporaryDirectory(prefix="dflash-eval-") as folder:  # not over the results of a real run
        elsewhere = config.model_copy(update={"results_dir": Path(folder, "results")})
        seconds, results = _timed(device, lambda: evaluate(elsewhere))
    figures["evaluate"] = {"seconds": seconds, "peak_bytes": _peak(device)}
    drafters = "1 drafter" if len(config.drafters) == 1 else f"{len(config.drafters)} drafters"
    say(f"evaluate, {drafters}, {len(config.evaluate.budgets)} budgets, from the files to the report: {seconds:.2f} s")
    say(f"peak memory: {_peak(device) / 2**30:.1f} GiB {'of the GPU' if device.type == 'cuda' else 'resident'}")
    if against:
        figures["against"] = _against(config, results["drafters"], seconds, device, dtype, say)
    return figures


def bench_shape(
    shape: str, samples: int, prompt_tokens: int, tokens: int, settings: dict[str, Any], say: Say
) -> dict[str, Any]:
    """`bench_evaluate` on random numbers of a shape; settings: of the config's evaluate section."""
    if shape not in SHAPES:
        raise UserError(f"--shape {shape}: not one of {', '.join(SHAPES)}")
    device = str(pick_device(settings["device"]))
    with tempfile.TemporaryDirectory(prefix="dflash-eval-") as folder:
        config = synthetic(shape, Path(folder), samples, prompt_tokens, tokens, settings, device)
        return bench_evaluate(config, say)


def _drafting(
    drafter: DFlashDrafter,
    cache: Cache,
    embedding: torch.Tensor,
    lm_head: torch.Tensor,
    config: Config,
    ceiling: float,
    say: Say,
) -> dict[str, Any]:
    """Every anchor's block, from the features to the most probable tokens of all its slots."""
    scorer = Scorer(drafter, lm_head, max(config.evaluate.width, *config.evaluate.budgets))
    embedding, n = drafter.embedding(embedding), scorer.n
    counted = Matmuls()

    def draft_all() -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
        parts: tuple[list[Any], list[Any], list[Any]] = ([], [], [])
        for _, judge in judges(drafter, cache, embedding, scorer, config.evaluate, lambda _: None):
            owners, anchors, _ = judge.every_anchor()
            for rows in np.array_split(np.arange(len(anchors)), max(1, len(anchors) // 4096)):
                hidden, tokens, slots = judge.draft(owners[rows], anchors[rows])
                scores = scorer.score(hidden.flatten(0, 1), tokens.flatten())
                parts[0].append(scores.ranks.view(tokens.shape))
                parts[1].append(scores.logprobs.view(*tokens.shape, n))
                parts[2].append(slots)
        return parts

    with torch.inference_mode():
        if lm_head.is_cuda:
            first, _ = _timed(lm_head.device, draft_all)  # compiles the kernels
        with counted:
            seconds, (ranks, logprobs, slots) = _timed(lm_head.device, draft_all)
    anchors = sum(map(len, ranks))
    rate = counted.flops / seconds
    say(
        f"drafting at all {anchors:,} anchors: {seconds:.2f} s, {anchors / seconds:,.0f} anchors/s, {_rate(rate)}, "
        f"{rate / ceiling:.0%} of the ceiling" + (f" (first time {first:.2f} s)" if lm_head.is_cuda else "")
    )
    return {
        "anchors": anchors, "seconds": seconds, "flops": counted.flops, "rate": rate,
        "scores": (torch.cat(logprobs), torch.cat(ranks), torch.cat(slots)),
    }  # fmt: skip


def _trees(scores: tuple[torch.Tensor, ...], config: Config, say: Say, against: bool) -> dict[str, Any]:
    logprobs, ranks, slots = scores
    budgets = config.evaluate.budgets
    seconds, ours = _timed(ranks.device, lambda: accepted_in_tree(logprobs, ranks, slots, budgets))
    say(f"DDTree at {len(budgets)} budgets to {max(budgets):,} for {len(ranks):,} anchors: {seconds:.2f} s")
    figures = {"anchors": len(ranks), "seconds": seconds}
    if against:
        some = torch.randperm(len(ranks), generator=torch.Generator().manual_seed(0))[:HEAP_ANCHORS].tolist()
        lists = [(logprobs[i, : slots[i]].double().tolist(), ranks[i].tolist()) for i in some]
        heap, theirs = _timed(
            torch.device("cpu"),
            lambda: [[baselines.accepted_by_heap(*block, n) for n in budgets] for block in lists],
        )
        assert theirs == ours[some].tolist(), "the heap's trees accept something else"
        figures["heap_seconds"] = heap * len(ranks) / len(some)
        say(
            f"  a heap for each tree: {figures['heap_seconds']:.1f} s ({len(some)} anchors, in proportion): "
            f"{figures['heap_seconds'] / seconds:.0f}x"
        )
    return figures


def _against(
    config: Config, ours: list[dict[str, Any]], seconds: float, device: torch.device, dtype: torch.dtype, say: Say
) -> dict[str, Any]:
    """The baselines beside `evaluate`, which gave `ours` in `seconds` in this process; they must agree with it."""
    cache, first = Cache(config.cache_dir), config.drafters[0]
    embedding, head = (tensor.to(device, dtype) for tensor in cache.head())
    figures: dict[str, float] = {}
    drafter = load_drafter(first, read_config(first), device, dtype)

    def walk() -> None:
        walk_samples(drafter, cache, embedding, head, config.evaluate, lambda _: None)

    walk()
    figures["walks_seconds"], _ = _timed(device, walk)
    say(f"{first.name}'s walks alone, of all rules: {figures['walks_seconds']:.2f} s")
    if device.type == "cpu":
        with Matmuls() as counted:
            walk()
        alone = figures["matmul_seconds"] = counted.seconds_alone(device)
        say(
            f"  their matrix products alone: {alone:.2f} s; the walks take {figures['walks_seconds'] / alone:.2f}x that"
        )

    blocks = slow = 0.0
    for spec, entry in zip(config.drafters, ours, strict=True):
        public, shape = _public_drafter(spec, device), read_config(spec)
        more, (walks, drafted) = _timed(
            device,
            lambda: baselines.block_by_block(public, shape, cache, embedding, head, config.evaluate),  # noqa: B023
        )
        slow, blocks = slow + more, blocks + drafted
        for sample, own in zip(entry["samples"], walks, strict=True):
            lists = [sample["acceptance_lengths"], sample["ddtree_width"], *sample["ddtree_budget"].values()]
            assert lists == [walk.committed for walk in own], f"{spec.name}, {sample['id']}: block by block differs"
    figures["block_by_block_seconds"] = slow
    say(f"the public class block by block, {blocks:,.0f} blocks: {slow:.1f} s, {slow / seconds:.1f}x evaluate's time")

    target = config.target.model_copy(update={"device": str(device)})
    files = TargetFiles.find(target)
    loaded = load_target(files, target)
    stop_ids = stop_token_ids(load_tokenizer(files, target), loaded.model.generation_config)
    public = _public_drafter(first, device).to(loaded.model.dtype)
    online, lengths = _timed(device, lambda: baselines.online(loaded.model, public, cache, stop_ids))
    chains = [sample["acceptance_lengths"] for sample in ours[0]["samples"]]
    figures["online_seconds"] = online
    agrees = figures["online_agrees"] = sum(a == b for a, b in zip(lengths, chains, strict=True)) / len(chains)
    say(
        f"{first.name} in the public online loop, for τ alone: {online:.1f} s, "
        f"{online / figures['walks_seconds']:.0f}x the walks of all rules; {agrees:.0%} of the prompts agree"
    )
    return figures


def _public_drafter(spec: DrafterSpec, device: torch.device) -> Any:
    try:
        return baselines.public_drafter(str(resolve(spec.checkpoint)), device)
    except ImportError:
        raise UserError("the baselines need the public package: pip install --no-deps dflash==0.1.0") from None


def _timed(device: torch.device, work: Callable[[], T]) -> tuple[float, T]:
    synchronize(device)
    start = time.perf_counter()
    result = work()
    synchronize(device)
    return time.perf_counter() - start, result


def _clear(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def _peak(device: torch.device) -> int:
    """Most memory in use, in bytes: of the GPU since `_clear`, else resident since the process began."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _rate(flops: float) -> str:
    return f"{flops / 1e12:,.0f} TFLOP/s" if flops >= 1e13 else f"{flops / 1e9:,.0f} GFLOP/s"
