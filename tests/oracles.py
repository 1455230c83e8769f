"""Independent answers: z-lab's public model and loop, and a plain loop that re-runs the target every cycle."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, Qwen3Config

dflash_model = pytest.importorskip("dflash.model", reason="the public dflash package is not installed (make setup)")


def load_target(folder: Path):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def load_public_drafter(folder: Path):
    config = Qwen3Config.from_pretrained(folder)
    return dflash_model.DFlashDraftModel.from_pretrained(folder, config=config, dtype=torch.float32).eval()


def public_loop(target, drafter, prompt_ids, max_new_tokens, stop_ids) -> tuple[list[int], list[int]]:
    """z-lab's own `dflash_generate`: (completion ids, acceptance lengths)."""
    dflash_model._cuda_time = time.perf_counter
    out = dflash_model.dflash_generate(
        drafter, target, torch.tensor([prompt_ids]), max_new_tokens, stop_ids, temperature=0.0, return_stats=True
    )
    return out.output_ids[0, len(prompt_ids) :].tolist(), out.acceptance_lengths


@torch.inference_mode()
def slow_loop(target, drafter, prompt_ids, max_new_tokens, stop_ids) -> tuple[list[int], list[int]]:
    """Draft and verify with no cache at all: target and drafter see the whole prefix anew every cycle."""
    ids = list(prompt_ids)
    limit = len(prompt_ids) + max_new_tokens
    ids.append(int(target(torch.tensor([ids])).logits[0, -1].argmax()))
    lengths = []
    while len(ids) < limit and ids[-1] not in stop_ids:
        start = len(ids) - 1
        slots = min(drafter.block_size, limit - start)
        states = target(torch.tensor([ids[:start]]), output_hidden_states=True).hidden_states
        features = torch.cat([states[layer + 1] for layer in drafter.target_layer_ids], -1)
        block = torch.tensor([[ids[start]] + [drafter.mask_token_id] * (slots - 1)])
        hidden = drafter(
            position_ids=torch.arange(start + slots)[None],
            noise_embedding=F.embedding(block, target.get_input_embeddings().weight),
            target_hidden=features,
        )
        drafts = target.get_output_embeddings()(hidden)[0, 1:].argmax(-1).tolist()
        said = target(torch.tensor([ids + drafts])).logits[0, start:].argmax(-1).tolist()
        accepted = 0
        while accepted < len(drafts) and drafts[accepted] == said[accepted]:
            accepted += 1
        new = said[: accepted + 1][: limit - len(ids)]
        new = new[: next((i + 1 for i, token in enumerate(new) if token in stop_ids), len(new))]
        ids += new
        lengths.append(len(new))
    return ids[len(prompt_ids) :], lengths
