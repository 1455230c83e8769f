"""On a GPU: the same walks as on the CPU, and the kernels that the manifest names."""

from __future__ import annotations

import pytest
import torch
from conftest import drafter_json, write_config

from dflash_eval.cache import Cache
from dflash_eval.completions import generate_batch
from dflash_eval.config import load_config
from dflash_eval.drafter.config import DrafterConfig
from dflash_eval.drafter.model import BlockAttention, Blocks, DFlashDrafter, Group
from dflash_eval.drafter.scoring import Scorer, rank_rows
from dflash_eval.errors import UserError
from dflash_eval.evaluate import evaluate
from dflash_eval.extract import extract
from dflash_eval.forward import compile_layers, forward
from dflash_eval.states import _Halving
from dflash_eval.target import TargetFiles, load_target

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"),
]


@pytest.mark.parametrize("fixture", ["tiny", "tiny_qwen3"])
def test_evaluation_on_the_gpu_walks_as_on_the_cpu(fixture, request):
    config = request.getfixturevalue(fixture).config
    on_cpu = evaluate(config)
    on_gpu = evaluate(config.model_copy(update={"evaluate": config.evaluate.model_copy(update={"device": "cuda"})}))
    assert on_gpu["drafters"][0]["samples"] == on_cpu["drafters"][0]["samples"]


@pytest.mark.parametrize("fixture", ["tiny", "tiny_qwen3"])
def test_extraction_on_the_gpu_stores_what_the_cpu_does(fixture, request, tmp_path):
    setup = request.getfixturevalue(fixture)
    path = write_config(tmp_path, setup.target, [("trained", setup.drafter)], target={"device": "cuda"})
    extract(load_config(path), say=lambda _: None)
    gpu, cpu = Cache(tmp_path / "cache"), Cache(setup.folder / "cache")
    assert [s.completion_ids for s in gpu.samples] == [s.completion_ids for s in cpu.samples]
    for sample in cpu.samples:
        ours, theirs = (c.features(sample.id, cpu.manifest.layers) for c in (gpu, cpu))
        assert (ours - theirs).norm() / theirs.norm() < 1e-3


@pytest.mark.parametrize("store", [None, "float8"])
def test_many_small_batches_and_compiled_layers_store_the_same_on_the_gpu(tiny, tmp_path, monkeypatch, store):
    """Pinned memory is used over and over, while copies and writes are under way."""
    folders = {}
    for name, device, pays in (("cpu", "cpu", 1e17), ("eager", "cuda", 1e17), ("compiled", "cuda", 0)):
        monkeypatch.setattr("dflash_eval.extract.COMPILING_PAYS", pays)
        (tmp_path / name).mkdir()
        extract_ = {"store": store, "max_batch_tokens": 130, "shard_bytes": 30000}
        path = write_config(
            tmp_path / name, tiny.target, [("a", tiny.drafter)], target={"device": device}, extract=extract_
        )
        folders[name] = extract(load_config(path), say=lambda _: None)
        assert Cache(folders[name]).manifest.provenance["compiled"] == (name == "compiled")
    cpu, *gpus = (Cache(folder) for folder in folders.values())
    for gpu in gpus:
        assert [s.completion_ids for s in gpu.samples] == [s.completion_ids for s in cpu.samples]
        for sample in cpu.samples:
            ours, theirs = (c.features(sample.id, cpu.manifest.layers) for c in (gpu, cpu))
            assert (ours - theirs).norm() / theirs.norm() < (1e-3 if store is None else 1e-2)


@pytest.mark.parametrize("fixture", ["tiny", "tiny_qwen3"])
def test_the_static_cache_says_the_same_tokens(fixture, request):
    config = load_config(request.getfixturevalue(fixture).config_path, ["target.device=cuda"])
    target = load_target(TargetFiles.find(config.target), config.target)
    stop, prompts = target.model.generation_config.eos_token_id, [[5, 6, 7], list(range(30)), [9]]
    plain = generate_batch(target, prompts, config.completions, stop)
    assert generate_batch(target, prompts, config.completions, stop, static=True) == plain


def test_gpu_memory_that_runs_out_halves_the_batch(tiny, capsys):
    config = load_config(tiny.config_path, ["target.device=cuda"])
    sample = Cache(tiny.folder / "cache").samples[0]
    target = load_target(TargetFiles.find(config.target), config.target)
    held = torch.empty(torch.cuda.mem_get_info()[0] - (600 << 20), dtype=torch.uint8, device="cuda")
    compute = _Halving(lambda rows: forward(target, rows, [0, 5], "float32", None))
    pieces = [len(rows) for rows, _ in compute([sample] * 50_000)]
    del held
    assert sum(pieces) == 50_000
    assert len(pieces) > 1
    assert capsys.readouterr().err.count("out of memory") == 1


