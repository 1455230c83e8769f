"""Where the target's text comes from: generated here in batches, or read from a file."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, StoppingCriteria, StoppingCriteriaList

from dflash_eval import ranks
from dflash_eval.batches import plan_batches
from dflash_eval.cache import Sample, append_completions, read_completions, write_completions
from dflash_eval.config import CompletionsConfig, Config
from dflash_eval.errors import UserError
from dflash_eval.machine import Pieces
from dflash_eval.progress import progress
from dflash_eval.prompts import Prompt, RenderedPrompt, render_turn, stop_token_ids
from dflash_eval.target import Target

COMPILING_PAYS = 4096  # decoding steps, of some 20 ms less each


def complete(
    folder: Path,
    config: Config,
    target: Target,
    tokenizer: Any,
    prompts: Sequence[Prompt],
    say: Callable[[str], None],
) -> list[Sample]:
    """The completions in the prompts' order; those that an earlier run finished are not made again.

    Conversations are answered turn by turn, the same turn of all in batches, which are dealt over the ranks.
    """
    wanted = [sample_id for prompt in prompts for sample_id in prompt.sample_ids]

    def earlier() -> list[Sample]:
        done = read_completions(folder)
        if not set(wanted) <= {sample.id for sample in done}:
            write_completions(folder, done)  # drops a line that a killed run left unfinished
        return done

    done = ranks.from_first(earlier)
    if set(wanted) <= {sample.id for sample in done}:
        return _in_order(done, wanted)
    stop_ids = stop_token_ids(tokenizer, target.model.generation_config)
    for turn in range(max(len(prompt.turns) for prompt in prompts)):
        answers = {sample.id: sample.text for sample in done}
        rows = [
            render_turn(tokenizer, prompt, config.prompts, [answers[i] for i in prompt.sample_ids[:turn]])
            for prompt in prompts
            if turn < len(prompt.turns)
        ]
        if config.completions.source == "file":
            assert config.completions.file is not None
            limit = config.completions.max_new_tokens
            made = read_file(config.completions.file, tokenizer, rows, limit, target.vocab_size)
            _check_positions(target, made, 0)
            done += made
            continue
        _check_positions(target, rows, config.completions.max_new_tokens)
        for batch in generate(
            target, tokenizer, rows, config.completions, stop_ids, config.extract.max_batch_tokens, done
        ):
            append_completions(folder, batch, ranks.rank())
            done += batch
        done = list({sample.id: sample for own in ranks.gather(done) for sample in own}.values())
    samples = _in_order(done, wanted)
    if ranks.rank() == 0:
        write_completions(folder, samples)
    if config.completions.source == "generate":
        stopped = sum(sample.finish_reason == "stop" for sample in samples)
        say(f"{stopped} of {len(samples)} completions ended by a stop token")
    return samples


def _in_order(done: Sequence[Sample], wanted: Sequence[str]) -> list[Sample]:
    by_id = {
        sample.id: sample for sample in done
    }  # a batch that a killed run left in part stands twice: the last counts
    return [by_id[sample_id] for sample_id in wanted]


def _check_positions(target: Target, rows: Sequence[RenderedPrompt] | Sequence[Sample], new_tokens: int) -> None:
    room = target.max_positions
    for row in rows:
        length = (len(row) if isinstance(row, Sample) else len(row.ids)) + new_tokens
        if room is not None and length > room:
            raise UserError(
                f"prompt {row.id!r} leaves no room: it needs {length} positions with its completion, "
                f"the target has {room}\nshorten the prompt or lower completions.max_new_tokens"
            )


def generate(
    target: Target,
    tokenizer: Any,
    prompts: Sequence[RenderedPrompt],
    config: CompletionsConfig,
    stop_ids: Sequence[int],
    batch_tokens: int,
    done: Sequence[Sample],
) -> Iterator[list[Sample]]:
    """The target's own answers, a batch at a time, without the batches that `done` holds whole; under torchrun this
    rank's share of them.

    Greedy at temperature 0, else sampled from the target's distribution at that temperature, seeded by batch. A
    completion keeps the stop token that ended it.
    """
    have = {sample.id for sample in done}
    batches = plan_batches([len(prompt.ids) for prompt in prompts], batch_tokens, config.max_new_tokens)
    todo = [(n, b) for n, b in enumerate(batches) if not all(prompts[i].id in have for i in b)]
    todo = ranks.deal(todo, [len(batch) for _, batch in todo])
    total = sum(len(batch) for _, batch in todo) * config.max_new_tokens
    static = _static_cache_pays(target, len(batches) * config.max_new_tokens)
    pieces = Pieces(max(map(len, batches), default=1), "prompts")
    with progress("generate", total) as advance:
        for number, batch in todo:
            torch.manual_seed(config.seed + number)
            rows = [prompts[i] for i in batch]
            ids = list(
                chain.from_iterable(
                    pieces.run(
                        len(rows),
                        lambda some, rows=rows: generate_batch(  # type: ignore[misc]
                            target, [row.ids for row in rows[some]], config, stop_ids, advance, static
                        ),
                    )
                )
            )
            yield [
                Sample(
                    id=row.id,
                    prompt=row.text,
                    prompt_ids=row.ids,
                    completion_ids=completion,
                    text=tokenizer.decode(completion, skip_special_tokens=True),
                    finish_reason="stop" if completion[-1] in stop_ids else "length",
                    category=row.category,
                )
                for row, completion in zip(rows, ids, strict=True)
            ]


@torch.inference_mode()
def generate_batch(
    target: Target,
    prompts: Sequence[Sequence[int]],
    config: CompletionsConfig,
    stop_ids: Sequence[int],
    advance: Callable[[int], None] = lambda _: None,
    static: bool = False,
) -> list[list[int]]:
    """Completion ids of left-padded prompts; every row ends by a stop token or at max_new_tokens.

    static: on a static cache, with which transformers compiles the decoding step into CUDA graphs on a GPU.
    """
    width = max(map(len, prompts))
    pad = stop_ids[0] if stop_ids else 0
    ids = torch.tensor([[pad] * (width - len(prompt)) + list(prompt) for prompt in prompts], device=target.device)
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=target.device)
    sampled = {"do_sample": True, "temperature": config.temperature, "top_k": config.top_k, "top_p": config.top_p}
    # The model's own generation defaults (top-k, repetition penalty, ...) would leak into what a config leaves out.
    kept, target.model.generation_config = target.model.generation_config, GenerationConfig()
    try:
        output = target.model.generate(
            input_ids=ids,
            attention_mask=mask,
            generation_config=GenerationConfig(
                max_new_tokens=config.max_new_tokens,
                eos_token_id=list(stop_ids) or None,
                pad_token_id=pad,
                **({"cache_implementation": "static"} if static else {}),
                **(sampled if config.temperature > 0 else {"do_sample": False}),
            ),
            stopping_criteria=StoppingCriteriaList([_Advance(advance, len(prompts))]),
        )
    finally:
        target.model.generation_config = kept
    return [_until_stop(row, stop_ids) for row in output[:, width:].tolist()]


def _static_cache_pays(target: Target, steps: int) -> bool:
    """Whether compiling the decoding step is won back in so many steps, where the model can be compiled at all:
    linear attention's kernels cannot be, in one graph.
    """
    kinds = set(getattr(target.model.config.get_text_config(), "layer_types", None) or ["full_attention"])
    compiles = getattr(target.model, "_can_compile_fullgraph", False) and kinds <= {
        "full_attention",
        "sliding_attention",
    }
    return target.device.type == "cuda" and compiles and steps >= COMPILING_PAYS


class _Advance(StoppingCriteria):
    """Never stops anything; called after each step, it moves the progress bar."""

    def __init__(self, advance: Callable[[int], None], rows: int) -> None:
        self.advance, self.rows = advance, rows

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        self.advance(self.rows)
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


def _until_stop(ids: list[int], stop_ids: Sequence[int]) -> list[int]:
    end = next((i + 1 for i, token in enumerate(ids) if token in stop_ids), len(ids))
    return ids[:end]


def read_file(
    path: Path, tokenizer: Any, prompts: Sequence[RenderedPrompt], max_new_tokens: int, vocab_size: int
) -> list[Sample]:
    """Completions of the prompts from a JSONL file: id, and completion_ids or text; prompt_ids where they differ from
    what the chat template gives. Rows for other prompts are passed over. Raises UserError with file and line.
    """
    rows: dict[str, tuple[int, dict[str, Any]]] = {}
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise UserError(f"{path}: cannot be read ({reason}); completions.file names it") from None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            key = row["id"]
        except (ValueError, KeyError, TypeError):
            raise UserError(f"{path}:{number}: not a JSON object with an id") from None
        if key in rows:
            raise UserError(f"{path}:{number}: id {key!r} stands on line {rows[key][0]} too")
        rows[key] = (number, row)
    missing = [prompt.id for prompt in prompts if prompt.id not in rows]
    if missing:
        raise UserError(f"{path}: no completion for {len(missing)} of {len(prompts)} prompts: {', '.join(missing[:5])}")
    return [_read_row(path, *rows[prompt.id], prompt, tokenizer, max_new_tokens, vocab_size) for prompt in prompts]


def _read_row(
    path: Path,
    number: int,
    row: dict[str, Any],
    prompt: RenderedPrompt,
    tokenizer: Any,
    max_new_tokens: int,
    vocab_size: int,
) -> Sample:
    def ids(key: str, default: list[int]) -> list[int]:
        value = row.get(key, default)
        if not isinstance(value, list) or not all(isinstance(i, int) and 0 <= i < vocab_size for i in value):
            raise UserError(f"{path}:{number}: {key} must be a list of token ids from 0 to {vocab_size - 1}")
        return value

    text = row.get("text")
    if "completion_ids" in row:
        completion = ids("completion_ids", [])
        text = text if isinstance(text, str) else tokenizer.decode(completion, skip_special_tokens=True)
    elif isinstance(text, str):
        completion = tokenizer.encode(text, add_special_tokens=False)
    else:
        raise UserError(f"{path}:{number}: neither completion_ids nor text")
    if len(completion) > max_new_tokens:
        raise UserError(
            f"{path}:{number}: {len(completion)} tokens, completions.max_new_tokens is {max_new_tokens}; raise it"
        )
    prompt_ids = ids("prompt_ids", prompt.ids)
    if not prompt_ids:
        raise UserError(f"{path}:{number}: prompt_ids is empty")
    reason = str(row.get("finish_reason", "file"))
    return Sample(prompt.id, prompt.text, prompt_ids, completion, text, reason, prompt.category)
