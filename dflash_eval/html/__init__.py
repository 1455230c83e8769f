"""Results → report.html: one file that needs no network, to be read on any screen, light or dark."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from html import escape
from importlib.resources import files
from typing import Any

from dflash_eval.cache import Sample
from dflash_eval.cost import cost_table
from dflash_eval.html.charts import budget_chart, legend, length_chart, slot_chart, step_chart, tau_chart
from dflash_eval.html.cycles import Pieces, chosen_prompts, coloured, tint_legend
from dflash_eval.report import REFERENCE, SPEEDUP, budget_table, category_table, headline, main_table, notes, provenance
from dflash_eval.sweep import HEADER as SWEEP_HEADER
from dflash_eval.sweep import runs, sweep_rows

CYCLES_SHOWN = 60_000  # coloured runs of text: some 5 MB, which a browser opens at once
SMALL = 2**17  # characters of provenance that are shown


def html_report(results: dict[str, Any], texts: Sequence[Sample], pieces: Pieces) -> str:
    """texts: the cache's samples, as the results have them; pieces: what shows their tokens."""
    drafters = results["drafters"]
    chosen = chosen_prompts(drafters, CYCLES_SHOWN)
    sections = [
        ("Summary", _table(*main_table(results), "τ of each drafter") + _list(notes(results))),
        *([(SPEEDUP, _table(*costs, SPEEDUP))] if (costs := cost_table(results)) else []),
        *_sweep(results),
        ("Plots", _charts(results)),
        ("DDTree: τ by budget", _table(*budget_table(results), "τ by tree budget")),
    ]
    if categories := category_table(results, intervals=True):
        sections.append(("By category", _table(*categories, "τ by category", sortable=True)))
    sections.append(("By prompt", _prompts(drafters, set(chosen))))
    sections.append(("Where the drafter loses it", _texts(drafters, texts, chosen, pieces)))
    sections.append(("Provenance", _provenance(results)))
    body = "".join(f"<section><h2>{escape(title)}</h2>{inner}</section>" for title, inner in sections)
    own = files(__package__)
    style, script = (own.joinpath(name).read_text(encoding="utf-8") for name in ("report.css", "report.js"))
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(results['name'])}: dflash-eval</title><style>{style}</style></head>"
        f"<body><main><h1>{escape(results['name'])}</h1><p>{escape(headline(results))}</p>{body}"
        "<p class=small>τ is the mean over prompts of each prompt's mean acceptance length, τ micro committed tokens / "
        "cycles over all prompts. Intervals are 95% bootstrap intervals over prompts, differences paired by prompt.</p>"
        f'</main><div id="tip" role="status" hidden></div><script>{script}</script></body></html>\n'
    )


def _sweep(results: dict[str, Any]) -> list[tuple[str, str]]:
    found = runs(results)
    if not found:
        return []
    reference = next((entry for entry in results["drafters"] if entry["reference"]), None)
    table = _table(SWEEP_HEADER, sweep_rows(results), "τ by training step", sortable=True)
    names = [{"name": run} for run in found] + ([reference] if reference else [])
    plot = f"<figure>{step_chart(found, reference)}</figure>"
    return [("τ by training step", legend(names) + plot + table)]


def _charts(results: dict[str, Any]) -> str:
    drafters = results["drafters"]
    plots = {
        "τ with 95% intervals (hollow: DDTree of the width)": tau_chart(drafters),
        "DDTree: τ by budget (dashed: chain, dotted: width)": budget_chart(drafters),
        "Position acceptance: cycles that accept at least i drafts": slot_chart(drafters),
        "Acceptance lengths of the chain": length_chart(drafters),
    }
    figures = "".join(
        f"<figure><figcaption>{escape(caption)}</figcaption>{plot}</figure>" for caption, plot in plots.items()
    )
    return f'{legend(drafters)}<div class="plots">{figures}</div>'


def _prompts(drafters: Sequence[dict[str, Any]], shown: set[int]) -> str:
    """A row a prompt: its tokens and every drafter's mean; the lowest mean of a row is marked."""
    categories = any(sample.get("category") for sample in drafters[0]["samples"])
    header = ["prompt", *(["category"] if categories else []), "tokens", *(entry["name"] for entry in drafters)]
    rows = []
    for index, samples in enumerate(zip(*(entry["samples"] for entry in drafters), strict=True)):
        name = escape(samples[0]["id"])
        first = f'<a href="#text-{index}">{name}</a>' if index in shown else name
        cells = [f'<th scope="row">{first}</th>']
        if categories:
            cells.append(f"<td>{escape(samples[0].get('category') or '')}</td>")
        lengths = [sample["acceptance_lengths"] for sample in samples]
        cells.append(f"<td>{sum(lengths[0]) + 1 if lengths[0] else '≤ 1'}</td>")
        cells += [f"<td>{sum(own) / len(own):.2f}</td>" if own else "<td>-</td>" for own in lengths]
        rows.append("<tr>" + "".join(cells) + "</tr>")
    return _frame("τ by prompt", _head(header) + f"<tbody>{''.join(rows)}</tbody>", sortable=True)


