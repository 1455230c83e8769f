"""From a drafter's hidden states to what acceptance needs: the true token's rank, and the most probable tokens."""

from __future__ import annotations

import copy
import math
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dflash_eval.acceptance.sampling import Sampling, sampling_logprobs
from dflash_eval.drafter.model import DFlashDrafter
from dflash_eval.errors import UserError
from dflash_eval.machine import Pieces, free_bytes

LOGIT_BYTES = {"cpu": 192 << 20, "cuda": 4 << 30}  # of logits held at once, where an eighth of the memory allows it
TIED_ROWS = 64
ROWS_IN_CACHE = 16  # of logits; several passes over few rows are faster than one at a time over all
LAST_COLUMN = 0xFFFFFFFF


class Scores(NamedTuple):
    """Of each row: the rank of its true token [rows] int64; the n largest log-probabilities [rows, n] float32,
    descending; their tokens [rows, n] int32."""

    ranks: Tensor
    logprobs: Tensor
    ids: Tensor


class Scorer:
    """A drafter's drafts against its output head, which is the target's [vocabulary, hidden] unless it has its own.

    A head of another vocabulary ranks its own tokens alone, and n is at most their number; token ids go in and come out
    as the target's.

    The logits never exist for all rows at once: each piece's are reduced while they are in one place, which is kept
    from call to call. Logits are kept in float32, and a GPU adds a 16-bit head's products up in it; a CPU rounds them.
    """

    def __init__(self, drafter: DFlashDrafter, lm_head: Tensor, n: int) -> None:
        self.drafter, self.target_ids = drafter, drafter.target_ids(len(lm_head))
        self.draft_ids = None if self.target_ids is None else _inverse(self.target_ids, len(lm_head))
        self.lm_head = lm_head = drafter.output_head(lm_head)
        self.n = n = min(n, len(lm_head))
        kind = lm_head.device.type
        # A CPU's matmul packs the head anew at each call; a piece of it then stays in the cache (1.2x at 200 rows).
        self.columns = 2048 if kind == "cpu" else len(lm_head)
        bytes_ = min(LOGIT_BYTES[kind], free_bytes(lm_head.device) // 8)
        self.pieces = Pieces(max(16, bytes_ // (len(lm_head) * torch.float32.itemsize)), "rows of logits")
        self.room = lm_head.new_empty(0, dtype=torch.float32)

    def widened(self, addend: Tensor) -> Scorer:
        """One whose `hidden` has more columns, which addend [draft vocabulary, columns] multiplies."""
        other = copy.copy(self)
        other.lm_head, other.room = torch.cat([self.lm_head, addend], dim=1), self.room.new_empty(0)
        return other

    def reaching(self, n: int) -> Scorer:
        """One that finds at least the n most probable tokens."""
        other = copy.copy(self)
        other.n, other.room = max(self.n, n), self.room.new_empty(0)
        return other

    def score(self, hidden: Tensor, tokens: Tensor) -> Scores:
        """Rank of each row's true token, and the row's n most probable tokens.

        hidden: [rows, hidden]; tokens: [rows] int64, -1 where no token is known. The rank counts the tokens that the
        drafter finds more probable (of equals, those of lower id, as argmax does); n stands for n or more. Raises
        UserError when the logits are not finite.
        """
        tokens = self._drafted(tokens)
        ranks = torch.empty(tokens.shape, dtype=torch.int64, device=hidden.device)
        logprobs = torch.empty(len(hidden), self.n, device=hidden.device)
        ids = torch.empty(len(hidden), self.n, dtype=torch.int32, device=hidden.device)

        def work(rows: slice) -> None:
            ranks[rows], logprobs[rows], ids[rows] = rank_rows(self._logits(hidden[rows]), tokens[rows], self.n)

        self.pieces.run(len(hidden), work)
        return Scores(ranks, logprobs, ids if self.target_ids is None else self.target_ids[ids].int())

    def own_logprobs(self, hidden: Tensor, tokens: Tensor, sampling: Sampling) -> Tensor:
        """Log-probability of each row's token as `sampling` draws: hidden [rows, hidden], tokens [rows] → [rows]."""
        own = torch.empty(len(hidden), device=hidden.device)
        tokens = self._drafted(tokens)

        def work(rows: slice) -> None:
            own[rows] = sampling_logprobs(self._logits(hidden[rows]), tokens[rows].clamp_min(0), sampling)

        self.pieces.run(len(hidden), work)
        return own.masked_fill(tokens < 0, -torch.inf)

    def entropies(self, hidden: Tensor) -> Tensor:
        """Entropy in nats of what each row predicts: hidden [rows, hidden] → [rows] float32."""
        found = torch.empty(len(hidden), device=hidden.device)

        def work(rows: slice) -> None:
            logprobs = self._logits(hidden[rows]).log_softmax(-1)
            found[rows] = -(logprobs.exp() * logprobs).sum(-1)

        self.pieces.run(len(hidden), work)
        return found

    def _drafted(self, tokens: Tensor) -> Tensor:
        """The target's token ids as rows of the head, -1 where it has none."""
        return tokens if self.draft_ids is None else self.draft_ids[tokens].masked_fill(tokens < 0, -1)

    def _logits(self, hidden: Tensor) -> Tensor:
        """[rows, hidden] → [rows, vocabulary] float32, good until the next call."""
        rows = len(hidden)
        if not rows <= len(self.room) <= self.pieces.size:
            self.room = self.room.new_empty(0)  # before the new one: both may not fit
            self.room = self.room.new_empty(rows, len(self.lm_head))
        logits = self.room[:rows]
        for part, head in zip(logits.split(self.columns, 1), self.lm_head.split(self.columns), strict=True):
            if head.dtype == logits.dtype:
                torch.mm(hidden, head.t(), out=part)
            elif logits.is_cuda:
                torch.mm(hidden, head.t(), out_dtype=logits.dtype, out=part)
            else:
                part.copy_(hidden @ head.t())
        return self.drafter.scale_logits(logits)


def _inverse(target_ids: Tensor, size: int) -> Tensor:
    """[size] int64: the row of target_ids that holds each id, -1 where none does."""
    rows = torch.full((size,), -1, dtype=torch.int64, device=target_ids.device)
    known = (target_ids >= 0) & (target_ids < size)
    rows[target_ids[known]] = known.nonzero().squeeze(1)
    return rows


def rank_rows(logits: Tensor, tokens: Tensor, n: int) -> Scores:
    """`Scorer.score` on logits [rows, vocabulary] float32, which it may overwrite."""
    if logits.is_cuda:
        return _rank_on_gpu(logits, tokens, n)
    parts = zip(logits.split(ROWS_IN_CACHE), tokens.split(ROWS_IN_CACHE), strict=True)
    return Scores(*map(torch.cat, zip(*(_rank_on_cpu(*part, n) for part in parts), strict=True)))


def _rank_on_cpu(logits: Tensor, tokens: Tensor, n: int) -> Scores:
    maxima = group_maxima(logits, group_size(logits.shape[1], n))
    peak = maxima.amax(1, keepdim=True)
    _check_finite(peak)
    top, ids = largest(logits, n, maxima)
    own = logits.gather(1, tokens.clamp_min(0)[:, None])
    ranks = ((top > own) | ((top == own) & (ids < tokens[:, None]))).sum(1)
    log_sum = logits.sub_(peak).exp_().sum(-1, keepdim=True).log() + peak
    return Scores(ranks.masked_fill(tokens < 0, n), (top - log_sum).clamp_max_(0.0), ids.int())


def _rank_on_gpu(logits: Tensor, tokens: Tensor, n: int) -> Scores:
    from dflash_eval.drafter import fused  # triton, which comes with torch for CUDA

    maxima, log_sum = fused.group_maxima(logits, group_size(logits.shape[1], n))
    _check_finite(log_sum)
    top, ids = largest_by_topk(logits, n, maxima)
    own = logits.gather(1, tokens.clamp_min(0)[:, None])
    ranks = ((top > own) | ((top == own) & (ids < tokens[:, None]))).sum(1)
    known = tokens >= 0
    tied = known & (top[:, -1] == own[:, 0])  # with tokens that are perhaps not among the n
    for rows in tied.nonzero().squeeze(1).split(TIED_ROWS):
        ranks[rows] = _rank_among_equals(logits[rows], own[rows], tokens[rows]).clamp_max(n)
    return Scores(ranks.masked_fill(~known, n), (top - log_sum[:, None]).clamp_max_(0.0), ids.int())


def _check_finite(largest: Tensor) -> None:
    if not torch.isfinite(largest).all():
        raise UserError(
            "the drafter's logits are not finite (NaN or infinity): broken weights, or features that overflow"
        )


def _rank_among_equals(logits: Tensor, own: Tensor, tokens: Tensor) -> Tensor:
    lower = torch.arange(logits.shape[1], device=logits.device) < tokens[:, None]
    return ((logits > own) | ((logits == own) & lower)).sum(1)


def group_size(vocabulary: int, n: int) -> int:
    """Columns to a group, for which there are few maxima to look at and then few columns: at least n groups."""
    return 1 << max(0, min(6, round(math.log2(vocabulary / n) / 2)))


def group_maxima(logits: Tensor, group: int) -> Tensor:
    """[rows, vocabulary] → [rows, G or more]: of G = vocabulary // group groups each holds every G-th column; what
    columns remain are a group each."""
    groups = logits.shape[1] // group
    whole = groups * group
    maxima = logits[:, :whole].unflatten(1, (group, groups)).amax(1)
    return maxima if whole == logits.shape[1] else torch.cat([maxima, logits[:, whole:]], dim=1)


def largest(logits: Tensor, n: int, maxima: Tensor) -> tuple[Tensor, Tensor]:
    """The n largest of each row of [rows, vocabulary] float32 on a CPU, no NaN among them, and their columns int64;
    of equals the lower column first.

    maxima: `group_maxima`, n of them or more. Nothing below the n-th of these is among the n largest; what is left is
    little more than n, and is sorted as integers: the value, then the column.
    """
    values = logits.numpy()
    groups = maxima.shape[1]
    floor = np.partition(maxima.numpy(), groups - n, axis=1)[:, groups - n, None]
    rows, columns = np.divmod(np.flatnonzero(values >= floor), values.shape[1])
    keys = (_ordered(values[rows, columns] + np.float32(0)).astype(np.int64) << 32) | (LAST_COLUMN - columns)
    ends = np.searchsorted(rows, np.arange(len(values)), side="right")
    for row in np.split(keys, ends[:-1]):
        row.sort()
    best = keys[ends[:, None] - 1 - np.arange(n)]
    top = _ordered((best >> 32).astype(np.int32).view(np.float32)).view(np.float32)
    return torch.from_numpy(top), torch.from_numpy(LAST_COLUMN - (best & LAST_COLUMN))


def _ordered(values: NDArray[np.float32]) -> NDArray[np.int32]:
    """float32 (0.0 but no -0.0) as int32 of the same order; its own inverse."""
    bits = values.view(np.int32)
    return bits ^ ((bits >> 31) & np.int32(0x7FFFFFFF))


def largest_by_topk(logits: Tensor, n: int, maxima: Tensor) -> tuple[Tensor, Tensor]:
    """`logits.topk(n)` of [rows, vocabulary], in a fraction of the time where n is far below the vocabulary.

    maxima: `fused.group_maxima`, [rows, G]. The n largest lie among the n groups of largest maximum and the columns
    that no group holds.
    """
    groups = maxima.shape[1]
    group = logits.shape[1] // groups
    if group == 1:
        return logits.topk(n)
    whole = groups * group
    best = maxima.topk(n, sorted=False).indices
    candidates = logits[:, :whole].unflatten(1, (group, groups)).gather(2, best[:, None].expand(-1, group, -1))
    top, place = torch.cat([candidates.flatten(1), logits[:, whole:]], dim=1).topk(n)
    ids = place // n * groups + best.gather(1, place % n)
    return top, torch.where(place < n * group, ids, place - n * group + whole)
