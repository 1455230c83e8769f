"""Helpers of the format and head tests: load, walk on a fixture's cache, and plain loops to hold the walks against."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from conftest import END, MASK, VOCABULARY, drafter_json
from torch.nn import functional as F

from dflash_eval.cache import Cache
from dflash_eval.config import DrafterSpec, EvaluateConfig
from dflash_eval.drafter.checkpoint import load_drafter, read_config
from dflash_eval.drafter.config import DrafterConfig
from dflash_eval.drafter.model import DFlashDrafter
from dflash_eval.errors import UserError
from dflash_eval.judge import walk_samples

CPU = torch.device("cpu")
EVALUATE = EvaluateConfig(width=3, budgets=(1, 4, 16, 64))


def spec(checkpoint: Path, **overrides) -> DrafterSpec:
    return DrafterSpec(name="mine", checkpoint=str(checkpoint), overrides=overrides)


def load(checkpoint: Path, **overrides) -> DFlashDrafter:
    own = spec(checkpoint, **overrides)
    return load_drafter(own, read_config(own), CPU, torch.float32)


def error(call, *arguments, **overrides) -> str:
    """The one plain error of a call: at most three lines."""
    with pytest.raises(UserError) as caught:
        call(*arguments, **overrides)
    assert len(str(caught.value).splitlines()) <= 3
    return str(caught.value)


def walks(setup, drafter: DFlashDrafter) -> list[list[list[int]]]:
    """[samples][rules] acceptance lengths on a fixture's cache."""
    cache = Cache(setup.folder / "cache")
    found, _ = walk_samples(drafter, cache, *cache.head(), EVALUATE, lambda _: None)
    return [[walk.committed for walk in sample] for sample in found]


def head_of(setup) -> dict[str, torch.Tensor]:
    embedding, head = Cache(setup.folder / "cache").head()
    return {"embed_tokens.weight": embedding, "lm_head.weight": head}


def speculators_json(raw: dict, **changes) -> dict:
    body = {
        k: v for k, v in raw.items() if k not in ("architectures", "dflash_config", "block_size", "num_target_layers")
    }
    config = {
        "architectures": ["DFlashSpeculator"],
        "speculators_model_type": "dflash",
        "transformer_layer_config": body,
        "draft_vocab_size": VOCABULARY,
        "block_size": raw["block_size"],
        "aux_hidden_state_layer_ids": [layer + 1 for layer in raw["dflash_config"]["target_layer_ids"]],
        "mask_token_id": raw["dflash_config"]["mask_token_id"],
        "sliding_window_non_causal": False,
        "sample_from_anchor": False,
    }
    return {**config, **changes}


def deepspec_json(raw: dict, **changes) -> dict:
    own = {"architectures": ["Qwen3DSparkModel"], **raw["dflash_config"], "markov_rank": 0, "num_anchors": 512}
    raw = {key: value for key, value in raw.items() if key not in ("dflash_config", "sliding_window")}
    return {**raw, "layer_types": ["full_attention"] * 2, **own, **changes}


def train_shifted(setup, steps: int = 60) -> dict[str, torch.Tensor]:
    """Overfit a drafter whose slot i predicts x[s + i + 1]."""
    torch.manual_seed(11)
    cache = Cache(setup.folder / "cache")
    embedding, head = cache.head()
    config = DrafterConfig.from_dict(setup.raw)
    drafter = DFlashDrafter(config)
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=4e-3)
    for step in range(steps):
        sample = cache.samples[step % len(cache.samples)]
        ids = torch.tensor(sample.input_ids + [END] * config.block_size)
        anchors = torch.arange(len(sample.prompt_ids), len(sample) - 1)
        if len(anchors):
            block = torch.full((len(anchors), config.block_size), MASK)
            block[:, 0] = ids[anchors]
            truth = ids[anchors[:, None] + torch.arange(1, config.block_size + 1)]
            context = drafter.context(cache.features(sample.id, config.target_layer_ids)[None])
            hidden = drafter(F.embedding(block, embedding)[None], anchors[None], context)[0]
            loss = F.cross_entropy(drafter.logits(hidden, head).flatten(0, 1), truth.flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return drafter.state_dict()


def slow_walks(setup, drafter: DFlashDrafter, propose) -> list[list[int]]:
    """The chain's acceptance lengths by a plain loop; propose(hidden, logits, anchor token) → tokens."""
    public = pytest.importorskip("dflash.model", reason="the public dflash package is not installed (make setup)")
    from transformers import Qwen3Config

    cache = Cache(setup.folder / "cache")
    embedding, head = cache.head()
    shape, raw = drafter.config, drafter_json()
    model = public.DFlashDraftModel(Qwen3Config(**{**raw, "block_size": shape.block_size})).eval()
    model.load_state_dict(drafter.state_dict(), strict=False)
    found = []
    for sample in cache.samples:
        ids, s, lengths = sample.input_ids, len(sample.prompt_ids), []
        features = cache.features(sample.id, shape.target_layer_ids)
        limit = s + 40  # the fixtures' max_new_tokens
        while s + 1 < len(ids):
            block = torch.tensor([[ids[s]] + [MASK] * (shape.block_size - 1)])
            with torch.inference_mode():
                hidden = model(
                    position_ids=torch.arange(s + shape.block_size)[None],
                    noise_embedding=F.embedding(block, embedding),
                    target_hidden=features[None, :s],
                )[0]
            drafts = propose(hidden, hidden @ head.T, ids[s])[: limit - s - 1]
            accepted = 0
            while accepted < len(drafts) and ids[s + 1 + accepted : s + 2 + accepted] == [drafts[accepted]]:
                accepted += 1
            lengths.append(min(accepted + 1, len(ids) - s - 1))
            s += lengths[-1]
        found.append(lengths)
    return found
