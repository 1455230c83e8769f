"""What acceptance is worth: tokens a second, from what a draft and a verification cost.

A cycle drafts one block and has the target read the root and what was drafted: block_size - 1 drafts of the chain, or a
budget's nodes. Tokens/s = committed tokens / (cycles x (draft + verification)); plain decoding reads one at a time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from dflash_eval.acceptance.statistics import tau_micro


def cost_rows(
    chain: Sequence[Sequence[int]],
    budgets: Mapping[int, Sequence[Sequence[int]]],
    drafts: int,
    draft_ms: float,
    verify_ms: Mapping[int, float],
) -> list[dict[str, Any]]:
    """The chain's row (budget None) and one a budget: tokens_per_s, speedup over plain decoding, best.

    chain and each of `budgets`: acceptance lengths by prompt; drafts: of a chain's block; verify_ms: milliseconds by
    tokens that the target reads at once. What lies beyond the most tokens told is not guessed: None.
    """
    rows: list[dict[str, Any]] = []
    for budget, lengths in ((None, chain), *budgets.items()):
        tokens = tau_micro(lengths)
        verification = verification_ms(verify_ms, 1 + (drafts if budget is None else budget))
        known = tokens is not None and verification is not None
        rate = 1000 * tokens / (draft_ms + verification) if known else None  # type: ignore[operator]
        rows.append({
            "budget": budget,
            "tokens_per_s": rate,
            "speedup": None if rate is None else rate * verify_ms[1] / 1000,
            "best": False,
        })  # fmt: skip
    if any(row["tokens_per_s"] is not None for row in rows):
        max(rows, key=lambda row: row["tokens_per_s"] or 0)["best"] = True
    return rows


def verification_ms(verify_ms: Mapping[int, float], tokens: int) -> float | None:
    """What reading `tokens` takes: as told, or on the line between the two neighbours; None beyond the last."""
    points = sorted(verify_ms.items())
    if tokens > points[-1][0]:
        return None
    for (few, low), (many, high) in pairwise(points):
        if few <= tokens <= many:
            return low + (high - low) * (tokens - few) / (many - few)
    return points[0][1]


def cost_table(results: dict[str, Any]) -> tuple[list[str], list[list[str]]] | None:
    """Tokens/s and speed-up by rule, a drafter a row; the fastest marked with *."""
    drafters = [entry for entry in results["drafters"] if entry.get("cost")]
    if not drafters:
        return None
    header = ["drafter", *("chain" if row["budget"] is None else str(row["budget"]) for row in drafters[0]["cost"])]
    return header, [[entry["name"], *map(_cell, entry["cost"])] for entry in drafters]


def cost_lines(results: dict[str, Any]) -> list[str]:
    """One a drafter: its fastest rule, beside the chain."""
    lines = []
    for entry in results["drafters"]:
        best = next((row for row in entry.get("cost") or [] if row["best"]), None)
        if best is None:
            continue
        rule = "the chain" if best["budget"] is None else f"DDTree with {best['budget']} nodes"
        line = (
            f"{entry['name']}: fastest by the cost model is {rule}, {best['tokens_per_s']:,.0f} tokens/s, "
            f"{best['speedup']:.2f}× plain decoding"
        )
        chain = entry["cost"][0]
        if best is not chain and chain["speedup"] is not None:
            line += f" (the chain {chain['speedup']:.2f}×)"
        lines.append(line)
    return lines


def _cell(row: dict[str, Any]) -> str:
    return "-" if row["speedup"] is None else f"{row['speedup']:.2f}{'*' if row['best'] else ''}"
