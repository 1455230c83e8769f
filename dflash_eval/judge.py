"""A drafter at work on a cache: the blocks that it drafts, and what of each every rule accepts.

The rules are the chain, the tree of width K and the trees of each budget, in this order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from dflash_eval.acceptance.expected import acceptance_probabilities, expected_cycles
from dflash_eval.acceptance.sampling import Sampling
from dflash_eval.acceptance.tree import accepted_within, prefix_order, settled_within
from dflash_eval.acceptance.walks import Accept, Walk, replay
from dflash_eval.batches import plan_batches
from dflash_eval.cache import Cache, Sample
from dflash_eval.config import EvaluateConfig
from dflash_eval.drafter.model import Context, DFlashDrafter, Group
from dflash_eval.drafter.path import ABSENT, PathScorer, path_scorer
from dflash_eval.drafter.scoring import Scorer
from dflash_eval.errors import UserError
from dflash_eval.machine import Pieces, free_bytes

CONTEXT_BYTES = {"cpu": 2 << 30, "cuda": 16 << 30}  # keys and values held at once; more samples wait for the next group
BLOCKS_DRAFTED = {"cpu": 128, "cuda": 1024}  # at once, where a quarter of the memory allows it
BLOCKS_JUDGED = {"cpu": 128, "cuda": 8192}  # their trees are one pass, which takes a GPU as long for 100 as for 5,000
# Slots of a block that are scored before it is seen whether more of them matter. A GPU scores them all: looking costs
# it more.
STAGES: dict[str, tuple[int, ...]] = {"cpu": (5, 9), "cuda": ()}


def walk_samples(
    drafter: DFlashDrafter,
    cache: Cache,
    embedding: Tensor,
    lm_head: Tensor,
    config: EvaluateConfig,
    advance: Callable[[int], None],
) -> tuple[list[list[Walk]], NDArray[np.float64] | None]:
    """Every sample's walks, [samples][rules], and its expected τ [samples] where the cache was sampled.

    embedding [vocabulary, hidden] may be of another dtype than the drafter, which computes as lm_head is; `advance`
    is told of each anchor drafted at. Raises UserError for features or logits that are not finite.
    """
    samples, device = cache.samples, lm_head.device
    walks: list[list[Walk]] = [[] for _ in samples]
    sampling = cache.manifest.sampling()
    expected = np.full(len(samples), np.nan) if sampling and cache.manifest.target_stats else None
    # Expected τ takes a draft at every anchor, and then the walks have theirs.
    everywhere = config.anchors == "all" or expected is not None or (config.anchors == "auto" and device.type == "cuda")
    scorer = Scorer(drafter, lm_head, max(config.width, *config.budgets))
    embedding = drafter.embedding(embedding)
    for indices, judge in judges(drafter, cache, embedding, scorer, config, advance):
        starts, ends = [len(sample.prompt_ids) for sample in judge.group], [len(sample) for sample in judge.group]
        accept = judge.everywhere() if everywhere else judge.accepted
        for owner, own in enumerate(replay(starts, ends, judge.rules, accept)):
            walks[indices[owner]] = [judge.with_rejected(owner, own[0]), *own[1:]]
        if sampling and expected is not None:
            expected[indices] = judge.expected_tau([cache.logprobs(sample.id) for sample in judge.group], sampling)
    return walks, expected


def judges(
    drafter: DFlashDrafter,
    cache: Cache,
    embedding: Tensor,
    scorer: Scorer,
    config: EvaluateConfig,
    advance: Callable[[int], None],
) -> Iterator[tuple[list[int], Judge]]:
    """The cache's samples in groups whose keys and values fit in memory: their indices, and a judge of them."""
    samples, shape, lm_head = cache.samples, drafter.config, scorer.lm_head
    token_bytes = 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * lm_head.element_size()
    budget = min(CONTEXT_BYTES[lm_head.device.type], free_bytes(lm_head.device) // 4) // token_bytes
    pieces = Pieces(_blocks_at_once(drafter, max(map(len, samples), default=0), lm_head), "blocks")
    max_new_tokens = cache.manifest.settings["completions"]["max_new_tokens"]
    path = path_scorer(drafter, scorer)
    for indices in plan_batches([len(sample) for sample in samples], budget):
        group = [samples[i] for i in indices]
        context = _context(drafter, cache, group, lm_head)
        rejected = np.full((len(group), max(map(len, group)), 2), -1, dtype=np.int64)
        yield (
            indices,
            Judge(drafter, context, group, max_new_tokens, embedding, scorer, path, config, pieces, advance, rejected),
        )


def _blocks_at_once(drafter: DFlashDrafter, positions: int, like: Tensor) -> int:
    """How many blocks' activations a quarter of the free memory holds, generously counted."""
    shape = drafter.config
    widest = 4 * shape.intermediate_size + 8 * shape.hidden_size + 8 * shape.num_heads * shape.head_dim
    if like.device.type == "cpu":  # where attention's scores are held
        widest += 5 * shape.num_heads * (positions + shape.block_size)
    block_bytes = shape.block_size * widest * like.element_size()
    return max(1, min(BLOCKS_DRAFTED[like.device.type], free_bytes(like.device) // 4 // block_bytes))


@torch.inference_mode()
def _context(drafter: DFlashDrafter, cache: Cache, group: Sequence[Sample], like: Tensor) -> Context:
    """The group's keys and values, right-padded to its longest sample."""
    shape = drafter.config
    size = (len(group), shape.num_kv_heads, max(map(len, group)), shape.head_dim)
    context = [(like.new_zeros(size), like.new_zeros(size)) for _ in range(shape.num_layers)]
    for row, sample in enumerate(group):
        features = cache.features(sample.id, shape.target_layer_ids).to(like.device, like.dtype)
        _check_finite(features, cache, sample, shape.target_layer_ids)
        for whole, own in zip(context, drafter.context(features[None]), strict=True):
            for padded, states in zip(whole, own, strict=True):
                padded[row, :, : len(sample)] = states[0]
    return context


def _check_finite(features: Tensor, cache: Cache, sample: Sample, layers: Sequence[int]) -> None:
    finite = torch.isfinite(features)
    if not finite.all():
        position, column = (~finite).nonzero()[0].tolist()
        layer = layers[column // (features.shape[1] // len(layers))]
        raise UserError(
            f"{cache.folder}: the cached states are not finite: sample {sample.id!r}, layer {layer}, position "
            f"{position} (as {str(features.dtype).removeprefix('torch.')})\nextract again with --force (a float16 "
            "target overflows where bfloat16 does not), or evaluate in a wider dtype"
        )


@dataclass(frozen=True)
class Judge:
    """A drafter at work on a group of samples whose keys and values are at hand."""

    drafter: DFlashDrafter
    context: Context
    group: Sequence[Sample]
    max_new_tokens: int
    embedding: Tensor
    scorer: Scorer
    path: PathScorer | None
    config: EvaluateConfig
    pieces: Pieces
    advance: Callable[[int], None]
    rejected: NDArray[np.int64]
    """[samples, positions, 2]: of the block at each anchor judged so far, the first rejected draft and the rank of the
    sequence's token there; -1 where none is."""

    @property
    def rules(self) -> int:
        return 2 + len(self.config.budgets)

    @property
    def device(self) -> torch.device:
        return self.scorer.lm_head.device

    def accepted(
        self, owners: NDArray[np.int64], anchors: NDArray[np.int64], needed: NDArray[np.bool_]
    ) -> NDArray[np.int64]:
        """Accepted drafts of one block at each (owner, anchor), sorted by owner: [blocks, rules].

        needed: [blocks, rules], which of them are asked for; -1 stands where another was not found on the way.
        """
        step = BLOCKS_JUDGED[self.device.type]
        parts = [np.empty((0, self.rules), dtype=np.int64)]
        for start in range(0, len(anchors), step):
            rows = slice(start, start + step)
            accepted, rejected = self._accepted(owners[rows], anchors[rows], needed[rows])
            known = accepted[:, 0] >= 0
            self.rejected[owners[rows][known], anchors[rows][known]] = rejected[known]
            parts.append(accepted)
            self.advance(len(parts[-1]))
        return np.concatenate(parts)

    def with_rejected(self, owner: int, chain: Walk) -> Walk:
        """The chain's walk over a sample of the group, with the draft that ended each cycle."""
        anchors = len(self.group[owner].prompt_ids) + np.cumsum([0, *chain.committed])[:-1]
        found = self.rejected[owner, anchors].tolist()
        return replace(chain, rejected=[(token, rank) if token >= 0 else None for token, rank in found])

    def everywhere(self) -> Accept:
        """Draft at every anchor of the group now; what comes back answers as `accepted` does."""
        owners, anchors, first = self.every_anchor()
        starts = np.array([len(sample.prompt_ids) for sample in self.group])
        table = self.accepted(owners, anchors, np.ones((len(anchors), self.rules), dtype=np.bool_))
        return lambda owners, anchors, _: table[first[owners] + anchors - starts[owners]]

    def every_anchor(self) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """All (owner, anchor) of the group by owner, and where each owner's begin [samples + 1]."""
        spans = [np.arange(len(sample.prompt_ids), len(sample) - 1, dtype=np.int64) for sample in self.group]
        counts = np.array([len(span) for span in spans], dtype=np.int64)
        first = np.concatenate([[0], counts.cumsum()])
        return np.repeat(np.arange(len(spans)), counts), np.concatenate(spans), first

    @torch.inference_mode()
    def expected_tau(self, logprobs: Sequence[NDArray[np.float64]], sampling: Sampling) -> list[float]:
        """Expected τ of each sample under rejection sampling; NaN where there is no cycle.

        logprobs: of each sample, its completion tokens' log-probabilities under the target.
        """
        owners, anchors, first = self.every_anchor()
        accepted = np.zeros((len(anchors), self.drafter.config.drafts))
        step = BLOCKS_JUDGED[self.device.type]
        for start in range(0, len(anchors), step):
            rows = slice(start, start + step)
            hidden, tokens, _ = self.draft(owners[rows], anchors[rows])
            there = tokens >= 0
            own = torch.full(tokens.shape, -torch.inf, device=tokens.device)
            if self.path is None:
                own[there] = self.scorer.own_logprobs(hidden[there], tokens[there], sampling)
            else:
                previous = self._previous(owners[rows], anchors[rows], tokens)
                own = self.path.own_logprobs(hidden, tokens, previous, sampling)
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
    def _accepted(
        self, owners: NDArray[np.int64], anchors: NDArray[np.int64], needed: NDArray[np.bool_]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Accepted drafts [blocks, rules] and, of the chain, what `rejected` holds [blocks, 2]."""
        hidden, tokens, slots = self.draft(owners, anchors)
        if self.path is None:
            accepted, rejected = self._compare(hidden, tokens, slots, torch.from_numpy(needed).to(self.device))
            return accepted.cpu().numpy(), rejected.cpu().numpy()
        previous = self._previous(owners, anchors, tokens)
        ranks, order, drafts = self.path.orders(hidden, tokens, previous, slots, max(self.config.budgets))
        drafted = torch.arange(tokens.shape[1], device=slots.device) < slots[:, None]
        ranks = ranks.masked_fill(~drafted, ABSENT)
        flat = torch.stack([(ranks < k).int().cumprod(1).sum(1) for k in (1, self.config.width)], dim=1)
        accepted = torch.cat([flat, accepted_within(order, self.config.budgets)], dim=1)
        return accepted.cpu().numpy(), self._rejected(flat[:, 0], drafts, ranks, tokens, slots).cpu().numpy()

    def _rejected(self, accepted: Tensor, drafts: Tensor, ranks: Tensor, tokens: Tensor, slots: Tensor) -> Tensor:
        """[blocks, 2] of the chain's first rejected slot: its draft, and the rank of the sequence's token there.

        accepted [blocks]; drafts, ranks and tokens [blocks, depth]; slots [blocks]. -1 where all was accepted or the
        sequence ends before; the scorer's n stands for ranks of n or more.
        """
        at = accepted.clamp(0, tokens.shape[1] - 1)[:, None]
        found = torch.cat([drafts.gather(1, at), ranks.gather(1, at).clamp_max(self.scorer.n)], dim=1)
        none = (accepted < 0) | (accepted >= slots) | (tokens.gather(1, at)[:, 0] < 0)
        return found.masked_fill(none[:, None], -1)

    def _previous(self, owners: NDArray[np.int64], anchors: NDArray[np.int64], tokens: Tensor) -> Tensor:
        """The sequence's token before each of `tokens`, the anchor's before the first: [blocks, depth]."""
        ids = [sample.input_ids for sample in self.group]
        said = [ids[owner][anchor] for owner, anchor in zip(owners, anchors, strict=True)]
        return torch.cat([torch.tensor(said, device=tokens.device)[:, None], tokens[:, :-1]], dim=1)

    def draft(self, owners: NDArray[np.int64], anchors: NDArray[np.int64]) -> tuple[Tensor, Tensor, Tensor]:
        """One block at each (owner, anchor), the slots that draft: the drafter's output [blocks, depth, hidden], the
        sequence's tokens [blocks, depth], -1 where it has ended, and how many slots were drafted [blocks]."""
        shape = self.drafter.config
        ids = np.full((len(self.group), max(map(len, self.group)) + shape.drafts + 1), -1, dtype=np.int64)
        for row, sample in enumerate(self.group):
            ids[row, : len(sample)] = sample.input_ids
        limits = np.array([len(sample.prompt_ids) + self.max_new_tokens for sample in self.group])
        drafts = np.minimum(shape.drafts, limits[owners] - anchors - 1)
        # A drafter whose anchor predicts drafts whole blocks to the end, as DeepSpec's loop does.
        lengths = np.full_like(drafts, shape.block_size) if shape.predicts_anchor else drafts + 1
        tokens = ids[owners[:, None], anchors[:, None] + np.arange(shape.drafts + 1)]
        hidden = self.pieces.run(
            len(anchors), lambda rows: self._draft(owners[rows], anchors[rows], tokens[rows, 0], lengths[rows])
        )
        slots, tokens = (torch.from_numpy(x).to(self.device) for x in (drafts, tokens[:, 1:]))
        return torch.cat(hidden), tokens, slots

    def _draft(
        self, owners: NDArray[np.int64], anchors: NDArray[np.int64], said: NDArray[np.int64], lengths: NDArray[np.int64]
    ) -> Tensor:
        """[blocks, depth, hidden] of as many blocks as fit at once; said: [blocks], the anchors' tokens."""
        shape = self.drafter.config
        block = np.full((len(anchors), shape.block_size), shape.mask_token_id, dtype=np.int64)
        block[:, 0] = said
        embeds = F.embedding(torch.from_numpy(block).to(self.device), self.embedding).to(self.scorer.lm_head.dtype)
        hidden = self.drafter.draft(
            embeds * shape.input_embedding_scale,
            torch.from_numpy(anchors).to(self.device),
            self.context,
            group_blocks(owners, anchors),
            torch.from_numpy(lengths).to(self.device) if (lengths < shape.block_size).any() else None,
        )
        return hidden if shape.predicts_anchor else hidden[:, 1:]

    def _compare(self, hidden: Tensor, tokens: Tensor, slots: Tensor, needed: Tensor) -> tuple[Tensor, Tensor]:
        """Drafts at slots 1, 2, ... [blocks, depth, hidden] against the sequence's tokens [blocks, depth].

        slots: [blocks], how many of them were drafted; needed: [blocks, rules]. Many blocks are decided by their first
        slots; only the others go through the head whole.
        """
        (blocks, depth), n, budgets = tokens.shape, self.scorer.n, self.config.budgets
        drafted = torch.arange(depth, device=tokens.device) < slots[:, None]
        ranks, drafts = torch.full_like(tokens, n), torch.full_like(tokens, -1)
        top_logprobs = torch.zeros(blocks, depth, n, device=tokens.device)
        accepted = torch.empty(blocks, self.rules, dtype=torch.int64, device=tokens.device)
        rows, begin = torch.arange(blocks, device=tokens.device), 0
        for end in (*(stage for stage in STAGES[tokens.device.type] if stage < depth), depth):
            todo = torch.zeros_like(drafted)
            todo[rows, begin:end] = drafted[rows, begin:end]
            ranks[todo], top_logprobs[todo], ids = self.scorer.score(hidden[todo], tokens[todo])
            drafts[todo] = ids[:, 0].long()
            own, top, there = ranks[rows, :end], top_logprobs[rows, :end], slots[rows].clamp_max(end)
            order = prefix_order(top, own, there, max(budgets))
            flat = torch.stack([(own < k).int().cumprod(1).sum(1) for k in (1, self.config.width)], dim=1)
            found = torch.cat([flat, accepted_within(order, budgets)], dim=1)
            settled = torch.cat([flat < end, settled_within(order, top, own, budgets)], dim=1)
            settled |= (slots[rows] <= end)[:, None]
            accepted[rows] = found.masked_fill(~settled, -1)
            rows, begin = rows[(needed[rows] & ~settled).any(1)], end
            if not len(rows):
                break
        return accepted, self._rejected(accepted[:, 0], drafts, ranks, tokens, slots)


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
