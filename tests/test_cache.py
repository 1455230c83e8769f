"""What goes into a cache comes out bit for bit, and what is not whole is refused."""

from __future__ import annotations

import dataclasses

import h5py
import numpy as np
import pytest
import torch

from dflash_eval import cache as cachefile
from dflash_eval.cache import Cache, Manifest, Sample, ShardWriter
from dflash_eval.errors import UserError
from dflash_eval.lock import lock


def sample(name: str, prompt: int, completion: int) -> Sample:
    return Sample(name, "p", list(range(prompt)), list(range(100, 100 + completion)), "t", "length")


def write_cache(folder, samples, states, dtype, stats=True, **changes) -> Manifest:
    """states: {layer: [tensor of each sample]}."""
    hidden = next(iter(states.values()))[0].shape[1]
    manifest = Manifest(
        "x", {"completions": {"max_new_tokens": 9}}, list(states), hidden, 128, dtype, stats, 64, 64, {}
    )
    folder.mkdir(exist_ok=True)
    cachefile.write_completions(folder, samples)
    writer = ShardWriter(folder / "states-00000.h5", samples, manifest.layers, hidden, dtype, stats)
    for index in range(len(samples)):
        for layer, tensors in states.items():
            writer.write_hidden(index, layer, tensors[index])
        if stats:
            tokens = np.array(samples[index].completion_ids, dtype=np.int32)
            writer.write_stats(index, tokens, np.zeros(len(tokens), np.float32))
    manifest.shards.append(writer.close())
    manifest.head_sha256 = cachefile.write_head(folder, {"embed_tokens.weight": torch.randn(128, hidden)})
    manifest.complete = True
    manifest = dataclasses.replace(manifest, **changes)
    cachefile.write_manifest(folder, manifest)
    return manifest


@pytest.fixture
def folder(tmp_path):
    samples = [sample("a", 3, 4), sample("b", 2, 0), sample("c", 1, 1)]
    states = {layer: [torch.randn(len(s), 8) for s in samples] for layer in (1, 5)}
    write_cache(tmp_path / "cache", samples, states, "float32")
    return tmp_path / "cache"


def test_every_bfloat16_bit_pattern_survives(tmp_path):
    bits = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16)
    patterns = bits.view(torch.bfloat16).view(-1, 64)  # NaN payloads and infinities too
    samples = [sample("all", 1000, 24)]
    write_cache(tmp_path / "cache", samples, {3: [patterns]}, "bfloat16")
    read = Cache(tmp_path / "cache").features("all", [3])
    assert read.dtype == torch.bfloat16
    assert torch.equal(read.view(torch.uint16).flatten().int(), bits.int())


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_features_are_the_layers_side_by_side_in_the_asked_order(tmp_path, dtype):
    samples = [sample("a", 3, 4), sample("b", 1, 2)]
    kind = cachefile.DTYPES[dtype]
    states = {layer: [torch.randn(len(s), 4).to(kind) for s in samples] for layer in (0, 2, 7)}
    write_cache(tmp_path / "cache", samples, states, dtype)
    cache = Cache(tmp_path / "cache")
    for index, one in enumerate(samples):
        assert torch.equal(cache.features(one.id, [7, 0]), torch.cat([states[7][index], states[0][index]], -1))


def test_greedy_agreement_counts_completion_tokens_alone(folder, tmp_path):
    assert Cache(folder).greedy_agreement() == 1.0
    samples = [sample("a", 3, 4)]
    write_cache(tmp_path / "other", samples, {0: [torch.zeros(7, 2)]}, "float32", stats=False)
    assert Cache(tmp_path / "other").greedy_agreement() is None


def test_a_shard_has_its_name_only_when_whole(tmp_path):
    path = tmp_path / "states-00000.h5"
    writer = ShardWriter(path, [sample("a", 1, 1)], [0], 4, "float32", False)
    assert not path.exists()
    writer.close()
    assert path.exists()
    assert list(tmp_path.iterdir()) == [path]


def damage(path, how):
    data = bytearray(path.read_bytes())
    if how == "truncated":
        data = data[: len(data) // 2]
    elif how == "one bit":
        data[len(data) // 2] ^= 1
    elif how == "not HDF5":
        data = bytearray(b"x" * len(data))
    path.write_bytes(data)


@pytest.mark.parametrize("how", ["truncated", "one bit", "not HDF5"])
@pytest.mark.parametrize("name", ["states-00000.h5", "head.safetensors"])
def test_a_damaged_file_is_refused_by_name(folder, name, how):
    damage(folder / name, how)
    with pytest.raises(UserError, match=name):
        Cache(folder).head()


def test_a_missing_shard_is_refused_by_name(folder):
    (folder / "states-00000.h5").unlink()
    with pytest.raises(UserError, match=r"states-00000\.h5: missing"):
        Cache(folder)


def test_a_foreign_hdf5_file_is_refused_even_with_a_matching_checksum(folder):
    path = folder / "states-00000.h5"
    with h5py.File(path, "w") as file:
        file["weather"] = np.arange(3)
    manifest = cachefile.read_manifest(folder)
    manifest.shards[0].bytes = path.stat().st_size
    manifest.shards[0].sha256 = cachefile.sha256(path)
    cachefile.write_manifest(folder, manifest)
    with pytest.raises(UserError, match="not a readable shard"):
        Cache(folder)


def test_a_manifest_cannot_point_outside_its_folder(folder):
    manifest = cachefile.read_manifest(folder)
    manifest.shards[0].file = "../states-00000.h5"
    cachefile.write_manifest(folder, manifest)
    with pytest.raises(UserError, match="not the name of a shard"):
        Cache(folder)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not a readable manifest"),
        ("[]", "not a readable manifest"),
        ('{"schema_version": 99}', "schema version 99"),
    ],
)
def test_an_unreadable_manifest_is_a_plain_error(folder, text, message):
    (folder / "manifest.json").write_text(text)
    with pytest.raises(UserError, match=message):
        Cache(folder)


def test_no_cache_and_an_unfinished_one_say_what_to_run(tmp_path, folder):
    with pytest.raises(UserError, match="dflash-eval extract"):
        Cache(tmp_path / "nowhere")
    manifest = cachefile.read_manifest(folder)
    manifest.complete = False
    cachefile.write_manifest(folder, manifest)
    with pytest.raises(UserError, match="resume"):
        Cache(folder)


def test_a_completion_line_cut_by_a_kill_is_passed_over(folder):
    path = folder / "completions.jsonl"
    path.write_text(path.read_text() + '{"id": "half", "pro')
    assert [s.id for s in cachefile.read_completions(folder)] == ["a", "b", "c"]


def test_two_writers_do_not_share_a_cache(tmp_path):
    with lock(tmp_path), pytest.raises(UserError, match="another extraction"), lock(tmp_path):
        pass


def test_a_full_disk_is_a_plain_error(tmp_path):
    with pytest.raises(UserError, match="no space left"), cachefile.disk_errors(tmp_path):
        raise OSError("Can't write data (file write failed: errno = 28, error message = 'No space left on device')")