def _texts(drafters: Sequence[dict[str, Any]], texts: Sequence[Sample], chosen: Sequence[int], pieces: Pieces) -> str:
    known: dict[int, str] = {}

    def draft_text(token: int) -> str:
        if token not in known:
            known[token] = pieces([token])[0]
        return known[token]

    parts = [
        "<p>Each run of one tint is what a cycle commits; the stronger, the longer. Its last token, underlined, is the "
        "target's own: point at it to see what the drafter said instead.</p>",
        tint_legend(),
    ]
    if len(chosen) < len(texts):
        parts.append(f"<p>{len(chosen)} of the {len(texts)} prompts: those where most is lost.</p>")
    for index in chosen:
        said = pieces(texts[index].completion_ids)
        means = []
        for entry in drafters:
            lengths = entry["samples"][index]["acceptance_lengths"]
            means.append(f"{escape(entry['name'])} {sum(lengths) / len(lengths):.2f}" if lengths else "no cycle")
        short = f"{', '.join(means[:4])}{', …' if len(means) > 4 else ''}"
        inner = [f'<p class="asked" id="text-{index}">{escape(texts[index].prompt)}</p>']
        for entry, mean in zip(drafters, means, strict=True):
            sample = entry["samples"][index]
            cycles = f"{len(sample['acceptance_lengths'])} cycles"
            inner.append(f"<h3>{mean} <small>({cycles})</small></h3>")
            inner.append(f'<p class="t">{coloured(said, sample, draft_text)}</p>')
        name = f"{escape(texts[index].id)} <small>{short}</small>"
        parts.append(f"<details><summary>{name}</summary>{''.join(inner)}</details>")
    return "".join(parts)


def _provenance(results: dict[str, Any]) -> str:
    cache, made = results["cache"], results["provenance"]
    by = cache.get("provenance", {})
    software = {**by.get("software", {})}
    rows: Mapping[str, Any] = {
        "target": cache["target"],
        "cache": cache["fingerprint"],
        "extracted with": _said(software),
        "kernels": _said(by.get("kernels")),
        "evaluated on": f"{made['device']}, {made['dtype']}",
        "evaluated with": _said(made.get("software")),
        "commit": made.get("commit"),
        "when": made.get("time"),
    }
    told = "".join(f"<dt>{key}</dt><dd>{escape(str(value))}</dd>" for key, value in rows.items() if value)
    everything = json.dumps({**provenance(results), "config": results.get("config")}, indent=2, ensure_ascii=False)
    return (
        f"<dl>{told}</dl><details><summary>All of it, with the config</summary>"
        f'<pre tabindex="0">{escape(everything[:SMALL])}</pre></details>'
    )


def _said(values: Any) -> str:
    return ", ".join(f"{key} {value}" for key, value in values.items()) if isinstance(values, dict) else ""


def _table(header: Sequence[str], rows: Sequence[Sequence[str]], label: str, *, sortable: bool = False) -> str:
    body = []
    for row in rows:
        first, *others = map(escape, row)
        marked = ' class="reference"' if REFERENCE in row[1:] else ""
        body.append(f'<tr{marked}><th scope="row">{first}</th>{"".join(f"<td>{cell}</td>" for cell in others)}</tr>')
    return _frame(label, f"{_head(header)}<tbody>{''.join(body)}</tbody>", sortable=sortable)


def _head(header: Sequence[str]) -> str:
    return "<thead><tr>" + "".join(f'<th scope="col">{escape(title)}</th>' for title in header) + "</tr></thead>"


def _frame(label: str, table: str, *, sortable: bool = False) -> str:
    """A table that scrolls by itself where the screen is narrow, with the keyboard too."""
    kind = ' class="sortable"' if sortable else ""
    return (
        f'<div class="wide" role="region" tabindex="0" aria-label="{escape(label)}"><table{kind}>{table}</table></div>'
    )


def _list(lines: Sequence[str]) -> str:
    return f"<ul>{''.join(f'<li>{escape(line)}</li>' for line in lines)}</ul>" if lines else ""
