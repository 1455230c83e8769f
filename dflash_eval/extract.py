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
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dflash_eval import cache as cachefile
from dflash_eval import completions
from dflash_eval.acceptance.sampling import Sampling, sampling_logprobs
from dflash_eval.batches import plan_batches
from dflash_eval.cache import Manifest, Sample, ShardWriter
from dflash_eval.config import Config
from dflash_eval.drafter.checkpoint import read_config
from dflash_eval.errors import RunError, UserError
from dflash_eval.machine import device_name, software
from dflash_eval.progress import progress
from dflash_eval.prompts import Prompt, RenderedPrompt, has_chat_template, load_prompts, render_turn, stop_token_ids
from dflash_eval.target import (
    Target,
    TargetFiles,
    capture,
    head_positions,
    load_target,
    load_tokenizer,
    tokenizer_fingerprint,
)

HEAD_ROWS = 512  # completion positions whose logits are reduced at once


def extract(config: Config, *, force: bool = False, say: Callable[[str], None] = print) -> Path:
    """Fill `config.cache_dir`; returns it. A complete cache that fits the config is left as it is.

    Raises UserError for what the user must mend, a cache that does not fit the config among it (unless `force`).
    """
    folder = config.cache_dir
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

    with cachefile.disk_errors(folder), cachefile.lock(folder):
        manifest = _existing(folder, settings, layers, force, say)
        if manifest is not None and manifest.complete:
            for shard in manifest.shards:
                cachefile.check_shard(folder, shard)
            say(f"{folder} is complete: {len(manifest.shards)} shards, layers {_join(manifest.layers)}")
            return folder
        if config.completions.source == "server":  # before the target is loaded: the server may hold the GPUs
            from dflash_eval.fetching import check_gpu_room, fetch_missing

            fetch_missing(folder, config, tokenizer, files, prompts, say)
            check_gpu_room(config, files)
        target = load_target(files, config.target)
        say(f"{config.target.model} on {device_name(target.device)}, kernels: {_kernels(target)}")
        beyond = [layer for layer in layers if layer >= len(target.layers)]
        if beyond:
            raise UserError(
                f"layers {_join(beyond)} do not exist: {config.target.model} has layers 0 to {len(target.layers) - 1}\n"
                "mend extract.layers, or the drafter whose target_layer_ids name them"
            )
        if manifest is None:
            manifest = _new_manifest(config, settings, layers, target)
            cachefile.write_manifest(folder, manifest)
        samples = _completions(folder, config, target, tokenizer, prompts, say)
        _check_room(folder, manifest, samples, target)
        _states(folder, manifest, samples, target)
        if config.extract.save_head:
            manifest.head_sha256 = cachefile.write_head(folder, target.head())
        if (record := cachefile.read_completions_record(folder)) is not None:
            manifest.provenance["completions"] = record["provenance"]
        manifest.complete = True
        cachefile.write_manifest(folder, manifest)
    tokens = sum(shard.tokens for shard in manifest.shards)
    say(f"{folder}: {len(samples)} samples, {tokens:,} tokens, layers {_join(manifest.layers)}")
    return folder


def wanted_layers(config: Config) -> list[int]:
    """The layers to keep: those listed, or the union over the drafters', and `extra_layers`; sorted."""
    layers = set(config.extract.extra_layers)
    if isinstance(config.extract.layers, str):
        for drafter in config.drafters:
            layers.update(read_config(drafter).target_layer_ids)
    else:
        layers.update(config.extract.layers)
    return sorted(layers)


def _existing(
    folder: Path, settings: dict[str, Any], layers: Sequence[int], force: bool, say: Callable[[str], None]
) -> Manifest | None:
    """The manifest to go on from, or None to begin anew; with `force`, what does not fit is removed."""
    try:
        manifest = cachefile.read_manifest(folder)
    except UserError:
        if not force:
            raise
        manifest = None
    if manifest is None:
        if force or not any(folder.glob("states-*.h5")):
            cachefile.delete_states(folder)
            _keep_fetched(folder, settings, force, say)
            return None
        raise UserError(f"{folder}: shards without a manifest; remove the folder, or overwrite it with --force")
    if not manifest.shards and not cachefile.read_completions(folder):  # a run that failed before it had made anything
        cachefile.delete_states(folder)
        return None
    different = cachefile.differences(manifest.settings, settings)
    missing = [layer for layer in layers if layer not in manifest.layers]
    if not different and not missing and not force:
        return manifest
    if not force and different:
        raise UserError(
            f"{folder} is the cache of something else: {different[0]}"
            + (f" (and {len(different) - 1} more)" if len(different) > 1 else "")
            + "\ngive the config another name, or overwrite the cache with --force"
        )
    if not force:
        raise UserError(
            f"{folder} has layers {_join(manifest.layers)}, not {_join(missing)}\n"
            "the same command with --force adds them (the completions are kept)"
        )
    cachefile.delete_states(folder)
    if different:
        cachefile.delete_completions(folder)
    else:
        say(f"{folder}: completions kept, states extracted anew")
    return None


