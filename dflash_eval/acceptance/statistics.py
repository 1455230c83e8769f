"""τ of a set of walks, and what ten prompts can and cannot tell: bootstrap intervals over prompts.

A prompt's cycles are not independent of each other, nor are the samples that a conversation's turns make, so prompts
are what is drawn anew, with all their turns (a cluster bootstrap), and a comparison of two drafters draws the same
prompts for both (paired). `prompts` names each sample's prompt; without it every sample is a prompt of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

Interval = tuple[float, float]
Prompts = Iterable[Hashable] | None


def sample_means(acceptance_lengths: Sequence[Sequence[int]]) -> NDArray[np.float64]:
    """Mean acceptance length of each sample, [samples]; NaN for a sample without a cycle."""
    return np.array([np.mean(lengths) if len(lengths) else np.nan for lengths in acceptance_lengths])


def tau(means: NDArray[np.float64]) -> float | None:
    """Mean over samples of the sample's mean, as z-lab prints; samples without a cycle do not count."""
    return float(np.nanmean(means)) if np.isfinite(means).any() else None


def tau_micro(acceptance_lengths: Sequence[Sequence[int]]) -> float | None:
    """Committed tokens / cycles over all samples, as DeepSpec prints."""
    cycles = sum(len(lengths) for lengths in acceptance_lengths)
    return sum(sum(lengths) for lengths in acceptance_lengths) / cycles if cycles else None


def bootstrap_interval(
    values: NDArray[np.float64], draws: int, seed: int, prompts: Prompts = None, confidence: float = 0.95
) -> Interval | None:
    """Percentile interval of the mean of `values` [samples] under resampling of prompts; None below two prompts with
    finite values."""
    return _interval(values[:, None], prompts, lambda means: means[:, 0], draws, seed, confidence=confidence)


def bootstrap_ratio_interval(
    above: NDArray[np.float64],
    below: NDArray[np.float64],
    draws: int,
    seed: int,
    prompts: Prompts = None,
    *,
    small_sample: bool = False,
) -> Interval | None:
    """95% percentile interval of mean(above) / mean(below), both [samples] and drawn together.

    With tokens above and cycles below it is the interval of `tau_micro`; with two drafters' sample means, that of
    the ratio of their τ. None below two prompts that are finite in both. small_sample: take percentiles further out, as
    few prompts need: Hesterberg's expanded interval (2015, section 5.4), whose level is what t takes of so many.
    """
    columns = np.stack([above, below], axis=1)
    return _interval(columns, prompts, lambda means: means[:, 0] / means[:, 1], draws, seed, small_sample)


def student_interval(values: NDArray[np.float64], prompts: Prompts = None, confidence: float = 0.95) -> Interval | None:
    """Student's interval of the mean of `values` [samples] over prompts; None below two prompts with finite values.

    For levels that a bootstrap of few prompts cannot hold: its percentiles never leave the range of the prompts' own
    means, so six that agree by chance (one time in 64) would satisfy any confidence.
    """
    totals, sizes = _totals(values[:, None], prompts)
    if len(sizes) < 2:
        return None
    mean = totals[:, 0].sum() / sizes.sum()
    half = student_t(len(sizes) - 1, confidence) * _standard_error(totals, sizes)
    return float(mean - half), float(mean + half)


def expanded_tail(n: int) -> float:
    """The tail of the bootstrap's percentiles that has the width of Student's 95% interval of n values."""
    if n < 2:
        return 0.025
    return NormalDist().cdf(-((n / (n - 1)) ** 0.5) * student_t(n - 1, 0.95))


def student_t(degrees: int, confidence: float) -> float:
    """The t that |T| stays below with probability `confidence`: by bisection of the sums of Abramowitz & Stegun 26.7.3
    and 26.7.4 in the angle atan(t / sqrt(degrees))."""
    low, high = 0.0, np.pi / 2
    for _ in range(60):
        angle = (low + high) / 2
        low, high = (angle, high) if _student_within(angle, degrees) < confidence else (low, angle)
    return float(np.sqrt(degrees) * np.tan(low))


