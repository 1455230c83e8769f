"""The command line: arguments in, one call a command, errors out."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from dflash_eval import ranks
from dflash_eval.config import Config, load_config, load_overrides
from dflash_eval.errors import GateFailed, RunError, Stopped, UserError

app = typer.Typer(
    help="How good is a DFlash drafter? Run the target once, judge any drafter from its cached activations.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
bench_app = typer.Typer(help="Repeatable measurements: how fast, and how far from what the machine can do.")
app.add_typer(bench_app, name="bench", no_args_is_help=True)
ConfigPath = Annotated[Path, typer.Option("--config", "-c", help="YAML config, e.g. configs/demo.yaml")]
SHAPE_NAMES = "qwen3.6-27b, qwen3.5-0.8b or tiny"
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", help="override a key: --set evaluate.width=4 (repeatable)", show_default=False),
]


@app.command()
def extract(
    config: ConfigPath,
    set_: Overrides = None,
    force: Annotated[bool, typer.Option("--force", help="overwrite a cache that does not fit the config")] = False,
    kernels: Annotated[str | None, typer.Option(help="auto, torch or fla: short for --set target.kernels=...")] = None,
) -> None:
    """Phase 1: run the target once and cache its layer activations (resumes where a killed run stopped)."""
    settings = _load(
        config, [*(set_ or []), *([f"target.kernels={kernels}"] if kernels else [])]
    )  # before torch is imported: a typo is told at once
    from dflash_eval.extract import extract as run

    run(settings, force=force, say=lambda line: typer.echo(line, err=True))


@app.command()
def completions(
    config: ConfigPath,
    set_: Overrides = None,
    force: Annotated[bool, typer.Option("--force", help="fetch all anew, in place of the cache that is there")] = False,
) -> None:
    """Fetch the completions from the server that serves the target, while it runs; extract goes on from them."""
    settings = load_config(config, set_ or [])
    from dflash_eval.fetching import fetch

    fetch(settings, force=force, say=lambda line: typer.echo(line, err=True))
    typer.echo(f"written: {settings.cache_dir}/completions.jsonl", err=True)


@app.command()
def evaluate(
    config: Annotated[
        list[Path], typer.Option("--config", "-c", help="YAML config; several of one cache: the drafters of all")
    ],
    set_: Overrides = None,
    fail_below: Annotated[
        list[str] | None,
        typer.Option(help="exit 3 where a candidate is below: tau=3.0 (repeatable)", show_default=False),
    ] = None,
    fail_if_worse_than: Annotated[
        Path | None, typer.Option(help="exit 3 where a candidate is worse than in this results.json, beyond doubt")
    ] = None,
    margin: Annotated[str, typer.Option(help="of --fail-if-worse-than: how much worse is allowed")] = "2%",
) -> None:
    """Phase 2: judge the config's drafters from the cache; the target is not needed."""
    loaded = [_load(path, set_) for path in config]
    from dflash_eval import gate
    from dflash_eval.sweep import merged

    settings = merged(loaded, config) if len(loaded) > 1 else loaded[0]
    from dflash_eval.history import read_results

    limits, allowed = [gate.parse_limit(text) for text in fail_below or []], gate.parse_margin(margin)
    gate.check_limits(limits, settings.evaluate.budgets)
    earlier = read_results(fail_if_worse_than) if fail_if_worse_than is not None else None
    from dflash_eval.evaluate import evaluate as run
    from dflash_eval.report import print_report

    results = run(settings)
    if ranks.rank() > 0:
        sys.exit(1 if results["failed"] else 0)
    print_report(results, Console())
    typer.echo(f"written: {settings.results_dir}/results.json, report.md, report.html", err=True)
    if results["failed"]:
        names = ", ".join(drafter["name"] for drafter in results["failed"])
        raise RunError(f"{len(results['failed'])} of {len(settings.drafters)} drafters failed: {names} (see above)")
    reasons = gate.below(results, limits)
    if earlier is not None:
        reasons += gate.worse(results, earlier, allowed, settings.evaluate.bootstrap, settings.evaluate.seed)
    if reasons:
        raise GateFailed("\n".join(reasons))


@app.command()
def watch(
    config: ConfigPath,
    folder: Annotated[Path, typer.Argument(help="where the training run writes its checkpoints")],
    every: Annotated[float, typer.Option(min=0.1, help="seconds between two looks")] = 30.0,
    set_: Overrides = None,
) -> None:
    """Judge the config's drafters, then each checkpoint as it appears, when it is whole; until stopped."""
    settings = load_config(config, set_ or [])
    from dflash_eval.signals import stoppable
    from dflash_eval.watch import watch as run

    with stoppable():
        run(settings, folder, every, lambda line: typer.echo(line, err=True))


