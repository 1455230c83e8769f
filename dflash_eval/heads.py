"""A target's head: embedding, final norm and LM head, read without the rest of its weights."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from dflash_eval.config import TargetConfig
from dflash_eval.sources import resolve
from dflash_eval.target import (
    TEXT_FILES,
    TargetFiles,
    final_norm,
    find_layers,
    load_errors,
    load_target,
    load_tokenizer,
)


@dataclass
class Head:
    tensors: dict[str, Tensor]  # as head.safetensors has them
    norm: nn.Module | None  # None where the target's logits are more than norm and head
    last_layer: int

    @property
    def output(self) -> Tensor:
        return self.tensors.get("lm_head.weight", self.tensors["embed_tokens.weight"])


def read_head(config: TargetConfig, say: Callable[[str], None]) -> tuple[Any, Any, Head | None]:
    """The target's config, its tokenizer and, where weights are to be had, the head; of the rest no weight is read."""
    files = TargetFiles.find(config, weights=False)
    tokenizer = load_tokenizer(files, config)
    if files.gguf:
        target = load_target(files, config)
        return (
            target.model.config,
            tokenizer,
            _head(target.model.config, target.head(), final_norm(target.model, target.layers)),
        )
    with load_errors(config):
        described = AutoConfig.from_pretrained(files.folder, trust_remote_code=config.trust_remote_code)
        index = files.folder / "model.safetensors.index.json"
        names: dict[str, str] = {}
        if index.exists():
            names = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        elif (files.folder / "model.safetensors").exists():
            with safe_open(files.folder / "model.safetensors", framework="pt") as file:
                names = dict.fromkeys(file.keys(), "model.safetensors")
        parts = {"embed_tokens.weight": "", "lm_head.weight": "", "norm.weight": ""}
        for part in parts:
            ends = ("model.norm.weight", "language_model.norm.weight") if part == "norm.weight" else (part,)
            parts[part] = next((name for name in names if name.endswith(ends) and "visual" not in name), "")
        if not parts["embed_tokens.weight"]:
            say(f"{config.model}: no weights at hand, so no head: evaluate will ask for it")
            return described, tokenizer, None
        wanted = {part: name for part, name in parts.items() if name}
        if described.get_text_config().tie_word_embeddings:
            wanted.pop("lm_head.weight", None)
        folder = resolve(config.model, config.revision, (*TEXT_FILES, *{names[name] for name in wanted.values()}))
        tensors = {}
        for part, name in wanted.items():
            with safe_open(folder / names[name], framework="pt") as file:
                tensors[part] = file.get_tensor(name)
        return described, tokenizer, _head(described, tensors, _norm_module(described, tensors))


def _head(described: Any, tensors: dict[str, Tensor], norm: nn.Module | None) -> Head:
    text_config = described.get_text_config()
    scaled = ("final_logit_softcapping", "logits_scaling", "logit_scale")
    plain = all(getattr(text_config, name, None) in (None, 1.0) for name in scaled)
    return Head(tensors, norm if plain else None, text_config.num_hidden_layers - 1)


def _norm_module(described: Any, tensors: dict[str, Tensor]) -> nn.Module | None:
    """The target's final norm with its weight."""
    if "norm.weight" not in tensors:
        return None
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(described.get_text_config())
    norm = final_norm(model, find_layers(model))
    if norm is None:
        return None
    norm = norm.to_empty(device="cpu")
    norm.weight = nn.Parameter(tensors["norm.weight"], requires_grad=False)
    return norm.float()
