"""Extraction: what is stored is what the target computes, and a killed run resumes to the same content."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from conftest import END, PROMPTS, VOCABULARY, drafter_json, make_target, save_drafter, tiny_tokenizer, write_config
from serving import greedy
from transformers import AutoModelForCausalLM

from dflash_eval import cache as cachefile
from dflash_eval.cache import Cache
from dflash_eval.completions import generate_batch
from dflash_eval.config import load_config
from dflash_eval.errors import UserError
from dflash_eval.evaluate import evaluate
from dflash_eval.extract import extract, wanted_layers
from dflash_eval.target import TargetFiles, find_layers, kernels_of, load_target


def quiet(config, **options):
    return extract(config, say=lambda _: None, **options)


def datasets(folder: Path) -> dict[str, np.ndarray]:
    """Every dataset of every shard, by shard and name."""
    found = {}
    for path in sorted(folder.glob("states-*.h5")):
        with h5py.File(path) as file:
            file.visititems(
                lambda name, item, path=path: (
                    found.update({f"{path.name}:{name}": item[()]}) if isinstance(item, h5py.Dataset) else None
                )
            )
    return found


def assert_same_samples(ours: Path, theirs: Path) -> None:
    """The same samples with the same bits, however they are spread over shards."""
    a, b = (Cache(folder) for folder in (ours, theirs))
    assert a.samples == b.samples
    for sample in a.samples:
        for layer in a.manifest.layers:
            assert torch.equal(a.features(sample.id, [layer]), b.features(sample.id, [layer]))
    for column in ("argmax", "logprob"):
        np.testing.assert_array_equal(*(by_sample(folder, column) for folder in (ours, theirs)))


def by_sample(folder: Path, column: str) -> np.ndarray:
    rows = {}
    for path in folder.glob("states-*.h5"):
        with h5py.File(path) as file:
            offsets, ids = file["offsets"][:], file["sample_ids"].asstr()[:]
            rows.update({i: file[column][a:b] for i, a, b in zip(ids, offsets, offsets[1:], strict=False)})
    return np.concatenate([rows[i] for i in sorted(rows)])


def assert_close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    """Equal but for float32 rounding, which a batch's shape may change."""
    assert (ours - theirs).norm() / theirs.norm() < 1e-5


def assert_same(ours: Path, theirs: Path) -> None:
    a, b = datasets(ours), datasets(theirs)
    assert a.keys() == b.keys()
    for name in a:
        np.testing.assert_array_equal(a[name], b[name], err_msg=name)
    assert (ours / "completions.jsonl").read_text() == (theirs / "completions.jsonl").read_text()


@pytest.mark.parametrize("fixture", ["tiny", "tiny_qwen3", "tiny_hybrid"])
def test_states_are_the_layers_outputs_before_the_final_norm(fixture, request):
    setup = request.getfixturevalue(fixture)
    cache = Cache(setup.folder / "cache")
    model = AutoModelForCausalLM.from_pretrained(setup.target, dtype=torch.float32).eval()
    for sample in cache.samples:
        with torch.inference_mode():
            states = model(torch.tensor([sample.input_ids]), output_hidden_states=True).hidden_states
        for layer in cache.manifest.layers:
            assert_close(cache.features(sample.id, [layer]), states[layer + 1][0])


def test_the_last_layer_is_stored_without_the_final_norm(tiny, tmp_path):
    config = load_config(write_config(tmp_path, tiny.target, [], extract={"layers": [5]}))
    cache = Cache(quiet(config))
    model = AutoModelForCausalLM.from_pretrained(tiny.target, dtype=torch.float32).eval()
    sample = cache.samples[0]
    with torch.inference_mode():
        normed = model(torch.tensor([sample.input_ids]), output_hidden_states=True).hidden_states[-1][0]
    raw = cache.features(sample.id, [5])
    assert not torch.allclose(raw, normed, atol=1e-2)
    assert_close(model.model.norm(raw), normed)


