"""Phase 2: judge every drafter from the cache; the target is not needed.

A drafter drafts once at each anchor that any walk visits. From that one draft come the chain's, the width-K tree's
and every budget's accepted drafts; the walks, and from them τ, follow.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from dflash_eval.acceptance.statistics import bootstrap_interval, prompt_means, tau, tau_micro
from dflash_eval.acceptance.tree import accepted_in_tree
from dflash_eval.acceptance.walks import Walk, position_acceptance, replay
from dflash_eval.batches import plan_batches
from dflash_eval.cache import DTYPES, Cache, Manifest, Sample
from dflash_eval.config import Config, DrafterSpec, EvaluateConfig
from dflash_eval.drafter.checkpoint import FORMAT, load_drafter, read_config
from dflash_eval.drafter.model import Context, DFlashDrafter, DrafterConfig, Group
from dflash_eval.drafter.scoring import score
from dflash_eval.errors import UserError
from dflash_eval.extract import cache_settings, differences
from dflash_eval.progress import progress
from dflash_eval.report import write_report
from dflash_eval.target import device_name, pick_device, software

CONTEXT_BYTES = {"cpu": 2 << 30, "cuda": 16 << 30}  # keys and values held at once; more samples wait for the next group
BLOCKS_AT_ONCE = {"cpu": 64, "cuda": 1024}


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
    for spec, drafter_config in drafters:
        check_fits(spec, drafter_config, cache.manifest)
    device, dtype = pick_device(config.evaluate.device), DTYPES[config.evaluate.dtype]
    embedding, lm_head = (tensor.to(device, dtype) for tensor in cache.head())

    judged = []
    for spec, drafter_config in drafters:
        drafter = load_drafter(spec, drafter_config, device, dtype)
        walks = walk_samples(spec.name, drafter, cache, embedding, lm_head, config.evaluate)
        judged.append(_summary(spec, drafter_config, cache.samples, walks, config.evaluate))
        del drafter
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
    different = differences(cache.manifest.settings, cache_settings(config))
    if different:
        raise UserError(
            f"{cache.folder} is the cache of something else: {different[0]}\n"
            "point cache_dir at the right cache, or extract again under another name"
        )
    if config.evaluate.width > cache.manifest.vocab_size:
        raise UserError(f"evaluate.width {config.evaluate.width} is above the vocabulary of {cache.manifest.vocab_size}")


def check_fits(spec: DrafterSpec, drafter: DrafterConfig, manifest: Manifest) -> None:
    """Raises UserError unless the cache can serve the drafter."""
    if drafter.hidden_size != manifest.hidden_size:
        raise UserError(
            f"{spec.name} ({spec.checkpoint}): hidden size {drafter.hidden_size}, the target's is {manifest.hidden_size}: "
            "a drafter of another target"
        )
    missing = [layer for layer in drafter.target_layer_ids if layer not in manifest.layers]
    if missing:
        raise UserError(
            f"{spec.name} ({spec.checkpoint}): needs layers {', '.join(map(str, missing))}, the cache has "
            f"{', '.join(map(str, manifest.layers))}\n"
            "dflash-eval extract --force with this config adds them (the completions are kept)"
        )
    if drafter.mask_token_id >= manifest.vocab_size:
        raise UserError(
            f"{spec.name} ({spec.checkpoint}): mask_token_id {drafter.mask_token_id} is outside the target's vocabulary "
            f"of {manifest.vocab_size}"
        )


def walk_samples(
    name: str, drafter: DFlashDrafter, cache: Cache, embedding: Tensor, lm_head: Tensor, config: EvaluateConfig
) -> list[list[Walk]]:
    """Every sample's walks, [samples][chain, width K, each budget]."""
    samples = cache.samples
    shape = drafter.config
    token_bytes = 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * embedding.element_size()
    budget = CONTEXT_BYTES[embedding.device.type] // token_bytes
    walks: list[list[Walk]] = [[] for _ in samples]
    max_new_tokens = cache.manifest.settings["completions"]["max_new_tokens"]
    rules = 2 + len(config.budgets)
    with progress(name, sum(len(sample.completion_ids) for sample in samples), "anchors") as advance:
        for indices in plan_batches([len(sample) for sample in samples], budget):
            group = [samples[i] for i in indices]
            context = _context(drafter, cache, group, embedding)

            def accept(owners: NDArray[np.int64], anchors: NDArray[np.int64]) -> NDArray[np.int64]:
                advance(len(anchors))
                step = BLOCKS_AT_ONCE[embedding.device.type]
                parts = [
                    _accepted(
                        drafter, context, group, owners[i : i + step], anchors[i : i + step], max_new_tokens,
                        embedding, lm_head, config,
                    )
                    for i in range(0, len(anchors), step)
                ]  # fmt: skip
                return np.concatenate(parts)

            starts = [len(sample.prompt_ids) for sample in group]
            for index, sample_walks in zip(indices, replay(starts, [len(s) for s in group], rules, accept), strict=True):
                walks[index] = sample_walks
    return walks


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


