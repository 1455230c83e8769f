"""A part of a cache in memory, which every counterfactual reads: some prompts, of each a stretch of the completion."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from dflash_eval.cache import Cache, Sample
from dflash_eval.diagnosis.reading import NORMED

AGREES = 0.9  # of the tokens, where the normed last layer is what it should be


class Excerpts(Cache):
    """`samples` are stretches: what comes before one counts as its prompt. States are read once, when it is made.

    A stretch is `tokens` long at most. They begin at the completions' starts, as far before their ends, and between, so
    that what depends on the distance from the prompt is seen.
    """

    def __init__(self, cache: Cache, layers: Sequence[int], prompts: int, tokens: int) -> None:
        self.folder, self.manifest = cache.folder, cache.manifest
        long_enough = [sample for sample in cache.samples if len(sample.completion_ids) > 1]
        step = max(1, len(long_enough) / prompts)
        whole = [long_enough[int(i * step)] for i in range(min(prompts, len(long_enough)))]
        self.samples = [_stretch(sample, i / max(1, len(whole) - 1), tokens) for i, sample in enumerate(whole)]
        self.offsets = [len(own.prompt_ids) - len(was.prompt_ids) for own, was in zip(self.samples, whole, strict=True)]
        self._lengths = {sample.id: len(sample) for sample in self.samples}
        self._states: dict[str, dict[int, Tensor]] = {}
        for sample in self.samples:
            states = cache.features(sample.id, layers, slice(0, len(sample))).unflatten(-1, (len(layers), -1))
            self._states[sample.id] = dict(zip(layers, states.unbind(1), strict=True))

    def features(self, sample_id: str, layers: Sequence[int], positions: slice | None = None) -> Tensor:
        states, length = self._states[sample_id], self._lengths[sample_id]
        whole = torch.cat([states[layer][:length] for layer in layers], dim=-1)
        return whole if positions is None else whole[positions]

    def cut(self, tokens: int) -> Excerpts:
        """The same with the first `tokens` of each stretch."""
        shorter = copy.copy(self)
        shorter.samples = [replace(own, completion_ids=own.completion_ids[:tokens]) for own in self.samples]
        shorter._lengths = {sample.id: len(sample) for sample in shorter.samples}
        return shorter

    def exchanged(self) -> Excerpts:
        """The same with each text's states from the next one's, from its start on, as often as its length needs."""
        other, ids = copy.copy(self), [sample.id for sample in self.samples]
        other._states = {}
        for own, taken in zip(ids, ids[1:] + ids[:1], strict=True):
            rows = torch.arange(self._lengths[own]) % self._lengths[taken]
            other._states[own] = {layer: states[rows] for layer, states in self._states[taken].items()}
        return other

    def add_normed(self, last: int, weight: Tensor, lm_head: Tensor) -> bool:
        """Add the last layer's states behind the final norm, under NORMED; False where they cannot be made.

        weight: the norm's. Whether it multiplies as it is or as 1 + weight the text tells: the target's own logits
        follow from these states, and their argmax is the next token nearly everywhere.
        """
        for scale in (weight.float(), 1 + weight.float()):
            agreed: list[Tensor] = []
            for sample in self.samples:
                own = self._states[sample.id]
                normed = F.rms_norm(own[last].float(), scale.shape, scale, 1e-6)
                own[NORMED] = normed.to(own[last].dtype)
                start = len(sample.prompt_ids) - 1
                rows = torch.arange(start, len(sample) - 1)[:16]
                said = (normed[rows].to(lm_head.device, lm_head.dtype) @ lm_head.T).argmax(-1).cpu()
                agreed.append(said == torch.tensor(sample.input_ids)[rows + 1])
            if float(torch.cat(agreed).float().mean()) >= AGREES:
                return True
        return False


def _stretch(sample: Sample, place: float, tokens: int) -> Sample:
    """`tokens` of the completion, from its start (place 0) to its end (place 1)."""
    skipped = int(np.floor(place * max(0, len(sample.completion_ids) - tokens)))
    rest = sample.completion_ids[skipped:]
    return replace(sample, prompt_ids=sample.prompt_ids + sample.completion_ids[:skipped], completion_ids=rest[:tokens])
