"""What a server is sent and what comes back: requests of the three APIs, replies, and samples made of replies.

Fields beyond OpenAI's are those of vLLM (`return_token_ids` → token_ids in the choice, prompt_token_ids on top;
`return_tokens_as_token_ids` → logprob tokens "token_id:<id>"; message.reasoning; stop_reason), SGLang (the same switch,
`return_prompt_token_ids` and `return_meta_info`, all three in the choice; message.reasoning_content; matched_stop; of
`/generate`: output_ids and meta_info) and llama.cpp (an `id` with each logprob). A server that does not know a field
passes over it or refuses the request.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jinja2 import TemplateError

from dflash_eval.cache import Sample
from dflash_eval.config import CompletionsConfig
from dflash_eval.errors import UserError
from dflash_eval.prompts import THINK_END, RenderedPrompt, end_of_turn, plain_text

THINK_START = "<think>"
# Ways to be given token ids, best first; the last asks for none.
ASK_FOR_IDS: dict[str, tuple[dict[str, Any], ...]] = {
    "/v1/chat/completions": (
        {"return_token_ids": True, "return_prompt_token_ids": True, "return_meta_info": True},
        {"return_token_ids": True},
        {"logprobs": True, "return_tokens_as_token_ids": True},
        {"logprobs": True},
        {},
    ),
    "/v1/completions": (
        {"return_token_ids": True},
        {"logprobs": 1, "return_tokens_as_token_ids": True},
        {"logprobs": 1},
        {},
    ),
    "/generate": ({}, {"return_logprob": True}, {}),
}
TOKEN_ID = "token_id:"


class BadReply(Exception):
    """A reply that is damaged or empty, as one is at times; worth another try."""


@dataclass
class Reply:
    text: str
    reasoning: str = ""
    ids: list[int] | None = None  # of the completion, from the server
    pieces: list[str] | None = None  # the completion's tokens as text, where there are no ids
    prompt_ids: list[int] | None = None
    finish: str = "stop"  # "stop" | "length"
    stop_id: int | None = None  # the token that ended it, where it is told
    completion_tokens: int | None = None
    prompt_tokens: int | None = None
    cycles: int | None = None  # verification steps of speculative decoding
    tool_calls: bool = False


def request_body(
    path: str,
    model: str,
    prompt: RenderedPrompt,
    messages: Sequence[dict[str, str]],
    options: dict[str, bool],
    config: CompletionsConfig,
    seed: int,
) -> dict[str, Any]:
    """The request for one completion; `options` go to the chat template."""
    if path == "/generate":
        sampling: dict[str, Any] = {"temperature": config.temperature, "max_new_tokens": config.max_new_tokens}
        if config.temperature > 0:
            sampling |= {"top_p": config.top_p, "top_k": config.top_k or -1, "sampling_seed": seed}
        return {"input_ids": prompt.ids, "sampling_params": sampling}
    body: dict[str, Any] = {"model": model, "max_tokens": config.max_new_tokens, "temperature": config.temperature}
    if config.temperature > 0:
        body |= {"top_p": config.top_p, "seed": seed} | ({"top_k": config.top_k} if config.top_k else {})
    if path == "/v1/completions":
        return {**body, "prompt": plain_text(messages)}
    return {**body, "messages": list(messages)} | ({"chat_template_kwargs": options} if options else {})


def read_reply(path: str, payload: Any) -> Reply:
    """Raises BadReply for what is not a completion."""
    if path == "/generate" and isinstance(payload, list) and payload:
        payload = payload[0]
    if not isinstance(payload, dict):
        raise BadReply("the reply is not an object")
    try:
        return _read_generate(payload) if path == "/generate" else _read_openai(payload, path)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise BadReply(f"the reply is not a completion ({error!r})") from None


def _read_openai(payload: dict[str, Any], path: str) -> Reply:
    choices = payload.get("choices")
    if not choices:
        raise BadReply("the reply has no choices")
    choice = choices[0]
    message = choice["message"] if path == "/v1/chat/completions" else {"content": choice["text"]}
    usage, meta = payload.get("usage") or {}, choice.get("meta_info") or {}
    ids, pieces = _token_ids(choice.get("token_ids")), None
    if ids is None:
        ids, pieces = _of_logprobs(choice.get("logprobs"))
    stop = choice.get("stop_reason", choice.get("matched_stop"))
    return Reply(
        text=_text(message.get("content")),
        reasoning=_text(message.get("reasoning_content") or message.get("reasoning")),
        ids=ids,
        pieces=pieces,
        prompt_ids=_token_ids(choice.get("prompt_token_ids") or payload.get("prompt_token_ids")),
        finish=_finish(choice.get("finish_reason")),
        stop_id=stop if type(stop) is int else None,
        completion_tokens=usage.get("completion_tokens"),
        prompt_tokens=usage.get("prompt_tokens"),
        cycles=meta.get("spec_verify_ct") or None,
        tool_calls=bool(message.get("tool_calls")),
    )


def _read_generate(payload: dict[str, Any]) -> Reply:
    meta = payload["meta_info"]
    finish = meta.get("finish_reason") or {}
    matched = finish.get("matched")
    ids = _token_ids(payload.get("output_ids"))
    if ids is None and meta.get("output_token_logprobs"):
        ids = _token_ids([entry[1] for entry in meta["output_token_logprobs"]])
    return Reply(
        text=_text(payload.get("text")),
        ids=ids,
        finish=_finish(finish.get("type")),
        stop_id=matched if type(matched) is int else None,
        completion_tokens=meta.get("completion_tokens"),
        prompt_tokens=meta.get("prompt_tokens"),
        cycles=meta.get("spec_verify_ct") or None,
    )


def _finish(reason: Any) -> str:
    if reason in ("abort", "error"):
        raise BadReply(f"the server ended the completion by {reason!r}")
    return "length" if reason == "length" else "stop"


def _text(value: Any) -> str:
    if value is not None and not isinstance(value, str):
        raise TypeError(f"text expected, not {type(value).__name__}")
    return value or ""


def _token_ids(value: Any) -> list[int] | None:
    if not isinstance(value, list) or not value or not all(type(token) is int for token in value):
        return None
    return value


def _of_logprobs(logprobs: Any) -> tuple[list[int] | None, list[str] | None]:
    """Token ids, or else the tokens' texts; (None, None) where the tokens cannot be told."""
    if not isinstance(logprobs, dict):
        return None, None
    if isinstance(logprobs.get("content"), list):
        entries = logprobs["content"]
    else:
        entries = [{"token": token} for token in logprobs.get("tokens") or []]
    tokens = [entry["token"] for entry in entries]
    if not tokens:
        return None, None
    if all(type(entry.get("id")) is int for entry in entries):
        return [entry["id"] for entry in entries], None
    if all(token.startswith(TOKEN_ID) for token in tokens):
        return [int(token.removeprefix(TOKEN_ID)) for token in tokens], None
    return None, tokens


