"""The cache of phase 1: manifest.json, completions.jsonl, states-*.h5, head.safetensors.

The only file that knows the HDF5 layout. A shard is written aside and renamed when whole, so a file under its own
name is complete; bfloat16 is stored bit for bit as uint16 with the attribute `dtype`.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from dflash_eval.acceptance.sampling import Sampling
from dflash_eval.errors import UserError

SCHEMA_VERSION = 1
AGAIN = "extract again with --force (the completions are kept)"
SHARD_NAME = re.compile(r"states-\d{5}\.h5")
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
STORED = {"bfloat16": np.uint16, "float16": np.float16, "float32": np.float32}


@dataclass(frozen=True)
class Sample:
    """One line of completions.jsonl: a prompt and what the target answered."""

    id: str
    prompt: str
    prompt_ids: list[int]
    completion_ids: list[int]
    text: str
    finish_reason: str  # "stop" (a stop token) | "length" (max_new_tokens) | "file" (not known)

    @property
    def input_ids(self) -> list[int]:
        return self.prompt_ids + self.completion_ids

    def __len__(self) -> int:
        return len(self.prompt_ids) + len(self.completion_ids)


@dataclass
class Shard:
    file: str
    samples: int
    tokens: int
    bytes: int
    sha256: str


@dataclass
class Manifest:
    """What a cache is: `settings` must agree with a config for the cache to serve it; `provenance` tells its making."""

    name: str
    settings: dict[str, Any]
    layers: list[int]
    hidden_size: int
    vocab_size: int
    dtype: str
    target_stats: bool
    batch_tokens: int  # with shard_bytes, what the shards were planned by; a resumed run plans by the same
    shard_bytes: int
    provenance: dict[str, Any]
    shards: list[Shard] = field(default_factory=list)
    head_sha256: str | None = None
    complete: bool = False
    schema_version: int = SCHEMA_VERSION

    def sampling(self) -> Sampling | None:
        """How the completions were drawn; None where they are greedy."""
        completions = self.settings["completions"]
        if completions["temperature"] == 0:
            return None
        return Sampling(completions["temperature"], completions["top_k"], completions["top_p"])

    def fingerprint(self) -> str:
        """Names the content: settings, layers and shards, not the machine that wrote them."""
        content = [self.settings, self.layers, self.dtype, [shard.sha256 for shard in self.shards]]
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


# Writing


@contextmanager
def lock(folder: Path) -> Iterator[None]:
    """Hold the cache for writing; the kernel lets go of it when the process ends, however it ends."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{folder}: cannot be made ({error.strerror}); cache_dir names it") from None
    with open(folder / ".lock", "w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UserError(f"{folder}: another extraction is writing this cache; wait for it or stop it") from None
        yield


@contextmanager
def disk_errors(folder: Path) -> Iterator[None]:
    """Turn a full or read-only disk into a plain error; finished shards stay."""
    try:
        yield
    except OSError as error:
        full = error.errno == errno.ENOSPC or "No space left" in str(error) or "errno = 28" in str(error)
        if full:
            raise UserError(
                f"{folder}: no space left on the disk; finished shards are kept\n"
                "free some space and run the same command to resume"
            ) from None
        if error.errno in (errno.EACCES, errno.EROFS, errno.EDQUOT):
            raise UserError(f"{folder}: not writable ({os.strerror(error.errno)})") from None
        raise


def write_atomically(path: Path, text: str) -> None:
    aside = path.with_name(f".{path.name}.tmp")
    with open(aside, "w", encoding="utf-8") as handle:
        handle.write(text)
        handle.flush()
        os.fsync(handle.fileno())
    os.replace(aside, path)


def write_manifest(folder: Path, manifest: Manifest) -> None:
    write_atomically(folder / "manifest.json", json.dumps(asdict(manifest), indent=2) + "\n")


def append_completions(folder: Path, samples: Sequence[Sample]) -> None:
    """Append whole lines and make them durable."""
    lines = "".join(json.dumps(asdict(sample), ensure_ascii=False) + "\n" for sample in samples)
    with open(folder / "completions.jsonl", "a", encoding="utf-8") as handle:
        handle.write(lines)
        handle.flush()
        os.fsync(handle.fileno())


def write_completions(folder: Path, samples: Sequence[Sample]) -> None:
    lines = [json.dumps(asdict(sample), ensure_ascii=False) + "\n" for sample in samples]
    write_atomically(folder / "completions.jsonl", "".join(lines))


def write_head(folder: Path, tensors: dict[str, Tensor]) -> str:
    """tensors: `embed_tokens.weight` and `lm_head.weight` [vocabulary, hidden] (absent when tied), `norm.weight`.

    Returns the file's sha256.
    """
    aside = folder / ".head.safetensors.tmp"
    save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, aside)
    digest = sha256(aside)
    os.replace(aside, folder / "head.safetensors")
    return digest