def test_target_stats_speak_of_the_next_token_on_completion_positions_alone(tiny):
    cache = Cache(tiny.folder / "cache")
    model = AutoModelForCausalLM.from_pretrained(tiny.target, dtype=torch.float32).eval()
    with h5py.File(tiny.folder / "cache" / "states-00000.h5") as file:
        for index, sample_id in enumerate(file["sample_ids"].asstr()[:]):
            sample = next(s for s in cache.samples if s.id == sample_id)
            start, end = file["offsets"][index : index + 2]
            argmax, logprob = file["argmax"][start:end], file["logprob"][start:end]
            with torch.inference_mode():
                logits = model(torch.tensor([sample.input_ids])).logits[0].log_softmax(-1)
            inside = slice(len(sample.prompt_ids) - 1, len(sample) - 1)
            assert argmax[inside].tolist() == logits.argmax(-1)[inside].tolist() == sample.completion_ids
            expected = logits[inside].gather(1, torch.tensor(sample.completion_ids)[:, None])[:, 0]
            np.testing.assert_allclose(logprob[inside], expected.numpy(), atol=1e-4)
            outside = np.ones(len(sample), bool)
            outside[inside] = False
            assert (argmax[outside] == -1).all()
            assert np.isnan(logprob[outside]).all()
    assert cache.greedy_agreement() == 1.0


@pytest.mark.parametrize("kind", ["llama", "qwen3", "qwen3_5"])
def test_batched_greedy_says_the_same_tokens_as_one_by_one(kind, tmp_path):
    config = load_config(write_config(tmp_path, make_target(tmp_path / "target", kind), [], extract={"layers": [0]}))
    target = load_target(TargetFiles.find(config.target), config.target)
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(0, 256, (n,), generator=generator).tolist() for n in (3, 40, 11, 1, 25)]
    stop = target.model.generation_config.eos_token_id
    together = generate_batch(target, prompts, config.completions, stop)
    assert together == [generate_batch(target, [p], config.completions, stop)[0] for p in prompts]
    for row in together:
        assert not set(row[:-1]) & set(stop)
        assert row[-1] in stop or len(row) == config.completions.max_new_tokens


def test_the_models_own_sampling_defaults_do_not_leak_into_greedy(tiny, tmp_path):
    config = tiny.config
    target = load_target(TargetFiles.find(config.target), config.target)
    stop = target.model.generation_config.eos_token_id
    plain = generate_batch(target, [[5, 6, 7]], config.completions, stop)
    target.model.generation_config.update(repetition_penalty=5.0, do_sample=True, temperature=9.0, top_k=50)
    assert generate_batch(target, [[5, 6, 7]], config.completions, stop) == plain


def test_sampled_completions_follow_the_targets_distribution(tiny):
    config = tiny.config.model_copy(
        update={"completions": tiny.config.completions.model_copy(update={"temperature": 1.7, "max_new_tokens": 1})}
    )
    target = load_target(TargetFiles.find(config.target), config.target)
    torch.manual_seed(0)
    drawn = torch.tensor(generate_batch(target, [[5, 6, 7]] * 6000, config.completions, [END]))[:, 0]
    with torch.inference_mode():
        wanted = (target.model(torch.tensor([[5, 6, 7]])).logits[0, -1] / 1.7).softmax(-1)
    expected = wanted * len(drawn)
    chi_squared = ((torch.bincount(drawn, minlength=VOCABULARY) - expected).square() / expected).sum()
    assert chi_squared < VOCABULARY + 5 * (2 * VOCABULARY) ** 0.5


@pytest.mark.parametrize("change", [{}, {"max_batch_tokens": 1}, {"max_batch_tokens": 130, "shard_bytes": 1}])
def test_batches_and_shards_do_not_change_what_is_stored(tiny, tmp_path, change):
    config = load_config(write_config(tmp_path, tiny.target, [("a", tiny.drafter)], extract=change))
    cache, first = Cache(quiet(config)), Cache(tiny.folder / "cache")
    assert len(cache.manifest.shards) == (1 if len(change) < 2 else len(cache.manifest.shards))
    assert len(change) < 2 or len(cache.manifest.shards) > 2
    assert cache.samples == first.samples
    for sample in cache.samples:
        layers = cache.manifest.layers
        assert_close(cache.features(sample.id, layers), first.features(sample.id, layers))


KILLED = {"max_batch_tokens": 64, "shard_bytes": 1}  # every batch a shard


def start(config: Path) -> subprocess.Popen:
    command = [sys.executable, "-m", "dflash_eval", "extract", "-c", str(config)]
    return subprocess.Popen(command, stderr=subprocess.PIPE, start_new_session=True)


