"""Phase 2: judge every drafter from the cache; the target is not needed.

A drafter drafts once at each anchor that any walk visits. From that one draft come the chain's, the width-K tree's
and every budget's accepted drafts; the walks, and from them τ, follow.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, CancelledError, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from dflash_eval.acceptance.expected import acceptance_probabilities, expected_cycles
from dflash_eval.acceptance.statistics import (
    bootstrap_interval,
    bootstrap_ratio_interval,
    minimum_detectable_difference,
    prompt_means,
    tau,
    tau_micro,
    wins_ties_losses,
)
from dflash_eval.acceptance.tree import accepted_within, is_settled, prefix_order
from dflash_eval.acceptance.walks import Accept, Walk, position_acceptance, replay
from dflash_eval.batches import plan_batches
from dflash_eval.cache import DTYPES, Cache, Manifest, Sample, differences
from dflash_eval.config import Config, DrafterSpec, EvaluateConfig
from dflash_eval.drafter.checkpoint import FORMAT, check_weights, load_drafter, read_config
from dflash_eval.drafter.model import Context, DFlashDrafter, DrafterConfig, Group
from dflash_eval.drafter.scoring import Scorer
from dflash_eval.errors import UserError
from dflash_eval.machine import device_name, pick_device, software
from dflash_eval.progress import bars
from dflash_eval.report import write_report

CONTEXT_BYTES = {"cpu": 2 << 30, "cuda": 16 << 30}  # keys and values held at once; more samples wait for the next group
BLOCKS_AT_ONCE = {"cpu": 128, "cuda": 1024}
STAGES = (5, 9)  # slots of a block that are scored before it is seen whether more of them matter


def evaluate(config: Config) -> dict[str, Any]:
    """Judge the config's drafters; writes results.json and report.md to `config.results_dir`, returns the results.

    Everything that can be wrong with config, cache and checkpoints is looked for before the first draft is made.
    """
    if not config.drafters:
        raise UserError("no drafters to evaluate: list them under drafters in the config")
    _check_writable(config.results_dir)
    cache = Cache(config.cache_dir)
    _check_cache(cache, config)
    drafters = [(spec, read_config(spec)) for spec in config.drafters]
    weights = 0
    for spec, drafter_config in drafters:
        check_fits(spec, drafter_config, cache.manifest)
        weights = max(weights, check_weights(spec, drafter_config))
    device, dtype = pick_device(config.evaluate.device), DTYPES[config.evaluate.dtype]
    embedding, lm_head = (tensor.to(device, dtype) for tensor in cache.head())

    def judge(spec: DrafterSpec, drafter_config: DrafterConfig, advance: Callable[[int], None]) -> dict[str, Any]:
        drafter = load_drafter(spec, drafter_config, device, dtype)
        try:
            walks, expected = walk_samples(drafter, cache, embedding, lm_head, config.evaluate, advance)
        except UserError as error:
            raise UserError(f"{spec.name} ({spec.checkpoint}): {error}") from None
        return _summary(spec, drafter_config, cache.samples, walks, expected, config.evaluate)

    judged = _side_by_side(judge, drafters, cache, _workers(len(drafters), weights * dtype.itemsize, device))
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
        "comparisons": _comparisons(judged, config.evaluate),
        "provenance": {
            "device": device_name(device),
            "dtype": config.evaluate.dtype,
            "software": software(),
            "bootstrap": config.evaluate.bootstrap,
            "seed": config.evaluate.seed,
        },
    }
    write_report(results, config.results_dir)
    return results


def _check_writable(folder: Path) -> None:
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
    if config.evaluate.width > cache.manifest.vocab_size:
        raise UserError(
            f"evaluate.width {config.evaluate.width} is above the vocabulary of {cache.manifest.vocab_size}"
        )


def check_fits(spec: DrafterSpec, drafter: DrafterConfig, manifest: Manifest) -> None:
    """Raises UserError unless the cache can serve the drafter."""
    if drafter.hidden_size != manifest.hidden_size:
        raise UserError(
            f"{spec.name} ({spec.checkpoint}): hidden size {drafter.hidden_size}, the target's is "
            f"{manifest.hidden_size}: a drafter of another target"
        )
    missing = [layer for layer in drafter.target_layer_ids if layer not in manifest.layers]
    if missing:
        raise UserError(
            f"{spec.name} ({spec.checkpoint}): needs layers {', '.join(map(str, missing))}, the cache has "
            f"{', '.join(map(str, manifest.layers))}\n"
            "dflash-eval extract --force adds them, with extract.layers: auto (the completions are kept)"
        )
    if drafter.mask_token_id >= manifest.vocab_size:
        raise UserError(
            f"{spec.name} ({spec.checkpoint}): mask_token_id {drafter.mask_token_id} is outside the target's "
            f"vocabulary of {manifest.vocab_size}"
        )


def _workers(drafters: int, weight_bytes: int, device: torch.device) -> int:
    """How many drafters to judge at a time: on a CPU as many as there are cores and a quarter of the memory allow.

    A round's matrix products are small, so that cores that work on one each get more done than all on the same.
    """
    if device.type != "cpu":
        return 1
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 4
    return max(1, min(drafters, torch.get_num_threads(), memory // weight_bytes))


def _side_by_side(
    judge: Callable[[DrafterSpec, DrafterConfig, Callable[[int], None]], dict[str, Any]],
    drafters: Sequence[tuple[DrafterSpec, DrafterConfig]],
    cache: Cache,
    workers: int,
) -> list[dict[str, Any]]:
    """`judge` for every drafter, in `workers` threads that share the cores; an error in one stops all."""
    threads, stop = torch.get_num_threads(), Event()
    total = sum(len(sample.completion_ids) for sample in cache.samples)

    def work(spec: DrafterSpec, drafter_config: DrafterConfig) -> dict[str, Any]:
        torch.set_num_threads(max(1, threads // workers))
        with bar(spec.name, total) as advance:

            def step(amount: int) -> None:
                if stop.is_set():
                    raise CancelledError
                advance(amount)

            return judge(spec, drafter_config, step)

    with bars("anchors") as bar, ThreadPoolExecutor(workers) as pool:
        pending = [pool.submit(work, *drafter) for drafter in drafters]
        try:
            for future in wait(pending, return_when=FIRST_EXCEPTION).done:
                future.result()  # raises the error that ended the wait
            return [future.result() for future in pending]
        finally:
            stop.set()
            pool.shutdown(wait=True, cancel_futures=True)
            torch.set_num_threads(threads)


def walk_samples(
    drafter: DFlashDrafter,
    cache: Cache,
    embedding: Tensor,
    lm_head: Tensor,
    config: EvaluateConfig,
    advance: Callable[[int], None],
) -> tuple[list[list[Walk]], NDArray[np.float64] | None]:
    """Every sample's walks, [samples][chain, width K, each budget], and its expected τ where the cache was sampled.

    `advance` is told of each anchor drafted at.
    """
    samples = cache.samples
    shape = drafter.config
    token_bytes = 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * embedding.element_size()
    budget = CONTEXT_BYTES[embedding.device.type] // token_bytes
    walks: list[list[Walk]] = [[] for _ in samples]
    completions = cache.manifest.settings["completions"]
    max_new_tokens, temperature = completions["max_new_tokens"], completions["temperature"]
    expected = np.full(len(samples), np.nan) if temperature > 0 and cache.manifest.target_stats else None
    scorer = Scorer(drafter, lm_head, min(max(config.width, *config.budgets), len(lm_head)))
    for indices in plan_batches([len(sample) for sample in samples], budget):
        group = [samples[i] for i in indices]
        context = _context(drafter, cache, group, embedding)
        judge = _Judge(drafter, context, group, max_new_tokens, embedding, scorer, config, advance)
        starts, ends = [len(sample.prompt_ids) for sample in group], [len(sample) for sample in group]
        everywhere = config.anchors == "all" or (config.anchors == "auto" and embedding.device.type == "cuda")
        accept = judge.everywhere() if everywhere else judge.accepted
        for index, own in zip(indices, replay(starts, ends, 2 + len(config.budgets), accept), strict=True):
            walks[index] = own
        if expected is not None:
            logprobs = [cache.logprobs(sample.id) for sample in group]
            expected[indices] = judge.expected_tau(logprobs, temperature)
    return walks, expected


@torch.inference_mode()
def _context(drafter: DFlashDrafter, cache: Cache, group: Sequence[Sample], like: Tensor) -> Context:
    """The group's keys and values, right-padded to its longest sample."""
    shape = drafter.config
    size = (len(group), shape.num_kv_heads, max(map(len, group)), shape.head_dim)
    context = [(like.new_zeros(size), like.new_zeros(size)) for _ in range(shape.num_layers)]
    for row, sample in enumerate(group):
        features = cache.features(sample.id, shape.target_layer_ids).to(like.device, like.dtype)
        for whole, own in zip(context, drafter.context(features[None]), strict=True):
            for padded, states in zip(whole, own, strict=True):
                padded[row, :, : len(sample)] = states[0]
    return context


