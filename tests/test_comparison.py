"""Two caches of the same tokens: cosines and errors equal a plain loop's, and the verdict says what they mean."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

import h5py
import numpy as np
import pytest
import torch
from conftest import write_config
from test_cli import main, plain  # noqa: F401
from test_extract import quiet

from dflash_eval.cache import Cache, Manifest, Sample, ShardWriter, sha256, write_completions, write_manifest
from dflash_eval.comparison import compare_caches
from dflash_eval.comparison_report import cosine, verdict
from dflash_eval.config import load_config
from dflash_eval.errors import UserError


@pytest.fixture(scope="module")
def pair(tiny, tmp_path_factory):
    """The tiny cache's own text extracted again in bfloat16, one layer more and one less, with its config."""
    folder = tmp_path_factory.mktemp("pair")
    sections = {
        "target": {"dtype": "bfloat16"},
        "extract": {"layers": [0, 3]},
        "completions": {"source": "file", "file": str(tiny.folder / "cache" / "completions.jsonl")},
    }
    path = write_config(folder, tiny.target, [("trained", tiny.drafter)], **sections)
    return tiny.folder / "cache", quiet(load_config(path))


def states(folder, sample, layer) -> np.ndarray:
    return Cache(folder).features(sample, [layer]).double().numpy()


def test_every_number_of_a_layer_equals_a_plain_loop(pair):
    a, b = pair
    result = compare_caches(a, b)
    samples = Cache(a).samples
    assert result["samples"] == len(samples)
    assert result["tokens"] == sum(map(len, samples))
    assert result["left_out"]["a"]["layers"] == Cache(a).manifest.layers[1:]
    assert result["left_out"]["b"]["layers"] == [3]
    assert [layer["layer"] for layer in result["layers"]] == [0]
    said = result["layers"][0]
    away, where, squares, own, largest = [], [], 0.0, 0.0, (-1.0,)
    for sample in samples:
        for position, (x, y) in enumerate(zip(states(a, sample.id, 0), states(b, sample.id, 0), strict=True)):
            away.append(1 - x @ y / np.sqrt((x @ x) * (y @ y)))
            where.append((sample.id, position))
            squares, own = squares + ((x - y) ** 2).sum(), own + x @ x
            channel = int(abs(x - y).argmax())
            largest = max(largest, (abs(x - y)[channel], sample.id, position, channel))
    assert said["away"] == pytest.approx(np.mean(away), rel=1e-6)
    assert said["cosine"] == pytest.approx(1 - np.mean(away))
    assert said["cosine_p1"] == pytest.approx(np.percentile(1 - np.array(away), 1))
    assert said["cosine_min"] == pytest.approx(1 - max(away))
    assert tuple(said["cosine_min_at"].values()) == where[int(np.argmax(away))]
    assert said["relative_error"] == pytest.approx((squares / own) ** 0.5)
    assert (said["largest_difference"], *said["largest_difference_at"].values()) == largest
    edges = result["positions"]
    for begin, end, mean in zip(edges, edges[1:], said["away_by_position"], strict=False):
        inside = [x for x, (_, position) in zip(away, where, strict=True) if begin <= position < end]
        assert mean == pytest.approx(np.mean(inside), rel=1e-6)
    quarter = (max(position for _, position in where) + 1) / 4
    first = [x for x, (_, position) in zip(away, where, strict=True) if 0 < position < quarter]
    last = [x for x, (_, position) in zip(away, where, strict=True) if position >= 3 * quarter]
    assert said["growth"] == pytest.approx(np.mean(last) / np.mean(first), rel=1e-6)


def test_pieces_of_a_layer_add_up(pair, monkeypatch):
    whole = compare_caches(*pair)
    monkeypatch.setattr("dflash_eval.comparison.ROWS", 7)
    pieces = compare_caches(*pair)
    for one, two in zip(whole["layers"], pieces["layers"], strict=True):
        assert two["relative_error"] == pytest.approx(one["relative_error"])
        assert {**one, "relative_error": 0} == {**two, "relative_error": 0}


