"""Files from strangers: nothing in them runs, none reaches outside its folder, no size is believed unseen."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import pickle
import shutil
import struct
import zipfile
from pathlib import Path

import h5py
import pytest
import torch
from conftest import drafter_json, save_drafter
from drafters import error, load
from safetensors.torch import load_file

from dflash_eval import cache as cachefile
from dflash_eval.cache import Cache


class Payload:
    """What a hostile pickle holds: a call that leaves a trace when it is loaded."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self):
        return os.mkdir, (str(self.trace),)


@pytest.fixture
def folder(tmp_path) -> Path:
    """A drafter's folder with config.json alone; `state` is what its weights would be."""
    folder = save_drafter(tmp_path / "d", drafter_json())
    (folder / "model.safetensors").rename(tmp_path / "good.safetensors")
    return folder


@pytest.mark.parametrize("how", ["torch", "plain", "beside tensors", "legacy torch"])
@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt"])
def test_a_pickle_that_would_run_code_is_refused_without_running_it(folder, tmp_path, how, name):
    trace, payload = tmp_path / "ran", Payload(tmp_path / "ran")
    state = load_file(tmp_path / "good.safetensors")
    if how == "torch":
        torch.save(payload, folder / name)
    elif how == "beside tensors":
        torch.save({"model": state, "callback": payload}, folder / name)
    elif how == "legacy torch":
        torch.save({**state, "callback": payload}, folder / name, _use_new_zipfile_serialization=False)
    else:
        (folder / name).write_bytes(pickle.dumps({**state, "x": payload}))
    pickle.loads(pickle.dumps(payload))
    assert trace.is_dir(), "the payload does not work, and the test could not fail"
    trace.rmdir()
    message = error(load, folder)
    assert "could run code" in message
    assert name in message
    assert not trace.exists()


def test_a_payload_beside_safetensors_is_not_even_opened(folder, tmp_path):
    (tmp_path / "good.safetensors").rename(folder / "model.safetensors")
    torch.save(Payload(tmp_path / "ran"), folder / "pytorch_model.bin")
    load(folder)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("name", ["../good.safetensors", "/etc/passwd", "a/../../good.safetensors"])
def test_an_index_that_leaves_its_folder_is_refused(folder, tmp_path, name):
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"norm.weight": name}}))
    assert f"names {name!r}, outside its folder" in error(load, folder)


def test_a_safetensors_header_longer_than_the_file_takes_no_memory(folder):
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", 1 << 40) + b"{}")
    assert "not a whole safetensors file" in error(load, folder)


def test_a_safetensors_shape_larger_than_the_file_is_refused(folder):
    header = {"norm.weight": {"dtype": "F32", "shape": [1 << 40], "data_offsets": [0, 1 << 42]}}
    content = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(content)) + content + b"\0" * 64)
    assert "not a whole safetensors file" in error(load, folder)


def test_a_pickled_tensor_that_claims_more_than_its_storage_is_refused(folder, tmp_path):
    state = load_file(tmp_path / "good.safetensors")
    state["norm.weight"] = torch.ones(1).expand(32)
    torch.save(state, folder / "model.pt")
    assert "norm.weight is larger than what the file holds of it" in error(load, folder)


def test_dicts_without_end_and_a_memo_of_any_size_are_refused(folder):
    endless: dict = {}
    endless["model"] = endless
    torch.save(endless, folder / "model.pt")
    assert "no weights in it" in error(load, folder)
    with zipfile.ZipFile(folder / "model.pt", "w") as archive:
        archive.writestr("archive/data.pkl", b"\x80\x02r\xff\xff\xff\x7f.")
        archive.writestr("archive/version", "3")
    assert "not a readable torch checkpoint" in error(load, folder)


def test_a_compressed_torch_archive_is_refused(folder, tmp_path):
    buffer = io.BytesIO()
    torch.save({"norm.weight": torch.zeros(1 << 20)}, buffer)
    with zipfile.ZipFile(buffer) as source, zipfile.ZipFile(folder / "model.pt", "w", zipfile.ZIP_DEFLATED) as packed:
        for entry in source.infolist():
            packed.writestr(entry.filename, source.read(entry))
    assert "compressed, or of sizes that the file does not have" in error(load, folder)


def test_a_config_of_absurd_sizes_takes_no_memory(folder, tmp_path):
    (tmp_path / "good.safetensors").rename(folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(drafter_json(hidden_size=1 << 28, intermediate_size=1 << 30)))
    assert "fc.weight takes 96 inputs" in error(load, folder)
    (folder / "config.json").write_text(json.dumps(drafter_json(num_hidden_layers=1 << 40, layer_types=None)))
    assert "num_hidden_layers is 1099511627776" in error(load, folder)


# HDF5


@pytest.fixture
def shard(tiny, tmp_path):
    """Change a copied cache's shard as its maker could, digest and all, and open the cache."""
    folder = Path(shutil.copytree(tiny.folder / "cache", tmp_path / "cache"))
    path = folder / "states-00000.h5"

    def change(edit) -> Cache:
        with h5py.File(path, "r+") as file:
            edit(file)
        manifest = cachefile.read_manifest(folder)
        manifest.shards[0].sha256, manifest.shards[0].bytes = cachefile.sha256(path), path.stat().st_size
        cachefile.write_manifest(folder, dataclasses.replace(manifest))
        return Cache(folder)

    return change


def external_link(file):
    del file["hidden/2"]
    file["hidden/2"] = h5py.ExternalLink("/somewhere/else.h5", "hidden/2")


def external_storage(file):
    shape = file["hidden/2"].shape
    del file["hidden/2"]
    size = shape[0] * shape[1] * 4
    file.create_dataset("hidden/2", shape, "f4", external=[("/etc/passwd", 0, size)])


def virtual_dataset(file):
    shape = file["hidden/2"].shape
    del file["hidden/2"]
    layout = h5py.VirtualLayout(shape, "f4")
    layout[:] = h5py.VirtualSource("/somewhere/else.h5", "x", shape)
    file.create_virtual_dataset("hidden/2", layout)


def soft_link(file):
    del file["argmax"]
    file["argmax"] = h5py.SoftLink("/input_ids")


@pytest.mark.parametrize(
    ("edit", "says"),
    [
        (external_link, "hidden/2 is a link to elsewhere"),
        (external_storage, "hidden/2 lies in other files"),
        (virtual_dataset, "hidden/2 lies in other files"),
        (soft_link, "argmax is a link to elsewhere"),
    ],
)
def test_a_shard_whose_data_lies_elsewhere_is_refused(shard, edit, says):
    message = error(shard, edit)
    assert says in message
    assert "states-00000.h5" in message


def test_a_shard_that_is_merely_touched_opens(shard):
    shard(lambda file: file.attrs.update({"note": "mine"}))


def test_a_manifest_that_names_a_file_outside_its_folder_is_refused(tiny, tmp_path):
    folder = Path(shutil.copytree(tiny.folder / "cache", tmp_path / "cache"))
    raw = json.loads((folder / "manifest.json").read_text())
    raw["shards"][0]["file"] = "../states-00000.h5"
    (folder / "manifest.json").write_text(json.dumps(raw))
    assert "is not the name of a shard" in error(Cache, folder)
