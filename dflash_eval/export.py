"""Results in other people's forms: cycles as CSV or Parquet, a comment in a pull request, plots, trackers."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from dflash_eval.cache import write_atomically
from dflash_eval.cost import cost_table
from dflash_eval.errors import UserError
from dflash_eval.report import SPEEDUP, budget_table, headline, main_table, markdown_table, notes
from dflash_eval.sweep import HEADER as SWEEP_HEADER
from dflash_eval.sweep import runs, sweep_rows

COLUMNS = ("drafter", "sample", "category", "cycle", "anchor", "length", "slot_ranks", "rejected_draft")


def export(results: dict[str, Any], kind: str, to: Path) -> None:
    """kind: a key of KINDS. Raises UserError for another one, a package that is missing, or a place to write to."""
    if kind not in KINDS:
        raise UserError(f"{kind}: not one of {', '.join(KINDS)}")
    try:
        to.parent.mkdir(parents=True, exist_ok=True)
        KINDS[kind](results, to)
    except OSError as error:
        raise UserError(f"{to}: cannot be written ({error.strerror or error})") from None


def cycles(results: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A row for each cycle of every chain, with COLUMNS.

    anchor: position in the sequence, counted from the prompt's first token; slot_ranks: how many tokens the drafter
    found more probable than the sequence's, slot by slot, to the one that it lost at.
    """
    for entry in results["drafters"]:
        for sample in entry["samples"]:
            anchor = sample["prompt_tokens"]
            lost = zip(sample["rejected_drafts"], sample["rejected_ranks"], strict=True)
            for place, (length, (draft, rank)) in enumerate(zip(sample["acceptance_lengths"], lost, strict=True)):
                ranks = [0] * length if draft is None else [0] * (length - 1) + [rank]
                values = (entry["name"], sample["id"], sample["category"], place, anchor, length, ranks, draft)
                yield dict(zip(COLUMNS, values, strict=True))
                anchor += length


def comment(results: dict[str, Any]) -> str:
    """The report for a pull request: what one looks at first, the rest folded away."""
    parts = [f"### dflash-eval: {results['name']}", headline(results), markdown_table(*main_table(results))]
    parts += ["\n".join(f"- {line}" for line in notes(results))] if notes(results) else []
    folded = [("DDTree: τ by budget (nodes under the root)", markdown_table(*budget_table(results)))]
    if steps := sweep_rows(results):
        folded.append(("τ by training step", markdown_table(SWEEP_HEADER, steps)))
    if costs := cost_table(results):
        folded.append((SPEEDUP, markdown_table(*costs)))
    parts += [f"<details><summary>{title}</summary>\n\n{table}\n\n</details>" for title, table in folded]
    return "\n\n".join(parts) + "\n"


def scalars(results: dict[str, Any]) -> Iterator[tuple[str, int, dict[str, float]]]:
    """(run, step, values) of every judged drafter; one that is no step of a run is a run of its own at step 0."""
    stepped = [(run, step, entry) for run, steps in runs(results).items() for step, entry in steps]
    inside = [entry for *_, entry in stepped]
    alone = [(entry["name"], 0, entry) for entry in results["drafters"] if all(entry is not own for own in inside)]
    for run, step, entry in (*alone, *stepped):
        values = {
            "tau": entry["tau"],
            "tau_micro": entry["tau_micro"],
            f"ddtree_{entry['ddtree_width']['k']}": entry["ddtree_width"]["tau"],
            **{f"ddtree_budget_{row['budget']}": row["tau"] for row in entry["ddtree_budget"]},
        }
        yield run, step, {name: value for name, value in values.items() if value is not None}


def _csv(results: dict[str, Any], to: Path) -> None:
    with open(to, "w", encoding="utf-8", newline="") as handle:
        writer = csv.DictWriter(handle, COLUMNS)
        writer.writeheader()
        for row in cycles(results):
            writer.writerow({**row, "slot_ranks": " ".join(map(str, row["slot_ranks"]))})


def _parquet(results: dict[str, Any], to: Path) -> None:
    arrow, parquet = _needed("pyarrow", "parquet"), _needed("pyarrow.parquet", "parquet")
    whole, text = arrow.int64(), arrow.string()
    kinds = (text, text, text, whole, whole, whole, arrow.list_(whole), whole)
    schema = arrow.schema(list(zip(COLUMNS, kinds, strict=True)))
    parquet.write_table(arrow.Table.from_pylist(list(cycles(results)), schema=schema), to)


def _comment(results: dict[str, Any], to: Path) -> None:
    write_atomically(to, comment(results))


def _plots(results: dict[str, Any], to: Path) -> None:
    from dflash_eval.figures import save_figures

    save_figures(results, to)


def _tensorboard(results: dict[str, Any], to: Path) -> None:
    _needed("tensorboard", "tensorboard")
    writers = _needed("torch.utils.tensorboard", "tensorboard")
    for run, step, values in scalars(results):
        with writers.SummaryWriter(str(to / run)) as writer:
            for name, value in values.items():
                writer.add_scalar(name, value, step)


def _wandb(results: dict[str, Any], to: Path) -> None:
    """A run of the project that `to` names for each run of drafters."""
    wandb = _needed("wandb", "wandb")
    found: dict[str, list[tuple[int, dict[str, float]]]] = {}
    for run, step, values in scalars(results):
        found.setdefault(run, []).append((step, values))
    for name, steps in found.items():
        run = wandb.init(project=to.name, name=f"{results['name']}/{name}", config=results["cache"]["settings"])
        for step, values in steps:
            run.log(values, step=step)
        run.finish()


def _needed(module: str, extra: str) -> Any:
    try:
        return import_module(module)
    except ImportError:
        raise UserError(
            f"{module.partition('.')[0]} is not installed: pip install 'dflash-eval[{extra}]', or make setup "
            f"EXTRAS=demo,dev,{extra}"
        ) from None


KINDS: dict[str, Callable[[dict[str, Any], Path], None]] = {
    "csv": _csv,
    "parquet": _parquet,
    "comment": _comment,
    "plots": _plots,
    "tensorboard": _tensorboard,
    "wandb": _wandb,
}
