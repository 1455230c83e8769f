"""The cache of phase 1: manifest.json, completions.jsonl, states-*.h5, head.safetensors.

The only file that knows the HDF5 layout. A shard is written aside and renamed when whole, so a file under its own
name is complete; bfloat16 is stored bit for bit as uint16 with the attribute `dtype`, float8 as uint8 beside a scale.
"""

from __future__ import annotations

import copy
import errno
import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
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
STORED = {"bfloat16": np.uint16, "float16": np.float16, "float32": np.float32, "float8": np.uint8}
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
NOT_WRITABLE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.EISDIR, errno.ENOTDIR, errno.EIO)
DESCRIBING_BYTES = 1 << 16  # what HDF5 writes about the datasets, and to spare
FLOAT8_MAX = 448.0  # the largest e4m3 number


@dataclass(frozen=True)
class Sample:
    """One line of completions.jsonl: a prompt and what the target answered."""

    id: str
    prompt: str
    prompt_ids: list[int]
    completion_ids: list[int]
    text: str
    finish_reason: str  # "stop" (a stop token) | "length" (max_new_tokens) | "file" (not known)
    category: str | None = None
    served: dict[str, Any] | None = None  # of a server's completion: how its token ids came, its verification steps

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

    def stored_dtype(self) -> str:
        """What the states are stored in; `dtype` is what they are read as."""
        store = self.settings.get("extract", {}).get("store")
        return "float8" if store == "float8" else self.dtype

    def token_bytes(self) -> int:
        """Of a shard, for each token."""
        return token_bytes(len(self.layers), self.hidden_size, self.stored_dtype(), self.target_stats)

    def fingerprint(self) -> str:
        """Names the content: settings, layers and shards, not the machine that wrote them."""
        content = [self.settings, self.layers, self.dtype, [shard.sha256 for shard in self.shards]]
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


def token_bytes(layers: int, hidden_size: int, stored: str, target_stats: bool) -> int:
    """What a token takes in a shard. stored: a key of STORED."""
    width = hidden_size * np.dtype(STORED[stored]).itemsize + (4 if stored == "float8" else 0)
    return layers * width + (12 if target_stats else 4)


# Writing


@contextmanager
def disk_errors(folder: Path) -> Iterator[None]:
    """Turn a full or read-only disk into a plain error; finished shards stay."""
    try:
        yield
    except OSError as error:
        number = next((code for code in NO_ROOM if f"errno = {code}" in str(error)), error.errno)  # h5py's are text
        if number in NO_ROOM:
            detail = "" if number == errno.ENOSPC else f" ({os.strerror(number)})"
            raise UserError(
                f"{folder}: no space left on the disk{detail}; finished shards are kept\n"
                "free some space and run the same command to resume"
            ) from None
        if number in NOT_WRITABLE:
            raise UserError(f"{error.filename or folder}: not writable ({os.strerror(number)})") from None
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


def append_completions(folder: Path, samples: Sequence[Sample], rank: int = 0) -> None:
    """Append whole lines and make them durable; a rank above 0 has a file of its own."""
    lines = "".join(map(_line, samples))
    name = f".completions-{rank}.jsonl" if rank else "completions.jsonl"
    with open(folder / name, "a", encoding="utf-8") as handle:
        handle.write(lines)
        handle.flush()
        os.fsync(handle.fileno())


def write_completions(folder: Path, samples: Sequence[Sample]) -> None:
    write_atomically(folder / "completions.jsonl", "".join(map(_line, samples)))
    for part in folder.glob(".completions-*.jsonl"):  # of ranks above 0
        part.unlink()


def collect_completions(folder: Path) -> None:
    """What an earlier run's ranks have finished, all in completions.jsonl from now on."""
    parts = sorted(folder.glob(".completions-*.jsonl"))
    if parts:
        ranks = [sample for part in parts for sample in read_completions(folder, part.name)]
        write_completions(folder, read_completions(folder) + ranks)


def _line(sample: Sample) -> str:
    kept = {key: value for key, value in asdict(sample).items() if value is not None}
    return json.dumps(kept, ensure_ascii=False) + "\n"


