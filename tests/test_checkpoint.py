"""Checkpoints: what is read from a good one, and a plain error with its remedy for each way to be a bad one."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path

import pytest
import torch
from conftest import MASK, VOCABULARY, drafter_json, save_drafter, write_config
from drafters import error, load, spec
from safetensors.torch import load_file, save_file

from dflash_eval.config import load_config
from dflash_eval.drafter.checkpoint import read_config
from dflash_eval.drafter.config import DrafterConfig
from dflash_eval.evaluate import evaluate


def config_only(folder: Path, raw: dict) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw))
    return folder


@pytest.fixture
def folder(tmp_path) -> Path:
    return save_drafter(tmp_path / "drafter", drafter_json())


def without(key: str, *more: str) -> dict:
    """drafter_json without some keys, wherever they stand."""
    raw = drafter_json()
    for gone in (key, *more):
        raw.pop(gone, None)
        raw.get("dflash_config", {}).pop(gone, None)
    return raw


def rewrite(folder: Path, change) -> None:
    """Apply `change` to the dict of the checkpoint's tensors."""
    path = folder / "model.safetensors"
    state = load_file(path)
    change(state)
    save_file(state, path)


# What is read


def test_the_weights_of_the_file_are_those_of_the_drafter_and_nothing_is_left_on_the_meta_device(folder):
    drafter = load(folder)
    for name, tensor in load_file(folder / "model.safetensors").items():
        assert torch.equal(drafter.state_dict()[name], tensor)
    assert {tensor.device.type for tensor in (*drafter.parameters(), *drafter.buffers())} == {"cpu"}


