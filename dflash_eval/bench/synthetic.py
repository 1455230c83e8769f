"""A cache and a drafter of a given shape, filled with random numbers: the work of an evaluation without a target."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from dflash_eval.cache import Manifest, Sample, ShardWriter, write_completions, write_head, write_manifest
from dflash_eval.config import Config
from dflash_eval.drafter.config import DrafterConfig
from dflash_eval.drafter.model import DFlashDrafter

SHAPES: dict[str, dict[str, Any]] = {
    "qwen3.6-27b": {
        "hidden_size": 5120,
        "intermediate_size": 17408,
        "num_hidden_layers": 5,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 248320,
        "layer_types": ["sliding_attention"] * 4 + ["full_attention"],
        "sliding_window": 2048,
        "block_size": 16,
        "num_target_layers": 64,
        "dflash_config": {"target_layer_ids": [1, 16, 31, 46, 61], "mask_token_id": 248070},
    },
    "qwen3.5-0.8b": {
        "hidden_size": 1024,
        "intermediate_size": 3584,
        "num_hidden_layers": 5,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "vocab_size": 248320,
        "layer_types": ["full_attention"] * 5,
        "block_size": 16,
        "num_target_layers": 24,
        "dflash_config": {"target_layer_ids": [1, 6, 11, 16, 21], "mask_token_id": 248070},
    },
    "tiny": {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 5000,
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 32,
        "block_size": 16,
        "num_target_layers": 8,
        "dflash_config": {"target_layer_ids": [1, 4, 6], "mask_token_id": 7},
    },
}


def synthetic(
    shape: str, folder: Path, samples: int, prompt_tokens: int, tokens: int, evaluate: dict[str, Any], device: str
) -> Config:
    """Write cache and drafter of SHAPES[shape] to `folder`, in bfloat16; returns a config that evaluates them.

    samples of `prompt_tokens` + `tokens` tokens each. The numbers are drawn on `device`.
    """
    raw = {"architectures": ["DFlashDraftModel"], **SHAPES[shape]}
    rows = random_samples(samples, prompt_tokens, prompt_tokens + tokens, raw["vocab_size"])
    config = Config.model_validate({
        "name": shape,
        "target": {"model": "random"},
        "completions": {"max_new_tokens": tokens},
        "drafters": [{"name": "random", "checkpoint": str(folder / "drafter"), "reference": True}],
        "evaluate": evaluate,
        "cache_dir": str(folder / "cache"),
        "results_dir": str(folder / "results"),
    })  # fmt: skip
    _write_drafter(folder / "drafter", raw, device)
    _write_cache(config, raw, rows, device)
    return config


def random_samples(samples: int, prompt_tokens: int, length: int, vocabulary: int) -> list[Sample]:
    ids = np.random.default_rng(0).integers(vocabulary, size=(samples, length)).tolist()
    return [
        Sample(f"random-{i}", "", row[:prompt_tokens], row[prompt_tokens:], "", "length") for i, row in enumerate(ids)
    ]


def _write_drafter(folder: Path, raw: dict[str, Any], device: str) -> None:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(raw))
    with torch.device("meta"):
        shapes = {
            name: tensor.shape for name, tensor in DFlashDrafter(DrafterConfig.from_dict(raw)).state_dict().items()
        }
    weights = {
        name: torch.ones(shape).bfloat16() if len(shape) == 1 else _normal(shape, 0.02, device)
        for name, shape in shapes.items()
    }
    save_file(weights, folder / "model.safetensors")


def _write_cache(config: Config, raw: dict[str, Any], rows: list[Sample], device: str) -> None:
    folder, hidden = config.cache_dir, raw["hidden_size"]
    folder.mkdir(parents=True)
    layers = raw["dflash_config"]["target_layer_ids"]
    manifest = Manifest(
        name=config.name, settings=config.cache_settings(), layers=layers, hidden_size=hidden,
        vocab_size=raw["vocab_size"], dtype="bfloat16", target_stats=False, batch_tokens=0, shard_bytes=0,
        provenance={"made by": "dflash-eval bench"},
    )  # fmt: skip
    writer = ShardWriter(folder / "states-00000.h5", rows, layers, hidden, "bfloat16", False)
    for index, row in enumerate(rows):
        for layer in layers:
            writer.write_hidden(index, layer, _normal((len(row), hidden), 1.0, device))
    manifest.shards.append(writer.close())
    names = ("embed_tokens.weight", "lm_head.weight")
    head = {name: _normal((raw["vocab_size"], hidden), 0.02, device) for name in names}
    manifest.head_sha256 = write_head(folder, head)
    manifest.complete = True
    write_completions(folder, rows)
    write_manifest(folder, manifest)


def _normal(shape: Any, std: float, device: str) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.bfloat16, device=device).normal_(std=std).cpu()
