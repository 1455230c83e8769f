"""The tensors of a checkpoint: which files hold them, their headers, and their reading, a part of a file at a time.

Nothing in a file is ever executed: pickles are read with `weights_only`, and only in torch's zip format, whose sizes
are known before anything is read.
"""

from __future__ import annotations

import json
import re
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from dflash_eval.errors import UserError, reason

PICKLES = (".pt", ".bin", ".pth", ".ckpt")
OTHERS = re.compile(r"optim|sched|rng|scaler|training_args|random_states", re.IGNORECASE)
SHARD = re.compile(r"-(\d{5})-of-(\d{5})\.")
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "BOOL": torch.bool,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8,
}  # fmt: skip
PREFIXES = ("module.", "draft_model.", "model.")
NESTS = ("draft_state_dict", "draft_model", "state_dict", "model_state_dict", "model", "module")
DEEPEST = 8  # dict in a dict
JSON_BYTES = 64 << 20
PART_BYTES = 256 << 20  # read before a file is opened anew: a mapped file's pages count until it is closed


class Stored(NamedTuple):
    """A tensor in a file: under which name, its shape, its dtype; `rows`, where it is a part of a fused one."""

    file: Path
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    rows: tuple[int, int] | None = None


# Which files


def weight_files(folder: Path) -> list[Path]:
    """The files that hold a folder's weights: safetensors before pickles, a whole file before shards.

    Raises UserError for none, for shards that are missing, and for several files that could be meant.
    """
    for whole, kinds in (("model.safetensors", (".safetensors",)), ("pytorch_model.bin", PICKLES)):
        if (folder / whole).exists():
            return [folder / whole]
        index = folder / f"{whole}.index.json"
        if index.exists():
            return _indexed(index)
        files = sorted(file for file in folder.glob("*.*") if file.suffix in kinds and not OTHERS.search(file.name))
        if files:
            _check_shards(folder, files)
            return files
    raise UserError(f"{folder}: no weights (*.safetensors); a drafter folder holds config.json and model.safetensors")


def _indexed(index: Path) -> list[Path]:
    raw = read_json(index)
    weight_map = raw.get("weight_map")
    listed = list(weight_map.values()) if isinstance(weight_map, dict) else []
    if not listed or not all(isinstance(name, str) and name.isprintable() for name in listed):
        raise UserError(f"{index}: not an index of weights: no weight_map from tensors to files")
    names = set(listed)
    outside = sorted(name for name in names if Path(name).is_absolute() or ".." in Path(name).parts)
    if outside:
        raise UserError(f"{index}: names {outside[0]!r}, outside its folder")
    missing = sorted(name for name in names if not (index.parent / name).exists())
    if missing:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise UserError(
            f"{index}: names {', '.join(missing[:3])}{more}, not in the folder: "
            f"{len(missing)} of {len(names)} shards are missing; copy or download them"
        )
    return [index.parent / name for name in sorted(names)]


def _check_shards(folder: Path, files: list[Path]) -> None:
    """Raises UserError unless it is one file, or all shards of one whole."""
    shards = [SHARD.search(file.name) for file in files]
    count = max((int(match[2]) for match in shards if match), default=1)
    if len(files) > 1 and not all(shards):
        names = ", ".join(file.name for file in files[:4])
        raise UserError(f"{folder}: {len(files)} files could be the weights ({names})\nname one of them in checkpoint")
    if len(files) != count:
        raise UserError(f"{folder}: {len(files)} of {count} shards are there; copy or download the others")


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object. Raises UserError for anything else, and for what is no such file at all (`refuse_impostor`)."""
    refuse_impostor(path)
    try:
        with readable(path):
            if path.stat().st_size > JSON_BYTES:
                raise UserError(f"{path}: {path.stat().st_size >> 20} MiB, too large to be a config")
            raw = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: not JSON ({str(error)[:200]})") from None
    if not isinstance(raw, dict):
        raise UserError(f"{path}: not a JSON object")
    return raw


@contextmanager
def readable(what: str | Path) -> Iterator[None]:
    """Raises UserError for what the operating system refuses."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{error.filename or what}: cannot be read ({error.strerror or reason(error)})") from None