def test_weights_in_several_files_load_by_their_index(folder):
    state = load_file(folder / "model.safetensors")
    names = sorted(state)
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, own in parts.items():
        save_file({name: state[name] for name in own}, folder / file)
    (folder / "model.safetensors").unlink()
    index = {"weight_map": {name: file for file, own in parts.items() for name in own}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert load(folder).state_dict().keys() == state.keys()
    (folder / "b.safetensors").unlink()
    assert re.search(r"model\.safetensors\.index\.json: names b\.safetensors, not in", error(load, folder))


@pytest.mark.parametrize(
    ("target_layers", "layers", "ids"),
    [(64, 5, (1, 16, 31, 46, 61)), (6, 2, (1, 3)), (36, 5, (1, 9, 17, 25, 33)), (36, 1, (18,)), (30, 3, (1, 14, 27))],
)
def test_without_layer_ids_they_are_spread_as_zlabs_code_spreads_them(tmp_path, target_layers, layers, ids):
    raw = without("target_layer_ids", "layer_types")
    raw |= {"num_target_layers": target_layers, "num_hidden_layers": layers}
    assert read_config(spec(config_only(tmp_path / "d", raw))).target_layer_ids == ids


def test_the_spread_of_layer_ids_equals_that_of_the_public_package():
    public = pytest.importorskip("dflash.model", reason="the public dflash package is not installed (make setup)")
    for target_layers in range(8, 100):
        for layers in range(1, 9):
            config = DrafterConfig.from_dict(
                {**without("target_layer_ids", "layer_types"), "mask_token_id": MASK}
                | {"num_target_layers": target_layers, "num_hidden_layers": layers}
            )
            assert list(config.target_layer_ids) == public.build_target_layer_ids(target_layers, layers)


def test_dflash_keys_may_stand_at_the_top_level_and_the_section_wins(tmp_path):
    raw = without("dflash_config") | {"target_layer_ids": [1, 3], "mask_token_id": 7, "block_size": 4}
    top = read_config(spec(config_only(tmp_path / "top", raw)))
    assert (top.target_layer_ids, top.mask_token_id, top.block_size) == ((1, 3), 7, 4)
    raw["dflash_config"] = {"target_layer_ids": [2], "block_size": 5}
    both = read_config(spec(config_only(tmp_path / "both", raw)))
    assert (both.target_layer_ids, both.mask_token_id, both.block_size) == ((2,), 7, 5)


def test_a_missing_block_size_is_16(tmp_path):
    assert read_config(spec(config_only(tmp_path / "d", without("block_size")))).block_size == 16


@pytest.mark.parametrize(
    ("is_causal", "causal"), [(None, (True, False)), (True, (True, True)), (False, (False, False))]
)
def test_sliding_layers_are_causal_unless_is_causal_says_otherwise(tmp_path, is_causal, causal):
    raw = drafter_json(layer_types=["sliding_attention", "full_attention"], sliding_window=9)
    folder = config_only(tmp_path / "d", raw if is_causal is None else {**raw, "is_causal": is_causal})
    config = read_config(spec(folder))
    assert config.windows == (9, None)
    assert config.causal == causal


@pytest.mark.parametrize("where", ["top", "dflash_config"])
def test_overrides_win_over_the_checkpoint_wherever_it_keeps_the_key(tmp_path, where):
    own = {"block_size": 6, "mask_token_id": MASK, "target_layer_ids": [0, 2, 4]}
    raw = without("dflash_config", "block_size") | (own if where == "top" else {"dflash_config": own})
    wanted = {"block_size": 3, "mask_token_id": 11, "target_layer_ids": (5, 1, 3)}
    config = read_config(spec(config_only(tmp_path / "d", raw), **wanted))
    assert {key: getattr(config, key) for key in wanted} == wanted


def test_overrides_of_the_attention_win_too(tmp_path):
    raw = drafter_json(layer_types=["sliding_attention", "full_attention"], sliding_window=9)
    config = read_config(spec(config_only(tmp_path / "d", raw), sliding_window=5, is_causal=False))
    assert config.windows == (5, None)
    assert config.causal == (False, False)


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_an_overridden_rope_theta_keeps_the_checkpoints_scaling(tmp_path, key):
    raw = drafter_json(**{key: {"rope_type": "linear", "factor": 4.0}})
    config = read_config(spec(config_only(tmp_path / "d", raw), rope_theta=5e5))
    assert config.rope_parameters == {"rope_type": "linear", "factor": 4.0, "rope_theta": 5e5}


def test_overrides_given_in_the_config_reach_the_results(tiny, tmp_path):
    shutil.copytree(tiny.folder / "cache", tmp_path / "cache")
    sections = {"prompts": {"source": str(tiny.folder / "prompts.jsonl")}}
    path = write_config(tmp_path, tiny.target, [("trained", tiny.drafter)], **sections)
    overrides = "drafters.0.overrides={block_size: 3, mask_token_id: 65, target_layer_ids: [4, 2, 0]}"
    (plain,), (changed,) = (evaluate(load_config(path, more))["drafters"] for more in ([], [overrides]))
    assert plain["block_size"] == 6
    assert (changed["block_size"], changed["mask_token_id"], changed["target_layer_ids"]) == (3, 65, [4, 2, 0])
    lengths = [length for sample in changed["samples"] for length in sample["acceptance_lengths"]]
    assert max(lengths) <= 3 < max(length for sample in plain["samples"] for length in sample["acceptance_lengths"])


# What is refused


def test_a_folder_that_is_not_there_is_named(tmp_path):
    assert f"{tmp_path / 'gone'}: no such file or folder" in error(read_config, spec(tmp_path / "gone"))


def test_a_file_in_place_of_the_folder_is_refused(folder):
    (folder / "README.md").write_text("a drafter")
    message = error(read_config, spec(folder / "README.md"))
    assert "README.md: a drafter checkpoint is a folder with config.json and model.safetensors, or a file" in message


def test_a_folder_without_config_json_says_what_a_drafter_folder_holds(folder):
    (folder / "config.json").unlink()
    message = error(read_config, spec(folder))
    assert message == f"{folder}: no config.json; a drafter folder holds config.json and model.safetensors"


@pytest.mark.parametrize("content", [b"", b"block_size: 16", b'{"block_size": 16', b"\xff\xfe\x00"])
def test_a_config_that_is_not_json_is_named(folder, content):
    (folder / "config.json").write_bytes(content)
    assert f"{folder / 'config.json'}: not JSON" in error(read_config, spec(folder))


def test_json_that_is_no_object_and_a_folder_called_config_json_are_refused(folder):
    (folder / "config.json").write_text("[1, 2]")
    assert f"{folder / 'config.json'}: not a JSON object" in error(read_config, spec(folder))
    (folder / "config.json").unlink()
    (folder / "config.json").mkdir()
    assert f"{folder / 'config.json'}: cannot be read" in error(read_config, spec(folder))


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        ({"architectures": ["Qwen3ForCausalLM"]}, "architecture 'Qwen3ForCausalLM'"),
        ({"speculators_model_type": "eagle3"}, "speculators_model_type 'eagle3'"),
    ],
)
def test_a_checkpoint_of_another_kind_is_named_and_the_format_that_is_read(tmp_path, change, kind):
    folder = config_only(tmp_path / "d", drafter_json(**change))
    message = error(read_config, spec(folder))
    assert f"config.json: {kind}: not a DFlash drafter; known are DFlashDraftModel, DFlash2DraftModel" in message


