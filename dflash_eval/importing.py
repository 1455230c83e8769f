"""Hidden states that another tool saved → a cache of ours, to judge drafters from without running the target."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from dflash_eval import cache as cachefile
from dflash_eval.acceptance.sampling import Sampling
from dflash_eval.cache import DTYPES, Manifest, Sample, ShardWriter
from dflash_eval.config import Config
from dflash_eval.errors import UserError
from dflash_eval.forward import HEAD_ROWS, token_stats
from dflash_eval.heads import Head, read_head
from dflash_eval.lock import lock
from dflash_eval.machine import pick_device, software
from dflash_eval.progress import progress
from dflash_eval.prompts import RenderedPrompt, load_prompts, render_turn
from dflash_eval.saved_states import Entry, Saved, list_entries, read_saved

# Greedy agreement. SmolLM2's states give 1 on its own greedy text, 0.8 on text that it sampled at temperature 1, 0.5 on
# another author's; those of one layer before the last 0.65, of four before it 0.47; those of other tokens 0.01 to 0.02.
UNRELATED = 0.2
DOUBTFUL, DOUBTFUL_SAMPLED = 0.9, 0.5


def import_states(
    config: Config, source: Path, layers: Sequence[int], *, force: bool = False, say: Callable[[str], None] = print
) -> Path:
    """Fill `config.cache_dir` from the files under `source`; returns it.

    layers: the decoder layers (from 0) that the files' states are of, in their order. A sequence's prompt is the one of
    the config's that it begins with, or what its loss mask leaves out. Raises UserError for what does not fit, states
    and tokens that have nothing to do with each other included.
    """
    folder = config.cache_dir
    entries = list_entries(source)
    described, tokenizer, head = read_head(config.target, say)
    text_config = described.get_text_config()
    beyond = [layer for layer in layers if not 0 <= layer < text_config.num_hidden_layers]
    if beyond or len(set(layers)) != len(layers):
        raise UserError(
            f"--layers {','.join(map(str, layers))}: {config.target.model} has layers 0 to "
            f"{text_config.num_hidden_layers - 1}, each to be named once\n"
            "vLLM counts the first layer's output as 1: give its ids with --ids-from 1"
        )
    prompts = [render_turn(tokenizer, prompt, config.prompts) for prompt in load_prompts(config.prompts)]

    with cachefile.disk_errors(folder), lock(folder):
        if (folder / "manifest.json").exists() or any(folder.glob("states-*.h5")) or cachefile.read_completions(folder):
            if not force:
                raise UserError(f"{folder} holds a cache already; give the config another name, or use --force")
            cachefile.delete_states(folder)
            cachefile.delete_completions(folder)
        manifest = Manifest(
            name=config.name,
            settings=config.cache_settings(),
            layers=sorted(layers),
            hidden_size=text_config.hidden_size,
            vocab_size=len(head.output) if head else text_config.vocab_size,
            dtype=config.states_dtype(),
            target_stats=False,
            batch_tokens=config.extract.max_batch_tokens,
            shard_bytes=config.extract.shard_bytes,
            provenance={
                "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
                "imported": {"from": str(source), "sequences": len(entries)},
                "software": software(),
            },
        )
        try:
            samples = _shards(folder, manifest, entries, layers, tokenizer, prompts, head, config)
            cachefile.write_completions(folder, samples)
            if head is not None and config.extract.save_head:
                manifest.head_sha256 = cachefile.write_head(folder, head.tensors)
        except BaseException:
            cachefile.delete_states(folder)
            raise
        agreement = cachefile.greedy_agreement(folder, manifest.shards)
        if agreement is not None:
            manifest.provenance["imported"]["greedy_agreement"] = agreement
        manifest.complete = True
        cachefile.write_manifest(folder, manifest)
    say(f"{folder}: {len(samples)} sequences, {sum(map(len, samples)):,} tokens, layers {manifest.layers}")
    if agreement is None:
        say("greedy agreement not checked: that takes the head and the last layer's states")
    else:
        say(f"greedy agreement {agreement:.4f}")
    if agreement is not None and agreement < (DOUBTFUL_SAMPLED if manifest.sampling() else DOUBTFUL):
        say(
            "Less than another engine or a quantised target accounts for. Either the last layer's states are another "
            "layer's\n(look at --layers and --ids-from), or the text is not the target's own: another model's or a "
            "person's, or sampled\n(then set completions.temperature). Of text that is not its own, τ says little"
        )
    return folder


def _shards(
    folder: Path,
    manifest: Manifest,
    entries: Sequence[Entry],
    layers: Sequence[int],
    tokenizer: Any,
    prompts: Sequence[RenderedPrompt],
    head: Head | None,
    config: Config,
) -> list[Sample]:
    """Write the files' sequences as shards, in the files' order; returns the samples."""
    found: dict[str, str] = {}
    samples: list[Sample] = []
    group: list[Saved] = []
    with progress("import", len(entries), "sequences") as advance:
        for entry in entries:
            saved = read_saved(entry, manifest, len(layers), tokenizer, prompts)
            if saved.sample.id in found:
                raise UserError(f"{entry.place}: prompt {saved.sample.id!r}, as {found[saved.sample.id]} is already")
            found[saved.sample.id] = entry.place
            group.append(saved)
            if (
                sum(len(other.sample) for other in group) * manifest.token_bytes() >= manifest.shard_bytes
                or entry is entries[-1]
            ):
                _write(folder, manifest, group, layers, head, config)
                _refuse_unrelated(cachefile.greedy_agreement(folder, manifest.shards), entry)
                samples += [other.sample for other in group]
                group = []
            advance(1)
    return samples


def _refuse_unrelated(agreement: float | None, entry: Entry) -> None:
    if agreement is not None and agreement < UNRELATED:
        raise UserError(
            f"greedy agreement {agreement:.4f} up to {entry.place}: not this target's states of these tokens\n"
            "look at the target's name, at --layers and --ids-from, and whether states and token ids stand at the same "
            "positions"
        )


def _write(
    folder: Path,
    manifest: Manifest,
    group: Sequence[Saved],
    layers: Sequence[int],
    head: Head | None,
    config: Config,
) -> None:
    """One shard of these sequences."""
    normed = [_normed(entry, head, layers) for entry in group]
    stats = head is not None and all(states is not None for states in normed)
    if not manifest.shards:
        manifest.target_stats = stats
    path = folder / f"states-{len(manifest.shards):05d}.h5"
    samples = [entry.sample for entry in group]
    writer = ShardWriter(
        path, samples, manifest.layers, manifest.hidden_size, manifest.stored_dtype(), manifest.target_stats
    )
    try:
        for index, entry in enumerate(group):
            for place, layer in enumerate(layers):
                writer.write_hidden(index, layer, entry.states[:, place].to(DTYPES[manifest.dtype]))
            states = normed[index]
            if manifest.target_stats and head is not None and states is not None:
                writer.write_stats(
                    index, *_stats(entry.sample, states, head, manifest.sampling() or Sampling(), config)
                )
        manifest.shards.append(writer.close())
    except BaseException:
        writer.discard()
        raise
    cachefile.write_manifest(folder, manifest)


def _normed(entry: Saved, head: Head | None, layers: Sequence[int]) -> Tensor | None:
    """The last layer's states after the final norm [tokens, hidden], where they are at hand."""
    if head is None:
        return None
    if entry.last is not None:
        return entry.last
    if head.norm is None or head.last_layer not in layers:
        return None
    with torch.inference_mode():
        return head.norm(entry.states[:, layers.index(head.last_layer)].to(next(head.norm.parameters()).dtype))


@torch.inference_mode()
def _stats(sample: Sample, normed: Tensor, head: Head, sampling: Sampling, config: Config) -> tuple[Any, Any]:
    """Argmax and log-probability of each completion token, from normed last states [tokens, hidden]."""
    device = pick_device(config.target.device)
    weight = head.output.to(device)
    positions = torch.arange(len(sample.prompt_ids) - 1, len(sample) - 1)
    tokens = torch.tensor(sample.input_ids)[positions + 1]
    argmax, logprob = [np.empty(0, np.int32)], [np.empty(0, np.float32)]
    for start in range(0, len(positions), HEAD_ROWS):
        rows = slice(start, start + HEAD_ROWS)
        logits = F.linear(normed[positions[rows]].to(device, weight.dtype), weight)
        most_probable, probability = token_stats(logits, tokens[rows], sampling)
        argmax.append(most_probable.cpu().numpy())
        logprob.append(probability.cpu().numpy())
    return np.concatenate(argmax), np.concatenate(logprob)
