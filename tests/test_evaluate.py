"""Evaluation: what is refused, what the results hold, and walks that a slow loop with a heap finds as well."""

from __future__ import annotations

import dataclasses
import functools
import heapq
import io
import json
import math
import re
import shutil
from itertools import pairwise
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from conftest import PROMPTS, VOCABULARY, drafter_json, save_drafter, write_config
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from safetensors.torch import load_file, save_file
from torch.nn import functional as F
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from dflash_eval import cache as cachefile
from dflash_eval import evaluate as evaluation
from dflash_eval import judge
from dflash_eval.cache import Cache
from dflash_eval.config import load_config
from dflash_eval.drafter.checkpoint import load_drafter, read_config
from dflash_eval.drafter.model import DFlashDrafter
from dflash_eval.errors import RunError, UserError
from dflash_eval.evaluate import evaluate
from dflash_eval.extract import extract
from dflash_eval.judge import group_blocks
from dflash_eval.report import print_report

RULES = ["acceptance_lengths", "ddtree_width", "1", "4", "16", "64"]  # a sample's lists, with the tiny config's budgets


def beside(setup, tmp_path: Path, drafters=None, *overrides: str, **sections):
    """A config with its own results folder on a fixture's cache."""
    sections.setdefault("cache_dir", str(setup.folder / "cache"))
    path = write_config(tmp_path, setup.target, drafters or [("trained", setup.drafter)], **sections)
    return load_config(path, [f"prompts.source={setup.folder / 'prompts.jsonl'}", *overrides])


def error(config) -> str:
    with pytest.raises(UserError) as caught:
        evaluate(config)
    assert len(str(caught.value).splitlines()) <= 3
    return str(caught.value)


def lists(sample: dict) -> list[list[int]]:
    """A sample's acceptance lengths under every rule: chain, width, budgets."""
    return [sample["acceptance_lengths"], sample["ddtree_width"], *sample["ddtree_budget"].values()]


def walks(results: dict) -> list[list[list[int]]]:
    """[samples][rules] of the first drafter."""
    return [lists(sample) for sample in results["drafters"][0]["samples"]]


@pytest.fixture(scope="module")
def results(tiny, tmp_path_factory) -> dict:
    """The trained drafter as the reference, and a random one."""
    folder = tmp_path_factory.mktemp("two")
    drafters = [("trained", tiny.drafter), ("random", save_drafter(folder / "random", drafter_json()))]
    return evaluate(beside(tiny, folder, drafters))


@pytest.fixture
def copied(tiny, tmp_path) -> Path:
    """A copy of the tiny cache, to be spoilt."""
    return Path(shutil.copytree(tiny.folder / "cache", tmp_path / "cache"))


@pytest.fixture
def no_draft(monkeypatch):
    monkeypatch.setattr(evaluation, "walk_samples", lambda *_: pytest.fail("drafted before the error was found"))


# Bad inputs


@pytest.mark.usefixtures("no_draft")
@pytest.mark.parametrize("inside", ["", "deeper/still"])
def test_a_results_folder_that_cannot_be_is_refused_before_any_draft(tiny, tmp_path, inside):
    (tmp_path / "file").write_text("")
    folder = tmp_path / "file" / inside
    config = beside(tiny, tmp_path, results_dir=str(folder))
    assert f"{folder}: results cannot be written there" in error(config)


def test_two_references_are_refused_naming_the_first(tiny, tmp_path):
    with pytest.raises(UserError, match=r"drafters\.1\.reference must be false: drafters\.0 is the reference already"):
        beside(tiny, tmp_path, [("a", tiny.drafter), ("b", tiny.drafter)], "drafters.1.reference=true")


def test_no_drafters_says_where_they_are_listed(tiny, tmp_path):
    config = beside(tiny, tmp_path, None, "drafters=[]", "extract.layers=[0]")
    assert error(config) == "no drafters to evaluate: list them under drafters in the config"


@pytest.mark.usefixtures("no_draft")
@pytest.mark.parametrize("there", ["nothing", "a file"])
def test_no_cache_says_what_to_run(tiny, tmp_path, there):
    folder = tmp_path / "nowhere"
    if there == "a file":
        folder.write_text("")
    message = error(beside(tiny, tmp_path, cache_dir=str(folder)))
    assert message.startswith(f"{folder}: no cache here")
    assert "dflash-eval extract" in message


