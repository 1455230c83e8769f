"""From a drafter's hidden states to what acceptance needs: where the true token stands, and the top log-probabilities."""

from __future__ import annotations

import torch
from torch import Tensor

from dflash_eval.drafter.model import DFlashDrafter
from dflash_eval.errors import UserError

LOGIT_BYTES = {"cpu": 64 << 20, "cuda": 2 << 30}  # of logits held at once


def score(drafter: DFlashDrafter, hidden: Tensor, lm_head: Tensor, tokens: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """Rank of each row's true token and the row's n largest log-probabilities.

    hidden: [rows, hidden]; lm_head: [vocabulary, hidden]; tokens: [rows] int64, -1 where no token is known.
    Returns ranks [rows] int64 and log-probabilities [rows, n] float32, descending. The rank counts the tokens that
    the drafter finds more probable (of equals, those of lower id, as argmax does); n stands for n or more.
    The logits never exist for all rows at once. Raises UserError when they are not finite.
    """
    step = max(16, LOGIT_BYTES.get(hidden.device.type, 64 << 20) // (4 * len(lm_head)))
    ranks = torch.full(tokens.shape, n, dtype=torch.int64, device=hidden.device)
    top_logprobs = torch.empty(len(hidden), n, device=hidden.device)
    for start in range(0, len(hidden), step):
        rows = slice(start, start + step)
        logits = drafter.logits(hidden[rows], lm_head).float()
        ranks[rows], top_logprobs[rows] = rank_rows(logits, tokens[rows], n)
    return ranks, top_logprobs


def rank_rows(logits: Tensor, tokens: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """`score` on logits [rows, vocabulary] float32, which it overwrites."""
    top = logits.topk(n, dim=-1).values
    if not torch.isfinite(top[:, 0]).all():
        raise UserError("the drafter's logits are not finite (NaN or infinity): broken weights, or features that overflow")
    known = tokens >= 0
    own = logits.gather(1, tokens.clamp_min(0)[:, None])
    ranks = (top > own).sum(1)
    tied = known & (((top == own).sum(1) > 1) | (top[:, -1:] == own).squeeze(1))
    for row in tied.nonzero().squeeze(1).tolist():
        before = (logits[row] > own[row]).sum() + (logits[row, : tokens[row]] == own[row]).sum()
        ranks[row] = before.clamp_max(n)
    largest = top[:, :1]
    log_sum = logits.sub_(largest).exp_().sum(-1, keepdim=True).log() + largest
    return ranks.masked_fill(~known, n), top - log_sum
