"""Read a drafter from a checkpoint folder: `config.json` beside safetensors, as z-lab publishes them.

Nothing in a checkpoint is ever executed.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from dflash_eval.config import DrafterOverrides, DrafterSpec
from dflash_eval.drafter.config import DrafterConfig
from dflash_eval.drafter.model import DFlashDrafter
from dflash_eval.errors import UserError
from dflash_eval.sources import resolve

FORMAT = "z-lab"


def read_config(spec: DrafterSpec) -> DrafterConfig:
    """The checkpoint's configuration with the spec's overrides; no weights are read.

    Raises UserError for what is missing, contradictory or of another format.
    """
    path = _folder(spec, ("config.json",)) / "config.json"
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(
            f"{path.parent}: no config.json; a drafter folder holds config.json and model.safetensors"
        ) from None
    except ValueError as error:
        raise UserError(f"{path}: not JSON ({error})") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    if not isinstance(raw, dict):
        raise UserError(f"{path}: not a JSON object")
    _require_zlab(path, raw)
    overrides = spec.overrides.model_dump(exclude_none=True)
    nested = raw.get("dflash_config") or {}
    if "rope_theta" in overrides:
        rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
        raw["rope_parameters"] = {**rope, "rope_theta": overrides["rope_theta"]}
    try:
        config = DrafterConfig.from_dict({**raw, **overrides, "dflash_config": {**nested, **overrides}})
    except KeyError as error:
        key = error.args[0]
        if key == "num_target_layers":
            raise UserError(
                f"{path}: neither 'target_layer_ids' nor 'num_target_layers'\n{_mend(spec, 'target_layer_ids')}"
            ) from None
        raise UserError(f"{path}: no {key!r}\n{_mend(spec, key)}") from None
    except (ValueError, TypeError) as error:
        raise UserError(f"{path}: {error}") from None
    _check_values(path, spec, config)
    return config


def load_drafter(spec: DrafterSpec, config: DrafterConfig, device: torch.device, dtype: torch.dtype) -> DFlashDrafter:
    """The drafter with its weights, for inference. Raises UserError naming the tensor that does not fit."""
    check_weights(spec, config)
    weights: dict[str, Tensor] = {}
    for file in _weight_files(spec):
        with _opened(file) as opened:
            weights.update({name: opened.get_tensor(name).to(device, dtype) for name in opened.keys()})  # noqa: SIM118
    drafter = _empty(spec, config)
    drafter.load_state_dict(weights, assign=True)
    drafter.build_rotary(device)
    return drafter.eval().requires_grad_(False)


def check_weights(spec: DrafterSpec, config: DrafterConfig) -> int:
    """The number of weights, from the files' headers. Raises UserError unless they are whole and as the config asks."""
    shapes: dict[str, list[int]] = {}
    for file in _weight_files(spec):
        with _opened(file) as opened:
            for name in opened.keys():  # noqa: SIM118
                header = opened.get_slice(name)
                shapes[name] = header.get_shape()
                if not header.get_dtype().startswith(("F", "BF")):
                    raise UserError(f"{file}: {name} holds {header.get_dtype()}, not weights of a drafter")
    wanted = {name: list(tensor.shape) for name, tensor in _empty(spec, config).state_dict().items()}
    _check_shapes(spec, config, wanted, shapes)
    return sum(math.prod(shape) for shape in wanted.values())


def _folder(spec: DrafterSpec, files: tuple[str, ...]) -> Path:
    path = resolve(spec.checkpoint, files=files)
    if not path.is_dir():
        raise UserError(f"{path}: a drafter checkpoint is a folder with config.json and model.safetensors")
    return path


def _require_zlab(path: Path, raw: dict[str, Any]) -> None:
    architecture = (raw.get("architectures") or ["none"])[0]
    if raw.get("speculators_model_type"):
        other = f"a speculators checkpoint ({raw['speculators_model_type']})"
    elif architecture == "DFlashDraftModel" or (architecture == "none" and "dflash_config" in raw):
        return
    else:
        other = f"architecture {architecture}"
    raise UserError(f"{path}: {other}; this version reads z-lab's DFlash v1 format (DFlashDraftModel)")


