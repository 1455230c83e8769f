"""Where models come from: a local path, a file inside an installed package, or the Hugging Face hub."""

from __future__ import annotations

import glob
import hashlib
import importlib.util
import json
import os
import re
from collections.abc import Sequence
from pathlib import Path

from dflash_eval.errors import UserError

HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
WEIGHTS = (".safetensors", ".pt", ".bin", ".pth", ".ckpt")
SAMPLED_BLOCK = 64 * 1024


def resolve(spec: str, revision: str | None = None, files: Sequence[str] = ("*.json", "*.safetensors")) -> Path:
    """The local path of `spec`: `package:<module>/<path>`, an existing path, or a hub id (`files` are fetched).

    Raises UserError, one line, for what cannot be had. A package is located, never imported.
    """
    if spec.startswith("package:"):
        return _in_package(spec)
    path = Path(spec).expanduser()
    if path.exists():
        return path
    if not HUB_ID.fullmatch(spec):
        raise UserError(f"{spec}: no such file or folder")
    from huggingface_hub import snapshot_download
    from huggingface_hub.constants import HF_HUB_CACHE, HF_HUB_OFFLINE
    from huggingface_hub.errors import (
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    try:
        return Path(
            snapshot_download(spec, revision=revision, allow_patterns=list(files), ignore_patterns=["original/*"])
        )
    except RepositoryNotFoundError:
        reason = "there is no such model on the Hugging Face hub, or it needs a token (HF_TOKEN)"
    except LocalEntryNotFoundError:
        offline = "HF_HUB_OFFLINE is set" if HF_HUB_OFFLINE else "the Hugging Face hub cannot be reached"
        reason = f"{offline} and nothing of it is cached under {HF_HUB_CACHE}"
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        reason = str(error).splitlines()[0]
    raise UserError(f"{spec}: no such file or folder here, and {reason}")


def step_checkpoints(pattern: str) -> list[tuple[str, str]]:
    """What a pattern of a training run's checkpoints (`runs/mine/step-*`) matches: (step, path), by step.

    The step is the number that the wildcard stands for, or all that it stands for where numbers do not tell them
    apart. Raises UserError where nothing that holds weights matches.
    """
    first, last = re.search(r"[*?\[]", pattern), re.search(r"[*?\]][^*?\]]*$", pattern)
    assert first is not None
    assert last is not None
    before, after = os.path.expanduser(pattern[: first.start()]), len(pattern) - last.start() - 1
    matches = glob.glob(os.path.expanduser(pattern))
    found = [path for path in matches if holds_weights(Path(path))]
    if not found:
        what = f"none of the {len(matches)} matches is a checkpoint" if matches else "matches nothing"
        raise UserError(f"{pattern}: {what} (a folder with config.json and weights, or a file of weights)")
    labels = {path: path[len(before) : len(path) - after] for path in found}
    numbers = {path: re.findall(r"\d+", label) for path, label in labels.items()}
    steps = [own[-1] for own in numbers.values() if own]
    if len(set(steps)) == len(found):
        labels = {path: own[-1] for path, own in numbers.items()}
    found.sort(key=lambda path: (list(map(int, numbers[path])), labels[path]))
    return [(labels[path].strip("/").replace("/", "-"), path) for path in found]


def step_order(path: Path) -> tuple[list[int], str]:
    """Sorts step-900 before step-1000."""
    return [int(number) for number in re.findall(r"\d+", path.name)], path.name


def holds_weights(path: Path) -> bool:
    files = [path] if path.is_file() else path.iterdir() if path.is_dir() else []
    return any(file.suffix in WEIGHTS or (file.name == "config.json" and file != path) for file in files)


def _in_package(spec: str) -> Path:
    module, _, inner = spec.removeprefix("package:").partition("/")
    found = importlib.util.find_spec(module) if module.isidentifier() else None
    if found is None or found.origin is None:
        raise UserError(f"{spec}: the Python package {module!r} is not installed")
    root = Path(found.origin).parent.resolve()
    path = (root / inner).resolve()
    if not path.is_relative_to(root) or not path.exists():
        raise UserError(f"{spec}: the package {module!r} has no {inner!r}")
    return path


def fingerprint(path: Path) -> str:
    """Names a model's files by content: names, sizes, small files whole, large ones by 64 KiB at five places.

    The five places tell one fine-tune from another without reading 50 GB; they are no protection from an adversary.
    """
    digest = hashlib.sha256()
    inside = [path] if path.is_file() else path.iterdir()
    files = sorted(p for p in inside if p.suffix in (".json", ".safetensors", ".gguf") and not p.is_dir())
    for file in files:
        try:
            size = file.stat().st_size
            digest.update(json.dumps([file.name, size]).encode())
            with open(file, "rb") as handle:
                for i in range(5):
                    place = (size - SAMPLED_BLOCK) * i // 4 if size > 5 * SAMPLED_BLOCK else SAMPLED_BLOCK * i
                    handle.seek(place)
                    digest.update(handle.read(SAMPLED_BLOCK))
        except OSError as error:
            raise UserError(f"{file}: cannot be read ({error.strerror})") from None
    return digest.hexdigest()[:16]
