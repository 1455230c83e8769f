"""What could be wrong with how a checkpoint is run, each as another reading of it, and what it means if that is better.

The list is that of the failures that teams have met: each entry names its likely cause in a sentence and the place to
look at. What the cache cannot answer is listed with the command that would make it possible.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

import torch
from torch import Tensor

from dflash_eval.diagnosis.reading import NORMED, Reading
from dflash_eval.diagnosis.target_facts import TargetFacts
from dflash_eval.drafter.config import default_target_layer_ids

ROPE_BASES = (1e4, 1e6, 1e7)
MOST_MASKS = 24
ALIKE = 0.05  # of its length, how far an embedding is from another's that does the same


@dataclass(frozen=True)
class Counterfactual:
    """One change: `kind` groups those of one sort; `cause` and `look` tell what it means if τ rises.

    outweighs: where the change tells the drafter what it does not have when it drafts, which helps any drafter
    somewhat, the change whose loss its gain must exceed.
    """

    kind: str
    change: str
    reading: Reading
    cause: str
    look: str
    outweighs: str | None = None


@dataclass(frozen=True)
class Untested:
    change: str
    why: str
    command: str | None = None


def layer_shifts(base: Reading, cached: Sequence[int], facts: TargetFacts, extract: str) -> Iterator[Any]:
    """Counterfactuals of shifted layer ids, and what the cache cannot tell of them."""
    ids = base.config.target_layer_ids
    for shift in (-1, 1):
        moved = tuple(layer + shift for layer in ids)
        change = f"layer ids {shift:+d}: {_listed(moved)}"
        if min(moved) < 0 or (facts.layers is not None and max(moved) >= facts.layers):
            continue
        missing = sorted(set(moved) - set(cached))
        if missing:
            yield Untested(change, f"the cache lacks layers {_listed(missing)}", extract)
            continue
        if shift < 0:
            cause = (
                "the layer ids are one too high: they count from the embedding (hidden_states[0]), as vLLM and "
                "speculators do, and are read here as decoder layers from 0"
            )
        else:
            cause = (
                "the layer ids are one too low: training read hidden_states[id + 1] or counted from 1 where the "
                "checkpoint's format says otherwise"
            )
        look = f"target_layer_ids in config.json, or overrides.target_layer_ids: {list(moved)}"
        yield _with(base, "layers", change, cause, look, target_layer_ids=moved)
    if facts.layers is not None and base.config.format != "speculators":
        default = default_target_layer_ids(facts.layers, len(ids))
        near = any(abs(a - b) > 1 for a, b in zip(ids, default, strict=True))
        if near and set(default) <= set(cached) and sorted(default) != sorted(ids):
            cause = "the layer ids are not those of the training, which took z-lab's default"
            look = f"target_layer_ids in config.json, or overrides.target_layer_ids: {list(default)}"
            change = f"z-lab's default layers: {_listed(default)}"
            yield _with(base, "layers", change, cause, look, target_layer_ids=default)


def orders(base: Reading) -> list[tuple[tuple[int, ...], Reading]]:
    """The layers with two of them exchanged, and all of them reversed: (ids, reading)."""
    ids = base.config.target_layer_ids
    swapped = [ids[::-1]] if len(ids) > 3 else []
    for i, j in combinations(range(len(ids)), 2):
        order = list(ids)
        order[i], order[j] = order[j], order[i]
        swapped.append(tuple(order))
    return [(order, replace(base, config=replace(base.config, target_layer_ids=order))) for order in swapped]


def ordered(base: Reading, order: tuple[int, ...]) -> Counterfactual:
    cause = (
        "the blocks of fc's input stand in another order than the layer ids: the features are concatenated otherwise"
    )
    look = f"the order of target_layer_ids in config.json against the training's torch.cat, or overrides: {list(order)}"
    return _with(base, "order", f"layers in order {_listed(order)}", cause, look, target_layer_ids=order)


def normed_last(base: Reading, facts: TargetFacts) -> Counterfactual | None:
    """The last layer behind the final norm; the caller sees to it that the excerpts hold NORMED."""
    ids = base.config.target_layer_ids
    if facts.layers is None or facts.layers - 1 not in ids:
        return None
    normed = tuple(NORMED if layer == facts.layers - 1 else layer for layer in ids)
    cause = (
        "the target's last layer was fed to fc behind the final norm in training (Hugging Face's hidden_states[-1] is "
        "normed), and is raw here"
    )
    look = "where training takes the last layer's states; better, leave that layer out of target_layer_ids"
    return _with(base, "last layer", "last layer behind the final norm", cause, look, target_layer_ids=normed)


def slots(base: Reading) -> Iterator[Counterfactual]:
    look = "how training lines up labels with slots (labels[:, i] against anchor + i), and sample_from_anchor"
    if base.config.predicts_anchor:
        cause = "slot k predicts the token at k, not at k + 1: the checkpoint does not draft from the anchor"
        yield _with(base, "slots", "slot k read as predicting k", cause, look, predicts_anchor=False)
        return
    cause = "slot k predicts the token at k + 1: the labels were shifted by one, as in a causal language model"
    yield _with(base, "slots", "slot k read as predicting k+1", cause, look, predicts_anchor=True)
    cause = "slot k predicts the token before the one it is read for: the labels were shifted by one the other way"
    yield Counterfactual("slots", "slot k read as predicting k-1", replace(base, slot_shift=1), cause, look)


def context(base: Reading) -> Iterator[Counterfactual]:
    look = "the context's mask in training: key position < anchor"
    cause = "the context held the anchor's own features in training, which are not there yet when the drafter drafts"
    more, less = "context with the anchor's features", "context without the last position"
    yield Counterfactual("context", more, replace(base, context_shift=1), cause, look, outweighs=less)
    cause = "the context ended one position before the last committed one in training: it lagged behind by one"
    yield Counterfactual("context", less, replace(base, context_shift=-1), cause, look)


def positions(base: Reading) -> Iterator[Counterfactual]:
    look = "the position_ids of block and context in training"
    for shift in (1, -1):
        cause = f"the block's positions were off by {shift:+d} against the context's in training"
        yield Counterfactual(
            "positions", f"block positions {shift:+d}", replace(base, position_shift=shift), cause, look
        )
    cause = "every block's positions began at 0 in training, whatever stood before it"
    yield Counterfactual("positions", "block positions from 0", replace(base, restarted=True), cause, look)


def rope(base: Reading, facts: TargetFacts) -> Iterator[Any]:
    own = float(base.config.rope_parameters.get("rope_theta") or 1e4)
    if facts.rope_theta is None:
        yield Untested("the target's RoPE base", "the target's config is not at hand")
    tried = {own}
    for theta, whose in ((facts.rope_theta, " (the target's)"), *((base_, "") for base_ in ROPE_BASES)):
        if theta is None or theta in tried:
            continue
        tried.add(theta)
        cause = f"the RoPE base is wrong: the drafter was trained with {theta:g}, config.json says {own:g}"
        look = f"rope_theta (or rope_parameters) in config.json, or overrides.rope_theta: {theta:g}"
        parameters = {**base.config.rope_parameters, "rope_theta": theta}
        yield _with(base, "RoPE", f"RoPE base {theta:g}{whose}", cause, look, rope_parameters=parameters)
    if base.config.rope_parameters["rope_type"] != "default":
        kind = base.config.rope_parameters["rope_type"]
        cause = f"RoPE's {kind} scaling was not applied in training"
        parameters = {"rope_type": "default", "rope_theta": own}
        look = "rope_scaling or rope_parameters in config.json"
        yield _with(base, "RoPE", f"RoPE without {kind} scaling", cause, look, rope_parameters=parameters)


def windows(base: Reading, longest: int) -> Iterator[Counterfactual]:
    """longest: of the excerpts, in tokens; a window that holds all of them is as good as none."""
    config, count = base.config, base.config.num_layers
    sliding = [window is not None for window in config.windows]
    cuts = any(window is not None and window < longest + config.block_size for window in config.windows)
    look = "layer_types, sliding_window and is_causal in config.json, or overrides.sliding_window, overrides.is_causal"
    if any(sliding):
        if cuts:
            cause = "the sliding-window layers were trained with full attention"
            yield _with(base, "window", "sliding layers as full", cause, look, windows=(None,) * count)
            cause = "the sliding-window layers were trained with full attention, both ways inside the block"
            change = "sliding layers as full, not causal"
            wide = {"windows": (None,) * count, "causal": (False,) * count}
            if any(config.causal):
                yield _with(base, "window", change, cause, look, **wide)
        halves = tuple(None if window is None else max(1, window // 2) for window in config.windows)
        if any(half is not None and half < longest for half in halves):
            cause = "the sliding window was smaller in training: half (a window that counts both sides, perhaps)"
            yield _with(base, "window", "half the window", cause, look, windows=halves)
    for causal, words in ((True, "causal"), (False, "not causal")):
        kinds = tuple(
            causal if slides or not any(sliding) else kind for slides, kind in zip(sliding, config.causal, strict=True)
        )
        if kinds != config.causal:
            which = "sliding layers" if any(sliding) else "layers"
            cause = f"the {which} were trained {words} inside the block, and are run the other way"
            yield _with(base, "window", f"{which} {words} inside the block", cause, look, causal=kinds)


def masks(base: Reading, facts: TargetFacts, used: set[int], embedding: Tensor) -> list[Counterfactual]:
    """Other mask tokens: the tokenizer's mask and padding tokens, and special tokens that the text does not use.

    Tokens that no training has seen are often embedded alike, and are one mask then: of those, the first is tried.
    """
    found: list[Counterfactual] = []
    tried = [embedding[base.config.mask_token_id].float()]
    for name, token in facts.special_tokens.items():
        if token in used and not name.startswith("the tokenizer's"):
            continue
        own = embedding[token].float()
        if len(found) == MOST_MASKS or any(float((own - other).norm()) <= ALIKE * float(own.norm()) for other in tried):
            continue
        tried.append(own)
        cause = (
            f"the mask token is wrong: the drafter was trained with {token} ({name}), not {base.config.mask_token_id}"
        )
        look = f"mask_token_id in config.json, or overrides.mask_token_id: {token}"
        found.append(_with(base, "mask token", f"mask token {token} ({name})", cause, look, mask_token_id=token))
    return found


def scales(base: Reading) -> Counterfactual:
    scale = base.config.input_embedding_scale
    other = 1.0 if scale != 1.0 else math.sqrt(base.config.hidden_size)
    words = "unscaled" if scale != 1.0 else "scaled by √hidden, as Gemma's are"
    cause = f"the block's input embeddings were {words} in training"
    look = f"input_embedding_scale in config.json: {other:g}"
    return _with(base, "embedding", f"input embeddings times {other:g}", cause, look, input_embedding_scale=other)


def dtypes(base: Reading) -> Counterfactual:
    other = torch.bfloat16 if base.dtype == torch.float32 else torch.float32
    name = str(other).removeprefix("torch.")
    cause = f"the drafter needs {name}: its activations do not fit the type that it is run in"
    return Counterfactual("dtype", f"computed in {name}", replace(base, dtype=other), cause, "evaluate.dtype")


def draft_vocabulary(base: Reading, stored: Tensor | None, own_head: Tensor | None, head: Tensor) -> Iterator[Any]:
    """stored: the checkpoint's d2t; own_head: the drafter's output head; head: the target's."""
    if stored is None:
        return
    rows, size = torch.arange(len(stored), device=stored.device), base.config.vocab_size
    look = "d2t in the weights: an offset for each draft token, target id - draft id"
    if bool(stored.any()):
        cause = "d2t does not belong there: the draft tokens are the target's first ones"
        yield Counterfactual("d2t", "d2t not applied", replace(base, d2t=torch.zeros_like(stored)), cause, look)
        if int(stored.min()) >= 0 and len(stored.unique()) == len(stored) and int(stored.max()) < size:
            cause = "d2t holds the target's token ids themselves, not offsets"
            yield Counterfactual("d2t", "d2t as token ids", replace(base, d2t=stored - rows), cause, look)
    change = "d2t found from the output head's rows"
    if own_head is None:
        return
    ids = match_rows(own_head, head)
    if ids is None:
        yield Untested(change, "the drafter's output head is trained away from the target's rows")
    elif not torch.equal(ids - rows, stored):
        cause = (
            "d2t is missing or wrong: the output head's rows are the target's rows of other tokens than d2t says, so "
            "every draft is the wrong token"
        )
        yield Counterfactual("d2t", change, replace(base, d2t=ids - rows), cause, look)


