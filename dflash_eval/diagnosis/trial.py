"""A reading at work on the excerpts: its acceptance lengths, or quickly how probable the text is under it."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dflash_eval.acceptance.sampling import Sampling
from dflash_eval.acceptance.statistics import sample_means
from dflash_eval.acceptance.walks import Accept, replay
from dflash_eval.config import EvaluateConfig
from dflash_eval.diagnosis.excerpts import Excerpts
from dflash_eval.diagnosis.reading import Reading, read_as
from dflash_eval.drafter.model import DFlashDrafter
from dflash_eval.drafter.scoring import Scorer
from dflash_eval.judge import Judge, judges

SLOTS = 4  # of each block, where the text's log-probability is taken
LEAST_LOGPROB = -20.0  # of a token that the drafter cannot say


class Trials:
    """What all readings of a drafter share: its weights, the excerpts, the target's embedding and head."""

    def __init__(
        self, drafter: DFlashDrafter, excerpts: Excerpts, embedding: Tensor, lm_head: Tensor, config: EvaluateConfig
    ) -> None:
        self.drafter, self.excerpts, self.embedding = drafter, excerpts, embedding
        self.heads = {lm_head.dtype: lm_head}
        self.config = config.model_copy(update={"width": 1, "budgets": (1,)})  # only the chain is walked

    def tau(self, reading: Reading, tokens: int | None = None) -> NDArray[np.float64]:
        """Each excerpt's mean acceptance length, [excerpts]; of its first `tokens` alone where that is given."""
        means = np.full(len(self.excerpts.samples), np.nan)
        for indices, judge in self._judges(reading, self.excerpts if tokens is None else self.excerpts.cut(tokens)):
            starts, ends = [len(sample.prompt_ids) for sample in judge.group], [len(sample) for sample in judge.group]
            walks = replay(starts, ends, 1, _chain_of(judge))
            means[indices] = sample_means([own[0].committed for own in walks])
        return means

    def logprobs(self, reading: Reading, anchors: int, excerpts: Excerpts | None = None) -> NDArray[np.float64]:
        """Each excerpt's mean log-probability of the next SLOTS tokens at so many anchors, [excerpts]."""
        means = np.full(len(self.excerpts.samples), np.nan)
        for indices, judge in self._judges(reading, excerpts or self.excerpts):
            owners, places = some_anchors(judge, anchors)
            hidden, tokens, _ = judge.draft(owners, places)
            hidden, tokens = hidden[:, :SLOTS], tokens[:, :SLOTS]
            there = tokens >= 0
            own = torch.zeros(tokens.shape, device=tokens.device)
            with torch.inference_mode():
                own[there] = judge.scorer.own_logprobs(hidden[there], tokens[there], Sampling()).clamp(LEAST_LOGPROB)
            sums, counts = own.sum(1).double().cpu().numpy(), there.sum(1).cpu().numpy()
            for row, index in enumerate(indices):
                means[index] = sums[owners == row].sum() / max(1, counts[owners == row].sum())
        return means

    def _judges(self, reading: Reading, excerpts: Excerpts) -> Iterator[tuple[list[int], Judge]]:
        lm_head = self.head(reading.dtype)
        drafter = read_as(self.drafter, reading)
        scorer = Scorer(drafter, lm_head, 1)
        embedding = drafter.embedding(self.embedding)
        return judges(drafter, excerpts, embedding, scorer, self.config, lambda _: None)

    def head(self, dtype: torch.dtype) -> Tensor:
        if dtype not in self.heads:
            self.heads[dtype] = next(iter(self.heads.values())).to(dtype)
        return self.heads[dtype]


def some_anchors(judge: Judge, most: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Up to `most` anchors of each of the judge's samples, evenly spaced: (owners, anchors), by owner."""
    owners, anchors, first = judge.every_anchor()
    chosen = []
    for start, end in pairwise(first):
        if end > start:
            chosen.append(np.unique(np.linspace(start, end - 1, min(most, end - start)).astype(np.int64)))
    rows = np.concatenate(chosen)
    return owners[rows], anchors[rows]


def _chain_of(judge: Judge) -> Accept:
    """The judge's first rule alone."""

    def accept(owners: NDArray[np.int64], anchors: NDArray[np.int64], needed: NDArray[np.bool_]) -> NDArray[np.int64]:
        rules = np.zeros((len(anchors), judge.rules), dtype=np.bool_)
        rules[:, :1] = needed
        return judge.accepted(owners, anchors, rules)[:, :1]

    return accept