@app.command()
def diff(
    a: Annotated[Path, typer.Argument(help="a results.json, or its folder")],
    b: Annotated[Path, typer.Argument(help="another one")],
) -> None:
    """Say what has changed from one evaluation's results to another's, prompt by prompt, and beyond what doubt."""
    from dflash_eval.diff import HEADER, diff_rows, differences
    from dflash_eval.history import read_results
    from dflash_eval.report import print_table

    before, after = read_results(a), read_results(b)
    console = Console()
    print_table(console, HEADER, diff_rows(before, after))
    for line in differences(before, after):
        console.print(line, highlight=False, markup=False)


@app.command()
def diagnose(
    config: ConfigPath,
    drafter: Annotated[str, typer.Option(help="the name of one of the config's drafters")],
    set_: Overrides = None,
) -> None:
    """Say why a drafter's τ is low: try one change at a time, look at its numbers and weights."""
    settings = load_config(config, set_ or [])
    from dflash_eval.diagnose import diagnose as run
    from dflash_eval.diagnosis.report import print_diagnosis

    print_diagnosis(run(settings, drafter, config), Console())
    typer.echo(f"written: {settings.results_dir}/diagnosis.md, diagnosis.json", err=True)


@app.command()
def doctor(config: ConfigPath, set_: Overrides = None) -> None:
    """Say whether an extraction finds what it needs: software, kernels, GPU memory, disk; and who is in the way."""
    settings = _load(config, set_)
    from dflash_eval.doctor import doctor as run

    wrong = run(settings, typer.echo)
    if wrong:
        raise UserError(f"{wrong} thing{'s' if wrong > 1 else ''} in the way of the extraction (see above)")


@app.command("import")
def import_(
    source: Annotated[Path, typer.Argument(help="a folder of .safetensors (vLLM), .ckpt or .pt (SpecForge) files")],
    config: ConfigPath,
    layers: Annotated[str, typer.Option(help="the layers that the files hold, in their order: 1,16,31,46,61")],
    ids_from: Annotated[int, typer.Option(min=0, max=1, help="what --layers calls the first layer; vLLM: 1")] = 0,
    set_: Overrides = None,
    force: Annotated[bool, typer.Option("--force", help="overwrite a cache that is there")] = False,
) -> None:
    """Make a cache of hidden states that vLLM or SpecForge saved; evaluate then needs no extraction."""
    settings = load_config(config, set_ or [])
    try:
        numbers = [int(layer) - ids_from for layer in layers.split(",")]
    except ValueError:
        raise UserError(f"--layers {layers}: not numbers with commas between") from None
    from dflash_eval.importing import import_states

    import_states(settings, source, numbers, force=force, say=lambda line: typer.echo(line, err=True))


@app.command()
def inspect(
    checkpoint: Annotated[str, typer.Argument(help="Hugging Face id, folder or file")],
    against: Annotated[str | None, typer.Option(help="another checkpoint, to show what differs")] = None,
    cache: Annotated[Path | None, typer.Option(help="a cache folder: can it serve the checkpoint?")] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", help="amend its config: --set block_size=16 (repeatable)", show_default=False),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON instead of tables")] = False,
) -> None:
    """Say what a drafter's checkpoint is, and what looks wrong with it."""
    overrides = load_overrides(set_ or [])
    from dflash_eval.inspection import inspect as run
    from dflash_eval.inspection import print_inspection

    result = run(checkpoint, against, cache, overrides)
    if as_json:
        typer.echo(json.dumps(result, indent=2, ensure_ascii=False))
    else:
        print_inspection(result, Console())


@app.command()
def compare(
    cache_a: Annotated[Path, typer.Argument(help="a cache folder")],
    cache_b: Annotated[Path, typer.Argument(help="another, of the same tokens, extracted otherwise")],
    config: Annotated[
        Path | None, typer.Option("--config", "-c", help="its drafters are judged from both caches")
    ] = None,
    set_: Overrides = None,
    common_prefix: Annotated[
        bool, typer.Option("--common-prefix", help="where the tokens differ, compare as far as they agree")
    ] = False,
    out: Annotated[
        Path | None, typer.Option(help="where compare.md, .json and .png go; results/<A>-against-<B>")
    ] = None,
) -> None:
    """Do two ways of extraction (fla or torch, bf16 or fp32, GPU or CPU) give other states, and does τ notice?"""
    settings = load_config(config, set_ or []) if config is not None else None
    if set_ and config is None:
        raise UserError("--set changes a config: give it with -c")
    from dflash_eval.comparison import compare_caches
    from dflash_eval.comparison_report import print_comparison, verdict, write_comparison
    from dflash_eval.evaluate import check_writable

    folder = out or Path("results", f"{cache_a.resolve().name}-against-{cache_b.resolve().name}")
    check_writable(folder)
    result = compare_caches(cache_a, cache_b, settings, common_prefix)
    result["verdict"] = verdict(result)
    write_comparison(result, folder)
    print_comparison(result, Console())
    typer.echo(f"written: {folder}/compare.md, compare.json, compare.png", err=True)


