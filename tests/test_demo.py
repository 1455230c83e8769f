"""The demo that ships: its prompts, its training, and its drafters on the real target."""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path

import oracles
import pytest
import torch
from conftest import END, drafter_json, tiny_tokenizer
from safetensors.torch import load_file
from serving import Serving
from transformers import AutoModelForCausalLM

from dflash_eval.cache import Cache, read_completions
from dflash_eval.config import TargetConfig, load_config
from dflash_eval.demo import train, train_hybrid
from dflash_eval.demo.prompts import HELD_OUT, composed_prompts, first_sentences
from dflash_eval.drafter.config import DrafterConfig
from dflash_eval.drafter.model import DFlashDrafter
from dflash_eval.evaluate import evaluate
from dflash_eval.extract import extract
from dflash_eval.fetching import fetch
from dflash_eval.target import TargetFiles, load_target, load_tokenizer

CODING_10 = [json.loads(line) for line in files("dflash_eval").joinpath("data/coding-10.jsonl").open(encoding="utf-8")]


@pytest.mark.parametrize("prompt", CODING_10, ids=lambda prompt: prompt["id"])
def test_every_task_of_coding_10_is_held_out_of_training(prompt):
    assert HELD_OUT.search(prompt["prompt"])
    assert first_sentences(prompt["prompt"], ended=True) is None


def test_composed_prompts_are_distinct_repeatable_and_none_is_held_out():
    prompts = composed_prompts(3000, seed=1)
    assert len(set(prompts)) == 3000
    assert prompts == composed_prompts(3000, seed=1) != composed_prompts(3000, seed=2)
    assert not any(HELD_OUT.search(prompt) for prompt in prompts)


@pytest.mark.parametrize(
    ("text", "ended", "kept"),
    [
        ("Write a Python function that adds two numbers.", True, "Write a Python function that adds two numbers."),
        ("Write code that adds two numbers. It should", False, "Write code that adds two numbers."),
        ("Write code that adds two numbers. It should\ndef", False, None),
        ("Write code that adds two", False, None),
        ("Write a Python function that adds two numbers", True, None),
        ("Write a Python function that is named für x.", True, None),
        ("Add them.", True, None),
    ],
)
def test_a_prompt_is_cut_to_its_whole_sentences(text, ended, kept):
    assert first_sentences(text, ended) == kept


@pytest.fixture
def toy(tiny):
    """A tiny target with sequences it said itself, for the training code."""
    config = TargetConfig(model=str(tiny.target), device="cpu", dtype="float32")
    target = load_target(TargetFiles.find(config), config)
    data = train.answers(target, tiny_tokenizer(), [f"say {word}" for word in "abcdefghijklmnop"], 24, rows=16, end=END)
    return target, data


def drafter_for(recipe):
    torch.manual_seed(0)
    raw = drafter_json(block_size=8, dflash_config={"target_layer_ids": list(recipe.layer_ids), "mask_token_id": 256})
    return DFlashDrafter(DrafterConfig.from_dict(raw))


@pytest.mark.parametrize("flawed", [False, True])
def test_training_raises_tau_on_the_sequences_it_saw(toy, flawed):
    target, data = toy
    recipe = train.Recipe((1, 3, 5), flawed)
    drafter, context = drafter_for(recipe), train.features(target, recipe, data)
    before, _ = train.tau_estimate(drafter, target, context, data)
    train.train(drafter, target, recipe, context, data, steps=250, rows=8, anchors=8, rate=4e-3, noise=0.1, seed=0)
    after, _ = train.tau_estimate(drafter, target, context, data)
    assert after > before + 0.5


def test_training_features_are_what_extraction_caches(toy, tiny):
    target, _ = toy
    cache = Cache(tiny.config.cache_dir)
    sample = cache.samples[0]
    length = torch.tensor([len(sample.prompt_ids)])
    data = train.Sequences(torch.tensor([sample.input_ids], dtype=torch.int32), length, torch.tensor([len(sample)]))
    layers = tuple(cache.manifest.layers)
    ours = train.features(target, train.Recipe(layers, False), data)[0]
    torch.testing.assert_close(ours, cache.features(sample.id, layers), rtol=1e-4, atol=1e-5)


