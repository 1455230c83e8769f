"""The report: what a reader must see, at 80 columns and in Markdown."""

from __future__ import annotations

import copy
import io
import re

import numpy as np
import pytest
from rich.console import Console

from dflash_eval.config import EvaluateConfig
from dflash_eval.report import gap, gaps, markdown, print_report
from dflash_eval.summary import compare

BUDGETS = (4, 8, 16, 32, 64, 128, 256, 512, 1024)


def drafter(name: str, tau: float, interval: tuple[float, float], wide: float, reference: bool = False) -> dict:
    return {
        "name": name, "reference": reference, "checkpoint": f"some/{name}", "format": "z-lab", "block_size": 16,
        "target_layer_ids": [1, 16, 31, 46, 61], "mask_token_id": 248070,
        "tau": tau, "tau_ci95": interval, "tau_micro": tau - 0.11, "cycles": 850,
        "ddtree_width": {"k": 8, "tau": wide, "tau_ci95": (wide - 0.62, wide + 0.57)},
        "ddtree_budget": [{"budget": n, "tau": tau + 0.37 * i, "tau_ci95": interval} for i, n in enumerate(BUDGETS, 1)],
        "position_acceptance": [0.9 / i for i in range(1, 16)],
        "expected_tau": None,
        "samples": [
            {"id": f"p{i}", "acceptance_lengths": [5, 3 + i], "ddtree_width": [8 + i], "ddtree_budget": {}}
            for i in range(10)
        ],
    }  # fmt: skip


def compared(candidate: dict, reference: dict) -> dict:
    ours, theirs = candidate["tau"], reference["tau"]
    return {
        "candidate": candidate["name"], "reference": reference["name"], "metric": "tau",
        "candidate_value": ours, "reference_value": theirs, "difference": ours - theirs,
        "difference_ci95": (ours - theirs - 0.51, ours - theirs + 0.49), "ratio": ours / theirs,
        "minimum_detectable_difference": 0.71, "prompts": {"above": 1, "level": 2, "below": 7},
    }  # fmt: skip


@pytest.fixture
def results() -> dict:
    """Three drafters as the mission has them: names and numbers of the usual lengths."""
    reference = drafter("z-lab", 6.13, (5.42, 6.94), 12.41, reference=True)
    candidates = [drafter("mine-12000", 2.34, (2.05, 2.71), 7.85), drafter("mine-9000", 10.72, (9.86, 11.93), 14.28)]
    return {
        "schema_version": 1,
        "name": "qwen3.6-27b",
        "cache": {
            "fingerprint": "0123", "target": "Qwen/Qwen3.6-27B", "samples": 10, "completion_tokens": 5120,
            "greedy_agreement": 0.998,
        },
        "drafters": [reference, *candidates],
        "failed": [],
        "comparisons": [compared(candidate, reference) for candidate in candidates],
        "provenance": {"device": "cpu", "dtype": "float32"},
    }  # fmt: skip


def printed(results: dict, width: int = 80) -> str:
    out = io.StringIO()
    print_report(results, Console(file=out, width=width))
    return out.getvalue()


def rows(text: str, name: str) -> list[str]:
    """The lines that begin with a drafter's name, whatever draws the table."""
    return [line for line in text.splitlines() if re.match(rf"[\s|│┃]*{re.escape(name)}\b", line)]


def test_at_80_columns_every_tau_and_interval_is_whole_and_on_its_drafters_line(results):
    text = printed(results)
    for entry in results["drafters"]:
        wide, low, high = entry["ddtree_width"]["tau"], *entry["ddtree_width"]["tau_ci95"]
        main, budgets = rows(text, entry["name"])[:2]
        for number in (entry["tau"], *entry["tau_ci95"], entry["tau_micro"], wide, low, high):
            assert re.search(rf"(?<![\d.]){number:.2f}(?![\d.])", main)
        assert str(entry["cycles"]) in main
        for budget in entry["ddtree_budget"]:
            assert re.search(rf"(?<![\d.]){budget['tau']:.2f}(?![\d.])", budgets)
    for n in BUDGETS:
        assert re.search(rf"\b{n}\b", text)
    assert "…" not in text


def test_no_line_is_wider_than_the_terminal(results):
    results["drafters"][1]["name"] = "mine-of-a-very-long-name-with-step-000012000"
    text = printed(results)
    assert max(map(len, text.splitlines())) <= 80
    assert "2.34 [2.05, 2.71]" in text


def test_a_long_name_is_folded_not_cut(results):
    results["drafters"][1]["name"] = "abcdefghijklmnopqrstuvwxyz0123456789"
    letters = "".join(re.findall(r"^[\s│┃]*([a-z0-9]{2,})", printed(results), flags=re.MULTILINE))
    assert "abcdefghijklmnopqrstuvwxyz0123456789" in letters