def _mend(spec: DrafterSpec, key: str) -> str:
    if key in DrafterOverrides.model_fields:
        return f"mend it there, or set {key} under the overrides of drafter {spec.name!r} in the config"
    return "mend it there: it must be the config that the drafter was trained with"


def _check_values(path: Path, spec: DrafterSpec, config: DrafterConfig) -> None:
    def whole(value: Any, least: int) -> bool:
        return type(value) is int and value >= least

    if not whole(config.vocab_size, 1):
        raise UserError(f"{path}: vocab_size is {config.vocab_size!r}\n{_mend(spec, 'vocab_size')}")
    if not whole(config.block_size, 2):
        raise UserError(
            f"{path}: block_size is {config.block_size!r}; a block holds the anchor and at least one draft\n"
            f"{_mend(spec, 'block_size')}"
        )
    if not whole(config.mask_token_id, 0) or config.mask_token_id >= config.vocab_size:
        raise UserError(
            f"{path}: mask_token_id {config.mask_token_id!r} is outside the vocabulary of {config.vocab_size}\n"
            f"{_mend(spec, 'mask_token_id')}"
        )
    if not config.target_layer_ids or not all(whole(layer, 0) for layer in config.target_layer_ids):
        raise UserError(
            f"{path}: target_layer_ids {list(config.target_layer_ids)} are not layers of a target\n"
            f"{_mend(spec, 'target_layer_ids')}"
        )


def _empty(spec: DrafterSpec, config: DrafterConfig) -> DFlashDrafter:
    """The drafter on the meta device: shapes without weights."""
    try:
        with torch.device("meta"):
            return DFlashDrafter(config)
    except (KeyError, ValueError, TypeError, RuntimeError, AttributeError) as error:
        reason = str(error).split("\n")[0]
        raise UserError(f"{spec.checkpoint}: config.json does not describe a DFlash drafter ({reason})") from None


def _weight_files(spec: DrafterSpec) -> list[Path]:
    folder = _folder(spec, ("config.json", "*.safetensors", "*.safetensors.index.json"))
    files = sorted(folder.glob("*.safetensors"))
    index = folder / "model.safetensors.index.json"
    if index.exists():
        try:
            named = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise UserError(f"{index}: not an index of safetensors ({error})") from None
        missing = [name for name in named if name not in {file.name for file in files}]
        if missing:
            raise UserError(f"{index}: names {', '.join(map(str, missing[:3]))}, not in the folder")
        return [folder / name for name in named]
    if not files:
        raise UserError(
            f"{folder}: no weights (*.safetensors); a drafter folder holds config.json and model.safetensors"
        )
    return [folder / "model.safetensors"] if folder / "model.safetensors" in files else files


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    try:
        with safe_open(file, framework="pt") as opened:
            yield opened
    except (SafetensorError, OSError) as error:
        raise UserError(f"{file}: not a whole safetensors file ({error}); copy or download it again") from None


def _check_shapes(
    spec: DrafterSpec, config: DrafterConfig, wanted: dict[str, list[int]], found: dict[str, list[int]]
) -> None:
    name, fc = spec.checkpoint, found.get("fc.weight", [])
    width = len(config.target_layer_ids) * config.hidden_size
    if len(fc) == 2 and fc[1] != width:
        raise UserError(
            f"{name}: fc.weight takes {fc[1]} inputs, but {len(config.target_layer_ids)} target_layer_ids of hidden "
            f"size {config.hidden_size} give {width}\n"
            "the layer ids are not those that it was trained with: mend target_layer_ids there or in the overrides"
        )
    missing = sorted(wanted.keys() - found.keys())
    unexpected = sorted(found.keys() - wanted.keys())
    if missing or unexpected:
        parts = [f"lacks {', '.join(missing[:3])}" + (" ..." if len(missing) > 3 else "")] if missing else []
        parts += (
            [f"has unknown {', '.join(unexpected[:3])}" + (" ..." if len(unexpected) > 3 else "")] if unexpected else []
        )
        raise UserError(f"{name}: the weights do not fit config.json: {'; '.join(parts)}")
    for key, shape in found.items():
        if shape != wanted[key]:
            raise UserError(f"{name}: {key} is {shape}, config.json asks for {wanted[key]}")
