"""The command line: arguments in, one call a command, errors out."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from dflash_eval.config import load_config, load_overrides
from dflash_eval.errors import RunError, UserError

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
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", help="override a key: --set evaluate.width=4 (repeatable)", show_default=False),
]


@app.command()
def extract(
    config: ConfigPath,
    set_: Overrides = None,
    force: Annotated[bool, typer.Option("--force", help="overwrite a cache that does not fit the config")] = False,
) -> None:
    """Phase 1: run the target once and cache its layer activations (resumes where a killed run stopped)."""
    settings = load_config(config, set_ or [])  # before torch is imported: a typo is told at once
    from dflash_eval.extract import extract as run

    run(settings, force=force, say=lambda line: typer.echo(line, err=True))


@app.command()
def evaluate(config: ConfigPath, set_: Overrides = None) -> None:
    """Phase 2: judge the config's drafters from the cache; the target is not needed."""
    settings = load_config(config, set_ or [])
    from dflash_eval.evaluate import evaluate as run
    from dflash_eval.report import print_report

    results = run(settings)
    print_report(results, Console())
    typer.echo(f"written: {settings.results_dir}/results.json, report.md", err=True)
    if results["failed"]:
        names = ", ".join(drafter["name"] for drafter in results["failed"])
        raise RunError(f"{len(results['failed'])} of {len(settings.drafters)} drafters failed: {names} (see above)")


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


@bench_app.command("evaluate")
def bench_evaluate(
    config: Annotated[Path | None, typer.Option("--config", "-c", help="a config whose cache exists")] = None,
    shape: Annotated[str | None, typer.Option(help="instead of a config: qwen3.6-27b or tiny, random numbers")] = None,
    set_: Overrides = None,
    device: Annotated[str, typer.Option(help="of --shape: auto, cpu, cuda")] = "auto",
    dtype: Annotated[str, typer.Option(help="of --shape")] = "bfloat16",
    samples: Annotated[int, typer.Option(min=1, help="of --shape")] = 10,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="of --shape")] = 128,
    tokens: Annotated[int, typer.Option(min=2, help="of --shape: completion tokens a sample")] = 512,
    against: Annotated[bool, typer.Option("--against", help="also time the public class, its loop and a heap")] = False,
) -> None:
    """Time drafting, trees and the whole evaluation of a config's first drafter, or of a random one."""
    if (config is None) == (shape is None):
        raise UserError("give either --config or --shape")
    if config is not None:
        settings = load_config(config, set_ or [])
        from dflash_eval.bench.evaluate import bench_evaluate as run

        run(settings, typer.echo, against)
        return
    from dflash_eval.bench.evaluate import bench_shape

    assert shape is not None
    bench_shape(shape, samples, prompt_tokens, tokens, {"device": device, "dtype": dtype}, typer.echo)


def main() -> None:
    """Exit status: 0 done, 1 the run failed, 2 the user's input is wrong."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        app()
    except UserError as error:
        print(f"dflash-eval: {error}", file=sys.stderr)
        sys.exit(2)
    except RunError as error:
        print(f"dflash-eval: {error}", file=sys.stderr)
        sys.exit(1)
