"""docs/results.schema.json is what results.json is: every result passes, and one that is not so does not."""

from __future__ import annotations

import copy
import json

import pytest
from conftest import drafter_json, save_drafter
from test_cli import ROOT
from test_evaluate import beside, from_file

from dflash_eval.evaluate import evaluate

jsonschema = pytest.importorskip("jsonschema", reason="the extra dev is not installed")
SCHEMA = json.loads((ROOT / "docs" / "results.schema.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def check():
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    return jsonschema.Draft202012Validator(SCHEMA).validate


@pytest.fixture(scope="module")
def written(tiny, tmp_path_factory) -> dict:
    """Two drafters, a cost model; as the file has it."""
    folder = tmp_path_factory.mktemp("schema")
    drafters = [("trained", tiny.drafter), ("random", save_drafter(folder / "random", drafter_json()))]
    config = beside(tiny, folder, drafters, "evaluate.cost={draft_ms: 1, verify_ms: {1: 20, 17: 22}}")
    evaluate(config)
    return json.loads((config.results_dir / "results.json").read_text(encoding="utf-8"))


def test_results_are_valid(written, check):
    check(written)


def test_results_without_a_cycle_and_with_a_failed_drafter_are_valid(tiny, tmp_path, check):
    config = from_file(tiny, tmp_path, [[], [7], [], [], [8], []])
    broken = config.drafters[0].model_copy(update={"name": "broken", "checkpoint": str(tmp_path / "nowhere")})
    results = evaluate(config.model_copy(update={"drafters": (*config.drafters, broken)}))
    assert results["failed"]
    check(json.loads(json.dumps(results)))


@pytest.mark.parametrize(
    "spoil",
    [
        lambda results: results.pop("cache"),
        lambda results: results.update(schema_version=2),
        lambda results: results["drafters"].clear(),
        lambda results: results["drafters"][0].update(tau="3.1"),
        lambda results: results["drafters"][0].update(unheard_of=1),
        lambda results: results["drafters"][0]["tau_ci95"].append(1.0),
        lambda results: results["drafters"][0]["samples"][0]["acceptance_lengths"].append(0),
        lambda results: results["comparisons"][0].update(metric="speed"),
    ],
)
def test_what_is_not_so_is_not_valid(written, check, spoil):
    results = copy.deepcopy(written)
    spoil(results)
    with pytest.raises(jsonschema.ValidationError):
        check(results)
