"""One forward of the target over a batch: the wanted layers' outputs, and nothing computed that is not kept."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from dflash_eval.acceptance.sampling import Sampling, sampling_logprobs
from dflash_eval.cache import Sample, state_columns
from dflash_eval.errors import reason
from dflash_eval.machine import out_of_memory
from dflash_eval.target import Target, shield_kernels

HEAD_ROWS = 512  # completion positions whose logits are there at once
GRAPHS = 64  # compiled variants of a decoder layer: its kinds times the shapes that it meets


@torch.inference_mode()
def forward(
    target: Target, batch: Sequence[Sample], layers: Sequence[int], store: str, sampling: Sampling | None
) -> dict[str, Tensor]:
    """The batch's columns of a shard, the samples' tokens back to back, on the target's device(s).

    The states are as `state_columns` has them for `store`.
    With `sampling`, `argmax` (int32) and `logprob` (float32) [tokens] of the token after each position: -1 and NaN
    where that is none of the completion. Without it the forward ends after the last wanted layer.

    The batch is padded on the right, where no real token's attention, convolution or recurrence looks: there is no
    mask, so that attention runs on its causal kernel.
    """
    lengths = [len(sample) for sample in batch]
    width = max(lengths)
    ids = _to(torch.tensor([sample.input_ids + [0] * (width - len(sample)) for sample in batch]), target.device)
    padded = min(lengths) < width
    real = [torch.arange(n) + row * width for row, n in enumerate(lengths)]
    at = {target.device: _to(torch.cat(real), target.device)} if padded else {}
    columns: dict[str, Tensor] = {}

    def keep(layer: int, states: Tensor) -> None:
        states = states.reshape(-1, states.shape[-1])
        if padded:
            device = states.device
            at.setdefault(device, at[target.device].to(device))
            states = states.index_select(0, at[device])
        columns.update(state_columns(layer, states, store))

    output = run_body(target, ids, layers, keep, whole=sampling is not None)
    if sampling is not None:
        stats = _token_stats(target, output, ids, batch, sampling)
        columns.update({name: rows[at[target.device]] if padded else rows for name, rows in stats.items()})
    return columns


class _Enough(Exception):
    """Raised out of a forward that has given all that is wanted."""

    def __init__(self, output: Any = None) -> None:
        self.output = output


def run_body(
    target: Target, ids: Tensor, layers: Sequence[int], keep: Callable[[int, Tensor], None], whole: bool
) -> Any:
    """Run the decoder on ids [rows, width]; `keep(layer, states [rows, width, hidden])` gets each wanted layer's.

    whole: also what follows the last wanted layer, up to the head: returns the body's own output. Hooks rather than
    `output_hidden_states`: that list holds the last layer's state after the final norm, and all other layers'.
    """
    body, last = target.model.base_model, max(layers)

    def hook(layer: int) -> Callable[..., None]:
        def taken(module: nn.Module, arguments: Any, output: Any) -> None:
            keep(layer, output[0] if isinstance(output, tuple) else output)
            if layer == last and not whole:
                raise _Enough

        return taken

    def ended(module: nn.Module, arguments: Any, output: Any) -> None:
        raise _Enough(output)

    handles = [target.layers[layer].register_forward_hook(hook(layer)) for layer in layers]
    handles.append(body.register_forward_hook(ended))
    try:
        target.model(input_ids=ids, use_cache=False)
    except _Enough as enough:
        return enough.output
    finally:
        for handle in handles:
            handle.remove()
    raise AssertionError("the model never ran its body")


def head_logits(target: Target, output: Any, ids: Tensor, positions: Tensor) -> Iterator[Tensor]:
    """Logits [up to HEAD_ROWS, vocabulary] at `positions` of the flattened batch, a piece at a time.

    output: what `run_body` returned for ids. The model's own forward runs with its body's output put in place, so
    that it scales or caps the logits as it always does.
    """
    body = target.model.base_model
    hidden = output.last_hidden_state.reshape(-1, output.last_hidden_state.shape[-1])
    for rows in positions.to(hidden.device).split(HEAD_ROWS):
        piece = type(output)(**{**output, "last_hidden_state": hidden[rows][None]})
        with _answering(body, piece):
            yield target.model(input_ids=ids[:1, :1], use_cache=False).logits[0]


@contextmanager
def _answering(module: nn.Module, output: Any) -> Iterator[None]:
    own = module.__dict__.get("forward")
    module.forward = lambda *arguments, **named: output
    try:
        yield
    finally:
        if own is None:
            del module.forward
        else:
            module.forward = own


def _token_stats(
    target: Target, output: Any, ids: Tensor, batch: Sequence[Sample], sampling: Sampling
) -> dict[str, Tensor]:
    """`argmax` and `logprob` of every position of the flattened batch, padding too."""
    width, device = ids.shape[1], ids.device
    starts = [len(sample.prompt_ids) - 1 for sample in batch]  # positions P - 1 ... N - 2 speak of completion tokens
    ends = [len(sample) - 1 for sample in batch]
    rows = range(len(batch))
    positions = _to(torch.cat([torch.arange(starts[row], ends[row]) + row * width for row in rows]), device)
    argmax = torch.full((ids.numel(),), -1, dtype=torch.int32, device=device)
    logprob = torch.full((ids.numel(),), torch.nan, device=device)
    done = 0
    for logits in head_logits(target, output, ids, positions):
        at = positions[done : done + len(logits)]
        argmax[at], logprob[at] = (x.to(device) for x in token_stats(logits, ids.flatten()[at + 1], sampling))
        done += len(logits)
    return {"argmax": argmax, "logprob": logprob}


def token_stats(logits: Tensor, tokens: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """logits [rows, vocabulary], tokens [rows] → the argmax (int32) and the tokens' log-probability (float32).

    The log-probability is that of the distribution the tokens were sampled from; of temperature 1 where they were not.
    """
    logits = logits.to(torch.float32, copy=True)
    return logits.argmax(-1).int(), sampling_logprobs(logits, tokens.to(logits.device), sampling)


def compile_layers(target: Target, warm_up: Callable[[], object], say: Callable[[str], None]) -> float:
    """Compile the decoder layers; returns the seconds that it took. Where it fails they run as before, which is said.

    warm_up: runs them once on what is to come.
    """
    if any(hasattr(layer, "_hf_hook") for layer in target.layers):
        return 0.0  # spread over GPUs by accelerate, whose hooks do not compile
    start = time.perf_counter()
    shield_kernels(target.model)
    torch._dynamo.config.recompile_limit = max(GRAPHS, torch._dynamo.config.recompile_limit)
    for layer in target.layers:
        layer.forward = torch.compile(layer.forward)  # not the layer: the hooks stay outside
    try:
        warm_up()
        if target.device.type == "cuda":
            torch.cuda.synchronize(target.device)
    except Exception as error:
        if out_of_memory(error):
            raise
        for layer in target.layers:
            del layer.forward
        say(f"the layers run uncompiled: torch.compile failed ({type(error).__name__}: {reason(error)[:160]})")
    return time.perf_counter() - start


def _to(tensor: Tensor, device: torch.device) -> Tensor:
    """To a GPU without waiting for what it is doing."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)
