"""Ranks and log-probabilities equal a full sort of the whole vocabulary."""

import pytest
import torch
from conftest import drafter_json
from hypothesis import given
from hypothesis import strategies as st

from dflash_eval.drafter import scoring
from dflash_eval.drafter.config import DrafterConfig
from dflash_eval.drafter.model import DFlashDrafter
from dflash_eval.errors import UserError


def slow_rank(row: list[float], token: int) -> int:
    return sorted(range(len(row)), key=lambda i: (-row[i], i)).index(token)


@given(st.data())
def test_rank_is_the_place_in_a_stable_sort_ties_and_all(data):
    size = data.draw(st.integers(2, 12))
    n = data.draw(st.integers(1, size))
    rows = data.draw(st.lists(st.lists(st.integers(-3, 3), min_size=size, max_size=size), min_size=1, max_size=4))
    tokens = [data.draw(st.integers(-1, size - 1)) for _ in rows]
    ranks, _, _ = scoring.rank_rows(torch.tensor(rows).float(), torch.tensor(tokens), n)
    assert ranks.tolist() == [
        n if token < 0 else min(n, slow_rank(row, token)) for row, token in zip(rows, tokens, strict=True)
    ]


def test_top_logprobs_are_the_sorted_log_softmax():
    logits = 5 * torch.randn(7, 300)
    _, top, ids = scoring.rank_rows(logits.clone(), torch.zeros(7, dtype=torch.int64), 20)
    torch.testing.assert_close(top, logits.log_softmax(-1).sort(-1, descending=True).values[:, :20])
    assert torch.equal(logits.gather(1, ids.long()), logits.topk(20).values)


@given(st.integers(1, 300), st.integers(1, 2000), st.integers(0, 3))
def test_the_largest_are_topk_whatever_the_sizes(n, vocabulary, seed):
    n = min(n, vocabulary)
    group = scoring.group_size(vocabulary, n)
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randint(-9, 9, (3, vocabulary), generator=generator) + torch.rand(3, 1, generator=generator).round()
    logits[0] += torch.rand(vocabulary, generator=generator)  # one row without ties
    top, ids = scoring.largest(logits, n, scoring.group_maxima(logits, group))
    expected = logits.sort(dim=1, descending=True, stable=True)
    assert torch.equal(top, expected.values[:, :n])
    assert torch.equal(ids, expected.indices[:, :n])  # of equals the lower column first

    maxima = logits[:, : vocabulary // group * group].unflatten(1, (group, -1)).amax(1)
    top, ids = scoring.largest_by_topk(logits, n, maxima)  # the GPU's way
    assert torch.equal(top, expected.values[:, :n])
    assert torch.equal(logits.gather(1, ids), top)
    assert all(len(set(row)) == n for row in ids.tolist())


def test_row_chunks_change_nothing(monkeypatch):
    drafter = DFlashDrafter(DrafterConfig.from_dict(drafter_json(final_logit_softcapping=2.0, output_multiplier=3.0)))
    hidden, head = torch.randn(50, 32), torch.randn(260, 32)
    tokens = torch.randint(-1, 260, (50,))
    whole = scoring.Scorer(drafter, head, 16).score(hidden, tokens)
    monkeypatch.setitem(scoring.LOGIT_BYTES, "cpu", 1)
    for ours, chunked in zip(whole, scoring.Scorer(drafter, head, 16).score(hidden, tokens), strict=True):
        torch.testing.assert_close(ours, chunked)
    logits = 3 * hidden @ head.T
    expected = (2 * torch.tanh(logits / 2)).log_softmax(-1).topk(16).values
    torch.testing.assert_close(whole[1], expected)


@pytest.mark.parametrize("broken", [torch.nan, torch.inf])
def test_a_drafter_that_emits_no_number_is_named_as_broken(broken):
    logits = torch.zeros(20, 5000)
    logits[17, 4999] = broken
    with pytest.raises(UserError, match="not finite"):
        scoring.rank_rows(logits, torch.zeros(20, dtype=torch.int64), 3)


def test_zeros_of_either_sign_are_equal_and_minus_infinity_is_the_last():
    logits = torch.tensor([[-0.0, 0.0, -torch.inf, 0.0, -0.0, 1e-45, -1e-45, -torch.inf]])
    top, ids = scoring.largest(logits, 8, logits)
    assert ids.tolist() == [[5, 0, 1, 3, 4, 6, 2, 7]]
    assert torch.equal(top, logits.gather(1, ids))
