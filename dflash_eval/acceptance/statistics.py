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


def bootstrap_interval(values: NDArray[np.float64], draws: int, seed: int) -> Interval | None:
    """95% percentile interval of the mean of `values` [prompts] under resampling; None below two finite values."""
    return _interval(values[:, None], lambda means: means[:, 0], draws, seed)


def bootstrap_ratio_interval(
    above: NDArray[np.float64], below: NDArray[np.float64], draws: int, seed: int, *, small_sample: bool = False
) -> Interval | None:
    """95% percentile interval of mean(above) / mean(below), both [prompts] and drawn together.

    With tokens above and cycles below it is the interval of `tau_micro`; with two drafters' prompt means, that of
    the ratio of their τ. None below two prompts that are finite in both. small_sample: take percentiles further out, as
    few prompts need: Hesterberg's expanded interval (2015, section 5.4), whose level is what t takes of so many.
    """
    columns = np.stack([above, below], axis=1)
    tail = expanded_tail(int(np.isfinite(columns).all(1).sum())) if small_sample else 0.025
    return _interval(columns, lambda means: means[:, 0] / means[:, 1], draws, seed, tail)


def expanded_tail(n: int) -> float:
    """The tail of the bootstrap's percentiles that has the width of Student's 95% interval of n values."""
    if n < 2:
        return 0.025
    return NormalDist().cdf(-((n / (n - 1)) ** 0.5) * _student_975(n - 1))


def _student_975(degrees: int) -> float:
    """Student's t at 0.975: exact for one and two degrees, else Hill's expansion about the normal (1970), to 0.1%."""
    if degrees == 1:
        return 12.7062
    if degrees == 2:
        return 4.3027
    z, d = NormalDist().inv_cdf(0.975), float(degrees)
    return z + sum((
        (z**3 + z) / (4 * d),
        (5 * z**5 + 16 * z**3 + 3 * z) / (96 * d**2),
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * d**3),
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / (92160 * d**4),
    ))  # fmt: skip


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
    tail: float = 0.025,
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
    low, high = np.quantile(statistic(means), [tail, 1 - tail])
    return float(low), float(high)


def _chunks(total: int, size: int) -> list[int]:
    return [min(size, total - start) for start in range(0, total, size)]
