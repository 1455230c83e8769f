"""Results over time: a line a drafter in history.jsonl, and results files read back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from dflash_eval.errors import UserError

KEPT = ("checkpoint", "reference", "tau", "tau_ci95", "tau_micro", "expected_tau")


def append_history(results: dict[str, Any], path: Path) -> None:
    """One line for each drafter judged, in a single write, so that runs side by side do not mix."""
    made, lines = results["provenance"], []
    for entry in results["drafters"]:
        line = {
            "time": made["time"],
            "name": results["name"],
            "drafter": entry["name"],
            **{key: entry[key] for key in KEPT},
            f"ddtree_{entry['ddtree_width']['k']}": entry["ddtree_width"]["tau"],
            "ddtree_budget": {str(row["budget"]): row["tau"] for row in entry["ddtree_budget"]},
            "cache": results["cache"]["fingerprint"],
            "samples": results["cache"]["samples"],
            "commit": made["commit"],
        }
        lines.append(json.dumps(line, ensure_ascii=False) + "\n")
    with open(path, "a", encoding="utf-8") as handle:
        handle.write("".join(lines))


def read_results(path: Path) -> dict[str, Any]:
    """A results.json, or the one in a folder. Raises UserError for what is none of this version's."""
    file = path / "results.json" if path.is_dir() else path
    try:
        results = json.loads(file.read_text(encoding="utf-8"))
        if results["schema_version"] != 1:
            raise UserError(f"{file}: schema version {results['schema_version']}, this dflash-eval reads version 1")
        for entry in results["drafters"]:
            assert entry["name"]
            assert all("acceptance_lengths" in sample and "id" in sample for sample in entry["samples"])
    except OSError as error:
        raise UserError(f"{file}: no results there ({error.strerror}); dflash-eval evaluate writes them") from None
    except (ValueError, KeyError, TypeError, AssertionError):
        raise UserError(f"{file}: not a results.json of dflash-eval evaluate") from None
    return results
