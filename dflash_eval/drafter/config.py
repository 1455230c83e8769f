"""What a drafter is, whichever format its checkpoint has."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class DrafterConfig:
    """The shape of a drafter and how it drafts.

    `windows[i]` is layer i's sliding window (a key is visible when query - key < window; in a layer that is
    not causal also key - query < window), None for full attention; `causal[i]` whether layer i is causal
    inside the block. With `window_from_anchor` every slot of a block sees what its anchor sees, anchor - key <= window,
    and the block. `rope_parameters` is Hugging Face's dict (`rope_type`, `rope_theta`, ...). `predicts_anchor`: the
    block's slot i predicts x[s + i + 1], not x[s + i], so that the anchor's slot drafts too.
    """

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    windows: tuple[int | None, ...]
    causal: tuple[bool, ...]
    format: str = "z-lab"
    rope_parameters: dict[str, Any] = field(default_factory=lambda: {"rope_type": "default", "rope_theta": 1e4})
    max_position_embeddings: int = 32768
    rms_norm_eps: float = 1e-6
    hidden_act: str = "silu"
    attention_bias: bool = False
    input_embedding_scale: float = 1.0
    output_multiplier: float = 1.0
    final_logit_softcapping: float | None = None
    window_from_anchor: bool = False
    predicts_anchor: bool = False
    draft_vocab_size: int | None = None
    """Rows of the output head where it has a vocabulary of its own; None: the target's."""
    conv_kernel_size: int = 0
    """DFlash 2: taps of the convolutions around attention and MLP; 0: none."""
    conv_group_size: int = 0
    selector_rank: int = 0
    """DFlash 2: of the candidate selector's codebooks; 0: no selector."""
    selector_top_k: int = 0
    markov_rank: int = 0
    """DSpark: of the Markov head; 0: none."""
    markov_head_type: str = "vanilla"

    @property
    def drafts(self) -> int:
        """How many tokens a whole block proposes."""
        return self.block_size if self.predicts_anchor else self.block_size - 1

    @classmethod
    def from_dict(cls, raw: dict[str, Any], format: str = "z-lab") -> DrafterConfig:
        """Read z-lab's `config.json`: the DFlash keys may sit in `dflash_config` or at the top level. Other formats'
        are brought into this one first (`formats.py`).

        Raises KeyError for a missing key and ValueError for values that contradict each other.
        """
        values = {**raw, **raw.get("dflash_config", {})}
        layers = values["num_hidden_layers"]
        heads = values["num_attention_heads"]
        layer_types = values.get("layer_types") or ["full_attention"] * layers
        if len(layer_types) != layers:
            raise ValueError(f"layer_types has {len(layer_types)} entries for {layers} layers")
        unknown = [kind for kind in layer_types if kind not in ("full_attention", "sliding_attention")]
        if unknown:
            raise ValueError(f"layer_types holds {unknown[0]!r}: not a DFlash layer")
        sliding = [kind == "sliding_attention" for kind in layer_types]
        window = values.get("sliding_window")
        if any(sliding) and window is None:
            raise ValueError("layer_types has sliding_attention but there is no sliding_window")
        is_causal = raw.get("is_causal")
        layer_ids = values.get("target_layer_ids")
        if layer_ids is None:
            layer_ids = default_target_layer_ids(values["num_target_layers"], layers)
        rope = values.get("rope_parameters") or {
            **(values.get("rope_scaling") or {}),
            "rope_theta": values.get("rope_theta", 10000.0),
        }
        rope_type = rope.get("rope_type") or rope.get("type") or "default"
        return cls(
            hidden_size=values["hidden_size"],
            intermediate_size=values["intermediate_size"],
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=values.get("num_key_value_heads") or heads,
            head_dim=values.get("head_dim") or values["hidden_size"] // heads,
            vocab_size=values["vocab_size"],
            block_size=values.get("block_size", 16),
            mask_token_id=values["mask_token_id"],
            target_layer_ids=tuple(layer_ids),
            windows=tuple(window if slides else None for slides in sliding),
            causal=tuple(slides if is_causal is None else is_causal for slides in sliding),
            format=format,
            rope_parameters={**rope, "rope_type": rope_type},
            max_position_embeddings=values.get("max_position_embeddings") or 32768,
            rms_norm_eps=values.get("rms_norm_eps", 1e-6),
            hidden_act=values.get("hidden_act", "silu"),
            attention_bias=values.get("attention_bias") or False,
            input_embedding_scale=values.get("input_embedding_scale", 1.0),
            output_multiplier=values.get("output_multiplier", 1.0),
            final_logit_softcapping=values.get("final_logit_softcapping"),
            window_from_anchor=values.get("window_from_anchor", False),
            predicts_anchor=values.get("sample_from_anchor") or False,
            draft_vocab_size=_reduced(values),
            conv_kernel_size=values.get("conv_kernel_size") or 0,
            conv_group_size=values.get("conv_group_size") or 0,
            selector_rank=values.get("selector_rank") or 0,
            selector_top_k=values.get("selector_top_k") or 0,
            markov_rank=values.get("markov_rank") or 0,
            markov_head_type=values.get("markov_head_type", "vanilla"),
        )


def _reduced(values: dict[str, Any]) -> int | None:
    size = values.get("draft_vocab_size")
    return None if size == values["vocab_size"] else size


def default_target_layer_ids(num_target_layers: int, num_layers: int) -> tuple[int, ...]:
    """The layers that z-lab's code takes when a config names none: evenly from 1 to L - 3; one layer: L // 2."""
    if num_layers == 1:
        return (num_target_layers // 2,)
    span = num_target_layers - 4
    return tuple(round(1 + i * span / (num_layers - 1)) for i in range(num_layers))
