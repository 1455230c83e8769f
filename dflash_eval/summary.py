"""Walks → the numbers of results.json: τ and its interval under every rule, each candidate beside the reference."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dflash_eval.acceptance.statistics import (
    bootstrap_interval,
    bootstrap_ratio_interval,
    minimum_detectable_difference,
    sample_means,
    tau,
    tau_micro,
    wins_ties_losses,
)
from dflash_eval.acceptance.walks import Walk, position_acceptance
from dflash_eval.cache import Sample
from dflash_eval.config import DrafterSpec, EvaluateConfig
from dflash_eval.cost import cost_rows
from dflash_eval.drafter.config import DrafterConfig
from dflash_eval.drafter.path import tree_scores
from dflash_eval.prompts import prompt_id


def summarise(
    spec: DrafterSpec,
    drafter: DrafterConfig,
    samples: Sequence[Sample],
    walks: Sequence[Sequence[Walk]],
    expected: NDArray[np.float64] | None,
    config: EvaluateConfig,
) -> dict[str, Any]:
    """A drafter's entry in the results; walks: [samples][rules], expected: each sample's expected τ or None."""
    prompts = np.array([prompt_id(sample.id) for sample in samples])

    def rule(index: int) -> dict[str, Any]:
        means = sample_means([sample[index].committed for sample in walks])
        return {"tau": tau(means), "tau_ci95": bootstrap_interval(means, config.bootstrap, config.seed, prompts)}

    chain = [sample[0].committed for sample in walks]
    tokens, cycles = (np.array([measure(lengths) for lengths in chain], dtype=np.float64) for measure in (sum, len))
    means = sample_means(chain)
    return {
        "name": spec.name,
        "reference": spec.reference,
        "checkpoint": spec.checkpoint,
        "format": drafter.format,
        "block_size": drafter.block_size,
        "target_layer_ids": list(drafter.target_layer_ids),
        "mask_token_id": drafter.mask_token_id,
        **rule(0),
        "tau_micro": tau_micro(chain),
        "tau_micro_ci95": bootstrap_ratio_interval(
            tokens[cycles > 0], cycles[cycles > 0], config.bootstrap, config.seed, prompts[cycles > 0]
        ),
        "cycles": sum(map(len, chain)),
        "ddtree_width": {"k": config.width, **rule(1)},
        "ddtree_scores": tree_scores(drafter),
        "ddtree_budget": [{"budget": n, **rule(2 + i)} for i, n in enumerate(config.budgets)],
        "position_acceptance": position_acceptance([sample[0] for sample in walks], drafter.drafts),
        "cost": None
        if config.cost is None
        else cost_rows(
            chain,
            {n: [sample[2 + i].committed for sample in walks] for i, n in enumerate(config.budgets)},
            drafter.drafts,
            config.cost.draft_ms,
            config.cost.verify_ms,
        ),
        "expected_tau": None if expected is None else tau(expected),
        "expected_tau_ci95": (
            None if expected is None else bootstrap_interval(expected, config.bootstrap, config.seed, prompts)
        ),
        "categories": [
            {
                "category": name,
                "samples": len(inside),
                "tau": tau(means[inside]),
                "tau_ci95": bootstrap_interval(means[inside], config.bootstrap, config.seed, prompts[inside]),
                "tau_micro": tau_micro([chain[i] for i in inside]),
            }
            for name, inside in _categories(samples).items()
        ],
        "samples": [
            {
                "id": sample.id,
                "category": sample.category,
                "prompt_tokens": len(sample.prompt_ids),
                "acceptance_lengths": own[0].committed,
                "rejected_drafts": [None if lost is None else lost[0] for lost in own[0].rejected],
                "rejected_ranks": [None if lost is None else lost[1] for lost in own[0].rejected],
                "ddtree_width": own[1].committed,
                "ddtree_budget": {str(n): own[2 + i].committed for i, n in enumerate(config.budgets)},
            }
            for sample, own in zip(samples, walks, strict=True)
        ],
    }


def _categories(samples: Sequence[Sample]) -> dict[str | None, list[int]]:
    """The samples of each category, in order of appearance; none where no prompt has one."""
    found: dict[str | None, list[int]] = {}
    for index, sample in enumerate(samples):
        found.setdefault(sample.category, []).append(index)
    return {} if list(found) == [None] else found


def compare(judged: Sequence[dict[str, Any]], config: EvaluateConfig) -> list[dict[str, Any]]:
    """Each candidate against the reference, in every metric, paired by prompt."""
    reference = next((drafter for drafter in judged if drafter["reference"]), None)
    if reference is None:
        return []
    theirs = _lengths(reference)
    prompts = [prompt_id(sample["id"]) for sample in reference["samples"]]
    rows = []
    for candidate in judged:
        for metric, ours in _lengths(candidate).items() if candidate is not reference else ():
            means = sample_means(ours), sample_means(theirs[metric])
            differences = means[0] - means[1]
            value, aim = tau(means[0]), tau(means[1])
            counts = wins_ties_losses(differences, prompts)
            rows.append({
                "candidate": candidate["name"],
                "reference": reference["name"],
                "metric": metric,
                "candidate_value": value,
                "reference_value": aim,
                "difference": None if value is None or aim is None else value - aim,
                "difference_ci95": bootstrap_interval(differences, config.bootstrap, config.seed, prompts),
                "minimum_detectable_difference": minimum_detectable_difference(differences, prompts),
                "ratio": None if value is None or aim is None else value / aim,
                "ratio_ci95": bootstrap_ratio_interval(*means, config.bootstrap, config.seed, prompts),
                "prompts": dict(zip(("above", "level", "below"), counts, strict=True)),
            })  # fmt: skip
    return rows


def _lengths(drafter: dict[str, Any]) -> dict[str, list[list[int]]]:
    """metric → each sample's acceptance lengths."""
    samples = drafter["samples"]
    budgets = [str(entry["budget"]) for entry in drafter["ddtree_budget"]]
    return {
        "tau": [sample["acceptance_lengths"] for sample in samples],
        "ddtree_width": [sample["ddtree_width"] for sample in samples],
        **{f"ddtree_budget_{n}": [sample["ddtree_budget"][n] for sample in samples] for n in budgets},
    }
