"""The benchmarks run, count what they say they count, and their baselines agree with the evaluation."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from dflash_eval.bench.baselines import accepted_by_heap
from dflash_eval.bench.ceiling import matmul_ceiling
from dflash_eval.bench.evaluate import bench_evaluate, bench_shape
from dflash_eval.bench.extract import bench_extract
from dflash_eval.bench.kernels import bench_kernels
from dflash_eval.bench.matmuls import Matmuls
from dflash_eval.errors import UserError


def test_products_are_counted_however_they_are_called():
    a, b, c = torch.randn(5, 7), torch.randn(7, 3), torch.randn(2, 5, 7)
    with torch.inference_mode(), Matmuls() as counted:
        torch.mm(a, b)
        torch.mm(a, b, out=torch.empty(5, 3))
        F.linear(a, b.t())
        c @ c.transpose(1, 2)
        torch.addmm(torch.zeros(3), a, b)
        a + a
    assert counted.flops == 4 * 2 * 5 * 7 * 3 + 2 * 2 * 5 * 5 * 7
    assert sum(counted.products.values()) == 5
    assert counted.seconds_alone(torch.device("cpu")) > 0


def test_the_ceiling_is_a_rate_that_a_small_product_does_not_exceed_a_hundredfold():
    assert 1e8 < matmul_ceiling(torch.device("cpu"), torch.float32, size=256, seconds=0.01) < 1e14


def test_a_tree_of_the_heap_accepts_what_can_be_counted_by_hand():
    logprobs = torch.tensor([[0.6, 0.4], [0.9, 0.1]]).log().tolist()
    # Weights: 0 .6, 00 .54, 1 .4, 10 .36, 01 .06, 11 .04
    assert [accepted_by_heap(logprobs, [1, 0], n) for n in (1, 2, 3, 4)] == [0, 0, 1, 2]
    assert [accepted_by_heap(logprobs, [0, 1], n) for n in (1, 4, 5)] == [1, 1, 2]
    assert accepted_by_heap([], [], 4) == 0


def test_a_random_shape_is_evaluated_whole_with_every_figure():
    lines: list[str] = []
    settings = {"device": "cpu", "dtype": "float32", "budgets": [4, 64]}
    figures = bench_shape("tiny", 2, 9, 12, settings, lines.append)
    assert figures["drafting"]["anchors"] == 2 * 11
    # 15 drafted slots of 22 blocks go through the head, all 16 through two layers.
    assert figures["drafting"]["flops"] > 2 * 22 * 15 * 64 * 5000 + 2 * 22 * 16 * 2 * 3 * 64 * 128
    assert "of the ceiling" in lines[1]
    assert any(line.startswith("DDTree at 2 budgets to 64 for 22 anchors") for line in lines)


def test_the_baselines_walk_as_the_evaluation_does(tiny):
    pytest.importorskip("dflash.model", reason="the public dflash package is not installed (make setup)")
    lines: list[str] = []
    figures = bench_evaluate(tiny.config, lines.append, against=True)["against"]  # raises where they differ
    assert figures["online_agrees"] == 1.0
    assert min(figures["block_by_block_seconds"], figures["walks_seconds"]) > 0
    assert figures["matmul_seconds"] > 0


def test_an_unknown_shape_is_told_with_those_there_are():
    with pytest.raises(UserError, match=r"--shape huge: not one of qwen3\.6-27b, qwen3\.5-0\.8b, tiny"):
        bench_shape("huge", 1, 4, 4, {"device": "cpu"}, print)


def test_extraction_is_timed_beside_the_plain_forward_part_by_part(tmp_path):
    lines: list[str] = []
    figures = bench_extract("tiny", "cpu", 2, 2, 24, tmp_path / "profile", lines.append)
    assert figures["tokens"] == 2 * 2 * 24
    # Ours ends before layer 7, a full attention one (gated queries, output, keys and values, MLP), and the head.
    last_layer = 64 * 256 + 128 * 64 + 2 * 64 * 64 + 3 * 64 * 128
    assert figures["plain"]["flops"] - figures["ours"]["flops"] == 2 * 2 * 24 * (last_layer + 64 * 5000)
    assert set(figures) >= {"plain", "eager", "computed", "copied", "unsettled", "stats", "ours"}
    assert 0 <= figures["shares"]["target_waited"] <= 1
    assert "x plain" in lines[-1]
    assert "GB/s written" in lines[-1]
    assert "aten::" in (tmp_path / "profile" / "extract-profile.txt").read_text()
    with pytest.raises(UserError, match=r"--shape huge: not one of qwen3\.6-27b, qwen3\.5-0\.8b, tiny"):
        bench_extract("huge", "cpu", 1, 1, 4, None, print)


def test_bench_kernels_compares_bfloat16_fallbacks_and_float32_from_the_same_weights():
    lines = []
    results = bench_kernels("tiny", "cpu", 2, 32, lines.append)
    same, rounded = results["kernels against torch"], results["kernels against float32"]
    assert [layer["layer"] for layer in same["layers"]] == [1, 4, 6]
    assert all(layer["away"] == 0 for layer in same["layers"])  # without fla both are torch's
    assert all(1e-7 < layer["away"] < 1e-3 for layer in rounded["layers"])
    assert rounded["layers"][0]["away"] == results["torch against float32"]["layers"][0]["away"]
    assert sum("cosine" in line for line in lines) >= 3
