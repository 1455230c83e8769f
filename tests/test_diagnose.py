"""The diagnosis: planted faults come first with the right sentence, and a healthy drafter is not accused."""

from __future__ import annotations

import json
from collections import Counter
from importlib.resources import files
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
import yaml
from conftest import MASK, PROMPTS, save_drafter, train_on_cache, write_config
from safetensors.torch import load_file
from torch.nn import functional as F

from dflash_eval import diagnose as diagnosing
from dflash_eval.cache import Cache
from dflash_eval.config import load_config
from dflash_eval.demo.prompts import composed_prompts
from dflash_eval.diagnose import diagnose
from dflash_eval.diagnosis import ranking
from dflash_eval.diagnosis.counterfactuals import Counterfactual, context, match_rows
from dflash_eval.diagnosis.excerpts import Excerpts
from dflash_eval.diagnosis.reading import Reading, read_as
from dflash_eval.diagnosis.report import markdown
from dflash_eval.diagnosis.symptoms import symptoms
from dflash_eval.diagnosis.target_facts import target_facts
from dflash_eval.drafter.config import DrafterConfig
from dflash_eval.drafter.model import DFlashDrafter
from dflash_eval.errors import UserError
from dflash_eval.evaluate import evaluate, fitting_cache
from dflash_eval.extract import extract

MORE_PROMPTS = [
    "open a file", "divide two numbers", "how do I test it?", "print the date", "a class for a queue", "sum the digits",
]  # fmt: skip


class Setup:
    """A cache with neighbouring layers, and the healthy drafter whose checkpoint faults are planted in."""

    def __init__(self, config_path: Path, folder: Path, healthy: Path, sets: list[str]) -> None:
        self.config_path, self.folder, self.healthy, self.sets = config_path, folder, healthy, sets
        self.raw = json.loads((healthy / "config.json").read_text())
        self.ids = self.raw["dflash_config"]["target_layer_ids"]

    @property
    def cache(self) -> Cache:
        return Cache(self.folder / "cache")

    def diagnose(self, checkpoint: Path, **changes) -> dict:
        sets = [f"drafters=[{{name: mine, checkpoint: {checkpoint}}}]", *self.sets]
        config = load_config(self.config_path, [*sets, *(f"{key}={value}" for key, value in changes.items())])
        return diagnose(config, "mine", self.config_path)

    def planted(self, folder: Path, fault) -> Path:
        raw, state = json.loads(json.dumps(self.raw)), load_file(self.healthy / "model.safetensors")
        fault(self, raw, state)
        return save_drafter(folder, raw, state)


def shift_layers(setup, raw, state):
    raw["dflash_config"]["target_layer_ids"] = [layer + 1 for layer in setup.ids]


def shift_labels(setup, raw, state):
    raw["sample_from_anchor"] = True


def wrong_mask(setup, raw, state):
    """A token of the text's own."""
    told = Counter(token for sample in setup.cache.samples for token in sample.completion_ids)
    raw["dflash_config"]["mask_token_id"] = told.most_common(1)[0][0]


def wrong_rope(setup, raw, state):
    raw["rope_theta"] = 3e7 if raw["rope_theta"] == 1e4 else 1e3


def wrong_window(setup, raw, state):
    raw["layer_types"] = ["sliding_attention"] * len(raw["layer_types"])
    raw["sliding_window"] = 3


def swap_fc_blocks(setup, raw, state):
    blocks = list(state["fc.weight"].float().chunk(len(setup.ids), dim=1))
    blocks[0], blocks[-1] = blocks[-1], blocks[0]
    state["fc.weight"] = torch.cat(blocks, dim=1)


def normed_last_layer(setup, raw, state):
    """The last of its layers becomes the target's last, normed: the linear map of that which best gives what fc had."""
    last = setup.cache.manifest.provenance["target_layers"] - 1
    size, own = raw["hidden_size"], setup.ids[-1]
    excerpts = Excerpts(setup.cache, [own, last], 100, 10**6)
    assert excerpts.add_normed(last, diagnosing._norm_weight(setup.cache), setup.cache.head()[1].float())
    features = torch.cat([excerpts.features(sample.id, (-1, own))[1:].float() for sample in excerpts.samples])
    normed, had = features.double().split(size, dim=1)
    blocks = list(state["fc.weight"].double().chunk(len(setup.ids), dim=1))
    ridge = 1e-3 * normed.square().sum(0).mean() * torch.eye(size, dtype=torch.float64)
    blocks[-1] = torch.linalg.solve(normed.T @ normed + ridge, normed.T @ had @ blocks[-1].T).T
    state["fc.weight"] = torch.cat(blocks, dim=1).float()
    raw["dflash_config"]["target_layer_ids"] = [*setup.ids[:-1], last]


