"""On a GPU: the same walks as on the CPU, and the kernels that the manifest names."""

from __future__ import annotations

import pytest
import torch
from conftest import write_config

from dflash_eval.cache import Cache
from dflash_eval.config import load_config
from dflash_eval.evaluate import evaluate
from dflash_eval.extract import extract

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


def test_linear_attention_runs_on_fla_in_bfloat16(tmp_path):
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
    cache = Cache(extract(load_config(path, ["target.require_kernels=[fla]"]), say=lambda _: None))
    assert cache.manifest.provenance["kernels"]["chunk_gated_delta_rule"].startswith("fla ")
    base = model.float().eval().cuda()
    for sample in cache.samples:
        with torch.inference_mode():
            states = base(torch.tensor([sample.input_ids]).cuda(), output_hidden_states=True).hidden_states
        for layer in (0, 2):
            ours, theirs = cache.features(sample.id, [layer]).float(), states[layer + 1][0].float().cpu()
            assert torch.cosine_similarity(ours, theirs, dim=-1).min() > 0.999
