"""Phase 1: run the target once, keep what drafters need.

Prompts → completions.jsonl → one forward over every sequence → shards of layer states → manifest. Each step is
durable before the next begins, and the plan (batches, shards) depends on the sequences alone, so that a run that was
killed goes on where it stopped and ends with the same bytes.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from dflash_eval import cache as cachefile
from dflash_eval import ranks
from dflash_eval.cache import Manifest, Sample, Shard
from dflash_eval.completions import complete
from dflash_eval.config import Config
from dflash_eval.drafter.checkpoint import read_config
from dflash_eval.errors import Stopped, UserError, listed
from dflash_eval.gpu_memory import check_gpu_memory
from dflash_eval.lock import lock
from dflash_eval.machine import device_name, pick_device, software
from dflash_eval.progress import progress
from dflash_eval.prompts import Prompt, has_chat_template, load_prompts, render_turn
from dflash_eval.resume import resumable
from dflash_eval.signals import Stop, stoppable
from dflash_eval.states import plan_shards, write_states
from dflash_eval.target import (
    Target,
    TargetFiles,
    find_layers,
    layer_count,
    load_target,
    load_tokenizer,
    require_kernels,
    skeleton,
    tokenizer_fingerprint,
)
from dflash_eval.texts import write_tokenizer

COMPILING_PAYS = 1e17  # floating-point operations: some minutes of a large GPU


def extract(config: Config, *, force: bool = False, say: Callable[[str], None] = print) -> Path:
    """Fill `config.cache_dir`; returns it. A complete cache that fits the config is left as it is.

    Under torchrun every rank calls this, and each does its share. Raises UserError for what the user must mend, a
    cache that does not fit the config among it (unless `force`); Stopped after a signal.
    """
    folder = config.cache_dir
    if ranks.rank() > 0:
        say = _silent
    with ExitStack() as stack:
        stop = stack.enter_context(stoppable())
        stack.enter_context(ranks.group())
        layers, files, tokenizer, prompts, settings = ranks.in_turn(lambda: _asked(config, say))
        stack.enter_context(cachefile.disk_errors(folder))
        begun = ranks.from_first(lambda: _begin(folder, settings, layers, force, stack, say))
        if begun is not None and begun.complete:
            return folder
        if config.completions.source == "server":  # before the target is loaded: the server may hold the GPUs
            from dflash_eval.fetching import fetch_missing

            ranks.from_first(lambda: fetch_missing(folder, config, tokenizer, files, prompts, say))
        _check_target(config, files, layers)
        target = load_target(files, config.target)
        say(f"{config.target.model} on {device_name(target.device)}, kernels: {_kernels(target)}")
        manifest = ranks.from_first(lambda: begun or _new_manifest(folder, config, settings, layers, target))
        samples = complete(folder, config, target, tokenizer, prompts, say)
        if ranks.rank() == 0:
            write_tokenizer(folder, tokenizer)
        manifest.shards = ranks.from_first(lambda: _whole_shards(folder, manifest, samples, target))
        _states(folder, manifest, samples, target, stop, say)
        if ranks.rank() == 0:
            if config.extract.save_head:
                manifest.head_sha256 = cachefile.write_head(folder, target.head())
            if (record := cachefile.read_completions_record(folder)) is not None:
                manifest.provenance["completions"] = record["provenance"]
            manifest.complete = True
            cachefile.write_manifest(folder, manifest)
        ranks.gather(None)  # the cache is whole when any rank says so
    tokens = sum(shard.tokens for shard in manifest.shards)
    say(f"{folder}: {len(samples)} samples, {tokens:,} tokens, layers {listed(manifest.layers)}")
    return folder


Asked = tuple[list[int], TargetFiles, Any, list[Prompt], dict[str, Any]]


def _asked(config: Config, say: Callable[[str], None]) -> Asked:
    """What the config comes to: layers, the target's files and tokenizer, prompts, and the cache's settings."""
    layers = wanted_layers(config)
    files = TargetFiles.find(config.target)
    tokenizer = load_tokenizer(files, config.target)
    if not has_chat_template(tokenizer):
        say(f"{config.target.model} has no chat template: the prompts go in as plain text")
    prompts = load_prompts(config.prompts)
    settings = config.cache_settings()
    settings["target"]["fingerprint"] = files.fingerprint()
    settings["tokenizer"] = {"fingerprint": tokenizer_fingerprint(tokenizer)}
    asked = [render_turn(tokenizer, prompt, config.prompts).ids for prompt in prompts]
    settings["prompts"]["fingerprint"] = _digest(asked + [prompt.turns[1:] for prompt in prompts if prompt.turns[1:]])
    if config.completions.file is not None:
        settings["completions"]["fingerprint"] = _digest_file(config.completions.file)
    return layers, files, tokenizer, prompts, settings


def _begin(
    folder: Path,
    settings: dict[str, Any],
    layers: Sequence[int],
    force: bool,
    stack: ExitStack,
    say: Callable[[str], None],
) -> Manifest | None:
    """Take the cache for this run; the manifest to go on from, or None. One that is complete is verified."""
    stack.enter_context(lock(folder, say))
    cachefile.collect_completions(folder)
    manifest = resumable(folder, settings, layers, force, say)
    if manifest is not None and manifest.complete:
        for shard in manifest.shards:
            cachefile.check_shard(folder, shard)
        say(f"{folder} is complete: {len(manifest.shards)} shards, layers {listed(manifest.layers)}")
    return manifest


def wanted_layers(config: Config) -> list[int]:
    """The layers to keep: those listed, or the union over the drafters', and `extra_layers`; sorted."""
    extra = config.extract.extra_layers
    layers = set() if isinstance(extra, str) else set(extra)
    if isinstance(config.extract.layers, str):
        for drafter in config.drafters:
            layers.update(read_config(drafter).target_layer_ids)
    else:
        layers.update(config.extract.layers)
    if extra == "neighbours":
        there = range(layer_count(TargetFiles.find(config.target, weights=False), config.target))
        layers |= {layer + shift for layer in layers for shift in (-1, 1) if layer + shift in there}
    return sorted(layers)


