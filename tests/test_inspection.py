"""`dflash-eval inspect`: what it finds out about good checkpoints and bad ones."""

from __future__ import annotations

import io
import json

import pytest
import torch
from conftest import MASK, drafter_json, save_drafter
from drafters import error, head_of, speculators_json
from rich.console import Console
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from dflash_eval.cli import app
from dflash_eval.config import load_overrides
from dflash_eval.errors import UserError
from dflash_eval.inspection import inspect, print_inspection


def rewrite(folder, change) -> None:
    state = load_file(folder / "model.safetensors")
    change(state)
    save_file(state, folder / "model.safetensors")


def printed(result) -> str:
    out = io.StringIO()
    print_inspection(result, Console(file=out, width=80))
    return out.getvalue()


def test_a_good_drafter_with_the_cache_that_serves_it(tiny_hybrid):
    found = inspect(str(tiny_hybrid.drafter), cache=tiny_hybrid.folder / "cache")["checkpoint"]
    state = load_file(tiny_hybrid.drafter / "model.safetensors")
    assert found["format"] == "z-lab"
    assert found["parameters"] == sum(tensor.numel() for tensor in state.values())
    assert (found["dtype"], found["block_size"], found["drafts_per_block"]) == ("float32", 6, 5)
    assert (found["mask_token_id"], found["mask_token"]) == (MASK, "<|mask|>")
    assert found["target_layers"] == 6
    assert found["target_layer_ids"] == [0, 2, 4]
    assert found["target_layer_kinds"] == ["linear_attention", "full_attention", "linear_attention"]
    assert found["reads_last_layer"] is False
    assert found["fc_inputs"] == 96
    assert found["layers"] == ["window 7, both ways inside the block", "full attention, both ways inside the block"]
    assert found["rope_theta"] == 10000.0
    assert found["problems"] == []
    assert found["cache_serves"] is True


def test_every_kind_of_problem_is_told(tiny, tmp_path):
    raw = drafter_json(dflash_config={"target_layer_ids": [0, 2, 5], "mask_token_id": MASK})
    folder = save_drafter(tmp_path / "d", raw)

    def spoil(state):
        state["norm.weight"][3] = torch.nan
        state["layers.0.mlp.up_proj.weight"][0, :2] = torch.inf
        state["eh_proj.weight"] = torch.ones(2)
        state["confidence_head.proj.weight"] = torch.ones(2)
        del state["layers.1.mlp.up_proj.weight"]

    rewrite(folder, spoil)
    result = inspect(str(folder), cache=tiny.folder / "cache")
    found = result["checkpoint"]
    assert found["missing"] == ["layers.1.mlp.up_proj.weight"]
    assert found["unexpected"] == ["eh_proj.weight"]
    assert found["never_used"] == ["confidence_head.proj.weight"]
    assert found["not_finite"] == {
        "norm.weight": {"nan": 1, "infinite": 0}, "layers.0.mlp.up_proj.weight": {"nan": 0, "infinite": 2},
    }  # fmt: skip
    assert "hidden_norm.weight (all 1)" in found["untrained_norms"]
    assert found["reads_last_layer"] is True
    assert found["cache_serves"] is False
    text = printed(result)
    for part in ("lacks layers.1.mlp.up_proj", "norm.weight holds 1 NaN", "look untrained", "target's last layer"):
        assert part in text
    assert "cannot serve" in text
    assert "needs layers 5" in text


def test_against_shows_what_differs_and_only_that_is_marked(tiny, tmp_path):
    other = save_drafter(tmp_path / "o", drafter_json(block_size=4, rope_theta=5e5))
    result = inspect(str(tiny.drafter), against=str(other))
    assert {"block_size", "drafts_per_block", "rope_theta"} <= set(result["differences"])
    assert "hidden_size" not in result["differences"]
    text = printed(result)
    assert "block size ≠" in text
    assert "hidden size ≠" not in text


def test_speculators_with_a_head_of_its_own(tiny, tmp_path):
    state = {**load_file(tiny.drafter / "model.safetensors"), **head_of(tiny), "verifier_norm.weight": torch.ones(32)}
    raw = speculators_json(tiny.raw, speculators_config={"verifier": {"name_or_path": str(tiny.target)}})
    found = inspect(str(save_drafter(tmp_path / "d", raw, state)))["checkpoint"]
    assert (found["own_head"], found["own_embedding"], found["format"]) == (True, True, "speculators")
    assert found["target"] == str(tiny.target)
    assert found["target_layer_kinds"] == ["full_attention"] * 3
    assert found["never_used"] == ["verifier_norm.weight"]


def test_json_on_the_command_line_and_overrides_for_what_no_config_tells(tiny, tmp_path):
    torch.save(load_file(tiny.drafter / "model.safetensors"), tmp_path / "last.pt")
    options = ["block_size=6", f"mask_token_id={MASK}", "target_layer_ids=[0, 2, 4]", "rope_theta=10000.0"]
    arguments = [part for option in options for part in ("--set", option)]
    result = CliRunner().invoke(app, ["inspect", str(tmp_path / "last.pt"), "--json", *arguments])
    assert result.exit_code == 0
    found = json.loads(result.stdout)["checkpoint"]
    assert (found["files"], found["fc_inputs"], found["problems"]) == (["last.pt"], 96, [])


def test_an_override_that_does_not_exist_names_the_nearest():
    with pytest.raises(UserError, match=r'unknown key "block_sise"; did you mean "block_size"\?'):
        load_overrides(["block_sise=4"])


def test_an_empty_name_is_no_checkpoint():
    assert "no checkpoint" in error(inspect, "")


def test_no_cache_is_told(tiny, tmp_path):
    with pytest.raises(UserError, match="no cache here"):
        inspect(str(tiny.drafter), cache=tmp_path)