@dataclass(frozen=True)
class _Judge:
    """A drafter at work on a group of samples whose keys and values are at hand."""

    drafter: DFlashDrafter
    context: Context
    group: Sequence[Sample]
    max_new_tokens: int
    embedding: Tensor
    scorer: Scorer
    config: EvaluateConfig
    advance: Callable[[int], None]

    def accepted(self, owners: NDArray[np.int64], anchors: NDArray[np.int64]) -> NDArray[np.int64]:
        """Accepted drafts of one block at each (owner, anchor), sorted by owner: [blocks, chain, width K, budgets]."""
        step = BLOCKS_AT_ONCE[self.embedding.device.type]
        parts = []
        for start in range(0, len(anchors), step):
            rows = slice(start, start + step)
            parts.append(self._accepted(owners[rows], anchors[rows]))
            self.advance(len(parts[-1]))
        return np.concatenate(parts)

    def everywhere(self) -> Accept:
        """Draft at every anchor of the group now; what comes back answers as `accepted` does."""
        owners, anchors, first = self._every_anchor()
        starts = np.array([len(sample.prompt_ids) for sample in self.group])
        table = self.accepted(owners, anchors) if len(anchors) else np.empty((0, 0), dtype=np.int64)
        return lambda owners, anchors: table[first[owners] + anchors - starts[owners]]

    def _every_anchor(self) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """All (owner, anchor) of the group by owner, and where each owner's begin [samples + 1]."""
        spans = [np.arange(len(sample.prompt_ids), len(sample) - 1, dtype=np.int64) for sample in self.group]
        counts = np.array([len(span) for span in spans], dtype=np.int64)
        first = np.concatenate([[0], counts.cumsum()])
        return np.repeat(np.arange(len(spans)), counts), np.concatenate(spans), first

    @torch.inference_mode()
    def expected_tau(self, logprobs: Sequence[NDArray[np.float64]], temperature: float) -> list[float]:
        """Expected τ of each sample under rejection sampling at the temperature; NaN where there is no cycle.

        logprobs: of each sample, its completion tokens' log-probabilities under the target.
        """
        owners, anchors, first = self._every_anchor()
        accepted = np.zeros((len(anchors), self.drafter.config.block_size - 1))
        step = BLOCKS_AT_ONCE[self.embedding.device.type]
        for start in range(0, len(anchors), step):
            rows = slice(start, start + step)
            hidden, tokens, _ = self._draft(owners[rows], anchors[rows])
            there = tokens >= 0
            own = torch.full(tokens.shape, -torch.inf, device=tokens.device)
            own[there] = self.scorer.own_logprobs(hidden[there], tokens[there], temperature)
            target = np.zeros(tokens.shape)
            for row, (owner, anchor) in enumerate(zip(owners[rows], anchors[rows], strict=True)):
                following = logprobs[owner][anchor + 1 - len(self.group[owner].prompt_ids) :][: tokens.shape[1]]
                target[row, : len(following)] = following
            accepted[rows] = acceptance_probabilities(own.double().cpu().numpy(), target)
        taus = []
        for owner, sample in enumerate(self.group):
            start, end = len(sample.prompt_ids), len(sample)
            cycles = expected_cycles(accepted[first[owner] : first[owner + 1]], start, end)
            taus.append((end - 1 - start) / cycles if cycles else np.nan)
        return taus

    @torch.inference_mode()
    def _accepted(self, owners: NDArray[np.int64], anchors: NDArray[np.int64]) -> NDArray[np.int64]:
        return self._compare(*self._draft(owners, anchors)).cpu().numpy()

    def _draft(self, owners: NDArray[np.int64], anchors: NDArray[np.int64]) -> tuple[Tensor, Tensor, Tensor]:
        """One block at each (owner, anchor), slots 1, 2, ...: the drafter's output [blocks, depth, hidden], the
        sequence's tokens [blocks, depth], -1 where it has ended, and how many slots were drafted [blocks]."""
        shape, device = self.drafter.config, self.embedding.device
        size = shape.block_size
        block = np.full((len(anchors), size), shape.mask_token_id, dtype=np.int64)
        truth = np.full((len(anchors), size - 1), -1, dtype=np.int64)  # the sequence's tokens after each anchor
        lengths = np.empty(len(anchors), dtype=np.int64)
        for row, (owner, anchor) in enumerate(zip(owners, anchors, strict=True)):
            sample = self.group[owner]
            ids = sample.input_ids
            lengths[row] = min(size, len(sample.prompt_ids) + self.max_new_tokens - anchor)
            block[row, 0] = ids[anchor]
            following = ids[anchor + 1 : anchor + lengths[row]]
            truth[row, : len(following)] = following

        hidden = self.drafter.draft(
            F.embedding(torch.from_numpy(block).to(device), self.embedding) * shape.input_embedding_scale,
            torch.from_numpy(anchors).to(device),
            self.context,
            group_blocks(owners, anchors),
            torch.from_numpy(lengths).to(device) if (lengths < size).any() else None,
        )
        slots, tokens = torch.from_numpy(lengths - 1).to(device), torch.from_numpy(truth).to(device)
        return hidden[:, 1:], tokens, slots

    def _compare(self, hidden: Tensor, tokens: Tensor, slots: Tensor) -> Tensor:
        """Drafts at slots 1, 2, ... [blocks, depth, hidden] against the sequence's tokens [blocks, depth].

        slots: [blocks], how many of them were drafted. Many blocks are decided by their first slots; only the others
        go through the head whole.
        """
        (blocks, depth), n, width = tokens.shape, self.scorer.n, self.config.width
        drafted = torch.arange(depth, device=tokens.device) < slots[:, None]
        ranks = torch.full_like(tokens, n)
        top_logprobs = torch.zeros(blocks, depth, n, device=tokens.device)
        accepted = torch.empty(blocks, 2 + len(self.config.budgets), dtype=torch.int64, device=tokens.device)
        rows, begin = torch.arange(blocks, device=tokens.device), 0
        for end in (*(stage for stage in STAGES if stage < depth), depth):
            todo = torch.zeros_like(drafted)
            todo[rows, begin:end] = drafted[rows, begin:end]
            ranks[todo], top_logprobs[todo] = self.scorer.score(hidden[todo], tokens[todo])
            own, top = ranks[rows, :end], top_logprobs[rows, :end]
            order = prefix_order(top, own, slots[rows].clamp_max(end), max(self.config.budgets))
            chain, wide = ((own < k).int().cumprod(1).sum(1, keepdim=True) for k in (1, width))
            accepted[rows] = torch.cat([chain, wide, accepted_within(order, self.config.budgets)], dim=1)
            open_ = ~(is_settled(order, top, own, max(self.config.budgets)) & (wide[:, 0] < end)) & (slots[rows] > end)
            rows, begin = rows[open_], end
        return accepted


