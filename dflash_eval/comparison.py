"""Two caches of the same tokens, extracted two ways: how far apart are the states, and does τ notice?

Streams: of each cache a piece of one layer is in memory at a time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dflash_eval.acceptance.statistics import bootstrap_interval, sample_means, tau
from dflash_eval.cache import Cache
from dflash_eval.config import Config
from dflash_eval.errors import RunError, UserError, listed
from dflash_eval.evaluate import judge_drafters
from dflash_eval.progress import progress
from dflash_eval.prompts import prompt_id

ROWS = 2048  # tokens of a layer that are compared at once
COLUMNS = 64  # positions are told apart by the so many-th part of the longest sequence


@dataclass(frozen=True)
class Shared:
    """A sample that both caches hold, and from its beginning on how many tokens are the same in both."""

    id: str
    prompt_tokens: int
    tokens: int


@dataclass
class LayerDifference:
    """What is seen of one layer while its tokens pass by."""

    away: list[NDArray[np.float64]] = field(default_factory=list)  # 1 - cosine of each token, by sample
    squares: float = 0.0  # of the difference, of A's states
    own_squares: float = 0.0
    largest: float = -1.0
    largest_at: tuple[str, int, int] = ("", 0, 0)  # sample, position, channel

    def add(self, sample: str, first: int, a: Tensor, b: Tensor) -> NDArray[np.float64]:
        """a, b: [tokens, hidden] of positions `first` on; returns 1 - cosine of each token."""
        a, b = a.double(), b.double()
        difference = (a - b).abs()
        self.squares += float(difference.square().sum())
        self.own_squares += float(a.square().sum())
        place = int(difference.argmax())
        if float(difference.flatten()[place]) > self.largest:
            self.largest = float(difference.flatten()[place])
            self.largest_at = (sample, first + place // a.shape[1], place % a.shape[1])
        # |a/|a| - b/|b||^2 / 2 is 1 - cosine without the cancellation of 1 - 0.9999...
        a, b = (x / x.norm(dim=1, keepdim=True).clamp_min(torch.finfo(torch.float64).tiny) for x in (a, b))
        return ((a - b).square().sum(1) / 2).numpy()


def compare_caches(
    folder_a: Path, folder_b: Path, config: Config | None = None, common_prefix: bool = False
) -> dict[str, Any]:
    """Compare what two caches hold of the same tokens; with `config`, also what its drafters reach on each.

    Samples and layers that only one of them has are left out and named in the result. Raises UserError for caches
    with nothing in common, of another hidden size, or whose tokens differ, unless `common_prefix`: then each
    sample counts as far as its tokens agree. Raises RunError for states that are not finite.
    """
    a, b = Cache(folder_a), Cache(folder_b)
    layers = _common_layers(a, b)
    shared = _common_samples(a, b, common_prefix)
    edges = _edges(max(sample.tokens for sample in shared))
    result: dict[str, Any] = {
        "schema_version": 1,
        "a": _identity(a),
        "b": _identity(b),
        "differs": {name: list(pair) for name, pair in _differs(a, b).items()},
        "samples": len(shared),
        "tokens": sum(sample.tokens for sample in shared),
        "common_prefix": common_prefix,
        "left_out": {
            side: {
                "samples": sorted({sample.id for sample in cache.samples} - {sample.id for sample in shared}),
                "layers": sorted(set(cache.manifest.layers) - set(layers)),
            }
            for side, cache in (("a", a), ("b", b))
        },
        "layers": [],
        "positions": edges.tolist(),
    }
    with progress("compare", len(layers) * int(result["tokens"])) as advance:
        for layer in layers:
            result["layers"].append({"layer": layer, **_compare_layer(a, b, layer, shared, edges, advance)})
    result["argmax_agreement"] = _argmax_agreement(a, b, shared)
    result["greedy_agreement"] = [a.greedy_agreement(), b.greedy_agreement()]
    result["drafters"] = _drafters(config, a, b, shared, common_prefix) if config is not None else []
    return result


def _common_layers(a: Cache, b: Cache) -> list[int]:
    if a.manifest.hidden_size != b.manifest.hidden_size:
        raise UserError(
            f"caches of different targets: {a.folder} has hidden size {a.manifest.hidden_size}, "
            f"{b.folder} {b.manifest.hidden_size}"
        )
    layers = sorted(set(a.manifest.layers) & set(b.manifest.layers))
    if not layers:
        has = (listed(cache.manifest.layers) for cache in (a, b))
        raise UserError(f"no layer in common: {a.folder} has {next(has)}; {b.folder} has {next(has)}")
    return layers


def _common_samples(a: Cache, b: Cache, common_prefix: bool) -> list[Shared]:
    theirs = {sample.id: sample for sample in b.samples}
    both = [(sample, theirs[sample.id]) for sample in a.samples if sample.id in theirs]
    if not both:
        raise UserError(f"no sample in common: {a.folder} has {_some(a)}; {b.folder} has {_some(b)}")
    shared, different = [], []
    for ours, other in both:
        same = _same_until(ours.input_ids, other.input_ids)
        if same < max(len(ours), len(other)):
            different.append((ours.id, same))
        if same:
            shared.append(Shared(ours.id, min(len(ours.prompt_ids), len(other.prompt_ids)), same))
    if different and not common_prefix:
        raise UserError(
            f"{len(different)} of {len(both)} samples hold other tokens in {b.folder} than in {a.folder}: "
            f"{different[0][0]} from position {different[0][1]} on\n"
            f"extract one with the other's text (completions.source: file, file: {a.folder}/completions.jsonl), "
            "or compare as far as they agree with --common-prefix"
        )
    if not shared:
        raise UserError(f"no token in common: every sample of {b.folder} begins otherwise than in {a.folder}")
    return shared


def _same_until(ours: Sequence[int], other: Sequence[int]) -> int:
    for position, (one, two) in enumerate(zip(ours, other, strict=False)):
        if one != two:
            return position
    return min(len(ours), len(other))


def _some(cache: Cache) -> str:
    return ", ".join(sample.id for sample in cache.samples[:3]) or "none"


def _edges(longest: int) -> NDArray[np.int64]:
    """Where the parts of the positions begin, and the end: [parts + 1]."""
    return np.unique(np.linspace(0, longest, min(COLUMNS, longest) + 1).astype(np.int64))


def _compare_layer(
    a: Cache, b: Cache, layer: int, shared: Sequence[Shared], edges: NDArray[np.int64], advance: Callable[[int], None]
) -> dict[str, Any]:
    seen = LayerDifference()
    for sample in shared:
        parts = []
        for first in range(0, sample.tokens, ROWS):
            rows = slice(first, min(first + ROWS, sample.tokens))
            states = [_finite(cache, sample.id, layer, rows) for cache in (a, b)]
            parts.append(seen.add(sample.id, first, *states))
            advance(rows.stop - rows.start)
        seen.away.append(np.concatenate(parts))
    away = np.concatenate(seen.away)
    positions = np.concatenate([np.arange(sample.tokens) for sample in shared])
    part = np.searchsorted(edges, positions, side="right") - 1
    counts = np.bincount(part, minlength=len(edges) - 1)
    by_position = np.bincount(part, weights=away, minlength=len(edges) - 1) / np.maximum(counts, 1)
    farthest = int(away.argmax())
    owner = int(np.searchsorted(np.cumsum([sample.tokens for sample in shared]), farthest, side="right"))
    sample_id, position, channel = seen.largest_at
    return {
        "cosine": 1 - float(away.mean()),
        "cosine_p1": 1 - float(np.percentile(away, 99)),
        "cosine_min": 1 - float(away[farthest]),
        "cosine_min_at": {"sample": shared[owner].id, "position": int(positions[farthest])},
        "away": float(away.mean()),
        "relative_error": (seen.squares / seen.own_squares) ** 0.5 if seen.own_squares else None,
        "largest_difference": seen.largest,
        "largest_difference_at": {"sample": sample_id, "position": position, "channel": channel},
        "away_by_position": [float(mean) if n else None for mean, n in zip(by_position, counts, strict=True)],
        "growth": _growth(away, positions),
    }


def _finite(cache: Cache, sample_id: str, layer: int, rows: slice) -> Tensor:
    states = cache.features(sample_id, [layer], rows)
    finite = torch.isfinite(states.float())
    if not finite.all():
        position = rows.start + int((~finite).any(1).nonzero()[0])
        raise RunError(
            f"{cache.folder}: not finite: sample {sample_id!r}, layer {layer}, position {position}; extract it again"
        )
    return states


def _growth(away: NDArray[np.float64], positions: NDArray[np.int64]) -> float | None:
    """Mean 1 - cosine in the last quarter of the positions over that in the first, the very first token left out: it
    takes up attention that is of no use and is like no other."""
    quarter = (int(positions.max()) + 1) / 4
    first, last = away[(positions > 0) & (positions < quarter)], away[positions >= 3 * quarter]
    if not len(first) or not len(last) or first.mean() == 0:
        return None
    return float(last.mean() / first.mean())


def _argmax_agreement(a: Cache, b: Cache, shared: Sequence[Shared]) -> float | None:
    """Share of completion tokens for which both targets find the same token most probable; None without both's."""
    if not (a.manifest.target_stats and b.manifest.target_stats):
        return None
    agreed = total = 0
    for sample in shared:
        ours, theirs = (cache.argmax(sample.id) for cache in (a, b))
        told = max(0, min(sample.tokens - sample.prompt_tokens + 1, len(ours), len(theirs)))
        agreed += int((ours[:told] == theirs[:told]).sum())
        total += told
    return agreed / total if total else None


