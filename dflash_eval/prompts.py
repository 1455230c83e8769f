"""What the target is asked: prompt sets, and how a prompt becomes token ids."""

from __future__ import annotations

import json
import os.path
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import resources
from itertools import islice
from pathlib import Path
from typing import Any

from jinja2 import TemplateError

from dflash_eval.config import PromptsConfig
from dflash_eval.errors import UserError

MARKER = "answer-of-the-assistant"


@dataclass(frozen=True)
class Prompt:
    """A prompt's user turns. Only the first is asked: of a multi-turn row, the rest is kept but unused."""

    id: str
    turns: tuple[str, ...]


def load_prompts(config: PromptsConfig) -> list[Prompt]:
    """The prompts of `config.source`, in order, the first `config.limit` of them.

    A row is {"id", "prompt"} or {"id", "turns": [...]}; one without an id is called `<file stem>-<line>`, as
    in humaneval-001. Raises UserError with file and line for a row that is neither, an empty prompt and an id
    that stands twice, and for a source that cannot be read or holds nothing.
    """
    prompts: list[Prompt] = []
    places: dict[str, str] = {}
    for place, row, default_id in islice(_rows(config.source), config.limit):
        prompt = _prompt(place, row, default_id)
        if prompt.id in places:
            raise UserError(f"{place}: id {prompt.id!r} stands at {places[prompt.id]} already")
        places[prompt.id] = place
        prompts.append(prompt)
    if not prompts:
        raise UserError(f"{config.source}: no prompts in it")
    return prompts


def _rows(source: str) -> Iterator[tuple[str, Any, str]]:
    """Of each row: where it stands, the row, and the id that it gets where it has none."""
    if source.startswith("hf:"):
        yield from _hub_rows(source)
        return
    name, text = _read_builtin(source) if source.startswith("builtin:") else _read_file(source)
    # Not splitlines(): U+2028 and its like may stand unescaped in a JSON string.
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            place = f"{name}:{number}"
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise UserError(f"{place}: not JSON: {error}\na prompt file has one object a line") from None
            yield place, row, f"{Path(name).stem}-{number:03d}"


def _read_builtin(source: str) -> tuple[str, str]:
    folder = resources.files("dflash_eval") / "data"
    files = {file.name: file for file in folder.iterdir() if file.name.endswith(".jsonl")}
    name = f"{source.removeprefix('builtin:')}.jsonl"
    if name not in files:
        sets = ", ".join(f"builtin:{file.removesuffix('.jsonl')}" for file in sorted(files))
        raise UserError(f"prompts.source {source}: no such set; there is {sets}")
    return name, files[name].read_text(encoding="utf-8")


def _read_file(source: str) -> tuple[str, str]:
    path = Path(os.path.expanduser(source))
    try:
        return str(path), path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise UserError(f"{path}:{line}: not UTF-8 text") from None
    except FileNotFoundError:
        forms = "builtin:<set>, the path of a JSONL file, or hf:<dataset>"
        raise UserError(f"{path}: no such file; prompts.source is {forms}") from None
    except OSError as error:
        raise UserError(f"{path}: the prompts cannot be read: {error.strerror}") from None


def _hub_rows(source: str) -> Iterator[tuple[str, Any, str]]:
    """hf:<dataset> or hf:<dataset>:<split>; without a split, the only one or else `test`."""
    try:
        import datasets
    except ImportError:
        raise UserError(f"prompts.source {source}: not without a package: pip install datasets") from None
    name, _, split = source.removeprefix("hf:").partition(":")
    try:
        data = datasets.load_dataset(name, split=split or None)
    except Exception as error:  # hub, network, parser: whatever it is, the user asked for this data set
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise UserError(f"prompts.source {source}: the data set cannot be loaded: {reason}") from None
    if not split:
        if len(data) > 1 and "test" not in data:
            splits = ", ".join(f"{source}:{split}" for split in data)
            raise UserError(f"prompts.source {source}: which split? {splits}")
        data = data["test"] if "test" in data else next(iter(data.values()))
    for number, row in enumerate(data, 1):
        yield f"{source} row {number}", row, f"{name.split('/')[-1]}-{number:03d}"