def test_sigkill_at_random_moments_then_resume_gives_the_uninterrupted_cache(tiny, tmp_path):
    """The real command, killed as soon as it has written something, again and again."""
    (tmp_path / "whole").mkdir()
    (tmp_path / "killed").mkdir()
    whole = load_config(write_config(tmp_path / "whole", tiny.target, [("a", tiny.drafter)], extract=KILLED))
    quiet(whole)
    path = write_config(tmp_path / "killed", tiny.target, [("a", tiny.drafter)], extract=KILLED)
    folder = load_config(path).cache_dir
    draw = random.Random(1)
    killed = 0
    for _ in range(30):
        before = sorted(p.name for p in folder.glob("*")) if folder.exists() else []
        process = start(path)
        while process.poll() is None:
            now = sorted(p.name for p in folder.glob("*")) if folder.exists() else []
            if now != before and killed < 4:
                time.sleep(draw.uniform(0, 0.05))
                os.killpg(process.pid, signal.SIGKILL)
                killed += process.wait() == -signal.SIGKILL
                break
            time.sleep(0.002)
        else:
            assert process.returncode == 0, process.stderr.read().decode()
            break
    assert killed >= 2
    assert_same(folder, whole.cache_dir)
    assert not list(folder.glob(".*.tmp"))


def test_a_complete_cache_is_left_alone_and_its_target_not_loaded(tiny, monkeypatch):
    monkeypatch.setattr("dflash_eval.extract.load_target", lambda *_: pytest.fail("loaded the target"))
    said = []
    before = (tiny.folder / "cache" / "manifest.json").read_bytes()
    extract(tiny.config, say=said.append)
    assert "complete" in said[-1]
    assert (tiny.folder / "cache" / "manifest.json").read_bytes() == before


@pytest.fixture
def copy(tiny, tmp_path):
    """A config of its own on a copy of the tiny cache: (folder, write) where write(**sections) gives the config."""
    shutil.copytree(tiny.folder / "cache", tmp_path / "cache")
    shutil.copy(tiny.folder / "prompts.jsonl", tmp_path / "prompts.jsonl")

    def write(drafters=None, model=tiny.target, **sections):
        sections.setdefault("prompts", {})
        sections["prompts"] = {"source": str(tiny.folder / "prompts.jsonl"), **sections["prompts"]}
        return load_config(write_config(tmp_path, model, drafters or [("a", tiny.drafter)], **sections))

    return write


@pytest.mark.parametrize(
    ("sections", "named"),
    [
        ({"target": {"dtype": "bfloat16"}}, "target.dtype"),
        ({"completions": {"max_new_tokens": 12}}, "completions.max_new_tokens"),
        ({"completions": {"temperature": 0.5}}, "completions.temperature"),
        ({"prompts": {"limit": 2}}, "prompts.limit"),
        ({"prompts": {"system": "be brief"}}, "prompts.system"),
    ],
)
def test_a_cache_of_something_else_is_refused_with_the_difference_named(copy, sections, named):
    config = copy(**sections)
    before = datasets(config.cache_dir)
    with pytest.raises(UserError, match=named):
        quiet(config)
    assert datasets(config.cache_dir).keys() == before.keys()
    quiet(config, force=True)
    assert Cache(config.cache_dir).manifest.complete


def test_another_target_or_tokenizer_under_the_same_name_is_refused(tiny, tmp_path, copy):
    target = tmp_path / "target"
    shutil.copytree(tiny.target, target)
    config = copy(model=target)
    with pytest.raises(UserError, match=r"target\.model"):
        quiet(config)
    quiet(config, force=True)
    model = AutoModelForCausalLM.from_pretrained(target)
    with torch.no_grad():
        model.lm_head.weight += 1
    model.save_pretrained(target)
    with pytest.raises(UserError, match=r"target\.fingerprint"):
        quiet(config)
    quiet(config, force=True)
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens(["extra"])
    tokenizer.save_pretrained(target)
    with pytest.raises(UserError, match="fingerprint"):
        quiet(config)


def test_missing_layers_are_named_and_force_adds_them_keeping_the_completions(copy, tmp_path, monkeypatch):
    raw = drafter_json(dflash_config={"target_layer_ids": [1, 2, 5], "mask_token_id": 256})
    config = copy(drafters=[("other", save_drafter(tmp_path / "other", raw))])
    with pytest.raises(UserError, match=r"has layers 0, 2, 4, not 1, 5(.|\n)*--force"):
        quiet(config)
    monkeypatch.setattr("dflash_eval.completions.generate_batch", lambda *_: pytest.fail("generated anew"))
    quiet(config, force=True)
    assert Cache(config.cache_dir).manifest.layers == [1, 2, 5]