def test_blocks_hold_the_anchor_then_masks_and_the_tokens_that_follow(toy):
    _, data = toy
    anchors = train.draw_anchors(data, 50)
    assert (anchors >= data.prompt_lengths[:, None]).all()
    assert (anchors < data.lengths[:, None] - 1).all()
    block, truth, there = train.blocks(data, anchors, 8, 256)
    for row, column in [(0, 0), (3, 7), (15, 49)]:
        anchor, end = int(anchors[row, column]), int(data.lengths[row])
        assert block[row, column].tolist() == [int(data.ids[row, anchor])] + [256] * 7
        following = data.ids[row, anchor + 1 : min(anchor + 8, end)].tolist()
        assert truth[row, column][there[row, column]].tolist() == following


def test_the_teacher_of_slot_k_speaks_of_the_token_at_slot_k(toy):
    """On clean states of the last layer the teacher is the target, whose greedy choice the sequence is."""
    target, data = toy
    last = len(target.layers) - 1
    context = train.features(target, train.Recipe((last,), True), data)
    anchors = train.draw_anchors(data, 4)
    _, truth, there = train.blocks(data, anchors, 8, 256)
    teacher = train.teacher_probabilities(target, context, anchors, truth.shape[-1]).view(*truth.shape, -1)
    assert (teacher.argmax(-1) == truth)[there].all()


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """The demo's config at 48 new tokens for six prompts, extracted."""
    pytest.importorskip("gguf", reason="the demo extra is not installed")
    folder = tmp_path_factory.mktemp("demo")
    sets = [f"cache_dir={folder}/cache", f"results_dir={folder}/results", "completions.max_new_tokens=48"]
    config = load_config(Path("configs/demo.yaml"), [*sets, "prompts.limit=6", "evaluate.budgets=[4, 16]"])
    torch.set_num_threads(2)
    extract(config, say=lambda _: None)
    yield config
    torch.set_num_threads(1)


@pytest.mark.slow
def test_the_demos_reference_equals_the_public_loop_on_the_real_target(demo):
    described = demo.target
    described_files = TargetFiles.find(described)
    model = AutoModelForCausalLM.from_pretrained(
        described_files.folder, dtype=torch.float32, **described_files.arguments()
    ).eval()
    drafter = oracles.load_public_drafter(files("dflash_eval").joinpath("demo/reference"))
    results = evaluate(demo)
    ours = {sample["id"]: sample["acceptance_lengths"] for sample in results["drafters"][0]["samples"]}
    samples = Cache(demo.cache_dir).samples
    assert len(samples) == 6
    for sample in samples:
        text, lengths = oracles.public_loop(model, drafter, sample.prompt_ids, 48, [2])
        assert text == sample.completion_ids
        assert ours[sample.id] == lengths
    assert max(max(lengths) for lengths in ours.values()) >= 5
    reference, flawed = results["drafters"]
    assert reference["tau"] > 1.3 * flawed["tau"]


@pytest.mark.slow
def test_one_by_one_the_real_target_says_the_same(demo):
    from dflash_eval.completions import generate_batch

    target = load_target(TargetFiles.find(demo.target), demo.target)
    for sample in Cache(demo.cache_dir).samples[:2]:
        assert generate_batch(target, [sample.prompt_ids], demo.completions, [2]) == [sample.completion_ids]


