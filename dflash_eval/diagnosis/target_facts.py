"""What counterfactuals need to know of the target: its layers, RoPE base, mask and padding tokens, special tokens."""

from __future__ import annotations

from dataclasses import dataclass, field

from dflash_eval.cache import Manifest
from dflash_eval.errors import UserError
from dflash_eval.sources import resolve

DESCRIPTION = ("*.json", "*.jinja", "*.txt", "*.model")  # a target's config and tokenizer, not its weights


@dataclass
class TargetFacts:
    """`described` is False where neither config nor tokenizer is at hand: then only the cache tells something."""

    layers: int | None
    described: bool = False
    rope_theta: float | None = None
    special_tokens: dict[str, int] = field(default_factory=dict)
    """Mask and padding token first, then the others, then the first row of the embedding that has no token."""


def target_facts(manifest: Manifest) -> TargetFacts:
    """From the cache, and from the target's own config and tokenizer where they can be had."""
    settings = manifest.settings["target"]
    facts = TargetFacts(manifest.provenance.get("target_layers"))
    from transformers import AutoConfig, AutoTokenizer, logging

    logging.set_verbosity_error()
    try:
        path = resolve(settings["model"], settings["revision"], DESCRIPTION)
        arguments = {"gguf_file": path.name} if path.is_file() else {}
        folder = path.parent if path.is_file() else path
        described = AutoConfig.from_pretrained(folder, trust_remote_code=False, **arguments).get_text_config()
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False, **arguments)
    except (UserError, OSError, ValueError, KeyError, AttributeError, ImportError, IndexError, RuntimeError):
        return facts
    facts.described = True
    facts.layers = facts.layers or described.num_hidden_layers
    rope = getattr(described, "rope_parameters", None) or {}
    theta = rope.get("rope_theta") or getattr(described, "rope_theta", None)
    facts.rope_theta = float(theta) if theta else None
    for name, token in (("mask", tokenizer.mask_token_id), ("pad", tokenizer.pad_token_id)):
        if token is not None:
            facts.special_tokens[f"the tokenizer's {name} token"] = token
    known = set(facts.special_tokens.values())
    for token, added in sorted(tokenizer.added_tokens_decoder.items()):
        if added.special and token not in known:
            facts.special_tokens[str(added)] = token
    if len(tokenizer) < manifest.vocab_size:
        facts.special_tokens["the first row without a token"] = len(tokenizer)
    return facts
