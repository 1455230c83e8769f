"""Import: states that others saved give the cache, and the acceptance lengths, that our own extraction gives."""

from __future__ import annotations

import gzip
import json
import struct
import sys
from dataclasses import replace

import pytest
import torch
from conftest import write_config
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from dflash_eval import cli
from dflash_eval.cache import Cache
from dflash_eval.config import load_config
from dflash_eval.errors import UserError
from dflash_eval.evaluate import evaluate
from dflash_eval.extract import extract
from dflash_eval.importing import import_states


@torch.inference_mode()
def forward(model, sample) -> tuple[torch.Tensor, torch.Tensor]:
    """hidden_states by vLLM's ids 0 ... 6 [tokens, 7, hidden], the last of them before the final norm; and after it."""
    raw = []
    handle = model.model.layers[-1].register_forward_hook(lambda _m, _i, out: raw.append(out))
    states = model(torch.tensor([sample.input_ids]), output_hidden_states=True).hidden_states
    handle.remove()
    last = raw[0][0] if isinstance(raw[0], tuple) else raw[0]
    return torch.stack([*(state[0] for state in states[:-1]), last.reshape(states[0][0].shape)], dim=1), states[-1][0]


@pytest.fixture(params=["tiny", "tiny_hybrid"])
def setup(request, tmp_path):
    """A tiny target, its cache, and its states as transformers gives them; `config` is of a cache that is not there."""
    tiny = request.getfixturevalue(request.param)
    model = AutoModelForCausalLM.from_pretrained(tiny.target, dtype=torch.float32).eval()
    cache = Cache(tiny.folder / "cache")
    saved = {sample.id: (sample, *forward(model, sample)) for sample in cache.samples}
    (tmp_path / "saved").mkdir()
    config = load_config(write_config(tmp_path, tiny.target, [("trained", tiny.drafter)]))
    return cache, saved, config, tmp_path / "saved", tiny


def write_vllm(saved, folder, ids=(1, 3, 5, 6)) -> None:
    for name, (sample, states, _) in saved.items():
        tensors = {"hidden_states": states[:, list(ids)].contiguous(), "token_ids": torch.tensor(sample.input_ids)}
        save_file(tensors, folder / f"req-{name}.safetensors")


def lengths(config) -> list:
    return [sample["acceptance_lengths"] for sample in evaluate(config)["drafters"][0]["samples"]]


def test_vllms_files_give_our_own_cache_and_the_same_acceptance_lengths(setup):
    cache, saved, config, folder, tiny = setup
    write_vllm(saved, folder)
    said: list[str] = []
    ours = Cache(import_states(config, folder, [0, 2, 4, 5], say=said.append))
    assert [(s.id, s.prompt_ids, s.completion_ids, s.text) for s in ours.samples] == [
        (s.id, s.prompt_ids, s.completion_ids, s.text) for s in cache.samples
    ]
    for sample in cache.samples:
        torch.testing.assert_close(
            ours.features(sample.id, [4, 0, 2]), cache.features(sample.id, [4, 0, 2]), rtol=1e-4, atol=1e-4
        )
    assert "greedy agreement 1.0000" in said
    for mine, theirs in zip(ours.head(), cache.head(), strict=True):
        assert torch.equal(mine, theirs)
    theirs = tiny.config.model_copy(update={"results_dir": folder.parent / "theirs"})
    assert lengths(config) == lengths(theirs)


@pytest.mark.parametrize("suffix", [".ckpt", ".ckpt.gz", ".pt"])
@pytest.mark.parametrize(
    "names", [("hidden_states", "target_last_hidden_states"), ("aux_hidden_state", "hidden_state")]
)
def test_specforges_files_are_split_by_their_loss_mask(setup, suffix, names):
    cache, saved, config, folder, _ = setup
    config = load_config(folder.parent / "config.yaml", ["prompts.source=builtin:coding-10"])
    (folder / "rows_0-2000").mkdir()
    for name, (sample, states, normed) in saved.items():
        content = {
            "input_ids": torch.tensor(sample.input_ids),
            "loss_mask": torch.tensor([0] * len(sample.prompt_ids) + [1] * len(sample.completion_ids)),
            names[0]: states[:, [1, 3, 5]].flatten(1)[None],
            names[1]: normed[None],
        }
        path = folder / "rows_0-2000" / f"data_{name}{suffix}"
        with gzip.open(path, "wb") if suffix.endswith("gz") else open(path, "wb") as file:
            torch.save(content, file)
    said: list[str] = []
    ours = Cache(import_states(config, folder, [0, 2, 4], say=said.append))
    assert [sample.completion_ids for sample in ours.samples] == [sample.completion_ids for sample in cache.samples]
    assert [sample.id for sample in ours.samples] == [f"rows_0-2000/data_{sample.id}" for sample in cache.samples]
    assert "greedy agreement 1.0000" in said
    for mine, theirs in zip(ours.samples, cache.samples, strict=True):
        torch.testing.assert_close(
            ours.features(mine.id, [2, 4]), cache.features(theirs.id, [2, 4]), rtol=1e-4, atol=1e-4
        )


