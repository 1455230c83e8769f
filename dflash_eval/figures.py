"""The report's four plots for papers: PNG and SVG by matplotlib."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

FORMATS = ("png", "svg")


def save_figures(results: dict[str, Any], folder: Path) -> None:
    """tau, budget, slots and lengths, each as PNG (200 dpi) and SVG."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, draw in DRAWN.items():
        figure = Figure(figsize=(5, 3.2), layout="constrained")
        axes = figure.add_subplot()
        draw(axes, results["drafters"])
        axes.grid(alpha=0.3)
        for kind in FORMATS:
            figure.savefig(folder / f"{name}.{kind}", dpi=200)


def _tau(axes: Any, drafters: list[dict[str, Any]]) -> None:
    for place, entry in enumerate(drafters):
        wide = entry["ddtree_width"]
        for value, interval, face in ((entry["tau"], entry["tau_ci95"], None), (wide["tau"], wide["tau_ci95"], "none")):
            if value is not None:
                low, high = interval or (value, value)
                reach = [[value - low], [high - value]]
                axes.errorbar(value, place, xerr=reach, fmt="o", color=f"C{place % 10}", mfc=face, capsize=3)
    axes.set_yticks(range(len(drafters)), [entry["name"] for entry in drafters])
    axes.invert_yaxis()
    axes.set_xlim(left=0)
    axes.set_xlabel(f"tokens a cycle (filled: chain, hollow: DDTree-{drafters[0]['ddtree_width']['k']})")


def _budget(axes: Any, drafters: list[dict[str, Any]]) -> None:
    for place, entry in enumerate(drafters):
        points = [(row["budget"], row["tau"]) for row in entry["ddtree_budget"] if row["tau"] is not None]
        colour = f"C{place % 10}"
        axes.plot([n for n, _ in points], [tau for _, tau in points], "o-", ms=3, color=colour, label=entry["name"])
        if entry["tau"] is not None:
            axes.axhline(entry["tau"], ls="--", lw=1, color=colour)
            axes.axhline(entry["ddtree_width"]["tau"], ls=":", lw=1, color=colour)
    axes.set_xscale("log", base=2)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("nodes under the root (dashed: chain, dotted: width)")
    axes.set_ylabel("τ")
    axes.legend(fontsize="small")


def _slots(axes: Any, drafters: list[dict[str, Any]]) -> None:
    for place, entry in enumerate(drafters):
        shares = entry["position_acceptance"]
        axes.plot(range(1, len(shares) + 1), shares, "o-", ms=3, color=f"C{place % 10}", label=entry["name"])
    axes.set_ylim(0, 1)
    axes.set_xlabel("slot")
    axes.set_ylabel("share of cycles that accept it")
    axes.legend(fontsize="small")


def _lengths(axes: Any, drafters: list[dict[str, Any]]) -> None:
    each = 0.8 / len(drafters)
    for place, entry in enumerate(drafters):
        count = Counter(n for sample in entry["samples"] for n in sample["acceptance_lengths"])
        total = max(1, sum(count.values()))
        lengths = sorted(count)
        left = [n + (place - (len(drafters) - 1) / 2) * each for n in lengths]
        axes.bar(left, [count[n] / total for n in lengths], each, color=f"C{place % 10}", label=entry["name"])
    axes.set_xlabel("acceptance length")
    axes.set_ylabel("share of cycles")
    axes.legend(fontsize="small")


DRAWN: dict[str, Callable[[Any, list[dict[str, Any]]], None]] = {
    "tau": _tau,
    "budget": _budget,
    "slots": _slots,
    "lengths": _lengths,
}
