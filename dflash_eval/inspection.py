"""What a drafter's checkpoint is: what it says of itself, what its weights say, and whether a cache can serve it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from dflash_eval.cache import Manifest, read_manifest
from dflash_eval.compatible import check_fits
from dflash_eval.config import DrafterOverrides, DrafterSpec, EvaluateConfig
from dflash_eval.drafter.checkpoint import read_config, target_of
from dflash_eval.drafter.config import DrafterConfig
from dflash_eval.drafter.fit import Fit, check_fit, compare_weights
from dflash_eval.drafter.weights import not_finite, read_tensors
from dflash_eval.errors import UserError
from dflash_eval.sources import resolve

DESCRIPTION = ("*.json", "*.jinja", "*.txt", "*.model")  # a target's config and tokenizer, not its weights
Facts = dict[str, Any]


def inspect(
    checkpoint: str,
    against: str | None = None,
    cache: Path | None = None,
    overrides: DrafterOverrides = DrafterOverrides(),  # noqa: B008
) -> dict[str, Any]:
    """Facts of a checkpoint, which `overrides` amend, and of the one to hold it `against`; with a cache, whether that
    can serve them. Reads all weights. Raises UserError for what no config can be read of.
    """
    if not checkpoint or against == "":
        raise UserError("an empty name is no checkpoint")
    manifest = _manifest(cache) if cache else None
    specs = [DrafterSpec(name="checkpoint", checkpoint=checkpoint, overrides=overrides)]
    if against is not None:
        specs.append(DrafterSpec(name="against", checkpoint=against))
    found = [_facts(spec, manifest) for spec in specs]
    result: dict[str, Any] = {"checkpoint": found[0]}
    if against is not None:
        result["against"] = found[1]
        result["differences"] = [key for key in found[0] if key != "checkpoint" and found[0][key] != found[1][key]]
    if cache:
        result["cache"] = str(cache)
    return result


def _manifest(cache: Path) -> Manifest:
    manifest = read_manifest(cache)
    if manifest is None:
        raise UserError(f"{cache}: no cache here; run the extraction first (dflash-eval extract)")
    return manifest


def _facts(spec: DrafterSpec, manifest: Manifest | None) -> Facts:
    config = read_config(spec)
    fit = compare_weights(spec, config)
    target = _target(spec, manifest, config)
    layers, wanted = target["layers"], config.target_layer_ids
    kinds = Counter(str(stored.dtype)[6:] for stored in fit.stored.values() if stored.dtype.is_floating_point)
    facts: Facts = {
        "checkpoint": spec.checkpoint,
        "format": config.format,
        "files": sorted({stored.file.name for stored in fit.stored.values()}),
        "parameters": sum(math.prod(stored.shape) for stored in fit.stored.values() if stored.dtype.is_floating_point),
        "dtype": ", ".join(kinds),
        "hidden_size": config.hidden_size,
        "block_size": config.block_size,
        "drafts_per_block": config.drafts,
        "predicts_from": "anchor" if config.predicts_anchor else "first mask",
        "mask_token_id": config.mask_token_id,
        "mask_token": target["mask_token"],
        "target": target["model"],
        "target_layers": layers,
        "target_layer_ids": list(wanted),
        "target_layer_kinds": [target["kinds"][i] if i < layers else "none" for i in wanted]
        if target["kinds"]
        else None,
        "reads_last_layer": None if layers is None else layers - 1 in wanted,
        "fc_inputs": next(iter(fit.stored["fc.weight"].shape[1:]), None) if "fc.weight" in fit.stored else None,
        "layers": [_layer(config, i) for i in range(config.num_layers)],
        "rope_theta": config.rope_parameters.get("rope_theta"),
        "rope_type": config.rope_parameters["rope_type"],
        "vocab_size": config.vocab_size,
        "draft_vocab_size": config.draft_vocab_size or config.vocab_size,
        "own_embedding": fit.drafter.embed_tokens is not None,
        "own_head": fit.drafter.lm_head is not None,
        "heads": _heads(config),
        "missing": fit.missing,
        "unexpected": fit.unexpected,
        "misshapen": {name: {"is": is_, "wanted": wanted} for name, (is_, wanted) in fit.misshapen.items()},
        "never_used": fit.unused,
    }
    facts |= _weights(fit)
    facts["problems"] = _problems(spec, config, fit, facts)
    if manifest is not None:
        facts["cache_serves"], facts["cache_reason"] = _served(spec, config, manifest)
    return facts


def _layer(config: DrafterConfig, index: int) -> str:
    window = config.windows[index]
    kind = "full attention" if window is None else f"window {window}"
    if window is not None and config.window_from_anchor:
        kind += " before the anchor"
    return f"{kind}, {'causal' if config.causal[index] else 'both ways'} inside the block"


def _heads(config: DrafterConfig) -> str | None:
    if config.selector_rank:
        return (
            f"candidate selector of rank {config.selector_rank} over {config.selector_top_k}, "
            f"convolutions of {config.conv_kernel_size} taps"
        )
    return f"{config.markov_head_type} Markov head of rank {config.markov_rank}" if config.markov_rank else None


def _target(spec: DrafterSpec, manifest: Manifest | None, config: DrafterConfig) -> Facts:
    """What is known of the target, from the cache or from its own config where the checkpoint names it."""
    model, layers = target_of(spec)
    found: Facts = {"model": model, "layers": layers, "kinds": None, "mask_token": None}
    revision = None
    if manifest is not None:
        settings = manifest.settings["target"]
        found |= {"model": settings["model"], "layers": manifest.provenance.get("target_layers", layers)}
        revision = settings["revision"]
    if found["model"] is None:
        return found
    from transformers import AutoConfig, AutoTokenizer, logging

    logging.set_verbosity_error()
    try:
        path = resolve(found["model"], revision, DESCRIPTION)
        arguments = {"gguf_file": path.name} if path.is_file() else {}
        folder = path.parent if path.is_file() else path
        described = AutoConfig.from_pretrained(folder, trust_remote_code=False, **arguments).get_text_config()
        found["layers"] = described.num_hidden_layers
        found["kinds"] = list(
            getattr(described, "layer_types", None) or ["full_attention"] * described.num_hidden_layers
        )
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False, **arguments)
        found["mask_token"] = tokenizer.convert_ids_to_tokens(config.mask_token_id)
    except (UserError, OSError, ValueError, KeyError, AttributeError, ImportError, IndexError, RuntimeError):
        pass  # what is not here is not known; the table says so
    return found


def _weights(fit: Fit) -> Facts:
    """What the weights themselves show: those that are not finite, and norms that no training has touched."""
    broken, untrained = {}, []
    for name, tensor in read_tensors(fit.stored):
        if not tensor.dtype.is_floating_point:
            continue
        nan, infinite = not_finite(tensor)
        if nan or infinite:
            broken[name] = {"nan": nan, "infinite": infinite}
        elif name.endswith("norm.weight") and len(tensor.unique()) == 1:
            untrained.append(f"{name} (all {float(tensor.flatten()[0]):g})")
    return {"not_finite": broken, "untrained_norms": untrained}


def _problems(spec: DrafterSpec, config: DrafterConfig, fit: Fit, facts: Facts) -> list[str]:
    """What keeps the checkpoint from being judged, or should make one look again."""
    problems = []
    try:
        check_fit(spec.checkpoint, config, fit)
    except UserError as error:
        problems.append(str(error).removeprefix(f"{spec.checkpoint}: "))
    for name, counts in facts["not_finite"].items():
        problems.append(f"{name} holds {counts['nan']:,} NaN and {counts['infinite']:,} infinite values")
    if facts["untrained_norms"]:
        problems.append(f"norms that look untrained: {_some(facts['untrained_norms'])}")
    if facts["reads_last_layer"]:
        problems.append("fc reads the target's last layer, which the official recipe keeps for the target's logits")
    beyond = [i for i in config.target_layer_ids if facts["target_layers"] is not None and i >= facts["target_layers"]]
    if beyond:
        problems.append(f"target_layer_ids {beyond} do not exist in a target of {facts['target_layers']} layers")
    return problems


def _served(spec: DrafterSpec, config: DrafterConfig, manifest: Manifest) -> tuple[bool, str | None]:
    try:
        check_fits(spec, config, manifest, EvaluateConfig().width)
    except UserError as error:
        return False, str(error).removeprefix(f"{spec.name} ({spec.checkpoint}): ")
    return True, None


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


# On the terminal


ROWS = {
    "format": "format",
    "files": "files",
    "parameters": "parameters",
    "dtype": "dtype",
    "hidden_size": "hidden size",
    "block_size": "block size",
    "drafts_per_block": "drafts a block",
    "predicts_from": "predicts from",
    "mask_token_id": "mask token",
    "target": "target",
    "target_layer_ids": "target layers",
    "target_layer_kinds": "their attention",
    "reads_last_layer": "reads the last layer",
    "fc_inputs": "fc inputs",
    "layers": "layers",
    "rope_theta": "RoPE base",
    "rope_type": "RoPE type",
    "vocab_size": "vocabulary",
    "draft_vocab_size": "drafts from",
    "own_embedding": "embedding",
    "own_head": "output head",
    "heads": "further heads",
    "missing": "missing tensors",
    "unexpected": "unexpected tensors",
    "never_used": "never used",
    "cache_serves": "cache serves it",
}


def print_inspection(result: dict[str, Any], console: Console) -> None:
    """Facts as a table; beside the reference's, with those that differ in bold."""
    columns = [result["checkpoint"], *([result["against"]] if "against" in result else [])]
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
    table.add_column("", no_wrap=True)
    for facts in columns:
        table.add_column(facts["checkpoint"], overflow="fold")
    for key, title in ROWS.items():
        cells = [_cell(key, facts) for facts in columns]
        if any(cells):
            differs = key in result.get("differences", ())
            table.add_row(Text(f"{title} ≠" if differs else title), *map(Text, cells), style="bold" if differs else "")
    console.print(table)
    for facts in columns:
        for problem in facts["problems"]:
            console.print(f"{facts['checkpoint']}: {problem}", highlight=False, markup=False, soft_wrap=True)
        if facts.get("cache_reason"):
            reason = f"{result['cache']} cannot serve {facts['checkpoint']}: {facts['cache_reason']}"
            console.print(reason, highlight=False, markup=False, soft_wrap=True)


def _cell(key: str, facts: Facts) -> str:
    value: Any = facts.get(key)
    if key == "mask_token_id" and facts["mask_token"] is not None:
        return f"{value} {facts['mask_token']!r}"
    if key == "parameters":
        return f"{value:,}"
    if key == "target":
        name = "not known: --cache tells it" if value is None else str(value)
        return f"{name} ({facts['target_layers']} layers)" if facts["target_layers"] else name
    if key in ("own_embedding", "own_head"):
        return "its own" if value else "the target's"
    if key == "layers":
        return "\n".join(f"{layer} x{count}" if count > 1 else layer for layer, count in _runs(value))
    if key == "target_layer_kinds" and value:
        return ", ".join(kind.removesuffix("_attention") for kind in value)
    if key in ("missing", "unexpected", "never_used"):
        return _some(value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return "" if value is None else str(value)


def _runs(layers: list[str]) -> list[tuple[str, int]]:
    runs: list[tuple[str, int]] = []
    for layer in layers:
        if runs and runs[-1][0] == layer:
            runs[-1] = (layer, runs[-1][1] + 1)
        else:
            runs.append((layer, 1))
    return runs
