"""DDTree acceptance at every budget at once, without building a tree.

The best-first tree of n nodes (Ringel & Romano 2026, arXiv:2604.12989) holds the n heaviest prefixes, a prefix
weighing the product of its tokens' per-slot probabilities. A prefix of the sequence is therefore inside the tree
exactly when fewer than n prefixes come before it, and one number, that rank, answers for every budget.

Order, ties included: heavier first; then shallower; then, slot by slot, the more probable token.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

ANCHORS_AT_ONCE = {"cpu": 512, "cuda": 8192}  # a GPU takes as long for 256 as for 5,000
NEVER = 1e4  # cost of a token of probability zero: beyond every other prefix, and still a number


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
    inside = order[:, :, None] < limits
    path = _path_costs(top_logprobs, ranks)[:, :, None].masked_fill(~inside, -torch.inf).amax(1)
    cheapest = -top_logprobs[..., 0].double().sum(1, keepdim=True)
    return ~inside.all(1) & (cheapest >= path)


def prefix_order(top_logprobs: Tensor, ranks: Tensor, slots: Tensor, n: int) -> Tensor:
    """How many prefixes come before each prefix of the sequence: [anchors, depth] int64, n where it is n or more."""
    step = ANCHORS_AT_ONCE[ranks.device.type]
    parts = [
        _prefix_order(top_logprobs[i : i + step], ranks[i : i + step], slots[i : i + step], n)
        for i in range(0, len(ranks), step)
    ]
    return torch.cat(parts) if parts else ranks.clone()


def _path_costs(logprobs: Tensor, ranks: Tensor) -> Tensor:
    """[anchors, depth] float64: what each prefix of the sequence costs, -log of its weight."""
    own = logprobs.gather(2, ranks.clamp(0, logprobs.shape[2] - 1)[..., None]).squeeze(2)
    return -own.double().clamp_min(-NEVER).cumsum(1)


def _prefix_order(logprobs: Tensor, ranks: Tensor, slots: Tensor, n: int) -> Tensor:
    _, depth, k = logprobs.shape
    device = logprobs.device
    if (logprobs[..., -1] < -NEVER).any():
        logprobs = logprobs.clamp_min(-NEVER)
    width = min(k, n)
    present = (ranks < width) & (torch.arange(depth, device=device) < slots[:, None])
    # Before a prefix come all those, of its length or shorter, whose tokens are nowhere less probable than its own.
    dominated = (ranks.clamp_max(n) + 1).double().cumprod(1).cumsum(1) - 1
    present = (present & (dominated < n)).int().cumprod(1).bool()
    path = _path_costs(logprobs, ranks).masked_fill(~present, torch.inf)
    sizes = [min(sum(width ** (d + 1) for d in range(s)), 1 << 62) for s in range(depth + 1)]
    everything = torch.tensor(sizes, device=device)[slots]

    # All prefixes up to a cost are listed; the cost is raised until they hold the path or n prefixes. Up to log n there
    # are at most n of a depth, whose weights sum to 1 at most, and of all depths seldom more: begin a little higher.
    wanted = path.masked_fill(~present, -torch.inf).amax(1)
    limit = wanted.clamp_max(math.log(n) + 1)
    order = torch.full_like(ranks, n)
    pending, most = present[:, 0].nonzero().squeeze(1), 2.0
    while len(pending):
        found, count = _count_before(logprobs, ranks, slots, path, pending, limit, width, n, most > 2)
        done = (limit[pending] >= wanted[pending]) | (count >= torch.clamp_max(everything[pending], n))
        order[pending[done]] = found[done]
        pending, count = pending[~done], count[~done]
        limit[pending] += (1.5 * (n / count.clamp_min(1)).log()).clamp(0.2, most)
        limit = torch.minimum(limit, wanted)
        most *= 2
    return order


def _count_before(
    logprobs: Tensor,
    ranks: Tensor,
    slots: Tensor,
    path: Tensor,
    rows: Tensor,
    limit: Tensor,
    width: int,
    n: int,
    prune: bool,
) -> tuple[Tensor, Tensor]:
    """List every prefix of the anchors `rows` that costs at most their `limit`, depth by depth, and count.

    Returns how many come before each prefix of the path ([rows, depth], n where that costs more than the limit), and
    how many there are ([rows], no more than the n cheapest of a depth counted).
    """
    _, depth, k = logprobs.shape
    device = logprobs.device
    flat = logprobs.reshape(-1)
    limit, path, slots, ranks = limit[rows].clone(), path[rows], slots[rows], ranks[rows]
    columns = 1 << depth.bit_length()  # above `depth`, so that the last is always infinite
    stairs = torch.cat([path, path.new_full((len(rows), columns - depth), torch.inf)], 1).flatten()
    cheaper = torch.zeros(len(rows) * columns, dtype=torch.int64, device=device)
    equal = torch.zeros(len(rows), depth, dtype=torch.int64, device=device)

    # One depth's prefixes, by anchor (the index into `rows`), within an anchor by their tokens' ranks, slot by slot.
    anchor = torch.arange(len(rows), device=device)
    cost = torch.zeros(len(rows), dtype=torch.float64, device=device)
    on_path = anchor  # where the path's own prefix is among them; -1 where it costs more than the limit
    for d in range(depth):
        row = (rows * depth + d) * k
        nearest = torch.where(d < slots, flat[row].double(), -torch.inf)
        alive = cost - nearest.index_select(0, anchor) <= limit.index_select(0, anchor)
        parents = alive.nonzero().squeeze(1)
        if not len(parents):
            break
        anchor, cost = anchor.index_select(0, parents), cost.index_select(0, parents)
        begin, room = row.index_select(0, anchor), limit.index_select(0, anchor)
        children = torch.ones_like(parents)
        for step in _halves(width):
            more = (children + (step - 1)).clamp_max(width - 1)
            fits = (cost - flat.index_select(0, begin + more).double() <= room) & (children + step <= width)
            children += step * fits
        start = children.cumsum(0) - children

        at = alive.cumsum(0)[on_path] - 1
        listed = (on_path >= 0) & alive[on_path] & (ranks[:, d] < children[at])
        on_path = torch.where(listed, start[at] + ranks[:, d], -1)
        parent = torch.repeat_interleave(children)
        index = torch.arange(len(parent), device=device) + (begin - start).index_select(0, parent)
        cost = cost.index_select(0, parent) - flat.index_select(0, index).double()
        anchor = anchor.index_select(0, parent)
        if prune:
            kept = _cheapest(anchor, cost, limit, n)
            on_path = torch.where((on_path >= 0) & kept[on_path], kept.cumsum(0)[on_path] - 1, -1)
            anchor, cost = anchor[kept], cost[kept]

        first = anchor * columns
        above = first.clone()  # the first prefix of the path that costs more than this one
        for step in _halves(columns):
            above += step * (stairs.index_select(0, above + (step - 1)) <= cost)
        cheaper += torch.bincount(above, minlength=len(cheaper))
        ties = (stairs.index_select(0, (above - 1).clamp_min(0)) == cost) & (above > first)
        own = on_path[on_path >= 0]
        ties[own] = above[own] > anchor[own] * columns + d + 1
        ties = ties.nonzero().squeeze(1)
        if len(ties):
            owner, later = anchor[ties], torch.arange(depth, device=device)
            before = (d < later) | ((d == later) & (ties < on_path[owner])[:, None])
            equal.index_add_(0, owner, ((path[owner] == cost[ties, None]) & before).long())
    cheaper = cheaper.view(-1, columns).cumsum(1)
    before = (cheaper[:, :depth] + equal).clamp_max(n)
    return before.masked_fill(path > limit[:, None], n), cheaper[:, -1]


def _halves(size: int) -> list[int]:
    """The steps of a binary search among `size` places: powers of two, falling to 1."""
    return [1 << bit for bit in reversed(range((size - 1).bit_length()))]


def _cheapest(anchor: Tensor, cost: Tensor, limit: Tensor, n: int) -> Tensor:
    """Which of a depth's prefixes are no dearer than their anchor's n-th cheapest, to which `limit` is lowered."""
    sizes = torch.bincount(anchor, minlength=len(limit))
    many = sizes > n
    if many.any():
        inside = many[anchor].nonzero().squeeze(1)
        by_cost = inside[cost[inside].argsort()]
        grouped = by_cost[anchor[by_cost].argsort(stable=True)]
        last = (sizes * many).cumsum(0)[many] - sizes[many] + n - 1
        limit[many] = cost[grouped[last]]
    return cost <= limit[anchor]