def delete_states(folder: Path) -> None:
    """Remove everything but the completions; the manifest goes first, so that no half-deleted cache looks whole."""
    for path in [folder / "manifest.json", folder / "head.safetensors", *sorted(folder.glob("states-*.h5"))]:
        path.unlink(missing_ok=True)
    for path in folder.glob(".*.tmp"):
        path.unlink()


class ShardWriter:
    """Writes one shard aside; `close` makes it durable and gives it its name."""

    def __init__(
        self, path: Path, samples: Sequence[Sample], layers: Sequence[int], hidden: int, dtype: str, stats: bool
    ) -> None:
        self.path = path
        self.aside = path.with_name(f".{path.name}.tmp")
        self.samples = samples
        self.dtype = dtype
        self.offsets = np.concatenate([[0], np.cumsum([len(sample) for sample in samples])]).astype(np.int64)
        tokens = int(self.offsets[-1])
        self.file = h5py.File(self.aside, "w", libver="latest")
        ids = np.array([i for sample in samples for i in sample.input_ids], dtype=np.int32)
        self.file["sample_ids"] = np.array([sample.id for sample in samples], dtype=h5py.string_dtype())
        self.file["offsets"] = self.offsets
        self.file["prompt_lengths"] = np.array([len(sample.prompt_ids) for sample in samples], dtype=np.int64)
        self.file["input_ids"] = ids
        self.hidden = {
            layer: self.file.create_dataset(f"hidden/{layer}", (tokens, hidden), STORED[dtype]) for layer in layers
        }
        for dataset in self.hidden.values():
            dataset.attrs["dtype"] = dtype
        if stats:
            self.argmax = self.file.create_dataset("argmax", (tokens,), np.int32, fillvalue=-1)
            self.logprob = self.file.create_dataset("logprob", (tokens,), np.float32, fillvalue=np.nan)

    def write_hidden(self, index: int, layer: int, states: Tensor) -> None:
        """states: [len(sample), hidden] of sample `index` of the shard, in the shard's dtype, on the CPU."""
        start, end = self.offsets[index : index + 2]
        self.hidden[layer][start:end] = to_stored(states)

    def write_stats(self, index: int, argmax: NDArray[np.int32], logprob: NDArray[np.float32]) -> None:
        """Both [completion tokens]: of the token after each position from the prompt's last one on."""
        start = self.offsets[index] + len(self.samples[index].prompt_ids) - 1
        self.argmax[start : start + len(argmax)] = argmax
        self.logprob[start : start + len(logprob)] = logprob

    def close(self) -> Shard:
        self.file.close()
        digest = sha256(self.aside)
        with open(self.aside, "rb") as handle:
            os.fsync(handle.fileno())
        size = self.aside.stat().st_size
        os.replace(self.aside, self.path)
        return Shard(self.path.name, len(self.samples), int(self.offsets[-1]), size, digest)

    def discard(self) -> None:
        self.file.close()
        self.aside.unlink(missing_ok=True)


def to_stored(states: Tensor) -> NDArray[Any]:
    """A CPU tensor as the array that HDF5 keeps: bfloat16's bits as uint16."""
    return (states.contiguous().view(torch.uint16) if states.dtype == torch.bfloat16 else states.contiguous()).numpy()


def from_stored(array: NDArray[Any], dtype: str) -> Tensor:
    return torch.from_numpy(array).view(DTYPES[dtype]) if dtype == "bfloat16" else torch.from_numpy(array)