def _student_within(angle: float, degrees: int) -> float:
    odd = degrees % 2
    j = np.arange(1, (degrees - odd) // 2)  # the terms after the first: each is the one before times a factor
    factors = (2 * j - 1 + odd) / (2 * j + odd) * np.cos(angle) ** 2
    if not odd:
        return float(np.sin(angle) * (1 + np.cumprod(factors).sum()))
    series = np.sin(angle) * np.cos(angle) * (1 + np.cumprod(factors).sum()) if degrees > 1 else 0.0
    return float(2 / np.pi * (angle + series))


def minimum_detectable_difference(differences: NDArray[np.float64], prompts: Prompts = None) -> float | None:
    """The paired difference in τ that this many prompts would show to be one, four times in five.

    (z(0.975) + z(0.8)) times the standard error of the mean of `differences` [samples]: the usual sample-size formula
    at 5% significance and 80% power. The error is s / sqrt(n) of n samples of standard deviation s; where prompts have
    several, that of a ratio of prompts' totals (Cochran 1977, section 6.4). None below two prompts with finite values.
    """
    totals, sizes = _totals(differences[:, None], prompts)
    if len(sizes) < 2:
        return None
    z = NormalDist().inv_cdf(0.975) + NormalDist().inv_cdf(0.8)
    return float(z * _standard_error(totals, sizes))


def _standard_error(totals: NDArray[np.float64], sizes: NDArray[np.float64]) -> float:
    """Of the mean: prompts' totals [prompts, 1] over their samples [prompts]."""
    residuals = totals[:, 0] - sizes * (totals[:, 0].sum() / sizes.sum())
    deviation = np.sqrt((residuals * residuals).sum() / (len(sizes) - 1))
    return float(deviation / np.sqrt(len(sizes)) / sizes.mean())


def wins_ties_losses(differences: NDArray[np.float64], prompts: Prompts = None) -> tuple[int, int, int]:
    """How many prompts are above, at and below 0 in the mean of their `differences` [samples]; NaN counts nowhere."""
    totals, _ = _totals(differences[:, None], prompts)
    return int((totals > 0).sum()), int((totals == 0).sum()), int((totals < 0).sum())


def _interval(
    columns: NDArray[np.float64],
    prompts: Prompts,
    statistic: Callable[[NDArray[np.float64]], NDArray[np.float64]],
    draws: int,
    seed: int,
    small_sample: bool = False,
    confidence: float = 0.95,
) -> Interval | None:
    """Of a statistic [draws] of the columns' means [draws, k]; columns: [samples, k], drawn by the prompt."""
    totals, sizes = _totals(columns, prompts)
    if len(sizes) < 2:
        return None
    rng = np.random.default_rng(seed)
    means = []
    for rows in _chunks(draws, max(1, 4_000_000 // totals.size)):
        drawn = rng.integers(len(sizes), size=(rows, len(sizes)))
        means.append(totals[drawn].sum(1) / sizes[drawn].sum(1)[:, None])
    tail = expanded_tail(len(sizes)) if small_sample else (1 - confidence) / 2
    low, high = np.quantile(statistic(np.concatenate(means)), [tail, 1 - tail])
    return float(low), float(high)


def _totals(columns: NDArray[np.float64], prompts: Prompts) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Each prompt's sums of the columns [prompts, k] and samples in them [prompts], in order of appearance.

    columns: [samples, k]; a sample that is not finite in all of them is left out.
    """
    finite = np.logical_and.reduce(np.isfinite(columns), axis=1)
    kept = columns[finite]
    if prompts is None:
        return kept, np.ones(len(kept))
    numbers: dict[Hashable, int] = {}
    own = [numbers.setdefault(prompt, len(numbers)) for prompt, there in zip(prompts, finite, strict=True) if there]
    totals = np.zeros((len(numbers), columns.shape[1]))
    np.add.at(totals, own, kept)
    return totals, np.bincount(own, minlength=len(numbers)).astype(np.float64)


def _chunks(total: int, size: int) -> list[int]:
    return [min(size, total - start) for start in range(0, total, size)]