def test_a_cache_equals_itself_and_tau_with_it(tiny):
    folder = tiny.folder / "cache"
    result = compare_caches(folder, folder, tiny.config)
    assert result["differs"] == {}
    assert result["argmax_agreement"] == 1
    assert all(layer["relative_error"] == 0 for layer in result["layers"])
    (drafter,) = result["drafters"]
    assert drafter["tau"][0] == drafter["tau"][1] > 1
    assert drafter["cycles_that_differ"] == 0
    assert verdict(result).startswith("hidden states are equal bit for bit; trained: τ ")
    assert verdict(result).endswith("cannot explain a gap")


def test_argmax_agreement_is_that_of_the_stored_argmaxes(pair):
    a, b = map(Cache, pair)
    ours, theirs = (np.concatenate([cache.argmax(sample.id) for sample in a.samples]) for cache in (a, b))
    assert compare_caches(*pair)["argmax_agreement"] == (ours == theirs).mean()


def damaged(folder, tmp_path, layers, spoil):
    """A copy whose states `spoil` changes, layer by layer."""
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    manifest = json.loads((copy / "manifest.json").read_text())
    for shard in manifest["shards"]:
        with h5py.File(copy / shard["file"], "r+") as file:
            for layer in layers:
                file[f"hidden/{layer}"][:] = spoil(file[f"hidden/{layer}"][:])
        shard["sha256"] = sha256(copy / shard["file"])
    (copy / "manifest.json").write_text(json.dumps(manifest))
    return copy


def test_states_that_are_wrong_explain_a_gap(tiny, tmp_path):
    """Each state turned into its opposite: the drafter is lost, and the verdict says by how much."""
    folder = tiny.folder / "cache"
    turned = damaged(folder, tmp_path, Cache(folder).manifest.layers, lambda states: -states)
    result = compare_caches(folder, turned, tiny.config)
    (drafter,) = result["drafters"]
    assert drafter["tau"][1] < 0.7 * drafter["tau"][0]
    assert 0 < drafter["cycles_that_differ"] <= drafter["cycles"][0]
    assert result["layers"][0]["cosine"] == pytest.approx(-1)
    assert "changes it by -" in verdict(result)


def test_states_that_are_not_finite_are_named(tiny, tmp_path, main):  # noqa: F811
    def spoil(states):
        states[3, 1] = np.nan
        return states

    spoiled = damaged(tiny.folder / "cache", tmp_path, [0], spoil)
    status, _, stderr = main("compare", tiny.folder / "cache", spoiled, "--out", tmp_path / "out")
    assert status == 1
    assert "layer 0, position 3" in stderr.splitlines()[-1]


def test_other_tokens_are_refused_unless_as_far_as_they_agree(tiny, tmp_path, main):  # noqa: F811
    said = [json.loads(line) for line in (tiny.folder / "cache" / "completions.jsonl").read_text().splitlines()]
    for number, row in enumerate(said):
        row["completion_ids"] = row["completion_ids"][: 4 + number] + [5] * 3
    (tmp_path / "said.jsonl").write_text("".join(json.dumps(row) + "\n" for row in said))
    completions = {"source": "file", "file": str(tmp_path / "said.jsonl")}
    path = write_config(tmp_path, tiny.target, [("trained", tiny.drafter)], completions=completions)
    other, folder = quiet(load_config(path)), tiny.folder / "cache"
    status, _, stderr = main("compare", folder, other, "--out", tmp_path / "out")
    assert status == 2
    assert "from position" in plain(stderr[stderr.index("dflash-eval: ") :])
    assert "--common-prefix" in stderr
    result = compare_caches(folder, other, load_config(path), common_prefix=True)
    pairs = zip(Cache(folder).samples, Cache(other).samples, strict=True)
    same = [
        next((n for n, (x, y) in enumerate(zip(a.input_ids, b.input_ids, strict=False)) if x != y), None)
        or min(len(a), len(b))
        for a, b in pairs
    ]
    assert result["tokens"] == sum(same)
    assert all(layer["relative_error"] < 1e-5 for layer in result["layers"])  # the states before are the same
    assert result["drafters"][0]["cycles_that_differ"] is None
    assert result["argmax_agreement"] == 1


