"""Files of hidden states that other tools save.

vLLM's `extract_hidden_states`: safetensors with hidden_states [tokens, layers, hidden] and token_ids. SpecForge's
offline capture and its like: .ckpt, .ckpt.gz or .pt with input_ids, loss_mask, hidden_states or aux_hidden_state
[tokens, layers * hidden], and the normed last state as target_last_hidden_states or hidden_state. DeepSpec's target
cache: a folder of manifest.json, samples.idx and shards in which every sample's tensors lie back to back.
"""

from __future__ import annotations

import gzip
import json
import pickle
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any, cast

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from dflash_eval.cache import Manifest, Sample
from dflash_eval.errors import UserError, reason
from dflash_eval.prompts import RenderedPrompt

SUFFIXES = (".safetensors", ".ckpt", ".ckpt.gz", ".pt")
INDEX = (
    "samples.idx"  # of DeepSpec: sample, shard, tokens; where input_ids, attention mask, loss mask, states and last are
)
RECORD = struct.Struct("<QIIQQQQQ")
TOKENS = ("token_ids", "input_ids")
STATES = ("hidden_states", "aux_hidden_state")
NORMED_LAST = ("target_last_hidden_states", "hidden_state")


@dataclass
class Saved:
    """A file's sequence: states [tokens, layers, hidden]; last [tokens, hidden], normed, where the file has it."""

    sample: Sample
    states: Tensor
    last: Tensor | None


@dataclass(frozen=True)
class Entry:
    """A sequence that can be read; `place` is for people, `name` the sample's id where no prompt gives one."""

    place: str
    name: str
    read: Callable[[], dict[str, Tensor]]


def list_entries(source: Path) -> list[Entry]:
    """The sequences of a file or folder, in the order of their names."""
    if not source.exists():
        raise UserError(f"{source}: no such file or folder")
    if (source / INDEX).exists():
        return _deepspec(source)
    paths = [source] if source.is_file() else sorted(path for path in source.rglob("*") if path.is_file())
    base = source if source.is_dir() else source.parent
    entries = []
    for path in paths:
        suffix = max((suffix for suffix in SUFFIXES if path.name.endswith(suffix)), key=len, default=None)
        if suffix:
            name = str(path.relative_to(base)).removesuffix(suffix)
            entries.append(Entry(str(path), name, partial(_tensors, path)))
    if not entries:
        raise UserError(f"{source}: no hidden states in it ({', '.join(SUFFIXES)}, or DeepSpec's {INDEX})")
    return entries


def _deepspec(folder: Path) -> list[Entry]:
    try:
        manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
        shards = [folder / Path(shard["file_name"]).name for shard in manifest["shards"]]
        width, hidden = len(manifest["target_layer_ids"]) * manifest["hidden_size"], manifest["hidden_size"]
        dtypes = manifest["hidden_dtype"], manifest["token_dtype"], manifest["mask_dtype"]
        records = list(RECORD.iter_unpack((folder / INDEX).read_bytes()))
        if dtypes != ("bfloat16", "int32", "uint8") or any(record[1] >= len(shards) for record in records):
            raise ValueError(f"version {manifest['version']} is not the known one")
    except (OSError, ValueError, KeyError, TypeError, struct.error) as error:
        raise UserError(f"{folder}: not a target cache of DeepSpec as it is known: {error!r}") from None

    def read(record: tuple[int, ...]) -> dict[str, Tensor]:
        _, shard, tokens, ids, _, mask, states, last = record
        parts = {
            "input_ids": (ids, np.int32, tokens),
            "loss_mask": (mask, np.uint8, tokens),
            "hidden_states": (states, np.uint16, tokens * width),
            "target_last_hidden_states": (last, np.uint16, tokens * hidden),
        }
        content = np.memmap(shards[shard], mode="r")
        tensors = {}
        for name, (start, dtype, count) in parts.items():
            array = content[start : start + count * np.dtype(dtype).itemsize].view(dtype)
            if len(array) != count:
                raise UserError(f"{shards[shard]}: ends before a sample's {name}: truncated")
            tensor = torch.from_numpy(array.copy())
            tensors[name] = tensor.view(torch.bfloat16) if dtype is np.uint16 else tensor
        return tensors

    return [
        Entry(f"{folder / INDEX} sample {record[0]}", f"sample-{record[0]:06d}", partial(read, record))
        for record in records
    ]