@pytest.mark.usefixtures("no_draft")
def test_an_unfinished_cache_says_how_to_resume(tiny, tmp_path, copied):
    manifest = cachefile.read_manifest(copied)
    cachefile.write_manifest(copied, dataclasses.replace(manifest, complete=False))
    message = error(beside(tiny, tmp_path, cache_dir=str(copied)))
    assert message.startswith(f"{copied}: the extraction is not finished")
    assert "dflash-eval extract" in message


@pytest.mark.usefixtures("no_draft")
@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("target.model=other/target", "target.model"),
        ("target.revision=v2", "target.revision"),
        ("prompts.limit=2", "prompts.limit"),
        ("prompts.enable_thinking=true", "prompts.enable_thinking"),
        ("completions.max_new_tokens=41", "completions.max_new_tokens"),
        ("completions.temperature=0.5", "completions.temperature"),
    ],
)
def test_the_cache_of_something_else_is_refused_with_the_key_that_differs(tiny, tmp_path, override, key):
    message = error(beside(tiny, tmp_path, None, override))
    assert f"{tiny.folder / 'cache'} is the cache of something else: {key}: the cache has " in message
    assert "cache_dir" in message


@pytest.mark.usefixtures("no_draft")
def test_completions_edited_after_the_extraction_are_refused(tiny, tmp_path, copied):
    """Their states are those of other tokens."""
    path = copied / "completions.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    rows[1]["completion_ids"][3] ^= 1
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    message = error(beside(tiny, tmp_path, cache_dir=str(copied)))
    assert "completions.jsonl" in message
    assert rows[1]["id"] in message


@pytest.mark.usefixtures("no_draft")
def test_a_width_above_the_vocabulary_is_refused(tiny, tmp_path):
    message = error(beside(tiny, tmp_path, None, f"evaluate.width={VOCABULARY + 1}"))
    assert message == f"evaluate.width {VOCABULARY + 1} is above the vocabulary of {VOCABULARY}"


def broken_weights(folder: Path) -> Path:
    broken = save_drafter(folder / "broken", drafter_json())
    path = broken / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    return broken


def nan_weights(folder: Path) -> Path:
    broken = save_drafter(folder / "broken", drafter_json())
    state = load_file(broken / "model.safetensors")
    save_file({**state, "norm.weight": torch.full((32,), math.nan)}, broken / "model.safetensors")
    return broken


def missing_layer(folder: Path) -> Path:
    dflash = {"target_layer_ids": [0, 2, 5], "mask_token_id": 256}
    return save_drafter(folder / "broken", drafter_json(dflash_config=dflash))


