"""Training runs: τ by step, the best one beyond noise, several configs in one table, checkpoints as they appear."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import drafter_json, save_drafter, write_config
from test_cli import ROOT, command
from test_evaluate import beside
from test_html import parsed, words
from test_html import samples as with_rejected
from test_report import drafter
from test_report import results as results

from dflash_eval.config import load_config
from dflash_eval.errors import UserError
from dflash_eval.evaluate import evaluate
from dflash_eval.html import html_report
from dflash_eval.sweep import merged, runs, sweep_lines, sweep_rows
from dflash_eval.watch import watch


class Enough(Exception):
    """Ends a watch."""


def steps(results: dict, lengths: dict[int, list[list[int]]]) -> dict:
    """Results of the run `mine`, with these acceptance lengths by prompt."""
    entries = []
    for step, own in lengths.items():
        tau = sum(sum(x) / len(x) for x in own) / len(own)
        entry = drafter(f"mine-{step}", tau, (tau - 0.2, tau + 0.2), 8.0)
        entry["samples"] = [{"id": f"p{i}", "acceptance_lengths": x} for i, x in enumerate(own)]
        entries.append(entry)
    return {**results, "drafters": [results["drafters"][0], *entries], "comparisons": []}


def test_each_step_is_held_against_the_best_before_it(results):
    level = [[4, 4], [2, 2], [3, 3], [5, 5], [3, 3]]
    better = [[n + 1 for n in own] for own in level]
    noisy = [[8, 8], [1, 1], [4, 4], [7, 7], [1, 1]]
    sweep = steps(results, {900: level, 1000: better, 1100: noisy, 1200: level})
    rows = sweep_rows(sweep)
    assert [row[1] for row in rows] == ["900", "1000", "1100", "1200"]
    assert [row[4] for row in rows] == ["", "better", "within the noise", "worse"]
    assert rows[1][3] == "+1.00 [+1.00, +1.00]"
    (line,) = sweep_lines(sweep)
    assert (
        line
        == "mine: best at step 1000, τ 4.40 [4.20, 4.60]; step 900 before it had 3.40, +1.00 [+1.00, +1.00]: better"
    )


def test_a_single_step_a_reference_and_names_without_a_step_are_no_run(results):
    assert set(runs(results)) == {"mine"}
    results["drafters"][1]["name"] = "other-3"
    assert runs(results) == {}
    results["drafters"][2] |= {"name": "other-4", "reference": True}
    assert runs(results) == {}


def test_the_plot_has_every_step_its_interval_and_the_reference(results):
    sweep = steps(results, {n: [[n] * (6 // n)] * 2 for n in (1, 2, 3)})
    texts = with_rejected({"drafters": sweep["drafters"][1:]})
    sweep["drafters"][0]["samples"] = sweep["drafters"][1]["samples"]
    page = html_report(sweep, texts, words)
    assert parsed(page)
    for step in (1, 2, 3):
        assert f"mine, step {step}: τ {step:.2f}" in page
    assert "z-lab: τ 6.13" in page


def test_a_glob_of_checkpoints_is_a_sweep_in_every_report(tiny, tmp_path):
    for step in (5, 10):
        shutil.copytree(tiny.drafter, tmp_path / f"step-{step}")
    config = beside(tiny, tmp_path, [("trained", tiny.drafter), ("mine", tmp_path / "step-*")])
    evaluate(config)
    for name in ("report.md", "report.html"):
        text = (config.results_dir / name).read_text()
        assert "mine: best at step 5" in text
        assert "+0.00 [+0.00, +0.00]" in text
        assert "τ by training step" in text


def test_several_configs_give_the_drafters_of_all(tiny, tmp_path):
    paths = [tmp_path / "a" / "config.yaml", tmp_path / "b" / "config.yaml"]
    places = {"cache_dir": str(tiny.folder / "cache"), "prompts": {"source": str(tiny.folder / "prompts.jsonl")}}
    for path, name in zip(paths, ("one", "two"), strict=True):
        path.parent.mkdir()
        write_config(path.parent, tiny.target, [("trained", tiny.drafter), (name, tiny.drafter)], **places)
    one, two = map(load_config, paths)
    assert [spec.name for spec in merged([one, two], paths).drafters] == ["trained", "one", "two"]
    other = two.model_copy(update={"cache_dir": Path("elsewhere")})
    with pytest.raises(UserError, match=r"b/config\.yaml: not the same cache"):
        merged([one, other], paths)
    clash = two.model_copy(
        update={"drafters": (two.drafters[1].model_copy(update={"name": "one", "checkpoint": "x"}),)}
    )
    with pytest.raises(UserError, match="'one' is the name of two different drafters"):
        merged([one, clash], paths)
    second = two.model_copy(update={"drafters": (two.drafters[1].model_copy(update={"reference": True}),)})
    with pytest.raises(UserError, match="a second reference"):
        merged([one, second], paths)


def test_watch_judges_whole_checkpoints_once_and_waits_for_the_others(tiny, tmp_path, monkeypatch):
    """Looks: empty; half a checkpoint; the same; whole; settled; a second one that other weights replace; end."""
    folder, told, looks = tmp_path / "run", [], []
    folder.mkdir()
    whole = (tiny.drafter / "model.safetensors").read_bytes()
    config = beside(tiny, tmp_path)

    def write(name: str, content: bytes) -> None:
        (folder / name).mkdir(exist_ok=True)
        shutil.copy(tiny.drafter / "config.json", folder / name)
        (folder / name / "model.safetensors").write_bytes(content)

    def look(_: float) -> None:
        looks.append(len(told))
        number = len(looks)
        if number in (1, 2):
            write("step-5", whole[: len(whole) // (4 - number)])
        if number == 4:
            write("step-5", whole)
        if number == 6:
            save_drafter(folder / "step-10", drafter_json())
        if number == 10:
            raise Enough

    with pytest.raises(Enough):
        watch(config, folder, 1, told.append, look)
    assert told[0].startswith("trained: τ ")
    assert told[1].startswith("waiting for step-5: ")
    trained = told[0].partition(" τ ")[2]
    assert told[2] == f"step-5: τ {trained}"
    assert told[3].startswith("step-10: τ ")
    assert len(told) == 4
    results = json.loads((config.results_dir / "results.json").read_text())
    assert [entry["name"] for entry in results["drafters"]] == ["trained", "step-5", "step-10"]
    history = (tmp_path / "history.jsonl").read_text().splitlines()
    assert [json.loads(line)["drafter"] for line in history] == ["trained", "step-5", "step-10"]


def test_watch_passes_over_one_that_does_not_fit_and_a_folder_that_is_not_there_is_refused(tiny, tmp_path):
    told, looks = [], []
    save_drafter(
        tmp_path / "run" / "step-1", drafter_json(dflash_config={"target_layer_ids": [1], "mask_token_id": 256})
    )

    def look(_: float) -> None:
        looks.append(1)
        if len(looks) == 4:
            raise Enough

    with pytest.raises(Enough):
        watch(beside(tiny, tmp_path), tmp_path / "run", 1, told.append, look)
    assert [line.partition(":")[0] for line in told] == ["trained", "step-1 failed"]
    status = command("watch", "-c", tiny.config_path, tmp_path / "nowhere")
    assert status.returncode == 2
    assert "no such folder to watch" in status.stderr


def test_a_signal_ends_a_watch(tiny, tmp_path):
    config = beside(tiny, tmp_path)
    (tmp_path / "run").mkdir()
    arguments = ["watch", "-c", tmp_path / "config.yaml", tmp_path / "run", "--every", "0.1"]
    process = subprocess.Popen(
        [sys.executable, "-m", "dflash_eval", *map(str, arguments),
         "--set", f"prompts.source={tiny.folder / 'prompts.jsonl'}"],
        cwd=ROOT, stderr=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    until = time.monotonic() + 90
    while not (config.results_dir / "results.json").exists() and time.monotonic() < until and process.poll() is None:
        time.sleep(0.1)
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=30)
    assert process.returncode == 130, stderr
    assert "Traceback" not in stderr