def test_a_damaged_shard_of_an_unfinished_cache_is_refused(copy):
    config = copy()
    manifest = cachefile.read_manifest(config.cache_dir)
    manifest.complete = False
    cachefile.write_manifest(config.cache_dir, manifest)
    path = config.cache_dir / "states-00000.h5"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(UserError, match=r"states-00000\.h5: \d+ bytes where"):
        quiet(config)


def test_layers_beyond_the_target_are_named_before_it_is_loaded(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr("dflash_eval.extract.load_target", lambda *_: pytest.fail("loaded the target"))
    config = load_config(write_config(tmp_path, tiny.target, [], extract={"layers": [2, 6, 9]}))
    with pytest.raises(UserError, match=r"layers 6, 9 do not exist(.|\n)*layers 0 to 5"):
        quiet(config)


def test_auto_layers_are_the_union_over_the_drafters(tiny, tmp_path):
    raw = drafter_json(dflash_config={"target_layer_ids": [5, 2], "mask_token_id": 256})
    drafters = [("a", tiny.drafter), ("b", save_drafter(tmp_path / "b", raw))]
    config = load_config(write_config(tmp_path, tiny.target, drafters, extract={"extra_layers": [1]}))
    assert wanted_layers(config) == [0, 1, 2, 4, 5]


def test_a_prompt_that_leaves_no_room_is_named(tiny, tmp_path):
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"id": "long", "prompt": "x" * 230}) + "\n")
    config = load_config(write_config(tmp_path, tiny.target, [("a", tiny.drafter)]))
    with pytest.raises(UserError, match="'long' leaves no room"):
        quiet(config)


def test_completions_of_zero_and_one_token_are_kept(tiny, tmp_path):
    rows = [
        {"id": "p0", "completion_ids": []},
        {"id": "p1", "completion_ids": [65]},
        {"id": "p2", "text": "def f(): pass"},
        *({"id": f"p{i}", "completion_ids": [70, 71, 72]} for i in range(3, len(PROMPTS))),
    ]
    (tmp_path / "said.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    completions = {"source": "file", "file": str(tmp_path / "said.jsonl")}
    config = load_config(write_config(tmp_path, tiny.target, [("a", tiny.drafter)], completions=completions))
    cache = Cache(quiet(config))
    assert [len(sample.completion_ids) for sample in cache.samples] == [0, 1, 13, 3, 3, 3]
    assert cache.greedy_agreement() < 1


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("not json", ":1: not a JSON object"),
        ('{"id": "p0"}', ":1: neither completion_ids nor text"),
        ('{"id": "p0", "completion_ids": [999]}', "token ids from 0 to 259"),
        (json.dumps({"id": "p0", "completion_ids": [1] * 41}), "max_new_tokens is 40"),
        ('{"id": "p1", "text": "x"}', "no completion for"),
        ('{"id": "p0", "text": "x"}\n{"id": "p0", "text": "y"}', ":2: id 'p0' stands on line 1 too"),
    ],
)
def test_bad_completion_files_are_refused_with_the_line(tiny, tmp_path, row, message):
    (tmp_path / "said.jsonl").write_text(row + "\n")
    completions = {"source": "file", "file": str(tmp_path / "said.jsonl")}
    sections = {"completions": completions, "prompts": {"limit": 1}}
    config = load_config(write_config(tmp_path, tiny.target, [("a", tiny.drafter)], **sections))
    with pytest.raises(UserError) as error:
        quiet(config)
    assert message in str(error.value)


