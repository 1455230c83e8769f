"""From a drafter's hidden states to what acceptance needs: the true token's rank, and the top log-probabilities."""

from __future__ import annotations

import torch
from torch import Tensor

from dflash_eval.drafter.model import DFlashDrafter
from dflash_eval.errors import UserError

LOGIT_BYTES = {"cpu": 192 << 20, "cuda": 2 << 30}  # of logits held at once


class Scorer:
    """A drafter's drafts against the target's head [vocabulary, hidden]: ranks, and the n largest log-probabilities.

    The logits never exist for all rows at once; the memory for those that do is kept from call to call.
    """

    def __init__(self, drafter: DFlashDrafter, lm_head: Tensor, n: int) -> None:
        self.drafter, self.lm_head, self.n = drafter, lm_head, n
        row_bytes = len(lm_head) * lm_head.element_size()
        # A CPU's matmul packs the head anew at each call; a piece of it then stays in the cache (1.2x at 200 rows).
        self.columns = 2048 if lm_head.device.type == "cpu" else len(lm_head)
        self.rows = max(16, LOGIT_BYTES[lm_head.device.type] // row_bytes)
        self.room = lm_head.new_empty(0)

    def score(self, hidden: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Rank of each row's true token and the row's n largest log-probabilities.

        hidden: [rows, hidden]; tokens: [rows] int64, -1 where no token is known. Returns ranks [rows] int64 and
        log-probabilities [rows, n] float32, descending. The rank counts the tokens that the drafter finds more
        probable (of equals, those of lower id, as argmax does); n stands for n or more. Raises UserError when the
        logits are not finite.
        """
        ranks = torch.empty(tokens.shape, dtype=torch.int64, device=hidden.device)
        top_logprobs = torch.empty(len(hidden), self.n, device=hidden.device)
        self._make_room(len(hidden))
        for start in range(0, len(hidden), self.rows):
            rows = slice(start, start + self.rows)
            ranks[rows], top_logprobs[rows] = rank_rows(self._logits(hidden[rows]), tokens[rows], self.n)
        return ranks, top_logprobs

    def own_logprobs(self, hidden: Tensor, tokens: Tensor, temperature: float) -> Tensor:
        """Log-probability of each row's token at a temperature: hidden [rows, hidden], tokens [rows] → [rows]."""
        self._make_room(len(hidden))
        parts = []
        for start in range(0, len(hidden), self.rows):
            rows = slice(start, start + self.rows)
            logits = self._logits(hidden[rows]).div_(temperature)
            parts.append(logits.gather(1, tokens[rows, None])[:, 0] - logits.logsumexp(1))
        return torch.cat(parts)

    def _make_room(self, rows: int) -> None:
        if min(self.rows, rows) > len(self.room):
            self.room = self.lm_head.new_empty(min(self.rows, rows), len(self.lm_head))

    def _logits(self, hidden: Tensor) -> Tensor:
        logits = self.room[: len(hidden)]
        for part, head in zip(logits.split(self.columns, 1), self.lm_head.split(self.columns), strict=True):
            torch.mm(hidden, head.t(), out=part)
        return self.drafter.scale_logits(logits).float()


def rank_rows(logits: Tensor, tokens: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """`Scorer.score` on logits [rows, vocabulary] float32, which it overwrites."""
    top = logits.topk(n, dim=-1).values
    if not torch.isfinite(top[:, 0]).all():
        raise UserError(
            "the drafter's logits are not finite (NaN or infinity): broken weights, or features that overflow"
        )
    known = tokens >= 0
    own = logits.gather(1, tokens.clamp_min(0)[:, None])
    ranks = (top > own).sum(1)
    tied = known & (((top == own).sum(1) > 1) | (top[:, -1:] == own).squeeze(1))
    for row in tied.nonzero().squeeze(1).tolist():
        before = (logits[row] > own[row]).sum() + (logits[row, : tokens[row]] == own[row]).sum()
        ranks[row] = before.clamp_max(n)
    largest = top[:, :1]
    log_sum = logits.sub_(largest).exp_().sum(-1, keepdim=True).log() + largest
    return ranks.masked_fill(~known, n), (top - log_sum).clamp_max_(0.0)