def sha256(path: Path) -> str:
    with open(path, "rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest() if hasattr(hashlib, "file_digest") else _sha256(handle)


def _sha256(handle: Any) -> str:  # Python 3.10
    digest = hashlib.sha256()
    while block := handle.read(1 << 20):
        digest.update(block)
    return digest.hexdigest()


# Reading


def read_manifest(folder: Path) -> Manifest | None:
    """None where there is none. Raises UserError for a file that is not a manifest of ours."""
    path = folder / "manifest.json"
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        if raw["schema_version"] != SCHEMA_VERSION:
            raise UserError(
                f"{path}: schema version {raw['schema_version']}, this dflash-eval reads version {SCHEMA_VERSION}\n"
                "extract again with --force"
            )
        manifest = Manifest(**{**raw, "shards": [Shard(**shard) for shard in raw["shards"]]})
        # Caches from before these keys were drawn from all tokens.
        manifest.settings["completions"] = {"top_k": 0, "top_p": 1.0, **manifest.settings["completions"]}
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path}: not a readable manifest ({error}); extract again with --force") from None
    for shard in manifest.shards:
        if not SHARD_NAME.fullmatch(shard.file):
            raise UserError(f"{path}: {shard.file!r} is not the name of a shard; extract again with --force")
    return manifest


def read_completions(folder: Path) -> list[Sample]:
    """The lines of completions.jsonl; a last line that a killed run left unfinished is passed over."""
    path = folder / "completions.jsonl"
    if not path.exists():
        return []
    samples = []
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    for number, line in enumerate(lines[:-1], 1):
        try:
            samples.append(Sample(**json.loads(line)))
        except (ValueError, TypeError) as error:
            raise UserError(f"{path}:{number}: not a completion ({error}); remove the file to generate anew") from None
    return samples


def differences(cached: dict[str, Any], wanted: dict[str, Any]) -> list[str]:
    """Lines `section.key: the cache has ..., the config says ...` for what `wanted` holds."""
    return [
        f"{section}.{key}: the cache has {cached.get(section, {}).get(key)!r}, the config gives {value!r}"
        for section, keys in wanted.items()
        for key, value in keys.items()
        if cached.get(section, {}).get(key) != value
    ]


def check_shard(folder: Path, shard: Shard) -> None:
    """Raises UserError unless the file is there, whole and the one that was written."""
    path = folder / shard.file
    if not path.exists():
        raise UserError(f"{path}: missing, though the manifest lists it; {AGAIN}")
    if path.stat().st_size != shard.bytes:
        raise UserError(
            f"{path}: {path.stat().st_size} bytes where {shard.bytes} were written: truncated or replaced\n{AGAIN}"
        )
    if sha256(path) != shard.sha256:
        raise UserError(f"{path}: its content is not what was written (sha256 differs): damaged or replaced\n{AGAIN}")


