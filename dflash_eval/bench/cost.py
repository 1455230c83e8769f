"""What a draft and a verification cost on this device: the numbers that `evaluate.cost` asks for."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from dflash_eval.bench.ceiling import median_seconds, synchronize
from dflash_eval.cache import DTYPES, Cache
from dflash_eval.config import Config
from dflash_eval.drafter.checkpoint import load_drafter, read_config
from dflash_eval.drafter.scoring import Scorer
from dflash_eval.errors import UserError
from dflash_eval.judge import judges
from dflash_eval.machine import device_name, pick_device
from dflash_eval.target import TargetFiles, load_target

REPEATS = 5


def bench_cost(config: Config, context: int, say: Callable[[str], None]) -> dict[str, Any]:
    """{"draft_ms", "verify_ms"}: one sequence, `context` tokens before it, batch size 1; `say` gets lines and the YAML.

    A draft is one block of a drafter through its output head; of several drafters the slowest counts. A verification is
    the target's forward over 1, a block's and each budget's tokens on top of its cached context, causal among them: a
    tree's mask, and the building of the tree, are not in it.
    """
    cache = Cache(config.cache_dir)
    drafts = {spec.name: _draft_ms(config, i, cache) for i, spec in enumerate(config.drafters)}
    if not drafts:
        raise UserError("no drafters to time: list them under drafters in the config")
    for name, milliseconds in drafts.items():
        say(f"{name}: {milliseconds:.3f} ms a block on {device_name(pick_device(config.evaluate.device))}")
    blocks = {read_config(spec).drafts + 1 for spec in config.drafters}
    counts = sorted({1, *blocks, *(1 + budget for budget in config.evaluate.budgets)})
    target = load_target(TargetFiles.find(config.target), config.target)
    if target.max_positions is not None and context + counts[-1] > target.max_positions:
        raise UserError(f"--context {context}: with {counts[-1]} tokens more than the target's {target.max_positions}")
    verify = {}
    ids = torch.randint(1000 % target.vocab_size, (1, context + counts[-1]), generator=torch.Generator().manual_seed(0))
    ids = ids.to(target.device)
    with torch.inference_mode():
        past = target.model(ids[:, :context], use_cache=True).past_key_values
        for count in counts:
            verify[count] = _verify_ms(target, ids[:, context : context + count], past)
            say(f"verifying {count:,} tokens after {context:,}: {verify[count]:.3f} ms on {device_name(target.device)}")
    figures = {"draft_ms": max(drafts.values()), "verify_ms": verify}
    told = ", ".join(f"{count}: {milliseconds:.4g}" for count, milliseconds in verify.items())
    say(f"evaluate:\n  cost: {{draft_ms: {figures['draft_ms']:.4g}, verify_ms: {{{told}}}}}")
    return figures


def _draft_ms(config: Config, index: int, cache: Cache) -> float:
    spec, settings = config.drafters[index], config.evaluate
    device, dtype = pick_device(settings.device), DTYPES[settings.dtype]
    embedding, head = cache.head()
    embedding, lm_head = embedding.to(device), head.to(device, dtype)
    drafter = load_drafter(spec, read_config(spec), device, dtype)
    scorer = Scorer(drafter, lm_head, max(settings.width, *settings.budgets))
    _, judge = next(judges(drafter, cache, drafter.embedding(embedding), scorer, settings, lambda _: None))
    owners, anchors, _ = judge.every_anchor()
    if not len(anchors):
        raise UserError(f"{cache.folder}: no completion to draft at")
    last = np.array([anchors.argmax()])

    def draft() -> None:
        hidden, tokens, _ = judge.draft(owners[last], anchors[last])
        scorer.score(hidden.flatten(0, 1), tokens.flatten())

    with torch.inference_mode():
        return 1000 * median_seconds(draft, device)


def _verify_ms(target: Any, ids: torch.Tensor, past: Any) -> float:
    times = []
    for _ in range(REPEATS + 1):  # the first one warms up
        own = copy.deepcopy(past)  # a cache of linear attention cannot be cut back
        synchronize(target.device)
        start = time.perf_counter()
        target.model(ids, past_key_values=own, use_cache=True)
        synchronize(target.device)
        times.append(1000 * (time.perf_counter() - start))
    return sorted(times[1:])[REPEATS // 2]
