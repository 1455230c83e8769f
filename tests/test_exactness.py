"""Acceptance lengths from the cache equal, cycle for cycle, those of loops that decode online with the target."""

from __future__ import annotations

import shutil

import pytest
from conftest import drafter_json, save_drafter, write_config

from dflash_eval.cache import Cache
from dflash_eval.config import load_config
from dflash_eval.evaluate import evaluate


def check(config, target_folder, drafter_folder, loop, prompts=None):
    """Evaluate and hold every prompt against `loop`; returns all acceptance lengths."""
    import oracles

    results = evaluate(config)
    cache = Cache(config.cache_dir)
    target, drafter = oracles.load_target(target_folder), oracles.load_public_drafter(drafter_folder)
    ours = {sample["id"]: sample["acceptance_lengths"] for sample in results["drafters"][0]["samples"]}
    for sample in cache.samples[:prompts]:
        text, lengths = getattr(oracles, loop)(
            target, drafter, sample.prompt_ids, config.completions.max_new_tokens, target.generation_config.eos_token_id
        )
        assert text == sample.completion_ids
        assert ours[sample.id] == lengths
    return [length for lengths in ours.values() for length in lengths]


def test_trained_drafter_equals_the_public_loop(tiny):
    lengths = check(tiny.config, tiny.target, tiny.drafter, "public_loop")
    assert max(lengths) >= 4, "a drafter that accepts nothing would hide every fault"
    assert min(lengths) == 1


@pytest.mark.parametrize("fixture", ["tiny", "tiny_qwen3", "tiny_hybrid"])
def test_trained_drafter_equals_a_loop_that_reruns_the_target(fixture, request):
    setup = request.getfixturevalue(fixture)
    lengths = check(setup.config, setup.target, setup.drafter, "slow_loop")
    assert max(lengths) >= 4


@pytest.mark.parametrize("fixture", ["tiny", "tiny_qwen3", "tiny_hybrid"])
@pytest.mark.parametrize("causal", [True, False])
def test_random_drafter_with_a_window_shorter_than_the_prompt(fixture, causal, request, tmp_path):
    setup = request.getfixturevalue(fixture)
    raw = drafter_json(layer_types=["sliding_attention"] * 2, sliding_window=4, is_causal=causal)
    folder = save_drafter(tmp_path / "random", raw)
    config = load_config(write_config(tmp_path, setup.target, [("random", folder)]))
    shutil.copytree(setup.folder / "cache", config.cache_dir)
    config = load_config(
        write_config(
            tmp_path, setup.target, [("random", folder)], prompts={"source": str(setup.folder / "prompts.jsonl")}
        )
    )
    check(config, setup.target, folder, "slow_loop", prompts=3)


def test_block_at_the_limit_is_shortened_and_one_before_a_stop_token_is_not(tiny):
    """Both kinds of end must occur in what the tests above hold against the loops."""
    reasons = {sample.finish_reason for sample in Cache(tiny.config.cache_dir).samples}
    assert reasons == {"stop", "length"}


def test_evaluate_runs_without_the_targets_files(tiny):
    away = tiny.target.with_name("moved-away")
    tiny.target.rename(away)
    try:
        assert evaluate(tiny.config)["drafters"][0]["tau"] > 1
    finally:
        away.rename(tiny.target)
