"""What a drafter's own numbers and weights say, without a counterfactual."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dflash_eval.config import EvaluateConfig
from dflash_eval.diagnosis.excerpts import Excerpts
from dflash_eval.diagnosis.reading import Reading
from dflash_eval.diagnosis.trial import Trials, some_anchors
from dflash_eval.drafter.model import DFlashDrafter
from dflash_eval.drafter.scoring import Scorer
from dflash_eval.judge import judges

TOP = 8
EARLY = 4  # slots that decide most of τ
ANCHORS = 16  # of each sample
REACHED = 0.5  # nats a token that the features tell a drafter whom they reach


def slot_numbers(
    drafter: DFlashDrafter, samples: Excerpts, embedding: Tensor, lm_head: Tensor, config: EvaluateConfig
) -> dict[str, Any]:
    """Accuracy, confidence and entropy at every slot over anchors spread evenly; each slot on its own, whatever the
    slots before it said (without a Markov head or selector, where there is one)."""
    config = config.model_copy(update={"width": 1, "budgets": (1,)})
    scorer = Scorer(drafter, lm_head, TOP)
    columns: dict[str, list[NDArray[Any]]] = {}
    for _, judge in judges(drafter, samples, drafter.embedding(embedding), scorer, config, lambda _: None):
        owners, anchors = some_anchors(judge, ANCHORS)
        hidden, tokens, _ = judge.draft(owners, anchors)
        with torch.inference_mode():
            rows = hidden.flatten(0, 1)
            scores = scorer.score(rows, tokens.flatten())
            entropy = scorer.entropies(rows).view(tokens.shape)
        ids, ranks = scores.ids[:, 0].view(tokens.shape), scores.ranks.view(tokens.shape)
        said = torch.tensor(
            [judge.group[o].input_ids[a] for o, a in zip(owners, anchors, strict=True)], device=ids.device
        )
        starts = np.array([len(sample.prompt_ids) for sample in judge.group])
        later = tokens[:, 1] if tokens.shape[1] > 1 else torch.full_like(said, -1)
        for name, values in {
            "there": tokens >= 0, "first": ranks == 0, "top": ranks < TOP, "entropy": entropy,
            "confidence": scores.logprobs[:, 0].exp().view(tokens.shape), "repeats": ids[:, 0] == said,
            "truly": tokens[:, 0] == said, "ahead": ids[:, 0] == later,
        }.items():  # fmt: skip
            columns.setdefault(name, []).append(values.cpu().numpy())
        columns.setdefault("distance", []).append(anchors - starts[owners])
    all_ = {name: np.concatenate(parts) for name, parts in columns.items()}
    there = all_["there"]
    counts = np.maximum(1, there.sum(0))

    def by_slot(name: str) -> list[float]:
        return [float(value) for value in (all_[name] * there).sum(0) / counts]

    near, far = np.quantile(all_["distance"], [1 / 3, 2 / 3])
    thirds = {
        "near": all_["distance"] <= near,
        "middle": (all_["distance"] > near) & (all_["distance"] < far),
        "far": all_["distance"] >= far,
    }
    early = there[:, :EARLY]
    return {
        "anchors": len(there),
        "top1": by_slot("first"),
        f"top{TOP}": by_slot("top"),
        "confidence": by_slot("confidence"),
        "entropy": by_slot("entropy"),
        "by_distance": {
            name: {
                "tokens": int(all_["distance"][rows].mean()) if rows.any() else None,
                "top1": _share(all_["first"][rows][:, :EARLY], early[rows]),
            }
            for name, rows in thirds.items()
        },
        "repeats_anchor": float(all_["repeats"].mean()),
        "text_repeats_anchor": float(all_["truly"].mean()),
        "one_ahead": float(all_["ahead"].mean()),
    }


def _share(hits: NDArray[Any], there: NDArray[Any]) -> float | None:
    return float((hits & there).sum() / there.sum()) if there.any() else None


def features_worth(trials: Trials, base: Reading) -> float | None:
    """Nats a token by which the text is more probable with its own features than with another excerpt's; None where
    there is but one excerpt."""
    if len(trials.excerpts.samples) < 2:
        return None
    own = trials.logprobs(base, ANCHORS)
    return float(np.nanmean(own - trials.logprobs(base, ANCHORS, trials.excerpts.exchanged())))


def fc_shares(drafter: DFlashDrafter, samples: Excerpts) -> list[dict[str, Any]]:
    """Each target layer's part in fc: of its weights' squared norm, and of what it adds for these samples' tokens."""
    ids = drafter.config.target_layer_ids
    weights = drafter.fc.weight.detach().float().unflatten(1, (len(ids), -1))
    squares = weights.square().sum((0, 2))
    added = torch.zeros(len(ids), dtype=torch.float64)
    for sample in samples.samples:
        features = samples.features(sample.id, ids)[1:].to(weights.device).float().unflatten(1, (len(ids), -1))
        for i in range(len(ids)):  # token 0 is left out: many targets keep a huge constant there
            added[i] += (features[:, i] @ weights[:, i].T).norm(dim=-1).sum().double().cpu()
    return [
        {"layer": layer, "of_weights": float(squares[i] / squares.sum()), "of_features": float(added[i] / added.sum())}
        for i, layer in enumerate(ids)
    ]


