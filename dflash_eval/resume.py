"""What an extraction finds in its cache folder: its own work to go on from, something else, or nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from dflash_eval import cache as cachefile
from dflash_eval.cache import Manifest
from dflash_eval.errors import UserError, listed


def resumable(
    folder: Path, settings: dict[str, Any], layers: Sequence[int], force: bool, say: Callable[[str], None]
) -> Manifest | None:
    """The manifest to go on from, or None to begin anew; with `force`, what does not fit is removed."""
    try:
        manifest = cachefile.read_manifest(folder)
    except UserError:
        if not force:
            raise
        manifest = None
    if manifest is None:
        if force or not any(folder.glob("states-*.h5")):
            cachefile.delete_states(folder)
            _keep_fetched(folder, settings, force, say)
            return None
        raise UserError(f"{folder}: shards without a manifest; remove the folder, or overwrite it with --force")
    if not manifest.shards and not cachefile.read_completions(folder):  # a run that failed before it had made anything
        cachefile.delete_states(folder)
        return None
    different = cachefile.differences(manifest.settings, settings)
    missing = [layer for layer in layers if layer not in manifest.layers]
    if not different and not missing and not force:
        return manifest
    if not force and different:
        raise UserError(
            f"{folder} is the cache of something else: {different[0]}"
            + (f" (and {len(different) - 1} more)" if len(different) > 1 else "")
            + "\ngive the config another name, or overwrite the cache with --force"
        )
    if not force:
        raise UserError(
            f"{folder} has layers {listed(manifest.layers)}, not {listed(missing)}\n"
            "the same command with --force adds them (the completions are kept)"
        )
    cachefile.delete_states(folder)
    if different:
        cachefile.delete_completions(folder)
    else:
        say(f"{folder}: completions kept, states extracted anew")
    return None


def _keep_fetched(folder: Path, settings: dict[str, Any], force: bool, say: Callable[[str], None]) -> None:
    """Completions without a manifest: those that were fetched for this config stay, others go (with `force`)."""
    record = cachefile.read_completions_record(folder)
    if record is not None:
        known = record["settings"]
        wanted = {
            section: {key: settings[section].get(key) for key in keys}
            for section, keys in known.items()
            if section in settings
        }
        different = cachefile.differences(known, wanted)
        if not different:
            return
        if not force:
            raise UserError(
                f"{folder} holds the completions of something else: {different[0]}\n"
                "give the config another name, or overwrite them with --force"
            )
    cachefile.delete_completions(folder)
