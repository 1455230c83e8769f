"""Whether a cache can serve a drafter: the layers that it reads, its hidden size, its vocabulary."""

from __future__ import annotations

from dflash_eval.cache import Manifest
from dflash_eval.config import DrafterSpec
from dflash_eval.drafter.config import DrafterConfig
from dflash_eval.errors import UserError, listed


def check_fits(spec: DrafterSpec, drafter: DrafterConfig, manifest: Manifest, width: int) -> None:
    """Raises UserError unless it can; width: K of DDTree-K."""

    def refuse(reason: str) -> None:
        raise UserError(f"{spec.name} ({spec.checkpoint}): {reason}")

    layers, wanted = manifest.provenance.get("target_layers"), drafter.target_layer_ids
    if drafter.hidden_size != manifest.hidden_size:
        refuse(
            f"hidden size {drafter.hidden_size}, the target's is {manifest.hidden_size}: a drafter of another target"
        )
    if layers is not None and max(wanted) >= layers:
        refuse(
            f"needs layers {listed(layer for layer in wanted if layer >= layers)}, the target has 0 to {layers - 1}: "
            "a drafter of another target, or layers counted otherwise\nset target_layer_ids under its overrides"
        )
    counted = drafter.format == "speculators" and spec.overrides.target_layer_ids is None
    if counted and layers is not None and layers - 1 in wanted:
        # Its extraction lists the last layer for the target's own logits, as the final norm leaves it.
        others = [layer for layer in wanted if layer != layers - 1]
        refuse(
            f"aux_hidden_state_layer_ids holds {layers}, the target's last layer: what speculators takes there is "
            f"behind the final norm, layer {layers - 1} here is not\nset target_layer_ids under its overrides: "
            f"{others} if its fc does not read that layer, {list(wanted)} if it reads the layer without the norm"
        )
    missing = [layer for layer in wanted if layer not in manifest.layers]
    if missing:
        refuse(
            f"needs layers {listed(missing)}, the cache has {listed(manifest.layers)}\n"
            "dflash-eval extract --force adds them, with extract.layers: auto (the completions are kept)"
        )
    if drafter.mask_token_id >= manifest.vocab_size:
        refuse(f"mask_token_id {drafter.mask_token_id} is outside the target's vocabulary of {manifest.vocab_size}")
    bound = drafter.selector_rank or drafter.markov_rank or drafter.draft_vocab_size
    if bound and drafter.vocab_size != manifest.vocab_size:
        refuse(f"a vocabulary of {drafter.vocab_size}, the target's has {manifest.vocab_size}: of another target")
    if width > (drafter.draft_vocab_size or width):
        refuse(f"drafts from {drafter.draft_vocab_size} tokens, fewer than evaluate.width {width}")
