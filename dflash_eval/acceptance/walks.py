"""Walks: which anchors a decoding loop visits, and how many tokens each of its cycles commits.

A walk starts at the prompt's end. At anchor s a cycle accepts a drafts, commits min(a + 1, N - s - 1) tokens and
moves the anchor on by as many, until s + 1 = N. Every acceptance rule (chain, width K, each tree budget) has a walk
of its own, but they share the drafts: what a drafter says at an anchor does not depend on how one came there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Accept = Callable[[NDArray[np.int64], NDArray[np.int64], NDArray[np.bool_]], NDArray[np.int64]]
"""(samples [blocks], anchors [blocks], needed [blocks, rules]) → accepted drafts [blocks, rules], of the rules that are
needed and, as it comes, of others; -1 where it is not known."""


@dataclass(frozen=True)
class Walk:
    """One rule's walk over one sample: per cycle, the drafts accepted and the tokens committed."""

    accepted: list[int]
    committed: list[int]
    rejected: list[tuple[int, int] | None] = field(default_factory=list)
    """Where it was looked for: the draft that ended each cycle, and how many tokens the drafter found more probable
    than the one it should have been; None where the block or the sequence ended the cycle."""


def replay(prompt_lengths: Sequence[int], lengths: Sequence[int], rules: int, accept: Accept) -> list[list[Walk]]:
    """Walk every sample under every rule; returns [samples][rules].

    prompt_lengths: P of each sample; lengths: N. All walks advance together: each round asks `accept` once, for
    the anchors that walks stand at and no round has told their rules of. A completion of 0 or 1 tokens has no cycle.
    """
    walks = [[Walk([], []) for _ in range(rules)] for _ in lengths]
    standing = [[int(p)] * rules for p in prompt_lengths]
    known: dict[tuple[int, int], list[int]] = {}
    unknown = [-1] * rules
    while True:
        asked: dict[tuple[int, int], list[int]] = {}
        for sample, end in enumerate(lengths):
            for rule in range(rules):
                anchor = standing[sample][rule]
                while anchor + 1 < end and (drafts := known.get((sample, anchor), unknown)[rule]) >= 0:
                    tokens = min(drafts + 1, end - anchor - 1)
                    walks[sample][rule].accepted.append(drafts)
                    walks[sample][rule].committed.append(tokens)
                    anchor += tokens
                standing[sample][rule] = anchor
                if anchor + 1 < end:
                    asked.setdefault((sample, anchor), []).append(rule)
        if not asked:
            return walks
        blocks = sorted(asked)
        needed = np.zeros((len(blocks), rules), dtype=np.bool_)
        for row, block in enumerate(blocks):
            needed[row, asked[block]] = True
        samples, anchors = np.array(blocks, dtype=np.int64).T
        for block, found in zip(blocks, accept(samples, anchors, needed), strict=True):
            known[block] = np.maximum(known.get(block, unknown), found).tolist()


def position_acceptance(walks: Sequence[Walk], slots: int) -> list[float]:
    """Share of cycles that accept at least i drafts, for i = 1 ... slots; empty where there is no cycle."""
    accepted = np.array([a for walk in walks for a in walk.accepted])
    return [float((accepted >= i).mean()) for i in range(1, slots + 1)] if len(accepted) else []
