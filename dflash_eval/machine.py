"""What computes: the device, its name and memory, the versions of the software."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TypeVar

import torch

from dflash_eval import ranks
from dflash_eval.errors import RunError, UserError
from dflash_eval.progress import say

T = TypeVar("T")


def pick_device(name: str) -> torch.device:
    """`auto` is the GPU where there is one; of several ranks on a machine each has its own. Raises UserError for a
    device that is not there.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and ranks.local_size() > 1 and torch.cuda.is_available():
        return rank_devices()[0]
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UserError(f"device {name!r}: not a device; say auto, cpu, cuda or cuda:1") from None
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        found = torch.cuda.device_count()
        raise UserError(f"device {name!r}: PyTorch sees {found} CUDA device{'s' if found != 1 else ''} here")
    return device


def rank_devices() -> list[torch.device]:
    """This rank's GPUs: an even share of the machine's, or one that it shares where there are too few."""
    count, mine, all_ = torch.cuda.device_count(), ranks.local_rank(), ranks.local_size()
    first, last = mine * count // all_, (mine + 1) * count // all_
    return [torch.device("cuda", i) for i in range(first, last)] or [torch.device("cuda", mine % max(1, count))]


def software() -> dict[str, str]:
    """Versions of what computes and stores."""
    names = ("dflash-eval", "torch", "transformers", "flash-linear-attention", "causal-conv1d", "h5py", "numpy")
    versions = {"python": ".".join(map(str, sys.version_info[:3]))}
    for name in names:
        with suppress(PackageNotFoundError):
            versions[name] = version(name)
    return versions


def commit() -> str | None:
    """The git commit of this package's source; None where it is installed without one."""
    folder = Path(__file__).parent
    if not (folder.parent / ".git").exists():
        return None
    with suppress(OSError, subprocess.SubprocessError):
        asked = ["git", "-C", str(folder), "rev-parse", "--short=12", "HEAD"]
        return subprocess.run(asked, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    return None


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU ({torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads)"


def free_bytes(device: torch.device) -> int:
    """Memory that an allocation could have now, in bytes."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    with suppress(OSError, ValueError, IndexError):
        text = Path("/proc/meminfo").read_text(encoding="ascii")
        return int(text.split("MemAvailable:")[1].split()[0]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


class Pieces:
    """Work done a piece at a time; when memory runs out, in pieces of half the size from then on, which is said once.

    size: of a piece, in `unit`s.
    """

    def __init__(self, size: int, unit: str) -> None:
        self.size, self.unit = size, unit
        self.said = False

    def run(self, total: int, work: Callable[[slice], T]) -> list[T]:
        """`work` on slices that cover 0 ... total. Raises RunError when a single unit is too much."""
        done: list[T] = []
        start = 0
        while start < total:
            piece = slice(start, min(start + self.size, total))
            try:
                done.append(work(piece))
                start = piece.stop
                continue
            except (MemoryError, RuntimeError) as error:
                if not out_of_memory(error):
                    raise
            self._halve(piece.stop - piece.start)  # outside the except: its traceback holds on to what is to be freed
        return done

    def _halve(self, size: int) -> None:
        if size == 1:
            raise RunError(f"out of memory with a single one of its {self.unit}; free some, or use another device")
        self.size = size // 2
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        if not self.said:
            say(f"out of memory at {size:,} {self.unit}: going on with half as many at once")
            self.said = True


def out_of_memory(error: BaseException) -> bool:
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error)
