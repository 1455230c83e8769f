"""τ of a set of walks, and what ten prompts can and cannot tell: bootstrap intervals over prompts.

A prompt's cycles are not independent of each other, so prompts are what is drawn anew (a cluster bootstrap), and a
comparison of two drafters draws the same prompts for both (paired).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Interval = tuple[float, float]


def prompt_means(acceptance_lengths: Sequence[Sequence[int]]) -> NDArray[np.float64]:
    """Mean acceptance length of each prompt, [prompts]; NaN for a prompt without a cycle."""
    return np.array([np.mean(lengths) if len(lengths) else np.nan for lengths in acceptance_lengths])


def tau(means: NDArray[np.float64]) -> float | None:
    """Mean over prompts of the prompt's mean, as z-lab prints; prompts without a cycle do not count."""
    return float(np.nanmean(means)) if np.isfinite(means).any() else None


def tau_micro(acceptance_lengths: Sequence[Sequence[int]]) -> float | None:
    """Committed tokens / cycles over all prompts, as DeepSpec prints."""
    cycles = sum(len(lengths) for lengths in acceptance_lengths)
    return sum(sum(lengths) for lengths in acceptance_lengths) / cycles if cycles else None


def bootstrap_interval(values: NDArray[np.float64], draws: int, seed: int) -> Interval | None:
    """95% percentile interval of the mean of `values` [prompts] under resampling; None below two finite values."""
    values = values[np.isfinite(values)]
    if len(values) < 2:
        return None
    rng = np.random.default_rng(seed)
    means = np.concatenate([
        values[rng.integers(len(values), size=(rows, len(values)))].mean(1)
        for rows in _chunks(draws, max(1, 4_000_000 // len(values)))
    ])  # fmt: skip
    low, high = np.percentile(means, [2.5, 97.5])
    return float(low), float(high)


def _chunks(total: int, size: int) -> list[int]:
    return [min(size, total - start) for start in range(0, total, size)]