def _prompt(place: str, row: Any, default_id: str) -> Prompt:
    if not isinstance(row, dict):
        raise UserError(f"{place}: not a JSON object")
    if row.get("prompt") is not None:
        key, turns = "prompt", [row["prompt"]]
    elif row.get("turns") is not None:
        key, turns = "turns", row["turns"]
    else:
        raise UserError(f'{place}: neither "prompt" nor "turns" among its keys ({", ".join(map(str, row))})')
    if not isinstance(turns, list | tuple) or not all(isinstance(turn, str) for turn in turns):
        raise UserError(f'{place}: "{key}" must be {"text" if key == "prompt" else "a list of texts"}')
    if not turns or not all(turn.strip() for turn in turns):
        raise UserError(f'{place}: "{key}" is empty')
    if any("\ud800" <= letter <= "\udfff" for turn in turns for letter in turn):
        raise UserError(f'{place}: "{key}" holds half of a surrogate pair, which is no character')
    own = row.get("id")
    if own is None:
        own = default_id
    if isinstance(own, bool) or not isinstance(own, str | int) or own == "":
        raise UserError(f'{place}: "id" must be text or a whole number')
    return Prompt(str(own), tuple(turns))


def has_chat_template(tokenizer: Any) -> bool:
    """Whether prompts are rendered as a chat, or go in as plain text."""
    return bool(_template(tokenizer))


def _template(tokenizer: Any) -> str | None:
    template = tokenizer.chat_template
    return template.get("default") if isinstance(template, dict) else template


def render_prompt(tokenizer: Any, prompt: Prompt, *, system: str | None, enable_thinking: bool) -> list[int]:
    """Token ids of the prompt's first turn as a chat, up to where the assistant begins.

    Without a chat template: the system text, a blank line and the prompt, with the special tokens that the
    tokenizer itself adds. Raises UserError where the template refuses the system role, or the prompt.
    """
    template = _template(tokenizer)
    if not template:
        text = prompt.turns[0] if system is None else f"{system}\n\n{prompt.turns[0]}"
        return [int(token) for token in tokenizer(text)["input_ids"]]
    messages = [] if system is None else [{"role": "system", "content": system}]
    messages.append({"role": "user", "content": prompt.turns[0]})
    thinking = {"enable_thinking": enable_thinking} if "enable_thinking" in template else {}
    try:
        ids = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=True, return_dict=False, **thinking
        )
    except TemplateError as error:
        refused = f"prompt {prompt.id!r}" if system is None else "prompts.system (try prompts.system: null)"
        raise UserError(f"the target's chat template refuses {refused}: {error}") from None
    return [int(token) for token in ids]


def stop_token_ids(tokenizer: Any, generation_config: Any) -> list[int]:
    """Ids that end a completion, sorted: those of the generation config, the tokenizer's end of sequence, and
    the token with which the chat template closes the assistant's turn.
    """
    named = getattr(generation_config, "eos_token_id", None)
    ids = list(named) if isinstance(named, list | tuple) else [named]
    ids += [tokenizer.eos_token_id, _end_of_turn(tokenizer)]
    return sorted({int(token) for token in ids if token is not None})


def _end_of_turn(tokenizer: Any) -> int | None:
    """The first special token that the template puts after the assistant's text."""
    if not has_chat_template(tokenizer):
        return None
    chat = [{"role": "user", "content": "question"}, {"role": "assistant", "content": MARKER}]
    try:
        text = tokenizer.apply_chat_template(chat, tokenize=False)
        _, found, tail = text.rpartition(MARKER)
        ids = tokenizer(tail, add_special_tokens=False)["input_ids"] if found else []
    except Exception:  # a template may do anything; then the other stop tokens have to do
        return None
    added = tokenizer.added_tokens_decoder
    special = {*tokenizer.all_special_ids, *(token for token, content in added.items() if content.special)}
    return next((token for token in ids if token in special), None)