def to_sample(
    reply: Reply,
    prompt: RenderedPrompt,
    messages: Sequence[dict[str, str]],
    options: dict[str, bool],
    tokenizer: Any,
    stop_ids: Sequence[int],
    max_new_tokens: int,
) -> Sample:
    """The completion in token ids: the server's, or else those that the tokenizer makes of the text.

    A completion that ended by a stop token keeps it, whether or not the server shows it. Raises BadReply for an empty
    one, and UserError for one that cannot be used: too long, of another vocabulary, or hidden by a parser.
    """
    if reply.ids is None and (reply.tool_calls or not (reply.text or reply.reasoning)):
        if reply.tool_calls or (reply.completion_tokens or 0) > 1:
            raise UserError(
                f"prompt {prompt.id!r}: the server keeps the text of the completion, for a tool or reasoning parser\n"
                "start it without that parser, or ask by completions.server.api: sglang, which gives token ids"
            )
        if reply.finish == "length":
            raise BadReply("the completion is empty")
    text = reply.text
    if reply.ids is None and reply.reasoning.strip():
        text = with_reasoning(tokenizer, messages, options, reply)
    source, ids = _ids(reply, text, tokenizer)
    if any(not 0 <= token < len(tokenizer) for token in [*ids, *(reply.prompt_ids or [])]):
        raise UserError(
            f"prompt {prompt.id!r}: the server gives token ids beyond the target's {len(tokenizer)}: another tokenizer"
        )
    told, counted = len(ids), reply.completion_tokens
    kept = source == "server" and counted != told + 1  # the server's ids have the stop token, known here or not
    if reply.finish == "stop" and not kept and (not ids or ids[-1] not in stop_ids):
        stop = reply.stop_id if reply.stop_id in stop_ids else end_of_turn(tokenizer)
        stop = stop if stop is not None else tokenizer.eos_token_id
        ids = ids if stop is None else [*ids, stop]
    if not ids:
        raise BadReply("the completion is empty")
    if max(told if source != "text" else 0, counted or 0) > max_new_tokens:
        raise UserError(
            f"prompt {prompt.id!r}: the server gave {max(told, counted or 0)} tokens, completions.max_new_tokens is "
            f"{max_new_tokens}\nit does not keep to max_tokens; raise completions.max_new_tokens"
        )
    if source == "text":
        differs = counted not in (None, told, len(ids)) or tokenizer.decode(ids[:told]) != text
    else:
        differs = not reply.reasoning and tokenizer.decode(ids, skip_special_tokens=True).strip() != reply.text.strip()
    theirs = reply.prompt_ids
    served = {"ids": source, "differs": differs}
    served["prompt_differs"] = theirs != prompt.ids if theirs else reply.prompt_tokens not in (None, len(prompt.ids))
    return Sample(
        id=prompt.id,
        prompt=prompt.text,
        prompt_ids=theirs or prompt.ids,
        completion_ids=ids[:max_new_tokens],
        text=tokenizer.decode(ids, skip_special_tokens=True) if source != "text" else text,
        finish_reason=reply.finish if len(ids) <= max_new_tokens else "length",
        category=prompt.category,
        served=served | ({"cycles": reply.cycles} if reply.cycles else {}),
    )


