"""Whether a checkpoint's tensors are those that its config asks for."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import torch

from dflash_eval.config import DrafterSpec
from dflash_eval.drafter.config import DrafterConfig
from dflash_eval.drafter.model import DFlashDrafter
from dflash_eval.drafter.weights import Stored, readable, stored_tensors, weight_files
from dflash_eval.errors import UserError
from dflash_eval.sources import resolve

# Of a training's own bookkeeping, or for engines: no draft depends on them.
UNUSED = re.compile(r"^(verifier_lm_head|verifier_norm|confidence_head)\.|(^|\.)rotary_emb\.inv_freq$|^(t2d|d2t)$")
FUSED = re.compile(r"(.*\.self_attn\.)qkv_proj(\.(?:weight|bias))$")


@dataclass(frozen=True)
class Fit:
    """A checkpoint's tensors beside a drafter on the meta device that its config describes.

    stored: by the drafter's names, those that it takes; unexpected: no part of such a drafter; unused: known, and of no
    effect on drafts; misshapen: name → (shape in the file, shape that the config asks for).
    """

    drafter: DFlashDrafter
    stored: dict[str, Stored]
    missing: list[str]
    unexpected: list[str]
    unused: list[str]
    misshapen: dict[str, tuple[list[int], list[int]]]


def compare_weights(spec: DrafterSpec, config: DrafterConfig) -> Fit:
    """From the files' headers. Raises UserError for files that are not whole, and for a config of no drafter."""
    with readable(spec.checkpoint):
        found = _split_fused(stored_tensors(checkpoint_files(spec)), config)
    drafter = _empty(spec, config, "embed_tokens.weight" in found, "lm_head.weight" in found)
    wanted = {name: list(tensor.shape) for name, tensor in drafter.state_dict().items()}
    taken = {name: found[name] for name in wanted if name in found}
    missing = sorted(wanted.keys() - found.keys())
    if "d2t" in wanted and "t2d" in found:
        taken["t2d"] = found["t2d"]
        wanted["t2d"] = [config.vocab_size]
        missing = [name for name in missing if name != "d2t"]  # which follows from t2d
    rest = sorted(found.keys() - taken.keys())
    return Fit(
        drafter,
        taken,
        missing,
        [name for name in rest if not UNUSED.search(name)],
        [name for name in rest if UNUSED.search(name)],
        {name: (list(found[name].shape), shape) for name, shape in wanted.items()
         if name in found and list(found[name].shape) != shape},
    )  # fmt: skip


def checkpoint_files(spec: DrafterSpec) -> list[Path]:
    """Raises UserError, also for a hub id of which neither safetensors nor pickles can be had."""
    path = resolve(spec.checkpoint, files=("config.json", "*.safetensors", "*.safetensors.index.json"))
    if path.is_file():
        return [path]
    try:
        return weight_files(path)
    except UserError:
        if Path(spec.checkpoint).expanduser().exists() or spec.checkpoint.startswith("package:"):
            raise
    return weight_files(resolve(spec.checkpoint, files=("config.json", "*.bin", "*.bin.index.json", "*.pt")))


def check_fit(name: str, config: DrafterConfig, fit: Fit) -> None:
    """Raises UserError naming the first tensors that do not fit."""
    fc = fit.misshapen.get("fc.weight", ([], []))[0]
    layers, width = len(config.target_layer_ids), len(config.target_layer_ids) * config.hidden_size
    if len(fc) == 2 and fc[1] != width:
        raise UserError(
            f"{name}: fc.weight takes {fc[1]} inputs, but {layers} target_layer_ids of hidden size "
            f"{config.hidden_size} give {width}\n"
            "the layer ids are not those that it was trained with: mend target_layer_ids there or in the overrides"
        )
    if "d2t" in fit.missing:
        size, whole = config.draft_vocab_size, config.vocab_size
        raise UserError(
            f"{name}: drafts from {size} of the target's {whole} tokens, and neither d2t nor t2d says which"
        )
    if fit.missing or fit.unexpected:
        parts = [f"lacks {_some(fit.missing)}"] if fit.missing else []
        parts += [f"has unknown {_some(fit.unexpected)}"] if fit.unexpected else []
        raise UserError(f"{name}: the weights do not fit config.json: {'; '.join(parts)}")
    for key, (shape, wanted) in fit.misshapen.items():
        raise UserError(f"{name}: {key} is {shape}, config.json asks for {wanted}")
    for key, stored in fit.stored.items():
        kind = "token ids" if key in ("d2t", "t2d") else "weights of a drafter"
        if stored.dtype.is_floating_point == (kind == "token ids"):
            raise UserError(f"{stored.file}: {key} holds {str(stored.dtype)[6:]}, not {kind}")


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (" ..." if len(names) > 3 else "")


def _split_fused(found: dict[str, Stored], config: DrafterConfig) -> dict[str, Stored]:
    """qkv_proj as the three projections that it holds one after the other."""
    q, kv = (heads * config.head_dim for heads in (config.num_heads, config.num_kv_heads))
    split = {}
    for name, stored in found.items():
        match = FUSED.fullmatch(name)
        if match is None:
            split[name] = stored
            continue
        if stored.shape[:1] != (q + 2 * kv,):
            raise UserError(
                f"{stored.file}: {name} is {list(stored.shape)}, config.json asks for {q} + {kv} + {kv} rows"
            )
        for part, start, rows in (("q", 0, q), ("k", q, kv), ("v", q + kv, kv)):
            own = f"{match[1]}{part}_proj{match[2]}"
            if own in found:
                raise UserError(f"{stored.file}: both {name} and {own}, which it holds")
            split[own] = stored._replace(rows=(start, start + rows), shape=(rows, *stored.shape[1:]))
    return split


def _empty(spec: DrafterSpec, config: DrafterConfig, own_embedding: bool, own_head: bool) -> DFlashDrafter:
    """The drafter on the meta device: shapes without weights."""
    try:
        with torch.device("meta"):
            return DFlashDrafter(config, own_embedding, own_head)
    except (KeyError, ValueError, TypeError, RuntimeError, AttributeError, ArithmeticError) as error:
        reason = str(error).split("\n")[0]
        raise UserError(f"{spec.checkpoint}: config.json does not describe a DFlash drafter ({reason})") from None
