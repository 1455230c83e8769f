"""What the target is asked: prompt sets in the forms that people have them in, and how a prompt becomes token ids."""

from __future__ import annotations

import json
import os.path
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import resources
from itertools import islice
from pathlib import Path
from typing import Any

from jinja2 import TemplateError

from dflash_eval.config import PromptsConfig
from dflash_eval.errors import UserError
from dflash_eval.hub_prompts import hub_rows

MARKER = "answer-of-the-assistant"
THINK_END = "</think>"
FORMS = ("prompt", "turns", "messages", "conversations")
ROLES = {  # of "messages", and those that ShareGPT's files call "from"
    **{"system": "system", "user": "user", "assistant": "assistant"},
    **{"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bing": "assistant", "bard": "assistant"},
}


@dataclass(frozen=True)
class Prompt:
    """A conversation's user turns, asked in order with the target's own answers in between; mostly one."""

    id: str
    turns: tuple[str, ...]
    category: str | None = None
    system: str | None = None  # the row's own, which comes before prompts.system

    @property
    def sample_ids(self) -> list[str]:
        """Every turn is a sample, whose prompt holds the conversation so far: <id>, or <id>/turn-1, <id>/turn-2, ..."""
        return [self.id] if len(self.turns) == 1 else [f"{self.id}/turn-{n}" for n in range(1, len(self.turns) + 1)]


def prompt_id(sample_id: str) -> str:
    """The id of the prompt that a sample is of: without the turn that `Prompt.sample_ids` adds."""
    return re.sub(r"/turn-\d+$", "", sample_id)


@dataclass(frozen=True)
class RenderedPrompt:
    """A prompt as the target reads it."""

    id: str
    text: str
    ids: list[int]
    category: str | None = None


def load_prompts(config: PromptsConfig) -> list[Prompt]:
    """The prompts of `config.source`, in order, the first `config.limit` of them.

    A row is {"prompt"}, {"turns": [...]}, {"messages": [{"role", "content"}]} or ShareGPT's {"conversations": [{"from",
    "value"}]}, each with "id" and "category" if it likes; of the last two, assistant messages are left out: the target
    gives its own. One without an id is called `<file stem>-<line>`, as in humaneval-001. Raises UserError with file and
    line for a row of no such form, an empty prompt and an id that stands twice, and for a source that cannot be read or
    holds nothing.
    """
    prompts: list[Prompt] = []
    places: dict[str, str] = {}
    for place, row, default_id in islice(_rows(config.source), config.limit):
        prompt = _prompt(place, row, default_id)
        if config.raw and (len(prompt.turns) > 1 or prompt.system is not None):
            raise UserError(f"{place}: prompts.raw takes a single text, without turns or a system message")
        for sample_id in prompt.sample_ids:
            if sample_id in places:
                raise UserError(f"{place}: id {sample_id!r} stands at {places[sample_id]} already")
            places[sample_id] = place
        prompts.append(prompt)
    if not prompts:
        raise UserError(f"{config.source}: no prompts in it")
    return prompts


def _rows(source: str) -> Iterator[tuple[str, Any, str]]:
    """Of each row: where it stands, the row, and the id that it gets where it has none."""
    if source.startswith("hf:"):
        yield from hub_rows(source)
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


def _prompt(place: str, row: Any, default_id: str) -> Prompt:
    if not isinstance(row, dict):
        raise UserError(f"{place}: not a JSON object")
    key = next((form for form in FORMS if row.get(form) is not None), None)
    if key is None:
        known = " nor ".join(json.dumps(form) for form in FORMS)
        raise UserError(f"{place}: neither {known} among its keys ({', '.join(map(str, row))})")
    system: str | None = None
    turns: Any = row[key]
    if key in ("messages", "conversations"):
        system, turns = _turns_of_messages(place, key, turns)
    elif key == "prompt":
        turns = [turns]
    if not isinstance(turns, list | tuple) or not all(isinstance(turn, str) for turn in turns):
        raise UserError(f'{place}: "{key}" must be {"text" if key == "prompt" else "a list of texts"}')
    if not turns or not all(turn.strip() for turn in turns):
        raise UserError(f'{place}: "{key}" is empty')
    if any("\ud800" <= letter <= "\udfff" for turn in (*turns, system or "") for letter in turn):
        raise UserError(f'{place}: "{key}" holds half of a surrogate pair, which is no character')
    own = row.get("id")
    if own is None:
        own = default_id
    if isinstance(own, bool) or not isinstance(own, str | int) or own == "":
        raise UserError(f'{place}: "id" must be text or a whole number')
    category = row.get("category")
    if category is not None and not isinstance(category, str):
        raise UserError(f'{place}: "category" must be text')
    return Prompt(str(own), tuple(turns), category or None, system)


