"""Results → results.json, report.md and the table on the terminal."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from dflash_eval.cache import write_atomically
from dflash_eval.cost import cost_lines, cost_table
from dflash_eval.prompts import prompt_id
from dflash_eval.sweep import HEADER as SWEEP_HEADER
from dflash_eval.sweep import sweep_lines, sweep_rows

REFERENCE = "reference"  # what stands in a table where a candidate's gap to it stands

SPEEDUP = "Speed-up over plain decoding by the cost model (* the fastest)"


def write_report(results: dict[str, Any], folder: Path) -> None:
    write_atomically(folder / "results.json", json.dumps(results, indent=2, ensure_ascii=False) + "\n")
    write_atomically(folder / "report.md", markdown(results))


def print_report(results: dict[str, Any], console: Console) -> None:
    """The summary, fit for 80 columns: long names fold, numbers never do."""
    console.print(headline(results), highlight=False, markup=False)
    print_table(console, *main_table(results))
    console.print("DDTree: τ by budget (nodes under the root)", highlight=False)
    print_table(console, *budget_table(results))
    if steps := sweep_rows(results):
        print_table(console, SWEEP_HEADER, steps)
    if costs := cost_table(results):
        console.print(SPEEDUP, highlight=False)
        print_table(console, *costs)
    if categories := category_table(results, intervals=False):
        console.print("τ by category", highlight=False)
        print_table(console, *categories)
    for line in notes(results):
        console.print(line, highlight=False, markup=False)


def print_table(console: Console, header: list[str], rows: list[list[str]]) -> None:
    """Fit for the console's width; a row with `REFERENCE` in it is bold."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=0)
    table.add_column(header[0], overflow="fold", min_width=9)
    for title in header[1:]:
        table.add_column(title, justify="right", no_wrap=len(title) < 18, overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row), style="bold" if REFERENCE in row else "")
    console.print(table)


def markdown(results: dict[str, Any]) -> str:
    """The report as GitHub-flavoured Markdown."""
    parts = [f"# {results['name']}", headline(results), markdown_table(*main_table(results))]
    parts += [f"- {line}" for line in notes(results)]
    if steps := sweep_rows(results):
        parts += ["## τ by training step", markdown_table(SWEEP_HEADER, steps)]
    if costs := cost_table(results):
        parts += [f"## {SPEEDUP}", markdown_table(*costs)]
    if categories := category_table(results, intervals=True):
        parts += ["## τ by category", markdown_table(*categories)]
    parts += ["## DDTree: τ by budget (nodes under the root)", markdown_table(*budget_table(results))]
    parts += [
        "## Position acceptance (share of cycles that accept at least i drafts)",
        markdown_table(*slot_table(results)),
    ]
    parts += ["## τ by prompt", markdown_table(*_prompt_table(results))]
    parts += ["## Provenance", "```json\n" + json.dumps(provenance(results), indent=2, ensure_ascii=False) + "\n```"]
    parts += [
        "τ is the mean over prompts of each prompt's mean acceptance length; τ micro is committed tokens / cycles over "
        "all prompts. Intervals are 95% bootstrap intervals over prompts, differences paired by prompt; the turns "
        "of a conversation, each a sample, are one prompt there."
    ]
    return "\n\n".join(parts) + "\n"


def notes(results: dict[str, Any]) -> list[str]:
    """What a reader of the tables must know beside them, a line each."""
    own = (gaps, sweep_lines, cost_lines, _expected, _trees, _served, _failed)
    return [line for lines in own for line in lines(results)]