def write_deepspec(saved, folder) -> None:
    """The layout of DeepSpec's target cache, version 2: bfloat16 states, two shards."""
    records = [b"", b""]
    index = []
    for number, (sample, states, normed) in enumerate(saved.values()):
        shard, tokens = number % 2, len(sample)
        mask = torch.tensor([0] * len(sample.prompt_ids) + [1] * len(sample.completion_ids), dtype=torch.uint8)
        parts = [torch.tensor(sample.input_ids, dtype=torch.int32), torch.ones(tokens, dtype=torch.uint8), mask,
                 states[:, [1, 3, 5]].bfloat16().view(torch.uint16), normed.bfloat16().view(torch.uint16)]  # fmt: skip
        places = []
        for part in parts:
            places.append(len(records[shard]))
            records[shard] += part.contiguous().numpy().tobytes()
        index.append(struct.pack("<QIIQQQQQ", number, shard, tokens, *places))
    (folder / "samples.idx").write_bytes(b"".join(index))
    for shard, content in enumerate(records):
        (folder / f"shard_{shard}.bin").write_bytes(content)
    manifest = {
        "version": 2, "num_samples": len(index), "target_layer_ids": [0, 2, 4], "hidden_size": 32,
        "hidden_dtype": "bfloat16", "token_dtype": "int32", "mask_dtype": "uint8",
        "shards": [{"shard_id": n, "file_name": f"shard_{n}.bin"} for n in range(2)],
    }  # fmt: skip
    (folder / "manifest.json").write_text(json.dumps(manifest))


def test_deepspecs_target_cache_is_read_to_the_bit_and_damage_is_told(setup):
    cache, saved, _, folder, _ = setup
    write_deepspec(saved, folder)
    sets = ["prompts.source=builtin:coding-10", "target.dtype=bfloat16"]
    config = load_config(folder.parent / "config.yaml", sets)
    said: list[str] = []
    ours = Cache(import_states(config, folder, [0, 2, 4], say=said.append))
    assert [sample.completion_ids for sample in ours.samples] == [sample.completion_ids for sample in cache.samples]
    for mine, (sample, states, _) in zip(ours.samples, saved.values(), strict=True):
        wanted = states[:, [1, 3, 5]].bfloat16().flatten(1)
        assert torch.equal(ours.features(mine.id, [0, 2, 4]), wanted), sample.id
    assert ours.greedy_agreement() > 0.95  # of states rounded to bfloat16
    shard = folder / "shard_1.bin"
    shard.write_bytes(shard.read_bytes()[:-10])
    with pytest.raises(UserError, match="truncated"):
        import_states(config, folder, [0, 2, 4], force=True, say=lambda _: None)
    (folder / "manifest.json").write_text("{}")
    with pytest.raises(UserError, match="not a target cache of DeepSpec as it is known"):
        import_states(config, folder, [0, 2, 4], force=True, say=lambda _: None)


def test_layers_out_of_order_shards_and_the_last_answer_of_a_conversation(setup):
    """Every file a shard; the mask counts two answers, of which the last is judged."""
    cache, saved, _, folder, _ = setup
    sample, states, _ = saved["p1"]
    start = len(sample.prompt_ids)
    mask = torch.zeros(len(sample))
    mask[[*range(3, 5), *range(start, len(sample) - 1)]] = 1
    for name in ("a", "b"):
        content = {"input_ids": torch.tensor(sample.input_ids), "loss_mask": mask, "hidden_states": states[:, [5, 1]]}
        torch.save(content, folder / f"{name}.pt")
    config = load_config(folder.parent / "config.yaml", ["prompts.source=builtin:coding-10", "extract.shard_bytes=1"])
    said: list[str] = []
    ours = Cache(import_states(config, folder, [4, 0], say=said.append))
    assert len(ours.manifest.shards) == 2
    assert [(s.id, s.prompt_ids, s.completion_ids) for s in ours.samples] == [
        (name, sample.prompt_ids, sample.completion_ids[:-1]) for name in ("a", "b")
    ]
    torch.testing.assert_close(ours.features("b", [0, 4]), cache.features("p1", [0, 4])[:-1], rtol=1e-4, atol=1e-4)
    assert any("not checked" in line for line in said)


