"""From a drafter's hidden states to what acceptance needs: the true token's rank, and the most probable tokens."""

from __future__ import annotations

import copy
import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from dflash_eval.acceptance.sampling import Sampling, sampling_logprobs
from dflash_eval.drafter.model import DFlashDrafter
from dflash_eval.errors import UserError
from dflash_eval.machine import Pieces, free_bytes

LOGIT_BYTES = {"cpu": 192 << 20, "cuda": 4 << 30}  # of logits held at once, where an eighth of the memory allows it
TIED_ROWS = 64


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
        from dflash_eval.drafter.fused import group_maxima  # triton, which comes with torch for CUDA

        maxima, log_sum = group_maxima(logits, group_size(logits.shape[1], n))
        top, ids = largest(logits, n, maxima)
    else:
        (top, ids), log_sum = largest(logits, n), None
    finite = torch.isfinite(top[:, 0]) if log_sum is None else torch.isfinite(log_sum)
    if not finite.all():
        raise UserError(
            "the drafter's logits are not finite (NaN or infinity): broken weights, or features that overflow"
        )
    known = tokens >= 0
    own = logits.gather(1, tokens.clamp_min(0)[:, None])
    ranks = ((top > own) | ((top == own) & (ids < tokens[:, None]))).sum(1)
    tied = known & (top[:, -1] == own[:, 0])  # with tokens that are perhaps not among the n
    for rows in tied.nonzero().squeeze(1).split(TIED_ROWS):
        ranks[rows] = _rank_among_equals(logits[rows], own[rows], tokens[rows]).clamp_max(n)
    if log_sum is None:
        log_sum = logits.sub_(top[:, :1]).exp_().sum(-1).log() + top[:, 0]
    return Scores(ranks.masked_fill(~known, n), (top - log_sum[:, None]).clamp_max_(0.0), ids.int())


def _rank_among_equals(logits: Tensor, own: Tensor, tokens: Tensor) -> Tensor:
    lower = torch.arange(logits.shape[1], device=logits.device) < tokens[:, None]
    return ((logits > own) | ((logits == own) & lower)).sum(1)


def group_size(vocabulary: int, n: int) -> int:
    """Columns to a group for `largest`, which looks at vocabulary / group maxima and n * group candidates."""
    return 1 << max(0, min(6, round(math.log2(vocabulary / n) / 2)))


def largest(logits: Tensor, n: int, maxima: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """`logits.topk(n)` of [rows, vocabulary], in a fraction of the time where n is far below the vocabulary.

    The n largest lie among the n groups of largest maximum. Of G = vocabulary // group_size groups each holds every
    G-th column; what columns remain are always looked at. maxima: [rows, G], where they are known.
    """
    group = group_size(logits.shape[1], n)
    groups = logits.shape[1] // group
    if group == 1 or n > groups:
        return _top(logits, n)
    whole = groups * group
    grouped = logits[:, :whole].unflatten(1, (group, groups))
    best = _top_places(grouped.amax(1) if maxima is None else maxima, n)
    candidates = grouped.gather(2, best[:, None].expand(-1, group, -1)).flatten(1)
    top, place = _top(torch.cat([candidates, logits[:, whole:]], dim=1), n)
    ids = place // n * groups + best.gather(1, place % n)
    return top, torch.where(place < n * group, ids, place - n * group + whole)


def _top(values: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """`values.topk(n)` of [rows, columns] float32, which NumPy's vectorised sorts make 5 times as fast on a CPU."""
    if values.is_cuda:
        return values.topk(n)
    places = _top_places(values, n)
    top = values.gather(1, places)
    order = torch.from_numpy(np.argsort(top.numpy(), axis=1)).flip(1)
    return top.gather(1, order), places.gather(1, order)


def _top_places(values: Tensor, n: int) -> Tensor:
    """Where the n largest are, in no order: [rows, n] int64."""
    if values.is_cuda:
        return values.topk(n, sorted=False).indices
    columns = values.shape[1]
    return torch.from_numpy(np.argpartition(values.numpy(), columns - n, axis=1)[:, columns - n :])
