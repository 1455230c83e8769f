"""Block attention on a GPU in one kernel: each block over its sample's context and over itself, one online softmax.

Neither scores nor masks reach memory, blocks may stand at any anchor of any sample, and a tile of the context serves
all slots and query heads of a key head at once.
"""

# mypy: disable-error-code=no-untyped-def
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 64  # context positions at a time


def block_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    context_key: Tensor,
    context_value: Tensor,
    owners: Tensor,
    anchors: Tensor,
    lengths: Tensor,
    window: int | None,
    causal: bool,
    from_anchor: bool = False,
) -> Tensor:
    """What `BlockAttention` computes with plain products, in value's dtype.

    query: [blocks, slots, heads, head_dim], scaled. key, value: [blocks, slots, kv_heads, head_dim]. context_key,
    context_value: [samples, kv_heads, positions, head_dim]. owners, anchors, lengths: [blocks], each block's sample,
    the position of its slot 0 and how many of its slots are real. from_anchor: the window reaches back from the anchor
    for all slots, and leaves the block alone. Returns [blocks, slots, heads * head_dim].
    """
    blocks, slots, heads, head_dim = query.shape
    # Under autocast rotated tensors come in float32, the values in half precision; the kernel takes one dtype.
    query, key, context_key, context_value = (t.to(value.dtype) for t in (query, key, context_key, context_value))
    kv_heads = key.shape[2]
    out = torch.empty_like(query, memory_format=torch.contiguous_format)
    rows, share = max(16, triton.next_power_of_2(slots)), heads // kv_heads
    _kernel[(blocks, kv_heads)](
        query.contiguous(), key.contiguous(), value.contiguous(), context_key, context_value, out,
        owners, anchors, lengths, *context_key.stride()[:3],
        slots, heads, kv_heads,
        ROWS=rows, SHARE=share, PADDED_SHARE=triton.next_power_of_2(share),
        HEAD_DIM=head_dim, PADDED_DIM=max(16, triton.next_power_of_2(head_dim)),
        WINDOW=window or 0, CAUSAL=causal, FROM_ANCHOR=from_anchor, TILE=TILE,
        PRECISION="tf32x3" if query.dtype == torch.float32 else "tf32",  # three tf32 products: as good as float32
        num_warps=4 if rows * share <= 64 else 8,
    )  # fmt: skip
    return out.flatten(2)


