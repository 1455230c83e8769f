"""Scoring where a slot's prediction depends on the token before it: DFlash 2's selector, DSpark's Markov head.

A drafter walks its block from left to right. Its drafts are accepted as long as they are the sequence's tokens, and so
long the token before is the sequence's too: the probabilities that decide are those given the sequence itself. The
chain and the tree of width K follow from them.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from dflash_eval.acceptance.lattice import lattice_order
from dflash_eval.acceptance.sampling import Sampling
from dflash_eval.acceptance.tree import prefix_order
from dflash_eval.drafter.config import DrafterConfig
from dflash_eval.drafter.heads import CandidateSelector, MarkovHead
from dflash_eval.drafter.model import DFlashDrafter
from dflash_eval.drafter.scoring import Scorer

ABSENT = 1 << 40  # the rank of a token that cannot be drafted
Orders = tuple[Tensor, Tensor, Tensor]  # what PathScorer.orders gives


class PathScorer(Protocol):
    def orders(
        self, hidden: Tensor, tokens: Tensor, previous: Tensor, slots: Tensor, n: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Ranks and `prefix_order` of the sequence's tokens, and the chain's drafts, all [blocks, depth] int64.

        hidden: [blocks, depth, hidden]; tokens: [blocks, depth], -1 where the sequence has ended; previous: the token
        before each; slots: [blocks], how many are drafted; n: nodes of the largest tree.
        """

    def own_logprobs(self, hidden: Tensor, tokens: Tensor, previous: Tensor, sampling: Sampling) -> Tensor:
        """Log-probability of each of the sequence's tokens as `sampling` draws, [blocks, depth] float32."""


def path_scorer(drafter: DFlashDrafter, scorer: Scorer) -> PathScorer | None:
    """None for a drafter whose slots do not depend on each other."""
    if drafter.candidate_selector is not None:
        return SelectorScorer(drafter.candidate_selector, scorer)
    if drafter.markov_head is not None:
        return MarkovScorer(drafter.markov_head, scorer)
    return None


def tree_scores(config: DrafterConfig) -> str:
    """What the trees of a budget are built from."""
    if config.selector_rank:
        return "selector"
    return "logits without the Markov head" if config.markov_rank else "logits"


class SelectorScorer:
    """The `selector_top_k` most probable tokens of each slot, weighed anew after each of the slot before."""

    def __init__(self, selector: CandidateSelector, scorer: Scorer) -> None:
        self.selector, self.scorer = selector, scorer.reaching(selector.top_k)

    def orders(
        self, hidden: Tensor, tokens: Tensor, previous: Tensor, slots: Tensor, n: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        logits, candidates = self._candidates(hidden)
        k = self.selector.top_k
        own = self.selector.scores(hidden, previous.clamp_min(0)[..., None], logits, candidates).squeeze(-2)
        place = (candidates == tokens[..., None]).int()
        found = place.any(-1)
        place = place.argmax(-1)
        best = own.gather(-1, place[..., None])
        earlier = torch.arange(k, device=own.device) < place[..., None]
        ranks = ((own > best) | ((own == best) & earlier)).sum(-1).masked_fill(~found, ABSENT)
        steps = self.selector.scores(hidden[:, 1:], candidates[:, :-1], logits[:, 1:], candidates[:, 1:])
        order = lattice_order(own[:, 0].log_softmax(-1), steps.log_softmax(-1), place.masked_fill(~found, k), slots, n)
        return ranks, order, candidates.gather(-1, own.argmax(-1, keepdim=True)).squeeze(-1)

    def own_logprobs(self, hidden: Tensor, tokens: Tensor, previous: Tensor, sampling: Sampling) -> Tensor:
        """z-lab's selector samples by temperature alone: top_k and top_p have no effect on it."""
        logits, candidates = self._candidates(hidden)
        own = self.selector.scores(hidden, previous.clamp_min(0)[..., None], logits, candidates).squeeze(-2)
        logprobs = (own / sampling.temperature).log_softmax(-1)
        return logprobs.masked_fill(candidates != tokens[..., None], -torch.inf).amax(-1)

    def _candidates(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probabilities without the selector, and token ids, both [blocks, depth, k]."""
        rows = hidden.flatten(0, 1)
        scores = self.scorer.score(rows, torch.full((len(rows),), -1, device=rows.device))
        shape = (*hidden.shape[:2], self.selector.top_k)
        k = self.selector.top_k
        return scores.logprobs[:, :k].reshape(shape), scores.ids[:, :k].long().reshape(shape)


class MarkovScorer:
    """The head adds a product of the token before to the logits: one matrix product with a wider output head.

    Trees of a budget would need it after every node; they are built from the logits without it.
    """

    def __init__(self, head: MarkovHead, scorer: Scorer) -> None:
        self.head, self.scorer = head, scorer
        self.conditional = scorer.widened(head.markov_w2.weight)

    def orders(
        self, hidden: Tensor, tokens: Tensor, previous: Tensor, slots: Tensor, n: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        scores = self.scorer.score(hidden.flatten(0, 1), tokens.flatten())
        order = prefix_order(scores.logprobs.view(*tokens.shape, -1), scores.ranks.view(tokens.shape), slots, n)
        ranks, _, ids = self.conditional.score(self._with_features(hidden, previous), tokens.flatten())
        ranks = ranks.masked_fill(ranks == self.conditional.n, ABSENT)
        return ranks.view(tokens.shape), order, ids[:, 0].long().view(tokens.shape)

    def own_logprobs(self, hidden: Tensor, tokens: Tensor, previous: Tensor, sampling: Sampling) -> Tensor:
        rows = self._with_features(hidden, previous)
        own = self.conditional.own_logprobs(rows, tokens.flatten().clamp_min(0), sampling).view(tokens.shape)
        return own.masked_fill(tokens < 0, -torch.inf)

    def _with_features(self, hidden: Tensor, previous: Tensor) -> Tensor:
        return torch.cat([hidden, self.head.features(hidden, previous.clamp_min(0))], dim=-1).flatten(0, 1)