def gaps(results: dict[str, Any]) -> list[str]:
    """One line a candidate: how far below or above the reference it is, in τ, and whether these prompts can tell."""
    lines = []
    for row in results["comparisons"]:
        if row["metric"] != "tau" or row["ratio"] is None:
            continue
        interval = row["difference_ci95"]
        words = gap(row["ratio"]).replace("level", "level with")
        within = f" [{interval[0]:+.2f}, {interval[1]:+.2f}]" if interval else ""
        counts, side = row["prompts"], "below" if row["ratio"] < 1 else "above"
        line = (
            f"{row['candidate']}: τ {row['candidate_value']:.2f}, {words} {row['reference']}'s "
            f"{row['reference_value']:.2f} (difference {row['difference']:+.2f}{within}); "
            f"{counts[side]} of {sum(counts.values())} prompts {side}"
        )
        if interval and interval[0] <= 0 <= interval[1]:
            enough = row["minimum_detectable_difference"]
            line += f". Too few to tell them apart: that takes a difference of {enough:.2f} or more prompts"
        lines.append(line)
    return lines


def gap(ratio: float) -> str:
    """A ratio in words: "4.1× below", "1.23× above", "level"."""
    if 0.995 <= ratio < 1.005:
        return "level"
    factor = max(ratio, 1 / ratio) if ratio > 0 else math.inf
    return f"{factor:.{2 if factor < 1.5 else 1}f}× {'below' if ratio < 1 else 'above'}"


def _expected(results: dict[str, Any]) -> list[str]:
    """A line on caches that were sampled, where the walks' exact matches say less than rejection sampling reaches."""
    taus = [
        f"{drafter['name']} {_with_interval(drafter['expected_tau'], drafter['expected_tau_ci95'])}"
        for drafter in results["drafters"]
        if drafter["expected_tau"] is not None
    ]
    if not taus:
        return []
    temperature = results["cache"]["settings"]["completions"]["temperature"]
    return [f"Expected τ under rejection sampling at temperature {temperature:g}: {', '.join(taus)}"]


def _served(results: dict[str, Any]) -> list[str]:
    """Of completions that a server gave: the τ that its own speculative decoding reached, and what to beware of."""
    completions = results["cache"].get("provenance", {}).get("completions")
    if not completions:
        return []
    lines = completion_warnings(completions)
    served = completions.get("served_tau")
    if served:
        both = f"{served['tau']:.2f}, " if served["tau"] is not None else ""
        lines.insert(
            0,
            f"Served τ {both}micro {served['tau_micro']:.2f}: what the engine reached on {served['completions']} "
            f"completions with the drafter that it runs ({served['from']}); the table says what a drafter allows",
        )
    return lines


def completion_warnings(provenance: dict[str, Any]) -> list[str]:
    """What makes fetched completions less than what the engine really read and wrote."""
    lines, total, differ = [], provenance["completions"], provenance["differ"]
    again = provenance["token_ids"].get("text", 0)
    if again:
        match = f"in {differ}, tokens and text do not match: a wrong token lowers τ there" if differ else "all match"
        lines.append(f"{again} of {total} completions came as text and were tokenised again; {match}")
    elif differ:
        lines.append(f"In {differ} of {total} completions the server's token ids and its text do not match")
    if provenance["prompts_differ"]:
        lines.append(
            f"The server read {provenance['prompts_differ']} of {total} prompts otherwise than the target's chat "
            "template writes them: look at its template, system prompt and thinking mode"
        )
    return lines


def _trees(results: dict[str, Any]) -> list[str]:
    """A line a drafter whose slots depend on each other: what its trees of a budget are built from."""
    told = {
        "selector": "its candidate selector's scores, each token's after the one before it",
        "logits without the Markov head": "its logits without the Markov head; τ and the width's tree take it in",
    }
    return [
        f"{drafter['name']}: DDTree by budget is built from {told[drafter['ddtree_scores']]}"
        for drafter in results["drafters"]
        if drafter.get("ddtree_scores") in told
    ]


def _failed(results: dict[str, Any]) -> list[str]:
    return [f"{drafter['name']} failed: {drafter['error']}" for drafter in results["failed"]]


