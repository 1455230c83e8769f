"""DDTree acceptance at every budget at once, without building a tree.

The best-first tree of n nodes (Ringel & Romano 2026, arXiv:2604.12989) holds the n heaviest prefixes, a prefix
weighing the product of its tokens' per-slot probabilities. A prefix of the sequence is therefore inside the tree
exactly when fewer than n prefixes come before it, and one number, that rank, answers for every budget.

Order, ties included: heavier first; then shallower; then the heavier parent's child; then the more probable token.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

ANCHORS_AT_ONCE = {"cpu": 256, "cuda": 8192}  # a GPU takes as long for 256 as for 5,000
ROW_STRIDE = 1e4  # separates the rows in one flat searchsorted; costs are clamped below it


def accepted_in_tree(top_logprobs: Tensor, ranks: Tensor, slots: Tensor, budgets: Sequence[int]) -> Tensor:
    """Accepted drafts a of each anchor's best-first tree, for every budget: [anchors, len(budgets)] int64.

    top_logprobs: [anchors, depth, k] float, each slot's k largest log-probabilities, descending; k is at least
    min(max(budgets), vocabulary). ranks: [anchors, depth] int64, the position of the sequence's token among them;
    k or more means that it is not there (or that the sequence has ended). slots: [anchors] int64, how many slots
    the anchor's block drafts (0 ... depth). budgets: nodes under the root.
    """
    return accepted_within(prefix_order(top_logprobs, ranks, slots, max(budgets)), budgets)


def accepted_within(order: Tensor, budgets: Sequence[int]) -> Tensor:
    """Accepted drafts [anchors, len(budgets)] from `prefix_order`, which grows along a path: counting is enough."""
    limits = torch.tensor(list(budgets), device=order.device)
    return (order[:, :, None] < limits).sum(1)


def settled_within(order: Tensor, top_logprobs: Tensor, ranks: Tensor, budgets: Sequence[int]) -> Tensor:
    """Whether slots beyond those given could not change `accepted_within`: [anchors, len(budgets)] bool.

    So it is where the sequence leaves the tree of n nodes within these slots, and every deeper prefix comes after
    those of the sequence that are inside: a prefix costs no less than the cheapest one of the last depth here.
    """
    limits = torch.tensor(list(budgets), device=order.device)
    logprobs = top_logprobs.double()
    costs = -logprobs.gather(2, ranks.clamp(0, logprobs.shape[2] - 1)[..., None]).squeeze(2)
    inside = order[:, :, None] < limits
    path = costs.cumsum(1)[:, :, None].masked_fill(~inside, -torch.inf).amax(1)
    cheapest = -logprobs[..., 0].sum(1, keepdim=True)
    return ~inside.all(1) & (cheapest >= path)


def prefix_order(top_logprobs: Tensor, ranks: Tensor, slots: Tensor, n: int) -> Tensor:
    """How many prefixes come before each prefix of the sequence: [anchors, depth] int64, n where it is n or more."""
    step = ANCHORS_AT_ONCE[ranks.device.type]
    parts = [
        _prefix_order(top_logprobs[i : i + step, :, :n].double(), ranks[i : i + step], slots[i : i + step], n)
        for i in range(0, len(ranks), step)
    ]
    return torch.cat(parts) if parts else ranks.clone()


def _prefix_order(logprobs: Tensor, ranks: Tensor, slots: Tensor, n: int) -> Tensor:
    _, depth, k = logprobs.shape
    device = logprobs.device
    costs = (-logprobs).clamp_max(ROW_STRIDE / 2)
    drafted = torch.arange(depth, device=device) < slots[:, None]
    present = ((ranks < min(k, n)) & drafted).int().cumprod(1).bool()
    path = costs.gather(2, ranks.clamp(0, k - 1)[..., None]).squeeze(2)
    path = path.cumsum(1).masked_fill(~present, torch.inf)  # cost of each prefix of the sequence

    # All prefixes up to a cost are listed; the cost is raised until they hold the path or n prefixes.
    wanted = path.masked_fill(~present, -torch.inf).amax(1)
    limit = wanted.clamp_max(math.log(n))
    order = torch.full_like(ranks, n)
    pending = present[:, 0].nonzero().squeeze(1)
    while len(pending):
        found, count, exhausted = _count_before(
            costs[pending], ranks[pending], slots[pending], path[pending], limit[pending], n
        )
        done = (limit[pending] >= wanted[pending]) | (count >= n) | exhausted
        order[pending[done]] = found[done]
        pending, count = pending[~done], count[~done]
        limit[pending] += (n / count.clamp_min(1)).log().clamp_min(0.2)
        limit = torch.minimum(limit, wanted)
    return order


def _count_before(
    costs: Tensor, ranks: Tensor, slots: Tensor, path: Tensor, limit: Tensor, n: int
) -> tuple[Tensor, Tensor, Tensor]:
    """List every prefix that costs at most `limit` (and some more), depth by depth; count those before the path's.

    Returns the path's order [anchors, depth], the number of listed prefixes within the limit [anchors], and
    whether the limit left nothing out [anchors].
    """
    anchors, depth, k = costs.shape
    device = costs.device
    keys = (costs + ROW_STRIDE * torch.arange(anchors * depth, device=device).view(anchors, depth, 1)).flatten()
    slack = limit + 1e-6  # rounding in `keys` may list a prefix too many, never one too few
    depths = torch.arange(depth, device=device)

    before = torch.zeros(anchors, depth, dtype=torch.int64, device=device)
    own_order = torch.full((anchors, depth), n, dtype=torch.int64, device=device)
    count = torch.zeros(anchors, dtype=torch.int64, device=device)
    exhausted = torch.ones(anchors, dtype=torch.bool, device=device)

    # The frontier: one depth's prefixes, by anchor and within an anchor in order.
    anchor = torch.arange(anchors, device=device)
    cost = torch.zeros(anchors, dtype=costs.dtype, device=device)
    position = torch.zeros_like(anchor)
    on_path = torch.ones(anchors, dtype=torch.bool, device=device)
    for d in range(depth):
        row = anchor * depth + d
        within = torch.searchsorted(keys, slack[anchor] - cost + ROW_STRIDE * row, right=True) - row * k
        # Children of the i-th parent beyond rank n // (i + 1) have n prefixes of their own depth before them.
        most = (n // (position + 1)).clamp_max(k)
        within = torch.where(d < slots[anchor], within.clamp_min(0), 0)
        exhausted.index_fill_(0, anchor[(within < most) & (d < slots[anchor])], False)
        children = torch.minimum(within, most)
        parent = torch.repeat_interleave(children)
        if not len(parent):
            break
        rank = torch.arange(len(parent), device=device) - (children.cumsum(0) - children)[parent]
        anchor = anchor[parent]
        cost = cost[parent] + costs[anchor, d, rank]
        on_path = on_path[parent] & (rank == ranks[anchor, d])

        cost, by_cost = cost.sort(stable=True)
        anchor, by_anchor = anchor[by_cost].sort(stable=True)
        cost, on_path = cost[by_anchor], on_path[by_cost[by_anchor]]
        sizes = torch.bincount(anchor, minlength=anchors)
        position = torch.arange(len(anchor), device=device) - (sizes.cumsum(0) - sizes)[anchor]
        kept = position < n
        anchor, cost, position, on_path = anchor[kept], cost[kept], position[kept], on_path[kept]

        count += torch.bincount(anchor[cost <= limit[anchor]], minlength=anchors)
        own_order[anchor[on_path], d] = position[on_path]
        # A prefix of this depth comes before a deeper path prefix on a tie, and before a shallower one not.
        lighter = path[anchor] > cost[:, None]
        lighter |= (path[anchor] == cost[:, None]) & (d < depths)
        lighter[:, d] = False
        before.index_add_(0, anchor, lighter.long())
    return (before + own_order).clamp_max(n), count, exhausted
