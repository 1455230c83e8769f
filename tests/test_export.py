"""Exports: every cycle a row that adds up, what each tracker is given, and extras that are not installed."""

from __future__ import annotations

import csv
import json
import sys
import types

import pytest
from test_cli import main as main
from test_evaluate import beside
from test_report import drafter
from test_report import results as results

from dflash_eval.cache import Cache
from dflash_eval.errors import UserError
from dflash_eval.evaluate import evaluate
from dflash_eval.export import KINDS, comment, cycles, export, scalars


@pytest.fixture(scope="module")
def evaluated(tiny, tmp_path_factory) -> dict:
    return evaluate(beside(tiny, tmp_path_factory.mktemp("export")))


def test_the_cycles_cover_every_completion_and_ranks_end_where_the_drafter_lost(evaluated, tiny):
    rows = list(cycles(evaluated))
    for sample in Cache(tiny.folder / "cache").samples:
        own = [row for row in rows if row["sample"] == sample.id]
        assert own[0]["anchor"] == len(sample.prompt_ids)
        assert own[-1]["anchor"] + own[-1]["length"] == len(sample) - 1
        for row in own:
            assert len(row["slot_ranks"]) == row["length"]
            lost = row["rejected_draft"] is not None
            assert (row["slot_ranks"][-1] > 0) == lost
            assert not any(row["slot_ranks"][:-1])
            if lost:
                assert row["rejected_draft"] != sample.input_ids[row["anchor"] + row["length"]]


def test_csv_holds_the_cycles_and_the_command_writes_it(evaluated, tmp_path, main):
    (tmp_path / "results.json").write_text(json.dumps(evaluated))
    status, _, stderr = main("export", tmp_path, "csv", tmp_path / "deeper" / "cycles.csv")
    assert status == 0, stderr
    with open(tmp_path / "deeper" / "cycles.csv", encoding="utf-8", newline="") as handle:
        rows = list(csv.DictReader(handle))
    assert [int(row["length"]) for row in rows] == [row["length"] for row in cycles(evaluated)]
    assert [list(map(int, row["slot_ranks"].split())) for row in rows] == [
        row["slot_ranks"] for row in cycles(evaluated)
    ]


def test_parquet_holds_the_cycles(evaluated, tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet", reason="the extra parquet is not installed")
    export(evaluated, "parquet", tmp_path / "cycles.parquet")
    assert parquet.read_table(tmp_path / "cycles.parquet").to_pylist() == list(cycles(evaluated))


def test_the_comment_has_the_table_first_and_folds_the_rest(results):
    text = comment(results)
    assert text.index("| mine-12000 | 2.34 [2.05, 2.71] |") < text.index("<details>")
    assert text.count("<details><summary>") == text.count("</details>") == 2
    assert "mine-12000: τ 2.34, 2.6× below z-lab's 6.13" in text


def test_plots_are_written_as_png_and_svg(results, tmp_path):
    export(results, "plots", tmp_path / "plots")
    names = {f"{name}.{kind}" for name in ("tau", "budget", "slots", "lengths") for kind in ("png", "svg")}
    assert {path.name for path in (tmp_path / "plots").iterdir()} == names
    assert (tmp_path / "plots" / "tau.png").read_bytes().startswith(b"\x89PNG")
    assert (
        "mine-12000" in (tmp_path / "plots" / "tau.svg").read_text()
        or "<use" in (tmp_path / "plots" / "tau.svg").read_text()
    )


def test_scalars_are_by_run_and_step(results):
    results["drafters"].append(drafter("other", 3.0, (2.0, 4.0), 5.0))
    found = [(run, step, values["tau"]) for run, step, values in scalars(results)]
    assert found == [("z-lab", 0, 6.13), ("other", 0, 3.0), ("mine", 9000, 10.72), ("mine", 12000, 2.34)]


def test_tensorboard_gets_them(results, tmp_path):
    loaders = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator", reason="the extra tensorboard is not installed"
    )
    export(results, "tensorboard", tmp_path / "runs")
    read = {}
    for file in (tmp_path / "runs" / "mine").iterdir():
        events = loaders.EventAccumulator(str(file))
        events.Reload()
        read |= {event.step: event.value for event in events.Scalars("tau")}
    assert read == {9000: pytest.approx(10.72), 12000: pytest.approx(2.34)}


def test_wandb_gets_a_run_for_each_run_in_the_order_of_its_steps(results, tmp_path, monkeypatch):
    """wandb itself sends to a server; what it is told is noted down instead."""
    told: list[tuple] = []

    class Run:
        def log(self, values, step):
            told.append((step, values["tau"]))

        def finish(self):
            told.append(("finish",))

    def init(**arguments):
        told.append((arguments["project"], arguments["name"]))
        return Run()

    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=init))
    results["cache"]["settings"] = {}
    export(results, "wandb", tmp_path / "drafters")
    mine = told.index(("drafters", "qwen3.6-27b/mine"))
    assert told[mine + 1 : mine + 4] == [(9000, 10.72), (12000, 2.34), ("finish",)]


@pytest.mark.parametrize(
    ("kind", "module"),
    [("parquet", "pyarrow"), ("tensorboard", "tensorboard"), ("wandb", "wandb")],
)
def test_an_extra_that_is_missing_is_named(results, tmp_path, monkeypatch, kind, module):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(UserError, match=rf"{module} is not installed: pip install 'dflash-eval\[{kind}\]'"):
        export(results, kind, tmp_path / "out")


def test_an_unknown_kind_and_a_place_that_cannot_be_are_refused(results, evaluated, tmp_path):
    with pytest.raises(UserError, match="excel: not one of csv, parquet, comment"):
        export(results, "excel", tmp_path / "x")
    (tmp_path / "file").write_text("")
    for place in (tmp_path / "file" / "x.csv", tmp_path):
        with pytest.raises(UserError, match="cannot be written"):
            export(evaluated, "csv", place)
    assert set(KINDS) == {"csv", "parquet", "comment", "plots", "tensorboard", "wandb"}
