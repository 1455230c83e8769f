"""The config: what loads, and what an error says: file, line, key, remedy."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from pydantic import ValidationError

from dflash_eval.config import load_config
from dflash_eval.errors import UserError

CONFIGS = sorted((Path(__file__).parent.parent / "configs").glob("*.yaml"))
MINIMAL = """\
name: tiny
target:
  model: some/target
drafters:
- name: a
  checkpoint: some/drafter
- name: b
  checkpoint: other/drafter
"""


def load(tmp_path: Path, text: str, *overrides: str):
    path = tmp_path / "c.yaml"
    path.write_text(text, encoding="utf-8")
    return load_config(path, overrides)


def error(tmp_path: Path, text: str, *overrides: str) -> str:
    with pytest.raises(UserError) as caught:
        load(tmp_path, text, *overrides)
    return str(caught.value).replace(f"{tmp_path}/", "")


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_shipped_config_loads_under_its_own_name_with_one_reference(path):
    config = load_config(path)
    assert config.name == path.stem
    assert [drafter.reference for drafter in config.drafters].count(True) == 1


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_the_commented_out_drafter_of_a_shipped_config_loads_too(path, tmp_path):
    text = re.sub(r"^  # (- |  )", r"  \1", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert load(tmp_path, text).drafters[-1].name == "mine"


def test_defaults_are_those_of_the_contract(tmp_path):
    config = load(tmp_path, MINIMAL)
    assert (config.cache_dir, config.results_dir) == (Path("cache/tiny"), Path("results/tiny"))
    assert (config.prompts.source, config.completions.source) == ("builtin:coding-10", "generate")
    assert (config.completions.max_new_tokens, config.completions.temperature) == (512, 0.0)
    assert (config.target.dtype, config.target.require_kernels) == ("bfloat16", ())
    assert (config.extract.layers, config.extract.shard_bytes) == ("auto", 2**31)
    assert (config.evaluate.dtype, config.evaluate.width) == ("float32", 8)
    assert config.evaluate.budgets == (4, 8, 16, 32, 64, 128, 256, 512, 1024)


def test_a_config_does_not_change_after_loading(tmp_path):
    config = load(tmp_path, MINIMAL)
    with pytest.raises(ValidationError, match="frozen"):
        config.evaluate.width = 4


def test_values_of_every_kind_are_read_as_yaml_1_2_reads_them(tmp_path):
    more = """\
