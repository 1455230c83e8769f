"""A training run's checkpoints side by side: τ by step, the best one, and whether it is more than noise that it leads.

A drafter `mine-12000` is step 12000 of the run `mine`; two steps or more make a sweep.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dflash_eval.acceptance.statistics import bootstrap_interval
from dflash_eval.config import Config
from dflash_eval.errors import UserError
from dflash_eval.gate import paired_means

Step = tuple[int, dict[str, Any]]  # and the drafter's entry in the results
HEADER = ["run", "step", "τ [95% CI]", "against the best before [95% CI]", "verdict"]


def merged(configs: Sequence[Config], paths: Sequence[Path]) -> Config:
    """The first config with the drafters of all; one that stands in several is taken once. Raises UserError unless they
    share a cache and every name is one drafter's."""
    first, drafters = configs[0], list(configs[0].drafters)
    for config, path in zip(configs[1:], paths[1:], strict=True):
        if (config.cache_dir, config.cache_settings()) != (first.cache_dir, first.cache_settings()):
            raise UserError(f"{path}: not the same cache, target, prompts and completions as in {paths[0]}")
        drafters += [spec for spec in config.drafters if spec not in drafters]
    names = [spec.name for spec in drafters]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise UserError(f"{paths[-1]}: {twice!r} is the name of two different drafters in these configs")
    if sum(spec.reference for spec in drafters) > 1:
        raise UserError(f"{paths[-1]}: a second reference; one drafter of all these configs can be it")
    return first.model_copy(update={"drafters": tuple(drafters)})


def runs(results: dict[str, Any]) -> dict[str, list[Step]]:
    """Each run's judged steps in their order; runs of one step are none."""
    found: dict[str, list[Step]] = {}
    for entry in results["drafters"]:
        name = re.fullmatch(r"(.*?)[-_.]?(\d+)", entry["name"])
        if name and not entry["reference"] and entry["tau"] is not None:
            found.setdefault(name[1], []).append((int(name[2]), entry))
    return {run: sorted(steps, key=lambda step: step[0]) for run, steps in found.items() if len(steps) > 1}


def sweep_rows(results: dict[str, Any]) -> list[list[str]]:
    """HEADER's columns, a row a step."""
    rows = []
    for run, steps in runs(results).items():
        best: dict[str, Any] | None = None
        for step, entry in steps:
            low, high = entry["tau_ci95"] or (entry["tau"], entry["tau"])
            row = [run, str(step), f"{entry['tau']:.2f} [{low:.2f}, {high:.2f}]", "", ""]
            if best is not None:
                row[3:] = _against(entry, best, results)
            rows.append(row)
            if best is None or entry["tau"] > best["tau"]:
                best = entry
    return rows


def sweep_lines(results: dict[str, Any]) -> list[str]:
    """A line a run: its best step, and what is known of it against the best of the steps before."""
    lines = []
    for run, steps in runs(results).items():
        place = max(range(len(steps)), key=lambda i: steps[i][1]["tau"])
        step, entry = steps[place]
        interval = entry["tau_ci95"]
        line = f"{run}: best at step {step}, τ {entry['tau']:.2f}"
        line += f" [{interval[0]:.2f}, {interval[1]:.2f}]" if interval else ""
        if place:
            earlier, before = max(steps[:place], key=lambda other: other[1]["tau"])
            difference, verdict = _against(entry, before, results)
            line += f"; step {earlier} before it had {before['tau']:.2f}, {difference}: {verdict or 'level'}"
        lines.append(line)
    return lines


def _against(entry: dict[str, Any], best: dict[str, Any], results: dict[str, Any]) -> tuple[str, str]:
    """Difference in τ to the best before with its paired interval, and whether that is more than noise."""
    ours, theirs, prompts = paired_means(entry, best)
    if not len(ours):
        return "", ""
    difference, made = ours - theirs, results["provenance"]
    interval = bootstrap_interval(difference, made.get("bootstrap", 10_000), made.get("seed", 0), prompts)
    if interval is None:
        return f"{difference.mean():+.2f}", ""
    told = f"{difference.mean():+.2f} [{interval[0]:+.2f}, {interval[1]:+.2f}]"
    if interval[0] > 0:
        return told, "better"
    return told, "worse" if interval[1] < 0 else "within the noise"