def test_linear_attention_runs_on_fla_in_bfloat16_compiled_too(tmp_path, monkeypatch):
    """A hybrid target wide enough for fla's kernels; states agree with the same weights' in float32."""
    pytest.importorskip("fla", reason="flash-linear-attention is not installed")
    from conftest import END, VOCABULARY, tiny_tokenizer
    from transformers import AutoModelForCausalLM, Qwen3_5TextConfig

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        Qwen3_5TextConfig(
            vocab_size=VOCABULARY, hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4,
            num_key_value_heads=2, head_dim=64, linear_num_key_heads=2, linear_num_value_heads=4,
            linear_key_head_dim=64, linear_value_head_dim=64, max_position_embeddings=512, eos_token_id=END,
            bos_token_id=None, pad_token_id=None,
            layer_types=["linear_attention", "linear_attention", "linear_attention", "full_attention"],
        )
    )  # fmt: skip
    target = tmp_path / "target"
    model.save_pretrained(target)
    tiny_tokenizer().save_pretrained(target)
    sections = {"target": {"device": "cuda", "dtype": "bfloat16"}, "extract": {"layers": [0, 2, 3]}}
    path = write_config(tmp_path, target, [], **sections)
    base = model.float().eval().cuda()
    for name, pays in (("eager", 1e17), ("compiled", 0)):
        monkeypatch.setattr("dflash_eval.extract.COMPILING_PAYS", pays)
        config = load_config(path, ["target.require_kernels=[fla]", f"cache_dir={tmp_path / name}"])
        cache = Cache(extract(config, say=lambda _: None))
        assert cache.manifest.provenance["compiled"] == (name == "compiled")
        assert cache.manifest.provenance["kernels"]["chunk_gated_delta_rule"].startswith("fla ")
        for sample in cache.samples:
            with torch.inference_mode():
                states = base(torch.tensor([sample.input_ids]).cuda(), output_hidden_states=True).hidden_states
            for layer in (0, 2):
                ours, theirs = cache.features(sample.id, [layer]).float(), states[layer + 1][0].float().cpu()
                assert torch.cosine_similarity(ours, theirs, dim=-1).min() > 0.999
    compiled = load_target(TargetFiles.find(config.target), config.target)
    compile_layers(compiled, lambda: forward(compiled, cache.samples, [3], "bfloat16", None), pytest.fail)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        forward(compiled, cache.samples, [3], "bfloat16", None)
    assert any("chunk_gated_delta_rule" in event.key for event in profiler.key_averages())


ATTENTION = [  # (slots, heads, key heads, head size), window, causal, window from the anchor; each compiles a kernel
    ((6, 4, 2, 16), None, False, False),
    ((6, 4, 2, 16), 9, True, False),
    ((16, 9, 3, 64), None, True, False),
    ((16, 9, 3, 64), 70, True, False),
    ((16, 32, 8, 128), None, False, False),
    ((16, 32, 8, 128), 9, False, False),
    ((6, 4, 2, 16), 64, True, True),
    ((16, 32, 8, 128), 9, False, True),
]


@pytest.mark.parametrize(("shape", "window", "causal", "from_anchor"), ATTENTION)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_fused_attention_equals_plain_products(shape, window, causal, from_anchor, dtype):
    slots, heads, kv_heads, head_dim = shape
    config = DrafterConfig.from_dict({
        **drafter_json(num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=head_dim),
        "window_from_anchor": from_anchor,
    })  # fmt: skip
    layer = BlockAttention(config, window, causal)
    samples, positions, each = 3, 150, 40
    torch.manual_seed(0)
    context = tuple(torch.randn(samples, kv_heads, positions, head_dim, device="cuda").to(dtype) for _ in range(2))
    query = (torch.randn(samples * each, slots, heads, head_dim, device="cuda") * head_dim**-0.5).to(dtype)
    key, value = (torch.randn(samples * each, slots, kv_heads, head_dim, device="cuda").to(dtype) for _ in range(2))
    anchors = torch.randint(1, positions, (samples * each,), device="cuda")
    lengths = torch.randint(1, slots + 1, (samples * each,), device="cuda")
    group = Group(slice(0, samples), slice(0, samples * each), positions)
    where = anchors[:, None] + torch.arange(slots, device="cuda")
    blocks = Blocks(where, where, where, lengths, [group], group.owners.cuda())
    fused = layer._attend_fused(query, key, value, blocks, context)
    exact = layer._attend(*(x.double() for x in (query, key, value)), blocks, group, tuple(x.double() for x in context))
    assert (fused - exact).norm() / exact.norm() < (1e-5 if dtype == torch.float32 else 1e-2)
    if dtype == torch.bfloat16:  # under autocast what is rotated comes in float32
        mixed = layer._attend_fused(query.float(), key.float(), value, blocks, (context[0].float(), context[1]))
        assert (mixed - fused).norm() / fused.norm() < 1e-2