def refuse_impostor(path: Path) -> None:
    """Raises UserError for a Git LFS pointer or an HTML page in place of a file, and for what no file is (a pipe, a
    device, a folder), whose reading might never end."""
    with readable(path):
        if not path.is_file():
            what = "a folder" if path.is_dir() else "a pipe or device" if path.exists() else "a link to nothing"
            raise UserError(f"{path}: cannot be read ({what}, no file)")
        with open(path, "rb") as handle:
            start = handle.read(512).lstrip().lower()
    if start.startswith(b"version https://git-lfs"):
        raise UserError(f"{path}: a Git LFS pointer, not the file itself; fetch it: git lfs pull")
    if start.startswith((b"<!doctype", b"<html", b"<?xml")):
        raise UserError(f"{path}: an HTML page, not the file itself: its download failed; download it again")


# Their headers


def stored_tensors(files: list[Path]) -> dict[str, Stored]:
    """Every tensor by its name in a drafter, without prefixes of wrappers; no weights are read.

    Raises UserError for files that are not whole, and for pickles that hold more than tensors and plain values.
    """
    found: dict[str, Stored] = {}
    for file in files:
        for name, stored in (_pickle_headers if file.suffix in PICKLES else _safetensors_headers)(file).items():
            if not (isinstance(name, str) and name.isprintable()):
                raise UserError(f"{file}: a tensor called {ascii(name)[:80]}: not the weights of a drafter")
            if name in found:
                raise UserError(f"{file}: {name} stands in {found[name].file.name} too")
            found[name] = stored
    return _without_prefixes(found)


def _safetensors_headers(file: Path) -> dict[str, Stored]:
    headers = {}
    with _safetensors(file) as opened:
        for name in opened.keys():  # noqa: SIM118
            header = opened.get_slice(name)
            kind = header.get_dtype()
            if kind not in DTYPES:
                raise UserError(f"{file}: {name} holds {kind}, not weights of a drafter")
            headers[name] = Stored(file, name, tuple(header.get_shape()), DTYPES[kind])
    return headers


