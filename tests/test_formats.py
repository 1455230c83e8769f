"""Every trainer's format: the same drafter gives the same acceptance lengths, or what the format's own code gives."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import END, MASK, VOCABULARY, drafter_json, save_drafter
from drafters import deepspec_json, head_of, load, slow_walks, spec, speculators_json, train_shifted, walks
from safetensors.torch import load_file, save_file
from torch.nn import functional as F

from dflash_eval.cache import Cache
from dflash_eval.drafter.checkpoint import read_config


@pytest.fixture(scope="module")
def original(tiny_qwen3):
    """config.json, tensors and walks of a drafter with a causal sliding window, as z-lab would publish it."""
    state = load_file(tiny_qwen3.drafter / "model.safetensors")
    found = walks(tiny_qwen3, load(tiny_qwen3.drafter))
    assert max(max(sample[0]) for sample in found) > 2
    return tiny_qwen3.raw, state, found


def write(folder: Path, raw: dict, state: dict) -> Path:
    return save_drafter(folder, raw, state)


def fused(state: dict) -> dict:
    out = dict(state)
    for layer in (0, 1):
        parts = [out.pop(f"layers.{layer}.self_attn.{part}_proj.weight") for part in "qkv"]
        out[f"layers.{layer}.self_attn.qkv_proj.weight"] = torch.cat(parts)
    return out


# The same acceptance lengths


def test_specforge_is_zlabs_layout_with_code_beside_it_that_is_not_run(tiny_qwen3, original, tmp_path):
    raw, state, found = original
    folder = write(tmp_path / "d", {**raw, "auto_map": {"AutoModel": "dflash.DFlashDraftModel"}}, state)
    (folder / "dflash.py").write_text("raise SystemExit('run')")
    assert walks(tiny_qwen3, load(folder)) == found


def test_fused_qkv_is_split(tiny_qwen3, original, tmp_path):
    raw, state, found = original
    folder = write(tmp_path / "d", {**raw, "architectures": ["DFlashLagunaForCausalLM"]}, fused(state))
    assert walks(tiny_qwen3, load(folder)) == found


def test_laguna_says_causal_in_its_section(tmp_path):
    raw = drafter_json(architectures=["DFlashLagunaForCausalLM"])
    raw["dflash_config"] = {**raw["dflash_config"], "causal": True}
    assert read_config(spec(write(tmp_path / "d", raw, {"x": torch.ones(1)}))).causal == (True, True)


@pytest.mark.parametrize("index", [True, False])
def test_shards_load_with_and_without_an_index(tiny_qwen3, original, tmp_path, index):
    raw, state, found = original
    folder = write(tmp_path / "d", raw, state)
    (folder / "model.safetensors").unlink()
    names = sorted(state)
    shards = {f"model-{i + 1:05d}-of-00003.safetensors": names[i::3] for i in range(3)}
    for file, own in shards.items():
        save_file({name: state[name] for name in own}, folder / file)
    if index:
        weight_map = {name: file for file, own in shards.items() for name in own}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert walks(tiny_qwen3, load(folder)) == found


@pytest.mark.parametrize("own", [True, False])
def test_speculators_counts_hidden_states_from_the_embedding(tiny, tmp_path, own):
    state = load_file(tiny.drafter / "model.safetensors")
    folder = write(tmp_path / "d", speculators_json(tiny.raw), {**state, **(head_of(tiny) if own else {})})
    drafter = load(folder)
    assert drafter.config.format == "speculators"
    assert drafter.config.target_layer_ids == (0, 2, 4)
    assert walks(tiny, drafter) == walks(tiny, load(tiny.drafter))


def all_drafts(setup) -> set[int]:
    """Every token that the fixture's drafter finds most probable at any slot of any anchor, and every token used."""
    cache, drafter = Cache(setup.folder / "cache"), load(setup.drafter)
    embedding, head = cache.head()
    used = {MASK, END}
    for sample in cache.samples:
        used |= set(sample.input_ids)
        anchors = torch.arange(len(sample.prompt_ids), len(sample) - 1)
        if len(anchors):
            block = torch.full((len(anchors), drafter.config.block_size), MASK)
            block[:, 0] = torch.tensor(sample.input_ids)[anchors]
            context = drafter.context(cache.features(sample.id, drafter.config.target_layer_ids)[None])
            hidden = drafter(F.embedding(block, embedding)[None], anchors[None], context)
            used |= set(drafter.logits(hidden, head).topk(4).indices.flatten().tolist())
    return used


