"""What a computation multiplies: its matrix products by shape, their FLOPs, and the time that they alone take."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from dflash_eval.bench.ceiling import median_seconds

Shape = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]  # sizes and strides
PRODUCTS = {torch.ops.aten.mm, torch.ops.aten.bmm, torch.ops.aten.matmul, torch.ops.aten.linear, torch.ops.aten.addmm}


class Matmuls(TorchDispatchMode):
    """Within this context every matrix product of this thread is noted; a kernel's own products are not seen."""

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0
        self.products: Counter[tuple[Any, tuple[Shape, ...]]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func._overloadpacket in PRODUCTS:
            operands = [x for x in args if isinstance(x, Tensor)]
            if func._overloadpacket is torch.ops.aten.addmm:
                operands = operands[1:]
            self.flops += 2 * result.numel() * operands[0].shape[-1]
            shapes = tuple((tuple(x.shape), x.stride(), x.dtype) for x in operands[:2])
            self.products[func._overloadpacket is torch.ops.aten.linear, shapes] += 1
        return result

    def seconds_alone(self, device: torch.device) -> float:
        """The time of the same products on random operands of the same layout, each by the median of a few."""
        total = 0.0
        for (is_linear, shapes), count in self.products.items():
            left, right = (_random(*shape, device) for shape in shapes)
            if is_linear:
                right = right.t()
            total += count * median_seconds(lambda left=left, right=right: left @ right, device, 0.0)  # type: ignore[misc]
        return total


def _random(size: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.empty_strided(size, stride, dtype=dtype, device=device).normal_()
