"""The command line: exit statuses, and errors in plain lines on stderr."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import write_config

from dflash_eval import cli
from dflash_eval.errors import RunError, UserError

ROOT = Path(__file__).parent.parent


def command(*arguments: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """The real thing: python -m dflash_eval in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "dflash_eval", *map(str, arguments)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        timeout=120,
    )


@pytest.fixture
def main(monkeypatch, capsys):
    """main() in this process: (exit status, stdout, stderr)."""

    def run(*arguments: str | Path) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["dflash-eval", *map(str, arguments)])
        with pytest.raises(SystemExit) as left:
            cli.main()
        return int(left.value.code or 0), *capsys.readouterr()

    return run


@pytest.fixture
def config(tiny, tmp_path) -> Path:
    """A config of its own on the tiny cache."""
    sections = {"cache_dir": str(tiny.folder / "cache"), "prompts": {"source": str(tiny.folder / "prompts.jsonl")}}
    (tmp_path / "prompts.jsonl").touch()
    return write_config(tmp_path, tiny.target, [("trained", tiny.drafter)], **sections)


def plain(stderr: str) -> str:
    """Checks that it is one to three plain lines, the first one from us."""
    lines = stderr.splitlines()
    assert 1 <= len(lines) <= 3, stderr
    assert lines[0].startswith("dflash-eval: ")
    assert "Traceback" not in stderr
    assert "Error(" not in stderr
    return stderr


def test_evaluate_exits_0_with_the_table_on_stdout_and_where_the_results_are_on_stderr(config):
    done = command("evaluate", "-c", config, "--set", "evaluate.width=2", "--set", "evaluate.budgets=[3, 9]")
    assert done.returncode == 0, done.stderr
    results = json.loads((config.parent / "results" / "results.json").read_text())
    drafter = results["drafters"][0]
    assert drafter["ddtree_width"]["k"] == 2
    assert [entry["budget"] for entry in drafter["ddtree_budget"]] == [3, 9]
    assert f"{drafter['tau']:.2f}" in done.stdout
    assert f"written: {config.parent / 'results'}/results.json" in done.stderr


def test_extract_exits_0_on_a_cache_that_is_complete(main, config):
    status, _, stderr = main("extract", "-c", config)
    assert status == 0
    assert "is complete" in stderr


@pytest.mark.parametrize("verb", ["extract", "evaluate"])
def test_an_unknown_key_exits_2_naming_file_line_and_the_nearest_key(config, verb):
    config.write_text(config.read_text().replace("width: 3", "widht: 3"))
    line = next(i for i, text in enumerate(config.read_text().splitlines(), 1) if "widht" in text)
    done = command(verb, "-c", config)
    assert done.returncode == 2
    assert done.stdout == ""
    assert f'{config}:{line}: unknown key "evaluate.widht"; did you mean "evaluate.width"?' in plain(done.stderr)


def test_an_unknown_key_on_the_command_line_exits_2_naming_the_override(main, config):
    status, stdout, stderr = main("evaluate", "-c", config, "--set", "evaluate.widht=4")
    assert (status, stdout) == (2, "")
    assert '--set evaluate.widht=4: unknown key "evaluate.widht"; did you mean "evaluate.width"?' in plain(stderr)


def test_a_config_that_is_not_there_exits_2_naming_it(main, tmp_path):
    status, _, stderr = main("evaluate", "-c", tmp_path / "gone.yaml")
    assert status == 2
    assert str(tmp_path / "gone.yaml") in plain(stderr)


def test_a_wrong_config_is_told_without_waiting_for_torch(tmp_path):
    program = (
        "import sys; from dflash_eval.cli import main\n"
        f"sys.argv = ['dflash-eval', 'evaluate', '-c', {str(tmp_path / 'gone.yaml')!r}]\n"
        "try: main()\n"
        "finally: print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert (done.returncode, done.stdout) == (2, "False\n")


def test_a_cache_that_is_not_there_exits_2_saying_what_to_run(main, config):
    status, stdout, stderr = main("evaluate", "-c", config, "--set", f"cache_dir={config.parent / 'nowhere'}")
    assert (status, stdout) == (2, "")
    assert "dflash-eval extract" in plain(stderr)


def test_completions_without_a_server_exit_2_naming_the_url(config):
    url = "http://127.0.0.1:9"
    settings = ["completions.source=server", f"completions.server.base_url={url}", f"cache_dir={config.parent / 'new'}"]
    done = command("completions", "-c", config, *(word for setting in settings for word in ("--set", setting)))
    assert (done.returncode, done.stdout) == (2, "")
    assert f"{url}/v1/models: no server answers there" in plain(done.stderr)


@pytest.mark.parametrize(("failure", "status"), [(UserError, 2), (RunError, 1)])
@pytest.mark.parametrize("verb", ["extract", "evaluate"])
def test_what_the_user_got_wrong_exits_2_and_a_failed_run_exits_1(main, config, monkeypatch, verb, failure, status):
    def fail(*_, **__):
        raise failure("the first line\nand the second")

    monkeypatch.setattr(f"dflash_eval.{verb}.{verb}", fail)
    assert main(verb, "-c", config) == (status, "", "dflash-eval: the first line\nand the second\n")


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["evaluate"], "--config"),
        (["evaluate", "--config"], "--config"),
        (["judge"], "judge"),
        (["evaluate", "--widht", "4"], "--widht"),
    ],
)
def test_a_command_line_that_is_not_understood_exits_2_naming_the_word(main, arguments, named):
    status, stdout, stderr = main(*arguments)
    assert (status, stdout) == (2, "")
    assert named in stderr.partition("Error")[2]
    assert "Traceback" not in stderr


def test_help_lists_the_commands_and_the_commands_help_their_options():
    listed = command("--help", NO_COLOR="1", COLUMNS="80")
    assert listed.returncode == 0
    assert "extract" in listed.stdout
    assert "evaluate" in listed.stdout
    assert "completions" in listed.stdout
    assert "import" in listed.stdout
    options = command("extract", "--help", NO_COLOR="1", COLUMNS="80")
    assert options.returncode == 0
    for option in ("--config", "--set", "--force"):
        assert option in options.stdout
