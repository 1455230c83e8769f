"""The cost model: tokens a second as a loop over cycles adds them up, and what it does not know it does not guess."""

from __future__ import annotations

import pytest
from test_evaluate import beside
from test_html import samples, words
from test_report import printed
from test_report import results as results

from dflash_eval.bench.cost import bench_cost
from dflash_eval.config import load_config
from dflash_eval.cost import cost_lines, cost_rows, verification_ms
from dflash_eval.errors import UserError
from dflash_eval.evaluate import evaluate
from dflash_eval.html import html_report

VERIFY = {1: 20.0, 16: 22.0, 64: 30.0}


def test_between_two_points_lies_a_line_and_beyond_the_last_nothing():
    assert [verification_ms(VERIFY, n) for n in (1, 16, 64)] == [20, 22, 30]
    assert verification_ms(VERIFY, 40) == pytest.approx(26)
    assert verification_ms(VERIFY, 65) is None


def test_tokens_a_second_are_those_of_a_clock_that_runs_through_every_cycle():
    chain, trees = [[3, 1], [2]], {15: [[4], [2]], 39: [[2, 2], [2]], 64: [[4], [2]]}
    rows = cost_rows(chain, trees, drafts=15, draft_ms=3.0, verify_ms=VERIFY)
    plain = 1000 / VERIFY[1]
    for row, prompts, verify in zip(rows, (chain, trees[15], trees[39]), (22.0, 22.0, 22 + 8 * 24 / 48), strict=False):
        clock = tokens = 0.0
        for prompt in prompts:
            for length in prompt:
                clock, tokens = clock + 3.0 + verify, tokens + length
        assert row["tokens_per_s"] == pytest.approx(1000 * tokens / clock)
        assert row["speedup"] == pytest.approx(1000 * tokens / clock / plain)
    assert rows[3]["tokens_per_s"] is None
    assert [row["best"] for row in rows] == [False, True, False, False]


def test_without_a_cycle_there_is_no_best():
    assert not any(row["best"] for row in cost_rows([[]], {4: [[]]}, 15, 1.0, VERIFY))


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("{draft_ms: 1, verify_ms: {16: 2, 64: 3}}", "evaluate.cost.verify_ms must tell what 1 token takes"),
        ("{draft_ms: -1, verify_ms: {1: 2, 64: 3}}", "evaluate.cost.draft_ms must be at least 0"),
        ("{draft_ms: 1, verify_ms: {1: 0, 64: 3}}", "evaluate.cost.verify_ms.1 must be greater than 0"),
        ("{draft_ms: 1, verify_ms: {1: 2}}", "evaluate.cost.verify_ms"),
        ("{draft_ms: 1}", "evaluate.cost.verify_ms is missing"),
        ("{draft_ms: 1, verify_ms: {one: 2, 3: 4}}", "a key must be a whole number"),
        ("{draft_ms: 1, verify_ms: {1: 2, 64: 3}, verify: 1}", 'did you mean "evaluate.cost.verify_ms"'),
    ],
)
def test_a_cost_that_cannot_be_is_refused(tiny, value, said):
    with pytest.raises(UserError) as caught:
        load_config(tiny.config_path, [f"evaluate.cost={value}"])
    assert said in str(caught.value)


def test_every_report_names_the_fastest_rule(tiny, tmp_path):
    cost = "evaluate.cost={draft_ms: 1, verify_ms: {1: 20, 6: 21, 17: 22, 65: 90}}"
    config = beside(tiny, tmp_path, None, cost)
    results = evaluate(config)
    (line,) = cost_lines(results)
    assert line in " ".join(printed(results, 300).split())
    for name in ("report.md", "report.html"):
        text = (config.results_dir / name).read_text()
        assert line in text
        assert "Speed-up over plain decoding" in text


def test_the_best_budget_is_marked_in_the_plot(results):
    for entry in results["drafters"]:
        entry["cost"] = [
            {"budget": n, "tokens_per_s": 50.0, "speedup": 2.0, "best": n == 64} for n in (None, 4, 8, 16, 32, 64)
        ]
    page = html_report(results, samples(results), words)
    assert page.count("budget 64, τ 7.98, the fastest") == 1
    assert "DDTree with 64 nodes, 50 tokens/s, 2.00× plain decoding (the chain 2.00×)" in page


@pytest.mark.parametrize("fixture", ["tiny", "tiny_hybrid"])
def test_the_bench_gives_what_the_config_takes(fixture, request, tmp_path):
    setup, lines = request.getfixturevalue(fixture), []
    config = beside(setup, tmp_path)
    figures = bench_cost(config, 20, lines.append)
    assert list(figures["verify_ms"]) == [1, 2, 5, 6, 17, 65]
    assert all(value > 0 for value in (figures["draft_ms"], *figures["verify_ms"].values()))
    told = lines[-1].partition("cost: ")[2]
    again = beside(setup, tmp_path, None, f"evaluate.cost={told}")
    assert again.evaluate.cost.verify_ms[65] == pytest.approx(figures["verify_ms"][65], rel=1e-3)
    with pytest.raises(UserError, match="--context 250"):
        bench_cost(config, 250, lines.append)
