"""DDTree acceptance at every budget equals a best-first heap that builds each tree."""

import heapq
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_eval.acceptance.tree import accepted_in_tree, accepted_within, prefix_order, settled_within


def heap_accepted(logprobs: list[list[float]], ranks: list[int], budget: int) -> int:
    """Grow the tree node by node, the heap ordered as the module says: cost, depth, then the path's ranks."""
    k = len(logprobs[0]) if logprobs else 0
    heap = [(-logprobs[0][0], 1, (0,))] if k else []
    tree = set()
    while heap and len(tree) < budget:
        cost, depth, path = heapq.heappop(heap)
        tree.add(path)
        if path[-1] + 1 < k:
            sibling = (*path[:-1], path[-1] + 1)
            heapq.heappush(heap, (costs_of(logprobs, sibling), depth, sibling))
        if depth < len(logprobs):
            heapq.heappush(heap, (cost - logprobs[depth][0], depth + 1, (*path, 0)))
    accepted = 0
    while accepted < len(logprobs) and tuple(ranks[: accepted + 1]) in tree:
        accepted += 1
    return accepted


def costs_of(logprobs, path):
    cost = 0.0
    for d, rank in enumerate(path):
        cost = cost - logprobs[d][rank]
    return cost


def check(logprobs: torch.Tensor, ranks: torch.Tensor, slots: torch.Tensor, budgets: list[int]) -> None:
    ours = accepted_in_tree(logprobs, ranks, slots, budgets).tolist()
    for a in range(len(ranks)):
        rows = logprobs[a, : slots[a]].double().tolist()
        assert ours[a] == [heap_accepted(rows, ranks[a].tolist(), n) for n in budgets]


@pytest.mark.parametrize("sharpness", [0.0, 0.3, 1.0, 3.0, 10.0])
def test_equals_the_heap_on_distributions_from_flat_to_peaked(sharpness):
    generator = torch.Generator().manual_seed(int(sharpness * 10))
    logits = sharpness * torch.randn(40, 6, 50, generator=generator)
    logprobs = logits.log_softmax(-1).sort(-1, descending=True).values
    ranks = torch.distributions.Geometric(0.5).sample((40, 6)).long()
    slots = torch.randint(0, 7, (40,), generator=generator)
    check(logprobs, ranks, slots, [1, 2, 3, 7, 16, 40])


def test_equals_the_heap_when_every_prefix_of_a_depth_ties():
    logprobs = torch.full((3, 5, 4), math.log(0.25))
    ranks = torch.tensor([[0, 0, 0, 0, 0], [3, 3, 3, 3, 3], [1, 2, 0, 3, 1]])
    check(logprobs, ranks, torch.tensor([5, 5, 4]), [1, 4, 5, 12, 20, 21, 84, 85, 200, 400, 2000])


@settings(max_examples=1500, deadline=None)
@given(st.data())
def test_equals_the_heap_on_coarse_weights_full_of_ties(data):
    depth, k = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 6))
    weight = st.integers(1, 4).map(lambda w: -w / 2)
    rows = [sorted(data.draw(st.lists(weight, min_size=k, max_size=k)), reverse=True) for _ in range(depth)]
    ranks = data.draw(st.lists(st.integers(0, k), min_size=depth, max_size=depth))
    slots = data.draw(st.integers(0, depth))
    budgets = sorted({min(n, k) for n in (1, 2, 3, 5)} | ({k, 3 * k, 50} if k < 6 else set()))
    check(torch.tensor([rows]), torch.tensor([ranks]), torch.tensor([slots]), budgets)


def test_among_equal_prefixes_of_a_depth_the_earlier_slots_token_decides_not_when_its_parent_was_added():
    rows = [[-0.5, -0.5, -0.5, -1.5]] * 3  # [1, 0] is in the tree before [0, 3]; [1, 0, 3] comes after [0, 3, 0]
    check(torch.tensor([rows]), torch.tensor([[0, 3, 0]]), torch.tensor([3]), [48, 49, 50, 51])


def test_a_probability_of_zero_or_one_is_no_special_case():
    logprobs = torch.tensor([[[0.0, -torch.inf], [0.0, -torch.inf], [-0.5, -1.0]]])
    assert accepted_in_tree(logprobs, torch.tensor([[0, 0, 1]]), torch.tensor([3]), [1, 2, 3, 4]).tolist() == [
        [1, 2, 2, 3]
    ]


@pytest.mark.parametrize("sharpness", [0.5, 1.5, 4.0])
def test_slots_beyond_those_that_settle_an_anchor_change_nothing(sharpness):
    generator = torch.Generator().manual_seed(int(sharpness * 10))
    logits = sharpness * torch.randn(200, 8, 60, generator=generator)
    logprobs = logits.log_softmax(-1).sort(-1, descending=True).values
    ranks = torch.distributions.Geometric(0.5).sample((200, 8)).long().clamp_max(60)
    slots, budgets = torch.full((200,), 8), [3, 8, 24]
    whole = accepted_within(prefix_order(logprobs, ranks, slots, 24), budgets)
    seen = torch.zeros(3, dtype=torch.int64)
    for depth in range(1, 8):
        order = prefix_order(logprobs[:, :depth], ranks[:, :depth], slots.clamp_max(depth), 24)
        settled = settled_within(order, logprobs[:, :depth], ranks[:, :depth], budgets)
        assert torch.equal(accepted_within(order, budgets)[settled], whole[settled])
        seen += settled.sum(0)
    assert (seen > 0).all()
    assert (seen < 7 * 200).all()
    assert seen[0] > seen[2]  # a small tree is settled sooner