def read_saved(
    entry: Entry, manifest: Manifest, layers: int, tokenizer: Any, prompts: Sequence[RenderedPrompt]
) -> Saved:
    """A sequence, up to where its completion ends. Raises UserError for what the manifest's target cannot have.

    Its prompt is the one of `prompts` that it begins with, or what its loss mask leaves out.
    """
    path = entry.place
    limit = manifest.settings["completions"]["max_new_tokens"]
    tensors = entry.read()
    tokens = _pick(path, tensors, TOKENS).flatten().tolist()
    states = _pick(path, tensors, STATES)
    hidden = manifest.hidden_size
    if states.numel() != len(tokens) * layers * hidden or not states.is_floating_point():
        raise UserError(
            f"{path}: the states are {list(states.shape)}; {len(tokens)} tokens, {layers} layers (--layers) and the "
            f"target's hidden size {hidden} do not make that"
        )
    if not torch.isfinite(states).all():
        raise UserError(f"{path}: the states hold NaN or infinity")
    if any(not 0 <= token < manifest.vocab_size for token in tokens):
        raise UserError(f"{path}: token ids beyond the target's vocabulary of {manifest.vocab_size}")
    last = next((tensors[name].reshape(len(tokens), -1) for name in NORMED_LAST if name in tensors), None)
    begun = [prompt for prompt in prompts if tokens[: len(prompt.ids)] == prompt.ids]
    if begun:
        prompt = max(begun, key=lambda prompt: len(prompt.ids))
        start, end = len(prompt.ids), len(tokens)
        name, text, category = prompt.id, prompt.text, prompt.category
    elif "loss_mask" in tensors and tensors["loss_mask"].any():
        start, end = _last_run(tensors["loss_mask"].flatten())
        name, category = entry.name, None
        text = tokenizer.decode(tokens[:start], skip_special_tokens=True)
    else:
        raise UserError(
            f"{path}: where the prompt ends is not known: there is no loss_mask, and the tokens begin with none of the "
            f"prompts of prompts.source ({manifest.settings['prompts']['source']})"
        )
    if not 0 < start <= end <= len(tokens):
        raise UserError(f"{path}: the loss mask leaves no prompt before the completion")
    if end - start > limit:
        raise UserError(
            f"{path}: a completion of {end - start} tokens, completions.max_new_tokens is {limit}; raise it"
        )
    completion = tokens[start:end]
    said = tokenizer.decode(completion, skip_special_tokens=True)
    sample = Sample(name, text, tokens[:start], completion, said, "file", category)
    return Saved(sample, states.reshape(len(tokens), layers, hidden)[:end], None if last is None else last[:end])


def _tensors(path: Path) -> dict[str, Tensor]:
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        with gzip.open(path) if path.suffix == ".gz" else open(path, "rb") as file:
            content = torch.load(cast(IO[bytes], file), map_location="cpu", weights_only=True)
    except (SafetensorError, OSError, EOFError, RuntimeError, ValueError, pickle.UnpicklingError) as error:
        raise UserError(f"{path}: cannot be read as tensors: {reason(error)[:200]}") from None
    if not isinstance(content, dict):
        raise UserError(f"{path}: holds no named tensors")
    return {name: tensor for name, tensor in content.items() if isinstance(tensor, Tensor)}


def _pick(path: str, tensors: dict[str, Tensor], names: Sequence[str]) -> Tensor:
    for name in names:
        if name in tensors:
            return tensors[name]
    raise UserError(f"{path}: no {' or '.join(names)} in it ({', '.join(tensors) or 'no tensors'})")


def _last_run(mask: Tensor) -> tuple[int, int]:
    """Of the positions that count, the last unbroken run: the last answer of a conversation."""
    counted = (mask != 0).tolist()
    end = len(counted) - counted[::-1].index(True)
    start = end
    while start and counted[start - 1]:
        start -= 1
    return start, end