@app.command()
def export(
    results: Annotated[Path, typer.Argument(help="a results.json, or its folder")],
    kind: Annotated[str, typer.Argument(help="csv, parquet, comment, plots, tensorboard or wandb")],
    to: Annotated[Path, typer.Argument(help="a file; a folder for plots and tensorboard; wandb's project")],
) -> None:
    """Write results as others read them: cycles as a table, a comment in Markdown, plots, an experiment tracker."""
    from dflash_eval.export import export as run
    from dflash_eval.history import read_results

    run(read_results(results), kind, to)


def _check_one(config: Path | None, shape: str | None) -> None:
    if (config is None) == (shape is None):
        raise UserError("give either --config or --shape")


@bench_app.command("evaluate")
def bench_evaluate(
    config: Annotated[Path | None, typer.Option("--config", "-c", help="a config whose cache exists")] = None,
    shape: Annotated[str | None, typer.Option(help=f"instead of a config: {SHAPE_NAMES}, random numbers")] = None,
    set_: Overrides = None,
    device: Annotated[str, typer.Option(help="of --shape: auto, cpu, cuda")] = "auto",
    dtype: Annotated[str, typer.Option(help="of --shape")] = "bfloat16",
    samples: Annotated[int, typer.Option(min=1, help="of --shape")] = 10,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="of --shape")] = 128,
    tokens: Annotated[int, typer.Option(min=2, help="of --shape: completion tokens a sample")] = 512,
    against: Annotated[bool, typer.Option("--against", help="also time the public class, its loop and a heap")] = False,
) -> None:
    """Time drafting, trees and the whole evaluation of a config's first drafter, or of a random one."""
    _check_one(config, shape)
    if config is not None:
        settings = load_config(config, set_ or [])
        from dflash_eval.bench.evaluate import bench_evaluate as run

        run(settings, typer.echo, against)
        return
    from dflash_eval.bench.evaluate import bench_shape

    assert shape is not None
    bench_shape(shape, samples, prompt_tokens, tokens, {"device": device, "dtype": dtype}, typer.echo)


@bench_app.command("cost")
def bench_cost(
    config: ConfigPath,
    set_: Overrides = None,
    context: Annotated[int, typer.Option(min=1, help="tokens that the target has read before")] = 512,
) -> None:
    """Time a draft and the target's verification of 1, a block's and each budget's tokens: what evaluate.cost takes."""
    settings = load_config(config, set_ or [])
    from dflash_eval.bench.cost import bench_cost as run

    run(settings, context, typer.echo)


@bench_app.command("extract")
def bench_extract(
    config: Annotated[Path | None, typer.Option("--config", "-c", help="a config whose target is loaded")] = None,
    shape: Annotated[str | None, typer.Option(help=f"instead of a config: {SHAPE_NAMES}, random weights")] = None,
    set_: Overrides = None,
    device: Annotated[str, typer.Option(help="of --shape: auto, cpu, cuda")] = "auto",
    batches: Annotated[int, typer.Option(min=1)] = 16,
    batch_rows: Annotated[int, typer.Option(min=1, help="sequences a batch")] = 8,
    length: Annotated[int, typer.Option(min=2, help="tokens a sequence")] = 2048,
    profile: Annotated[Path | None, typer.Option(help="a folder: time the parts too, write a profile there")] = None,
) -> None:
    """Time the target's plain forward, and the extraction with its shards on disk, on random tokens."""
    _check_one(config, shape)
    where = load_config(config, set_ or []) if config is not None else shape
    from dflash_eval.bench.extract import bench_extract as run

    assert where is not None
    run(where, device, batches, batch_rows, length, profile, typer.echo)


@bench_app.command("kernels")
def bench_kernels(
    shape: Annotated[str, typer.Option(help=f"{SHAPE_NAMES}, random weights")] = "tiny",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda")] = "auto",
    rows: Annotated[int, typer.Option(min=1, help="sequences")] = 8,
    length: Annotated[int, typer.Option(min=8, help="tokens a sequence")] = 1024,
) -> None:
    """Compare the states that a target's kernels, torch's fallbacks and float32 give, on random tokens."""
    from dflash_eval.bench.kernels import bench_kernels as run

    run(shape, device, rows, length, typer.echo)


def _load(path: Path, overrides: list[str] | None) -> Config:
    try:
        return load_config(path, overrides or [])
    except UserError:
        if ranks.rank() > 0:  # rank 0 tells it
            sys.exit(2)
        raise


def main() -> None:
    """Exit status: 0 done, 1 the run failed, 2 wrong input, 3 the gate is shut, 130 and 143 stopped by a signal."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        app()
    except (UserError, RunError, GateFailed, Stopped) as error:
        print(f"dflash-eval: {f'rank {ranks.rank()}: ' if ranks.rank() else ''}{error}", file=sys.stderr)
        sys.exit(ranks.exit_status(error))