@pytest.mark.parametrize("vocabulary", [5000, 49152, 248320, 49153])
def test_scores_on_the_gpu_equal_a_full_sort(vocabulary):
    torch.manual_seed(0)
    logits = 3 * torch.randn(37, vocabulary, device="cuda")
    tokens = torch.randint(0, vocabulary, (37,), device="cuda")
    tokens[:20] = logits[:20].topk(20).indices.diagonal()
    logits[5, tokens[5] - 1] = logits[5, tokens[5]]  # a tie that the lower id wins
    ranks, top, ids = rank_rows(logits.clone(), tokens, 1024)
    order = logits.sort(dim=1, descending=True, stable=True)
    places = (order.indices == tokens[:, None]).int().argmax(1)
    assert torch.equal(ranks, places.clamp_max(1024))
    torch.testing.assert_close(top, logits.double().log_softmax(-1).topk(1024).values.float())
    assert torch.equal(logits.gather(1, ids.long()), order.values[:, :1024])
    with pytest.raises(UserError, match="not finite"):
        rank_rows(logits.index_fill(1, torch.tensor([77], device="cuda"), torch.nan), tokens, 1024)


def test_a_16_bit_head_gives_the_ranks_of_its_products_in_float32():
    """bfloat16 logits would tie by the dozen."""
    torch.manual_seed(0)
    drafter = DFlashDrafter(DrafterConfig.from_dict(drafter_json()))
    hidden, head = torch.randn(300, 512).bfloat16().cuda(), torch.randn(30000, 512).bfloat16().cuda()
    tokens = (hidden.float() @ head.float().T).topk(50).indices[:, 49]
    ranks = Scorer(drafter, head, 100).score(hidden, tokens).ranks
    assert ((ranks - 49).abs() <= 1).all()
    assert (ranks == 49).float().mean() > 0.95


def test_expected_tau_on_the_gpu_is_that_of_the_cpu(tiny, tmp_path):
    said = {"temperature": 0.8, "max_new_tokens": 20, "top_p": 0.9}
    path = write_config(tmp_path, tiny.target, [("trained", tiny.drafter)], completions=said)
    config = load_config(path)
    extract(config, say=lambda _: None)
    on_cpu = evaluate(config)["drafters"][0]
    on_gpu = evaluate(load_config(path, ["evaluate.device=cuda"]))["drafters"][0]
    assert on_gpu["samples"] == on_cpu["samples"]
    assert on_gpu["expected_tau"] == pytest.approx(on_cpu["expected_tau"], rel=1e-4)


@pytest.mark.parametrize("kind", ["selector", "markov", "reduced"])
def test_drafters_with_heads_walk_on_the_gpu_as_on_the_cpu(tiny, tmp_path, kind):
    from conftest import VOCABULARY, save_drafter
    from drafters import deepspec_json, head_of, speculators_json
    from safetensors.torch import load_file

    torch.manual_seed(3)
    state = load_file(tiny.drafter / "model.safetensors")
    if kind == "selector":
        sizes = {"selector_rank": 4, "selector_top_k": 5, "conv_kernel_size": 2, "conv_group_size": 8}
        raw = {**tiny.raw, "architectures": ["DFlash2DraftModel"], **sizes}
        for conv in ("attention_conv", "mlp_conv"):
            for layer in (0, 1):
                state[f"layers.{layer}.{conv}.base_kernel"] = torch.tensor([1.0, 0.05])[None, :, None].repeat(2, 1, 32)
                state[f"layers.{layer}.{conv}.kernel_projection.weight"] = 0.02 * torch.randn(16, 32)
        state |= {
            f"candidate_selector.{side}_codebook": torch.randn(VOCABULARY, 4) for side in ("predecessor", "successor")
        }
        state["candidate_selector.hidden_projection.weight"] = 0.3 * torch.randn(4, 32)
    elif kind == "markov":
        raw = deepspec_json(tiny.raw, markov_rank=3, markov_head_type="rnn")
        state |= {"markov_head.markov_w1.weight": torch.randn(VOCABULARY, 3)}
        state |= {"markov_head.markov_w2.weight": torch.randn(VOCABULARY, 3)}
        state |= {
            "markov_head.joint_proj.weight": torch.randn(9, 38) / 4,
            "markov_head.joint_proj.bias": torch.randn(9),
        }
    else:
        raw = speculators_json(tiny.raw, draft_vocab_size=200)
        state |= {"lm_head.weight": head_of(tiny)["lm_head.weight"][:200], "d2t": torch.zeros(200, dtype=torch.int64)}
    path = write_config(
        tmp_path,
        tiny.target,
        [("mine", save_drafter(tmp_path / "d", raw, state))],
        cache_dir=str(tiny.folder / "cache"),
    )
    prompts = f"prompts.source={tiny.folder / 'prompts.jsonl'}"
    on_cpu, on_gpu = (evaluate(load_config(path, [prompts, f"evaluate.device={d}"])) for d in ("cpu", "cuda"))
    assert on_gpu["drafters"][0]["samples"] == on_cpu["drafters"][0]["samples"]
