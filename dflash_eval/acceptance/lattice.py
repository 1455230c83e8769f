"""DDTree acceptance where a token's probability depends on the token before it, among a few candidates a slot.

The tree of n nodes again holds the n heaviest prefixes (`tree.py`), whose weights are now products of conditional
probabilities. They are listed depth by depth, the n heaviest of each: no other can be among the n heaviest of all.
"""

from __future__ import annotations

import torch
from torch import Tensor

ANCHORS_AT_ONCE = {"cpu": 64, "cuda": 1024}


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
    costs = first.new_zeros(anchors, 1)  # of the depth's n heaviest prefixes, ascending
    last = path.new_zeros(anchors, 1)  # the candidate that each ends with
    own = path.new_zeros(anchors, 1)  # which of them is the sequence's
    listed, places, weights = [], [], []
    for d in range(depth):
        after = first[:, None] if d == 0 else steps[:, d - 1].gather(1, last[..., None].expand(-1, -1, k))
        children = (costs[..., None] - after).flatten(1).masked_fill(~drafted[:, d : d + 1], torch.inf)
        child = own * k + path[:, d : d + 1].clamp_max(k - 1)
        weight = children.gather(1, child).masked_fill(~present[:, d : d + 1], torch.inf)
        costs, place = children.sort(dim=1, stable=True)
        costs, place = costs[:, :n], place[:, :n]
        last = place % k
        found = (place == child) & present[:, d : d + 1]
        own = found.int().argmax(1, keepdim=True)
        present[:, d:] &= found.any(1, keepdim=True)  # beyond the n heaviest, and so is all that follows
        weight.masked_fill_(~present[:, d : d + 1], torch.inf)
        listed.append(costs.contiguous())
        places.append(own)
        weights.append(weight)
    order = torch.cat(places, dim=1)
    for d in range(depth):
        for other in range(depth):
            if other != d:
                before = torch.searchsorted(listed[other], weights[d], right=other < d)
                order[:, d : d + 1] += before
    return order.masked_fill(~present, n).clamp_max(n)
