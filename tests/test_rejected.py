"""The draft that ended a cycle, and how far down the sequence's token stood: as the public drafter says."""

from __future__ import annotations

import pytest
import torch
from test_evaluate import beside
from torch.nn import functional as F

from dflash_eval.cache import Cache
from dflash_eval.evaluate import evaluate


@pytest.mark.parametrize("anchors", ["replay", "all"])
@pytest.mark.parametrize("fixture", ["tiny", "tiny_qwen3"])
def test_rejected_drafts_and_ranks_are_those_of_the_public_drafter(fixture, anchors, request, tmp_path):
    oracles = pytest.importorskip("oracles")
    setup = request.getfixturevalue(fixture)
    target, drafter = oracles.load_target(setup.target), oracles.load_public_drafter(setup.drafter)
    config = beside(setup, tmp_path, None, f"evaluate.anchors={anchors}")
    ours, largest, seen = evaluate(config)["drafters"][0]["samples"], max(config.evaluate.budgets), 0
    for sample, own in zip(Cache(config.cache_dir).samples, ours, strict=True):
        anchor, limit = len(sample.prompt_ids), len(sample.prompt_ids) + config.completions.max_new_tokens
        cycles = zip(own["acceptance_lengths"], own["rejected_drafts"], own["rejected_ranks"], strict=True)
        for length, draft, rank in cycles:
            probable, truth = block(target, drafter, sample.input_ids, anchor, limit), sample.input_ids[anchor + 1 :]
            wrong = [i for i, (order, said) in enumerate(zip(probable, truth, strict=False)) if order[0] != said]
            expected = (None, None)
            if wrong:
                order, said = probable[wrong[0]], truth[wrong[0]]
                expected = (order[0], min(order.index(said), largest))
                seen += 1
            assert (draft, rank) == expected
            anchor += length
    assert seen > 10


@torch.inference_mode()
def block(target, drafter, ids: list[int], anchor: int, limit: int) -> list[list[int]]:
    """All tokens at each drafted slot, the most probable first."""
    states = target(torch.tensor([ids[:anchor]]), output_hidden_states=True).hidden_states
    slots = min(drafter.block_size, limit - anchor)
    said = torch.tensor([[ids[anchor]] + [drafter.mask_token_id] * (slots - 1)])
    hidden = drafter(
        position_ids=torch.arange(anchor + slots)[None],
        noise_embedding=F.embedding(said, target.get_input_embeddings().weight),
        target_hidden=torch.cat([states[layer + 1] for layer in drafter.target_layer_ids], -1),
    )
    return target.get_output_embeddings()(hidden)[0, 1:].argsort(-1, descending=True).tolist()