def _keep_fetched(folder: Path, settings: dict[str, Any], force: bool, say: Callable[[str], None]) -> None:
    """Completions without a manifest: those that were fetched for this config stay, others go (with `force`)."""
    record = cachefile.read_completions_record(folder)
    if record is not None:
        known = record["settings"]
        wanted = {
            section: {key: settings[section].get(key) for key in keys}
            for section, keys in known.items()
            if section in settings
        }
        different = cachefile.differences(known, wanted)
        if not different:
            return
        if not force:
            raise UserError(
                f"{folder} holds the completions of something else: {different[0]}\n"
                "give the config another name, or overwrite them with --force"
            )
    cachefile.delete_completions(folder)


def _new_manifest(config: Config, settings: dict[str, Any], layers: list[int], target: Target) -> Manifest:
    return Manifest(
        name=config.name,
        settings=settings,
        layers=layers,
        hidden_size=target.hidden_size,
        vocab_size=target.vocab_size,
        dtype=config.target.dtype,
        target_stats=config.extract.target_stats,
        batch_tokens=config.extract.max_batch_tokens,
        shard_bytes=config.extract.shard_bytes,
        provenance={
            "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "device": device_name(target.device),
            "kernels": target.kernels,
            "software": software(),
            "target_layers": len(target.layers),
        },
    )


def _completions(
    folder: Path,
    config: Config,
    target: Target,
    tokenizer: Any,
    prompts: Sequence[Prompt],
    say: Callable[[str], None],
) -> list[Sample]:
    """The completions in the prompts' order; those that an earlier run finished are not made again.

    Conversations are answered turn by turn, the same turn of all in batches.
    """
    done = cachefile.read_completions(folder)
    wanted = [sample_id for prompt in prompts for sample_id in prompt.sample_ids]
    if set(wanted) <= {sample.id for sample in done}:
        return _in_order(done, wanted)
    stop_ids = stop_token_ids(tokenizer, target.model.generation_config)
    cachefile.write_completions(folder, done)  # drops a line that a killed run left unfinished
    for turn in range(max(len(prompt.turns) for prompt in prompts)):
        answers = {sample.id: sample.text for sample in done}
        rows = [
            render_turn(tokenizer, prompt, config.prompts, [answers[i] for i in prompt.sample_ids[:turn]])
            for prompt in prompts
            if turn < len(prompt.turns)
        ]
        if config.completions.source == "file":
            assert config.completions.file is not None
            limit = config.completions.max_new_tokens
            made = completions.read_file(config.completions.file, tokenizer, rows, limit, target.vocab_size)
            _check_positions(target, made, 0)
            done += made
            continue
        _check_positions(target, rows, config.completions.max_new_tokens)
        for batch in completions.generate(
            target, tokenizer, rows, config.completions, stop_ids, config.extract.max_batch_tokens, done
        ):
            cachefile.append_completions(folder, batch)
            done += batch
    samples = _in_order(done, wanted)
    cachefile.write_completions(folder, samples)
    if config.completions.source == "generate":
        stopped = sum(sample.finish_reason == "stop" for sample in samples)
        say(f"{stopped} of {len(samples)} completions ended by a stop token")
    return samples


def _in_order(done: Sequence[Sample], wanted: Sequence[str]) -> list[Sample]:
    by_id = {
        sample.id: sample for sample in done
    }  # a batch that a killed run left in part stands twice: the last counts
    return [by_id[sample_id] for sample_id in wanted]


def _check_positions(target: Target, rows: Sequence[RenderedPrompt] | Sequence[Sample], new_tokens: int) -> None:
    room = target.max_positions
    for row in rows:
        length = (len(row) if isinstance(row, Sample) else len(row.ids)) + new_tokens
        if room is not None and length > room:
            raise UserError(
                f"prompt {row.id!r} leaves no room: it needs {length} positions with its completion, "
                f"the target has {room}\nshorten the prompt or lower completions.max_new_tokens"
            )


def _check_room(folder: Path, manifest: Manifest, samples: Sequence[Sample], target: Target) -> None:
    """Refuse before the work rather than on a full disk in the middle of it."""
    token_bytes = _token_bytes(manifest)
    needed = sum(map(len, samples)) * token_bytes - sum(shard.bytes for shard in manifest.shards)
    needed += sum(tensor.nbytes for tensor in target.head().values())
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise UserError(
            f"{folder}: no disk space: the states need {needed / 2**30:.1f} GiB, {free / 2**30:.1f} GiB are free\n"
            "free some space and run the same command, or set cache_dir to a larger disk"
        )


def _token_bytes(manifest: Manifest) -> int:
    return len(manifest.layers) * manifest.hidden_size * cachefile.DTYPES[manifest.dtype].itemsize + 12


