"""τ and its intervals."""

import numpy as np
import pytest

from dflash_eval.acceptance.statistics import (
    bootstrap_interval,
    bootstrap_ratio_interval,
    minimum_detectable_difference,
    sample_means,
    student_interval,
    student_t,
    tau,
    tau_micro,
    wins_ties_losses,
)


def test_tau_is_the_mean_of_sample_means_and_tau_micro_the_mean_of_cycles():
    lengths = [[1, 3], [5, 5, 5, 5], []]
    assert tau(sample_means(lengths)) == pytest.approx(3.5)
    assert tau_micro(lengths) == pytest.approx(4.0)


def test_prompts_without_a_cycle_alone_have_no_tau():
    assert tau(sample_means([[], []])) is None
    assert tau_micro([[], []]) is None
    assert bootstrap_interval(sample_means([[], [2]]), 1000, 0) is None


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


@pytest.mark.parametrize("degrees", [1, 2, 3, 4, 5, 9, 16, 99])
@pytest.mark.parametrize("confidence", [0.95, 1 - 0.05 / 31])
def test_students_t_bounds_as_much_of_its_density_as_it_says(degrees, confidence):
    """Against the midpoint rule on the density in the angle atan(t / sqrt(degrees)): cos to the degrees - 1."""
    angles = (np.arange(200_000) + 0.5) / 200_000 * np.pi / 2
    density = np.cos(angles) ** (degrees - 1)
    inside = angles <= np.arctan(student_t(degrees, confidence) / degrees**0.5)
    assert density[inside].sum() / density.sum() == pytest.approx(confidence, abs=1e-5)


def test_students_interval_is_the_textbooks_and_counts_a_prompt_once():
    values = np.array([1.0, 2.0, 4.0, 8.0])
    half = 3.1824 * values.std(ddof=1) / 2  # t(0.975) of three degrees
    assert student_interval(values) == pytest.approx((3.75 - half, 3.75 + half), abs=1e-3)
    assert student_interval(np.repeat(values, 3), np.repeat(list("abcd"), 3)) == pytest.approx(student_interval(values))
    assert student_interval(np.array([1.0, np.nan])) is None


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


def turns(rng, prompts: int) -> tuple[np.ndarray, list[str]]:
    """Values of conversations of one to four turns, which have half of their spread in common, in mixed order."""
    sizes = rng.integers(1, 5, prompts)
    names = [f"p{i}" for i in np.repeat(np.arange(prompts), sizes)]
    values = np.repeat(rng.normal(0, 1, prompts), sizes) + rng.normal(0, 1, len(names))
    order = rng.permutation(len(names))
    return values[order], [names[i] for i in order]


@pytest.mark.parametrize("measure", ["mean", "ratio"])
def test_a_conversations_turns_are_drawn_together(measure):
    rng = np.random.default_rng(2)
    above, names = turns(rng, 12)
    above[3], below = np.nan, rng.exponential(1.0, len(names)) + 1
    groups: dict[str, list] = {}
    for name, pair in zip(names, zip(above, below, strict=True), strict=True):
        if np.isfinite(pair[0]):
            groups.setdefault(name, []).append(pair)
    draws, slow = np.random.default_rng(7), []
    for _ in range(2000):
        drawn = np.array(
            [pair for i in draws.integers(len(groups), size=len(groups)) for pair in [*groups.values()][i]]
        )
        slow.append(drawn[:, 0].mean() / (drawn[:, 1].mean() if measure == "ratio" else 1))
    found = (
        bootstrap_interval(above, 2000, 7, names)
        if measure == "mean"
        else bootstrap_ratio_interval(above, below, 2000, 7, names)
    )
    assert found == pytest.approx(np.percentile(slow, [2.5, 97.5]), rel=1e-9)


def test_single_turns_are_drawn_as_values_are():
    rng = np.random.default_rng(3)
    values, names = rng.exponential(3.0, 50), [f"p{i}" for i in rng.permutation(50)]
    means = values[np.random.default_rng(7).integers(50, size=(1000, 50))].mean(1)
    assert bootstrap_interval(values, 1000, 7, names) == tuple(np.percentile(means, [2.5, 97.5]))
    assert bootstrap_interval(values, 1000, 7) == tuple(np.percentile(means, [2.5, 97.5]))
    detectable = 2.8015852 * values.std(ddof=1) / np.sqrt(50)
    assert minimum_detectable_difference(values, names) == pytest.approx(detectable, rel=1e-7)


def test_one_conversation_has_no_interval_however_many_turns_it_has():
    values = np.array([1.0, 2.0, 4.0])
    assert bootstrap_interval(values, 500, 0, ["a", "a", "a"]) is None
    assert bootstrap_interval(np.array([1.0, 2.0, np.nan]), 500, 0, ["a", "a", "b"]) is None
    assert minimum_detectable_difference(values, ["a", "a", "a"]) is None


def test_turns_that_repeat_each_other_tell_no_more_than_one():
    values = np.random.default_rng(4).normal(0, 1, 30)
    names = [f"p{i}" for i in range(30)]
    assert bootstrap_interval(np.tile(values, 3), 500, 0, names * 3) == pytest.approx(
        bootstrap_interval(values, 500, 0)
    )
    once = minimum_detectable_difference(values)
    assert minimum_detectable_difference(np.tile(values, 3), names * 3) == pytest.approx(once)
    assert minimum_detectable_difference(np.tile(values, 3)) < 0.6 * once


def test_the_detectable_difference_holds_the_spread_of_means_of_conversations():
    rng = np.random.default_rng(5)
    means = [turns(rng, 100)[0].mean() for _ in range(2000)]
    sizes = [minimum_detectable_difference(*turns(rng, 100)) for _ in range(200)]
    assert np.mean(sizes) == pytest.approx(2.8015852 * np.std(means), rel=0.06)


def test_a_conversation_is_won_once_by_its_mean():
    differences = np.array([1.0, -3.0, 0.5, -0.5, np.nan, 2.0, np.nan, 7.0])
    names = ["lost", "lost", "level", "level", "won", "won", "nothing", "won alone"]
    assert wins_ties_losses(differences, names) == (2, 1, 1)


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