def change_json(path, **changes):
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (lambda folder: (folder / "config.json").unlink(), "cannot be loaded"),
        (lambda folder: (folder / "model.safetensors").unlink(), "cannot be loaded"),
        (lambda folder: os.truncate(folder / "model.safetensors", 5000), r"model\.safetensors: truncated or damaged"),
        (lambda folder: os.truncate(folder / "model.safetensors", 90000), r"model\.safetensors: truncated or damaged"),
        (
            lambda folder: (folder / "model.safetensors.index.json").write_text(
                json.dumps({"weight_map": {"a": "model-00001.safetensors", "b": "model.safetensors"}})
            ),
            r"model-00001\.safetensors: missing, though model\.safetensors\.index\.json lists it",
        ),
        (
            lambda folder: (folder / "model.safetensors.index.json").write_text("[]"),
            r"model\.safetensors\.index\.json: not a list of weights",
        ),
        (lambda folder: (folder / "config.json").write_text('{"model_type": "nonsense"}'), "cannot be loaded"),
        (lambda folder: (folder / "config.json").write_text("[]"), "cannot be loaded"),
        (lambda folder: change_json(folder / "config.json", num_hidden_layers="six"), "cannot be loaded"),
        (lambda folder: change_json(folder / "config.json", num_hidden_layers=7), r"layers\.6\.[a-z_.]+ is missing"),
        (lambda folder: change_json(folder / "config.json", intermediate_size=48), r"is \[32, 64\], not \[32, 48\]"),
        (lambda folder: (folder / "tokenizer.json").unlink(), "cannot be loaded"),
    ],
)
def test_a_target_that_cannot_be_loaded_is_one_plain_error(tiny, tmp_path, break_it, message):
    folder = tmp_path / "target"
    shutil.copytree(tiny.target, folder)
    break_it(folder)
    config = load_config(write_config(tmp_path, folder, [("a", tiny.drafter)]))
    with pytest.raises(UserError, match=message) as error:
        quiet(config)
    assert len(str(error.value).splitlines()) <= 3


