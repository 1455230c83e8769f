"""A completion's text coloured by cycle: where does the drafter lose it?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from typing import Any

Pieces = Callable[[Sequence[int]], list[str]]
"""Token ids → the text that each adds, together the whole text."""

LENGTHS = ((1, "1 token: no draft accepted"), (3, "2–3"), (6, "4–6"), (10, "7–10"), (10**9, "11 or more"))


def coloured(pieces: Sequence[str], sample: dict[str, Any], draft_text: Callable[[int], str]) -> str:
    """HTML of a completion: each cycle's tokens in one tint, the target's own token underlined.

    pieces: a text each completion token; sample: a drafter's entry of the results. The token that the drafter said
    instead of the target's own is in `data-d`, the rank that it gave the target's in `data-r`.
    """
    parts, start = [escape("".join(pieces[:1]))], 1
    lost = zip(sample["rejected_drafts"], sample["rejected_ranks"], strict=True)
    for length, (draft, rank) in zip(sample["acceptance_lengths"], lost, strict=True):
        own, end = "", start + length
        if draft is not None:
            end -= 1
            said = pieces[end]
            newline = ' class="n"' if said.startswith("\n") else ""
            own = f'<b{newline} data-d="{escape(draft_text(draft))}" data-r="{rank}">{escape(said)}</b>'
        tint = next(i for i, (most, _) in enumerate(LENGTHS) if length <= most)
        parts.append(f'<i class="k{tint}">{escape("".join(pieces[start:end]))}{own}</i>')
        start += length
    return "".join(parts)


def tint_legend() -> str:
    tints = "".join(f'<li><i class="k{i}">{told}</i></li>' for i, (_, told) in enumerate(LENGTHS))
    return f'<ul class="legend tints" aria-label="Tokens that a cycle commits">{tints}</ul>'


def chosen_prompts(drafters: Sequence[dict[str, Any]], cycles: int) -> list[int]:
    """The prompts whose text is shown, in their order: all whose cycles fit, else those where most is lost.

    What a prompt loses is the reference's mean acceptance length over the candidates', on average; without a
    reference, the lower the mean the more is lost. cycles: how many can be shown in all.
    """
    count = len(drafters[0]["samples"])
    reference = next((entry for entry in drafters if entry["reference"]), None)

    def mean(entry: dict[str, Any], index: int) -> float:
        lengths = entry["samples"][index]["acceptance_lengths"]
        return sum(lengths) / len(lengths) if lengths else 0.0

    def loss(index: int) -> float:
        others = [mean(entry, index) for entry in drafters if entry is not reference]
        against = mean(reference, index) if reference is not None else 0.0
        return against - sum(others) / max(1, len(others))

    chosen: list[int] = []
    shown = 0
    for index in sorted(range(count), key=loss, reverse=True):
        shown += sum(len(entry["samples"][index]["acceptance_lengths"]) for entry in drafters)
        if shown > cycles and chosen:
            break
        chosen.append(index)
    return sorted(chosen)
