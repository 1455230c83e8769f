"""Why is this drafter's τ low? It is run as configured, then with one thing changed at a time, on a part of the cache.

What is compared is how probable the text is under the drafter, at the same anchors for all, and τ of its own walks. A
change is accused when it makes the text more probable and raises τ, beyond the noise of all comparisons together
(`diagnosis.ranking` says what protects against a false accusation).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from dflash_eval.acceptance.statistics import tau
from dflash_eval.cache import DTYPES, Cache, write_atomically
from dflash_eval.compatible import check_fits
from dflash_eval.config import Config, DrafterSpec
from dflash_eval.diagnosis import counterfactuals as cf
from dflash_eval.diagnosis.counterfactuals import Counterfactual, Untested
from dflash_eval.diagnosis.excerpts import Excerpts
from dflash_eval.diagnosis.ranking import RULE, compare
from dflash_eval.diagnosis.reading import Reading
from dflash_eval.diagnosis.report import markdown
from dflash_eval.diagnosis.symptoms import fc_shares, features_worth, slot_numbers, symptoms, weight_symptoms
from dflash_eval.diagnosis.target_facts import TargetFacts, target_facts
from dflash_eval.diagnosis.trial import Trials
from dflash_eval.drafter.checkpoint import load_drafter, read_config
from dflash_eval.drafter.config import DrafterConfig
from dflash_eval.drafter.fit import compare_weights
from dflash_eval.drafter.model import DFlashDrafter
from dflash_eval.errors import UserError
from dflash_eval.evaluate import check_writable, fitting_cache
from dflash_eval.inspection import weight_facts
from dflash_eval.machine import device_name, pick_device, software

PROMPTS, TOKENS = 16, 64  # looked at, and of each completion


@dataclass(frozen=True)
class Drafted:
    """A drafter of the config, loaded, and how it is run as configured."""

    spec: DrafterSpec
    drafter: DFlashDrafter
    base: Reading

    @property
    def config(self) -> DrafterConfig:
        return self.base.config


def diagnose(config: Config, name: str, config_path: Path) -> dict[str, Any]:
    """Diagnose the config's drafter of that name; writes diagnosis.json and diagnosis.md to `config.results_dir`.

    Raises UserError for a drafter or cache that cannot be judged. The states are read once.
    """
    spec = _named(config, name)
    check_writable(config.results_dir)
    cache = fitting_cache(config)
    device, dtype = pick_device(config.evaluate.device), DTYPES[config.evaluate.dtype]
    mine = _load(spec, cache, device, dtype)
    reference = next((other for other in config.drafters if other.reference and other.name != name), None)
    theirs = _load(reference, cache, device, dtype) if reference else None
    embedding, lm_head = cache.head()
    embedding, lm_head = embedding.to(device), lm_head.to(device, dtype)
    facts = target_facts(cache.manifest)

    ids = mine.config.target_layer_ids
    layers = sorted(set(cache.manifest.layers) & _reachable(ids, theirs, facts))
    excerpts = Excerpts(cache, layers, PROMPTS, TOKENS)
    if not excerpts.samples:
        raise UserError(f"{cache.folder}: no completion of two tokens or more, nothing to diagnose from")
    entries = _entries(mine, cache, excerpts, facts, mine.drafter.embedding(embedding), lm_head, config_path, config)
    untested = [entry for entry in entries if isinstance(entry, Untested)]
    trials = Trials(mine.drafter, excerpts, embedding, lm_head, config.evaluate)
    tests = [entry for entry in entries if isinstance(entry, Counterfactual)]
    rows, base = compare(trials, mine.base, tests, untested, config)

    numbers = _numbers(mine, trials)
    others = _numbers(theirs, Trials(theirs.drafter, excerpts, embedding, lm_head, config.evaluate)) if theirs else None
    shares = fc_shares(mine.drafter, excerpts)
    weights = weight_facts(compare_weights(spec, mine.config))
    found = weight_symptoms(shares, weights, facts.layers) + symptoms(numbers, others)
    agreement = cache.greedy_agreement()
    if agreement is not None and agreement < 0.98 and cache.manifest.sampling() is None:
        found.append(
            f"greedy agreement {agreement:.3f}: text and features come from different numerics (quantised target, "
            "another engine or chat template); every drafter loses by it"
        )
    result = {
        "schema_version": 1,
        "name": config.name,
        "drafter": name,
        "checkpoint": spec.checkpoint,
        "reference": reference.name if reference else None,
        "cache": {"fingerprint": cache.manifest.fingerprint(), "prompts": len(excerpts.samples), "tokens": TOKENS},
        "tau": tau(base),
        "rule": RULE,
        "comparisons": len(rows),
        "counterfactuals": rows,
        "verdicts": _verdicts(rows, tau(base)),
        "symptoms": found,
        "numbers": {"drafter": numbers, "reference": others},
        "fc": shares,
        "untested": [vars(entry) for entry in untested],
        "provenance": {"device": device_name(device), "dtype": config.evaluate.dtype, "software": software()},
    }
    write_atomically(config.results_dir / "diagnosis.json", json.dumps(result, indent=2, ensure_ascii=False) + "\n")
    write_atomically(config.results_dir / "diagnosis.md", markdown(result))
    return result


def _named(config: Config, name: str) -> DrafterSpec:
    for spec in config.drafters:
        if spec.name == name:
            return spec
    known = ", ".join(spec.name for spec in config.drafters) or "none"
    raise UserError(f"--drafter {name}: no drafter of that name in the config; there: {known}")


def _load(spec: DrafterSpec, cache: Cache, device: torch.device, dtype: torch.dtype) -> Drafted:
    config = read_config(spec)
    check_fits(spec, config, cache.manifest, 1)
    drafter = load_drafter(spec, config, device, dtype, missing_d2t="first tokens")
    return Drafted(spec, drafter, Reading(config, dtype))


def _reachable(ids: Sequence[int], theirs: Drafted | None, facts: TargetFacts) -> set[int]:
    """The layers that some counterfactual reads."""
    near = {layer + shift for layer in ids for shift in (-1, 0, 1)}
    if facts.layers is not None:
        near |= set(cf.default_target_layer_ids(facts.layers, len(ids)))
    return near | set(theirs.config.target_layer_ids if theirs else ())


def _entries(
    mine: Drafted,
    cache: Cache,
    excerpts: Excerpts,
    facts: TargetFacts,
    embedding: Tensor,
    lm_head: Tensor,
    config_path: Path,
    config: Config,
) -> list[Counterfactual | Untested]:
    """Everything to try on the drafter, and what cannot be."""
    base, cached = mine.base, cache.manifest.layers
    command = f"dflash-eval extract -c {config_path} --force --set extract.extra_layers=neighbours"
    entries: list[Counterfactual | Untested] = [*cf.layer_shifts(base, cached, facts, command)]
    normed = cf.normed_last(base, facts)
    if normed is not None and facts.layers is not None:
        weight = _norm_weight(cache)
        made = weight is not None and excerpts.add_normed(facts.layers - 1, weight, lm_head)
        why = "the target's final norm is not in the cache, or is none that the cached text confirms"
        entries.append(normed if made else Untested(normed.change, why))
    used = {token for sample in excerpts.samples for token in sample.input_ids}
    longest = max(map(len, excerpts.samples))
    entries += [*cf.slots(base), *cf.context(base), *cf.positions(base), *cf.rope(base, facts)]
    entries += [*cf.windows(base, longest), *cf.masks(base, facts, used, embedding), cf.scales(base), cf.dtypes(base)]
    own = mine.drafter.lm_head.weight if mine.drafter.lm_head is not None else None
    entries += cf.draft_vocabulary(base, mine.drafter.d2t, own, lm_head)
    if not facts.described:
        why = "the target's config and tokenizer are not at hand"
        entries.append(
            Untested("special tokens as mask token", why, f"put {config.target.model} where this machine finds it")
        )
    return entries + _of_other_text(config, config_path)


def _of_other_text(config: Config, config_path: Path) -> list[Counterfactual | Untested]:
    """Chat template and thinking: another text, which the target has to write."""
    changes = {
        f"prompts.enable_thinking: {str(not config.prompts.enable_thinking).lower()}": (
            f"prompts.enable_thinking={str(not config.prompts.enable_thinking).lower()}",
            "thinking",
        ),
        f"prompts.raw: {str(not config.prompts.raw).lower()} (chat template)": (
            f"prompts.raw={str(not config.prompts.raw).lower()}",
            "template",
        ),
    }
    entries: list[Counterfactual | Untested] = []
    for change, (setting, word) in changes.items():
        folders = f"--set cache_dir={config.cache_dir}-{word} --set results_dir={config.results_dir}-{word}"
        command = f"dflash-eval extract -c {config_path} --set {setting} {folders}"
        entries.append(Untested(change, "other text; then evaluate with the same --set and compare τ", command))
    return entries


def _numbers(drafted: Drafted, trials: Trials) -> dict[str, Any]:
    numbers = slot_numbers(
        drafted.drafter, trials.excerpts, trials.embedding, trials.head(drafted.base.dtype), trials.config
    )
    return {**numbers, "features_worth": features_worth(trials, drafted.base)}


def _norm_weight(cache: Cache) -> Tensor | None:
    with safe_open(cache.folder / "head.safetensors", framework="pt") as file:
        return file.get_tensor("norm.weight") if "norm.weight" in file.keys() else None  # noqa: SIM118


def _verdicts(rows: list[dict[str, Any]], base: float | None) -> list[str]:
    """The first accused change with its cause, the others in short: a change may help because it undoes a part."""
    accused = [row for row in rows if row["accused"]]
    lines = []
    if accused:
        row = accused[0]
        lines.append(f"{_raises(row, base)}. Likely: {row['cause']}. Look at {row['look']}")
    lines += [f"also helps, but less, perhaps as a part of it: {_raises(row, base)}" for row in accused[1:]]
    return lines


def _raises(row: dict[str, Any], base: float | None) -> str:
    low, high = row["tau_difference_ci95"]
    return f"{row['change']}: τ {base:.2f} → {row['tau']:.2f} ({row['tau_difference']:+.2f} [{low:+.2f}, {high:+.2f}])"
