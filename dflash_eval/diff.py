"""What has changed from one results.json to another: every drafter that both have, and what else differs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from dflash_eval.acceptance.statistics import bootstrap_ratio_interval
from dflash_eval.gate import paired_means, percent, percents

DRAWS, SEED = 10_000, 0
HEADER = ["drafter", "metric", "A", "B", "B / A [95% CI]", "verdict"]


def diff_rows(a: dict[str, Any], b: dict[str, Any]) -> list[list[str]]:
    """HEADER's columns, of the prompts that both have; "above" and "below" where the interval leaves no doubt."""
    rows = []
    before = {entry["name"]: entry for entry in a["drafters"]}
    for entry in b["drafters"]:
        for metric, *where in _metrics(before[entry["name"]], entry) if entry["name"] in before else ():
            ours, theirs, prompts = paired_means(entry, before[entry["name"]], *where)
            if not len(ours):
                continue
            interval = bootstrap_ratio_interval(ours, theirs, DRAWS, SEED, prompts, small_sample=True)
            ratio = percent(ours.mean() / theirs.mean()) + (f" {percents(interval)}" if interval else "")
            rows.append(
                [entry["name"], metric, f"{theirs.mean():.3f}", f"{ours.mean():.3f}", ratio, _verdict(interval)]
            )
    return rows


def differences(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    """What else is not the same, a line each."""
    names = [{entry["name"] for entry in results["drafters"]} for results in (a, b)]
    left = {"A": names[0] - names[1], "B": names[1] - names[0]}
    lines = [f"only in {which}: {', '.join(sorted(some))}" for which, some in left.items() if some]
    flat = [dict(_flat(_told(results))) for results in (a, b)]
    for key in dict.fromkeys([*flat[0], *flat[1]]):
        one, other = flat[0].get(key), flat[1].get(key)
        if one != other:
            lines.append(f"{key}: {one} → {other}")
    return lines


def _told(results: dict[str, Any]) -> dict[str, Any]:
    cache, made = results["cache"], results["provenance"]
    drafters = {entry["name"]: {"checkpoint": entry["checkpoint"]} for entry in results["drafters"]}
    return {
        "cache": {key: cache[key] for key in ("fingerprint", "target", "samples", "completion_tokens")},
        "drafters": drafters,
        "provenance": {key: value for key, value in made.items() if key != "time"},
    }


def _flat(tree: dict[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{before}{key}.")
        else:
            yield f"{before}{key}", value


def _metrics(a: dict[str, Any], b: dict[str, Any]) -> list[tuple[str, ...]]:
    """(its name, where `paired_means` finds it) of what both have been judged by."""
    metrics: list[tuple[str, ...]] = [("τ", "acceptance_lengths")]
    if a["ddtree_width"]["k"] == b["ddtree_width"]["k"]:
        metrics.append((f"DDTree-{a['ddtree_width']['k']}", "ddtree_width"))
    both = {row["budget"] for row in a["ddtree_budget"]} & {row["budget"] for row in b["ddtree_budget"]}
    return metrics + [(f"DDTree, {n} nodes", "ddtree_budget", str(n)) for n in sorted(both)]


def _verdict(interval: tuple[float, float] | None) -> str:
    if interval is None or interval[0] <= 1 <= interval[1]:
        return "no telling" if interval is None or interval[0] < interval[1] else "the same"
    return "above" if interval[0] > 1 else "below"
