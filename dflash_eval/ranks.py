"""Several processes at one job, as torchrun starts them: who am I, what do all agree on, what has each one done.

Ranks exchange plans and manifests alone (gloo, over TCP); states never travel. A single process is rank 0 of 1.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

from dflash_eval.errors import GateFailed, RunError, Stopped, UserError, reason

T = TypeVar("T")
PATIENCE = timedelta(hours=24)  # for a rank that still computes; one that dies is noticed at once


def rank() -> int:
    return int(os.environ.get("RANK", 0))


def size() -> int:
    return int(os.environ.get("WORLD_SIZE", 1))


def local_rank() -> int:
    """The rank among those of this machine."""
    return int(os.environ.get("LOCAL_RANK", 0))


def local_size() -> int:
    return int(os.environ.get("LOCAL_WORLD_SIZE", 1))


@contextmanager
def group() -> Iterator[None]:
    """Within this context the ranks can talk. Raises RunError when one of them dies."""
    if size() == 1:
        yield
        return
    import torch.distributed as dist

    try:
        dist.init_process_group("gloo", timeout=PATIENCE)
    except (RuntimeError, ValueError) as error:
        raise RunError(
            f"rank {rank()} of {size()} cannot reach the others: {reason(error)}; start them with torchrun"
        ) from None
    try:
        yield
    finally:
        dist.destroy_process_group()


def from_first(work: Callable[[], T]) -> T:
    """What `work` returns on rank 0, on every rank. Its error ends them all; rank 0 alone tells it."""
    if size() == 1:
        return work()
    said: list[Any] = [None, 0]
    failure: UserError | RunError | Stopped | None = None
    if rank() == 0:
        try:
            said[0] = work()
        except (UserError, RunError, Stopped) as error:
            failure, said[1] = error, exit_status(error)
    _collective("broadcast_object_list", said)
    if failure is not None:
        raise failure
    if said[1]:
        sys.exit(said[1])
    return said[0]


def in_turn(work: Callable[[], T]) -> T:
    """`work` on rank 0, then on the others: what is wrong for all is told once, what is downloaded is there."""
    own: list[T] = []
    from_first(lambda: own.append(work()))
    return own[0] if own else work()


def gather(value: T) -> list[T]:
    """Every rank's value, by rank, on every rank."""
    if size() == 1:
        return [value]
    values: list[Any] = [None] * size()
    _collective("all_gather_object", values, value)
    return values


def deal(work: Sequence[T], weights: Sequence[int]) -> list[T]:
    """This rank's share: a run of neighbours, as even by weight as they can be cut. The shares cover the work."""
    total, before, mine = sum(weights), 0, []
    for item, weight in zip(work, weights, strict=True):
        middle = before + weight / 2
        if min(size() - 1, int(middle * size() / max(1, total))) == rank():
            mine.append(item)
        before += weight
    return mine


def exit_status(error: BaseException) -> int:
    if isinstance(error, Stopped):
        return 128 + error.signal
    return 3 if isinstance(error, GateFailed) else 2 if isinstance(error, UserError) else 1


def _collective(name: str, *arguments: Any) -> None:
    import torch.distributed as dist

    try:
        getattr(dist, name)(*arguments)
    except RuntimeError:
        raise RunError(
            "another rank has died; what is whole is kept\nrun the same command to resume, with any number of ranks"
        ) from None