@triton.jit
def _kernel(
    query, key, value, context_key, context_value, out,
    owners, anchors, lengths, sample_stride, head_stride, position_stride,
    slots, heads, kv_heads,
    ROWS: tl.constexpr, SHARE: tl.constexpr, PADDED_SHARE: tl.constexpr, HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    WINDOW: tl.constexpr, CAUSAL: tl.constexpr, FROM_ANCHOR: tl.constexpr, TILE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    owner = tl.load(owners + block).to(tl.int64)
    anchor = tl.load(anchors + block).to(tl.int32)
    length = tl.load(lengths + block).to(tl.int32)

    row = tl.arange(0, ROWS * PADDED_SHARE)  # the slots of each query head that shares this key head
    slot, head = row % ROWS, kv_head * SHARE + row // ROWS
    dim = tl.arange(0, PADDED_DIM)
    there = ((slot < slots) & (row // ROWS < SHARE))[:, None] & (dim < HEAD_DIM)[None, :]
    at = ((block * slots + slot) * heads + head)[:, None] * HEAD_DIM + dim[None, :]
    q = tl.load(query + at, mask=there, other=0.0)

    largest = tl.full([ROWS * PADDED_SHARE], -float("inf"), tl.float32)
    total = tl.zeros([ROWS * PADDED_SHARE], tl.float32)
    mixed = tl.zeros([ROWS * PADDED_SHARE, PADDED_DIM], tl.float32)

    begin = 0
    if WINDOW > 0:
        begin = tl.maximum(0, anchor - WINDOW) // TILE * TILE
    base = owner * sample_stride + kv_head.to(tl.int64) * head_stride
    for start in range(begin, anchor, TILE):
        position = start + tl.arange(0, TILE)
        inside = (position < anchor)[:, None] & (dim < HEAD_DIM)[None, :]
        offset = base + position[:, None] * position_stride + dim[None, :]
        k = tl.load(context_key + offset, mask=inside, other=0.0)
        v = tl.load(context_value + offset, mask=inside, other=0.0)
        seen = (position < anchor)[None, :]
        if FROM_ANCHOR and WINDOW > 0:
            seen = seen & (anchor - position <= WINDOW)[None, :]
        elif WINDOW > 0:
            seen = seen & (anchor + slot[:, None] - position[None, :] < WINDOW)
        largest, total, mixed = _mix(q, k, v, seen, largest, total, mixed, PRECISION)

    own = tl.arange(0, ROWS)
    inside = (own < slots)[:, None] & (dim < HEAD_DIM)[None, :]
    offset = ((block * slots + own) * kv_heads + kv_head)[:, None] * HEAD_DIM + dim[None, :]
    k = tl.load(key + offset, mask=inside, other=0.0)
    v = tl.load(value + offset, mask=inside, other=0.0)
    ahead = own[None, :] - slot[:, None]
    seen = (own < length)[None, :] | (ahead == 0)  # a slot past the end sees itself, or it would see nothing
    if CAUSAL:
        seen = seen & (ahead <= 0)
    if WINDOW > 0 and not FROM_ANCHOR:
        seen = seen & (ahead < WINDOW) & (-ahead < WINDOW)
    largest, total, mixed = _mix(q, k, v, seen, largest, total, mixed, PRECISION)

    tl.store(out + at, (mixed / total[:, None]).to(out.dtype.element_ty), mask=there)


@triton.jit
def _mix(q, k, v, seen, largest, total, mixed, PRECISION: tl.constexpr):
    """One more tile of keys and values into a running softmax: its largest score, its sum, the values' sum."""
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * 1.4426950408889634  # log2(e)
    scores = tl.where(seen, scores, -float("inf"))
    now = tl.maximum(largest, tl.max(scores, 1))
    shift = tl.where(now == -float("inf"), 0.0, now)
    weights = tl.exp2(scores - shift[:, None])
    shrink = tl.exp2(largest - shift)
    total = total * shrink + tl.sum(weights, 1)
    mixed = mixed * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision=PRECISION)
    return now, total, mixed


def group_maxima(logits: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """In one pass over logits [rows, vocabulary] float32: the maximum of each group of columns, and log-sum-exp.

    Group g of G = vocabulary // group holds columns g, g + G, g + 2G, ...; columns past group * G are in the sum
    alone. Returns [rows, G] and [rows]; the sum is NaN or infinite where a logit is.
    """
    rows, columns = logits.shape
    groups = columns // group
    maxima = logits.new_empty(rows, groups)
    log_sum = logits.new_empty(rows)
    _group_maxima[(rows,)](
        logits, maxima, log_sum, columns, groups, logits.stride(0), GROUP=group, STEP=512, num_warps=4
    )
    return maxima, log_sum


@triton.jit
def _group_maxima(logits, maxima, log_sum, columns, groups, row_stride, GROUP: tl.constexpr, STEP: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    logits += row * row_stride
    largest = tl.full([STEP], -float("inf"), tl.float32)
    total = tl.zeros([STEP], tl.float32)
    for start in range(0, groups, STEP):
        group = start + tl.arange(0, STEP)
        best = tl.full([STEP], -float("inf"), tl.float32)
        for member in tl.static_range(GROUP):
            logit = tl.load(logits + member * groups + group, mask=group < groups, other=-float("inf"))
            best = tl.maximum(best, logit)
            largest, total = _add_exp(logit, largest, total)
        tl.store(maxima + row * groups + group, best, mask=group < groups)
    rest = GROUP * groups + tl.arange(0, STEP)
    logit = tl.load(logits + rest, mask=rest < columns, other=-float("inf"))
    largest, total = _add_exp(logit, largest, total)
    most = tl.max(largest, 0)
    tl.store(log_sum + row, most + tl.log(tl.sum(total * tl.exp(largest - most), 0)))


@triton.jit
def _add_exp(logit, largest, total):
    """A running log-sum-exp, elementwise: its largest term and the sum of exp(term - largest)."""
    now = tl.maximum(largest, logit)
    shift = tl.where(now == -float("inf"), 0.0, now)
    return now, total * tl.exp(largest - shift) + tl.exp(logit - shift)
