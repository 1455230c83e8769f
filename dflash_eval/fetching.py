"""Completions from the server that serves the target, kept one by one as they come.

Runs without the target's weights, while the server holds the GPUs; the extraction comes after the server is stopped.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from dflash_eval import cache as cachefile
from dflash_eval.cache import Sample
from dflash_eval.config import Config
from dflash_eval.errors import RunError, UserError
from dflash_eval.lock import lock
from dflash_eval.progress import progress
from dflash_eval.prompts import (
    Prompt,
    RenderedPrompt,
    chat,
    is_chat,
    load_prompts,
    render_turn,
    stop_token_ids,
    template_options,
)
from dflash_eval.replies import Reply, request_body, to_sample
from dflash_eval.report import completion_warnings
from dflash_eval.server import Server, is_local
from dflash_eval.target import TargetFiles, load_generation_config, load_tokenizer, tokenizer_fingerprint

Say = Callable[[str], None]
Messages = list[dict[str, str]]


def fetch(config: Config, *, force: bool = False, say: Say = print) -> Path:
    """Fetch the completions that `config.cache_dir` lacks, or all with `force`, in place of the cache that is there.

    Returns the folder. The target's weights are not looked at.
    Raises UserError for what the user must mend, RunError where the server failed; what came before is kept.
    """
    if config.completions.source != "server":
        raise UserError(
            f"completions.source is {config.completions.source}: there is no server to ask\n"
            "set completions.source: server, and completions.server.base_url"
        )
    folder = config.cache_dir
    files = TargetFiles.find(config.target, weights=False)
    tokenizer = load_tokenizer(files, config.target)
    prompts = load_prompts(config.prompts)
    settings = completions_settings(config, tokenizer)
    with cachefile.disk_errors(folder), lock(folder, say):
        if force:
            cachefile.delete_states(folder)
            cachefile.delete_completions(folder)
        elif cachefile.read_completions(folder):
            manifest = cachefile.read_manifest(folder)
            record = cachefile.read_completions_record(folder)
            different = cachefile.differences(
                record["settings"] if record else manifest.settings if manifest else {}, settings
            )
            if different:
                raise UserError(
                    f"{folder} holds the completions of something else: {different[0]}\n"
                    "give the config another name, or fetch anew with --force"
                )
        fetch_missing(folder, config, tokenizer, files, prompts, say)
    return folder


def completions_settings(config: Config, tokenizer: Any) -> dict[str, Any]:
    """What fetched completions must agree with a config on."""
    settings = config.cache_settings()
    return {
        "target": {key: settings["target"][key] for key in ("model", "revision")},
        "prompts": settings["prompts"],
        "completions": settings["completions"],
        "tokenizer": {"fingerprint": tokenizer_fingerprint(tokenizer)},
    }


def fetch_missing(
    folder: Path, config: Config, tokenizer: Any, files: TargetFiles, prompts: Sequence[Prompt], say: Say
) -> None:
    """Ask for the completions that completions.jsonl lacks, and note beside it who gave them."""
    done = {sample.id: sample for sample in cachefile.read_completions(folder)}
    wanted = [sample_id for prompt in prompts for sample_id in prompt.sample_ids]
    if all(sample_id in done for sample_id in wanted):
        say(f"{folder}: all {len(wanted)} completions are there")
        return
    cachefile.write_completions(folder, list(done.values()))  # drops a line that a killed run left unfinished
    settings = completions_settings(config, tokenizer)
    earlier = (cachefile.read_completions_record(folder) or {"provenance": {}})["provenance"]
    cachefile.write_completions_record(folder, settings, earlier)
    stop_ids = stop_token_ids(tokenizer, load_generation_config(files))
    server = Server(config.completions.server, config.target.model, is_chat(tokenizer, config.prompts))
    counters = asyncio.run(_ask_all(folder, config, tokenizer, stop_ids, prompts, server, done, say))
    samples = [done[sample_id] for sample_id in wanted]
    provenance = _provenance(server, samples, counters, earlier)
    cachefile.write_completions(folder, samples)
    cachefile.write_completions_record(folder, settings, provenance)
    for line in summary(provenance, samples):
        say(line)
    if is_local(config.completions.server) and needs_gpu(config):
        say(
            f"{server.shown} runs on this machine: stop it now if it holds the GPUs that the extraction needs "
            "(nvidia-smi lists what holds their memory), then run dflash-eval extract"
        )


async def _ask_all(
    folder: Path,
    config: Config,
    tokenizer: Any,
    stop_ids: Sequence[int],
    prompts: Sequence[Prompt],
    server: Server,
    done: dict[str, Sample],
    say: Say,
) -> dict[str, float]:
    """Fill `done`; every sample is durable before the next is asked for. Returns what the server's own counts say.

    A prompt whose tries all fail is left for the next run; the others go on, until as many failed as are asked at once.
    """
    completions, options = config.completions, template_options(tokenizer, config.prompts.enable_thinking)
    failures: list[RunError] = []
    todo = [(number, prompt) for number, prompt in enumerate(prompts) if not all(i in done for i in prompt.sample_ids)]
    queue = iter(todo)
    system = config.prompts.system

    def request(number: int, prompt: Prompt, answers: Sequence[str]) -> tuple[RenderedPrompt, Messages, dict[str, Any]]:
        rendered, messages = render_turn(tokenizer, prompt, config.prompts, answers), chat(prompt, system, answers)
        seed = completions.seed + number
        body = request_body(server.path, server.model, rendered, messages, options, completions, seed)
        return rendered, messages, body

    async def conversation(number: int, prompt: Prompt, advance: Callable[[int], None]) -> None:
        answers: list[str] = []
        for sample_id in prompt.sample_ids:
            if sample_id not in done:
                rendered, messages, body = request(number, prompt, answers)

                def accept(reply: Reply, rendered: RenderedPrompt = rendered, messages: Messages = messages) -> Sample:
                    limit = completions.max_new_tokens
                    return to_sample(reply, rendered, messages, options, tokenizer, stop_ids, limit)

                sample = await server.complete(body, sample_id, accept)
                cachefile.append_completions(folder, [sample])
                done[sample_id] = sample
                advance(1)
            answers.append(done[sample_id].text)

    async def worker(advance: Callable[[int], None]) -> None:
        for number, prompt in queue:
            try:
                await conversation(number, prompt, advance)
            except RunError as error:
                failures.append(error)
                if len(failures) > completions.server.concurrency:
                    raise

    async with server:
        await server.check(request(*todo[0], [])[2])
        if not server.served:
            say(f"{server.shown} does not say which model it serves; taken for {config.target.model}")
        before = await server.spec_counters()
        missing = sum(sample_id not in done for _, prompt in todo for sample_id in prompt.sample_ids)
        with progress("completions", missing, "completions") as advance:
            workers = [asyncio.ensure_future(worker(advance)) for _ in range(completions.server.concurrency)]
            try:
                await asyncio.gather(*workers)
            finally:
                for task in workers:
                    task.cancel()
        after = await server.spec_counters()
        average = await server.average_accept_length() if after is None else None
    if failures:
        left = sum(sample_id not in done for _, prompt in todo for sample_id in prompt.sample_ids)
        raise RunError(
            f"{failures[0]}\n{left} completions are missing, the others are kept: run the same command again"
        )
    if average is not None:
        return {"average": average}
    if before is None or after is None or after[0] <= before[0]:
        return {}
    return {"drafts": after[0] - before[0], "accepted": after[1] - before[1]}


def _provenance(
    server: Server, samples: Sequence[Sample], counters: dict[str, float], earlier: dict[str, Any]
) -> dict[str, Any]:
    """Who gave the completions, how their token ids came, and the τ of the engine's own speculative decoding."""
    told = [sample.served or {} for sample in samples]
    before = earlier.get("counters", {})
    counted = {key: value + (before.get(key, 0) if key != "average" else 0) for key, value in counters.items()}
    return {
        "server": server.shown,
        "api": server.path,
        "model": server.model,
        "model_checked": bool(server.served),
        "completions": len(samples),
        "token_ids": dict(Counter(entry.get("ids", "unknown") for entry in told)),
        "differ": sum(bool(entry.get("differs")) for entry in told),
        "prompts_differ": sum(bool(entry.get("prompt_differs")) for entry in told),
        "tries_again": server.tries_again + earlier.get("tries_again", 0),
        "counters": counted,
        "served_tau": served_tau(samples, counted),
    }