class Cache:
    """A complete cache, open for reading. Shards are verified when it opens."""

    def __init__(self, folder: Path) -> None:
        manifest = read_manifest(folder)
        if manifest is None:
            raise UserError(f"{folder}: no cache here; run the extraction first (dflash-eval extract)")
        if not manifest.complete:
            raise UserError(f"{folder}: the extraction is not finished; run dflash-eval extract again to resume it")
        self.folder = folder
        self.manifest = manifest
        self.samples = read_completions(folder)
        self._where: dict[str, tuple[str, int]] = {}
        self._offsets: dict[str, NDArray[np.int64]] = {}
        self._held: dict[tuple[str, int], Tensor] = {}  # (shard, layer) → [tokens, hidden]
        stored: dict[str, tuple[int, list[int]]] = {}  # prompt length and tokens, as the target saw them
        for shard in manifest.shards:
            check_shard(folder, shard)
            with _open_shard(folder / shard.file) as file:
                offsets, lengths, ids = (file[name][:] for name in ("offsets", "prompt_lengths", "input_ids"))
                self._offsets[shard.file] = offsets
                for index, sample_id in enumerate(file["sample_ids"].asstr()[:]):
                    self._where[sample_id] = (shard.file, index)
                    stored[sample_id] = int(lengths[index]), ids[offsets[index] : offsets[index + 1]].tolist()
        missing = [
            sample.id for sample in self.samples if stored.get(sample.id) != (len(sample.prompt_ids), sample.input_ids)
        ]
        if missing or len(self._where) != len(self.samples):
            which = ", ".join(missing[:3]) or "extra"
            raise UserError(
                f"{folder}: completions.jsonl and the shards hold different samples ({which})\n"
                "extract again with --force"
            )

    def hold(self, layers: Sequence[int], limit: int) -> None:
        """Read these layers' states once and keep them in memory, as far as `limit` bytes go."""
        layer_bytes = sum(shard.tokens for shard in self.manifest.shards) * self.manifest.hidden_size
        layer_bytes *= DTYPES[self.manifest.dtype].itemsize
        for layer in layers[: limit // max(1, layer_bytes)]:
            for shard in self.manifest.shards:
                with _open_shard(self.folder / shard.file) as file:
                    self._held[shard.file, layer] = from_stored(file[f"hidden/{layer}"][:], self.manifest.dtype)

    def features(self, sample_id: str, layers: Sequence[int]) -> Tensor:
        """Context features [tokens, len(layers) * hidden] in the cache's dtype: the layers' states side by side."""
        name, index = self._where[sample_id]
        start, end = self._offsets[name][index : index + 2]
        missing = [layer for layer in layers if (name, layer) not in self._held]
        read: dict[int, Tensor] = {}
        if missing:
            with _open_shard(self.folder / name) as file:
                read = {
                    layer: from_stored(file[f"hidden/{layer}"][start:end], self.manifest.dtype) for layer in missing
                }
        return torch.cat(
            [read[layer] if layer in read else self._held[name, layer][start:end] for layer in layers], dim=-1
        )

    def logprobs(self, sample_id: str) -> NDArray[np.float64]:
        """Log-probability of each completion token under the sampling distribution; the cache has target_stats."""
        name, index = self._where[sample_id]
        with _open_shard(self.folder / name) as file:
            start, end = file["offsets"][index : index + 2]
            first = start + file["prompt_lengths"][index] - 1
            return np.asarray(file["logprob"][first : end - 1], dtype=np.float64)

    def greedy_agreement(self) -> float | None:
        """Share of completion tokens equal to the target's argmax; None without target_stats or tokens."""
        agreed = total = 0
        for shard in self.manifest.shards:
            with _open_shard(self.folder / shard.file) as file:
                if "argmax" not in file:
                    return None
                argmax, ids = file["argmax"][:-1], file["input_ids"][1:]
                inside = argmax >= 0
                agreed += int((argmax == ids)[inside].sum())
                total += int(inside.sum())
        return agreed / total if total else None

    def head(self) -> tuple[Tensor, Tensor]:
        """The target's input embedding and output head, each [vocabulary, hidden]."""
        path = self.folder / "head.safetensors"
        try:
            if sha256(path) != self.manifest.head_sha256:
                raise UserError(f"{path}: not what was written (sha256 differs): damaged or replaced\n{AGAIN}")
            with safe_open(path, framework="pt") as file:
                embedding = file.get_tensor("embed_tokens.weight")
                head = file.get_tensor("lm_head.weight") if "lm_head.weight" in file.keys() else embedding  # noqa: SIM118
        except FileNotFoundError:
            raise UserError(
                f"{path}: missing; evaluation needs the target's embedding and head\n"
                "extract again with extract.save_head: true and --force"
            ) from None
        except SafetensorError as error:
            raise UserError(f"{path}: damaged ({error}); extract again with --force") from None
        return embedding, head


@contextmanager
def _open_shard(path: Path) -> Iterator[h5py.File]:
    try:
        with h5py.File(path, "r") as file:
            _refuse_elsewhere(path, file)
            yield file
    except (OSError, KeyError) as error:
        raise UserError(f"{path}: not a readable shard ({error}); extract again with --force") from None


def _refuse_elsewhere(path: Path, group: h5py.Group) -> None:
    """Raises UserError for datasets whose content lies in other files: links, external storage, virtual datasets."""
    for name in group:
        link = group.get(name, getlink=True)
        if not isinstance(link, h5py.HardLink):
            raise UserError(f"{path}: {group.name}/{name} is a link to elsewhere; only data of its own is read")
        entry = group[name]
        if isinstance(entry, h5py.Group):
            _refuse_elsewhere(path, entry)
        elif entry.external or entry.is_virtual:
            raise UserError(f"{path}: {entry.name} lies in other files; only data of its own is read")
