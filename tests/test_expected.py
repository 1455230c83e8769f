"""Expected τ equals what rejection sampling does, simulated."""

import numpy as np
import pytest

from dflash_eval.acceptance.expected import acceptance_probabilities, expected_cycles
from dflash_eval.acceptance.walks import replay


def test_certain_and_impossible_drafts_give_the_walk_itself():
    rng = np.random.default_rng(0)
    start, end, slots = 5, 45, 6
    accepted = (rng.random((end - 1 - start, slots)) < 0.6).astype(float)
    drafts = accepted.cumprod(1).sum(1).astype(int)
    walk = replay([start], [end], 1, lambda _, anchors, __: drafts[anchors - start][:, None])[0][0]
    assert expected_cycles(accepted, start, end) == pytest.approx(len(walk.committed))


def test_nothing_accepted_is_a_cycle_a_token_and_no_anchor_no_cycle():
    assert expected_cycles(np.zeros((9, 4)), 1, 11) == pytest.approx(9)
    assert expected_cycles(np.zeros((0, 4)), 3, 4) == 0.0


def test_equals_the_mean_of_walks_drawn_at_random():
    rng = np.random.default_rng(1)
    start, end, slots = 0, 30, 5
    accepted = rng.random((end - 1 - start, slots))
    counts = []
    for _ in range(20000):
        s, cycles = start, 0
        while s + 1 < end:
            a = 0
            while a < slots and rng.random() < accepted[s - start, a]:
                a += 1
            s, cycles = min(s + a + 1, end - 1), cycles + 1
        counts.append(cycles)
    error = np.std(counts) / np.sqrt(len(counts))
    assert abs(np.mean(counts) - expected_cycles(accepted, start, end)) < 4 * error


def test_an_emitted_token_was_an_accepted_draft_as_often_as_it_says():
    """One step of rejection sampling, as a serving engine does it, tallied by the token that came out."""
    rng = np.random.default_rng(2)
    q, p = rng.dirichlet(np.ones(4)), rng.dirichlet(np.ones(4))
    residual = np.maximum(p - q, 0) / np.maximum(p - q, 0).sum()
    emitted, accepted = np.zeros(4), np.zeros(4)
    for _ in range(60000):
        draft = rng.choice(4, p=q)
        if rng.random() < min(1.0, p[draft] / q[draft]):
            emitted[draft] += 1
            accepted[draft] += 1
        else:
            emitted[rng.choice(4, p=residual)] += 1
    share = accepted / emitted
    wanted = acceptance_probabilities(np.log(q), np.log(p))
    error = np.sqrt(wanted * (1 - wanted) / emitted) + 1e-9
    assert (np.abs(share - wanted) < 4 * error + 1e-6).all()


def test_a_token_that_is_never_drawn_is_no_special_case():
    drafter, target = np.log([[0.5, 1e-300, 0.5, 0.2]]), np.log([[0.5, 0.5, 0.25, 0.4]])
    drafter[0, 1] = target[0, 2] = -np.inf
    assert acceptance_probabilities(drafter, target)[0].tolist() == pytest.approx([1.0, 0.0, 1.0, 0.5])
    both = np.full((1, 1), -np.inf)
    assert acceptance_probabilities(both, both).tolist() == [[0.0]]