def match_rows(rows: Tensor, head: Tensor, near: int = 8, least: float = 0.98) -> Tensor | None:
    """Which row of head [vocabulary, hidden] each of rows [n, hidden] is nearly equal to, [n] int64; None where they
    are not.

    Rows that are alike have like projections on any direction: of the 2 * near rows whose projections are closest, the
    one of largest cosine.
    """
    generator = torch.Generator().manual_seed(0)
    direction = torch.randn(head.shape[1], generator=generator).to(head.device)
    own, all_ = (torch.nn.functional.normalize(x.float(), dim=-1) for x in (rows, head))
    order = (all_ @ direction).sort()
    place = torch.searchsorted(order.values, own @ direction)
    candidates = order.indices[
        (place[:, None] + torch.arange(-near, near, device=place.device)).clamp(0, len(all_) - 1)
    ]
    ids, cosines = [], []
    for part, vectors in zip(candidates.split(1024), own.split(1024), strict=True):
        cosine, best = torch.einsum("rch,rh->rc", all_[part], vectors).max(-1)
        ids.append(part.gather(1, best[:, None])[:, 0])
        cosines.append(cosine)
    found = torch.cat(ids)
    sure = float((torch.cat(cosines) > 0.99).float().mean()) >= least
    return found if sure and len(found.unique()) >= least * len(found) else None


def _with(base: Reading, kind: str, change: str, cause: str, look: str, **values: Any) -> Counterfactual:
    return Counterfactual(kind, change, replace(base, config=replace(base.config, **values)), cause, look)


def _listed(layers: Sequence[int]) -> str:
    return ",".join("last normed" if layer == NORMED else str(layer) for layer in layers)
