"""The report's plots as inline SVG: drawn for a phone's width, coloured by the page's variables, values on hover."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

WIDTH, HEIGHT = 440, 270  # of a viewBox: at a phone's 360 pixels its 12 px letters are still read
LEFT, RIGHT, TOP, BOTTOM = 40, 18, 12, 40
COLOURS = 8
BARS = 4  # drafters whose histogram is drawn as bars; more are lines
LETTERS = 22  # of a name beside the axis

Point = tuple[float, float, str]  # x, y, what hovering tells


@dataclass(frozen=True)
class Line:
    """One drafter's points, in its colour (its place among the drafters); dashed or not."""

    colour: int
    points: Sequence[Point]
    dash: str = ""
    marked: bool = True


def tau_chart(drafters: Sequence[dict[str, Any]]) -> str:
    """τ with its interval, a row a drafter; the width's tree as a hollow mark."""
    values = [entry["tau"] or 0 for entry in drafters] + [entry["ddtree_width"]["tau"] or 0 for entry in drafters]
    ends = [entry["tau_ci95"][1] for entry in drafters if entry["tau_ci95"]]
    ends += [entry["ddtree_width"]["tau_ci95"][1] for entry in drafters if entry["ddtree_width"]["tau_ci95"]]
    ticks = linear_ticks(0, max(*values, *ends, 1))
    left, height = 150, TOP + 26 * len(drafters) + BOTTOM

    def x(value: float) -> float:
        return left + value / ticks[-1] * (WIDTH - left - RIGHT)

    parts = [
        f'<path class="g" d="M{x(t):.1f} {TOP}V{height - BOTTOM}"/>{_text(x(t), height - BOTTOM + 16, f"{t:g}")}'
        for t in ticks
    ]
    parts.append(_text((left + WIDTH - RIGHT) / 2, height - 6, "tokens a cycle"))
    for row, entry in enumerate(drafters):
        y, width = TOP + 26 * row + 13, entry["ddtree_width"]
        name = entry["name"] if len(entry["name"]) <= LETTERS else "…" + entry["name"][-LETTERS + 1 :]
        parts.append(f'<g class="c{row % COLOURS}">' + _text(left - 8, y + 4, name, "e" + " r" * entry["reference"]))
        for value, interval, kind, what in (
            (width["tau"], width["tau_ci95"], "h", f"DDTree-{width['k']}"),
            (entry["tau"], entry["tau_ci95"], "m", "τ"),
        ):
            if value is None:
                continue
            told = f"{entry['name']}: {what} {value:.2f}"
            if interval:
                told += f" [{interval[0]:.2f}, {interval[1]:.2f}]"
                parts.append(f'<path class="w" d="M{x(interval[0]):.1f} {y}H{x(interval[1]):.1f}"/>')
            parts.append(f'<circle class="{kind}" cx="{x(value):.1f}" cy="{y}" r="5"/>{_hover(x(value), y, told)}')
        parts.append("</g>")
    return _svg("τ and DDTree-width of each drafter with 95% intervals", "".join(parts), height)


def budget_chart(drafters: Sequence[dict[str, Any]]) -> str:
    """τ against the tree's budget on a log axis; chain and width as level lines, of the first drafter if many."""
    budgets = [entry["budget"] for entry in drafters[0]["ddtree_budget"]]
    lines = []
    for place, entry in enumerate(drafters):
        best = next((row["budget"] for row in entry.get("cost") or [] if row["best"]), None)
        points = [
            (float(row["budget"]), row["tau"], f"{entry['name']}: budget {row['budget']}, τ {row['tau']:.2f}")
            for row in entry["ddtree_budget"]
            if row["tau"] is not None
        ]
        lines.append(Line(place, points))
        lines += [Line(place, [point], "best") for point in points if point[0] == best]
        if entry["tau"] is not None and (len(drafters) <= 3 or place == 0):
            k, wide = entry["ddtree_width"]["k"], entry["ddtree_width"]["tau"]
            for value, dash, what in ((entry["tau"], "5 4", "chain"), (wide, "1.5 4", f"DDTree-{k}")):
                told = f"{entry['name']}: {what} {value:.2f}"
                lines.append(Line(place, [(n, value, told) for n in (budgets[0], budgets[-1])], dash, marked=False))
    every = budgets[:: max(1, math.ceil(len(budgets) / 9))]
    return plot(lines, [(float(n), str(n)) for n in every], "nodes under the root", "τ", log=True)


