"""Checkpoints that cannot be judged: each kind a plain error that says what, where, and how to mend it."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from conftest import MASK, VOCABULARY, drafter_json, save_drafter, write_config
from drafters import CPU, error, head_of, load, spec, speculators_json
from safetensors.torch import load_file, save_file

from dflash_eval.config import DrafterSpec, load_config
from dflash_eval.drafter.checkpoint import load_drafter, read_config, target_of
from dflash_eval.drafter.model import Group
from dflash_eval.errors import UserError
from dflash_eval.evaluate import evaluate
from dflash_eval.inspection import inspect


@pytest.fixture
def folder(tmp_path) -> Path:
    return save_drafter(tmp_path / "d", drafter_json())


def judged(setup, tmp_path, checkpoint, *overrides: str) -> dict:
    path = write_config(tmp_path, setup.target, [("mine", checkpoint)], cache_dir=str(setup.folder / "cache"))
    return evaluate(load_config(path, [f"prompts.source={setup.folder / 'prompts.jsonl'}", *overrides]))


# Of another target


def test_layers_that_the_target_does_not_have(tiny, tmp_path):
    raw = drafter_json(dflash_config={"target_layer_ids": [1, 16, 31], "mask_token_id": MASK})
    message = error(judged, tiny, tmp_path, save_drafter(tmp_path / "d", raw))
    assert "needs layers 16, 31, the target has 0 to 5: a drafter of another target" in message


def test_speculators_ids_that_hold_the_last_layer(tiny, tmp_path):
    raw = speculators_json(tiny.raw, aux_hidden_state_layer_ids=[1, 3, 6])
    folder = save_drafter(tmp_path / "d", raw, load_file(tiny.drafter / "model.safetensors"))
    message = error(judged, tiny, tmp_path, folder)
    assert "aux_hidden_state_layer_ids holds 6, the target's last layer" in message
    assert "set target_layer_ids under its overrides: [0, 2]" in message
    judged(tiny, tmp_path, folder, "drafters.0.overrides.target_layer_ids=[0, 2, 4]")


def test_speculators_ids_that_hold_the_embedding(tiny, tmp_path):
    raw = speculators_json(tiny.raw, aux_hidden_state_layer_ids=[0, 3])
    assert "target_layer_ids is [-1, 2], not layers" in error(
        read_config, spec(save_drafter(tmp_path / "d", raw, {"x": torch.ones(1)}))
    )


def test_a_width_above_the_draft_vocabulary(tiny, tmp_path):
    state = load_file(tiny.drafter / "model.safetensors")
    state |= {"lm_head.weight": head_of(tiny)["lm_head.weight"][:2], "d2t": torch.zeros(2, dtype=torch.int64)}
    folder = save_drafter(tmp_path / "d", speculators_json(tiny.raw, draft_vocab_size=2), state)
    assert "drafts from 2 tokens, fewer than evaluate.width 3" in error(judged, tiny, tmp_path, folder)


# Vocabularies


@pytest.mark.parametrize(
    ("tensors", "says"),
    [
        ({"d2t": torch.zeros(90, dtype=torch.int64)}, "d2t is [90], config.json asks for [100]"),
        ({}, "drafts from 100 of the target's 260 tokens, and neither d2t nor t2d says which"),
        ({"d2t": torch.full((100,), 200)}, "d2t does not map 100 draft tokens into the target's 260"),
        ({"d2t": -torch.arange(100)}, "1 of them different"),
        ({"d2t": torch.zeros(100)}, "d2t holds float32, not token ids"),
        ({"t2d": torch.ones((), dtype=torch.bool)}, "t2d is [], config.json asks for [260]"),
        ({"t2d": torch.ones(VOCABULARY, 1, dtype=torch.bool)}, "t2d is [260, 1], config.json asks for [260]"),
        ({"t2d": torch.arange(VOCABULARY) < 99}, "t2d marks 99 of 260 tokens, config.json says 100 of 260"),
        ({"d2t": torch.zeros(100, dtype=torch.int64), "t2d": torch.arange(VOCABULARY) >= 160}, "name different tokens"),
    ],
)
def test_a_reduced_vocabulary_that_is_no_part_of_the_targets(tiny, tmp_path, tensors, says):
    state = {**load_file(tiny.drafter / "model.safetensors"), "lm_head.weight": torch.zeros(100, 32), **tensors}
    folder = save_drafter(tmp_path / "d", speculators_json(tiny.raw, draft_vocab_size=100), state)
    assert says in error(load, folder)


OPTIONAL = (
    "input_embedding_scale", "output_multiplier", "final_logit_softcapping", "is_causal", "rope_scaling",
    "rope_parameters", "draft_vocab_size", "conv_kernel_size", "selector_rank", "markov_rank", "sample_from_anchor",
    "speculators_config", "transformer_layer_config", "num_target_layers",
)  # fmt: skip


@pytest.mark.parametrize(
    "value", [None, -1, 0, 3, 0.5, math.nan, pytest.param(10**400, id="huge"), True, "x", [], [{}], {"a": 1}, 1 << 40]
)
def test_whatever_a_config_holds_the_error_is_a_plain_one(folder, value):
    """Each key in turn; where nothing is wrong with the value, the drafter drafts."""
    plain = drafter_json(layer_types=["sliding_attention", "full_attention"], sliding_window=5)
    for key in (*plain, *plain["dflash_config"], *OPTIONAL):
        raw = json.loads(json.dumps(plain))
        if key == "num_target_layers":
            del raw["dflash_config"]["target_layer_ids"]
        (raw["dflash_config"] if key in raw["dflash_config"] else raw)[key] = value
        (folder / "config.json").write_text(json.dumps(raw))
        with suppress(UserError):
            drafter = load(folder)
            target_of(spec(folder))
            block = torch.ones(1, drafter.config.block_size, 32) * drafter.config.input_embedding_scale
            context = drafter.context(torch.ones(1, 7, drafter.fc.in_features))
            hidden = drafter.draft(block, torch.tensor([7]), context, [Group(slice(0, 1), slice(0, 1), 7)])
            assert drafter.logits(hidden, torch.ones(VOCABULARY, 32)).isfinite().all(), key


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        ({"rope_type": "spiral"}, "makes no RoPE of it"),
        ({"rope_type": "yarn", "partial_rotary_factor": 0.5, "rope_theta": 1e4, "factor": 2.0}, "frequencies"),
        ({"rope_type": "linear", "rope_theta": 1e4, "factor": 0}, "finite"),
        ({"rope_type": "dynamic", "rope_theta": 1e4, "factor": float("nan")}, "rope_parameters"),
        ({"rope_type": "yarn", "rope_theta": 1e4}, "factor"),
        ({"full_attention": {"rope_theta": 1e4}, "sliding_attention": {"rope_theta": 1e6}}, "each kind of layer"),
    ],
)
def test_a_rope_that_no_drafter_can_have_is_named(folder, rope, message):
    """Nothing falls back to another base, and no frequency is infinite."""
    (folder / "config.json").write_text(json.dumps(drafter_json(rope_parameters=rope)))
    said = error(read_config, spec(folder))
    assert "config.json: rope_parameters" in said
    assert message in said


@pytest.mark.parametrize("key", ["speculators_config", "transformer_layer_config", "rope_parameters", "architectures"])
def test_a_section_of_another_kind_is_named(folder, key):
    (folder / "config.json").write_text(json.dumps(drafter_json(**{key: "x"})))
    assert f"config.json: {key} is 'x', not a" in error(read_config, spec(folder))


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "model-00002-of-00004.safetensors", "run.pt"])
@pytest.mark.parametrize("kind", ["pipe", "device", "folder", "link to nothing"])
def test_what_is_no_file_is_named_and_not_read(folder, name, kind):
    """A pipe nobody writes to, or /dev/zero, would be read for ever."""
    if name.startswith("model-"):
        shards(folder)
    path = folder / name
    path.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to("/dev/zero" if kind == "device" else "nowhere")
    message = error(load, path if name == "run.pt" else folder)
    assert str(folder) in message
    assert any(
        word in message
        for word in (
            "cannot be read",
            "no config.json",
            "no such file",
            "neither",
            "missing",
            "no weights",
            "are there",
        )
    )


def test_a_name_longer_than_any_path(tmp_path):
    assert "File name too long" in error(read_config, spec(tmp_path / ("x" * 5000)))


@pytest.mark.parametrize(
    ("tensors", "says"),
    [
        ({"": torch.ones(1), "a\nb": torch.ones(1)}, "a tensor called 'a\\nb'"),
        ({"\x1b[31m": torch.ones(1)}, "a tensor called '\\x1b[31m'"),
        ({1: torch.ones(1)}, "a tensor called 1"),
        ({("norm", "weight"): torch.ones(1)}, "a tensor called ('norm', 'weight')"),
        ({"norm.weight": torch.eye(32).to_sparse()}, "sparse, quantised or nested"),
        ({"norm.weight": torch.ones(32, device="meta")}, "norm.weight is larger than what the file holds of it"),
        ({"norm.weight": torch.tensor(1.0)}, "norm.weight is [], config.json asks for [32]"),
        ({"fc.weight": torch.tensor(1.0)}, "fc.weight is [], config.json asks for [32, 96]"),
        ({"fc.weight": torch.ones(0, 96)}, "fc.weight is [0, 96], config.json asks for [32, 96]"),
    ],
)
def test_tensors_that_are_no_weights(folder, tensors, says):
    torch.save({**load_file(folder / "model.safetensors"), **tensors}, folder / "run.pt")
    assert says in error(load, folder / "run.pt")
    with suppress(UserError):
        assert any(says in problem for problem in inspect(str(folder / "run.pt"))["checkpoint"]["problems"])


@pytest.mark.parametrize("shape", [(64, 32), ()])
def test_a_fused_projection_beside_those_that_it_holds_or_of_another_shape(folder, shape):
    state = load_file(folder / "model.safetensors")
    state["layers.0.self_attn.qkv_proj.weight"] = torch.zeros(shape)
    save_file(state, folder / "model.safetensors")
    message = error(load, folder)
    assert "both layers.0.self_attn.qkv_proj.weight and" in message or "is [], config.json asks for 32" in message


# Files


def shards(folder: Path, count: int = 4, index: bool = True) -> None:
    state = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names, weight_map = sorted(state), {}
    for i in range(count):
        file = f"model-{i + 1:05d}-of-{count:05d}.safetensors"
        save_file({name: state[name] for name in names[i::count]}, folder / file)
        weight_map |= dict.fromkeys(names[i::count], file)
    if index:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


@pytest.mark.parametrize("index", [True, False])
def test_half_the_shards_missing(folder, index):
    shards(folder, index=index)
    for gone in ("00002", "00004"):
        (folder / f"model-{gone}-of-00004.safetensors").unlink()
    message = error(load, folder)
    assert ("2 of 4 shards are missing" if index else "2 of 4 shards are there") in message


def test_an_index_that_names_a_file_which_is_not_there(folder):
    (folder / "model.safetensors").rename(folder / "other.safetensors")
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"norm.weight": "lost.safetensors"}})
    )
    assert "names lost.safetensors, not in the folder" in error(load, folder)


@pytest.mark.parametrize("content", ["[1]", '{"weight_map": 3}', '{"weight_map": {"a": ["x"]}}', "{}", "{"])
def test_an_index_that_is_none(folder, content):
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(content)
    assert str(folder / "model.safetensors.index.json") in error(load, folder)


def test_two_configs_beside_a_training_runs_file(folder):
    (folder / "draft_config.json").write_text(json.dumps(drafter_json(block_size=4)))
    message = error(load, folder / "model.safetensors")
    assert "two configs could be its own: config.json and draft_config.json" in message
    (folder / "draft_config.json").write_text(json.dumps({"temperature": 0.7}))
    load(folder / "model.safetensors")


def test_a_training_runs_file_without_a_config_says_what_the_overrides_must_hold(folder):
    (folder / "config.json").unlink()
    message = error(load, folder / "model.safetensors", block_size=6)
    assert "set mask_token_id, target_layer_ids, rope_theta\nunder the overrides of drafter 'mine'" in message


def test_a_training_runs_file_of_another_model(tmp_path):
    torch.save({"transformer.h.0.attn.weight": torch.ones(3)}, tmp_path / "x.pt")
    overrides = {"block_size": 6, "mask_token_id": MASK, "target_layer_ids": (0,), "rope_theta": 1e4}
    assert "no layers.0.self_attn.q_norm.weight in it: not the weights of a DFlash drafter" in error(
        load, tmp_path / "x.pt", **overrides
    )
    torch.save({"step": 3, "optimizer": {"lr": 0.1}}, tmp_path / "x.pt")
    assert "no weights in it" in error(load, tmp_path / "x.pt", **overrides)


def test_several_files_that_could_be_the_weights(folder):
    for name in ("first.pt", "second.pt", "optimizer.pt"):
        torch.save({"x": torch.ones(1)}, folder / name)
    (folder / "model.safetensors").unlink()
    message = error(load, folder)
    assert "2 files could be the weights (first.pt, second.pt)\nname one of them in checkpoint" in message


LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:abc\nsize 1234\n"
HTML = b"<!DOCTYPE html><html><body>404</body></html>"


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "model.pt"])
@pytest.mark.parametrize(("content", "says"), [(LFS, "a Git LFS pointer"), (HTML, "an HTML page")])
def test_a_pointer_or_an_error_page_in_place_of_a_file_is_named(folder, name, content, says):
    if name == "model.pt":
        (folder / "model.safetensors").unlink()
    (folder / name).write_bytes(content)
    assert f"{folder / name}: {says}, not the file itself" in error(load, folder)


@pytest.mark.parametrize("kind", ["cut", "empty"])
def test_a_torch_checkpoint_that_is_not_whole(folder, kind):
    torch.save(load_file(folder / "model.safetensors"), folder / "model.pt")
    (folder / "model.safetensors").unlink()
    path = folder / "model.pt"
    path.write_bytes(path.read_bytes()[: -1000 if kind == "cut" else 0])
    assert "not a whole torch checkpoint" in error(load, folder)


def test_float16_weights_that_overflowed_to_infinity(folder):
    state = {name: tensor.half() for name, tensor in load_file(folder / "model.safetensors").items()}
    state["layers.1.mlp.down_proj.weight"][2, 3] = 70000.0
    save_file(state, folder / "model.safetensors")
    message = error(load, folder)
    assert "layers.1.mlp.down_proj.weight holds infinity (1 of 2,048, as float16): they overflowed there" in message


def test_weights_that_overflow_only_in_the_dtype_of_the_evaluation(folder):
    state = {name: tensor.bfloat16() for name, tensor in load_file(folder / "model.safetensors").items()}
    state["norm.weight"][0] = 1e6
    save_file(state, folder / "model.safetensors")
    load(folder)
    message = error(load_drafter, spec(folder), read_config(spec(folder)), CPU, torch.float16)
    assert "norm.weight holds 9.99e+05, which is infinity in float16\nset evaluate.dtype" in message


# A run's steps


@pytest.fixture
def run(tmp_path) -> Path:
    for step in (900, 12000, 3000):
        save_drafter(tmp_path / "run" / f"step-{step}", drafter_json())
    (tmp_path / "run" / "logs").mkdir()
    return tmp_path / "run"


def configured(folder: Path, *checkpoints: str, reference: bool = True):
    path = write_config(folder, Path("target"), [(f"d{i}", Path(c)) for i, c in enumerate(checkpoints)])
    return load_config(path, [] if reference else ["drafters.0.reference=false"])


@pytest.mark.parametrize("pattern", ["step-*", "*", "step-*/model.safetensors", "step-[0-9]*"])
def test_a_pattern_is_a_drafter_for_each_match_by_step(run, tmp_path, pattern):
    config = configured(tmp_path, f"{run}/{pattern}", reference=False)
    assert [own.name for own in config.drafters] == ["d0-900", "d0-3000", "d0-12000"]
    inside = "/model.safetensors" if pattern.endswith("model.safetensors") else ""
    assert [own.checkpoint for own in config.drafters] == [f"{run}/step-{n}{inside}" for n in (900, 3000, 12000)]


def test_steps_that_numbers_do_not_tell_apart_are_named_by_what_differs(tmp_path):
    for name in ("a-1", "b-1"):
        save_drafter(tmp_path / name, drafter_json())
    config = configured(tmp_path, f"{tmp_path}/*-1", reference=False)
    assert [own.name for own in config.drafters] == ["d0-a", "d0-b"]


def test_a_pattern_cannot_be_the_reference(run, tmp_path):
    message = error(configured, tmp_path, f"{run}/step-*")
    assert "drafters.0.reference must be false, or its checkpoint one: it matches 3" in message


def test_a_pattern_that_matches_nothing_names_the_line(run, tmp_path):
    message = error(configured, tmp_path, f"{run}/epoch-*")
    assert "config.yaml:" in message
    assert f"drafters.0.checkpoint {run}/epoch-*: matches nothing" in message


def test_a_folder_of_steps_with_none_readable(tiny, tmp_path):
    for step in (1, 2):
        (tmp_path / "run" / f"step-{step}").mkdir(parents=True)
    message = error(configured, tmp_path, f"{tmp_path}/run/step-*")
    assert "none of the 2 matches is a checkpoint" in message
    for step in (1, 2):
        (tmp_path / "run" / f"step-{step}" / "config.json").write_text("{")
    message = error(judged, tiny, tmp_path, f"{tmp_path}/run/step-*", "drafters.0.reference=false")
    assert "none of the 2 drafters can be judged; the first: " in message
    assert "step-1/config.json: not JSON" in message


def test_a_runs_folder_itself_says_the_pattern_of_its_steps(run):
    message = error(read_config, spec(run))
    assert "no config.json, but 3 checkpoints (step-12000, step-3000, step-900)" in message
    assert f"checkpoint: {run}/step-*" in message


# Time and memory


def test_the_demos_drafter_loads_within_a_second():
    wanted = DrafterSpec(name="demo", checkpoint="package:dflash_eval/demo/reference")
    start = time.process_time()  # a busy machine is not to fail it
    load_drafter(wanted, read_config(wanted), CPU, torch.float32)
    assert time.process_time() - start < 1


PEAK = """
import resource, sys, torch
from dflash_eval.config import DrafterSpec
from dflash_eval.drafter import weights
from dflash_eval.drafter.checkpoint import load_drafter, read_config
weights.PART_BYTES = 16 << 20  # in proportion
spec = DrafterSpec(name="large", checkpoint=sys.argv[1])
config = read_config(spec)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
load_drafter(spec, config, torch.device("cpu"), torch.bfloat16)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss is in other units elsewhere")
@pytest.mark.parametrize("kind", ["safetensors", "pt"])
def test_loading_takes_little_more_memory_than_the_checkpoint_is_large(tmp_path, kind):
    raw = drafter_json(hidden_size=1024, intermediate_size=8192, num_hidden_layers=5, layer_types=None)
    folder = save_drafter(tmp_path / "d", raw, {"x": torch.ones(1)})
    from dflash_eval.drafter.config import DrafterConfig
    from dflash_eval.drafter.model import DFlashDrafter

    with torch.device("meta"):
        shapes = {
            name: tensor.shape for name, tensor in DFlashDrafter(DrafterConfig.from_dict(raw)).state_dict().items()
        }
    state = {name: torch.full(shape, 0.01, dtype=torch.bfloat16) for name, shape in shapes.items()}
    if kind == "pt":
        (folder / "model.safetensors").unlink()
        torch.save(state, folder / "model.pt")
    else:
        save_file(state, folder / "model.safetensors")
    size = sum(tensor.nbytes for tensor in state.values())
    assert size > 250e6
    out = subprocess.run([sys.executable, "-c", PEAK, folder], capture_output=True, text=True, check=True)
    assert int(out.stdout) < 1.2 * size


