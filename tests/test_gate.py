"""The gate and the history: exit 3 with the reason, decisions that hold against a known truth, results compared."""

from __future__ import annotations

import copy
import json

import numpy as np
import pytest
from test_cli import config as config
from test_cli import main as main
from test_report import results as results

from dflash_eval.acceptance.statistics import expanded_tail
from dflash_eval.diff import diff_rows, differences
from dflash_eval.errors import UserError
from dflash_eval.gate import below, check_limits, parse_limit, parse_margin, worse
from dflash_eval.history import append_history, read_results

DRAWS = 1000


def entry(name: str, lengths: list[list[int]], reference: bool = False) -> dict:
    samples = [{"id": f"p{i}", "acceptance_lengths": own} for i, own in enumerate(lengths)]
    return {"name": name, "reference": reference, "samples": samples}


def drawn(rng, prompts: int, ratio: float) -> tuple[dict, dict]:
    """Two drafters' results whose true τ are `ratio` apart: prompts differ much, cycles scatter around each one's."""
    level = rng.gamma(4, 1, prompts) + 1.5
    sides = []
    for factor in (ratio, 1.0):
        mean = (level * factor * rng.lognormal(-0.005, 0.1, prompts)).clip(1.01)
        sides.append([(1 + rng.poisson(own - 1, 60)).tolist() for own in mean])
    return {"drafters": [entry("a", sides[0])]}, {"drafters": [entry("a", sides[1])]}


@pytest.mark.parametrize("prompts", [5, 10, 40])
def test_at_the_margin_itself_at_most_one_alarm_in_twenty_is_false(prompts):
    rng = np.random.default_rng(prompts)
    alarms = sum(bool(worse(*drawn(rng, prompts, 0.9), 0.1, 400, seed)) for seed in range(DRAWS))
    assert alarms <= 0.05 * DRAWS
    level = sum(bool(worse(*drawn(rng, prompts, 1.0), 0.1, 400, seed)) for seed in range(100))
    assert level == 0 if prompts >= 10 else level <= 3


def test_a_drafter_that_is_a_quarter_worse_is_found_out():
    rng = np.random.default_rng(1)
    alarms = sum(bool(worse(*drawn(rng, 10, 0.75), 0.02, 400, seed)) for seed in range(100))
    assert alarms >= 95


@pytest.mark.parametrize(("n", "student"), [(3, 4.3027), (5, 2.7764), (10, 2.2622), (31, 2.0423)])
def test_the_expanded_percentiles_are_as_wide_as_students_interval(n, student):
    from statistics import NormalDist

    assert -NormalDist().inv_cdf(expanded_tail(n)) * ((n - 1) / n) ** 0.5 == pytest.approx(student, rel=2e-3)


def test_the_reason_names_both_values_the_interval_and_the_margin():
    before = {"drafters": [entry("mine", [[4, 4], [6, 6], [5, 5], [4, 4], [6, 6]])]}
    after = {"drafters": [entry("mine", [[3, 3], [4, 4], [4, 4], [3, 3], [4, 4]])]}
    (reason,) = worse(after, before, 0.02, 400, 0)
    assert reason.startswith("mine: τ 3.600 is 72.0% of the earlier 5.000 [")
    assert reason.endswith("over 5 prompts, below the margin's 98.0%")
    assert worse(before, after, 0.02, 400, 0) == worse(after, after, 0.0, 400, 0) == []


def test_candidates_are_gated_and_the_reference_only_where_it_is_alone():
    one, other = [[4, 4], [6, 6], [5, 5]] * 2, [[2, 2], [3, 3], [2, 2]] * 2
    before = {"drafters": [entry("z", one, True), entry("mine", one)]}
    after = {"drafters": [entry("z", other, True), entry("mine", one)]}
    assert worse(after, before, 0.02, 400, 0) == []
    alone = [{"drafters": side["drafters"][:1]} for side in (after, before)]
    assert worse(*alone, 0.02, 400, 0)


def test_the_only_two_candidates_are_paired_whatever_their_names_and_others_must_be_named():
    lengths = [[4, 4], [6, 6], [5, 5]] * 2
    before, after = ({"drafters": [entry(name, lengths)]} for name in ("step-1", "step-2"))
    assert worse(after, before, 0, 400, 0) == []
    before["drafters"].append(entry("step-0", lengths))
    with pytest.raises(UserError, match="step-2: the earlier results have no drafter of that name, but step-1, step-0"):
        worse(after, before, 0, 400, 0)


def test_few_prompts_in_common_give_no_verdict():
    before, after = ({"drafters": [entry("mine", [[4, 4]] * n)]} for n in (4, 9))
    with pytest.raises(UserError, match="mine: 4 prompts in common"):
        worse(after, before, 0, 400, 0)