def write_completions_record(folder: Path, settings: dict[str, Any], provenance: dict[str, Any]) -> None:
    """Beside completions that were fetched before there is a manifest: what they answer to, and who gave them."""
    record = {"settings": settings, "provenance": provenance}
    write_atomically(folder / "completions.json", json.dumps(record, indent=2) + "\n")


def read_completions_record(folder: Path) -> dict[str, Any] | None:
    """{"settings", "provenance"}; None where there is none."""
    path = folder / "completions.json"
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        return {"settings": dict(record["settings"]), "provenance": dict(record["provenance"])}
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path}: not readable ({error}); remove it and completions.jsonl to fetch anew") from None


def delete_completions(folder: Path) -> None:
    for name in ("completions.json", "completions.jsonl"):
        (folder / name).unlink(missing_ok=True)


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
    for path in [*folder.glob(".*.tmp"), *folder.glob(".completions-*.jsonl")]:
        path.unlink()


class ShardWriter:
    """Writes one shard aside; `close` makes it durable and gives it its name.

    The datasets are contiguous and their space is set aside at once: rows go past HDF5 straight to their place in the
    file, a whole batch in one call that lets other threads run.
    """

    def __init__(
        self, path: Path, samples: Sequence[Sample], layers: Sequence[int], hidden: int, dtype: str, stats: bool
    ) -> None:
        """dtype: of the states as stored, a key of STORED."""
        self.path = path
        self.dtype = dtype
        self.aside = path.with_name(f".{path.name}.tmp")
        self.samples = samples
        self.offsets = np.concatenate([[0], np.cumsum([len(sample) for sample in samples])]).astype(np.int64)
        self._places: dict[str, int] = {}  # dataset → where its bytes begin
        self._try_room(token_bytes(len(layers), hidden, dtype, stats))
        with h5py.File(self.aside, "w", libver="latest") as file:
            file["sample_ids"] = np.array([sample.id for sample in samples], dtype=h5py.string_dtype())
            file["offsets"] = self.offsets
            file["prompt_lengths"] = np.array([len(sample.prompt_ids) for sample in samples], dtype=np.int64)
            file["input_ids"] = np.array([i for sample in samples for i in sample.input_ids], dtype=np.int32)
            for layer in layers:
                self._set_aside(file, f"hidden/{layer}", hidden, STORED[dtype]).attrs["dtype"] = dtype
                if dtype == "float8":
                    self._set_aside(file, f"scale/{layer}", None, np.float32)
            if stats:
                self._set_aside(file, "argmax", None, np.int32, fillvalue=-1)
                self._set_aside(file, "logprob", None, np.float32, fillvalue=np.nan)
        self._file = os.open(self.aside, os.O_WRONLY)

    def _try_room(self, token_size: int) -> None:
        """Raises OSError where the disk does not take what HDF5 will write, and the file's full length: an HDF5 file
        that cannot be closed takes the process down with it.
        """
        texts = sum(len(sample.id.encode()) + 40 for sample in self.samples)
        try:
            with open(self.aside, "wb") as handle:
                handle.write(bytes(DESCRIBING_BYTES + texts + 4 * int(self.offsets[-1])))
                handle.flush()
                os.fsync(handle.fileno())
                handle.truncate(DESCRIBING_BYTES + texts + token_size * int(self.offsets[-1]))
        except OSError:
            self.aside.unlink(missing_ok=True)
            raise

    def _set_aside(
        self, file: h5py.File, name: str, width: int | None, kind: Any, fillvalue: Any = None
    ) -> h5py.Dataset:
        plan = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        plan.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
        if fillvalue is None:
            plan.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
        shape = (int(self.offsets[-1]),) if width is None else (int(self.offsets[-1]), width)
        dataset = file.create_dataset(name, shape, kind, fillvalue=fillvalue, dcpl=plan)
        self._places[name] = dataset.id.get_offset()
        return dataset

    def write(self, first: int, columns: Mapping[str, Tensor]) -> None:
        """columns: dataset → its rows from token `first` of the shard on, contiguous, on the CPU, as stored."""
        for name, rows in columns.items():
            if not len(rows):
                continue
            data = memoryview(to_stored(rows).data).cast("B")
            place = self._places[name] + first * (len(data) // len(rows))
            while data:
                written = os.pwrite(self._file, data, place)
                data, place = data[written:], place + written

    def write_hidden(self, index: int, layer: int, states: Tensor) -> None:
        """states: [len(sample), hidden] of sample `index` of the shard, floating point, on the CPU."""
        self.write(int(self.offsets[index]), state_columns(layer, states, self.dtype))

    def write_stats(self, index: int, argmax: NDArray[np.int32], logprob: NDArray[np.float32]) -> None:
        """Both [completion tokens]: of the token after each position from the prompt's last one on."""
        if len(argmax):
            start = int(self.offsets[index]) + len(self.samples[index].prompt_ids) - 1
            self.write(start, {"argmax": torch.from_numpy(argmax), "logprob": torch.from_numpy(logprob)})

    def sync(self) -> None:
        """Have the disk take what is written so far, so that little is left to wait for at the end."""
        os.fdatasync(self._file)

    def close(self) -> Shard:
        with ThreadPoolExecutor(1) as beside:
            synced = beside.submit(os.fsync, self._file)
            digest = sha256(self.aside)
            synced.result()
        self._close_file()
        size = self.aside.stat().st_size
        os.replace(self.aside, self.path)
        return Shard(self.path.name, len(self.samples), int(self.offsets[-1]), size, digest)

    def discard(self) -> None:
        self._close_file()
        self.aside.unlink(missing_ok=True)

    def _close_file(self) -> None:
        if self._file >= 0:
            os.close(self._file)
        self._file = -1


def state_columns(layer: int, states: Tensor, stored: str) -> dict[str, Tensor]:
    """A layer's states [tokens, hidden] as a shard keeps them. stored: a key of STORED.

    float8 has its bits in `hidden/<layer>` and the tokens' scales in `scale/<layer>`.
    """
    if stored == "float8":
        bits, scale = to_float8(states)
        return {f"hidden/{layer}": bits, f"scale/{layer}": scale}
    return {f"hidden/{layer}": states.to(DTYPES[stored])}


def to_stored(states: Tensor) -> NDArray[Any]:
    """A CPU tensor as the array that HDF5 keeps: bfloat16's bits as uint16."""
    return (states.contiguous().view(torch.uint16) if states.dtype == torch.bfloat16 else states.contiguous()).numpy()


def from_stored(array: NDArray[Any], dtype: str) -> Tensor:
    return torch.from_numpy(array).view(DTYPES[dtype]) if dtype == "bfloat16" else torch.from_numpy(array)


def to_float8(states: Tensor) -> tuple[Tensor, Tensor]:
    """states [tokens, hidden] → e4m3 bits [tokens, hidden] (uint8) and each token's scale [tokens] (float32).

    The token's largest number becomes the largest e4m3 number.
    """
    states = states.float()
    scale = states.abs().amax(-1).div_(FLOAT8_MAX)
    scale = torch.where(scale > 0, scale, 1)
    return (states / scale[:, None]).to(torch.float8_e4m3fn).view(torch.uint8), scale


def from_float8(bits: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    return (bits.view(torch.float8_e4m3fn).float() * scale[:, None]).to(dtype)


def sha256(path: Path) -> str:
    digest, buffer = hashlib.sha256(), memoryview(bytearray(2**24))  # pieces large enough to let other threads run
    with open(path, "rb", buffering=0) as handle:
        while count := handle.readinto(buffer):
            digest.update(buffer[:count])
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
        # Caches from before these keys: all tokens were drawn from, prompts were chats, kernels those installed.
        manifest.settings["completions"] = {"top_k": 0, "top_p": 1.0, **manifest.settings["completions"]}
        manifest.settings["target"] = {"kernels": "auto", **manifest.settings.get("target", {})}
        manifest.settings["prompts"] = {"raw": False, **manifest.settings.get("prompts", {})}
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path}: not a readable manifest ({error}); extract again with --force") from None
    for shard in manifest.shards:
        if not SHARD_NAME.fullmatch(shard.file):
            raise UserError(f"{path}: {shard.file!r} is not the name of a shard; extract again with --force")
    return manifest


def read_completions(folder: Path, name: str = "completions.jsonl") -> list[Sample]:
    """The lines of completions.jsonl; a last line that a killed run left unfinished is passed over."""
    path = folder / name
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


def adopt_shards(folder: Path, manifest: Manifest, samples: Sequence[Sample]) -> None:
    """List in the manifest the whole shards that a run wrote and died before listing; clear away what is not whole."""
    for path in folder.glob(".states-*.tmp"):
        path.unlink()
    listed = {shard.file for shard in manifest.shards}
    known = {sample.id: sample for sample in samples}
    for path in sorted(folder.glob("states-*.h5")):
        if path.name in listed:
            continue
        try:
            ids, tokens = shard_ids(path), 0
            with _open_shard(path) as file:
                tokens = int(file["offsets"][-1])
                written = np.array([i for one in ids for i in known[one].input_ids])
                fits = np.array_equal(file["input_ids"][:], written)
                fits &= all(f"hidden/{layer}" in file for layer in manifest.layers)
                fits &= ("argmax" in file) == manifest.target_stats
        except (UserError, KeyError):
            fits = False
        if fits:
            manifest.shards.append(Shard(path.name, len(ids), tokens, path.stat().st_size, sha256(path)))
        else:
            path.unlink()
    manifest.shards.sort(key=lambda shard: shard.file)


def shard_ids(path: Path) -> list[str]:
    """The ids of a shard's samples, in its order."""
    with _open_shard(path) as file:
        return list(file["sample_ids"].asstr()[:])


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
                    self._held[shard.file, layer] = self._read(file, layer, slice(None))

    def _read(self, file: h5py.File, layer: int, tokens: slice) -> Tensor:
        stored = file[f"hidden/{layer}"][tokens]
        if f"scale/{layer}" not in file:
            return from_stored(stored, self.manifest.dtype)
        scale = torch.from_numpy(file[f"scale/{layer}"][tokens])
        return from_float8(torch.from_numpy(stored), scale, DTYPES[self.manifest.dtype])

    def part(self, index: int, parts: int) -> Cache:
        """The same cache with each `parts`-th of its samples from `index` on."""
        part = copy.copy(self)
        part.samples = self.samples[index::parts]
        return part

    def features(self, sample_id: str, layers: Sequence[int], positions: slice | None = None) -> Tensor:
        """Context features [tokens, len(layers) * hidden] in the cache's dtype: the layers' states side by side.

        positions: of the sample's tokens, those from start to stop alone.
        """
        name, index = self._where[sample_id]
        start, end = self._offsets[name][index : index + 2]
        if positions is not None:
            start, end = start + positions.start, min(end, start + positions.stop)
        missing = [layer for layer in layers if (name, layer) not in self._held]
        read: dict[int, Tensor] = {}
        if missing:
            with _open_shard(self.folder / name) as file:
                read = {layer: self._read(file, layer, slice(start, end)) for layer in missing}
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

    def argmax(self, sample_id: str) -> NDArray[np.int32]:
        """The target's most probable token in place of each completion token; the cache has target_stats."""
        name, index = self._where[sample_id]
        with _open_shard(self.folder / name) as file:
            start, end = file["offsets"][index : index + 2]
            return np.asarray(file["argmax"][start + file["prompt_lengths"][index] - 1 : end - 1])

    def greedy_agreement(self) -> float | None:
        return greedy_agreement(self.folder, self.manifest.shards)

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


def greedy_agreement(folder: Path, shards: Sequence[Shard]) -> float | None:
    """Share of completion tokens equal to the target's argmax; None without target_stats or tokens."""
    agreed = total = 0
    for shard in shards:
        with _open_shard(folder / shard.file) as file:
            if "argmax" not in file:
                return None
            argmax, ids = file["argmax"][:-1], file["input_ids"][1:]
            inside = argmax >= 0
            agreed += int((argmax == ids)[inside].sum())
            total += int(inside.sum())
    return agreed / total if total else None


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