# The hub


@pytest.mark.parametrize("offline", ["1", "0"])
def test_a_hub_id_that_cannot_be_had_is_one_clear_line(tmp_path, offline):
    environment = {
        **os.environ,
        "HF_HOME": str(tmp_path),
        "HF_HUB_OFFLINE": offline,
        "HF_ENDPOINT": "http://127.0.0.1:9",
    }
    out = subprocess.run(
        [sys.executable, "-m", "dflash_eval", "inspect", "z-lab/Qwen3-8B-DFlash-b16"],
        capture_output=True, text=True, env=environment,
    )  # fmt: skip
    assert out.returncode == 2
    [line] = out.stderr.splitlines()
    why = "HF_HUB_OFFLINE is set" if offline == "1" else "the Hugging Face hub cannot be reached"
    assert f"z-lab/Qwen3-8B-DFlash-b16: no such file or folder here, and {why} and nothing of it is cached" in line
    assert str(tmp_path) in line


def test_of_a_hub_id_only_config_and_weights_are_fetched_and_pickles_only_for_want_of_safetensors(folder, monkeypatch):
    import huggingface_hub

    asked = []

    def snapshot(name, revision, allow_patterns, ignore_patterns):
        asked.append(allow_patterns)
        if "*.bin" in allow_patterns:
            torch.save(state, folder / "pytorch_model.bin")
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    state = load_file(folder / "model.safetensors")
    wanted = DrafterSpec(name="mine", checkpoint="someone/drafter")
    load_drafter(wanted, read_config(wanted), CPU, torch.float32)
    safe = ["config.json", "*.safetensors", "*.safetensors.index.json"]
    assert asked == [["config.json"], safe]
    (folder / "model.safetensors").unlink()
    load_drafter(wanted, read_config(wanted), CPU, torch.float32)
    assert asked[2:] == [["config.json"], safe, ["config.json", "*.bin", "*.bin.index.json", "*.pt"]]


def test_a_hub_snapshot_that_is_cached_is_read_offline(folder, tmp_path):
    repository = tmp_path / "home" / "hub" / "models--someone--drafter"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("0123456789abcdef")
    (repository / "snapshots").mkdir()
    folder.rename(repository / "snapshots" / "0123456789abcdef")
    environment = {**os.environ, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1"}
    out = subprocess.run(
        [sys.executable, "-m", "dflash_eval", "inspect", "someone/drafter", "--json"],
        capture_output=True, text=True, env=environment,
    )  # fmt: skip
    assert json.loads(out.stdout)["checkpoint"]["block_size"] == 6