def test_the_command_prints_and_writes(pair, tmp_path, main):  # noqa: F811
    status, stdout, _ = main("compare", *pair, "--out", tmp_path / "out")
    assert status == 0
    assert "hidden states agree to cosine 0.9" in stdout
    assert "only in B: layers 3 (1)" in stdout
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"compare.json", "compare.md", "compare.png"}
    result = json.loads((tmp_path / "out" / "compare.json").read_text())
    assert result["verdict"] in (tmp_path / "out" / "compare.md").read_text()


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda raw: raw.update(complete=False), "not finished"),
        (lambda raw: raw.update(hidden_size=7), "different targets"),
        (lambda raw: raw.update(layers=[99]), "no layer in common"),
    ],
)
def test_caches_that_cannot_be_compared(tiny, tmp_path, spoil, message):
    copy = tmp_path / "copy"
    shutil.copytree(tiny.folder / "cache", copy)
    manifest = json.loads((copy / "manifest.json").read_text())
    spoil(manifest)
    (copy / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(UserError, match=message):
        compare_caches(tiny.folder / "cache", copy)


def test_no_sample_in_common(tiny, tmp_path):
    prompts = tmp_path / "others.jsonl"
    prompts.write_text('{"id": "another", "prompt": "w1 w2 w3"}\n')
    path = write_config(tmp_path, tiny.target, [("trained", tiny.drafter)], prompts={"source": str(prompts)})
    with pytest.raises(UserError, match=r"no sample in common: .* has another"):
        compare_caches(tiny.folder / "cache", quiet(load_config(path)))


@pytest.mark.parametrize(
    ("away", "text"), [(2.6e-4, "0.99974"), (1.1e-5, "0.999989"), (0.3, "0.7000"), (0.0, "1"), (1.5, "-0.5000")]
)
def test_a_cosine_shows_its_nines(away, text):
    assert cosine(away) == text


def drafter(tau, interval):
    return {"name": "d", "tau": tau, "difference": tau[0] and tau[1] - tau[0], "difference_ci95": interval}


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        (drafter([3.12, 3.11], (-0.03, 0.02)), "τ 3.12 and 3.11, the kernels cannot explain a gap"),
        (drafter([3.0, 2.99], (-0.4, 0.3)), "more prompts are needed to tell"),
        (drafter([4.0, 2.0], (-2.4, -1.6)), "the kernels changes it by -50% [-60%, -40%]"),
        (drafter([3.0, 3.0], None), "cannot explain a gap"),
        (drafter([None, None], None), "no cycle to judge"),
    ],
)
def test_the_verdict_on_tau(entry, words):
    layers = [{"layer": 3, "away": 2e-4, "largest_difference": 0.1}]
    said = verdict({"layers": layers, "drafters": [entry], "differs": {"kernels": [1, 2], "device": [1, 2]}})
    assert said.startswith("hidden states agree to cosine 0.99980; d: ")
    assert said.endswith(words)


def test_the_caches_are_streamed(tmp_path):
    """Two caches of 160 MB each are compared in less memory than one of them takes."""
    hidden, tokens, folders = 512, 20_000, []
    samples = [Sample(f"s{i}", "", [1] * 8, [2] * (tokens - 8), "", "length") for i in range(4)]
    settings = {"target": {"model": "m", "dtype": "float32"}, "prompts": {}, "completions": {"temperature": 0.0}}
    for name in "ab":
        folders.append(tmp_path / name)
        folders[-1].mkdir()
        manifest = Manifest(name, settings, [0], hidden, 100, "float32", False, 1, 1, {})
        writer = ShardWriter(folders[-1] / "states-00000.h5", samples, [0], hidden, "float32", False)
        for index in range(len(samples)):
            writer.write_hidden(index, 0, torch.randn(tokens, hidden))
        manifest.shards.append(writer.close())
        manifest.complete = True
        write_completions(folders[-1], samples)
        write_manifest(folders[-1], manifest)
    code = """
import resource, sys
from pathlib import Path
from dflash_eval.comparison import compare_caches
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
before = peak()
compare_caches(*map(Path, sys.argv[1:]))
print(before, peak())
"""
    done = subprocess.run([sys.executable, "-c", code, *folders], capture_output=True, text=True, check=True)
    before, after = map(int, done.stdout.split())
    assert after - before < 150_000  # KiB
