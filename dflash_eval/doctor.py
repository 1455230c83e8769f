"""What an extraction needs and what is there: a page before the work, rather than out of memory in the midst of it."""

from __future__ import annotations

import shutil
import socket
from collections.abc import Callable, Sequence
from typing import Any
from urllib.parse import urlsplit

import torch

from dflash_eval import cache as cachefile
from dflash_eval.config import Config
from dflash_eval.errors import UserError
from dflash_eval.extract import wanted_layers
from dflash_eval.gpu_memory import gib, gpu_problem, gpu_processes, needed_bytes, nvidia_smi, of_what
from dflash_eval.machine import device_name, pick_device, rank_devices, software
from dflash_eval.prompts import load_prompts, render_turn
from dflash_eval.server import is_local, shown_url
from dflash_eval.target import TargetFiles, fallbacks, how_to_have, kernels_of, load_tokenizer, skeleton

Say = Callable[[str], None]


def doctor(config: Config, say: Say) -> int:
    """Say what the extraction of `config` would find here; returns how many things stand in its way."""
    wrong: list[str] = []

    def check(line: str, problem: str | None = None) -> None:
        say(f"{'✗' if problem else '✓'} {line}" + (f"\n    {problem}" if problem else ""))
        if problem:
            wrong.append(problem)

    layers, files = wanted_layers(config), TargetFiles.find(config.target)
    versions = software()
    check(", ".join(f"{name} {versions[name]}" for name in ("python", "torch", "transformers", "h5py")))
    _say_gpus(check)
    model = skeleton(files, config.target)
    device, problem = _device(config)
    _say_kernels(model, config, device, check)
    if problem is None and device.type == "cuda":
        need = needed_bytes(model, files, config, layers)
        where = rank_devices() if config.target.device_map else [device]
        free = sum(torch.cuda.mem_get_info(gpu)[0] for gpu in where)
        problem = gpu_problem(config, need)
        check(f"GPU memory: {gib(sum(need))} needed ({of_what(need)}), {gib(free)} free", problem)
    else:
        check(f"target.device {config.target.device}" + ("" if problem else f": {device_name(device)}"), problem)
    found = gpu_processes()
    say("· nvidia-smi is not here: which processes hold GPU memory cannot be told" if found is None else
        "· GPU memory is held by: " + (", ".join(process.holds() for process in found) or "nobody"))  # fmt: skip
    server = config.completions.server
    if config.completions.source == "server":
        answers = server_answers(server.base_url)
        beside = answers and is_local(server) and device.type == "cuda"
        check(
            f"server {shown_url(server)}: {'answers' if answers else 'does not answer'}"
            + (", and leaves the target room enough" if beside and not problem else ""),
            "it still runs on the GPUs that the target needs: fetch the completions, stop it, extract, start it again"
            if beside and problem
            else None,
        )
    _say_disk(model, config, layers, files, check)
    return len(wrong)


def server_answers(url: str) -> bool:
    """Whether anything listens at the address."""
    parts = urlsplit(url)
    try:
        socket.create_connection(
            (parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)), 3
        ).close()
    except OSError:
        return False
    return True


def _say_gpus(check: Callable[..., None]) -> None:
    out = nvidia_smi("--query-gpu=driver_version", "--format=csv,noheader")
    driver = "not found" if out is None else out.split("\n")[0]
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    check(
        f"CUDA {torch.version.cuda or '(torch is built without)'}, driver {driver}, GPUs: {', '.join(gpus) or 'none'}"
    )


def _say_kernels(model: Any, config: Config, device: torch.device, check: Callable[..., None]) -> None:
    kernels = kernels_of(model, device)
    missing = fallbacks(model, config.target.required(), device)
    names = ", ".join(name for names in missing.values() for name in names)
    check(
        "kernels: " + ", ".join(f"{name} {kernel}" for name, kernel in kernels.items()),
        f"the config asks for {', '.join(missing)}: {how_to_have(missing)}; {names}" if missing else None,
    )


def _device(config: Config) -> tuple[torch.device, str | None]:
    try:
        return pick_device(config.target.device), None
    except UserError as error:
        return torch.device("cpu"), str(error)


def _say_disk(
    model: Any, config: Config, layers: Sequence[int], files: TargetFiles, check: Callable[..., None]
) -> None:
    text = model.config.get_text_config()
    prompts, known = load_prompts(config.prompts), cachefile.read_completions(config.cache_dir)
    if {sample_id for prompt in prompts for sample_id in prompt.sample_ids} <= {sample.id for sample in known}:
        tokens, how = sum(map(len, known)), ""
    else:
        tokenizer = load_tokenizer(files, config.target)
        tokens, how = 0, "up to "
        for prompt in prompts:  # each turn is a sequence of its own, with what was said before
            turns = len(prompt.turns)
            tokens += turns * len(render_turn(tokenizer, prompt, config.prompts).ids)
            tokens += turns * (turns + 1) // 2 * config.completions.max_new_tokens
    stored = config.extract.store or config.target.dtype
    needed = tokens * cachefile.token_bytes(len(layers), text.hidden_size, stored, config.extract.target_stats)
    if config.extract.save_head:
        tables = 1 if text.tie_word_embeddings else 2
        needed += tables * text.vocab_size * text.hidden_size * cachefile.DTYPES[config.target.dtype].itemsize
    folder = config.cache_dir.absolute()
    there = next(parent for parent in [folder, *folder.parents] if parent.exists())
    free = shutil.disk_usage(there).free
    problem = "free some space, or set cache_dir to a larger disk, or extract.store: float8" if needed > free else None
    if not there.is_dir():
        problem = f"{there} is a file; cache_dir names a folder"
    check(
        f"disk: {how}{gib(needed)}, {tokens:,} tokens in {len(layers)} layers; {gib(free)} free at {config.cache_dir}",
        problem,
    )
