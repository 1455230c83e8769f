"""The six trainers' config.json files, brought into the shape of z-lab's (`DrafterConfig.from_dict` reads that).

| format | how it is told | what differs |
| --- | --- | --- |
| z-lab, SpecForge | DFlashDraftModel, or `dflash_config` | - |
| z-lab 2 | DFlash2DraftModel | convolutions and a candidate selector |
| Laguna | DFlashLagunaForCausalLM | fused `qkv_proj`; `causal` in `dflash_config` |
| speculators | `speculators_model_type` | layer ids + 1, a nested body, vocabulary and head of its own |
| DeepSpec | Qwen3DSparkModel, DSparkDraftModel | the anchor's slot predicts too, a Markov head |
"""

from __future__ import annotations

from typing import Any

ARCHITECTURES = {
    "DFlashDraftModel": "z-lab",
    "DFlash2DraftModel": "z-lab 2",
    "DFlashLagunaForCausalLM": "Laguna",
    "Qwen3DSparkModel": "DeepSpec",
    "DSparkDraftModel": "DeepSpec",
}
SPECULATORS = ("dflash", "dflash2", "dspark")
KNOWN = f"{', '.join(ARCHITECTURES)}, and speculators' {', '.join(SPECULATORS)}"
MARKOV_HEADS = ("vanilla", "gated", "rnn")


def normalise(raw: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """The format's name, and the config in z-lab's keys. Raises ValueError for a format that is not known."""
    if raw.get("speculators_model_type"):
        name, config = "speculators", _speculators(raw)
    else:
        name = _architecture(raw)
        config = {"z-lab": _as_it_is, "z-lab 2": _as_it_is, "Laguna": _laguna, "DeepSpec": _deepspec}[name](raw)
    values = {**config, **(config.get("dflash_config") or {})}
    if name == "z-lab 2":
        _need(values, "conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
    if values.get("conv_kernel_size"):
        _need(values, "conv_group_size")
    if values.get("conv_kernel_size") and values["hidden_size"] % values["conv_group_size"]:
        raise ValueError(
            f"conv_group_size {values['conv_group_size']} does not divide hidden_size {values['hidden_size']}"
        )
    if values.get("markov_rank"):
        _check_markov(values)
    return name, config


def _architecture(raw: dict[str, Any]) -> str:
    names = raw.get("architectures") or []
    known = [ARCHITECTURES[name] for name in names if isinstance(name, str) and name in ARCHITECTURES]
    if known:
        return known[0]
    if not names and "dflash_config" in raw:
        return "z-lab 2" if "selector_rank" in {**raw, **(raw["dflash_config"] or {})} else "z-lab"
    what = f"architecture {', '.join(map(repr, names))}" if names else "no architecture and no dflash_config"
    raise ValueError(f"{what}: not a DFlash drafter; known are {KNOWN}")


def _as_it_is(raw: dict[str, Any]) -> dict[str, Any]:
    return raw


def _laguna(raw: dict[str, Any]) -> dict[str, Any]:
    causal = (raw.get("dflash_config") or {}).get("causal")
    return raw if causal is None else {"is_causal": causal, **raw}


def _deepspec(raw: dict[str, Any]) -> dict[str, Any]:
    """block_size counts proposals, the anchor's slot makes the first; attention sees the whole block."""
    return {"sample_from_anchor": True, "markov_rank": 0, **raw, "is_causal": False}


def _speculators(raw: dict[str, Any]) -> dict[str, Any]:
    kind = raw["speculators_model_type"]
    if kind not in SPECULATORS:
        raise ValueError(f"speculators_model_type {kind!r}: not a DFlash drafter; known are {KNOWN}")
    body = raw.get("transformer_layer_config")
    if not isinstance(body, dict):
        raise ValueError("a speculators checkpoint without transformer_layer_config")
    rope = body.get("rope_parameters")
    if isinstance(rope, dict) and "sliding_attention" in rope:  # one a layer type: speculators takes this
        body = {**body, "rope_parameters": rope["sliding_attention"]}
    own = {key: raw[key] for key in ("draft_vocab_size", "block_size", "mask_token_id") if raw.get(key) is not None}
    ids = raw.get("aux_hidden_state_layer_ids")
    if ids is not None:
        own["target_layer_ids"] = [index - 1 if type(index) is int else index for index in ids]
    config = {
        **body,
        "block_size": 8,
        "sample_from_anchor": raw.get("sample_from_anchor", kind == "dspark"),
        "window_from_anchor": True,  # its mask takes the window from the anchor, and leaves the block alone
        **own,
    }
    if raw.get("sliding_window_non_causal", kind == "dflash2"):
        config["is_causal"] = False
    if kind == "dflash2":
        defaults = {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 256, "selector_top_k": 16}
        config |= {key: raw.get(key, default) for key, default in defaults.items()}
    if kind == "dspark":
        config["markov_rank"] = raw.get("markov_rank", 256)
        config["markov_head_type"] = raw.get("markov_head_type", "vanilla")
    return config


def _check_markov(values: dict[str, Any]) -> None:
    kind = values.get("markov_head_type", "vanilla")
    if kind not in MARKOV_HEADS:
        raise ValueError(f"markov_head_type {kind!r}: known are {', '.join(MARKOV_HEADS)}")
    if kind == "rnn" and not values.get("sample_from_anchor"):
        raise ValueError("an rnn Markov head without sample_from_anchor: no public loop says where its state begins")
    if values.get("output_multiplier", 1.0) != 1.0 or values.get("final_logit_softcapping"):
        raise ValueError("a Markov head beside output_multiplier or final_logit_softcapping: no public model has both")


def _need(values: dict[str, Any], *keys: str) -> None:
    for key in keys:
        if not isinstance(values.get(key), int) or values[key] < 1:
            raise ValueError(f"a DFlash 2 drafter needs {key}, a whole number from 1 up; it is {values.get(key)!r}")
