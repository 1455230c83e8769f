"""Read a drafter from a checkpoint: a folder or hub id with config.json and weights, or a training run's own file.

The format is found out (`formats.py`), and nothing in a checkpoint is ever executed.
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dflash_eval.config import DrafterSpec
from dflash_eval.drafter.checks import check_rope, check_shape, check_values, mend
from dflash_eval.drafter.config import DrafterConfig
from dflash_eval.drafter.fit import check_fit, compare_weights
from dflash_eval.drafter.formats import ARCHITECTURES, normalise
from dflash_eval.drafter.model import DFlashDrafter
from dflash_eval.drafter.weights import PICKLES, Stored, not_finite, read_json, read_tensors, readable, stored_tensors
from dflash_eval.errors import UserError
from dflash_eval.sources import resolve


def read_config(spec: DrafterSpec) -> DrafterConfig:
    """The checkpoint's configuration with the spec's overrides; no weights are read.

    Raises UserError for what is missing, contradictory or of no format known.
    """
    path, raw = _raw_config(spec)
    overrides = spec.overrides.model_dump(exclude_none=True)
    try:
        format, values = normalise(raw)
        nested = values.get("dflash_config") or {}
        if "rope_theta" in overrides:
            rope = values.get("rope_parameters") or values.get("rope_scaling") or {}
            values = {**values, "rope_parameters": {**rope, "rope_theta": overrides["rope_theta"]}}
        values = {**values, **overrides, "dflash_config": {**nested, **overrides}}
        config = DrafterConfig.from_dict(values, format)
    except KeyError as error:
        key = error.args[0]
        if key == "num_target_layers":
            raise UserError(
                f"{path}: neither 'target_layer_ids' nor 'num_target_layers'\n{mend(spec, 'target_layer_ids')}"
            ) from None
        raise UserError(f"{path}: no {key!r}\n{mend(spec, key)}") from None
    except (ValueError, TypeError, AttributeError, ArithmeticError) as error:
        raise UserError(f"{path}: {error}") from None
    check_values(path, spec, config)
    check_rope(path, spec, config)
    return config


def load_drafter(spec: DrafterSpec, config: DrafterConfig, device: torch.device, dtype: torch.dtype) -> DFlashDrafter:
    """The drafter with its weights, for inference. Raises UserError naming the tensor that does not fit."""
    fit = compare_weights(spec, config)
    check_fit(spec.checkpoint, config, fit)
    weights: dict[str, Tensor] = {}
    for name, tensor in read_tensors(fit.stored):
        if tensor.dtype.is_floating_point:
            _check_finite(fit.stored[name], tensor, dtype)
            tensor = tensor.to(dtype)
        weights[name] = tensor.to(device)
    if config.draft_vocab_size is not None:
        weights["d2t"] = _offsets(spec, config, weights.get("d2t"), weights.pop("t2d", None)).to(device)
    fit.drafter.load_state_dict(weights, assign=True)
    fit.drafter.build_rotary(device)
    return fit.drafter.eval().requires_grad_(False)


def check_weights(spec: DrafterSpec, config: DrafterConfig) -> int:
    """The number of weights, from the files' headers. Raises UserError unless they are whole and as the config asks."""
    fit = compare_weights(spec, config)
    check_fit(spec.checkpoint, config, fit)
    return sum(math.prod(stored.shape) for stored in fit.stored.values() if stored.dtype.is_floating_point)


def target_of(spec: DrafterSpec) -> tuple[str | None, int | None]:
    """The target that a checkpoint names, and how many layers it says that one has; either may be unknown."""
    raw = _raw_config(spec)[1]
    verifier = (raw.get("speculators_config") or {}).get("verifier") or {}
    name, layers = verifier.get("name_or_path"), raw.get("num_target_layers")
    return name if isinstance(name, str) and name else None, layers if type(layers) is int else None


def _raw_config(spec: DrafterSpec) -> tuple[Path, dict[str, Any]]:
    """config.json and where it lies; for a file without one, what its tensors and the overrides tell."""
    with readable(spec.checkpoint):
        path = resolve(spec.checkpoint, files=("config.json",))
        config = _config_beside(path) if path.is_file() else _config_inside(path)
    raw = read_json(config) if config else _described(spec, path)
    try:
        check_shape(raw)
    except ValueError as error:
        raise UserError(f"{config}: {error}") from None
    return config or path, raw


def _config_inside(folder: Path) -> Path:
    config = folder / "config.json"
    if config.exists():
        return config
    if not folder.is_dir():
        raise UserError(f"{folder}: neither a file nor a folder")
    steps = sorted(path.name for path in folder.iterdir() if (path / "config.json").exists())
    if steps:
        some = ", ".join(steps[:3]) + (" ..." if len(steps) > 3 else "")
        raise UserError(
            f"{folder}: no config.json, but {len(steps)} checkpoints ({some})\n"
            f"name one, or all of them: checkpoint: {folder}/{_pattern(steps)}"
        )
    raise UserError(f"{folder}: no config.json; a drafter folder holds config.json and model.safetensors")


def _pattern(names: list[str]) -> str:
    stems = {re.sub(r"\d+", "*", name) for name in names}
    return stems.pop() if len(stems) == 1 else "*"