def reduced_vocabulary(setup, raw, state):
    """A head of its own over half of the vocabulary; returns the target's ids of its rows."""
    head = setup.cache.head()[1].float()
    told = {token for sample in setup.cache.samples for token in sample.input_ids}
    ids = torch.tensor(sorted(told | set(range(1, len(head), 2))))
    raw["draft_vocab_size"], state["lm_head.weight"] = len(ids), head[ids]
    state["embed_tokens.weight"] = setup.cache.head()[0].float()
    return ids


def without_d2t(setup, raw, state):
    reduced_vocabulary(setup, raw, state)


def zero_d2t(setup, raw, state):
    state["d2t"] = torch.zeros(len(reduced_vocabulary(setup, raw, state)), dtype=torch.int64)


FAULTS = {
    shift_layers: ("layer ids -1", "one too high"),
    shift_labels: ("slot k read as predicting k", "slot k predicts the token at k, not at k + 1"),
    wrong_mask: ("mask token", "the mask token is wrong"),
    wrong_rope: ("RoPE base", "the RoPE base is wrong"),
    wrong_window: ("sliding layers as full, not causal", "trained with full attention, both ways"),
    swap_fc_blocks: ("layers in order", "the blocks of fc's input stand in another order"),
    normed_last_layer: ("last layer behind the final norm", "behind the final norm in training"),
    without_d2t: ("d2t found from the output head's rows", "d2t is missing or wrong"),
    zero_d2t: ("d2t found from the output head's rows", "d2t is missing or wrong"),
}


def names(fault) -> str:
    return fault.__name__


def check_ranked_first(result: dict, fault) -> None:
    change, cause = FAULTS[fault]
    first = result["counterfactuals"][0]
    assert first["change"].startswith(change), [row["change"] for row in result["counterfactuals"][:4]]
    assert first["accused"]
    assert cause in result["verdicts"][0]
    assert first["look"] in result["verdicts"][0]
    assert first["tau"] > result["tau"]


@pytest.fixture(scope="module")
def small(tiny, tmp_path_factory):
    """A tiny drafter trained on a cache of twelve prompts with its layers' neighbours: six prove little."""
    folder = tmp_path_factory.mktemp("neighbours")
    lines = [json.dumps({"id": f"p{i}", "prompt": prompt}) + "\n" for i, prompt in enumerate([*PROMPTS, *MORE_PROMPTS])]
    (folder / "prompts.jsonl").write_text("".join(lines))
    healthy = save_drafter(folder / "drafter", tiny.raw)
    path = write_config(folder, tiny.target, [("mine", healthy)], extract={"extra_layers": "neighbours"})
    extract(load_config(path), say=lambda _: None)
    save_drafter(healthy, tiny.raw, train_on_cache(tiny.raw, Cache(folder / "cache"), 240))
    return Setup(path, folder, healthy, [])


# The tiny target's text repeats itself too much, and its last layer is too near to normed, for the other two.
@pytest.mark.parametrize(
    "fault", [fault for fault in FAULTS if fault not in (shift_labels, normed_last_layer)], ids=names
)
def test_a_planted_fault_is_ranked_first(small, tmp_path, fault):
    check_ranked_first(small.diagnose(small.planted(tmp_path / "mine", fault)), fault)


def test_a_healthy_drafter_is_not_accused(small):
    result = small.diagnose(small.healthy)
    assert result["verdicts"] == []
    assert len(result["counterfactuals"]) >= 14


def test_neighbours_are_extracted(small):
    assert small.cache.manifest.layers == [0, 1, 2, 3, 4, 5]


def test_labels_that_were_shifted_in_training_are_found(small, tmp_path):
    from drafters import train_shifted

    result = small.diagnose(save_drafter(tmp_path / "mine", small.raw, train_shifted(small, 120)))
    assert result["counterfactuals"][0]["change"] == "slot k read as predicting k+1"
    assert "shifted by one, as in a causal language model" in result["counterfactuals"][0]["cause"]


DEMO = load_config(Path("configs/demo.yaml"))