@torch.inference_mode()
def _accepted(
    drafter: DFlashDrafter,
    context: Context,
    group: Sequence[Sample],
    owners: NDArray[np.int64],
    anchors: NDArray[np.int64],
    max_new_tokens: int,
    embedding: Tensor,
    lm_head: Tensor,
    config: EvaluateConfig,
) -> NDArray[np.int64]:
    """Accepted drafts of one block at each (owner, anchor), sorted by owner: [blocks, chain, width K, each budget]."""
    size = drafter.config.block_size
    device = embedding.device
    block = np.full((len(anchors), size), drafter.config.mask_token_id, dtype=np.int64)
    truth = np.full((len(anchors), size - 1), -1, dtype=np.int64)  # the sequence's tokens after each anchor
    lengths = np.empty(len(anchors), dtype=np.int64)
    for row, (owner, anchor) in enumerate(zip(owners, anchors, strict=True)):
        sample = group[owner]
        ids = sample.input_ids
        lengths[row] = min(size, len(sample.prompt_ids) + max_new_tokens - anchor)
        block[row, 0] = ids[anchor]
        following = ids[anchor + 1 : anchor + lengths[row]]
        truth[row, : len(following)] = following

    drafted = torch.arange(1, size, device=device) < torch.from_numpy(lengths).to(device)[:, None]
    hidden = drafter.draft(
        F.embedding(torch.from_numpy(block).to(device), embedding) * drafter.config.input_embedding_scale,
        torch.from_numpy(anchors).to(device),
        context,
        group_blocks(owners, anchors),
        torch.from_numpy(lengths).to(device) if (lengths < size).any() else None,
    )
    n = min(max(config.width, *config.budgets), len(lm_head))
    ranks = torch.full(truth.shape, n, dtype=torch.int64, device=device)
    top_logprobs = torch.zeros(*truth.shape, n, device=device)
    ranks[drafted], top_logprobs[drafted] = score(
        drafter, hidden[:, 1:][drafted], lm_head, torch.from_numpy(truth).to(device)[drafted], n
    )
    chain = (ranks < 1).int().cumprod(1).sum(1)
    width = (ranks < config.width).int().cumprod(1).sum(1)
    trees = accepted_in_tree(top_logprobs, ranks, drafted.sum(1), config.budgets)
    return torch.cat([chain[:, None], width[:, None], trees], dim=1).cpu().numpy()


def group_blocks(owners: NDArray[np.int64], anchors: NDArray[np.int64]) -> list[Group]:
    """Runs of consecutive samples with equally many blocks; each attends to the context up to its last anchor."""
    groups: list[Group] = []
    present, starts, counts = np.unique(owners, return_index=True, return_counts=True)
    for sample, start, count in zip(present.tolist(), starts.tolist(), counts.tolist(), strict=True):
        positions = int(anchors[start : start + count].max())
        last = groups[-1] if groups else None
        if last and last.samples.stop == sample and last.blocks.stop - last.blocks.start == count * (
            last.samples.stop - last.samples.start
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
    config: EvaluateConfig,
) -> dict[str, Any]:
    def rule(index: int) -> dict[str, Any]:
        means = prompt_means([sample[index].committed for sample in walks])
        return {"tau": tau(means), "tau_ci95": bootstrap_interval(means, config.bootstrap, config.seed)}

    chain = [sample[0].committed for sample in walks]
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
        "cycles": sum(map(len, chain)),
        "ddtree_width": {"k": config.width, **rule(1)},
        "ddtree_budget": [{"budget": n, **rule(2 + i)} for i, n in enumerate(config.budgets)],
        "position_acceptance": position_acceptance([sample[0] for sample in walks], drafter.block_size - 1),
        "expected_tau": None,
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
    metrics: dict[str, Callable[[dict[str, Any]], Any]] = {
        "tau": lambda sample: sample["acceptance_lengths"],
        "ddtree_width": lambda sample: sample["ddtree_width"],
        **{f"ddtree_budget_{n}": lambda sample, n=n: sample["ddtree_budget"][str(n)] for n in config.budgets},
    }
    rows = []
    for candidate in judged:
        for metric, lengths in metrics.items() if candidate is not reference else ():
            ours, theirs = (prompt_means([lengths(s) for s in drafter["samples"]]) for drafter in (candidate, reference))
            values = tau(ours), tau(theirs)
            known = values[0] is not None and values[1] is not None
            rows.append({
                "candidate": candidate["name"],
                "reference": reference["name"],
                "metric": metric,
                "candidate_value": values[0],
                "reference_value": values[1],
                "difference": values[0] - values[1] if known else None,  # type: ignore[operator]
                "difference_ci95": bootstrap_interval(ours - theirs, config.bootstrap, config.seed),
                "ratio": values[0] / values[1] if known else None,  # type: ignore[operator]
            })  # fmt: skip
    return rows