def served_tau(samples: Sequence[Sample], counters: dict[str, float]) -> dict[str, Any] | None:
    """τ of the engine: by completion from SGLang's verification steps, or one number from vLLM's counters or SGLang's.

    The first token comes from the prefill and not from a verification, as the walks count it.
    """
    pairs = [(len(s.completion_ids) - 1, s.served["cycles"]) for s in samples if s.served and s.served.get("cycles")]
    if pairs:
        cycles = sum(steps for _, steps in pairs)
        mean = sum(tokens / steps for tokens, steps in pairs) / len(pairs)
        micro = sum(tokens for tokens, _ in pairs) / cycles
        return {"tau": mean, "tau_micro": micro, "completions": len(pairs), "from": "spec_verify_ct by completion"}
    if "average" in counters:
        said = "avg_spec_accept_length since the server started"
        return {"tau": None, "tau_micro": counters["average"], "completions": len(samples), "from": said}
    if counters:
        micro = 1 + counters["accepted"] / counters["drafts"]
        return {"tau": None, "tau_micro": micro, "completions": len(samples), "from": "vllm:spec_decode counters"}
    return None


def summary(provenance: dict[str, Any], samples: Sequence[Sample]) -> list[str]:
    """What the user should know of fetched completions, a line each."""
    stopped = sum(sample.finish_reason == "stop" for sample in samples)
    lines = [
        f"{len(samples)} completions from {provenance['server']} ({provenance['model']}), {stopped} ended by a stop "
        f"token, {provenance['tries_again']} requests tried again"
    ]
    return [*lines, *completion_warnings(provenance)]


def needs_gpu(config: Config) -> bool:
    return config.target.device != "cpu" and torch.cuda.is_available()
