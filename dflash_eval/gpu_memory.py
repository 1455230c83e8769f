"""Whether the target fits into the GPU memory that is free, and who holds the rest."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dflash_eval.cache import DTYPES
from dflash_eval.config import Config
from dflash_eval.errors import UserError
from dflash_eval.forward import HEAD_ROWS
from dflash_eval.machine import pick_device, rank_devices
from dflash_eval.server import is_local, shown_url
from dflash_eval.target import TargetFiles


@dataclass(frozen=True)
class GpuProcess:
    pid: int
    name: str
    bytes: int

    def holds(self, total: int | None = None) -> str:
        of = f" of {gib(total)}" if total else ""
        return f"{Path(self.name).name}, pid {self.pid}, holds {gib(self.bytes)}{of}"


def check_gpu_memory(model: Any, config: Config, files: TargetFiles, layers: Sequence[int]) -> None:
    """Raises UserError when target and batch would not fit into the GPU memory that is free, naming who holds it.

    model: the target on the meta device.
    """
    if pick_device(config.target.device).type != "cuda":
        return
    problem = gpu_problem(config, needed_bytes(model, files, config, layers))
    if problem:
        raise UserError(f"{config.target.model}: {problem}")


def needed_bytes(model: Any, files: TargetFiles, config: Config, layers: Sequence[int]) -> tuple[int, int]:
    """Bytes of the target's weights and of a batch's activations, estimated. model: on the meta device."""
    text = model.config.get_text_config()
    itemsize = DTYPES[config.target.dtype].itemsize
    weights = sum(parameter.numel() for parameter in model.parameters()) * itemsize
    if getattr(model.config, "quantization_config", None):
        weights = sum(file.stat().st_size for file in files.folder.glob("*.safetensors"))
    inner = getattr(text, "intermediate_size", None) or 4 * text.hidden_size
    token = (8 + len(layers)) * text.hidden_size + 3 * inner
    head = HEAD_ROWS * text.vocab_size * 12 if config.extract.target_stats else 0
    return weights, config.extract.max_batch_tokens * token * itemsize + head


def gpu_problem(config: Config, need: tuple[int, int]) -> str | None:
    """Why the need (weights, batch) does not fit on the GPU(s) that the config names; None when it does."""
    devices = rank_devices() if config.target.device_map else [pick_device(config.target.device)]
    memory = [torch.cuda.mem_get_info(device) for device in devices]
    free, total = sum(own[0] for own in memory), sum(own[1] for own in memory)
    if sum(need) <= free:
        return None
    said = f"needs {gib(sum(need))} of GPU memory ({of_what(need)}), {gib(free)} of {gib(total)} are free"
    if sum(need) > total:
        return f"{said}\n" + (
            "more GPUs, or a smaller extract.max_batch_tokens, would make room"
            if config.target.device_map
            else "spread it over several GPUs with target.device_map: auto, or lower extract.max_batch_tokens"
        )
    holders = [process.holds(total) for process in gpu_processes() or [] if process.pid != os.getpid()]
    server = config.completions.server
    if holders:
        mend = f"{'; '.join(holders[:4])}: stop it, extract, start it again"
    elif config.completions.source == "server" and is_local(server):
        mend = f"stop the server at {shown_url(server)} now, extract, start it again; the completions are kept"
    else:
        mend = "free some, or lower extract.max_batch_tokens"
    return f"{said}\n{mend}"


def gpu_processes() -> list[GpuProcess] | None:
    """Who holds GPU memory, by falling share; None where nvidia-smi is not there or does not answer."""
    out = nvidia_smi("--query-compute-apps=pid,process_name,used_memory", "--format=csv,noheader,nounits")
    if out is None:
        return None
    found = []
    for line in out.splitlines():
        fields = [field.strip() for field in line.split(",")]
        if len(fields) >= 3 and fields[0].isdigit():
            mebibytes = int(fields[-1]) if fields[-1].isdigit() else 0  # "[N/A]" in some containers
            found.append(GpuProcess(int(fields[0]), ",".join(fields[1:-1]), mebibytes * 2**20))
    return sorted(found, key=lambda process: -process.bytes)


def nvidia_smi(*query: str) -> str | None:
    """What it prints; None where it is not there or does not answer."""
    try:
        return subprocess.run(["nvidia-smi", *query], capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None


def of_what(need: tuple[int, int]) -> str:
    return f"weights {gib(need[0])}, batch about {gib(need[1])}"


def gib(size: float) -> str:
    return f"{size / 2**30:.1f} GiB"