def test_the_headline_names_target_prompts_tokens_and_agreement(results):
    for text in (" ".join(printed(results).split()), markdown(results)):
        for said in ("Qwen/Qwen3.6-27B", "10 prompts", "5,120 completion tokens", "greedy agreement 0.9980"):
            assert said in text


@pytest.mark.parametrize("show", [printed, markdown])
def test_the_references_row_alone_is_marked(results, show):
    text = show(results)
    assert "reference" in rows(text, "z-lab")[0]
    for name in ("mine-12000", "mine-9000"):
        assert "reference" not in rows(text, name)[0]


def test_a_conversation_is_one_prompt_in_headline_counts_and_intervals(results):
    reference, candidate = copy.deepcopy(results["drafters"][:2])
    sampled = {}
    for drafter, lengths in ((reference, [4] * 10), (candidate, [2, 2, 2, 9, 3, 5, 4, 4, 2, 4])):
        drafter["ddtree_budget"] = []
        for i, (sample, length) in enumerate(zip(drafter["samples"], lengths, strict=True)):
            sample["id"], sample["acceptance_lengths"] = f"p{i // 2}/turn-{i % 2 + 1}", [length]
        sampled[drafter["name"]] = lengths
    row = compare([reference, candidate], EvaluateConfig(bootstrap=3000))[0]
    assert row["prompts"] == {"above": 1, "level": 2, "below": 2}
    pairs = np.reshape(np.subtract(sampled[candidate["name"]], sampled[reference["name"]]), (5, 2))
    means = pairs[np.random.default_rng(0).integers(5, size=(3000, 5))].mean((1, 2))
    assert row["difference_ci95"] == pytest.approx(tuple(np.percentile(means, [2.5, 97.5])))
    results.update(drafters=[reference, candidate], comparisons=[row])
    for text in (" ".join(printed(results).split()), markdown(results)):
        assert "5 prompts (10 turns), 5,120 completion tokens" in text
        assert "2 of 5 prompts below" in text


@pytest.mark.parametrize("show", [printed, markdown])
def test_each_candidates_gap_is_told_in_words_in_its_row_and_with_its_interval_below(results, show):
    text = show(results)
    assert "2.6× below" in rows(text, "mine-12000")[0]
    assert "1.7× above" in rows(text, "mine-9000")[0]
    told = " ".join(text.split())
    assert "mine-12000: τ 2.34, 2.6× below z-lab's 6.13 (difference -3.79 [-4.30, -3.30])" in told
    assert "mine-9000: τ 10.72, 1.7× above z-lab's 6.13 (difference +4.59 [+4.08, +5.08])" in told


@pytest.mark.parametrize(
    ("ratio", "words"),
    [(2.34 / 6.13, "2.6× below"), (1 / 4.1, "4.1× below"), (1.75, "1.8× above"), (1 / 12.04, "12.0× below")],
)
def test_a_gap_is_a_factor_above_one_in_words(ratio, words):
    assert gap(ratio) == words


@pytest.mark.parametrize("ratio", [0.93, 0.96, 0.99, 1.01, 1.04])
def test_a_small_gap_is_not_rounded_to_a_factor_of_one(ratio):
    factor = float(gap(ratio).partition("×")[0])
    assert factor == pytest.approx(max(ratio, 1 / ratio), abs=0.006)
    assert factor > 1


def test_equals_are_level(results):
    assert "×" not in gap(1.0)
    results["comparisons"][0] |= {"ratio": 1.001, "candidate_value": 6.14, "difference": 0.01}
    assert "level with z-lab's 6.13" in gaps(results)[0]


def test_a_difference_that_may_be_none_says_what_would_show(results):
    clear = results["comparisons"][0]
    assert "Too few" not in gaps(results)[0]
    assert gaps(results)[0].endswith("; 7 of 10 prompts below")
    assert gaps(results)[1].endswith("; 1 of 10 prompts above")
    clear |= {"difference": 0.2, "difference_ci95": (-0.3, 0.7)}
    assert "Too few to tell them apart: that takes a difference of 0.71" in gaps(results)[0]


def test_tau_is_broken_down_by_category(results):
    assert "category" not in printed(results)
    for i, entry in enumerate(results["drafters"]):
        entry["categories"] = [
            {"category": "maths", "samples": 7, "tau": 3.21 + i, "tau_ci95": (2.11, 4.3), "tau_micro": 3.0},
            {"category": None, "samples": 3, "tau": 5.43 + i, "tau_ci95": None, "tau_micro": 5.0},
        ]
    for text in (printed(results), markdown(results)):
        for name, count, tau in (("maths", 7, 3.21), ("none", 3, 5.43)):
            row = rows(text, name)[0]
            assert re.search(rf"{name}[\s|│]+{count}\b", row)
            for i in range(3):
                assert f"{tau + i:.2f}" in row
    assert "3.21 [2.11, 4.30]" in markdown(results)