def slot_chart(drafters: Sequence[dict[str, Any]]) -> str:
    """Share of cycles that accept at least i drafts."""
    slots = max(len(entry["position_acceptance"]) for entry in drafters)
    lines = [
        Line(place, [
            (i, share, f"{entry['name']}: {share:.1%} of the cycles accept {i} drafts or more")
            for i, share in enumerate(entry["position_acceptance"], 1)
        ])
        for place, entry in enumerate(drafters)
    ]  # fmt: skip
    every = range(1, slots + 1, max(1, math.ceil(slots / 15)))
    return plot(lines, [(i, str(i)) for i in every], "slot", "share of cycles", top=1.0)


def length_chart(drafters: Sequence[dict[str, Any]]) -> str:
    """Histogram of the chain's acceptance lengths."""
    counts = [Counter(n for own in entry["samples"] for n in own["acceptance_lengths"]) for entry in drafters]
    longest = max((max(count) for count in counts if count), default=1)
    shares = [[count[n] / max(1, count.total()) for n in range(1, longest + 1)] for count in counts]
    lines = [
        Line(place, [
            (n, share, f"{entry['name']}: {share:.1%} of the cycles commit {n}") for n, share in enumerate(own, 1)
        ])
        for place, (entry, own) in enumerate(zip(drafters, shares, strict=True))
    ]  # fmt: skip
    every = range(1, longest + 1, max(1, math.ceil(longest / 16)))
    ticks = [(n, str(n)) for n in every]
    return plot(lines, ticks, "acceptance length", "share of cycles", bars=len(drafters) <= BARS)


def step_chart(runs: dict[str, list[tuple[int, dict[str, Any]]]], reference: dict[str, Any] | None) -> str:
    """τ against the training step with its intervals, a line a run; the reference as a level line."""
    lines = []
    for place, (run, steps) in enumerate(runs.items()):
        points = [(float(step), entry["tau"], f"{run}, step {step}: τ {entry['tau']:.2f}") for step, entry in steps]
        lines.append(Line(place, points))
        for step, entry in steps:
            low, high = entry["tau_ci95"] or (entry["tau"], entry["tau"])
            lines.append(Line(place, [(float(step), low, ""), (float(step), high, "")], "none", marked=False))
    every = sorted({step for steps in runs.values() for step, _ in steps})
    if reference is not None and reference["tau"] is not None:
        told = f"{reference['name']}: τ {reference['tau']:.2f}"
        lines.append(Line(len(runs), [(n, reference["tau"], told) for n in (every[0], every[-1])], "5 4", marked=False))
    ticks = linear_ticks(every[0], every[-1])
    return plot(lines, [(t, f"{t:g}") for t in ticks if every[0] <= t <= every[-1]], "step", "τ")