def row_of(test, gain, tau_gain, worth=None, comparisons=10):
    """The row of a change on so many prompts, τ 3 as configured."""
    base = np.full(len(gain), 3.0)
    prompts = [f"p{i}" for i in range(len(gain))]
    return ranking._row(test, gain, worth, base + tau_gain, base, False, prompts, comparisons, DEMO)


def test_features_of_the_anchor_must_gain_more_than_the_last_positions_are_worth(small):
    held, without = context(Reading(DrafterConfig.from_dict(small.raw), torch.float32))
    assert held.outweighs == without.change
    noise = np.random.default_rng(0).normal(0, 0.05, (2, 10))
    rows = [row_of(held, gain + noise[0], 0.3 + noise[1], -0.5 + noise[1]) for gain in (0.2, 0.8)]
    assert [row["accused"] for row in rows] == [False, True]
    assert row_of(without, 0.2 + noise[0], 0.3 + noise[1])["accused"]


def test_changes_that_do_nothing_are_hardly_ever_accused(monkeypatch):
    """Ten of them at once, with noise so large that the least gains are often passed, on five and on ten prompts."""
    monkeypatch.setattr(ranking, "DRAWS", 1000)
    rng = np.random.default_rng(0)
    test = Counterfactual("kind", "change", None, "cause", "look")
    for prompts in (5, 10):
        accused = 0
        for _ in range(100):
            gains = rng.normal(0, 0.5, (10, prompts))
            accused += any(row_of(test, gain, gain + rng.normal(0, 0.1, prompts))["accused"] for gain in gains)
        assert accused <= 5


def test_every_state_is_read_once(small, monkeypatch):
    reads: Counter = Counter()
    read = h5py.Dataset.__getitem__

    def counted(dataset, key, *rest):
        if dataset.name.startswith("/hidden/"):
            reads[dataset.name, str(key)] += 1
        return read(dataset, key, *rest)

    monkeypatch.setattr(h5py.Dataset, "__getitem__", counted)
    small.diagnose(small.healthy)
    assert set(reads.values()) == {1}


def test_tau_as_configured_is_that_of_evaluate(small, monkeypatch):
    monkeypatch.setattr(diagnosing, "TOKENS", 1000)
    result = small.diagnose(small.healthy)
    expected = evaluate(load_config(small.config_path))["drafters"][0]["tau"]
    assert result["tau"] == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize(
    ("shift", "position_shift", "restarted"),
    [(1, 0, False), (-1, 0, False), (0, 1, False), (0, -1, False), (0, 0, True)],
)
def test_a_reading_of_context_and_positions_equals_plain_attention(tiny, shift, position_shift, restarted):
    """Against the public class, which takes context and positions as they are given."""
    public = pytest.importorskip("dflash.model", reason="the public dflash package is not installed (make setup)")
    from transformers import Qwen3Config

    cache = Cache(tiny.folder / "cache")
    sample, (embedding, _) = cache.samples[0], cache.head()
    state = load_file(tiny.drafter / "model.safetensors")
    model = public.DFlashDraftModel(Qwen3Config(**tiny.raw)).eval()
    model.load_state_dict(state, strict=False)
    drafter = DFlashDrafter(DrafterConfig.from_dict(tiny.raw))
    drafter.load_state_dict(state)
    reading = Reading(drafter.config, torch.float32, shift, position_shift, restarted)
    s = len(sample.prompt_ids) + 5
    features = cache.features(sample.id, drafter.config.target_layer_ids)[None]
    block = F.embedding(torch.tensor([[sample.input_ids[s]] + [MASK] * 5]), embedding)
    own = torch.arange(6) + (0 if restarted else s + position_shift)
    with torch.inference_mode():
        read = read_as(drafter, reading)
        ours = read(block[None], torch.tensor([[s]]), read.context(features))[0, 0]
        positions = torch.cat([torch.arange(s + shift), own])[None]
        theirs = model(position_ids=positions, noise_embedding=block, target_hidden=features[:, : s + shift])[0]
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_rows_of_a_head_are_found_again_and_strangers_are_not():
    torch.manual_seed(0)
    head = torch.randn(500, 24)
    ids = torch.randperm(500)[:120]
    assert torch.equal(match_rows(head[ids].bfloat16().float(), head), ids)
    assert match_rows(torch.randn(120, 24), head) is None