def _plan(manifest: Manifest, samples: Sequence[Sample]) -> list[list[list[int]]]:
    """Shards of batches of sample indices: consecutive batches until a shard is full."""
    shards: list[list[list[int]]] = []
    size = manifest.shard_bytes
    for batch in plan_batches([len(sample) for sample in samples], manifest.batch_tokens):
        if size >= manifest.shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(batch)
        size += sum(len(samples[i]) for i in batch) * _token_bytes(manifest)
    return shards


def _states(folder: Path, manifest: Manifest, samples: Sequence[Sample], target: Target) -> None:
    """Write the shards that are not there yet."""
    plan = _plan(manifest, samples)
    for shard in manifest.shards:
        cachefile.check_shard(folder, shard)
    todo = plan[len(manifest.shards) :]
    total = sum(len(samples[i]) for shard in todo for batch in shard for i in batch)
    with progress("extract", total) as advance:
        for number, batches in enumerate(todo, len(manifest.shards)):
            inside = [samples[i] for batch in batches for i in batch]
            path = folder / f"states-{number:05d}.h5"
            writer = ShardWriter(
                path, inside, manifest.layers, manifest.hidden_size, manifest.dtype, manifest.target_stats
            )
            try:
                first = 0
                for batch in batches:
                    _forward(target, [samples[i] for i in batch], manifest, writer, first)
                    first += len(batch)
                    advance(sum(len(samples[i]) for i in batch))
                manifest.shards.append(writer.close())
            except BaseException:
                writer.discard()
                raise
            cachefile.write_manifest(folder, manifest)


@torch.inference_mode()
def _forward(target: Target, batch: Sequence[Sample], manifest: Manifest, writer: ShardWriter, first: int) -> None:
    """One forward over right-padded sequences; the states of real tokens go to the shard, from sample `first` on."""
    layers, stats = manifest.layers, manifest.target_stats
    width = max(map(len, batch))
    ids = torch.tensor([sample.input_ids + [0] * (width - len(sample)) for sample in batch], device=target.device)
    lengths = torch.tensor([len(sample) for sample in batch], device=target.device)
    mask = torch.arange(width, device=target.device) < lengths[:, None]
    # The head runs where it says something of a completion token: positions P - 1 ... N - 2 of each row.
    completion = [
        torch.arange(len(sample.prompt_ids) - 1, len(sample) - 1) + row * width for row, sample in enumerate(batch)
    ]
    positions = torch.cat(completion if stats else [torch.empty(0, dtype=torch.int64)]).to(target.device)
    try:
        with capture(target, layers) as states, head_positions(target, positions):
            logits = target.model(input_ids=ids, attention_mask=mask.long(), use_cache=False).logits[0]
    except torch.OutOfMemoryError:
        raise RunError(
            f"the GPU ran out of memory on a batch of {ids.numel()} tokens; finished shards are kept\n"
            "lower extract.max_batch_tokens (with --force) or free the GPU, and run the same command"
        ) from None
    for layer in layers:
        kept = states[layer].to("cpu", cachefile.DTYPES[writer.dtype])
        for row, sample in enumerate(batch):
            writer.write_hidden(first + row, layer, kept[row, : len(sample)])
    if not stats:
        return
    argmax, logprob = token_stats(
        logits, ids.flatten()[(positions + 1).to(ids.device)], manifest.sampling() or Sampling()
    )
    start = 0
    for row, sample in enumerate(batch):
        end = start + len(sample.completion_ids)
        writer.write_stats(first + row, argmax[start:end], logprob[start:end])
        start = end


def token_stats(logits: torch.Tensor, tokens: torch.Tensor, sampling: Sampling) -> tuple[np.ndarray, np.ndarray]:
    """logits [rows, vocabulary], tokens [rows] → the argmax (int32) and the tokens' log-probability (float32).

    The log-probability is that of the distribution the tokens were sampled from; of temperature 1 where they were not.
    """
    argmax, logprob = [np.empty(0, np.int32)], [np.empty(0, np.float32)]
    for start in range(0, len(logits), HEAD_ROWS):
        chunk = logits[start : start + HEAD_ROWS].to(torch.float32, copy=True)
        token = tokens[start : start + HEAD_ROWS].to(chunk.device)
        argmax.append(chunk.argmax(-1).int().cpu().numpy())
        logprob.append(sampling_logprobs(chunk, token, sampling).cpu().numpy())
    return np.concatenate(argmax), np.concatenate(logprob)


def _digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]


def _digest_file(path: Path) -> str:
    try:
        return cachefile.sha256(path)[:16]
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); completions.file names it") from None


def _kernels(target: Target) -> str:
    return ", ".join(f"{name} {kernel}" for name, kernel in target.kernels.items())


def _join(layers: Sequence[int]) -> str:
    return ", ".join(map(str, layers))
