"""Length-sorted batches to a token budget."""

from __future__ import annotations

from collections.abc import Sequence


def plan_batches(lengths: Sequence[int], budget: int, extra: int = 0) -> list[list[int]]:
    """Indices by falling length, cut so that rows x (longest + extra) stays within `budget` tokens; at least one row.

    The plan depends on the lengths alone, so that a resumed run forms the same batches.
    """
    batches: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        width = lengths[batches[-1][0]] + extra if batches else 0
        if batches and (len(batches[-1]) + 1) * width <= budget:
            batches[-1].append(index)
        else:
            batches.append([index])
    return batches