def test_the_normed_last_layer_is_the_targets(tiny, tmp_path):
    """Behind the norm and the head it says the text, whatever form the norm's weight has."""
    path = write_config(tmp_path, tiny.target, [("mine", tiny.drafter)], extract={"extra_layers": [5]})
    extract(load_config(path), say=lambda _: None)
    cache = Cache(tmp_path / "cache")
    weight, head = diagnosing._norm_weight(cache), cache.head()[1]
    for form in (weight, weight - 1):
        excerpts = Excerpts(cache, [5], 6, 40)
        assert excerpts.add_normed(5, form, head)
        sample = excerpts.samples[0]
        start = len(sample.prompt_ids) - 1
        said = (excerpts.features(sample.id, (-1,))[start:-1] @ head.T).argmax(-1).tolist()
        assert said == sample.completion_ids
    assert not Excerpts(cache, [5], 6, 40).add_normed(5, torch.randn(32), head)


def numbers(early, top8, confidence, **changes):
    slots = 4
    own = {
        "top1": [early] * slots,
        "top8": [top8] * slots,
        "confidence": [confidence] * slots,
        "entropy": [1.0] * slots,
    }
    by_distance = {name: {"tokens": 1, "top1": 0.6} for name in ("near", "middle", "far")}
    rest = {
        "features_worth": None,
        "repeats_anchor": 0.0,
        "text_repeats_anchor": 0.0,
        "one_ahead": 0.0,
        "by_distance": by_distance,
    }
    return {**own, **rest, **changes}


@pytest.mark.parametrize(
    ("own", "words"),
    [
        (numbers(0.6, 0.9, 0.65), []),
        (numbers(0.2, 0.3, 0.2), ["does not get, or cannot use"]),
        (numbers(0.2, 0.3, 0.2, features_worth=0.1), ["does not get, or cannot use"]),
        (numbers(0.2, 0.3, 0.2, features_worth=2.0), ["features reach it, which tell it 2.0 nats a token more"]),
        (numbers(0.6, 0.9, 0.6, top1=[0.7, 0.4, 0.2, 0.1]), ["falls steeply"]),
        (numbers(0.55, 0.85, 0.1), ["soft labels"]),
        (numbers(0.55, 0.85, 0.95), ["overconfident"]),
        (numbers(0.6, 0.9, 0.65, repeats_anchor=0.5), ["one too early"]),
        (numbers(0.6, 0.9, 0.65, one_ahead=0.7), ["one too late"]),
        (
            numbers(
                0.6, 0.9, 0.65, by_distance={"near": {"tokens": 1, "top1": 0.7}, "far": {"tokens": 9, "top1": 0.2}}
            ),
            ["distance from the prompt"],
        ),
    ],
)
def test_numbers_are_told_by_their_symptoms(own, words):
    found = symptoms(own, None)
    assert len(found) == len(words)
    for line, word in zip(found, words, strict=True):
        assert word in line


def test_what_the_cache_cannot_answer_is_listed_with_the_command(tiny, tmp_path):
    result = diagnose(tiny.config.model_copy(update={"results_dir": tmp_path}), "trained", Path("c.yaml"))
    untested = {entry["change"]: entry for entry in result["untested"]}
    shift = untested["layer ids +1: 1,3,5"]
    assert shift["why"] == "the cache lacks layers 1, 3, 5".replace(", ", ",")
    assert shift["command"] == "dflash-eval extract -c c.yaml --force --set extract.extra_layers=neighbours"
    assert any("enable_thinking=true" in (entry["command"] or "") for entry in untested.values())
    written = (tmp_path / "diagnosis.md").read_text()
    assert written == markdown(json.loads((tmp_path / "diagnosis.json").read_text()))
    assert shift["command"] in written


def test_a_drafter_that_is_not_in_the_config_is_a_plain_error(tiny):
    with pytest.raises(UserError, match="--drafter nobody: no drafter of that name in the config; there: trained"):
        diagnose(tiny.config, "nobody", Path("c.yaml"))


def test_too_few_prompts_accuse_nobody(small, tmp_path, monkeypatch):
    monkeypatch.setattr(diagnosing, "PROMPTS", 4)
    result = small.diagnose(small.planted(tmp_path / "mine", swap_fc_blocks))
    assert result["cache"]["prompts"] == 4
    assert result["verdicts"] == []


# On the real target


