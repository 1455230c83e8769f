"""A diagnosis on the terminal and as Markdown."""

from __future__ import annotations

from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from dflash_eval.report import markdown_table, number

SHOWN = 12  # rows on the terminal; the file has them all
SLOTS_SHOWN = (1, 2, 3, 4, 8, 12)


def print_diagnosis(result: dict[str, Any], console: Console) -> None:
    console.print(_headline(result), highlight=False, markup=False)
    rows = result["counterfactuals"]
    _print_table(console, HEADER, [_cells(row) for row in rows[:SHOWN]], [row["accused"] for row in rows])
    if len(rows) > SHOWN:
        console.print(f"and {len(rows) - SHOWN} more, all below these", highlight=False)
    for title, lines in _sections(result):
        console.print(Text(title, style="bold"))
        for line in lines:
            console.print(f"- {line}", highlight=False, markup=False)
    header, table = _slots(result)
    _print_table(console, header, table, [])


def _print_table(console: Console, header: list[str], rows: list[list[str]], bold: list[bool]) -> None:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
    table.add_column(header[0], overflow="fold")
    for title in header[1:]:
        table.add_column(title, justify="right", no_wrap=True)
    for i, row in enumerate(rows):
        table.add_row(*map(Text, row), style="bold" if i < len(bold) and bold[i] else "")
    console.print(table)


def markdown(result: dict[str, Any]) -> str:
    """The whole diagnosis as GitHub-flavoured Markdown."""
    parts = [f"# Diagnosis of {result['drafter']}", _headline(result)]
    for title, lines in _sections(result):
        parts += [f"## {title}", "\n".join(f"- {line}" for line in lines)]
    parts += ["## One change at a time", markdown_table(HEADER, [_cells(row) for row in result["counterfactuals"]])]
    parts.append(
        "Δ log-prob: nats a token by which the text is more probable, at the same anchors for all, with an interval "
        f"that holds for all {result['comparisons']} changes at once. †: τ and its difference on the first tokens of "
        "each stretch alone, as the text is far less probable. ‡: tells any drafter what it does not have when it "
        "drafts, and is ranked by what it gains beyond the worth of the last position's features. The rule: "
        f"{result['rule']}."
    )
    parts += ["## By slot", markdown_table(*_slots(result))]
    layers = [[str(x["layer"]), f"{x['of_weights']:.1%}", f"{x['of_features']:.1%}"] for x in result["fc"]]
    parts += ["## fc", markdown_table(["target layer", "of its squared norm", "of what it adds up"], layers)]
    return "\n\n".join(parts) + "\n"


HEADER = ["changed", "τ", "Δτ [95% CI]", "Δ log-prob"]


def _headline(result: dict[str, Any]) -> str:
    cache = result["cache"]
    return (
        f"{result['drafter']} as configured: τ {number(result['tau'])} on {cache['prompts']} prompts, up to "
        f"{cache['tokens']} tokens of each"
    )


def _sections(result: dict[str, Any]) -> list[tuple[str, list[str]]]:
    verdicts = result["verdicts"] or [
        "No single change raises τ beyond noise: what was tried is read as it was trained"
    ]
    sections = [("What is likely wrong", verdicts)]
    symptoms = result["symptoms"] or ["Nothing that stands out"]
    title = "What its numbers and weights say"
    if result["verdicts"] and result["symptoms"]:
        title += " (as configured: mend what is wrong first, then look again)"
    sections.append((title, symptoms))
    if result["untested"]:
        sections.append(("Not tested", [_untested(entry) for entry in result["untested"]]))
    return sections


def _untested(entry: dict[str, Any]) -> str:
    return f"{entry['change']}: {entry['why']}" + (f": {entry['command']}" if entry["command"] else "")


def _cells(row: dict[str, Any]) -> list[str]:
    mark = "†" if row["first_tokens"] else ""
    interval = row["tau_difference_ci95"]
    within = f" [{interval[0]:+.2f}, {interval[1]:+.2f}]" if interval else ""
    return [
        row["change"],
        f"{mark}{number(row['tau'])}",
        f"{row['tau_difference']:+.2f}{within}",
        f"{'' if row['evidence'] == row['logprob_difference'] else '‡'}{row['logprob_difference']:+.2f}",
    ]


def _slots(result: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Accuracy, confidence and entropy at some slots, the drafter's and the reference's."""
    numbers = result["numbers"]
    last = len(numbers["drafter"]["top1"])
    shown = [slot for slot in SLOTS_SHOWN if slot <= last]
    rows = []
    for name, own in ((result["drafter"], numbers["drafter"]), (result["reference"], numbers["reference"])):
        if own is None:
            continue
        for key, title in (("top1", "top 1"), ("top8", "top 8"), ("confidence", "confidence"), ("entropy", "entropy")):
            cells = [f"{own[key][slot - 1]:.2f}" if slot <= len(own[key]) else "" for slot in shown]
            rows.append([f"{name}: {title}", *cells])
        far = ", ".join(f"{number(x['top1'])} at {x['tokens']}" for x in own["by_distance"].values())
        rows.append([f"{name}: top 1 by tokens from the start: {far}", *[""] * len(shown)])
    return ["slot", *map(str, shown)], rows