def test_states_of_other_tokens_are_refused_and_leave_no_cache(setup):
    _, saved, config, folder, _ = setup
    for name, (sample, states, normed) in saved.items():
        others = replace(sample, completion_ids=[(token + 1) % 250 for token in sample.completion_ids])
        saved[name] = others, states, normed
    write_vllm(saved, folder)
    with pytest.raises(UserError, match="not this target's states of these tokens") as error:
        import_states(config, folder, [0, 2, 4, 5], say=lambda _: None)
    assert len(str(error.value).splitlines()) <= 3
    assert not [*config.cache_dir.glob("*.h5"), *config.cache_dir.glob("*.json*")]


@pytest.mark.parametrize(
    ("every", "temperature", "doubted"),
    [(20, 0, False), (8, 0, True), (3, 0, True), (3, 1, False), (1.5, 1, True)],
)
def test_text_that_is_partly_the_targets_own_is_taken_with_a_warning(tiny, tmp_path, every, temperature, doubted):
    """Every so many tokens of an answer are another's; below 0.9 it is doubted, of sampled answers below 0.5."""
    cache = Cache(tiny.folder / "cache")
    (tmp_path / "saved").mkdir()
    sample = max(cache.samples, key=len)
    model = AutoModelForCausalLM.from_pretrained(tiny.target, dtype=torch.float32).eval()
    states, _ = forward(model, sample)
    ids, start = torch.tensor(sample.input_ids), len(sample.prompt_ids)
    changed = torch.arange(start + 1, len(ids), every).long()
    ids[changed] = (ids[changed] + 1) % 250
    other = int((ids != torch.tensor(sample.input_ids)).sum()) / len(sample.completion_ids)
    tensors = {"token_ids": ids, "hidden_states": states[:, [5, 6]].contiguous()}
    save_file(tensors, tmp_path / "saved" / "a.safetensors")
    path = write_config(tmp_path, tiny.target, [("a", tiny.drafter)])
    config, said = load_config(path, [f"completions.temperature={temperature}"]), []
    ours = Cache(import_states(config, tmp_path / "saved", [4, 5], say=said.append))
    assert ours.manifest.provenance["imported"]["greedy_agreement"] == pytest.approx(1 - other)
    assert any("not the target's own" in line for line in said) == doubted


@pytest.mark.parametrize("store", ["float8", "bfloat16"])
def test_states_are_stored_as_asked_to_the_bit_as_extraction_stores_them(tiny, tmp_path, store):
    whole = Cache(tiny.folder / "cache")
    (tmp_path / "saved").mkdir()
    for sample in whole.samples:
        states = whole.features(sample.id, [0, 2, 4]).reshape(len(sample), 3, 32)
        tensors = {"token_ids": torch.tensor(sample.input_ids), "hidden_states": states}
        save_file(tensors, tmp_path / "saved" / f"{sample.id}.safetensors")
    path = write_config(
        tmp_path,
        tiny.target,
        [("trained", tiny.drafter)],
        extract={"store": store, "layers": [0, 2, 4], "target_stats": False},
    )
    theirs = Cache(extract(load_config(path, [f"cache_dir={tmp_path / 'own'}"]), say=lambda _: None))
    ours = Cache(import_states(load_config(path), tmp_path / "saved", [0, 2, 4], say=lambda _: None))
    for sample in whole.samples:
        assert torch.equal(ours.features(sample.id, [0, 2, 4]), theirs.features(sample.id, [0, 2, 4]))
        assert not torch.equal(ours.features(sample.id, [0, 2, 4]).float(), whole.features(sample.id, [0, 2, 4]))
    sizes = [sum(shard.bytes for shard in cache.manifest.shards) for cache in (ours, theirs, whole)]
    assert sizes[0] == sizes[1] < 0.8 * sizes[2]
    assert ours.manifest.dtype == theirs.manifest.dtype


