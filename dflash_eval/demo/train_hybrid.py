"""Train the hybrid demo, target and drafter, from a seed: `python -m dflash_eval.demo.train_hybrid --help`.

The target is a small language model of the Qwen3.5 architecture: Gated DeltaNet in three of four layers, full attention
in each fourth. It learns Python from sources that are installed here anyhow and permissively licensed (the standard
library's, torch's, transformers'), as text and as conversations whose user gives the beginning of a function and whose
assistant gives the whole of it, as chat models do. The drafter is made by `train.py`'s official recipe on the target's
own answers about functions that it has not learnt: what a target knows by heart it says otherwise than what is new.
"""

from __future__ import annotations

import ast
import math
import random
import sysconfig
import textwrap
import time
from functools import cache
from pathlib import Path
from typing import Annotated, Any

import torch
import transformers
import typer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from torch.nn import functional as F
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3_5ForCausalLM, Qwen3_5TextConfig

from dflash_eval.config import TargetConfig
from dflash_eval.demo.train import Recipe, answers, drafter_json, features, learn, save, train
from dflash_eval.drafter.config import DrafterConfig
from dflash_eval.drafter.model import DFlashDrafter
from dflash_eval.target import TargetFiles, load_target, load_tokenizer, use_fallbacks

VOCABULARY = 2048
PAD, START, END, MASK = "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|mask|>"
# An answer begins with its line break: a tokenizer may join that with the indentation that follows, so that a prompt
# which ended with it would end otherwise than what the target has learnt.
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}{{ '' if m['role'] == 'assistant' else '\\n' }}"
    "{{ m['content'] }}<|im_end|>{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant{% endif %}"
)
SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 8,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
    "linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_key_head_dim": 32, "linear_value_head_dim": 32,
    "max_position_embeddings": 2048, "tie_word_embeddings": True,
}  # fmt: skip
LAYERS = Recipe((1, 3, 4, 6), flawed=False)  # the last, 7, is left out
DRAFTER_LAYERS = 4
DRAFTER_MLP = 1024
WINDOW = 128
WARMING = 20  # steps in which kernels are compiled and tuned; the rate leaves them out
ASKED_TOKENS = 128  # the longest beginning of a function that is asked for
HELD_OUT_FILES = 3  # one of so many: the drafter learns from what the target makes of their functions
ENCODED_AT_ONCE = 4096  # texts
LOSS_FILES = 64  # held-out ones that tell the target's loss
LEFT_OUT = ("site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__")


# The corpus


def libraries() -> list[Path]:
    """The folders of the standard library's, torch's and transformers' sources."""
    return [Path(sysconfig.get_path("stdlib")), Path(torch.__path__[0]), Path(transformers.__path__[0])]


def source_files(folders: list[Path]) -> tuple[list[str], list[str]]:
    """Texts of the folders' modules, their tests left out; and those of the held-out ones."""
    texts: tuple[list[str], list[str]] = ([], [])
    paths = [
        path
        for folder in folders
        for path in sorted(folder.rglob("*.py"))
        if not set(path.relative_to(folder).parts) & set(LEFT_OUT)
    ]
    for number, path in enumerate(paths):
        try:
            text = path.read_text(encoding="utf-8")
            functions(text)
        except (UnicodeDecodeError, SyntaxError, ValueError):
            continue
        texts[number % HELD_OUT_FILES == 0].append(text)
    return texts


@cache
def functions(text: str) -> tuple[tuple[str, str], ...]:
    """Head (its docstring included) and body of each function of a module, unindented."""
    found = []
    lines = text.splitlines()
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or node.end_lineno is None:
            continue
        documented = ast.get_docstring(node, clean=False) is not None
        body = node.body[1:] if documented else node.body
        if not body or body[0].lineno == node.lineno:
            continue
        split = (node.body[0].end_lineno or 0) if documented else body[0].lineno - 1
        whole = textwrap.dedent("\n".join(lines[node.lineno - 1 : node.end_lineno])).split("\n")
        head, rest = whole[: split - node.lineno + 1], whole[split - node.lineno + 1 :]
        if rest and whole[0].startswith(("def ", "async def ")):
            found.append(("\n".join(head), "\n".join(rest)))
    return tuple(found)