def test_a_missing_mask_token_names_the_override_and_the_override_mends_it(tmp_path):
    folder = config_only(tmp_path / "d", without("mask_token_id"))
    message = error(read_config, spec(folder))
    assert f"{folder / 'config.json'}: no 'mask_token_id'" in message
    assert "set mask_token_id under the overrides of drafter 'mine'" in message
    assert read_config(spec(folder, mask_token_id=3)).mask_token_id == 3


def test_layer_ids_that_nothing_tells_are_asked_for_as_an_override(tmp_path):
    folder = config_only(tmp_path / "d", without("target_layer_ids", "num_target_layers"))
    assert "set target_layer_ids under the overrides" in error(read_config, spec(folder))
    assert read_config(spec(folder, target_layer_ids=(1,))).target_layer_ids == (1,)


def test_a_missing_size_is_named_without_offering_an_override_that_does_not_exist(tmp_path):
    message = error(read_config, spec(config_only(tmp_path / "d", without("hidden_size"))))
    assert "config.json: no 'hidden_size'" in message
    assert "overrides" not in message


@pytest.mark.parametrize("token", [VOCABULARY, -1, None, "256"])
def test_a_mask_token_outside_the_vocabulary_names_vocabulary_and_remedy(tmp_path, token):
    raw = drafter_json(dflash_config={"target_layer_ids": [0], "mask_token_id": token})
    message = error(read_config, spec(config_only(tmp_path / "d", raw)))
    assert f"config.json: mask_token_id is {token!r}, outside the vocabulary of {VOCABULARY}" in message
    assert "set mask_token_id under the overrides" in message


@pytest.mark.parametrize("size", [1, 0, -4, None, "16", 16.0, True])
def test_a_block_size_below_two_or_no_whole_number_is_refused(tmp_path, size):
    message = error(read_config, spec(config_only(tmp_path / "d", drafter_json(block_size=size))))
    assert f"config.json: block_size is {size!r}, not from 2 (the anchor and one draft)" in message
    assert "set block_size under the overrides" in message


@pytest.mark.parametrize("ids", [[], [-1, 2], ["1", "2"], [1.0], [True]])
def test_layer_ids_that_are_no_layers_are_refused(tmp_path, ids):
    raw = drafter_json(dflash_config={"target_layer_ids": ids, "mask_token_id": MASK})
    message = error(read_config, spec(config_only(tmp_path / "d", raw)))
    assert f"config.json: target_layer_ids is {ids}, not layers" in message
    assert "set target_layer_ids under the overrides" in message


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"layer_types": ["full_attention"]}, "layer_types has 1 entries for 2 layers"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "linear_attention"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "there is no sliding_window"),
    ],
)
def test_layer_types_that_contradict_the_rest_are_named(tmp_path, change, named):
    message = error(read_config, spec(config_only(tmp_path / "d", drafter_json(**change))))
    assert str(tmp_path / "d" / "config.json") in message
    assert named in message