def test_a_disk_without_room_is_refused_before_the_work(tiny, tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr("dflash_eval.extract.shutil.disk_usage", lambda _: usage._replace(free=1000))
    config = load_config(write_config(tmp_path, tiny.target, [("a", tiny.drafter)]))
    with pytest.raises(UserError, match="no disk space"):
        quiet(config)
    monkeypatch.undo()
    quiet(config)  # the completions were kept


def test_a_disk_that_fills_keeps_the_finished_shards_and_resumes(tiny, tmp_path, monkeypatch):
    config = load_config(write_config(tmp_path, tiny.target, [("a", tiny.drafter)], extract=KILLED))
    real = cachefile.ShardWriter.close

    def full(self):
        if self.path.name == "states-00002.h5":
            raise OSError("write failed: errno = 28, error message = 'No space left on device'")
        return real(self)

    monkeypatch.setattr(cachefile.ShardWriter, "close", full)
    with pytest.raises(UserError, match="no space left"):
        quiet(config)
    kept = {path.name for path in config.cache_dir.glob("*.h5")}  # beside them what was being closed at that moment
    assert {"states-00000.h5", "states-00001.h5"} <= kept
    assert "states-00002.h5" not in kept
    monkeypatch.undo()
    assert len(Cache(quiet(config)).manifest.shards) > 3


@pytest.mark.parametrize("kibibytes", [20, 90])  # less than HDF5 writes when it makes a shard, and than a shard
def test_a_file_that_may_not_grow_is_one_plain_error_and_the_run_resumes(tiny, tmp_path, kibibytes):
    path = write_config(tmp_path, tiny.target, [("a", tiny.drafter)])
    command = f"ulimit -f {kibibytes}; exec {sys.executable} -m dflash_eval extract -c {path}"
    ended = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert ended.returncode == 2, ended.stderr
    assert "Traceback" not in ended.stderr
    assert "no space left on the disk (File too large)" in ended.stderr
    assert not list((tmp_path / "cache").glob(".states-*"))
    assert Cache(quiet(load_config(path))).samples


def test_conversations_are_answered_turn_by_turn_and_every_turn_is_a_sample(tiny, tmp_path):
    rows = [{"id": "a", "turns": ["sort a list", "why?"], "category": "chat"}, {"id": "b", "prompt": "zip"},
            {"id": "c", "turns": ["add", "and now?", "zip"]}]  # fmt: skip
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = load_config(write_config(tmp_path, tiny.target, [("a", tiny.drafter)], completions={"max_new_tokens": 12}))
    cache = Cache(quiet(config))
    wanted = ["a/turn-1", "a/turn-2", "b", "c/turn-1", "c/turn-2", "c/turn-3"]
    assert [sample.id for sample in cache.samples] == wanted
    assert [sample.category for sample in cache.samples] == ["chat", "chat", None, None, None, None]
    slow, by_id = greedy(tiny.target), {sample.id: sample for sample in cache.samples}
    for row in rows:
        chat = []
        for number, turn in enumerate(row.get("turns", [row.get("prompt")]), 1):
            chat.append({"role": "user", "content": turn})
            sample = by_id[f"{row['id']}/turn-{number}" if "turns" in row else row["id"]]
            prompt = tiny_tokenizer().apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
            assert (sample.prompt, sample.prompt_ids) == (turn, prompt)
            assert sample.completion_ids == slow(prompt, 12)
            chat.append({"role": "assistant", "content": sample.text})
    drafter = evaluate(config)["drafters"][0]
    assert [(c["category"], c["samples"]) for c in drafter["categories"]] == [("chat", 2), (None, 4)]
    means = [np.mean(s["acceptance_lengths"]) for s in drafter["samples"] if s["category"] == "chat"]
    assert drafter["categories"][0]["tau"] == pytest.approx(np.mean(means))
    assert drafter["categories"][0]["tau_ci95"] is None  # two turns, but one conversation
    assert drafter["categories"][1]["tau_ci95"] is not None
    said = [{"id": sample.id, "completion_ids": sample.completion_ids} for sample in cache.samples]
    (tmp_path / "said.jsonl").write_text("".join(json.dumps(row) + "\n" for row in said))
    completions = {"source": "file", "file": str(tmp_path / "said.jsonl"), "max_new_tokens": 12}
    sections = {"completions": completions, "cache_dir": str(tmp_path / "read")}
    read = Cache(quiet(load_config(write_config(tmp_path, tiny.target, [("a", tiny.drafter)], **sections))))
    assert [sample.input_ids for sample in read.samples] == [sample.input_ids for sample in cache.samples]


def test_required_kernels_that_would_fall_back_stop_the_run_before_any_weight_is_read(tiny_hybrid, tmp_path):
    target = tiny_hybrid.config.target
    if "torch" not in kernels_of(load_target(TargetFiles.find(target), target).model).values():
        pytest.skip("fla and causal-conv1d are installed here: nothing falls back")
    folder = tmp_path / "target"
    shutil.copytree(tiny_hybrid.target, folder)
    (folder / "model.safetensors").unlink()
    path = write_config(tmp_path, folder, [("a", tiny_hybrid.drafter)])
    config = load_config(path, ["target.require_kernels=[fla, causal_conv1d]"])
    with pytest.raises(UserError, match="pip install causal-conv1d flash-linear-attention"):
        quiet(config)
    with pytest.raises(UserError, match=r"\(pip install flash-linear-attention\)"):
        quiet(load_config(path, ["target.kernels=fla"]))


def test_the_manifest_says_which_kernels_ran(tiny, tiny_hybrid):
    kernels = Cache(tiny_hybrid.folder / "cache").manifest.provenance["kernels"]
    assert {"attention", "chunk_gated_delta_rule", "causal_conv1d_fn"} <= kernels.keys()
    assert "chunk_gated_delta_rule" not in Cache(tiny.folder / "cache").manifest.provenance["kernels"]


def test_layers_that_cannot_be_found_are_reported_with_the_lists_seen(tiny):
    model = AutoModelForCausalLM.from_pretrained(tiny.target)
    assert len(find_layers(model)) == 6
    model.config.num_hidden_layers = 4
    with pytest.raises(UserError, match=r"model\.layers \(6\)"):
        find_layers(model)


def test_a_run_that_failed_before_it_made_anything_leaves_no_cache_in_the_way(tiny, tmp_path):
    path = write_config(tmp_path, tiny.target, [("a", tiny.drafter)])
    with pytest.raises(UserError, match="leaves no room"):
        quiet(load_config(path, ["completions.max_new_tokens=5000"]))
    quiet(load_config(path, ["completions.max_new_tokens=4"]))
    assert Cache(tmp_path / "cache").manifest.settings["completions"]["max_new_tokens"] == 4


@pytest.mark.parametrize("inside", ["file/cache", "file", "/proc/no-such-folder"])
def test_a_cache_folder_that_cannot_be_is_a_plain_error(tiny, tmp_path, inside):
    (tmp_path / "file").write_text("not a folder")
    path = write_config(tmp_path, tiny.target, [("a", tiny.drafter)], cache_dir=str(tmp_path / inside))
    with pytest.raises(UserError, match="cache_dir names the folder"):
        quiet(load_config(path))
    assert (tmp_path / "file").read_text() == "not a folder"