def test_a_cache_that_is_there_is_not_overwritten_without_force(setup):
    _, saved, config, folder, _ = setup
    write_vllm(saved, folder)
    import_states(config, folder, [0, 2, 4, 5], say=lambda _: None)
    with pytest.raises(UserError, match="holds a cache already"):
        import_states(config, folder, [0, 2, 4, 5], say=lambda _: None)
    import_states(config, folder, [0, 2, 4, 5], force=True, say=lambda _: None)


def poison(file) -> None:
    class Attack:
        def __reduce__(self):
            return (print, ("executed",))

    torch.save({"input_ids": Attack()}, file)


@pytest.mark.parametrize(
    ("spoil", "layers", "message"),
    [
        (lambda t, f: None, [0, 2], "do not make that"),
        (lambda t, f: None, [0, 2, 6], "has layers 0 to 5"),
        (lambda t, f: None, [0, 2, 2], "each to be named once"),
        (lambda t, f: t.pop("hidden_states"), [0, 2, 4], "no hidden_states or aux_hidden_state in it"),
        (lambda t, f: t.pop("token_ids"), [0, 2, 4], "no token_ids or input_ids in it"),
        (lambda t, f: t["hidden_states"].mul_(float("nan")), [0, 2, 4], "NaN or infinity"),
        (lambda t, f: t["token_ids"].add_(1000), [0, 2, 4], "beyond the target's vocabulary of 260"),
        (lambda t, f: t["token_ids"].fill_(7), [0, 2, 4], "where the prompt ends is not known"),
        (lambda t, f: t.update(loss_mask=torch.ones(99), token_ids=t["token_ids"] * 0), [0, 2, 4], "leaves no prompt"),
        (lambda t, f: f.write_bytes(b"not tensors"), [0, 2, 4], "cannot be read as tensors"),
    ],
)
def test_what_does_not_fit_is_refused_and_leaves_no_cache(tiny, tmp_path, spoil, layers, message):
    cache = Cache(tiny.folder / "cache")
    (tmp_path / "saved").mkdir()
    sample = cache.samples[0]
    ids = torch.tensor(sample.input_ids)
    tensors = {"token_ids": ids, "hidden_states": cache.features(sample.id, [0, 2, 4]).reshape(len(ids), 3, 32)}
    spoil(tensors, tmp_path / "saved" / "a.safetensors")
    if "loss_mask" in tensors:
        tensors["loss_mask"] = torch.ones(len(ids))
    if not (tmp_path / "saved" / "a.safetensors").exists():
        save_file(tensors, tmp_path / "saved" / "a.safetensors")
    config = load_config(write_config(tmp_path, tiny.target, [("a", tiny.drafter)]))
    with pytest.raises(UserError, match=message) as error:
        import_states(config, tmp_path / "saved", layers, say=lambda _: None)
    assert len(str(error.value).splitlines()) <= 3
    assert not list(config.cache_dir.glob("*.h5"))


def test_a_pickle_that_would_run_code_is_refused(tiny, tmp_path, capsys):
    poison(tmp_path / "evil.pt")
    config = load_config(write_config(tmp_path, tiny.target, [("a", tiny.drafter)]))
    with pytest.raises(UserError, match="cannot be read as tensors"):
        import_states(config, tmp_path / "evil.pt", [0], say=lambda _: None)
    assert "executed" not in capsys.readouterr().out
    with pytest.raises(UserError, match="no such file or folder"):
        import_states(config, tmp_path / "gone", [0], say=lambda _: None)
    with pytest.raises(UserError, match="no hidden states in it"):
        import_states(config, tmp_path / "config.yaml", [0], say=lambda _: None)


def test_the_command_takes_vllms_numbers(tiny, tmp_path, monkeypatch, capsys):
    config = write_config(tmp_path, tiny.target, [("a", tiny.drafter)])
    seen = []
    monkeypatch.setattr("dflash_eval.importing.import_states", lambda c, s, layers, **_: seen.append(layers))
    for arguments in (["--layers", "2,17", "--ids-from", "1"], ["--layers", "1,16"], ["--layers", "one"]):
        monkeypatch.setattr(sys, "argv", ["dflash-eval", "import", str(tmp_path), "-c", str(config), *arguments])
        with pytest.raises(SystemExit) as left:
            cli.main()
    assert left.value.code == 2
    assert "--layers one: not numbers with commas between" in capsys.readouterr().err
    assert seen == [[1, 16], [1, 16]]