def symptoms(numbers: dict[str, Any], reference: dict[str, Any] | None) -> list[str]:
    """Sentences on what stands out, each with its figures and those of the reference; [] for healthy numbers."""
    found = []

    def early(what: str, of: dict[str, Any] = numbers) -> float:
        return float(np.mean(of[what][:EARLY]))

    first, top, sure = numbers["top1"], f"top{TOP}", "confidence"
    last = min(EARLY, len(first)) - 1
    theirs = dict.fromkeys(("slot 1", "fall"), "")
    if reference:
        their_first, their_last = reference["top1"][0], reference["top1"][min(last, len(reference["top1"]) - 1)]
        theirs = {
            "slot 1": f" (the reference: {their_first:.0%})",
            "fall": f" (the reference: {their_first:.0%} to {their_last:.0%})",
        }
    low = first[0] < 0.5 and (reference is None or first[0] < 0.75 * reference["top1"][0])
    fall = first[last] / max(first[0], 1e-9)
    if low:
        shape = "low, and the next slots hardly lower" if fall > 0.5 else "low"
        worth, of_theirs = numbers["features_worth"], reference["features_worth"] if reference else None
        compared = f" (the reference: {of_theirs:.1f})" if of_theirs is not None else ""
        told = "" if worth is None else f", which tell it {worth:.1f} nats a token more than another text's{compared}"
        if worth is None or worth < max(REACHED, 0.5 * (of_theirs or 0.0)):
            why = (
                f"The drafter does not get, or cannot use, all of the target's features{told}: layers, positions, "
                "context, noise on the features. More training does not mend it"
            )
        else:
            why = (
                f"The target's features reach it{told}: training is weak, or was on text unlike this, or with "
                "something not quite as it is here"
            )
        found.append(
            f"slot 1 is right in {first[0]:.0%} of blocks{theirs['slot 1']}, "
            f"slot {last + 1} in {first[last]:.0%}: {shape}. {why}"
        )
    elif fall < 0.35:
        found.append(
            f"accuracy falls steeply, from {first[0]:.0%} at slot 1 to {first[last]:.0%} at slot {last + 1}"
            f"{theirs['fall']}: the conditioning works, training is weak (too few tokens or steps, "
            "other text, slot weights)"
        )
    if early(sure) < 0.6 * early("top1") and early(top) > 1.4 * early("top1"):
        found.append(
            f"soft labels: its best token is right in {early('top1'):.0%} of the first {EARLY} slots, but has only "
            f"{early(sure):.0%} of the probability, and the true token is among the best {TOP} in {early(top):.0%}"
            + (
                f" (the reference: {early('top1', reference):.0%}, {early(sure, reference):.0%}, "
                f"{early(top, reference):.0%})"
                if reference
                else ""
            )
            + f"; entropy {early('entropy'):.1f} nats: training on the target's soft probabilities, or on noisy ones, "
            "leaves it unsharp. Use hard cross-entropy on the text's own tokens"
        )
    if early(sure) > early("top1") + 0.25:
        found.append(
            f"overconfident: {early(sure):.0%} of the probability on tokens that are right in {early('top1'):.0%} of "
            f"the first {EARLY} slots: it was trained on text unlike this (chat template, thinking mode, domain, "
            "quantised target), or too long on too little"
        )
    near, far = (numbers["by_distance"][name]["top1"] for name in ("near", "far"))
    drop = 1.0 if not near or far is None else far / near
    aim = 1.0
    if reference and reference["by_distance"]["near"]["top1"]:
        aim = (reference["by_distance"]["far"]["top1"] or 0.0) / reference["by_distance"]["near"]["top1"]
    if drop < 0.6 * min(1.0, aim):
        found.append(
            f"accuracy falls with the distance from the prompt, from {near:.0%} to {far:.0%} in the first {EARLY} slots"
            f"{f' (the reference keeps {aim:.0%})' if reference else ''}: positions, a window, or training on short "
            "sequences"
        )
    if numbers["repeats_anchor"] > numbers["text_repeats_anchor"] + 0.2:
        found.append(
            f"the first draft repeats the anchor in {numbers['repeats_anchor']:.0%} of blocks (the text in "
            f"{numbers['text_repeats_anchor']:.0%}): the slots are read one too early"
        )
    if numbers["one_ahead"] > max(0.2, first[0]):
        found.append(
            f"the first draft is the token after the next in {numbers['one_ahead']:.0%} of blocks, and the next in "
            f"{first[0]:.0%}: the slots are read one too late"
        )
    return found


def weight_symptoms(shares: list[dict[str, Any]], facts: dict[str, Any], target_layers: int | None) -> list[str]:
    """facts: what `inspection.weight_facts` found."""
    found = []
    own = next((share for share in shares if target_layers is not None and share["layer"] == target_layers - 1), None)
    if own:
        found.append(
            f"fc reads the target's last layer ({own['layer']}): {own['of_weights']:.0%} of fc's squared norm, "
            f"{own['of_features']:.0%} of what fc adds up here. That layer all but names the next token, a shortcut in "
            "training; the official recipe keeps it for the target's logits: leave it out of target_layer_ids"
        )
    idle = [str(share["layer"]) for share in shares if share["of_weights"] < 0.01 / len(shares)]
    if idle:
        found.append(
            f"fc hardly reads layers {', '.join(idle)}: less than {0.01 / len(shares):.1%} of its squared norm"
        )
    if facts["untrained_norms"]:
        names = ", ".join(facts["untrained_norms"][:3])
        found.append(f"norms that no training has touched: {names}: are they in the optimizer, is this the right file?")
    if facts["zero"]:
        found.append(f"weights that are all 0: {', '.join(facts['zero'][:3])}: never trained, or lost when saved")
    return found