def _turns_of_messages(place: str, key: str, messages: Any) -> tuple[str | None, list[str]]:
    """The system text and the user's turns of a chat; what an assistant is said to have answered is left out."""
    role_key, text_key = ("role", "content") if key == "messages" else ("from", "value")
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise UserError(f'{place}: "{key}" must be a list of objects with "{role_key}" and "{text_key}"')
    system: str | None = None
    turns: list[str] = []
    for number, message in enumerate(messages, 1):
        named, text = message.get(role_key), message.get(text_key)
        role = ROLES.get(named) if isinstance(named, str) else None
        if role is None:
            known = ", ".join(ROLES)
            raise UserError(f'{place}: "{key}" message {number} has the {role_key} {named!r}; known are {known}')
        if not isinstance(text, str):
            raise UserError(f'{place}: "{key}" message {number} has no text in "{text_key}"')
        if role == "system" and number > 1:
            raise UserError(f'{place}: "{key}" message {number} is a system message; only the first can be one')
        if role == "assistant" and not turns:
            raise UserError(f'{place}: "{key}" begins with the assistant; the user must ask first')
        if role == "system":
            system = text
        elif role == "user":
            turns.append(text)
    return system, turns


def has_chat_template(tokenizer: Any) -> bool:
    """Whether prompts are rendered as a chat, or go in as plain text."""
    return bool(_template(tokenizer))


def _template(tokenizer: Any) -> str | None:
    template = tokenizer.chat_template
    return template.get("default") if isinstance(template, dict) else template


def chat(prompt: Prompt, system: str | None, answers: Sequence[str] = ()) -> list[dict[str, str]]:
    """The conversation up to the turn that comes after these answers, as chat messages."""
    system = prompt.system if prompt.system is not None else system
    messages = [] if system is None else [{"role": "system", "content": system}]
    for turn, answer in zip(prompt.turns, answers, strict=False):
        messages += [{"role": "user", "content": turn}, {"role": "assistant", "content": visible(answer)}]
    return [*messages, {"role": "user", "content": prompt.turns[len(answers)]}]


def plain_text(messages: Sequence[dict[str, str]]) -> str:
    """A conversation for a target without a chat template."""
    return "\n\n".join(message["content"] for message in messages)


def visible(answer: str) -> str:
    """What a client keeps of an answer for the next turn: the text after the thinking."""
    _, found, rest = answer.rpartition(THINK_END)
    return rest.lstrip("\n") if found else answer


def is_chat(tokenizer: Any, config: PromptsConfig) -> bool:
    """Whether prompts are rendered as a chat, or go in as plain text."""
    return has_chat_template(tokenizer) and not config.raw


def render_turn(tokenizer: Any, prompt: Prompt, config: PromptsConfig, answers: Sequence[str] = ()) -> RenderedPrompt:
    """The prompt of the turn after `answers`, those of the turns before it."""
    turn = len(answers)
    ids = render_prompt(
        tokenizer,
        prompt,
        system=config.system,
        enable_thinking=config.enable_thinking,
        answers=answers,
        raw=config.raw,
    )
    return RenderedPrompt(prompt.sample_ids[turn], prompt.turns[turn], ids, prompt.category)


def render_prompt(
    tokenizer: Any,
    prompt: Prompt,
    *,
    system: str | None,
    enable_thinking: bool,
    answers: Sequence[str] = (),
    raw: bool = False,
) -> list[int]:
    """Token ids of the conversation up to the turn after `answers`, as a chat up to where the assistant begins.

    Without a chat template, or raw: the messages' texts with blank lines between, with the special tokens that the
    tokenizer itself adds. Raises UserError where the template refuses the system role, or the prompt.
    """
    messages = chat(prompt, system, answers)
    template = _template(tokenizer)
    if raw or not template:
        return [int(token) for token in tokenizer(plain_text(messages))["input_ids"]]
    try:
        ids = tokenizer.apply_chat_template(
            messages,
            add_generation_prompt=True,
            tokenize=True,
            return_dict=False,
            **template_options(tokenizer, enable_thinking),
        )
    except TemplateError as error:
        mine = system is not None and prompt.system is None
        refused = "prompts.system (try prompts.system: null)" if mine else f"prompt {prompt.id!r}"
        raise UserError(f"the target's chat template refuses {refused}: {error}") from None
    return [int(token) for token in ids]


def template_options(tokenizer: Any, enable_thinking: bool) -> dict[str, bool]:
    """enable_thinking, for a chat template that knows the word."""
    return {"enable_thinking": enable_thinking} if "enable_thinking" in (_template(tokenizer) or "") else {}


def stop_token_ids(tokenizer: Any, generation_config: Any) -> list[int]:
    """Ids that end a completion, sorted: those of the generation config, the tokenizer's end of sequence, and
    the token with which the chat template closes the assistant's turn.
    """
    named = getattr(generation_config, "eos_token_id", None)
    ids = list(named) if isinstance(named, list | tuple) else [named]
    ids += [tokenizer.eos_token_id, end_of_turn(tokenizer)]
    return sorted({int(token) for token in ids if token is not None})


def end_of_turn(tokenizer: Any) -> int | None:
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
