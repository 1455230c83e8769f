"""What one would write without this package: slow ways to the same numbers, to measure against and to agree with."""

from __future__ import annotations

import heapq
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from dflash_eval.acceptance.walks import Walk, replay
from dflash_eval.cache import Cache
from dflash_eval.config import EvaluateConfig
from dflash_eval.drafter.config import DrafterConfig


def tree_orders(logprobs: Sequence[Sequence[float]], budget: int) -> dict[tuple[int, ...], int]:
    """DDTree's best-first tree, grown node by node from a heap: path (of ranks) → when it was taken in, from 0.

    logprobs: [depth][k], each slot's largest log-probabilities, descending.
    """
    if not logprobs:
        return {}
    heap: list[tuple[float, tuple[int, ...]]] = [(-logprobs[0][0], (0,))]
    taken: dict[tuple[int, ...], int] = {}
    while heap and len(taken) < budget:
        cost, path = heapq.heappop(heap)
        taken[path] = len(taken)
        slot, rank = len(path) - 1, path[-1]
        if rank + 1 < len(logprobs[slot]):
            sibling = cost + logprobs[slot][rank] - logprobs[slot][rank + 1]
            heapq.heappush(heap, (sibling, (*path[:-1], rank + 1)))
        if len(path) < len(logprobs):
            heapq.heappush(heap, (cost - logprobs[len(path)][0], (*path, 0)))
    return taken


def accepted_by_heap(logprobs: Sequence[Sequence[float]], ranks: Sequence[int], budget: int) -> int:
    """Accepted drafts of one block in the tree of `budget` nodes."""
    taken = tree_orders(logprobs, budget)
    accepted = 0
    while accepted < len(logprobs) and tuple(ranks[: accepted + 1]) in taken:
        accepted += 1
    return accepted


def public_drafter(folder: str, device: torch.device) -> Any:
    """z-lab's own model class (PyPI dflash) with the checkpoint's weights, in float32."""
    from dflash.model import DFlashDraftModel
    from transformers import Qwen3Config

    config = Qwen3Config.from_pretrained(folder)
    return DFlashDraftModel.from_pretrained(folder, config=config, dtype=torch.float32).eval().to(device)


@torch.inference_mode()
def block_by_block(
    model: Any, shape: DrafterConfig, cache: Cache, embedding: Tensor, head: Tensor, config: EvaluateConfig
) -> tuple[list[list[Walk]], int]:
    """Every sample's walks, [samples][rules], with the public class: one block a call, its context computed anew, a
    heap for its tree. An anchor that several walks visit is drafted at once for all. Also the number of blocks.
    """
    samples, device = cache.samples, head.device
    max_new_tokens = cache.manifest.settings["completions"]["max_new_tokens"]
    features = [cache.features(sample.id, shape.target_layer_ids).to(device, head.dtype)[None] for sample in samples]
    drafted = 0

    def accept(owners: NDArray[np.int64], anchors: NDArray[np.int64], needed: NDArray[np.bool_]) -> NDArray[np.int64]:
        nonlocal drafted
        drafted += len(anchors)
        return np.array([accepted(int(owner), int(anchor)) for owner, anchor in zip(owners, anchors, strict=True)])

    def accepted(owner: int, anchor: int) -> list[int]:
        sample = samples[owner]
        slots = min(shape.block_size, len(sample.prompt_ids) + max_new_tokens - anchor)
        block = torch.full((1, slots), shape.mask_token_id, device=device)
        block[0, 0] = sample.input_ids[anchor]
        hidden = model(
            position_ids=torch.arange(anchor + slots, device=device)[None],
            noise_embedding=F.embedding(block, embedding).to(head.dtype),
            target_hidden=features[owner][:, :anchor],
        )
        logprobs = F.linear(hidden[0, 1:], head).float().log_softmax(-1)
        top = logprobs.topk(min(max(config.width, *config.budgets), len(head)))
        truth = sample.input_ids[anchor + 1 : anchor + slots]
        ranks = []
        for row, token in zip(top.indices.tolist(), truth, strict=False):
            ranks.append(row.index(token) if token in row else len(row))
        taken = tree_orders(top.values.tolist(), max(config.budgets))
        orders = [taken.get(tuple(ranks[: i + 1]), max(config.budgets)) for i in range(len(ranks))]

        def leading(inside: list[bool]) -> int:
            return inside.index(False) if False in inside else len(inside)

        flat = [leading([rank < k for rank in ranks]) for k in (1, config.width)]
        return flat + [leading([order < n for order in orders]) for n in config.budgets]

    starts, ends = [len(sample.prompt_ids) for sample in samples], [len(sample) for sample in samples]
    return replay(starts, ends, 2 + len(config.budgets), accept), drafted


def online(target: Any, drafter: Any, cache: Cache, stop_ids: Sequence[int]) -> list[list[int]]:
    """Acceptance lengths [samples][cycles] of z-lab's own loop, in which the target verifies every block."""
    import dflash.model as public

    public._cuda_time = time.perf_counter
    max_new_tokens = cache.manifest.settings["completions"]["max_new_tokens"]
    lengths = []
    for sample in cache.samples:
        prompt = torch.tensor([sample.prompt_ids], device=target.device)
        out = public.dflash_generate(
            drafter, target, prompt, max_new_tokens, list(stop_ids), temperature=0.0, return_stats=True
        )
        lengths.append(list(out.acceptance_lengths))
    return lengths
