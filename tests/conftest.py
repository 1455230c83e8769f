"""Tiny targets with a tokenizer, and drafters for them that really accept: trained for seconds, in the fixture."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch.nn import functional as F
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    PreTrainedTokenizerFast,
    Qwen3_5TextConfig,
    Qwen3Config,
)

from dflash_eval.cache import Cache
from dflash_eval.config import load_config
from dflash_eval.drafter.config import DrafterConfig
from dflash_eval.drafter.model import DFlashDrafter
from dflash_eval.extract import extract

torch.set_num_threads(1)  # the models are tiny: threads only wait for each other

MASK, END = 256, 257
VOCABULARY = 260
PROMPTS = ["sort a list", "reverse this string, please", "add", "write a loop that counts to ten", "what is x?", "zip"]
TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {token: i for i, token in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|mask|>", "<|end|>", "<|user|>", "<|assistant|>"])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>", chat_template=TEMPLATE)


def tiny_config(kind: str):
    shape = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 256,
        "tie_word_embeddings": False,
        "initializer_range": 0.15,
        "eos_token_id": END,
        "bos_token_id": None,
        "pad_token_id": None,
    }
    if kind == "llama":
        return LlamaConfig(**shape)
    if kind == "qwen3":
        return Qwen3Config(**shape)
    linear = {
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "layer_types": ["linear_attention", "linear_attention", "full_attention"] * 2,
    }
    return Qwen3_5TextConfig(**shape, **linear)


def make_target(folder: Path, kind: str) -> Path:
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(tiny_config(kind)).float().eval()
    tokenizer = tiny_tokenizer()
    # A random model never says <|end|>; a token that it says in the middle of some answers stops them instead.
    answers = []
    for prompt in PROMPTS:
        ids = tokenizer.apply_chat_template([{"role": "user", "content": prompt}], add_generation_prompt=True,
                                            return_tensors="pt", return_dict=False)  # fmt: skip
        answers.append(
            model.generate(ids, max_new_tokens=40, do_sample=False, pad_token_id=0)[0, ids.shape[1] :].tolist()
        )
    said = [{token: answer.index(token) for token in answer} for answer in answers]
    some = [token for own in said for token in own if any(token not in other for other in said)]
    stop = max(some, key=lambda token: min(own.get(token, 40) for own in said))
    model.generation_config.eos_token_id = [stop, END]
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def drafter_json(**changes) -> dict:
    raw = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": 512,
        "vocab_size": VOCABULARY,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "num_target_layers": 6,
        "block_size": 6,
        "layer_types": ["full_attention", "full_attention"],
        "use_sliding_window": True,
        "dflash_config": {"target_layer_ids": [0, 2, 4], "mask_token_id": MASK},
    }
    return {**raw, **changes}


def save_drafter(folder: Path, raw: dict, state: dict[str, torch.Tensor] | None = None) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw))
    if state is None:
        torch.manual_seed(5)
        state = DFlashDrafter(DrafterConfig.from_dict(raw)).state_dict()
    save_file({name: tensor.contiguous() for name, tensor in state.items()}, folder / "model.safetensors")
    return folder


def write_config(folder: Path, model: Path, drafters: list[tuple[str, Path]], **sections) -> Path:
    prompts = folder / "prompts.jsonl"
    if not prompts.exists():
        prompts.write_text("".join(json.dumps({"id": f"p{i}", "prompt": p}) + "\n" for i, p in enumerate(PROMPTS)))
    raw = {
        "name": "tiny",
        "cache_dir": str(folder / "cache"),
        "results_dir": str(folder / "results"),
        "target": {"model": str(model), "device": "cpu", "dtype": "float32"},
        "prompts": {"source": str(prompts)},
        "completions": {"max_new_tokens": 40},
        "drafters": [
            {"name": name, "checkpoint": str(path), "reference": i == 0} for i, (name, path) in enumerate(drafters)
        ],
        "evaluate": {"device": "cpu", "width": 3, "budgets": [1, 4, 16, 64], "bootstrap": 200},
    }
    for section, values in sections.items():
        raw[section] = {**raw[section], **values} if isinstance(values, dict) and section in raw else values
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(raw))
    return path


def train_on_cache(raw: dict, cache: Cache, steps: int = 120) -> dict[str, torch.Tensor]:
    """Overfit a drafter to a cache's own sequences, far enough to accept some drafts and not all."""
    torch.manual_seed(7)
    config = DrafterConfig.from_dict(raw)
    drafter = DFlashDrafter(config)
    embedding, head = cache.head()
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=4e-3)
    for step in range(steps):
        sample = cache.samples[step % len(cache.samples)]
        ids = torch.tensor(sample.input_ids + [END] * config.block_size)
        anchors = torch.arange(len(sample.prompt_ids), len(sample) - 1)
        if not len(anchors):
            continue
        block = torch.full((len(anchors), config.block_size), config.mask_token_id)
        block[:, 0] = ids[anchors]
        truth = ids[anchors[:, None] + torch.arange(1, config.block_size)]
        context = drafter.context(cache.features(sample.id, config.target_layer_ids).float()[None])
        hidden = drafter(F.embedding(block, embedding)[None], anchors[None], context)[0, :, 1:]
        loss = F.cross_entropy(drafter.logits(hidden, head).flatten(0, 1), truth.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return drafter.state_dict()


class Tiny:
    """A target folder, its extracted cache and a trained drafter; `config` ties them together."""

    def __init__(self, folder: Path, kind: str, **drafter_changes) -> None:
        self.folder, self.kind = folder, kind
        self.target = make_target(folder / "target", kind)
        self.raw = drafter_json(**drafter_changes)
        self.drafter = save_drafter(folder / "drafter", self.raw)
        self.config_path = write_config(folder, self.target, [("trained", self.drafter)])
        extract(load_config(self.config_path), say=lambda _: None)
        save_drafter(folder / "drafter", self.raw, train_on_cache(self.raw, Cache(folder / "cache")))

    @property
    def config(self):
        return load_config(self.config_path)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory) -> Tiny:
    """Llama, a drafter with full attention."""
    return Tiny(tmp_path_factory.mktemp("llama"), "llama")


@pytest.fixture(scope="session")
def tiny_qwen3(tmp_path_factory) -> Tiny:
    """Qwen3, a drafter with a causal sliding window shorter than the prompts, as Qwen3.6's has."""
    changes = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 9}
    return Tiny(tmp_path_factory.mktemp("qwen3"), "qwen3", **changes)


@pytest.fixture(scope="session")
def tiny_hybrid(tmp_path_factory) -> Tiny:
    """Qwen3.5 with linear attention, a drafter with a sliding window that is not causal."""
    changes = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 7, "is_causal": False}
    return Tiny(tmp_path_factory.mktemp("hybrid"), "qwen3_5", **changes)