def test_below_its_limit_each_metric_is_a_reason(results):
    limits = [parse_limit(text) for text in ("tau=3.0", "ddtree_width=7.85", "ddtree_budget_64=5", "tau_micro=2")]
    assert below(results, limits) == [
        "mine-12000: tau 2.340 is below 3",
        "mine-12000: ddtree_budget_64 4.190 is below 5",
    ]
    assert below(results, [("expected_tau", 1.0)])[0] == "mine-12000: there is no expected_tau to hold against 1"


@pytest.mark.parametrize("text", ["tau", "tau=", "tau=x", "tau=nan", "tau=-1", "speed=3", "ddtree_budget=3", "=3"])
def test_a_limit_that_is_none_is_refused(text):
    with pytest.raises(UserError, match="--fail-below"):
        parse_limit(text)


def test_a_budget_that_is_not_evaluated_is_refused():
    with pytest.raises(UserError, match=r"--fail-below ddtree_budget_5: evaluate\.budgets has 4, 8"):
        check_limits([("ddtree_budget_5", 1.0)], (4, 8))


def test_margins_are_shares():
    assert parse_margin("2%") == parse_margin("0.02") == 0.02
    for text in ("100%", "-1%", "2 percent", "nan", "", "7"):
        with pytest.raises(UserError, match="--margin"):
            parse_margin(text)


def test_the_command_exits_3_with_the_reasons_and_has_written_results_and_history(config, main, tmp_path):
    status, _, stderr = main("evaluate", "-c", config, "--fail-below", "tau=1.0")
    assert status == 0, stderr
    first = tmp_path / "first.json"
    written = json.loads((tmp_path / "results" / "results.json").read_text())
    tau = written["drafters"][0]["tau"]
    for sample in written["drafters"][0]["samples"]:
        sample["acceptance_lengths"] = [2 * n for n in sample["acceptance_lengths"]]
    first.write_text(json.dumps(written))
    gate = ["--fail-below", "tau=99", "--fail-if-worse-than", first]
    status, _, stderr = main("evaluate", "-c", config, *gate)
    assert status == 3
    assert f"dflash-eval: trained: tau {tau:.3f} is below 99\ntrained: τ {tau:.3f} is 50.0% of the earlier" in stderr
    lines = [json.loads(line) for line in (tmp_path / "history.jsonl").read_text().splitlines()]
    assert [line["tau"] for line in lines] == [tau, tau]
    assert lines[0]["cache"] == written["cache"]["fingerprint"]
    status, stdout, _ = main("diff", first, tmp_path / "results")
    assert status == 0
    assert "50.0% [50.0%, 50.0%]" in stdout
    assert "below" in stdout


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "no results there"),
        ("{", "not a results.json"),
        ("[]", "not a results.json"),
        ('{"schema_version": 9}', "schema version 9"),
        ('{"schema_version": 1, "drafters": [{"name": "x", "samples": [{}]}]}', "not a results.json"),
    ],
)
def test_what_are_no_results_is_refused_before_anything_runs(config, main, tmp_path, content, said):
    path = tmp_path / "old.json"
    if content is not None:
        path.write_text(content)
    status, _, stderr = main("evaluate", "-c", config, "--fail-if-worse-than", path)
    assert status == 2
    assert said in stderr
    assert not (tmp_path / "results").exists()
    with pytest.raises(UserError, match=said):
        read_results(path)


def test_a_diff_pairs_prompts_and_tells_what_else_differs(results):
    for own in results["drafters"]:
        for sample in own["samples"]:
            sample["ddtree_budget"] = {str(row["budget"]): [4] for row in own["ddtree_budget"]}
    after = copy.deepcopy(results)
    after["drafters"][0]["samples"] = after["drafters"][0]["samples"][:5]
    for sample in after["drafters"][1]["samples"]:
        sample["acceptance_lengths"] = [10 * n for n in sample["acceptance_lengths"]]
    after["drafters"][2]["name"] = "mine-9001"
    after["provenance"]["dtype"] = "bfloat16"
    rows = diff_rows(results, after)
    assert [row[-1] for row in rows if row[1] == "τ"] == ["the same", "above"]
    assert {row[0] for row in rows} == {"z-lab", "mine-12000"}
    told = differences(results, after)
    assert "only in A: mine-9000" in told
    assert "provenance.dtype: float32 → bfloat16" in told


def test_history_is_appended_to(results, tmp_path):
    results["provenance"] |= {"time": "2026-01-01T00:00:00+00:00", "commit": None}
    for entry_ in results["drafters"]:
        entry_["expected_tau"] = None
    for _ in range(2):
        append_history(results, tmp_path / "history.jsonl")
    lines = [json.loads(line) for line in (tmp_path / "history.jsonl").read_text().splitlines()]
    assert [line["drafter"] for line in lines] == ["z-lab", "mine-12000", "mine-9000"] * 2