def plot(
    lines: Sequence[Line],
    x_ticks: Sequence[tuple[float, str]],
    x_label: str,
    y_label: str,
    *,
    log: bool = False,
    bars: bool = False,
    top: float | None = None,
) -> str:
    """Lines with their points, or bars side by side, over a grid whose y axis begins at 0."""
    points = [point for line in lines for point in line.points]
    if not points:
        return "<p>No cycle to draw.</p>"
    y_ticks = linear_ticks(0, top or max(point[1] for point in points) or 1)
    scale: Callable[[float], float] = math.log2 if log else float
    edges = [scale(x) for x in (*(tick for tick, _ in x_ticks), *(point[0] for point in points))]
    room = 0.5 if bars or min(edges) == max(edges) else 0  # a single place stands in the middle
    low, high = min(edges) - room, max(edges) + room
    span = (high - low) or 1

    def x(value: float) -> float:
        return LEFT + (scale(value) - low) / span * (WIDTH - LEFT - RIGHT)

    def y(value: float) -> float:
        return HEIGHT - BOTTOM - value / y_ticks[-1] * (HEIGHT - BOTTOM - TOP)

    parts = [f'<path class="g" d="M{LEFT} {y(t):.1f}H{WIDTH - RIGHT}"/>{_text(LEFT - 6, y(t) + 4, f"{t:g}", "e")}'
             for t in y_ticks]  # fmt: skip
    parts += [_text(x(tick), HEIGHT - BOTTOM + 16, name) for tick, name in x_ticks]
    parts.append(_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 6, x_label))
    if bars:
        each = 0.8 / len(lines) * (WIDTH - LEFT - RIGHT) / span
        for place, line in enumerate(lines):
            for value, share, told in line.points:
                left = x(value) + (place - len(lines) / 2) * each
                parts.append(
                    f'<rect class="c{line.colour % COLOURS} b" x="{left:.1f}" y="{y(share):.1f}" width="{each:.1f}" '
                    f'height="{y(0) - y(share):.1f}"><title>{escape(told)}</title></rect>'
                )
    for line in () if bars else lines:
        parts.append(_line(line, [(x(point[0]), y(point[1]), point[2]) for point in line.points]))
    return _svg(f"{y_label} against {x_label}", "".join(parts), HEIGHT)


def legend(drafters: Sequence[dict[str, Any]]) -> str:
    items = [
        f'<li><svg class="key" viewBox="0 0 28 10" aria-hidden="true">{_line(Line(i, []), [(2, 5, ""), (26, 5, "")])}'
        f"</svg>{escape(entry['name'])}</li>"
        for i, entry in enumerate(drafters)
    ]
    return f'<ul class="legend">{"".join(items)}</ul>'


def linear_ticks(low: float, high: float) -> list[float]:
    """Four to seven round numbers that cover `low` to `high`."""
    raw = (high - low) / 5
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= raw * 0.999)
    first = math.floor(low / step + 1e-9)
    return [round(i * step, 10) for i in range(first, math.ceil(high / step - 1e-9) + 1)]


def _line(line: Line, points: Sequence[Point]) -> str:
    colour = f"c{line.colour % COLOURS}"
    if line.dash == "best":
        (x, y, told), *_ = points
        return f'<circle class="{colour} best" cx="{x:.1f}" cy="{y:.1f}" r="8"/>{_hover(x, y, told + ", the fastest")}'
    # The ninth drafter has the first one's colour and other dashes.
    dash = line.dash or ("", "7 3", "2 3", "9 3 2 3")[line.colour // COLOURS % 4]
    dashes = f' stroke-dasharray="{dash}"' if dash else ""
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y, _ in points)
    drawn = f'<polyline class="{colour} l"{dashes} points="{path}"/>'
    if line.marked:
        drawn += "".join(
            f'<circle class="{colour} m" cx="{x:.1f}" cy="{y:.1f}" r="2.5"/>{_hover(x, y, told)}'
            for x, y, told in points
            if told
        )
    return drawn


def _hover(x: float, y: float, told: str) -> str:
    return f'<circle class="o" cx="{x:.1f}" cy="{y:.1f}" r="9"><title>{escape(told)}</title></circle>'


def _text(x: float, y: float, text: str, kind: str = "") -> str:
    named = f' class="{kind}"' if kind else ""
    return f'<text x="{x:.1f}" y="{y:.1f}"{named}>{escape(text)}</text>'


def _svg(label: str, inner: str, height: float) -> str:
    return f'<svg class="chart" viewBox="0 0 {WIDTH} {height:g}" role="img" aria-label="{escape(label)}">{inner}</svg>'