@pytest.mark.parametrize(
    "change",
    [
        {"hidden_act": "swoosh"},
        {"hidden_size": 1 << 30},
    ],
)
def test_a_config_that_no_drafter_can_be_built_from_is_a_plain_error(folder, change):
    config_only(folder, drafter_json(**change))
    message = error(load, folder)
    assert str(folder) in message
    assert "config.json does not describe a DFlash drafter" in message


def test_a_folder_without_weights_says_so(folder):
    (folder / "model.safetensors").unlink()
    assert error(load, folder).startswith(f"{folder}: no weights (*.safetensors)")


@pytest.mark.parametrize("left", [0, 7, 1000, -1])
def test_truncated_weights_are_named(folder, left):
    path = folder / "model.safetensors"
    os.truncate(path, left % path.stat().st_size)
    message = error(load, folder)
    assert message.startswith(f"{path}: not a whole safetensors file")
    assert "download it again" in message


def test_an_fc_that_does_not_match_the_number_of_layer_ids_names_both_widths(folder):
    message = error(load, folder, target_layer_ids=(0, 2))
    assert "fc.weight takes 96 inputs, but 2 target_layer_ids of hidden size 32 give 64" in message
    assert "mend target_layer_ids" in message


def test_a_missing_tensor_is_named(folder):
    rewrite(folder, lambda state: state.pop("layers.1.mlp.up_proj.weight"))
    message = error(load, folder)
    assert message == f"{folder}: the weights do not fit config.json: lacks layers.1.mlp.up_proj.weight"


def test_an_unexpected_tensor_is_named(folder):
    rewrite(folder, lambda state: state.update({"eh_proj.weight": torch.ones(2)}))
    message = error(load, folder)
    assert message == f"{folder}: the weights do not fit config.json: has unknown eh_proj.weight"


def test_of_many_missing_tensors_three_are_named(folder):
    config_only(folder, drafter_json(num_hidden_layers=4, layer_types=["full_attention"] * 4))
    message = error(load, folder)
    assert message.count("layers.2.") + message.count("layers.3.") == 3
    assert message.endswith("...")


def test_a_tensor_of_another_shape_is_named_with_both_shapes(folder):
    config_only(folder, drafter_json(intermediate_size=48))
    assert re.search(
        r"layers\.\d\.mlp\.\w+_proj\.weight is \[.*64.*\], config\.json asks for \[.*48", error(load, folder)
    )


def test_weights_that_are_integers_are_refused(folder):
    rewrite(folder, lambda state: state.update({"norm.weight": torch.ones(32, dtype=torch.int64)}))
    assert "norm.weight holds int64" in error(load, folder)


# What does not fit the cache


@pytest.fixture
def beside(tiny, tmp_path):
    """evaluate() of one drafter beside the tiny cache."""

    def run(raw: dict, *overrides: str) -> dict:
        folder = save_drafter(tmp_path / "mine", raw)
        path = write_config(tmp_path, tiny.target, [("mine", folder)], cache_dir=str(tiny.folder / "cache"))
        return evaluate(load_config(path, [f"prompts.source={tiny.folder / 'prompts.jsonl'}", *overrides]))

    return run


def test_a_drafter_of_another_hidden_size_names_both_sizes(beside, tmp_path):
    message = error(beside, drafter_json(hidden_size=48))
    assert f"mine ({tmp_path / 'mine'}): hidden size 48, the target's is 32" in message


def test_layers_that_the_cache_lacks_are_named_with_the_command_that_adds_them(beside):
    raw = drafter_json(dflash_config={"target_layer_ids": [1, 2, 5], "mask_token_id": MASK})
    message = error(beside, raw)
    assert "mine (" in message
    assert "needs layers 1, 5, the cache has 0, 2, 4" in message
    assert "dflash-eval extract --force" in message


def test_a_mask_token_beyond_the_targets_vocabulary_is_refused_though_the_checkpoints_allows_it(beside):
    ids = {"target_layer_ids": [0, 2, 4], "mask_token_id": 300}
    message = error(beside, drafter_json(vocab_size=400, dflash_config=ids))
    assert "mask_token_id 300 is outside the target's vocabulary of 260" in message