FAULTS = {
    broken_weights: "not a whole safetensors file",
    nan_weights: "norm.weight holds NaN (32 of 32",
    missing_layer: "needs layers 5",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_drafter_alone_that_fails_is_an_error_that_names_it(tiny, tmp_path, fault):
    message = error(beside(tiny, tmp_path, [("unsound", fault(tmp_path))]))
    assert FAULTS[fault] in message
    assert str(tmp_path / "broken") in message


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_drafter_that_fails_is_said_and_the_others_are_judged_all_the_same(tiny, tmp_path, fault, first, capsys):
    drafters = [("trained", tiny.drafter), ("unsound", fault(tmp_path))]
    config = beside(tiny, tmp_path, drafters[::-1] if first else drafters)
    results = evaluate(config)
    assert [drafter["name"] for drafter in results["drafters"]] == ["trained"]
    assert results["drafters"][0]["samples"] == evaluate(tiny.config)["drafters"][0]["samples"]
    [failed] = results["failed"]
    assert failed["name"] == "unsound"
    assert FAULTS[fault] in failed["error"]
    assert "unsound failed, the others go on" in capsys.readouterr().err
    assert "unsound failed" in (config.results_dir / "report.md").read_text()
    assert "unsound failed" in printed(results)


def test_all_drafters_failing_is_the_first_ones_error(tiny, tmp_path):
    drafters = [("a", nan_weights(tmp_path / "a")), ("b", nan_weights(tmp_path / "b"))]
    assert error(beside(tiny, tmp_path, drafters)).startswith("none of the 2 drafters can be judged; the first: a (")


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_states_that_are_not_finite_are_told_with_sample_layer_and_position(tiny, tmp_path, copied, value):
    """Written with the digest renewed, as an extraction of a model that overflows would."""
    manifest = cachefile.read_manifest(copied)
    sample = Cache(copied).samples[3]
    with h5py.File(copied / "states-00000.h5", "r+") as file:
        index = file["sample_ids"].asstr()[:].tolist().index(sample.id)
        file["hidden/2"][file["offsets"][index] + 7, 5] = value
    manifest.shards[0].sha256 = cachefile.sha256(copied / "states-00000.h5")
    cachefile.write_manifest(copied, manifest)
    message = error(beside(tiny, tmp_path, cache_dir=str(copied)))
    assert f"{copied}: the cached states are not finite: sample '{sample.id}', layer 2, position 7" in message


def test_layers_that_several_drafters_read_are_read_once(tiny, tmp_path, monkeypatch):
    dflash = {"target_layer_ids": [4, 0], "mask_token_id": 256}
    other = save_drafter(tmp_path / "other", drafter_json(dflash_config=dflash))
    config = beside(tiny, tmp_path, [("trained", tiny.drafter), ("other", other)])
    read = []
    from_stored = cachefile.from_stored
    monkeypatch.setattr(
        cachefile, "from_stored", lambda array, dtype: (read.append(len(array)), from_stored(array, dtype))[1]
    )
    held = walks(evaluate(config))
    samples = Cache(config.cache_dir).samples
    tokens = sum(map(len, samples))
    assert sorted(read) == sorted([tokens, tokens, *map(len, samples)])  # 0 and 4 whole; 2, which one reads, by sample
    monkeypatch.setattr(evaluation, "free_bytes", lambda _: 0)  # no memory to hold them: the same walks
    assert walks(evaluate(config)) == held


def scarce(limit: int, work):
    """`work` on a device that has no memory for more than `limit` blocks."""

    def limited(self, block_embeds, *arguments):
        if len(block_embeds) > limit:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3 GiB")
        return work(self, block_embeds, *arguments)

    return limited


def test_out_of_memory_halves_the_blocks_goes_on_and_says_so_once(tiny, tmp_path, monkeypatch, capsys):
    whole = walks(evaluate(tiny.config))
    monkeypatch.setattr(DFlashDrafter, "draft", scarce(3, DFlashDrafter.draft))
    config = beside(tiny, tmp_path, None, "evaluate.anchors=all")
    assert walks(evaluate(config)) == whole
    assert capsys.readouterr().err.count("out of memory at ") == 1


def test_out_of_memory_for_a_single_block_fails_the_drafter(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(DFlashDrafter, "draft", scarce(0, DFlashDrafter.draft))
    with pytest.raises(RunError, match="out of memory with a single one of its blocks"):
        evaluate(beside(tiny, tmp_path))


# Completions without a cycle


def from_file(tiny, folder: Path, completions: list[list[int]]):
    """The config of a new cache whose completions are read from a file."""
    rows = [{"id": f"p{i}", "completion_ids": ids} for i, ids in enumerate(completions)]
    (folder / "said.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    said = {"source": "file", "file": str(folder / "said.jsonl")}
    config = load_config(write_config(folder, tiny.target, [("trained", tiny.drafter)], completions=said))
    extract(config, say=lambda _: None)
    return config


def printed(results: dict) -> str:
    out = io.StringIO()
    print_report(results, Console(file=out, width=200))
    return out.getvalue()


def test_completions_of_zero_and_one_token_are_kept_and_not_divided_by(tiny, tmp_path):
    told = [sample.completion_ids for sample in Cache(tiny.folder / "cache").samples]
    config = from_file(tiny, tmp_path, [[], told[1], [65], *told[3:]])
    results = evaluate(config)
    drafter = results["drafters"][0]
    assert [sample["id"] for sample in drafter["samples"]] == [f"p{i}" for i in range(len(PROMPTS))]
    assert results["cache"]["samples"] == len(PROMPTS)
    assert results["cache"]["completion_tokens"] == sum(map(len, told)) - len(told[0]) - len(told[2]) + 1
    own = walks(results)
    assert own[0] == own[2] == [[]] * len(RULES)
    with_a_cycle = [rules for rules in own if rules[0]]
    assert len(with_a_cycle) == len(PROMPTS) - 2
    assert drafter["tau"] == pytest.approx(np.mean([np.mean(rules[0]) for rules in with_a_cycle]))
    assert drafter["ddtree_width"]["tau"] == pytest.approx(np.mean([np.mean(rules[1]) for rules in with_a_cycle]))
    # The same prompts say the same as beside completions that have cycles.
    alone = {sample["id"]: lists(sample) for sample in evaluate(tiny.config)["drafters"][0]["samples"]}
    assert own[1] == alone["p1"]
    assert own[3:] == [alone[f"p{i}"] for i in range(3, len(PROMPTS))]


def test_completions_without_a_cycle_are_counted_in_the_report(tiny, tmp_path):
    config = from_file(tiny, tmp_path, [[], [65], *[[70, 71, 72]] * (len(PROMPTS) - 2)])
    text = printed(evaluate(config))
    report = (config.results_dir / "report.md").read_text()
    for said in (" ".join(text.split()), report):
        assert f"{len(PROMPTS)} prompts" in said
        assert "2 of the completions have 0 or 1 tokens" in said
    assert f"| p0 | {'0 or 1'} | - |" in report


def test_where_no_completion_has_a_cycle_tau_is_null_and_the_report_is_printed_all_the_same(tiny, tmp_path):
    config = from_file(tiny, tmp_path, [[], [65]] * (len(PROMPTS) // 2))
    random = save_drafter(tmp_path / "random", drafter_json())
    config = load_config(
        tmp_path / "config.yaml",
        [f"drafters=[{{name: a, checkpoint: {tiny.drafter}, reference: true}}, {{name: b, checkpoint: {random}}}]"],
    )
    results = evaluate(config)
    for drafter in results["drafters"]:
        assert drafter["tau"] is drafter["tau_micro"] is drafter["tau_ci95"] is None
        assert drafter["ddtree_width"]["tau"] is None
        assert all(entry["tau"] is None for entry in drafter["ddtree_budget"])
        assert (drafter["cycles"], drafter["position_acceptance"]) == (0, [])
    assert {row["ratio"] for row in results["comparisons"]} == {None}
    for text in (printed(results), (config.results_dir / "report.md").read_text()):
        assert not re.search(r"\b(nan|None|inf)\b", text)
    json.loads((config.results_dir / "results.json").read_text(), parse_constant=lambda name: pytest.fail(name))


# The results


def test_results_json_is_what_evaluate_returns_and_has_every_key_of_the_contract(results, tiny, tmp_path):
    config = beside(tiny, tmp_path)
    returned = evaluate(config)
    written = json.loads((config.results_dir / "results.json").read_text())
    assert written == json.loads(json.dumps(returned))
    assert {"schema_version", "name", "cache", "drafters", "comparisons"} <= written.keys()
    assert written["schema_version"] == 1
    assert {"fingerprint", "samples", "completion_tokens", "greedy_agreement"} <= written["cache"].keys()
    drafter = written["drafters"][0]
    assert {
        "name", "reference", "checkpoint", "format", "block_size", "target_layer_ids", "mask_token_id", "tau",
        "tau_ci95", "tau_micro", "cycles", "ddtree_width", "ddtree_budget", "position_acceptance", "expected_tau",
        "samples",
    } <= drafter.keys()  # fmt: skip
    assert drafter["ddtree_width"].keys() >= {"k", "tau", "tau_ci95"}
    assert [entry["budget"] for entry in drafter["ddtree_budget"]] == [1, 4, 16, 64]
    assert all(entry["tau"] >= 1 for entry in drafter["ddtree_budget"])
    assert {"id", "acceptance_lengths", "ddtree_width", "ddtree_budget"} <= drafter["samples"][0].keys()
    assert list(drafter["samples"][0]["ddtree_budget"]) == ["1", "4", "16", "64"]
    assert written["comparisons"] == []
    assert {
        "candidate", "reference", "metric", "candidate_value", "reference_value", "difference", "difference_ci95",
        "ratio",
    } <= results["comparisons"][0].keys()  # fmt: skip


def test_the_numbers_follow_from_the_samples_lists(results):
    for drafter in results["drafters"]:
        rules = [list(own) for own in zip(*map(lists, drafter["samples"]), strict=True)]
        shown = [drafter["tau"], drafter["ddtree_width"]["tau"], *(e["tau"] for e in drafter["ddtree_budget"])]
        for tau, own in zip(shown, rules, strict=True):
            assert tau == pytest.approx(np.mean([np.mean(lengths) for lengths in own]))
        cycles = [length for lengths in rules[0] for length in lengths]
        assert drafter["cycles"] == len(cycles)
        assert drafter["tau_micro"] == pytest.approx(sum(cycles) / len(cycles))
        assert drafter["tau_ci95"][0] <= drafter["tau"] <= drafter["tau_ci95"][1]
        shares = drafter["position_acceptance"]
        assert len(shares) == drafter["block_size"] - 1
        assert all(1 >= shallow >= deep >= 0 for shallow, deep in pairwise(shares))


def test_each_metric_of_each_candidate_is_compared_with_the_reference_and_the_signs_agree(results):
    trained, random = results["drafters"]
    values = {
        "tau": (random["tau"], trained["tau"]),
        "ddtree_width": (random["ddtree_width"]["tau"], trained["ddtree_width"]["tau"]),
        **{
            f"ddtree_budget_{ours['budget']}": (ours["tau"], theirs["tau"])
            for ours, theirs in zip(random["ddtree_budget"], trained["ddtree_budget"], strict=True)
        },
    }
    assert random["tau"] < trained["tau"]
    assert {row["metric"]: (row["candidate_value"], row["reference_value"]) for row in results["comparisons"]} == values
    for row in results["comparisons"]:
        assert (row["candidate"], row["reference"]) == ("random", "trained")
        assert row["difference"] == pytest.approx(row["candidate_value"] - row["reference_value"])
        assert row["ratio"] == pytest.approx(row["candidate_value"] / row["reference_value"])
        assert row["difference_ci95"][0] <= row["difference"] <= row["difference_ci95"][1]


# The walks


@pytest.mark.parametrize("fixture", ["tiny", "tiny_qwen3", "tiny_hybrid"])
def test_every_walk_commits_the_completion_but_its_first_token_in_steps_of_a_block_at_most(fixture, request):
    setup = request.getfixturevalue(fixture)
    samples = Cache(setup.folder / "cache").samples
    for sample, rules in zip(samples, walks(evaluate(setup.config)), strict=True):
        for lengths in rules:
            assert sum(lengths) == len(sample.completion_ids) - 1
            assert all(1 <= length <= setup.raw["block_size"] for length in lengths)
        assert all(length <= 2 for length in rules[RULES.index("1")])  # a tree of one node accepts one draft


def test_from_the_common_first_anchor_more_width_or_budget_never_commits_less(results):
    """Later anchors differ from rule to rule, so only the first cycles compare."""
    for drafter in results["drafters"]:
        for sample in drafter["samples"]:
            chain, width, *budgets = [lengths[0] for lengths in lists(sample)]
            assert chain <= width
            assert budgets == sorted(budgets)


def test_width_one_is_the_chain_and_the_whole_vocabulary_accepts_every_block(tiny, tmp_path):
    for rules in walks(evaluate(beside(tiny, tmp_path, None, "evaluate.width=1"))):
        assert rules[1] == rules[0]
    size = tiny.raw["block_size"]
    for rules in walks(evaluate(beside(tiny, tmp_path, None, f"evaluate.width={VOCABULARY}"))):
        full, rest = divmod(sum(rules[0]), size)
        assert rules[1] == [size] * full + [rest] * (rest > 0)


def test_a_budgets_walk_does_not_depend_on_the_others_not_even_on_one_beyond_the_vocabulary(tiny, tmp_path):
    budgets = [4, 64, VOCABULARY, 5000]
    drafter = evaluate(beside(tiny, tmp_path, None, f"evaluate.budgets={budgets}"))["drafters"][0]
    assert [entry["budget"] for entry in drafter["ddtree_budget"]] == budgets
    for sample, alone in zip(drafter["samples"], evaluate(tiny.config)["drafters"][0]["samples"], strict=True):
        own = sample["ddtree_budget"]
        assert (own["4"], own["64"]) == (alone["ddtree_budget"]["4"], alone["ddtree_budget"]["64"])
        assert own["64"][0] <= own[str(VOCABULARY)][0] <= own["5000"][0]


@pytest.mark.parametrize(
    "limits",
    [
        {"BLOCKS_JUDGED": {"cpu": 1}},
        {"BLOCKS_DRAFTED": {"cpu": 3}},
        {"BLOCKS_JUDGED": {"cpu": 4}, "BLOCKS_DRAFTED": {"cpu": 3}, "CONTEXT_BYTES": {"cpu": 60_000}},
        {"CONTEXT_BYTES": {"cpu": 1}},
        {"STAGES": {"cpu": ()}},
        {"STAGES": {"cpu": (1,)}},
        {"STAGES": {"cpu": (2,)}},
        {"STAGES": {"cpu": (1, 2, 3, 4)}},
    ],
    ids=str,
)
@pytest.mark.parametrize("fixture", ["tiny", "tiny_qwen3"])
def test_how_much_is_held_and_scored_at_once_changes_no_walk(fixture, limits, request, monkeypatch):
    setup = request.getfixturevalue(fixture)
    whole = walks(evaluate(setup.config))
    for name, value in limits.items():
        assert hasattr(judge, name)
        monkeypatch.setattr(judge, name, value)
    assert walks(evaluate(setup.config)) == whole


@pytest.mark.parametrize("fixture", ["tiny", "tiny_qwen3", "tiny_hybrid"])
def test_drafting_at_every_anchor_gives_the_walks_of_drafting_where_they_stand(fixture, request, monkeypatch):
    config = request.getfixturevalue(fixture).config
    monkeypatch.setitem(judge.BLOCKS_JUDGED, "cpu", 7)
    everywhere, replayed = (
        walks(evaluate(config.model_copy(update={"evaluate": config.evaluate.model_copy(update={"anchors": mode})})))
        for mode in ("all", "replay")
    )
    assert everywhere == replayed


@given(st.lists(st.integers(0, 4), min_size=1, max_size=8), st.data())
def test_groups_hold_every_block_once_in_order_with_its_own_sample(counts, data):
    owners = np.repeat(np.arange(len(counts)), counts)
    anchors = np.array([data.draw(st.integers(1, 50)) for _ in owners], dtype=np.int64)
    covered = []
    for group in group_blocks(owners, anchors):
        samples, blocks = range(*group.samples.indices(len(counts))), range(*group.blocks.indices(len(owners)))
        assert len(blocks) % len(samples) == 0
        each = len(blocks) // len(samples)
        assert each >= 1
        for block in blocks:
            assert samples[(block - blocks.start) // each] == owners[block]
            assert anchors[block] <= group.positions
        assert group.positions == anchors[blocks.start : blocks.stop].max()
        covered += blocks
    assert covered == list(range(len(owners)))


# The oracle


def in_tree(logprobs: torch.Tensor, truth: list[int], budgets: list[int]) -> list[int]:
    """Accepted drafts in the best-first tree of each budget, grown node by node from the root.

    logprobs: [drafted slots, vocabulary]. A node is the tuple of its tokens; each one taken in offers its children.
    """
    most = min(max(budgets), logprobs.shape[1])
    top = [list(zip(*(x.tolist() for x in row.topk(most)), strict=True)) for row in logprobs]
    heap = [(-lp, (token,)) for lp, token in top[0]] if top else []
    heapq.heapify(heap)
    taken: dict[tuple[int, ...], int] = {}
    while heap and len(taken) < max(budgets):
        cost, path = heapq.heappop(heap)
        taken[path] = len(taken) + 1
        if len(path) < len(top):
            for lp, token in top[len(path)]:
                heapq.heappush(heap, (cost - lp, (*path, token)))
    orders = [taken.get(tuple(truth[: i + 1]), math.inf) for i in range(len(logprobs))]
    return [sum(1 for order in orders if order <= budget) for budget in budgets]


@torch.inference_mode()
def accepted_at(target, drafter, sample, anchor: int, limit: int, width: int, budgets: list[int]) -> list[int]:
    """Accepted drafts [chain, width, budgets] of one block, drafted by the public model after a new target forward."""
    ids = sample.input_ids
    slots = min(drafter.block_size, limit - anchor)
    states = target(torch.tensor([ids[:anchor]]), output_hidden_states=True).hidden_states
    hidden = drafter(
        position_ids=torch.arange(anchor + slots)[None],
        noise_embedding=F.embedding(
            torch.tensor([[ids[anchor]] + [drafter.mask_token_id] * (slots - 1)]), target.get_input_embeddings().weight
        ),
        target_hidden=torch.cat([states[layer + 1] for layer in drafter.target_layer_ids], -1),
    )
    logprobs = target.get_output_embeddings()(hidden)[0, 1:].double().log_softmax(-1)
    truth = ids[anchor + 1 : anchor + slots]

    def among(k: int) -> int:
        inside = [token in row.topk(k).indices for token, row in zip(truth, logprobs, strict=False)]
        return inside.index(False) if False in inside else len(inside)

    return [among(1), among(width), *in_tree(logprobs, truth, budgets)]


def check_against_the_heap(setup, config) -> list[list[list[int]]]:
    """Hold every rule's walks against a loop of its own; returns them."""
    oracles = pytest.importorskip("oracles")
    target, drafter = oracles.load_target(setup.target), oracles.load_public_drafter(setup.drafter)
    width, budgets = config.evaluate.width, list(config.evaluate.budgets)
    ours = walks(evaluate(config))
    for sample, rules in zip(Cache(config.cache_dir).samples, ours, strict=True):
        limit = len(sample.prompt_ids) + config.completions.max_new_tokens
        known: dict[int, list[int]] = {}
        for rule, lengths in enumerate(rules):
            anchor, expected = len(sample.prompt_ids), []
            while anchor + 1 < len(sample):
                if anchor not in known:
                    known[anchor] = accepted_at(target, drafter, sample, anchor, limit, width, budgets)
                expected.append(min(known[anchor][rule] + 1, len(sample) - anchor - 1))
                anchor += expected[-1]
            assert lengths == expected, f"{sample.id}, {RULES[rule]}"
    return ours


@pytest.mark.parametrize("fixture", ["tiny", "tiny_qwen3", "tiny_hybrid"])
def test_width_and_budget_walks_equal_a_loop_with_the_public_drafter_and_a_heap(fixture, request):
    setup = request.getfixturevalue(fixture)
    ours = check_against_the_heap(setup, setup.config)
    means = [np.mean([np.mean(rules[rule]) for rules in ours]) for rule in range(len(RULES))]
    assert means[1] > means[0] > 1, "rules that accept alike would hide a fault"
    assert means[2] < means[3] < means[5]


def test_blocks_that_the_limit_shortens_are_drafted_without_the_slots_beyond_it(tiny, tmp_path):
    """Every block is shorter than the drafter's six slots, which see each other: pieces of four tokens, limit four."""
    pieces = [
        {"id": f"{sample.id}-{start}", "prompt": "x", "completion_ids": sample.completion_ids[start : start + 4]}
        | {"prompt_ids": sample.prompt_ids + sample.completion_ids[:start]}
        for sample in Cache(tiny.folder / "cache").samples
        for start in range(0, len(sample.completion_ids) - 4, 3)
    ]
    for name in ("prompts.jsonl", "said.jsonl"):
        keys = ("id", "prompt") if name == "prompts.jsonl" else ("id", "prompt_ids", "completion_ids")
        rows = [json.dumps({key: piece[key] for key in keys}) + "\n" for piece in pieces]
        (tmp_path / name).write_text("".join(rows))
    said = {"source": "file", "file": str(tmp_path / "said.jsonl"), "max_new_tokens": 4}
    config = load_config(write_config(tmp_path, tiny.target, [("trained", tiny.drafter)], completions=said))
    extract(config, say=lambda _: None)
    ours = check_against_the_heap(tiny, config)
    assert len(ours) > 40
    assert {1, 2, 3} == {rules[0][0] for rules in ours}


def slow_expected_tau(target, drafter, sample, limit: int, warp) -> float:
    """Both models run on the whole sequence, one block at a time; V(s) from the end backwards."""
    start, end, ids = len(sample.prompt_ids), len(sample), sample.input_ids
    embed = target.get_input_embeddings().weight
    with torch.inference_mode():
        out = target(torch.tensor([ids]), output_hidden_states=True)
        p = warp(out.logits[0].double()).log_softmax(-1)
        features = torch.cat([out.hidden_states[layer + 1] for layer in drafter.target_layer_ids], -1)
        left = {end - 1: 0.0}
        for s in range(end - 2, start - 1, -1):
            slots = min(drafter.block_size, start + limit - s)
            block = torch.tensor([[ids[s]] + [drafter.mask_token_id] * (slots - 1)])
            hidden = drafter(
                position_ids=torch.arange(s + slots)[None],
                noise_embedding=F.embedding(block, embed),
                target_hidden=features[:, :s],
            )
            q = warp(target.get_output_embeddings()(hidden)[0].double()).log_softmax(-1)
            reached, left[s] = 1.0, 1.0
            for i in range(1, min(slots, end - s)):
                accept = min(1.0, math.exp(q[i, ids[s + i]]) / math.exp(p[s + i - 1, ids[s + i]]))
                left[s] += reached * (1 - accept) * left[s + i]
                reached *= accept
            left[s] += reached * left[min(s + slots, end - 1)]
    return (end - 1 - start) / left[start]


@pytest.mark.parametrize(
    ("fixture", "filters"), [("tiny", {}), ("tiny", {"top_k": 12, "top_p": 0.7}), ("tiny_qwen3", {"top_p": 0.9})]
)
def test_expected_tau_of_a_sampled_cache_equals_a_slow_recursion_over_both_models(fixture, filters, request, tmp_path):
    import oracles

    warpers = LogitsProcessorList([TemperatureLogitsWarper(0.8)])
    warpers += [TopKLogitsWarper(filters["top_k"])] if "top_k" in filters else []
    warpers += [TopPLogitsWarper(filters["top_p"])] if filters else []
    setup = request.getfixturevalue(fixture)
    sections = {
        "completions": {"temperature": 0.8, "max_new_tokens": 14, **filters},
        "prompts": {"source": str(setup.folder / "prompts.jsonl")},
    }
    config = load_config(write_config(tmp_path, setup.target, [("trained", setup.drafter)], **sections))
    extract(config, say=lambda _: None)
    result = evaluate(config)["drafters"][0]
    target, drafter = oracles.load_target(setup.target), oracles.load_public_drafter(setup.drafter)
    samples = [sample for sample in Cache(config.cache_dir).samples if len(sample.completion_ids) > 1]
    warp = functools.partial(warpers, None)
    taus = [slow_expected_tau(target, drafter, sample, 14, warp) for sample in samples]
    assert len(taus) >= 3
    assert max(taus) > 1.2
    assert result["expected_tau"] == pytest.approx(np.mean(taus), rel=1e-4)
    assert "Expected τ under rejection sampling at temperature 0.8" in (config.results_dir / "report.md").read_text()


@torch.inference_mode()
def cycles_of_rejection_sampling(target, drafter, prompt_ids: list[int], limit: int, stop_ids, warp) -> int:
    """One answer decoded as a serving engine does at a temperature above 0; how many cycles it took."""
    embed, head = target.get_input_embeddings().weight, target.get_output_embeddings()

    def draw(weights: torch.Tensor) -> int:
        return int(torch.multinomial(weights, 1))

    ids = list(prompt_ids)
    ids.append(draw(warp(target(torch.tensor([ids])).logits[0, -1:]).softmax(-1)[0]))
    end, cycles = len(prompt_ids) + limit, 0
    while len(ids) < end and ids[-1] not in stop_ids:
        start, cycles = len(ids) - 1, cycles + 1
        slots = min(drafter.block_size, end - start)
        states = target(torch.tensor([ids[:start]]), output_hidden_states=True).hidden_states
        block = torch.tensor([[ids[start]] + [drafter.mask_token_id] * (slots - 1)])
        hidden = drafter(
            position_ids=torch.arange(start + slots)[None],
            noise_embedding=F.embedding(block, embed),
            target_hidden=torch.cat([states[layer + 1] for layer in drafter.target_layer_ids], -1),
        )
        q = warp(head(hidden)[0]).softmax(-1)
        drafts = [draw(q[slot]) for slot in range(1, slots)]
        p = warp(target(torch.tensor([ids + drafts])).logits[0, start:]).softmax(-1)
        for slot, token in enumerate([*drafts, None]):
            if token is not None and torch.rand(()) < p[slot, token] / q[slot + 1, token]:
                ids.append(token)
            else:
                ids.append(draw(p[slot] if token is None else (p[slot] - q[slot + 1]).clamp_min(0)))
                break
            if len(ids) == end or ids[-1] in stop_ids:
                break
    return cycles


def test_expected_cycles_are_those_of_rejection_sampling_run_on_the_target(tiny, tmp_path):
    import oracles

    answers, limit, prompt = 250, 9, PROMPTS[1]
    rows = [json.dumps({"id": f"p{i}", "prompt": prompt}) + "\n" for i in range(answers)]
    (tmp_path / "prompts.jsonl").write_text("".join(rows))
    sections = {"completions": {"temperature": 0.7, "top_p": 0.95, "max_new_tokens": limit, "seed": 5}}
    config = load_config(write_config(tmp_path, tiny.target, [("trained", tiny.drafter)], **sections))
    extract(config, say=lambda _: None)
    cache = Cache(config.cache_dir)
    embedding, head = cache.head()
    spec = config.drafters[0]
    ours = load_drafter(spec, read_config(spec), torch.device("cpu"), torch.float32)
    _, taus = judge.walk_samples(ours, cache, embedding, head, config.evaluate, lambda _: None)
    tokens = np.array([len(sample.completion_ids) - 1 for sample in cache.samples])
    expected = np.where(tokens > 0, tokens / taus, 0.0)

    target, drafter = oracles.load_target(tiny.target), oracles.load_public_drafter(tiny.drafter)
    stop_ids = set(target.generation_config.eos_token_id)
    warp = functools.partial(LogitsProcessorList([TemperatureLogitsWarper(0.7), TopPLogitsWarper(0.95)]), None)
    torch.manual_seed(11)
    prompt_ids = cache.samples[0].prompt_ids
    drawn = np.array([
        cycles_of_rejection_sampling(target, drafter, prompt_ids, limit, stop_ids, warp) for _ in range(answers)
    ])  # fmt: skip
    error = math.hypot(expected.std() / math.sqrt(answers), drawn.std() / math.sqrt(answers))
    assert abs(expected.mean() - drawn.mean()) < 3.5 * error
    assert expected.mean() < tokens.mean() - 8 * error, "drafts that are never accepted would prove nothing"


def test_a_greedy_cache_has_no_expected_tau(results):
    assert [drafter["expected_tau"] for drafter in results["drafters"]] == [None] * len(results["drafters"])
