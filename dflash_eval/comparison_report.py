"""A comparison of two caches → the verdict in words, tables, compare.json, compare.md and the plot."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from dflash_eval.cache import write_atomically
from dflash_eval.report import markdown_table, print_table

EXPLAINS = 0.05  # a change of τ below this share of it explains none of the gaps that people look for
GROWS = 2.0
ABOUT = (
    "cosine: mean, 1st percentile and minimum over tokens, the last with its sample and position; rel. error: norm of "
    "B − A over norm of A; largest: element of B − A; end/start: mean 1 − cosine in the last quarter of the positions "
    "over that in the first."
)
LEVEL = 1e-12  # 1 - cosine below which states are the same but for the last bits of float64


def verdict(result: dict[str, Any]) -> str:
    """The answer in a sentence or two."""
    if all(layer["largest_difference"] == 0 for layer in result["layers"]):
        states = "hidden states are equal bit for bit"
    else:
        mean = sum(layer["away"] for layer in result["layers"]) / len(result["layers"])
        worst = max(result["layers"], key=lambda layer: float(layer["away"]))
        states = f"hidden states agree to cosine {cosine(mean)}"
        if len(result["layers"]) > 1:
            states += f" (layer {worst['layer']}, the farthest, to {cosine(worst['away'])})"
    parts = [states]
    subject = _subject(result["differs"])
    for drafter in result["drafters"]:
        parts.append(_drafter_verdict(drafter, subject))
    return "; ".join(parts)


def _subject(differs: dict[str, Any]) -> str:
    """What the caches were made with otherwise."""
    named = [name for name in differs if name not in ("software", "device", "batches")] or list(differs)
    if not named:
        return "what was done otherwise"
    return "the " + (" and ".join((", ".join(named[:-1]), named[-1])) if len(named) > 1 else named[0])


def _drafter_verdict(drafter: dict[str, Any], subject: str) -> str:
    one, two = drafter["tau"]
    if one is None or two is None:
        return f"{drafter['name']}: no cycle to judge"
    said = f"{drafter['name']}: τ {one:.2f} and {two:.2f}"
    low, high = drafter["difference_ci95"] or (drafter["difference"], drafter["difference"])
    largest = max(abs(low), abs(high)) / one
    if drafter["difference_ci95"] is not None and largest >= EXPLAINS and low <= 0 <= high:
        return f"{said}, a difference of {low:+.2f} to {high:+.2f}: more prompts are needed to tell"
    if largest < EXPLAINS:
        return f"{said}, {subject} cannot explain a gap"
    return f"{said}, {subject} changes it by {drafter['difference'] / one:+.0%} [{low / one:+.0%}, {high / one:+.0%}]"


def cosine(away: float) -> str:
    """1 - away with as many nines as there are, and two digits more."""
    if away < LEVEL:
        return "1"
    return f"{1 - away:.{max(4, 1 - math.floor(math.log10(away)))}f}"


def headline(result: dict[str, Any]) -> list[str]:
    lines = [f"A {result['a']['folder']}", f"B {result['b']['folder']}"]
    lines += [f"  {name}: {_shown(pair, 0)} | {_shown(pair, 1)}" for name, pair in result["differs"].items()]
    lines.append(f"{result['samples']} samples, {result['tokens']:,} tokens" + (
        ", each sample as far as its tokens agree" if result["common_prefix"] else ""
    ))  # fmt: skip
    for side in ("a", "b"):
        for kind, names in result["left_out"][side].items():
            if names:
                shown = ", ".join(map(str, names[:5])) + (", ..." if len(names) > 5 else "")
                lines.append(f"only in {side.upper()}: {kind} {shown} ({len(names)})")
    return lines


def _shown(pair: list[Any], side: int) -> str:
    """One side of what differs; of dictionaries the keys that do."""
    value, other = pair[side], pair[1 - side]
    if not isinstance(value, dict):
        return str(value)
    other = other if isinstance(other, dict) else {}
    return ", ".join(f"{key} {value[key]}" for key in value if value[key] != other.get(key)) or "-"


def layer_table(result: dict[str, Any], where: bool) -> tuple[list[str], list[list[str]]]:
    """where: also the sample and position of the lowest cosine."""
    header = ["layer", "cosine", "1st percentile", "minimum", "rel. error", "largest", "end/start"]
    rows = [
        [
            str(layer["layer"]),
            cosine(layer["away"]),
            cosine(1 - layer["cosine_p1"]),
            cosine(1 - layer["cosine_min"]),
            "-" if layer["relative_error"] is None else f"{layer['relative_error']:.1e}",
            f"{layer['largest_difference']:.2g}",
            "-" if layer["growth"] is None else f"{layer['growth']:.1f}x",
        ]
        for layer in result["layers"]
    ]
    if where:
        header.insert(4, "at")
        for row, layer in zip(rows, result["layers"], strict=True):
            row.insert(4, f"{layer['cosine_min_at']['sample']}:{layer['cosine_min_at']['position']}")
    return header, rows


def drafter_table(result: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    rows = []
    for drafter in result["drafters"]:
        interval = drafter["difference_ci95"]
        within = f" [{interval[0]:+.3f}, {interval[1]:+.3f}]" if interval else ""
        differ = drafter["cycles_that_differ"]
        rows.append([
            drafter["name"],
            *("-" if tau is None else f"{tau:.3f}" for tau in drafter["tau"]),
            "-" if drafter["difference"] is None else f"{drafter['difference']:+.3f}{within}",
            "-" if differ is None else f"{differ} of {drafter['cycles'][0]}",
        ])  # fmt: skip
    return ["drafter", "τ of A", "τ of B", "difference [95% CI]", "cycles that differ"], rows


def notes(result: dict[str, Any]) -> list[str]:
    """Position, argmax and greedy agreement, a line each."""
    growing = [layer for layer in result["layers"] if layer["growth"] is not None and layer["growth"] > GROWS]
    known = [layer for layer in result["layers"] if layer["growth"] is not None]
    lines = []
    if growing:
        most = max(growing, key=lambda layer: float(layer["growth"]))
        which = ", ".join(str(layer["layer"]) for layer in growing)
        lines.append(
            f"1 - cosine grows along the sequence in layers {which}: up to {most['growth']:.1f}x from the first "
            "quarter of the positions to the last"
        )
    elif known:
        lines.append("1 - cosine does not grow along the sequence")
    if result["argmax_agreement"] is not None:
        lines.append(f"most probable token: the same for {result['argmax_agreement']:.3%} of the completion tokens")
    greedy = result["greedy_agreement"]
    if None not in greedy:
        lines.append(f"greedy agreement with the text: {greedy[0]:.3%} in A, {greedy[1]:.3%} in B")
    return lines


def print_comparison(result: dict[str, Any], console: Console) -> None:
    def show(lines: list[str]) -> None:
        for line in lines:
            console.print(line, highlight=False, markup=False)

    show(headline(result))
    print_table(console, *layer_table(result, where=False))
    show(notes(result))
    if result["drafters"]:
        print_table(console, *drafter_table(result))
    show([result["verdict"]])


def write_comparison(result: dict[str, Any], folder: Path) -> None:
    """compare.json, compare.md and compare.png in `folder`, which must exist."""
    write_atomically(folder / "compare.json", json.dumps(result, indent=2, ensure_ascii=False) + "\n")
    parts = [f"# {Path(result['a']['folder']).name} against {Path(result['b']['folder']).name}", result["verdict"]]
    parts += ["\n".join(f"- {line.strip()}" for line in (*headline(result), *notes(result)))]
    parts += ["## Layers", markdown_table(*layer_table(result, where=True)), ABOUT]
    if result["drafters"]:
        parts += ["## Drafters", markdown_table(*drafter_table(result))]
    parts += ["## 1 − cosine by layer and position", "![heat map](compare.png)"]
    write_atomically(folder / "compare.md", "\n\n".join(parts) + "\n")
    _plot(result, folder / "compare.png")


def _plot(result: dict[str, Any], path: Path) -> None:
    """Layer × position, 1 − cosine on a logarithmic scale."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.colors import LogNorm

    layers = result["layers"]
    away = np.array([[np.nan if x is None else x for x in layer["away_by_position"]] for layer in layers])
    positive = away[np.isfinite(away) & (away > 0)]
    low, high = (positive.min(), positive.max()) if len(positive) else (1e-12, 1e-11)
    figure, axes = pyplot.subplots(figsize=(9, 1.4 + 0.35 * len(layers)), layout="constrained")
    drawn = axes.pcolormesh(
        result["positions"], np.arange(len(layers) + 1), np.maximum(away, low),
        norm=LogNorm(low, max(high, low * 1.01)), cmap="viridis",
    )  # fmt: skip
    axes.set_yticks(np.arange(len(layers)) + 0.5, [str(layer["layer"]) for layer in layers])
    axes.set(xlabel="position", ylabel="layer")
    figure.colorbar(drawn, label="1 − cosine")
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