def _pickle_headers(file: Path) -> dict[str, Stored]:
    tensors = _state_dict(file, _unpickled(file, "meta"))
    return {name: Stored(file, name, tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}


def _without_prefixes(found: dict[str, Stored]) -> dict[str, Stored]:
    own = {name: stored for name, stored in found.items() if "draft_model." in name} or found
    names: dict[str, str] = {}
    for name in own:
        bare = name.replace("_orig_mod.", "")
        while prefix := next((prefix for prefix in PREFIXES if bare.startswith(prefix)), None):
            bare = bare.removeprefix(prefix)
        if bare.startswith("candidate_selector.") and bare.endswith("_codebook.weight"):
            bare = bare.removesuffix(".weight")
        if bare in names:
            raise UserError(f"{own[name].file}: both {names[bare]} and {name} are {bare}")
        names[bare] = name
    return {bare: own[name] for bare, name in names.items()}


# Their content


def not_finite(tensor: Tensor) -> tuple[int, int]:
    """How many of a tensor's values are NaN, and how many infinite. One pass where none is, as nearly always."""
    if not tensor.numel() or all(map(torch.isfinite, torch.aminmax(tensor))):
        return 0, 0
    return int(tensor.isnan().sum()), int(tensor.isinf().sum())


def read_tensors(stored: dict[str, Stored]) -> Iterator[tuple[str, Tensor]]:
    """Each tensor in its own memory, on the CPU, in the file's dtype; in the order of the files."""
    by_file: dict[Path, list[tuple[str, Stored]]] = {}
    for name, entry in stored.items():
        by_file.setdefault(entry.file, []).append((name, entry))
    for file, entries in by_file.items():
        for part in _parts(entries):
            yield from (_read_pickle if file.suffix in PICKLES else _read_safetensors)(file, part)


def _parts(entries: list[tuple[str, Stored]]) -> Iterator[list[tuple[str, Stored]]]:
    part: list[tuple[str, Stored]] = []
    size = 0
    for name, entry in entries:
        part.append((name, entry))
        size += torch.Size(entry.shape).numel() * entry.dtype.itemsize
        if size >= PART_BYTES:
            yield part
            part, size = [], 0
    yield part


def _read_safetensors(file: Path, part: list[tuple[str, Stored]]) -> Iterator[tuple[str, Tensor]]:
    with _safetensors(file) as opened:
        for name, entry in part:
            if entry.rows is None:
                yield name, opened.get_tensor(entry.name).clone()
            else:
                yield name, opened.get_slice(entry.name)[entry.rows[0] : entry.rows[1]].clone()


def _read_pickle(file: Path, part: list[tuple[str, Stored]]) -> Iterator[tuple[str, Tensor]]:
    tensors = _state_dict(file, _unpickled(file, "cpu"))
    for name, entry in part:
        tensor = tensors[entry.name]
        if tensor.is_meta or tensor.numel() * tensor.itemsize > tensor.untyped_storage().nbytes():
            raise UserError(f"{file}: {entry.name} is larger than what the file holds of it")
        yield name, (tensor if entry.rows is None else tensor[entry.rows[0] : entry.rows[1]]).clone()


class _safetensors:
    """`safe_open` with plain errors."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __enter__(self) -> Any:
        refuse_impostor(self.file)
        try:
            self.opened = safe_open(self.file, framework="pt")
            return self.opened.__enter__()
        except (SafetensorError, OSError) as error:
            raise self._plain(error) from None

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        self.opened.__exit__(kind, error, trace)
        if isinstance(error, SafetensorError | OSError):
            raise self._plain(error) from None

    def _plain(self, error: BaseException) -> UserError:
        return UserError(f"{self.file}: not a whole safetensors file ({error}); copy or download it again")


def _unpickled(file: Path, device: str) -> Any:
    """What a torch checkpoint holds, its tensors mapped, not read."""
    refuse_impostor(file)
    try:
        with zipfile.ZipFile(file) as archive:
            entries = archive.infolist()
            packed = any(entry.compress_type != zipfile.ZIP_STORED for entry in entries)
        if packed or sum(entry.file_size for entry in entries) > file.stat().st_size:
            raise UserError(f"{file}: not a torch checkpoint: compressed, or of sizes that the file does not have")
        return torch.load(file, map_location=device, weights_only=True, mmap=device != "meta")
    except zipfile.BadZipFile:
        raise UserError(
            f"{file}: not a whole torch checkpoint (a zip file, since torch 1.6): cut short, or a plain pickle, which "
            "could run code and is not read\ncopy it again, or save the weights as safetensors"
        ) from None
    except UnpicklingError as error:
        what = re.search(r"GLOBAL (\S+)|(?:class|function) ([\w.]+)", str(error))
        name = f" ({next(filter(None, what.groups()))})" if what else ""
        raise UserError(
            f"{file}: holds more than tensors{name}: such a pickle could run code, and is not read\n"
            "save the weights alone: torch.save(model.state_dict(), ...), or as safetensors"
        ) from None
    except UserError:
        raise
    except Exception as error:  # of bytes that anyone may have written, whatever the readers raise
        raise UserError(
            f"{file}: not a readable torch checkpoint ({reason(error)[:200]}); copy or download it again"
        ) from None


def _state_dict(file: Path, content: Any) -> dict[str, Tensor]:
    for _ in range(DEEPEST):
        if not isinstance(content, dict):
            break
        tensors = {name: value for name, value in content.items() if isinstance(value, Tensor)}
        for name, tensor in tensors.items():
            if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_nested:
                raise UserError(f"{file}: {name!r} is sparse, quantised or nested, not weights of a drafter")
        if tensors:
            return tensors
        content = next((content[key] for key in NESTS if isinstance(content.get(key), dict)), None)
    raise UserError(f"{file}: no weights in it: a dict of tensors, itself or under {', '.join(NESTS[:5])}")
