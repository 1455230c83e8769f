"""Token ids → the text that each adds; for a reader's eyes, from the tokenizer that the cache keeps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from dflash_eval.config import TargetConfig
from dflash_eval.errors import UserError

UNFINISHED = "�"  # what a decoder gives for the first bytes of a letter
WINDOW = 8  # tokens that are decoded again with each one: of a letter's bytes, and of what a decoder joins


def write_tokenizer(folder: Path, tokenizer: Any) -> None:
    """Keep a fast tokenizer in the cache, so that an evaluation can show texts without the target."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        backend.save(str(folder / "tokenizer.json"), pretty=False)


def piece_decoder(folder: Path, target: TargetConfig) -> Callable[[Sequence[int]], list[str]]:
    """The cache's tokenizer; of a cache without one the target's, if that lies on this machine; else ids are shown."""
    decode = _decode(folder, target)
    if decode is None:
        return lambda ids: [f"{token} " for token in ids]
    return lambda ids: pieces(ids, decode)


def _decode(folder: Path, target: TargetConfig) -> Callable[[Sequence[int]], str] | None:
    path = folder / "tokenizer.json"
    if path.exists():
        try:
            kept = Tokenizer.from_file(str(path))
        except Exception as error:  # what tokenizers raises for a damaged file is a plain Exception
            raise UserError(f"{path}: not a readable tokenizer ({error}); remove it") from None
        return lambda ids: kept.decode(list(ids), skip_special_tokens=False)
    if not target.model.startswith("package:") and not Path(target.model).expanduser().is_dir():
        return None
    from dflash_eval.target import TargetFiles, load_tokenizer

    try:
        tokenizer = load_tokenizer(TargetFiles.find(target, weights=False), target)
    except UserError:
        return None
    return lambda ids: tokenizer.decode(list(ids), clean_up_tokenization_spaces=False)


def pieces(ids: Sequence[int], decode: Callable[[Sequence[int]], str]) -> list[str]:
    """The text that each token adds; bytes of an unfinished letter add nothing, its last byte the letter."""
    texts, start, held = [], 0, ""
    for end in range(1, len(ids) + 1):
        text = decode(ids[start:end])
        if text.endswith(UNFINISHED) and end < len(ids):
            texts.append("")
            continue
        texts.append(text[len(held) :])
        if end - start >= WINDOW:
            start = end - 1
            held = decode(ids[start:end])
        else:
            held = text
    return texts
