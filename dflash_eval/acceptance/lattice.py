"""DDTree acceptance where a token's probability depends on the token before it, among a few candidates a slot.

The tree of n nodes again holds the n heaviest prefixes (`tree.py`), whose weights are now products of conditional
probabilities. They are listed depth by depth, the n heaviest of each: no other can be among the n heaviest of all.
"""

from __future__ import annotations

import torch
from torch import Tensor

ANCHORS_AT_ONCE = {"cpu": 64, "cuda": 1024}
SLACK = 1e-9  # sums in another order differ by less


def lattice_order(first: Tensor, steps: Tensor, path: Tensor, slots: Tensor, n: int) -> Tensor:
    """How many prefixes come before each prefix of the sequence: [anchors, depth] int64, n where it is n or more.

    first: [anchors, k], log-probabilities of the first slot's candidates. steps: [anchors, depth - 1, k, k], of the
    next slot's, after each candidate. path: [anchors, depth] int64, the sequence's token among its slot's candidates, k
    or more where it is none. slots: [anchors] int64, how many slots are drafted. Of equal weights the shallower comes
    first, then the heavier parent's child.
    """
    step = ANCHORS_AT_ONCE[path.device.type]
    parts = [
        _order(first[i : i + step].double(), steps[i : i + step].double(), path[i : i + step], slots[i : i + step], n)
        for i in range(0, len(path), step)
    ]
    return torch.cat(parts) if parts else path.clone()


def _order(first: Tensor, steps: Tensor, path: Tensor, slots: Tensor, n: int) -> Tensor:
    (anchors, depth), k = path.shape, first.shape[1]
    drafted = torch.arange(depth, device=path.device) < slots[:, None]
    present = ((path < k) & drafted).int().cumprod(1).bool()
    weights = _path_costs(first, steps, path.clamp_max(k - 1)).masked_fill(~present, torch.inf)
    most = weights.masked_fill(~present, -torch.inf).amax(1, keepdim=True)  # what weighs less comes before none of them

    costs, last, own = first.new_zeros(anchors, 1), path.new_zeros(anchors, 1), path.new_zeros(anchors, 1)
    listed, places = [], []  # of each depth: the costs of its heaviest prefixes, ascending; which is the sequence's
    for d in range(depth):
        after, tokens = (first[:, None] if d == 0 else steps[:, d - 1]).sort(dim=2, descending=True, stable=True)
        parent, rank = _children(costs.shape[1], k, n, path.device)
        where = last[:, parent] * k + rank  # [anchors, children], in after and tokens
        children = costs[:, parent] - after.flatten(1).gather(1, where)
        children.masked_fill_((children > most + SLACK) | ~drafted[:, d : d + 1], torch.inf)
        among = (tokens.flatten(1).gather(1, where) == path[:, d : d + 1]) & (parent == own)
        costs, place = children.sort(dim=1, stable=True)
        heaviest = int(costs[:, :n].isfinite().sum(1).max().clamp_min(1))
        costs, place = costs[:, :heaviest].contiguous(), place[:, :heaviest]
        found = among.gather(1, place) & present[:, d : d + 1]
        present[:, d:] &= found.any(1, keepdim=True)  # beyond the n heaviest, and so is all that follows
        own, last = found.int().argmax(1, keepdim=True), tokens.flatten(1).gather(1, where).gather(1, place)
        listed.append(costs)
        places.append(own)
    order = torch.cat(places, dim=1)
    for d, weight in enumerate(weights.split(1, dim=1)):
        for other in range(depth):
            if other != d:
                before = torch.searchsorted(listed[other], weight.contiguous(), right=other < d)
                order[:, d : d + 1] += before
    return order.masked_fill(~present, n).clamp_max(n)


def _path_costs(first: Tensor, steps: Tensor, path: Tensor) -> Tensor:
    """[anchors, depth]: the cost of each prefix of the path."""
    begin = first.gather(1, path[:, :1])
    rows = steps.gather(2, path[:, :-1, None, None].expand(-1, -1, 1, steps.shape[3]))[:, :, 0]
    return -torch.cat([begin, rows.gather(2, path[:, 1:, None])[:, :, 0]], dim=1).cumsum(1)


def _children(parents: int, k: int, n: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Parent and rank of every child that can be among the n heaviest: of the i-th parent's, those of rank r have
    (i + 1) (r + 1) - 1 others before them."""
    counts = (n // torch.arange(1, parents + 1, device=device)).clamp_max(k)
    parent = torch.repeat_interleave(counts)
    return parent, torch.arange(len(parent), device=device) - (counts.cumsum(0) - counts)[parent]