@pytest.mark.parametrize("given", ["d2t and t2d", "d2t", "t2d", "no head"])
def test_a_reduced_vocabulary_that_covers_what_is_used_drafts_the_same(tiny, tmp_path, given):
    ids = torch.tensor(sorted(all_drafts(tiny)))
    assert 50 < len(ids) < VOCABULARY - 20
    marked = torch.zeros(VOCABULARY, dtype=torch.bool)
    marked[ids] = True
    state = load_file(tiny.drafter / "model.safetensors")
    if given != "no head":
        state["lm_head.weight"] = head_of(tiny)["lm_head.weight"][ids]
    if given != "t2d":
        state["d2t"] = ids - torch.arange(len(ids))
    if given != "d2t":
        state["t2d"] = marked
    folder = write(tmp_path / "d", speculators_json(tiny.raw, draft_vocab_size=len(ids)), state)
    ours, theirs = walks(tiny, load(folder)), walks(tiny, load(tiny.drafter))
    assert [sample[:2] for sample in ours] == [sample[:2] for sample in theirs]


def test_a_token_outside_the_draft_vocabulary_is_never_accepted(tiny, tmp_path):
    ids = torch.tensor(sorted(all_drafts(tiny)))
    cache = Cache(tiny.folder / "cache")
    gone = int(np.bincount([token for sample in cache.samples for token in sample.completion_ids[2:]]).argmax())
    ids = ids[ids != gone]
    state = load_file(tiny.drafter / "model.safetensors")
    state |= {"lm_head.weight": head_of(tiny)["lm_head.weight"][ids], "d2t": ids - torch.arange(len(ids))}
    folder = write(tmp_path / "d", speculators_json(tiny.raw, draft_vocab_size=len(ids)), state)
    for sample, rules in zip(cache.samples, walks(tiny, load(folder)), strict=True):
        for lengths in rules:
            ends = np.cumsum(lengths) + len(sample.prompt_ids)  # each cycle's last token is the target's own
            drafted = set(range(len(sample.prompt_ids) + 1, len(sample))) - set(ends.tolist())
            assert gone not in [sample.input_ids[at] for at in drafted]


WRAPPERS = {
    "state dict": lambda state: state,
    "wrapped by DDP and compile": lambda state: {f"module._orig_mod.{name}": t for name, t in state.items()},
    "compiled layers": lambda state: {
        name.replace(".self_attn", "._orig_mod.self_attn"): t for name, t in state.items()
    },
    "under model": lambda state: {"model": {f"model.{name}": t for name, t in state.items()}, "step": 12},
    "SpecForge": lambda state: {
        "draft_state_dict": {f"draft_model.{name}": t for name, t in state.items()} | {"target_head.w": torch.ones(3)},
        "optimizer": {"state": {0: {"exp_avg": torch.ones(4)}}, "param_groups": [{"lr": 1e-4}]},
    },
}


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("kind", [".pt", ".bin", ".safetensors"])
def test_raw_checkpoints_of_a_training_run(tiny_qwen3, original, tmp_path, wrapper, kind):
    raw, state, found = original
    content = WRAPPERS[wrapper](state)
    if kind == ".safetensors":
        content = content.get("model") or content.get("draft_state_dict") or content
        save_file({name: tensor.contiguous() for name, tensor in content.items()}, tmp_path / "step-12.safetensors")
    else:
        torch.save(content, tmp_path / f"step-12{kind}")
    (tmp_path / "config.json").write_text(json.dumps(raw))
    drafter = load(tmp_path / f"step-12{kind}")
    if wrapper in ("state dict", "SpecForge"):
        assert walks(tiny_qwen3, drafter) == found
    for name, tensor in state.items():
        assert torch.equal(drafter.state_dict()[name], tensor)


def test_a_raw_checkpoint_without_a_config_is_described_by_its_shapes_and_the_overrides(tiny, tmp_path):
    torch.save(load_file(tiny.drafter / "model.safetensors"), tmp_path / "last.pt")
    overrides = {"block_size": 6, "mask_token_id": MASK, "target_layer_ids": (0, 2, 4), "rope_theta": 10000.0}
    assert walks(tiny, load(tmp_path / "last.pt", **overrides)) == walks(tiny, load(tiny.drafter))


def test_safetensors_are_preferred_to_a_pickle_beside_them(tiny_qwen3, original, tmp_path):
    raw, state, found = original
    folder = write(tmp_path / "d", raw, state)
    torch.save({name: torch.zeros_like(tensor) for name, tensor in state.items()}, folder / "pytorch_model.bin")
    assert walks(tiny_qwen3, load(folder)) == found
    (folder / "model.safetensors").unlink()
    assert walks(tiny_qwen3, load(folder)) != found


# DeepSpec: the anchor's slot predicts


def test_deepspec_drafts_from_the_anchors_slot_block_size_tokens(tiny, tmp_path):
    state = {**train_shifted(tiny), **head_of(tiny), "confidence_head.proj.weight": torch.ones(1, 32)}
    drafter = load(write(tmp_path / "d", deepspec_json(tiny.raw), state))
    assert (drafter.config.format, drafter.config.drafts) == ("DeepSpec", 6)
    expected = slow_walks(tiny, drafter, lambda hidden, logits, anchor: logits.argmax(-1).tolist())
    assert [sample[0] for sample in walks(tiny, drafter)] == expected
    assert max(map(max, expected)) > 4