def _identity(cache: Cache) -> dict[str, Any]:
    manifest = cache.manifest
    return {
        "folder": str(cache.folder),
        "fingerprint": manifest.fingerprint(),
        "settings": manifest.settings,
        "provenance": manifest.provenance,
    }


def _differs(a: Cache, b: Cache) -> dict[str, tuple[Any, Any]]:
    """What the manifests say that was done otherwise, in words of the reader's: name → (A's, B's)."""

    def facts(cache: Cache) -> dict[str, Any]:
        manifest = cache.manifest
        settings, provenance = manifest.settings, manifest.provenance
        return {
            "target": settings["target"].get("model"),
            "dtype": settings["target"].get("dtype"),
            "storage": stored if (stored := manifest.stored_dtype()) != settings["target"].get("dtype") else None,
            "kernels": provenance.get("kernels"),
            "compiled layers": bool(provenance.get("compiled", False)),
            "device": provenance.get("device"),
            "batches": manifest.batch_tokens,
            "tokenizer": settings.get("tokenizer", {}).get("fingerprint"),
            "software": provenance.get("software"),
        }

    ours, theirs = facts(a), facts(b)
    return {name: (ours[name], theirs[name]) for name in ours if ours[name] != theirs[name]}


def _drafters(
    config: Config, a: Cache, b: Cache, shared: Sequence[Shared], common_prefix: bool
) -> list[dict[str, Any]]:
    """What each of the config's drafters reaches on the shared samples of either cache."""
    kept = {sample.id for sample in shared}
    sides = []
    for cache in (a, b):
        cache.samples = [sample for sample in cache.samples if sample.id in kept]
        sides.append({entry["name"]: entry for entry in judge_drafters(config, cache, {})})
    prompts = [prompt_id(sample.id) for sample in shared]
    found = []
    for name in [name for name in sides[0] if name in sides[1]]:
        lengths = [{sample["id"]: sample["acceptance_lengths"] for sample in side[name]["samples"]} for side in sides]
        means = [sample_means([side[sample.id] for sample in shared]) for side in lengths]
        one, two = (tau(side) for side in means)
        found.append({
            "name": name,
            "tau": [one, two],
            "difference": None if one is None or two is None else two - one,
            "difference_ci95": bootstrap_interval(
                means[1] - means[0], config.evaluate.bootstrap, config.evaluate.seed, prompts
            ),
            "cycles": [sum(len(chain) for chain in side.values()) for side in lengths],
            "cycles_that_differ": None if common_prefix else sum(
                _different_cycles(lengths[0][sample.id], lengths[1][sample.id]) for sample in shared
            ),
        })  # fmt: skip
    return found


def _different_cycles(ours: Sequence[int], theirs: Sequence[int]) -> int:
    """How many cycles of one walk the other has not: another anchor, or another acceptance length there."""
    one, two = (Counter(zip(np.cumsum([0, *chain]), chain, strict=False)) for chain in (ours, theirs))
    return (one - two).total()
