"""What computes: the device, its name, the versions of the software."""

from __future__ import annotations

import sys
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version

import torch

from dflash_eval.errors import UserError


def pick_device(name: str) -> torch.device:
    """`auto` is the GPU where there is one. Raises UserError for a device that is not there."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UserError(f"device {name!r}: not a device; say auto, cpu, cuda or cuda:1") from None
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        found = torch.cuda.device_count()
        raise UserError(f"device {name!r}: PyTorch sees {found} CUDA device{'s' if found != 1 else ''} here")
    return device


def software() -> dict[str, str]:
    """Versions of what computes and stores."""
    names = ("dflash-eval", "torch", "transformers", "flash-linear-attention", "causal-conv1d", "h5py", "numpy")
    versions = {"python": ".".join(map(str, sys.version_info[:3]))}
    for name in names:
        with suppress(PackageNotFoundError):
            versions[name] = version(name)
    return versions


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU ({torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads)"