def _config_beside(file: Path) -> Path | None:
    """The one config of a training run's file. Raises UserError for two."""
    if file.suffix not in (*PICKLES, ".safetensors"):
        raise UserError(
            f"{file}: a drafter checkpoint is a folder with config.json and model.safetensors, or a file "
            f"(.safetensors, {', '.join(PICKLES)})"
        )
    candidates = [path for path in (file.parent / "config.json", file.with_suffix(".json")) if path.exists()]
    others = sorted(set(file.parent.glob("*config*.json")) - set(candidates))
    candidates += [path for path in others if _dflash(path)]
    if len(candidates) > 1:
        raise UserError(
            f"{file}: two configs could be its own: {candidates[0].name} and {candidates[1].name}\n"
            "put the file into a folder with the right one as config.json"
        )
    return candidates[0] if candidates else None


def _dflash(path: Path) -> bool:
    try:
        raw = read_json(path)
    except UserError:
        return False
    names = raw.get("architectures")
    return bool({"dflash_config", "speculators_model_type"} & raw.keys()) or any(
        name in ARCHITECTURES for name in (names if isinstance(names, list) else ()) if isinstance(name, str)
    )


def _described(spec: DrafterSpec, file: Path) -> dict[str, Any]:
    """A config from the shapes of a file's tensors; what no shape tells must be in the overrides."""
    needed = ("block_size", "mask_token_id", "target_layer_ids", "rope_theta")
    missing = [key for key in needed if getattr(spec.overrides, key) is None]
    if missing:
        raise UserError(
            f"{file}: no config beside it; put its config.json there, or set {', '.join(missing)}\n"
            f"under the overrides of drafter {spec.name!r} in the config"
        )
    found = stored_tensors([file])

    def rows(name: str) -> int:
        if name not in found or not found[name].shape:
            raise UserError(f"{file}: no {name} in it: not the weights of a DFlash drafter, or under another name")
        return found[name].shape[0]

    layers = {int(match[1]) for name in found if (match := re.match(r"layers\.(\d{1,9})\.", name))}
    head_dim = rows("layers.0.self_attn.q_norm.weight")
    assert spec.overrides.mask_token_id is not None
    # No tensor may tell the vocabulary: the cache, which knows it, is held against mask_token_id in any case.
    own = found.get("embed_tokens.weight") or found.get("lm_head.weight")
    return {
        "architectures": ["DFlashDraftModel"],
        "hidden_size": rows("norm.weight"),
        "intermediate_size": rows("layers.0.mlp.gate_proj.weight"),
        "num_hidden_layers": max(layers) + 1,
        "num_attention_heads": rows("layers.0.self_attn.q_proj.weight") // head_dim,
        "num_key_value_heads": rows("layers.0.self_attn.k_proj.weight") // head_dim,
        "head_dim": head_dim,
        "attention_bias": "layers.0.self_attn.q_proj.bias" in found,
        "vocab_size": own.shape[0] if own else spec.overrides.mask_token_id + 1,
    }


def _check_finite(stored: Stored, tensor: Tensor, dtype: torch.dtype) -> None:
    """Raises UserError for NaN or infinity in the file, and for weights that the drafter's dtype cannot hold."""
    nan, infinite = not_finite(tensor)
    if nan or infinite:
        why = ": they overflowed there, save them as bfloat16" if tensor.dtype == torch.float16 else ""
        raise UserError(
            f"{stored.file}: {stored.name} holds {'NaN' if nan else 'infinity'} ({nan + infinite:,} of "
            f"{tensor.numel():,}, as {str(tensor.dtype)[6:]}){why}"
        )
    most = max(abs(float(value)) for value in torch.aminmax(tensor))
    if most > torch.finfo(dtype).max:
        raise UserError(
            f"{stored.file}: {stored.name} holds {most:.3g}, which is infinity in {str(dtype)[6:]}\n"
            "set evaluate.dtype to bfloat16 or float32"
        )


def _offsets(spec: DrafterSpec, config: DrafterConfig, d2t: Tensor | None, t2d: Tensor | None) -> Tensor:
    """d2t as int64, from t2d where only that is there. Raises UserError where they are no map into the vocabulary."""
    rows = torch.arange(config.draft_vocab_size or 0)
    marked = None
    if t2d is not None:
        marked = t2d.cpu().bool().nonzero().squeeze(1)
        if len(marked) != len(rows):
            raise UserError(
                f"{spec.checkpoint}: t2d marks {len(marked)} of {len(t2d)} tokens, config.json says {len(rows)} of "
                f"{config.vocab_size}"
            )
    if d2t is None:
        assert marked is not None
        return marked - rows
    ids = rows + d2t.cpu().long()
    if int(ids.min()) < 0 or int(ids.max()) >= config.vocab_size or len(ids.unique()) < len(ids):
        raise UserError(
            f"{spec.checkpoint}: d2t does not map {len(ids)} draft tokens into the target's {config.vocab_size}: "
            f"token + d2t goes from {int(ids.min())} to {int(ids.max())}, {len(ids.unique())} of them different"
        )
    if marked is not None and not torch.equal(ids, marked):
        raise UserError(f"{spec.checkpoint}: d2t and t2d name different tokens")
    return d2t.cpu().long()