completions: {source: file, file: answers.jsonl, temperature: 1, max_new_tokens: 1}
extract: {layers: [0, 5], extra_layers: [7], shard_bytes: 1}
evaluate: {budgets: [16, 4, 16]}
cache_dir: ~/somewhere
"""
    text = MINIMAL.replace("tiny", "2026-01-31") + more
    config = load(tmp_path, text, "drafters.1.overrides.rope_theta=1e7")
    assert config.name == "2026-01-31"
    assert config.completions.file == Path("answers.jsonl")
    assert (config.completions.temperature, type(config.completions.temperature)) == (1.0, float)
    assert (config.extract.layers, config.extract.extra_layers) == ((0, 5), (7,))
    assert config.evaluate.budgets == (4, 16)
    assert config.cache_dir == Path.home() / "somewhere"
    assert config.drafters[1].overrides.rope_theta == 1e7


def test_server_settings_are_kept(tmp_path):
    url = "https://host/v1"
    section = f"completions:\n  source: server\n  server: {{base_url: '{url}', timeout_s: 5}}\n"
    config = load(tmp_path, MINIMAL + section)
    assert config.completions.server.base_url == url
    assert config.completions.server.timeout_s == 5.0


def test_drafters_may_be_empty_where_the_layers_are_listed(tmp_path):
    config = load(tmp_path, "name: x\ntarget: {model: a/b}\nextract: {layers: [3]}\n")
    assert (config.drafters, config.extract.layers) == ((), (3,))


def test_anchors_and_merge_keys_work(tmp_path):
    text = "name: x\ntarget: {model: a/b}\ndrafters:\n- &a {name: a, checkpoint: c/d}\n- {<<: *a, name: b}\n"
    assert [drafter.checkpoint for drafter in load(tmp_path, text).drafters] == ["c/d", "c/d"]


@pytest.mark.parametrize(
    ("override", "read"),
    [
        (
            "drafters.1.checkpoint=checkpoints/step-12000",
            lambda c: c.drafters[1].checkpoint == "checkpoints/step-12000",
        ),
        ("drafters.0.overrides.block_size=8", lambda c: c.drafters[0].overrides.block_size == 8),
        ("evaluate.budgets=[8, 2]", lambda c: c.evaluate.budgets == (2, 8)),
        ("target={model: x/y, dtype: float16}", lambda c: c.target.dtype == "float16"),
        ("completions.server.base_url=http://h:1", lambda c: c.completions.server.base_url == "http://h:1"),
        ("prompts.system=a=b", lambda c: c.prompts.system == "a=b"),
        ("prompts.system=", lambda c: c.prompts.system is None),
        ("name=other", lambda c: c.cache_dir == Path("cache/other")),
    ],
)
def test_an_override_replaces_one_value(tmp_path, override, read):
    assert read(load(tmp_path, MINIMAL, override))


def test_the_last_override_of_a_key_wins(tmp_path):
    assert load(tmp_path, MINIMAL, "evaluate.width=2", "evaluate.width=3").evaluate.width == 3


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "c.yaml: empty; a config begins with name: and target:"),
        ("# only a comment\n", "c.yaml: empty"),
        ("- a\n", "c.yaml: not a mapping"),
        ("name: [\n\ntarget: x", "c.yaml:3: not valid YAML: "),
        ("name: x\n\tb: 1\n", "c.yaml:2: not valid YAML: "),
        ("name: x\n---\nname: y\n", "c.yaml:2: not valid YAML: "),
        ("name: a\ntarget: \x00\n", "c.yaml:2: not valid YAML: a control character"),
        ("name: !!python/object:os.system x\n", "c.yaml:1: not valid YAML: could not determine"),
        ("name: &a [*a]\n", "c.yaml:1: not a config: nested too deeply, or an anchor holds itself"),
        ("name: x\ntarget: !!int many\n", 'c.yaml:2: "many" is no int'),
        ("name: a\non: b\n", "c.yaml:2: a key must be text"),
        (MINIMAL + "name: twice\n", "c.yaml:9: name stands on line 1 already"),
        ("target:\n  model: a\n  model: b\n", "c.yaml:3: target.model stands on line 2 already"),
        ("target: {model: a}", "c.yaml: name is missing"),
        ("name: x\ntarget: {dtype: float16}\n", "c.yaml:2: target.model is missing"),
        (
            MINIMAL + "evaluate:\n  budget: [4]\n",
            'c.yaml:10: unknown key "evaluate.budget"; did you mean "evaluate.budgets"?',
        ),
        (
            MINIMAL.replace("  checkpoint: o", "  chekpoint: o"),
            'c.yaml:8: unknown key "drafters.1.chekpoint"; did you mean "drafters.1.checkpoint"?',
        ),
        (
            MINIMAL + "completions:\n  server:\n    url: x\n",
            'c.yaml:11: unknown key "completions.server.url"; known here: base_url, api, ',
        ),
        (
            MINIMAL + "  overrides: {block: 4}\n",
            'c.yaml:9: unknown key "drafters.1.overrides.block"; did you mean "drafters.1.overrides.block',
        ),
    ],
)
def test_a_file_that_is_no_config_is_refused_with_its_line(tmp_path, text, message):
    assert error(tmp_path, text).startswith(message)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("name", "a/b", 'must be a folder name (up to 100 letters, digits, ".", "_" or "-", the first not '),
        ("name", ".hidden", "must be a folder name"),
        ("name", "''", "must be a folder name"),
        ("name", "7", "must be text (quote it), not 7"),
        ("target", "some/target", 'must be a section with keys of its own, not "some/target"'),
        ("target", "", "must be a section with keys of its own, not null"),
        ("target.model", "yes", "must be text (quote it), not true"),
        ("target.model", "''", "must not be empty"),
        ("target.dtype", "bf16", 'must be "bfloat16", "float16" or "float32", not "bf16"'),
        ("target.device", "gpu", 'must be auto, cpu, cuda or cuda:<number>, not "gpu"'),
        ("target.device_map", "balanced", 'must be "auto", not "balanced"'),
        ("target.require_kernels", "fla", 'must be a list, not "fla"'),
        ("target.require_kernels", "[flash]", 'must be "fla" or "causal_conv1d", not "flash"'),
        ("target.trust_remote_code", "1", "must be a valid boolean, not 1"),
        ("prompts.limit", "0", "must be at least 1, not 0"),
        ("completions.source", "disk", 'must be "generate", "server" or "file", not "disk"'),
        ("completions.source", "file", "is missing, and completions.source: file reads it"),
        ("completions.file", "3", "must be a path, not 3"),
        ("completions.server.base_url", "localhost:30000", "must begin with http:// or https://"),
        ("completions.max_new_tokens", "0", "must be at least 1, not 0"),
        ("completions.max_new_tokens", "1.0", "must be a whole number, not 1.0"),
        ("completions.temperature", "-0.1", "must be at least 0, not -0.1"),
        ("completions.temperature", ".nan", "must be a finite number, not NaN"),
        ("completions.temperature", ".inf", "must be a finite number, not Infinity"),
        ("completions.temperature", "false", "must be a valid number, not false"),
        ("completions.seed", "-1", "must be at least 0, not -1"),
        ("extract.layers", "all", 'must be "auto" or a list of layer numbers from 0 up, not "all"'),
        ("extract.layers", "[1, -2]", 'must be "auto" or a list of layer numbers from 0 up, not [1, -2]'),
        ("extract.layers", "[]", "must not be empty"),
        ("prompts.limit", str(10**20), "must be less than 9223372036854775808, not 100000000000000000000"),
        ("extract.extra_layers", "[-1]", "must be at least 0, not -1"),
        ("extract.max_batch_tokens", "0", "must be at least 1, not 0"),
        ("extract.shard_bytes", "0", "must be at least 1, not 0"),
        ("drafters", "{name: a}", 'must be a list, not {"name": "a"}'),
        ("drafters", "", "must be a list, not null"),
        ("drafters", "[]", 'is "auto", but there are no drafters; list the layers or add a drafter'),
        ("drafters.1.name", "a", '"a" is the name of drafters.0 too'),
        ("drafters.1.overrides.block_size", "1", "must be at least 2, not 1"),
        ("drafters.1.overrides.target_layer_ids", "[]", "must not be empty"),
        ("drafters.1.overrides.is_causal", "'no'", 'must be a valid boolean, not "no"'),
        ("drafters.1.overrides.rope_theta", "0", "must be greater than 0, not 0"),
        ("evaluate.width", "0", "must be at least 1, not 0"),
        ("evaluate.width", "'8'", 'must be a whole number, not "8"'),
        ("evaluate.budgets", "[]", "must not be empty"),
        ("evaluate.budgets", "[4, 0]", "must be at least 1, not 0"),
        ("evaluate.budgets", "[4, true]", "must be a whole number, not true"),
        ("evaluate.budgets", "16", "must be a list, not 16"),
        ("evaluate.bootstrap", "99", "must be at least 100, not 99"),
        ("cache_dir", "", "must be a path, not null"),
    ],
)
def test_a_wrong_value_is_refused_by_its_key_with_what_is_allowed(tmp_path, key, value, message):
    said = error(tmp_path, MINIMAL, f"{key}={value}")
    assert "\n" not in said
    elsewhere = {"completions.source=file": "completions.file", "drafters=[]": "extract.layers"}
    blamed = elsewhere.get(f"{key}={value}")
    start = f"c.yaml: {blamed} " if blamed else f"--set {key}={value}: {key}"
    assert said.startswith(start)
    assert message in said


def test_two_references_are_refused_at_the_second(tmp_path):
    text = MINIMAL.replace("drafter\n", "drafter\n  reference: true\n")
    message = "drafters.1.reference must be false: drafters.0 is the reference already"
    assert error(tmp_path, text) == f"c.yaml:10: {message}"


def test_errors_name_the_override_or_the_line_whichever_gave_the_value(tmp_path):
    text = MINIMAL + "evaluate:\n  width: 0\n  seed: -1\n"
    assert error(tmp_path, text, "evaluate.width=-5").splitlines() == [
        "--set evaluate.width=-5: evaluate.width must be at least 1, not -5",
        "c.yaml:11: evaluate.seed must be at least 0, not -1",
    ]


def test_three_errors_are_told_at_once_unknown_keys_first(tmp_path):
    text = MINIMAL + "evaluate: {width: 0, budgets: [], seed: -1, dtype: x, with: 3}\n"
    said = error(tmp_path, text).splitlines()
    assert len(said) == 3
    assert "unknown key" in said[0]
    assert said[2].endswith("(and 2 more errors)")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("evaluate.width", "not of the form dotted.key=value"),
        ("=3", "not of the form dotted.key=value"),
        ("evaluate..width=3", "not of the form dotted.key=value"),
        ("evaluate.wdth=3", 'unknown key "evaluate.wdth"; did you mean "evaluate.width"?'),
        ("drafters.2.name=c", "no entry 2: the file lists 2 there, counted from 0"),
        ("drafters.name=c", 'what stands before "name" is a list: put an entry\'s number between'),
        ("name.x=c", 'what stands before "x" is a value, not a section'),
        ("evaluate.budgets=[4", "not valid YAML: "),
        ("target={model: a, model: b}", "model stands on line 1 already"),
    ],
)
def test_a_wrong_override_is_refused_by_its_own_text(tmp_path, override, message):
    assert error(tmp_path, MINIMAL, override).startswith(f"--set {override}: {message}")


def test_a_file_that_cannot_be_read_is_refused(tmp_path):
    (tmp_path / "latin.yaml").write_bytes(b"name: caf\xe9\n")
    for name, message in [
        ("missing.yaml", "missing.yaml: the config cannot be read: No such file or directory"),
        (".", ": the config cannot be read: a folder, not a YAML file"),
        ("latin.yaml", "latin.yaml: not UTF-8 text"),
    ]:
        with pytest.raises(UserError) as caught:
            load_config(tmp_path / name)
        assert str(caught.value).endswith(message)


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("budgets=[0]", "evaluate.budgets.0 must be at least 1, not 0"),
        ("budgets=[1.5]", "evaluate.budgets.0 must be a whole number, not 1.5"),
        ("budgets=[4, 1000000001]", "evaluate.budgets.1 must be at most 1000000, not 1000000001"),
        ("budgets=[]", "evaluate.budgets must not be empty"),
        ("bootstrap=4000000000", "evaluate.bootstrap must be at most 1000000, not 4000000000"),
    ],
)
def test_a_number_out_of_range_is_one_line(tmp_path, override, said):
    path = tmp_path / "c.yaml"
    path.write_text("name: a\ntarget: {model: m}\nextract: {layers: [1]}\n")
    with pytest.raises(UserError) as error:
        load_config(path, [f"evaluate.{override}"])
    assert str(error.value) == f"--set evaluate.{override}: {said}"
