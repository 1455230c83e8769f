"""Read a drafter from a checkpoint folder: `config.json` beside safetensors, as z-lab publishes them.

Nothing in a checkpoint is ever executed.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from dflash_eval.config import DrafterSpec
from dflash_eval.drafter.model import DFlashDrafter, DrafterConfig
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
        raise UserError(f"{path.parent}: no config.json; a drafter folder holds config.json and model.safetensors") from None
    except ValueError as error:
        raise UserError(f"{path}: not JSON ({error})") from None
    if not isinstance(raw, dict):
        raise UserError(f"{path}: not a JSON object")
    _require_zlab(path, raw)
    overrides = spec.overrides.model_dump(exclude_none=True)
    nested = raw.get("dflash_config") or {}
    if "rope_theta" in overrides:
        raw["rope_parameters"] = {**(raw.get("rope_parameters") or {}), "rope_theta": overrides["rope_theta"]}
    try:
        config = DrafterConfig.from_dict({**raw, **overrides, "dflash_config": {**nested, **overrides}})
    except KeyError as error:
        raise UserError(f"{path}: no {error.args[0]!r}; add it there or under the drafter's overrides") from None
    except (ValueError, TypeError) as error:
        raise UserError(f"{path}: {error}") from None
    if config.block_size < 2:
        raise UserError(f"{path}: block_size is {config.block_size}; a block holds the anchor and at least one draft")
    if not 0 <= config.mask_token_id < config.vocab_size:
        raise UserError(f"{path}: mask_token_id {config.mask_token_id} is outside the vocabulary of {config.vocab_size}")
    if not config.target_layer_ids or min(config.target_layer_ids) < 0:
        raise UserError(f"{path}: target_layer_ids {list(config.target_layer_ids)} are not layers of a target")
    return config


def load_drafter(spec: DrafterSpec, config: DrafterConfig, device: torch.device, dtype: torch.dtype) -> DFlashDrafter:
    """The drafter with its weights, for inference. Raises UserError naming the tensor that does not fit."""
    weights = _read_weights(_folder(spec, ("config.json", "*.safetensors", "*.safetensors.index.json")))
    with torch.device("meta"):
        drafter = DFlashDrafter(config)
    _check_tensors(spec.checkpoint, config, drafter.state_dict(), weights)
    drafter.load_state_dict({name: tensor.to(device, dtype) for name, tensor in weights.items()}, assign=True)
    drafter.build_rotary(device)
    return drafter.eval().requires_grad_(False)


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


def _read_weights(folder: Path) -> dict[str, Tensor]:
    files = sorted(folder.glob("*.safetensors"))
    index = folder / "model.safetensors.index.json"
    if index.exists():
        try:
            named = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (ValueError, KeyError, AttributeError) as error:
            raise UserError(f"{index}: not an index of safetensors ({error})") from None
        missing = [name for name in named if name not in {file.name for file in files}]
        if missing:
            raise UserError(f"{index}: names {', '.join(missing[:3])}, not in the folder")
        files = [folder / name for name in named]
    elif not files:
        raise UserError(f"{folder}: no weights (*.safetensors)")
    elif len(files) > 1 and folder / "model.safetensors" in files:
        files = [folder / "model.safetensors"]
    weights = {}
    for file in files:
        try:
            with safe_open(file, framework="pt") as opened:
                weights.update({name: opened.get_tensor(name) for name in opened.keys()})  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            raise UserError(f"{file}: not a whole safetensors file ({error})") from None
    return weights


def _check_tensors(name: str, config: DrafterConfig, wanted: dict[str, Tensor], found: dict[str, Tensor]) -> None:
    fc = found.get("fc.weight")
    width = len(config.target_layer_ids) * config.hidden_size
    if fc is not None and fc.ndim == 2 and fc.shape[1] != width:
        raise UserError(
            f"{name}: fc.weight takes {fc.shape[1]} inputs, but {len(config.target_layer_ids)} target_layer_ids of hidden "
            f"size {config.hidden_size} give {width}\nthe layer ids are not those that it was trained with"
        )
    missing = sorted(wanted.keys() - found.keys())
    unexpected = sorted(found.keys() - wanted.keys())
    if missing or unexpected:
        parts = [f"lacks {', '.join(missing[:3])}" + (" ..." if len(missing) > 3 else "")] if missing else []
        parts += [f"has unknown {', '.join(unexpected[:3])}" + (" ..." if len(unexpected) > 3 else "")] if unexpected else []
        raise UserError(f"{name}: the weights do not fit config.json: {'; '.join(parts)}")
    for key, tensor in found.items():
        if tensor.shape != wanted[key].shape:
            raise UserError(f"{name}: {key} is {list(tensor.shape)}, config.json asks for {list(wanted[key].shape)}")
        if not tensor.is_floating_point():
            raise UserError(f"{name}: {key} holds {tensor.dtype}, not weights of a drafter")
