"""The speculators format against speculators' own model classes, where that package is installed."""

from __future__ import annotations

import json

import pytest
import torch
from conftest import MASK, VOCABULARY, drafter_json
from drafters import head_of, load
from safetensors.torch import save_file
from torch.nn import functional as F

from dflash_eval.cache import Cache
from dflash_eval.drafter.path import path_scorer
from dflash_eval.drafter.scoring import Scorer

KINDS = {
    "dflash": {},
    "dflash, anchor drafts, not causal": {"sample_from_anchor": True, "sliding_window_non_causal": True},
    "dflash, reduced vocabulary": {"draft_vocab_size": 100},
    "dflash2": {"conv_kernel_size": 2, "conv_group_size": 8, "selector_rank": 4, "selector_top_k": 5},
    "dspark": {"markov_rank": 3, "markov_head_type": "rnn", "enable_confidence_head": False},
}


def make(kind: str, folder):
    """A random model of speculators' class, saved by its own `save_pretrained`."""
    pytest.importorskip("speculators.models.dspark", reason="speculators is not installed", exc_type=ImportError)
    from speculators.models.dflash import DFlashDraftModel, DFlashSpeculatorConfig
    from speculators.models.dflash2 import DFlash2DraftModel, DFlash2SpeculatorConfig
    from speculators.models.dspark import DSparkDraftModel, DSparkSpeculatorConfig
    from transformers import Qwen3Config

    config_class, model_class = {
        "dflash": (DFlashSpeculatorConfig, DFlashDraftModel),
        "dflash2": (DFlash2SpeculatorConfig, DFlash2DraftModel),
        "dspark": (DSparkSpeculatorConfig, DSparkDraftModel),
    }[kind.split(",")[0]]
    raw = drafter_json(layer_types=["sliding_attention", "full_attention"], sliding_window=9)
    body = {key: value for key, value in raw.items() if key not in ("architectures", "dflash_config", "block_size")}
    layers = Qwen3Config(**body)
    layers._attn_implementation = "eager"
    changes = {"draft_vocab_size": VOCABULARY, **KINDS[kind]}
    torch.manual_seed(41)
    model = model_class(
        config_class(
            transformer_layer_config=layers, block_size=6, aux_hidden_state_layer_ids=[1, 3, 5], mask_token_id=MASK,
            **changes,
        )
    ).eval()  # fmt: skip
    size = changes["draft_vocab_size"]
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.3 if "codebook" in name or "markov" in name else 0.08)
        model.embed_tokens.weight.normal_()
        model.lm_head.weight.normal_()
        model.verifier_lm_head.weight.zero_()
        if size < VOCABULARY:
            ids = torch.randperm(VOCABULARY)[:size].sort().values
            model.t2d[ids] = True
            model.d2t.copy_(ids - torch.arange(size))
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_logits_are_those_of_speculators_own_forward(kind, tiny, tmp_path):
    model = make(kind, tmp_path / "d")
    if "reduced" not in kind:  # saved without what the target has; here the target is another, so put it back
        head = {"embed_tokens.weight": model.embed_tokens.weight, "lm_head.weight": model.lm_head.weight}
        save_again(tmp_path / "d", head)
    else:
        save_again(tmp_path / "d", {"embed_tokens.weight": model.embed_tokens.weight})
    drafter = load(tmp_path / "d")
    shape = drafter.config
    assert (shape.target_layer_ids, shape.format) == ((0, 2, 4), "speculators")

    cache = Cache(tiny.folder / "cache")
    sample = max(cache.samples, key=len)
    ids, features = torch.tensor([sample.input_ids]), cache.features(sample.id, (0, 2, 4))[None]
    anchors = torch.arange(3, len(sample) - shape.block_size)
    loss_mask = torch.zeros_like(ids)
    loss_mask[0, anchors] = 1
    hidden, logits, _, _, where = model._backbone_forward(
        features, ids, loss_mask, torch.zeros(1, len(sample), 32), torch.zeros_like(ids), None, max_anchors=len(anchors)
    )
    assert torch.equal(where.view(-1, shape.block_size)[:, 0], anchors)
    block = torch.full((len(anchors), shape.block_size), MASK)
    block[:, 0] = ids[0, anchors]
    embedding, head = cache.head()
    ours = drafter(F.embedding(block, drafter.embedding(embedding))[None], anchors[None], drafter.context(features))[0]
    torch.testing.assert_close(ours, hidden.view_as(ours), rtol=1e-4, atol=1e-5)

    first = 0 if shape.predicts_anchor else 1
    ours, logits = ours[:, first:], logits.view(len(anchors), shape.block_size, -1)[:, first:]
    tokens = ids[0, anchors[:, None] + torch.arange(shape.drafts + 1)]
    previous, tokens = tokens[:, :-1], tokens[:, 1:]
    scorer = Scorer(drafter, head, 8)
    path = path_scorer(drafter, scorer)
    if kind == "dflash2":
        candidates = logits.topk(5).indices
        scores = model.candidate_selector.score_candidates(logits, ours, previous, candidates)
        logits = torch.full_like(logits, -torch.inf).scatter(-1, candidates, scores)
    if kind == "dspark":
        logits = logits + model.markov_head.block_bias(prev_token_ids=previous, hidden_states=ours)
    if path is not None:
        ranks, _, _ = path.orders(ours, tokens, previous, torch.full((len(anchors),), shape.drafts), 8)
    else:
        ranks = scorer.score(ours.flatten(0, 1), tokens.flatten()).ranks.view(tokens.shape)
    names = torch.arange(VOCABULARY) if model.d2t is None else torch.arange(len(model.d2t)) + model.d2t
    for row in range(len(anchors)):
        for slot in range(shape.drafts):
            best = names[logits[row, slot].topk(5).indices].tolist()
            finite = int(logits[row, slot].isfinite().sum())
            token = int(tokens[row, slot])
            expected = best.index(token) if token in best[:finite] else None
            assert (int(ranks[row, slot]) if ranks[row, slot] < 5 else None) == expected


def save_again(folder, more: dict) -> None:
    from safetensors.torch import load_file

    path = folder / "model.safetensors"
    save_file({**load_file(path), **{name: tensor.clone() for name, tensor in more.items()}}, path)
    assert json.loads((folder / "config.json").read_text())["speculators_model_type"]


def test_the_head_of_a_reduced_vocabulary_falls_back_to_the_targets_rows(tiny, tmp_path):
    model = make("dflash, reduced vocabulary", tmp_path / "d")
    from safetensors.torch import load_file

    path = tmp_path / "d" / "model.safetensors"
    save_file({name: tensor for name, tensor in load_file(path).items() if name != "lm_head.weight"}, path)
    head = head_of(tiny)["lm_head.weight"]
    assert torch.equal(load(tmp_path / "d").output_head(head), head[torch.arange(100) + model.d2t])
