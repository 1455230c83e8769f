"""One checkpoint read in several ways: the same weights under another config, or with what no config can say."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dflash_eval.drafter.config import DrafterConfig
from dflash_eval.drafter.model import Context, DFlashDrafter, Group

NORMED = -1
"""Among `target_layer_ids`: the last layer behind the target's final norm, as Hugging Face's hidden_states[-1]."""


@dataclass(frozen=True)
class Reading:
    """How a checkpoint's weights are run.

    context_shift: a block sees the context features before position s + context_shift (1: the anchor's own too).
    position_shift: added to the positions that RoPE gives a block; `restarted`: those count from 0 in every block.
    slot_shift: what comes out at slot i + slot_shift is read as slot i's. d2t: in place of the checkpoint's.
    """

    config: DrafterConfig
    dtype: torch.dtype
    context_shift: int = 0
    position_shift: int = 0
    restarted: bool = False
    slot_shift: int = 0
    d2t: Tensor | None = None


class ReadDrafter(DFlashDrafter):
    """A drafter that is run as a `Reading` says."""

    reading: Reading

    def draft(
        self,
        block_embeds: Tensor,
        anchors: Tensor,
        context: Context,
        groups: Sequence[Group],
        lengths: Tensor | None = None,
    ) -> Tensor:
        shift, size = self.reading.context_shift, context[0][0].shape[2]
        if shift:
            groups = [replace(group, positions=max(0, min(group.positions + shift, size))) for group in groups]
        hidden = super().draft(block_embeds, anchors + shift, context, groups, lengths)
        ahead = self.reading.slot_shift
        # What no slot says is taken from the last one.
        return torch.cat([hidden[:, ahead:], hidden[:, -1:].expand(-1, ahead, -1)], dim=1) if ahead else hidden

    def rope_positions(self, positions: Tensor) -> Tensor:
        if self.reading.restarted:
            return positions - positions[:, :1]
        return positions + (self.reading.position_shift - self.reading.context_shift)


def read_as(drafter: DFlashDrafter, reading: Reading) -> ReadDrafter:
    """A drafter with the other's weights (the same memory where the dtype is the same), run as `reading` says."""
    config = reading.config
    if reading.context_shift:  # the blocks' positions are counted from as much later, and so are the windows
        wider = tuple(None if window is None else window + reading.context_shift for window in config.windows)
        config = replace(config, windows=wider)
    with torch.device("meta"):
        other = ReadDrafter(config, drafter.embed_tokens is not None, drafter.lm_head is not None)
    weights = {
        name: tensor.to(reading.dtype) if tensor.dtype.is_floating_point else tensor
        for name, tensor in drafter.state_dict().items()
    }
    if reading.d2t is not None:
        weights["d2t"] = reading.d2t.to(weights["d2t"].device)
    device = weights["fc.weight"].device
    other.load_state_dict(weights, assign=True)
    other.build_rotary(device)
    other.reading = reading
    return other.eval().requires_grad_(False)