def group_blocks(owners: NDArray[np.int64], anchors: NDArray[np.int64]) -> list[Group]:
    """Runs of consecutive samples with equally many blocks; each attends to the context up to its last anchor."""
    groups: list[Group] = []
    present, starts, counts = np.unique(owners, return_index=True, return_counts=True)
    for sample, start, count in zip(present.tolist(), starts.tolist(), counts.tolist(), strict=True):
        positions = int(anchors[start : start + count].max())
        last = groups[-1] if groups else None
        if (
            last
            and last.samples.stop == sample
            and last.blocks.stop - last.blocks.start == count * (last.samples.stop - last.samples.start)
        ):
            groups[-1] = Group(
                slice(last.samples.start, sample + 1),
                slice(last.blocks.start, start + count),
                max(last.positions, positions),
            )
        else:
            groups.append(Group(slice(sample, sample + 1), slice(start, start + count), positions))
    return groups


def _summary(
    spec: DrafterSpec,
    drafter: DrafterConfig,
    samples: Sequence[Sample],
    walks: Sequence[Sequence[Walk]],
    expected: NDArray[np.float64] | None,
    config: EvaluateConfig,
) -> dict[str, Any]:
    def rule(index: int) -> dict[str, Any]:
        means = prompt_means([sample[index].committed for sample in walks])
        return {"tau": tau(means), "tau_ci95": bootstrap_interval(means, config.bootstrap, config.seed)}

    chain = [sample[0].committed for sample in walks]
    tokens, cycles = (np.array([measure(lengths) for lengths in chain], dtype=np.float64) for measure in (sum, len))
    return {
        "name": spec.name,
        "reference": spec.reference,
        "checkpoint": spec.checkpoint,
        "format": FORMAT,
        "block_size": drafter.block_size,
        "target_layer_ids": list(drafter.target_layer_ids),
        "mask_token_id": drafter.mask_token_id,
        **rule(0),
        "tau_micro": tau_micro(chain),
        "tau_micro_ci95": bootstrap_ratio_interval(
            tokens[cycles > 0], cycles[cycles > 0], config.bootstrap, config.seed
        ),
        "cycles": sum(map(len, chain)),
        "ddtree_width": {"k": config.width, **rule(1)},
        "ddtree_budget": [{"budget": n, **rule(2 + i)} for i, n in enumerate(config.budgets)],
        "position_acceptance": position_acceptance([sample[0] for sample in walks], drafter.block_size - 1),
        "expected_tau": None if expected is None else tau(expected),
        "expected_tau_ci95": None if expected is None else bootstrap_interval(expected, config.bootstrap, config.seed),
        "samples": [
            {
                "id": sample.id,
                "acceptance_lengths": own[0].committed,
                "ddtree_width": own[1].committed,
                "ddtree_budget": {str(n): own[2 + i].committed for i, n in enumerate(config.budgets)},
            }
            for sample, own in zip(samples, walks, strict=True)
        ],
    }