def headline(results: dict[str, Any]) -> str:
    cache = results["cache"]
    agreement = cache["greedy_agreement"]
    samples, prompts = cache["samples"], len({prompt_id(sample["id"]) for sample in results["drafters"][0]["samples"]})
    counted = f"{prompts} prompts" + (f" ({samples} turns)" if samples != prompts else "")
    text = f"{cache['target']}: {counted}, {cache['completion_tokens']:,} completion tokens"
    empty = sum(not sample["acceptance_lengths"] for sample in results["drafters"][0]["samples"])
    if empty:
        text += f" ({empty} of the completions have 0 or 1 tokens and no cycle)"
    return text + (f", greedy agreement {agreement:.4f}" if agreement is not None else "")


def main_table(results: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    width = results["drafters"][0]["ddtree_width"]["k"]
    ratios = {row["candidate"]: row["ratio"] for row in results["comparisons"] if row["metric"] == "tau"}
    header = ["drafter", "τ [95% CI]", "τ micro", "cycles", f"DDTree-{width} [95% CI]", "gap"]
    rows = []
    for drafter in results["drafters"]:
        ratio = ratios.get(drafter["name"])
        rows.append([
            drafter["name"],
            _with_interval(drafter["tau"], drafter["tau_ci95"]),
            number(drafter["tau_micro"]),
            str(drafter["cycles"]),
            _with_interval(drafter["ddtree_width"]["tau"], drafter["ddtree_width"]["tau_ci95"]),
            REFERENCE if drafter["reference"] else gap(ratio) if ratio is not None else "",
        ])  # fmt: skip
    return header, rows


def budget_table(results: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    header = ["drafter", *(str(entry["budget"]) for entry in results["drafters"][0]["ddtree_budget"])]
    rows = [
        [drafter["name"], *(number(entry["tau"]) for entry in drafter["ddtree_budget"])]
        for drafter in results["drafters"]
    ]
    return header, rows


def category_table(results: dict[str, Any], *, intervals: bool) -> tuple[list[str], list[list[str]]] | None:
    drafters = results["drafters"]
    rows = []
    for own in zip(*(drafter.get("categories", []) for drafter in drafters), strict=True):
        name, samples = own[0]["category"] or "none", own[0]["samples"]
        taus = [_with_interval(entry["tau"], entry["tau_ci95"] if intervals else None) for entry in own]
        rows.append([name, str(samples), *taus])
    return (["category", "samples", *(drafter["name"] for drafter in drafters)], rows) if rows else None


def slot_table(results: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    slots = max(len(drafter["position_acceptance"]) for drafter in results["drafters"])
    rows = []
    for drafter in results["drafters"]:
        shares = [f"{share:.2f}" for share in drafter["position_acceptance"]]
        rows.append([drafter["name"], *shares, *[""] * (slots - len(shares))])
    return ["drafter", *(str(i + 1) for i in range(slots))], rows


def _prompt_table(results: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    drafters = results["drafters"]
    rows = []
    for samples in zip(*(drafter["samples"] for drafter in drafters), strict=True):
        lengths = [sample["acceptance_lengths"] for sample in samples]
        tokens = sum(lengths[0]) + 1 if lengths[0] else "0 or 1"
        rows.append([samples[0]["id"], str(tokens), *(number(sum(x) / len(x) if x else None) for x in lengths)])
    return ["prompt", "tokens", *(drafter["name"] for drafter in drafters)], rows


def provenance(results: dict[str, Any]) -> dict[str, Any]:
    drafters = [
        {
            key: drafter[key]
            for key in ("name", "checkpoint", "format", "block_size", "target_layer_ids", "mask_token_id")
        }
        for drafter in results["drafters"]
    ]
    return {"cache": results["cache"], "evaluation": results["provenance"], "drafters": drafters}


def markdown_table(header: list[str], rows: list[list[str]]) -> str:
    lines = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in (header, *rows)]
    lines.insert(1, "| --- |" + " ---: |" * (len(header) - 1))
    return "\n".join(lines)


def number(value: float | None) -> str:
    """As tables show it."""
    return "-" if value is None else f"{value:.2f}"


def _with_interval(value: float | None, interval: Any) -> str:
    return number(value) + ("" if interval is None else f" [{interval[0]:.2f}, {interval[1]:.2f}]")