def exchanges(texts: list[str]) -> dict[str, str]:
    """What a user gives of each function of some modules, its head, or half the body too → the whole function."""
    found: dict[str, str] = {}
    for head, body in (function for text in texts for function in functions(text)):
        lines = body.split("\n")
        for given in sorted({0, len(lines) // 2}):
            found.setdefault("\n".join([head, *lines[:given]]), f"{head}\n{body}")
    return found


def train_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """A byte-level BPE with a chat template."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=[PAD, START, END, MASK], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END, pad_token=PAD, mask_token=MASK, chat_template=TEMPLATE
    )


def documents(tokenizer: Any, texts: list[str], seed: int) -> tuple[Tensor, Tensor]:
    """Files and conversations about their functions in random order, back to back: ids [tokens], starts [documents]."""
    said = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": given}, {"role": "assistant", "content": "\n" + whole}], tokenize=False
        )
        for given, whole in exchanges(texts).items()
    ]
    every = [text + PAD for text in texts + said]
    random.Random(seed).shuffle(every)
    encoded = [
        torch.tensor(ids, dtype=torch.int16)
        for start in range(0, len(every), ENCODED_AT_ONCE)
        for ids in tokenizer(every[start : start + ENCODED_AT_ONCE], add_special_tokens=False)["input_ids"]
    ]
    lengths = torch.tensor([0, *map(len, encoded)])
    return torch.cat(encoded), lengths.cumsum(0)[:-1]


# The target


def train_target(
    ids: Tensor,
    starts: Tensor,
    held_out: Tensor,
    *,
    device: str,
    steps: int,
    rows: int,
    width: int,
    rate: float,
    seed: int,
) -> Any:
    """A target trained on windows of `ids` that begin at a document or anywhere, half of each."""
    torch.manual_seed(seed)
    model = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**SHAPE)).to(device)
    use_fallbacks(model)  # fla refuses its backward pass on Hopper under Triton 3.4 to 3.7.0, where it is wrong
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95), fused=True)
    warmup = min(200, steps // 10 + 1)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda s: min(1.0, (s + 1) / warmup) * (0.5 * (1 + math.cos(math.pi * s / steps)) * 0.95 + 0.05)
    )
    ids, starts, held_out = ids.to(device), starts.to(device), held_out.to(device)
    reach = torch.arange(width + 1, device=device)

    def loss_of(ids: Tensor, firsts: Tensor) -> Tensor:
        window = ids[firsts[:, None] + reach].long()
        with torch.autocast(torch.device(device).type, torch.bfloat16):
            logits = model(input_ids=window[:, :-1], use_cache=False).logits
        return F.cross_entropy(logits.flatten(0, 1).float(), window[:, 1:].flatten())

    for step in range(steps):
        if step == min(WARMING, steps - 1):
            start, warm = time.time(), step
        anywhere = torch.randint(len(ids) - width, (rows // 2,), device=device)
        beginnings = starts[torch.randint(len(starts), (rows - rows // 2,), device=device)]
        loss = loss_of(ids, torch.cat([anywhere, beginnings]).clamp_max(len(ids) - width - 1))
        learn(loss, model, optimizer, schedule)
        if step % 250 == 249 or step == steps - 1:
            with torch.no_grad():
                fixed = torch.linspace(0, len(held_out) - width - 1, rows, device=device).long()
                unseen = loss_of(held_out, fixed).item()
            print(f"target, step {step + 1}: loss {loss.item():.3f}, on held-out files {unseen:.3f}, "
                  f"{(step + 1 - warm) / (time.time() - start):.1f} steps/s", flush=True)  # fmt: skip
    return model.eval()


def save_target(model: Any, tokenizer: Any, folder: Path) -> None:
    model.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


# The drafter


def hybrid_json(mask: int) -> dict[str, Any]:
    """z-lab's config.json, sliding windows and a full layer as Qwen3.6-27B's drafter has them."""
    return {
        **drafter_json(LAYERS, SHAPE["hidden_size"], VOCABULARY, SHAPE["num_hidden_layers"]),
        "intermediate_size": DRAFTER_MLP,
        "num_hidden_layers": DRAFTER_LAYERS,
        "num_key_value_heads": SHAPE["num_key_value_heads"],
        "rope_theta": 10000.0,
        "max_position_embeddings": SHAPE["max_position_embeddings"],
        "layer_types": ["sliding_attention"] * (DRAFTER_LAYERS - 1) + ["full_attention"],
        "use_sliding_window": True,
        "sliding_window": WINDOW,
        "dflash_config": {"target_layer_ids": list(LAYERS.layer_ids), "mask_token_id": mask},
    }


def beginnings(tokenizer: Any, texts: list[str], known: list[str], n: int, seed: int) -> list[str]:
    """n distinct beginnings of the texts' functions that the known texts have not, to ask the target for the rest."""
    found = sorted(exchanges(texts).keys() - exchanges(known).keys())
    random.Random(seed).shuffle(found)
    return [given for given in found if len(tokenizer.encode(given)) <= ASKED_TOKENS][:n]


def main(
    target: Annotated[Path, typer.Option(help="the target's folder; trained when missing")] = Path("target"),
    out: Annotated[Path, typer.Option(help="the drafter's folder")] = Path("drafter"),
    library: Annotated[
        list[Path] | None, typer.Option(help="sources to learn; Python's, torch's and transformers' where not given")
    ] = None,
    device: str = "cuda",
    target_steps: int = 4000,
    target_rows: Annotated[int, typer.Option(help="windows a step")] = 64,
    width: Annotated[int, typer.Option(help="tokens of a window")] = 512,
    target_rate: Annotated[float, typer.Option(help="the target's peak learning rate")] = 2e-3,
    prompts: int = 32000,
    new_tokens: int = 256,
    generate_rows: Annotated[int, typer.Option(help="prompts answered at once")] = 4096,
    steps: int = 6000,
    rows: Annotated[int, typer.Option(help="sequences a step of the drafter")] = 64,
    anchors: Annotated[int, typer.Option(help="anchors a sequence")] = 24,
    rate: Annotated[float, typer.Option(help="the drafter's peak learning rate")] = 1.5e-3,
    seed: int = 0,
) -> None:
    """Train the hybrid demo's target and its drafter."""
    texts, held_out = source_files(library or libraries())
    if not (target / "config.json").exists():
        tokenizer = train_tokenizer(texts)
        ids, starts = documents(tokenizer, texts, seed)
        print(f"{len(texts)} files, {len(starts) - len(texts)} exchanges, {len(ids):,} tokens", flush=True)
        model = train_target(
            ids, starts, documents(tokenizer, held_out[:: len(held_out) // LOSS_FILES + 1], seed)[0],
            device=device, steps=target_steps, rows=target_rows, width=width, rate=target_rate, seed=seed,
        )  # fmt: skip
        save_target(model, tokenizer, target)
    described = TargetConfig(model=str(target), device=device, dtype="bfloat16")
    files = TargetFiles.find(described)
    loaded, tokenizer = load_target(files, described), load_tokenizer(files, described)
    asked = beginnings(tokenizer, held_out, texts, prompts, seed)
    end = tokenizer.convert_tokens_to_ids(END)
    sequences = answers(loaded, tokenizer, asked, new_tokens, generate_rows, end)
    for row in range(4):
        print(tokenizer.decode(sequences.ids[row, : sequences.lengths[row]].tolist()), "\n", flush=True)
    raw = hybrid_json(tokenizer.convert_tokens_to_ids(MASK))
    torch.manual_seed(seed)
    drafter = DFlashDrafter(DrafterConfig.from_dict(raw)).to(loaded.device)
    tau = train(
        drafter, loaded, LAYERS, features(loaded, LAYERS, sequences), sequences,
        steps=steps, rows=rows, anchors=anchors, rate=rate, noise=0.0, seed=seed,
    )  # fmt: skip
    save(drafter, raw, out)
    print(f"τ {tau:.3f} on held-out random anchors; saved to {out}")


if __name__ == "__main__":
    typer.run(main)
