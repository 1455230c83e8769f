"""Walks equal a slow loop, whatever the rules accept, and share one draft an anchor."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dflash_eval.acceptance.walks import Walk, position_acceptance, replay


def slow_walk(table, prompt_length, length):
    anchor, lengths = prompt_length, []
    while anchor + 1 < length:
        lengths.append(min(table[anchor] + 1, length - anchor - 1))
        anchor += lengths[-1]
    return lengths


@given(st.data())
def test_equals_a_loop_over_one_sample_and_one_rule_at_a_time(data):
    shapes = data.draw(st.lists(st.tuples(st.integers(1, 5), st.integers(0, 12)), min_size=1, max_size=4))
    rules = data.draw(st.integers(1, 3))
    tables = [
        [data.draw(st.lists(st.integers(0, 5), min_size=p + c, max_size=p + c)) for _ in range(rules)]
        for p, c in shapes
    ]
    seen = []

    told = data.draw(st.booleans())  # of the rules that were not asked for too

    def accept(samples, anchors, needed):
        asked = zip(samples.tolist(), anchors.tolist(), needed.tolist(), strict=True)
        seen.extend((s, a, r) for s, a, own in asked for r in range(rules) if own[r] or told)
        found = np.array([[tables[s][r][a] for r in range(rules)] for s, a in zip(samples, anchors, strict=True)])
        return found if told else np.where(needed, found, -1)

    walks = replay([p for p, _ in shapes], [p + c for p, c in shapes], rules, accept)
    for (p, c), table, got in zip(shapes, tables, walks, strict=True):
        assert [w.committed for w in got] == [slow_walk(t, p, p + c) for t in table]
        assert all(sum(w.committed) == max(c - 1, 0) for w in got)
    assert len(seen) == len(set(seen))  # nothing is asked for twice


def test_all_samples_advance_in_the_same_rounds():
    rounds = []

    def accept(samples, anchors, needed):
        rounds.append(len(samples))
        return np.zeros((len(samples), 1), dtype=np.int64)

    replay([1, 1, 1], [6, 4, 6], 1, accept)
    assert rounds == [3, 3, 2, 2]


def test_completions_of_zero_and_one_token_have_no_cycle():
    assert replay([4, 4], [4, 5], 1, lambda *_: 1 / 0) == [[Walk([], [])], [Walk([], [])]]


def test_position_acceptance_counts_cycles_that_accept_at_least_i():
    assert position_acceptance([Walk([0, 2], [1, 3]), Walk([1, 3], [2, 3])], 3) == [0.75, 0.5, 0.25]
    assert position_acceptance([Walk([], [])], 3) == []