def _ids(reply: Reply, text: str, tokenizer: Any) -> tuple[str, list[int]]:
    if reply.ids is not None:
        return "server", list(reply.ids)
    if reply.pieces is not None:
        rows = [tokenizer.encode(piece, add_special_tokens=False) for piece in reply.pieces]
        ids = [row[0] for row in rows if len(row) == 1]
        if len(ids) == len(rows) and tokenizer.decode(ids, skip_special_tokens=True).strip() == text.strip():
            return "logprobs", ids
    return "text", tokenizer.encode(text, add_special_tokens=False)


def with_reasoning(tokenizer: Any, messages: Sequence[dict[str, str]], options: dict[str, bool], reply: Reply) -> str:
    """Reasoning and content in the order and with the tags in which the chat template writes them.

    Raises UserError where neither the template nor the tokenizer knows how reasoning is written.
    """
    thought, content = reply.reasoning.strip("\n"), reply.text.lstrip("\n")
    shown = content.strip() or "-"
    before = tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True, **options)
    answer = {"role": "assistant", "content": shown, "reasoning_content": thought}
    try:
        whole = tokenizer.apply_chat_template([*messages, answer], tokenize=False, **options)
    except TemplateError:
        whole = ""
    opening, found, rest = (whole[len(before) :] if whole.startswith(before) else "").partition(thought.strip())
    if not found or shown not in rest:
        if THINK_END not in tokenizer.get_vocab() and THINK_END not in str(tokenizer.chat_template):
            raise UserError(
                "the server gives reasoning apart from the text, and the target's chat template shows no place for it\n"
                "start the server without a reasoning parser, or use one that gives token ids"
            )
        opening = "" if before.rstrip().endswith(THINK_START) else f"{THINK_START}\n"
        rest = f"\n{THINK_END}\n\n{shown}"
    if not content and reply.finish == "length":  # cut while thinking
        return opening + thought
    return opening + thought + rest[: rest.rindex(shown)] + content
