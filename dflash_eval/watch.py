"""Checkpoints of a training run judged as they appear."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dflash_eval.config import Config, DrafterSpec
from dflash_eval.drafter.checkpoint import check_weights, read_config
from dflash_eval.errors import RunError, UserError
from dflash_eval.evaluate import evaluate
from dflash_eval.sources import holds_weights, step_order

State = tuple[tuple[str, int, int], ...]  # a checkpoint's files: name, bytes, time of the last change


def watch(
    config: Config,
    folder: Path,
    every: float,
    say: Callable[[str], None],
    pause: Callable[[float], object] = time.sleep,
) -> None:
    """Judge the config's drafters, then every checkpoint in `folder` as it becomes whole; until a signal ends it.

    A checkpoint is whole when its files have not changed between two looks, `every` seconds apart, and their headers
    agree with its config. One that changes after it was judged is judged anew. Results, report and history are written
    anew after each one.
    """
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder to watch")
    results = evaluate(config) if config.drafters else None
    say(_told(results) if results else f"no drafters in the config; watching {folder}")
    drafters = {spec.name: spec for spec in config.drafters}
    seen: dict[Path, State] = {}
    done: dict[Path, State] = {}
    refused: dict[Path, str] = {}
    while True:
        for path in sorted(filter(holds_weights, folder.iterdir()), key=step_order):
            state = _state(path)
            settled, seen[path] = seen.get(path) == state, state
            if not settled or done.get(path) == state:
                continue
            spec = _spec(path, folder, config)
            try:
                check_weights(spec, read_config(spec))
            except UserError as error:
                if refused.get(path) != str(error):
                    say(f"waiting for {path.name}: {error}")
                refused[path] = str(error)
                continue
            done[path] = state
            known = [entry for entry in results["drafters"] if entry["name"] != spec.name] if results else []
            drafters[spec.name] = spec
            try:
                both = config.model_copy(update={"drafters": tuple(drafters.values())})
                results = evaluate(both, known)
            except (UserError, RunError) as error:
                del drafters[spec.name]
                say(f"{path.name} failed: {error}")
            else:
                say(_told(results, spec.name))
        pause(every)


def _spec(path: Path, folder: Path, config: Config) -> DrafterSpec:
    name = path.stem if path.is_file() else path.name
    if any(spec.name == name for spec in config.drafters):
        name = f"{folder.resolve().name}-{name}"
    return DrafterSpec(name=name, checkpoint=str(path))


def _state(path: Path) -> State:
    try:
        files = sorted(path.rglob("*")) if path.is_dir() else [path]
        return tuple((str(file), (own := file.stat()).st_size, own.st_mtime_ns) for file in files)
    except OSError:  # a trainer that writes aside and renames
        return ()


def _told(results: dict[str, Any], name: str | None = None) -> str:
    return "; ".join(
        f"{entry['name']}: τ {entry['tau']:.2f}" if entry["tau"] is not None else f"{entry['name']}: no cycle"
        for entry in results["drafters"]
        if name in (None, entry["name"])
    )