@pytest.mark.slow
def test_over_http_the_real_target_says_what_it_generates_here(demo, tmp_path):
    """Two prompts to a server that answers them one by one; the first 24 tokens of each."""
    found, local = TargetFiles.find(demo.target), Cache(demo.cache_dir).samples[:2]
    model, tokenizer = load_target(found, demo.target).model, load_tokenizer(found, demo.target)

    def answer(prompt: list[int], most: int) -> list[int]:
        options = {"do_sample": False, "max_new_tokens": most, "eos_token_id": 2, "pad_token_id": 2}
        return model.generate(torch.tensor([prompt]), **options)[0, len(prompt) :].tolist()

    with Serving(tokenizer, answer, [2], models=(demo.target.model,)) as serving:
        server = f"completions.server={{base_url: '{serving.url}', concurrency: 1}}"
        sets = [f"cache_dir={tmp_path}", "completions.source=server", "completions.max_new_tokens=24", server]
        config = load_config(Path("configs/demo.yaml"), [*sets, "prompts.limit=2"])
        fetched = read_completions(fetch(config, say=lambda _: None))
    for ours, theirs in zip(fetched, local, strict=True):
        assert (ours.id, ours.prompt_ids) == (theirs.id, theirs.prompt_ids)
        assert ours.completion_ids == theirs.completion_ids[:24]


SOURCE = '''class Stack:
    """A pile."""

    def push(self, item):
        """Put an item on top."""
        self.items.append(item)
        return self

    def one_line(self): return 1


async def wait(seconds):
    await sleep(seconds)
'''


def test_functions_of_a_module_are_heads_with_their_docstrings_and_bodies_unindented():
    assert dict(train_hybrid.functions(SOURCE)) == {
        'def push(self, item):\n    """Put an item on top."""': "    self.items.append(item)\n    return self",
        "async def wait(seconds):": "    await sleep(seconds)",
    }


def test_the_hybrid_targets_user_gives_a_head_or_half_a_function_and_has_the_whole():
    head, body = next(function for function in train_hybrid.functions(SOURCE) if "push" in function[0])
    half = head + "\n" + body.split("\n")[0]
    found = {given: whole for given, whole in train_hybrid.exchanges([SOURCE]).items() if "push" in given}
    assert found == {head: f"{head}\n{body}", half: f"{head}\n{body}"}


def test_the_hybrid_drafter_is_asked_for_functions_that_its_target_has_not_learnt():
    tokenizer = train_hybrid.train_tokenizer([SOURCE] * 20)
    new = SOURCE.replace("push", "pull")
    asked = train_hybrid.beginnings(tokenizer, [new], [SOURCE], n=9, seed=0)
    assert len(asked) == 2
    assert all("pull" in beginning for beginning in asked)


def test_the_hybrid_targets_prompts_are_beginnings_of_what_it_learns():
    """Token for token: a line break that joins with the indentation after it would make them end otherwise."""
    tokenizer = train_hybrid.train_tokenizer([SOURCE] * 20)
    ids, starts = train_hybrid.documents(tokenizer, [SOURCE], seed=0)
    documents = [part.tolist() for part in ids.tensor_split(starts[1:].tolist())]
    assert len(documents) == 4  # the file, one function, and another given in two ways
    for given in train_hybrid.exchanges([SOURCE]):
        asked = tokenizer.apply_chat_template(
            [{"role": "user", "content": given}], add_generation_prompt=True, return_dict=False
        )
        assert sum(document[: len(asked)] == asked for document in documents) == 1


def test_the_hybrid_demo_is_trained_from_sources_to_folders_that_load(tmp_path):
    library = tmp_path / "library"
    library.mkdir()
    for i in range(3):
        (library / f"m{i}.py").write_text("".join(SOURCE.replace("push", f"push_{i}_{j}") for j in range(8)))
    train_hybrid.main(
        target=tmp_path / "target", out=tmp_path / "drafter", library=[library], device="cpu", target_steps=2,
        target_rows=2, width=32, prompts=12, new_tokens=20, generate_rows=12, steps=2, rows=4, anchors=4,
    )  # fmt: skip
    config = TargetConfig(model=str(tmp_path / "target"), device="cpu", dtype="float32")
    assert load_target(TargetFiles.find(config), config).vocab_size == train_hybrid.VOCABULARY
    shape = DrafterConfig.from_dict(json.loads((tmp_path / "drafter/config.json").read_text()))
    assert (shape.windows, shape.mask_token_id) == ((128, 128, 128, None), 3)
    DFlashDrafter(shape).load_state_dict(load_file(tmp_path / "drafter/model.safetensors"))
