"""τ of a set of walks, and what ten prompts can and cannot tell: bootstrap intervals over prompts.

A prompt's cycles are not independent of each other, so prompts are what is drawn anew (a cluster bootstrap), and a
comparison of two drafters draws the same prompts for both (paired).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import NormalDist

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


def bootstrap_interval(values: NDArray[np.float64], draws: int, seed: int, confidence: float = 0.95) -> Interval | None:
    """Percentile interval of the mean of `values` [prompts] under resampling; None below two finite values."""
    return _interval(values[:, None], lambda means: means[:, 0], draws, seed, confidence)


def bootstrap_ratio_interval(
    above: NDArray[np.float64], below: NDArray[np.float64], draws: int, seed: int
) -> Interval | None:
    """95% percentile interval of mean(above) / mean(below), both [prompts] and drawn together.

    With tokens above and cycles below it is the interval of `tau_micro`; with two drafters' prompt means, that of
    the ratio of their τ. None below two prompts that are finite in both.
    """
    return _interval(np.stack([above, below], axis=1), lambda means: means[:, 0] / means[:, 1], draws, seed)


def minimum_detectable_difference(differences: NDArray[np.float64]) -> float | None:
    """The paired difference in τ that this many prompts would show to be one, four times in five.

    (z(0.975) + z(0.8)) s / sqrt(n), s the standard deviation of `differences` [prompts]: the usual sample-size formula
    at 5% significance and 80% power. None below two finite values.
    """
    differences = differences[np.isfinite(differences)]
    if len(differences) < 2:
        return None
    z = NormalDist().inv_cdf(0.975) + NormalDist().inv_cdf(0.8)
    return float(z * differences.std(ddof=1) / np.sqrt(len(differences)))


def wins_ties_losses(differences: NDArray[np.float64]) -> tuple[int, int, int]:
    """Of `differences` [prompts], how many are above, at and below 0; NaN counts nowhere."""
    return int((differences > 0).sum()), int((differences == 0).sum()), int((differences < 0).sum())


def _interval(
    columns: NDArray[np.float64],
    statistic: Callable[[NDArray[np.float64]], NDArray[np.float64]],
    draws: int,
    seed: int,
    confidence: float = 0.95,
) -> Interval | None:
    """Of a statistic [draws] of the columns' means [draws, k]; columns: [prompts, k], drawn by the row."""
    columns = columns[np.isfinite(columns).all(1)]
    if len(columns) < 2:
        return None
    rng = np.random.default_rng(seed)
    means = np.concatenate([
        columns[rng.integers(len(columns), size=(rows, len(columns)))].mean(1)
        for rows in _chunks(draws, max(1, 4_000_000 // columns.size))
    ])  # fmt: skip
    low, high = np.quantile(statistic(means), [(1 - confidence) / 2, (1 + confidence) / 2])
    return float(low), float(high)


def _chunks(total: int, size: int) -> list[int]:
    return [min(size, total - start) for start in range(0, total, size)]
