"""The gate for CI: is a drafter below what was asked for, or worse than earlier results beyond doubt?"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dflash_eval.acceptance.statistics import Interval, bootstrap_ratio_interval, sample_means
from dflash_eval.errors import UserError
from dflash_eval.prompts import prompt_id

METRICS = "tau, tau_micro, expected_tau, ddtree_width or ddtree_budget_<nodes>"
FEWEST = 5  # prompts: of fewer, all may well be below by chance (1 in 16 for 4), and no interval helps
Limit = tuple[str, float]


def parse_limit(text: str) -> Limit:
    """`tau=3.0` → ("tau", 3.0)."""
    metric, _, value = text.partition("=")
    if not re.fullmatch(r"tau|tau_micro|expected_tau|ddtree_width|ddtree_budget_\d+", metric):
        raise UserError(f"--fail-below {text}: must be METRIC=NUMBER with METRIC {METRICS}")
    if not re.fullmatch(r"\d+(\.\d*)?|\.\d+", value):
        raise UserError(f"--fail-below {text}: {value!r} is no number, as in tau=3.0")
    return metric, float(value)


def parse_margin(text: str) -> float:
    """`2%` → 0.02; `0.02` is the same."""
    number = re.fullmatch(r"(\d+(?:\.\d*)?|\.\d+)(%?)", text)
    value = float(number[1]) / (100 if number[2] else 1) if number else 1.0
    if value >= 1:
        raise UserError(f"--margin {text}: must be a share below 1, as 2% or 0.02")
    return value


def judged(results: dict[str, Any]) -> list[dict[str, Any]]:
    """Who the gate is for: the candidates; the reference where it is alone."""
    return [entry for entry in results["drafters"] if not entry["reference"]] or results["drafters"]


def check_limits(limits: Sequence[Limit], budgets: Sequence[int]) -> None:
    """Raises UserError for a budget that the evaluation does not have."""
    for metric, _ in limits:
        if metric.startswith("ddtree_budget_") and int(metric.rpartition("_")[2]) not in budgets:
            raise UserError(f"--fail-below {metric}: evaluate.budgets has {', '.join(map(str, budgets))}")


def below(results: dict[str, Any], limits: Sequence[Limit]) -> list[str]:
    """A reason for each drafter and metric whose value is below its limit, or is not there."""
    reasons = []
    for entry in judged(results):
        for metric, limit in limits:
            value = value_of(entry, metric)
            if value is None:
                reasons.append(f"{entry['name']}: there is no {metric} to hold against {limit:g}")
            elif value < limit:
                reasons.append(f"{entry['name']}: {metric} {value:.3f} is below {limit:g}")
    return reasons


def value_of(entry: dict[str, Any], metric: str) -> float | None:
    if metric == "ddtree_width":
        return entry["ddtree_width"]["tau"]
    if metric.startswith("ddtree_budget_"):
        budget = int(metric.rpartition("_")[2])
        return next((row["tau"] for row in entry["ddtree_budget"] if row["budget"] == budget), None)
    return entry[metric]


def worse(results: dict[str, Any], earlier: dict[str, Any], margin: float, draws: int, seed: int) -> list[str]:
    """A reason for each drafter whose τ is below 1 − margin of its earlier one, by the whole interval of their ratio.

    Paired by prompt. Raises UserError where there is nothing to pair.
    """
    reasons = []
    for entry, before in pairs(results, earlier):
        ours, theirs, prompts = paired_means(entry, before)
        interval = bootstrap_ratio_interval(ours, theirs, draws, seed, prompts, small_sample=True)
        count = len(set(prompts))
        if interval is None or count < FEWEST:
            raise UserError(
                f"{entry['name']}: {count} prompts in common with the earlier results; below {FEWEST} chance alone "
                "would raise alarms"
            )
        if interval[1] < 1 - margin:
            reasons.append(
                f"{entry['name']}: τ {ours.mean():.3f} is {percent(ours.mean() / theirs.mean())} of the earlier "
                f"{theirs.mean():.3f} {percents(interval)} over {count} prompts, below the margin's "
                f"{percent(1 - margin)}"
            )
    return reasons


def pairs(results: dict[str, Any], earlier: dict[str, Any]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Each judged drafter with the earlier one of its name; or the only two that there are."""
    known = {entry["name"]: entry for entry in earlier["drafters"]}
    found = [(entry, known[entry["name"]]) for entry in judged(results) if entry["name"] in known]
    ours, theirs = judged(results), judged(earlier)
    if not found and len(ours) == len(theirs) == 1:
        found = [(ours[0], theirs[0])]
    if len(found) < len(ours):
        lost = next(entry["name"] for entry in ours if all(entry is not own for own, _ in found))
        raise UserError(f"{lost}: the earlier results have no drafter of that name, but {', '.join(known)}")
    return found


def paired_means(
    entry: dict[str, Any], other: dict[str, Any], key: str = "acceptance_lengths", budget: str | None = None
) -> tuple[NDArray[np.float64], NDArray[np.float64], list[str]]:
    """Mean acceptance lengths of the samples that both have, with a cycle in each, [samples], and their prompts."""

    def lengths(sample: dict[str, Any]) -> list[int]:
        return sample[key][budget] if budget is not None else sample[key]

    theirs = {sample["id"]: lengths(sample) for sample in other["samples"]}
    both = [
        (lengths(sample), theirs[sample["id"]], prompt_id(sample["id"]))
        for sample in entry["samples"]
        if sample["id"] in theirs and lengths(sample) and theirs[sample["id"]]
    ]
    return sample_means([own for own, *_ in both]), sample_means([their for _, their, _ in both]), [p for *_, p in both]


def percent(ratio: float) -> str:
    return f"{ratio:.1%}"


def percents(interval: Interval) -> str:
    return f"[{interval[0]:.1%}, {interval[1]:.1%}]"