QUESTIONS = [
    "Write a JavaScript function that reverses an array.", "Write an SQL query that lists the ten largest orders.",
    "Explain what a Python decorator is, with an example.", "Write a C function that swaps two integers.",
    "What is the difference between a list and a tuple in Python?", "Write a unit test for an add function.",
    "How does recursion work? Show code.", "Write a Java class for a bank account.",
]  # fmt: skip
PROSE = [
    "Why is the sky blue?", "Explain what a mortgage is.", "Write a short poem about the sea.",
    "What are three tips for staying healthy?", "Who was Marie Curie?", "Describe how to make tea.",
]  # fmt: skip


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """The demo's target on four sets of prompts, 32 new tokens each: coding-10, tasks as in the drafters' training,
    other questions on programming, prose."""
    pytest.importorskip("gguf", reason="the demo extra is not installed")
    folder = tmp_path_factory.mktemp("diagnose")
    coding = [json.loads(line)["prompt"] for line in files("dflash_eval").joinpath("data/coding-10.jsonl").open()]
    sets = {"coding": coding, "composed": composed_prompts(8, seed=5), "questions": QUESTIONS, "prose": PROSE}
    lines = [
        json.dumps({"id": f"{name}-{i}", "prompt": prompt}) + "\n"
        for name, prompts in sets.items()
        for i, prompt in enumerate(prompts)
    ]
    (folder / "prompts.jsonl").write_text("".join(lines))
    changed = {
        **yaml.safe_load(Path("configs/demo.yaml").read_text()),
        "prompts": {"source": str(folder / "prompts.jsonl")},
        "completions": {"max_new_tokens": 32},
        "cache_dir": str(folder / "cache"),
        "results_dir": str(folder / "results"),
        "extract": {"extra_layers": "neighbours"},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(changed))
    torch.set_num_threads(2)
    extract(load_config(folder / "config.yaml"), say=lambda _: None)
    yield Setup(folder / "config.yaml", folder, Path(str(files("dflash_eval").joinpath("demo/reference"))), [])
    torch.set_num_threads(1)


@pytest.fixture
def only(monkeypatch):
    """`only(name)`: from now on the diagnosis sees that set of prompts alone."""

    def choose(name: str) -> None:
        def chosen(config) -> Cache:
            cache = fitting_cache(config)
            cache.samples = [sample for sample in cache.samples if sample.id.startswith(name)]
            return cache

        monkeypatch.setattr(diagnosing, "fitting_cache", chosen)

    return choose


@pytest.fixture(scope="module")
def facts(demo):
    return target_facts(demo.cache.manifest)


@pytest.fixture
def brief(demo, facts, monkeypatch):
    """Fewer anchors and shorter walks than a user's run; the target's tokenizer is read once for all."""
    monkeypatch.setattr(ranking, "ANCHORS", (4, 8))
    monkeypatch.setattr(ranking, "SHORT", 6)
    monkeypatch.setattr(diagnosing, "target_facts", lambda _: facts)


@pytest.mark.long
@pytest.mark.parametrize("fault", FAULTS, ids=names)
def test_a_fault_planted_in_the_demos_reference_is_ranked_first(demo, only, brief, tmp_path, fault):
    only("coding")
    result = demo.diagnose(demo.planted(tmp_path / "mine", fault))
    if fault is shift_layers:  # costs this drafter 2% of τ, SmolLM2's neighbouring layers being so alike: no proof
        first = result["counterfactuals"][0]
        assert first["change"].startswith("layer ids -1")
        assert "one too high" in first["cause"]
    else:
        check_ranked_first(result, fault)


@pytest.mark.long
@pytest.mark.parametrize("prompts", ["coding", "composed", "questions"])
def test_the_demos_reference_is_accused_on_no_set_of_prompts(demo, only, brief, prompts):
    only(prompts)
    result = demo.diagnose(demo.healthy)
    assert result["cache"]["prompts"] >= 8
    assert result["verdicts"] == []
    assert result["symptoms"] == []


@pytest.mark.long
def test_on_prose_the_demos_reference_is_said_to_know_other_text(demo, only, brief):
    """It has seen code alone: that is true, and none of its settings is at fault."""
    only("prose")
    result = demo.diagnose(demo.healthy)
    assert result["verdicts"] == []
    assert result["symptoms"]
    assert all("on text unlike this" in line for line in result["symptoms"])


@pytest.mark.long
def test_the_demos_flawed_drafter_shows_the_last_layer_and_soft_labels(demo, only, brief):
    only("coding")
    lines = diagnose(load_config(demo.config_path), "flawed", demo.config_path)["symptoms"]
    assert any("fc reads the target's last layer (29)" in line for line in lines)
    assert any(line.startswith("soft labels") and "the reference" in line for line in lines)
