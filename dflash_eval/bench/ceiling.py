"""What the machine can do at best: the yardstick that a benchmark's rate is read against."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch


def matmul_ceiling(device: torch.device, dtype: torch.dtype, size: int | None = None, seconds: float = 1.0) -> float:
    """FLOP/s of a large square matrix product through torch: the median of as many as fit into `seconds`.

    size: rows and columns; 8192 on a GPU and 2048 on a CPU fill the chip.
    """
    n = size or (8192 if device.type == "cuda" else 2048)
    a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
    return 2 * n**3 / median_seconds(lambda: torch.mm(a, b), device, seconds)


def median_seconds(work: Callable[[], object], device: torch.device, seconds: float = 1.0) -> float:
    """Median wall time of `work`, run at least three times and for about `seconds`, after one run to warm up."""
    work()
    times: list[float] = []
    while len(times) < 3 or sum(times) < seconds:
        synchronize(device)
        start = time.perf_counter()
        work()
        synchronize(device)
        times.append(time.perf_counter() - start)
    return sorted(times)[len(times) // 2]


def synchronize(device: torch.device) -> None:
    """Wait until the device has done all it was given; a CPU always has."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