def _check_target(config: Config, files: TargetFiles, layers: Sequence[int]) -> None:
    """What would stop the run once the weights are read, found before."""
    pick_device(config.target.device)
    if files.gguf:  # its config is slow to read, and it has no linear attention
        return
    model = skeleton(files, config.target)
    _check_layers(config, len(find_layers(model)), layers)
    require_kernels(model, config.target)
    check_gpu_memory(model, config, files, layers)


def _check_layers(config: Config, count: int, layers: Sequence[int]) -> None:
    beyond = [layer for layer in layers if layer >= count]
    if beyond:
        raise UserError(
            f"layers {listed(beyond)} do not exist: {config.target.model} has layers 0 to {count - 1}\n"
            "mend extract.layers, or the drafter whose target_layer_ids name them"
        )


def _new_manifest(
    folder: Path, config: Config, settings: dict[str, Any], layers: list[int], target: Target
) -> Manifest:
    _check_layers(config, len(target.layers), layers)
    manifest = Manifest(
        name=config.name,
        settings=settings,
        layers=layers,
        hidden_size=target.hidden_size,
        vocab_size=target.vocab_size,
        dtype=config.states_dtype(),
        target_stats=config.extract.target_stats,
        batch_tokens=config.extract.max_batch_tokens,
        shard_bytes=config.extract.shard_bytes,
        provenance={
            "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "device": device_name(target.device),
            "kernels": target.kernels,
            "software": software(),
            "target_layers": len(target.layers),
            "ranks": ranks.size(),
        },
    )
    cachefile.write_manifest(folder, manifest)
    return manifest


def _whole_shards(folder: Path, manifest: Manifest, samples: Sequence[Sample], target: Target) -> list[Shard]:
    """The shards that are there, listed; refuses a disk that has no room for the others."""
    for shard in manifest.shards:
        cachefile.check_shard(folder, shard)
    cachefile.adopt_shards(folder, manifest, samples)
    cachefile.write_manifest(folder, manifest)
    needed = sum(map(len, samples)) * manifest.token_bytes() - sum(shard.bytes for shard in manifest.shards)
    needed += sum(tensor.nbytes for tensor in target.head().values())
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise UserError(
            f"{folder}: no disk space: the states need {needed / 2**20:,.1f} MiB, {free / 2**20:,.1f} are free\n"
            "free some space and run the same command, or set cache_dir to a larger disk"
        )
    return manifest.shards


def _states(
    folder: Path,
    manifest: Manifest,
    samples: Sequence[Sample],
    target: Target,
    stop: Stop,
    say: Callable[[str], None],
) -> None:
    """Write the shards that are not there yet, every rank its own; rank 0 lists them."""
    done = {sample_id for shard in manifest.shards for sample_id in cachefile.shard_ids(folder / shard.file)}
    shards = plan_shards(manifest, samples, done)

    def written(shard: Shard) -> None:
        if ranks.rank() == 0:
            manifest.shards.append(shard)
            cachefile.write_manifest(folder, manifest)

    parameters = sum(parameter.numel() for parameter in target.model.parameters())
    work = 2 * parameters * sum(map(len, samples))  # of all samples: a resumed run computes as the first did
    compiled = target.device.type == "cuda" and work > COMPILING_PAYS
    manifest.provenance["compiled"] = compiled
    total = sum(len(samples[i]) for shard in shards for batch in shard.batches for i in batch)
    stop.patient = True
    with progress("extract", total) as advance:
        times = write_states(
            folder, manifest, samples, target, shards,
            stop=stop, compiled=compiled, advance=advance, written=written,
        )  # fmt: skip
    stop.patient = False
    if times.compiling:
        say(f"compiling the target's layers took {times.compiling:.0f} s")
    everywhere = ranks.gather((times.shards, stop.signal))
    if ranks.rank() == 0:
        manifest.shards.extend(shard for own, _ in everywhere[1:] for shard in own)
        manifest.shards.sort(key=lambda shard: shard.file)
        cachefile.write_manifest(folder, manifest)
    signals = [signal for _, signal in everywhere if signal is not None]
    if signals:
        raise Stopped(signals[0])


def _digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]


def _digest_file(path: Path) -> str:
    try:
        return cachefile.sha256(path)[:16]
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); completions.file names it") from None


def _kernels(target: Target) -> str:
    return ", ".join(f"{name} {kernel}" for name, kernel in target.kernels.items())


def _silent(line: str) -> None:
    """What rank 0 says for all."""