def test_the_engines_own_tau_stands_beside_ours_with_what_to_beware_of(results):
    served = {"tau": 3.98, "tau_micro": 3.87, "completions": 10, "from": "spec_verify_ct by completion"}
    results["cache"]["provenance"] = {
        "completions": {
            "completions": 10, "token_ids": {"text": 4, "server": 6}, "differ": 3, "prompts_differ": 2,
            "served_tau": served,
        }
    }  # fmt: skip
    for text in (printed(results), markdown(results)):
        told = " ".join(text.split())
        assert "Served τ 3.98, micro 3.87: what the engine reached on 10 completions" in told
        assert "4 of 10 completions came as text and were tokenised again; in 3, tokens and text do not match" in told
        assert "The server read 2 of 10 prompts otherwise than the target's chat template" in told
    results["cache"]["provenance"]["completions"]["served_tau"] = served | {"tau": None}
    assert "Served τ micro 3.87" in " ".join(printed(results).split())


@pytest.mark.parametrize("show", [printed, markdown])
def test_what_the_trees_are_built_from_is_told_where_slots_depend_on_each_other(results, show):
    results["drafters"][0]["ddtree_scores"] = "logits"
    results["drafters"][1]["ddtree_scores"] = "selector"
    results["drafters"][2]["ddtree_scores"] = "logits without the Markov head"
    lines = " ".join(show(results).split())
    assert "z-lab: DDTree" not in lines
    assert "mine-12000: DDTree by budget is built from its candidate selector's scores" in lines
    assert "mine-9000: DDTree by budget is built from its logits without the Markov head" in lines


def test_without_a_reference_there_is_no_gap_and_no_mark(results):
    results["drafters"][0]["reference"] = False
    results["comparisons"] = []
    for text in (printed(results), markdown(results).partition("## Provenance")[0]):
        assert "reference" not in text
        assert "×" not in text
        assert len(rows(text, "z-lab")) >= 2


@pytest.mark.parametrize("name", ["mine[v2]", "a[bold]b", "[/]", r"back\slash"])
def test_a_name_that_looks_like_markup_is_printed_as_it_is(results, name):
    results["drafters"][1]["name"] = results["comparisons"][0]["candidate"] = name
    assert printed(results).count(name) == 3  # in both tables and in the line of its gap


def test_a_markdown_table_keeps_its_shape_whatever_the_names(results):
    """Every row has as many unescaped bars as the header and its rule."""
    results["drafters"][0]["name"] = "a|b"
    results["drafters"][1]["samples"][3]["id"] = results["drafters"][0]["samples"][3]["id"] = "p|3"
    text = markdown(results)
    assert "a\\|b" in text
    assert "p\\|3" in text
    tables = re.findall(r"(?:^\|.*\n)+", text, flags=re.MULTILINE)
    assert len(tables) == 5
    for table in tables:
        bars = {len(re.findall(r"(?<!\\)\|", line)) for line in table.splitlines()}
        assert len(bars) == 1, table


def test_markdown_has_every_prompts_tau_and_every_slots_share(results):
    text = markdown(results)
    for i in range(10):
        assert re.search(rf"^\| p{i} \| {9 + i} \|( {(8 + i) / 2:.2f} \|){{3}}$", text, flags=re.MULTILINE)
    for i in (1, 2, 15):
        assert f" {0.9 / i:.2f} |" in text


def test_drafters_of_different_block_sizes_share_a_table(results):
    results["drafters"][1]["position_acceptance"] = [0.5, 0.25]
    table = markdown(results).partition("## Position acceptance")[2].partition("##")[0]
    short = next(line for line in table.splitlines() if line.startswith("| mine-12000"))
    assert [cell.strip() for cell in short.split("|")[2:-1]] == ["0.50", "0.25", *[""] * 13]


def test_a_tau_that_is_null_is_a_dash(results):
    empty = copy.deepcopy(results)
    candidate = empty["drafters"][1]
    candidate |= {"tau": None, "tau_ci95": None, "tau_micro": None, "cycles": 0, "position_acceptance": []}
    candidate["ddtree_width"] |= {"tau": None, "tau_ci95": None}
    empty["comparisons"][0] |= {"candidate_value": None, "difference": None, "difference_ci95": None, "ratio": None}
    for text in (printed(empty), markdown(empty).partition("## Provenance")[0]):
        row = rows(text, "mine-12000")[0]
        assert re.search(r"mine-12000[\s|│]+-[\s|│]+-[\s|│]+0\b", row)
        assert "None" not in text