def _comparisons(judged: Sequence[dict[str, Any]], config: EvaluateConfig) -> list[dict[str, Any]]:
    """Each candidate against the reference, in every metric, paired by prompt."""
    reference = next((drafter for drafter in judged if drafter["reference"]), None)
    if reference is None:
        return []
    theirs = _lengths(reference)
    rows = []
    for candidate in judged:
        for metric, ours in _lengths(candidate).items() if candidate is not reference else ():
            means = prompt_means(ours), prompt_means(theirs[metric])
            value, aim = tau(means[0]), tau(means[1])
            rows.append({
                "candidate": candidate["name"],
                "reference": reference["name"],
                "metric": metric,
                "candidate_value": value,
                "reference_value": aim,
                "difference": None if value is None or aim is None else value - aim,
                "difference_ci95": bootstrap_interval(means[0] - means[1], config.bootstrap, config.seed),
                "minimum_detectable_difference": minimum_detectable_difference(means[0] - means[1]),
                "ratio": None if value is None or aim is None else value / aim,
                "ratio_ci95": bootstrap_ratio_interval(*means, config.bootstrap, config.seed),
                "prompts": dict(zip(("above", "level", "below"), wins_ties_losses(means[0] - means[1]), strict=True)),
            })  # fmt: skip
    return rows


def _lengths(drafter: dict[str, Any]) -> dict[str, list[list[int]]]:
    """metric → each sample's acceptance lengths."""
    samples = drafter["samples"]
    budgets = [str(entry["budget"]) for entry in drafter["ddtree_budget"]]
    return {
        "tau": [sample["acceptance_lengths"] for sample in samples],
        "ddtree_width": [sample["ddtree_width"] for sample in samples],
        **{f"ddtree_budget_{n}": [sample["ddtree_budget"][n] for sample in samples] for n in budgets},
    }
