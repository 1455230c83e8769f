"""Whether what a config holds can be a drafter's: kinds of values, and bounds, before any memory is taken by them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from dflash_eval.config import DrafterOverrides, DrafterSpec
from dflash_eval.drafter.config import DrafterConfig
from dflash_eval.drafter.model import rotary_embedding
from dflash_eval.errors import UserError, reason

MOST_LAYERS = 1000
MOST_SLOTS = 4096
SECTIONS = (
    "dflash_config", "transformer_layer_config", "speculators_config", "verifier", "rope_parameters", "rope_scaling",
)  # fmt: skip
LISTS = ("architectures", "layer_types", "target_layer_ids", "aux_hidden_state_layer_ids")


def check_shape(raw: dict[str, Any]) -> None:
    """Raises ValueError where a section is no object or a list no list, and before anything is as long as raw says."""
    for section in (raw, *(raw.get(key) for key in SECTIONS)):
        if not isinstance(section, dict):
            continue
        for keys, kind, what in ((SECTIONS, dict, "an object"), (LISTS, list, "a list")):
            for key in keys:
                if not isinstance(section.get(key), kind | None):
                    raise ValueError(f"{key} is {short(section[key])}, not {what}")
        layers = section.get("num_hidden_layers", 1)
        if not _whole(layers, 1, MOST_LAYERS):
            raise ValueError(f"num_hidden_layers is {short(layers)}, not a number from 1 to {MOST_LAYERS}")


def check_values(path: Path, spec: DrafterSpec, config: DrafterConfig) -> None:
    """Raises UserError for the first value, under its name in config.json, that no drafter has."""

    def refuse(key: str, value: Any, what: str) -> None:
        raise UserError(f"{path}: {key} is {short(value)}, {what}\n{mend(spec, key)}")

    sizes = {
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_position_embeddings,
    }
    heads = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k", "markov_rank")
    for least, values in ((1, sizes), (0, {key: getattr(config, key) for key in heads})):
        for key, value in values.items():
            if not _whole(value, least):
                refuse(key, value, f"not a whole number from {least} up")
    if config.num_heads % config.num_kv_heads:
        refuse("num_key_value_heads", config.num_kv_heads, f"no divisor of {config.num_heads} attention heads")
    if config.head_dim % 2:
        refuse("head_dim", config.head_dim, "and RoPE turns pairs")
    if not _whole(config.block_size, 2, MOST_SLOTS):
        refuse("block_size", config.block_size, f"not from 2 (the anchor and one draft) to {MOST_SLOTS}")
    if not _whole(config.mask_token_id, 0, config.vocab_size - 1):
        refuse("mask_token_id", config.mask_token_id, f"outside the vocabulary of {config.vocab_size}")
    if not config.target_layer_ids or not all(_whole(layer, 0) for layer in config.target_layer_ids):
        refuse("target_layer_ids", list(config.target_layer_ids), "not layers of a target")
    for window in config.windows:
        if window is not None and not _whole(window, 1):
            refuse("sliding_window", window, "not a whole number from 1 up")
    reals: dict[str, Any] = {
        "rms_norm_eps": config.rms_norm_eps,
        "input_embedding_scale": config.input_embedding_scale,
        "output_multiplier": config.output_multiplier,
        "rope_theta": config.rope_parameters.get("rope_theta"),
    }
    for key, value in reals.items():
        if not (_real(value) and value > 0) and (key, value) != ("rope_theta", None):
            refuse(key, value, "not a number above 0")
    cap = config.final_logit_softcapping
    if cap is not None and not (_real(cap) and cap >= 0):
        refuse("final_logit_softcapping", cap, "neither null nor a number from 0 up")
    for key, flags in (
        ("is_causal", config.causal),
        ("attention_bias", (config.attention_bias,)),
        ("sample_from_anchor", (config.predicts_anchor,)),
        ("window_from_anchor", (config.window_from_anchor,)),
    ):
        for flag in flags:
            if type(flag) is not bool:
                refuse(key, flag, "neither true nor false")
    reduced = config.draft_vocab_size
    if reduced is not None and not _whole(reduced, 1, config.vocab_size):
        refuse("draft_vocab_size", reduced, f"no part of the vocabulary of {config.vocab_size}")
    if config.selector_top_k > (reduced or config.vocab_size):
        refuse("selector_top_k", config.selector_top_k, f"more than the vocabulary of {reduced or config.vocab_size}")


def check_rope(path: Path, spec: DrafterSpec, config: DrafterConfig) -> None:
    """Raises UserError for rope_parameters that give no frequency, or not one for each pair of a head's dimensions."""
    rope = config.rope_parameters

    def refuse(what: str) -> None:
        raise UserError(f"{path}: rope_parameters {short(rope)}: {what}\n{mend(spec, 'rope_parameters')}")

    if any(isinstance(value, dict) for value in rope.values()):
        refuse("one RoPE for each kind of layer, and all layers of a drafter have the same")
    try:
        frequencies = next(rotary_embedding(config).buffers())
    except Exception as error:  # transformers', of whatever a kind of RoPE lacks
        refuse(f"transformers makes no RoPE of it ({type(error).__name__}: {reason(error)})")
    if frequencies.shape != (config.head_dim // 2,):
        refuse(
            f"{frequencies.numel()} frequencies, a head of {config.head_dim} dimensions needs {config.head_dim // 2}"
        )
    if not frequencies.isfinite().all():
        refuse("its frequencies are not finite")


def mend(spec: DrafterSpec, key: str) -> str:
    if key in DrafterOverrides.model_fields:
        return f"mend it there, or set {key} under the overrides of drafter {spec.name!r} in the config"
    return "mend it there: it must be the config that the drafter was trained with"


def short(value: Any) -> str:
    """A value of a stranger's file, as an error shows it: on one line, and not all of it."""
    try:
        text = ascii(value)
    except ValueError:  # a number of more digits than Python writes
        return "a number of thousands of digits"
    return text if len(text) <= 80 else f"{text[:77]}..."


def _whole(value: Any, least: int, most: int = (1 << 31) - 1) -> bool:
    return type(value) is int and least <= value <= most


def _real(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < 1e300 and math.isfinite(value)
