"""τ and its intervals."""

import numpy as np
import pytest

from dflash_eval.acceptance.statistics import (
    bootstrap_interval,
    bootstrap_ratio_interval,
    minimum_detectable_difference,
    prompt_means,
    tau,
    tau_micro,
    wins_ties_losses,
)


def test_tau_is_the_mean_of_prompt_means_and_tau_micro_the_mean_of_cycles():
    lengths = [[1, 3], [5, 5, 5, 5], []]
    assert tau(prompt_means(lengths)) == pytest.approx(3.5)
    assert tau_micro(lengths) == pytest.approx(4.0)


def test_prompts_without_a_cycle_alone_have_no_tau():
    assert tau(prompt_means([[], []])) is None
    assert tau_micro([[], []]) is None
    assert bootstrap_interval(prompt_means([[], [2]]), 1000, 0) is None


def test_interval_covers_the_true_mean_about_as_often_as_it_says():
    rng = np.random.default_rng(0)
    hits = 0
    for draw in range(300):
        low, high = bootstrap_interval(rng.exponential(3.0, 40), 1000, draw)
        hits += low <= 3.0 <= high
    assert 0.88 <= hits / 300 <= 0.98  # the percentile interval is a little narrow at 40 skewed values


def test_interval_is_that_of_a_plain_loop_over_resamples():
    values = np.array([1.0, 2.0, 4.0, 8.0])
    rng = np.random.default_rng(1)
    slow = [np.mean([values[rng.integers(4)] for _ in range(4)]) for _ in range(20000)]
    assert bootstrap_interval(values, 20000, 7) == pytest.approx(np.percentile(slow, [2.5, 97.5]), abs=0.1)


def test_interval_repeats_with_its_seed():
    values = np.arange(10.0)
    assert bootstrap_interval(values, 500, 3) == bootstrap_interval(values, 500, 3)


def test_ratio_interval_draws_both_together():
    above, below = np.array([2.0, 6.0, 4.0, 9.0, np.nan]), np.array([1.0, 2.0, 4.0, 3.0, 5.0])
    rng = np.random.default_rng(1)
    rows = rng.integers(4, size=(20000, 4))
    slow = [above[row].sum() / below[row].sum() for row in rows]
    assert bootstrap_ratio_interval(above, below, 20000, 7) == pytest.approx(np.percentile(slow, [2.5, 97.5]), rel=0.03)
    assert bootstrap_ratio_interval(2 * below, below, 500, 0) == pytest.approx((2.0, 2.0))
    assert bootstrap_ratio_interval(above[:1], below[:1], 500, 0) is None


def test_a_difference_of_the_detectable_size_is_found_four_times_in_five():
    rng = np.random.default_rng(0)
    size = minimum_detectable_difference(rng.normal(0, 1, 100_000)) * np.sqrt(100_000 / 60)  # at 60 prompts
    found = 0
    for draw in range(400):
        low, high = bootstrap_interval(rng.normal(size, 1, 60), 500, draw)
        found += low > 0 or high < 0
    assert 0.75 <= found / 400 <= 0.88
    assert minimum_detectable_difference(np.array([1.0, np.nan])) is None


def test_wins_ties_and_losses_leave_prompts_without_a_cycle_out():
    assert wins_ties_losses(np.array([1.0, 0.0, -2.0, 3.0, np.nan])) == (2, 1, 1)
