"""GGUF files written by the gguf library: logits against transformers, parts of ranks, what is refused."""

import numpy as np
import pytest
import torch
from gguf.constants import GGMLQuantizationType

from models.config import load_model_config
from models.errors import ModelError
from models.source import resolve_model
from unit_tests.models.builders import PagedRunner, ThreadGroup, hf_logits, hf_model, load
from unit_tests.models.gguf_builders import state_dict_of, write_gguf
from unit_tests.models.state_families import build, logits_of

Quant = GGMLQuantizationType
TOKENS = [1, 17, 99, 4, 200, 31, 8, 77, 250, 63, 12, 5, 140, 141, 7, 90, 33, 21, 19]
ROWS_OF_BLOCKS = [Quant.Q4_0, Quant.Q4_1, Quant.Q5_0, Quant.Q5_1, Quant.Q8_0, Quant.F16, Quant.BF16]


def assert_close(ours: torch.Tensor, reference: torch.Tensor) -> None:
    assert (ours - reference).abs().max() <= 1e-4 * reference.abs().max()


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {}),
        ("llama", {"tie_word_embeddings": True}),
        ("llama", {"attention_bias": True}),
        ("qwen2", {}),
        ("qwen3", {}),
        ("qwen3_moe", {"norm_topk_prob": True}),
    ],
)
def test_every_family_gives_the_logits_of_transformers(family, changes, tmp_path):
    model = hf_model(family, **changes)
    write_gguf(model, family, tmp_path / "m.gguf")
    runner = PagedRunner(load(tmp_path / "m.gguf").model)
    assert_close(runner.step([(0, TOKENS)]), hf_logits(model, TOKENS))


def test_gemma3_has_norms_with_one_added_and_a_period_of_six_layers(tmp_path):
    model = build("gemma3", layer_types=None, num_hidden_layers=7, query_pre_attn_scalar=16, sliding_window=8)
    write_gguf(model, "gemma3", tmp_path / "m.gguf")
    runner = PagedRunner(load(tmp_path / "m.gguf").model)
    assert runner.model.groups == ["window"] * 5 + ["full", "window"]
    assert_close(runner.step([(0, TOKENS)]), logits_of(model, TOKENS))


@pytest.mark.parametrize("quant", ROWS_OF_BLOCKS, ids=lambda quant: quant.name)
def test_quantized_weights_are_those_that_the_library_reads(quant, tmp_path):
    model = hf_model("llama", hidden_size=96, num_attention_heads=6, num_key_value_heads=3)
    written = write_gguf(model, "llama", tmp_path / "m.gguf", quant)
    model.load_state_dict(state_dict_of(written, model))
    reference = hf_logits(model, TOKENS)
    assert_close(PagedRunner(load(tmp_path / "m.gguf").model).step([(0, TOKENS)]), reference)

    def work(tp):
        return PagedRunner(load(tmp_path / "m.gguf", tp=tp).model).step([(0, TOKENS)])

    for ours in ThreadGroup(2).run(work):
        assert_close(ours, reference)


def test_columns_that_end_within_a_block_are_cut_after_dequantizing(tmp_path):
    model = hf_model("llama", num_attention_heads=4, num_key_value_heads=4, head_dim=24)
    written = write_gguf(model, "llama", tmp_path / "m.gguf", Quant.Q8_0)
    model.load_state_dict(state_dict_of(written, model))

    def work(tp):
        return PagedRunner(load(tmp_path / "m.gguf", tp=tp).model).step([(0, TOKENS)])

    for ours in ThreadGroup(3).run(work):
        assert_close(ours, hf_logits(model, TOKENS))


def test_experts_of_ranks(tmp_path):
    model = hf_model("qwen3_moe", norm_topk_prob=True, moe_intermediate_size=64)
    write_gguf(model, "qwen3_moe", tmp_path / "m.gguf")

    def work(tp):
        return PagedRunner(load(tmp_path / "m.gguf", tp=tp).model).step([(0, TOKENS)])

    for ours in ThreadGroup(2).run(work):
        assert_close(ours, hf_logits(model, TOKENS))


def test_llama3_scaling_comes_from_the_tensor_of_divisors(tmp_path):
    rope = {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    model = hf_model("llama", rope_parameters=rope)
    plain = 1.0 / (10000.0 ** (np.arange(0, 16, 2, dtype=np.float32) / 16))
    factors = (plain / model.model.rotary_emb.inv_freq.numpy()).astype(np.float32)
    write_gguf(model, "llama", tmp_path / "m.gguf", extra={"rope_freqs.weight": factors})
    config = load_model_config(resolve_model(str(tmp_path / "m.gguf")))
    assert config.rope.frequency_factors == tuple(factors.tolist())
    long = [index % 250 + 3 for index in range(150)]
    assert_close(PagedRunner(load(tmp_path / "m.gguf").model).step([(0, long)]), hf_logits(model, long))


def test_missing_and_unknown_tensors_are_named(tmp_path):
    model = hf_model("llama")
    write_gguf(model, "llama", tmp_path / "missing.gguf", without=("blk.1.ffn_up.weight",))
    with pytest.raises(ModelError, match=r"1 tensors are missing: model\.layers\.1\.mlp\.up_proj\.weight"):
        load(tmp_path / "missing.gguf")
    extra = {"blk.0.attn_sinks.weight": np.zeros(4, np.float32)}
    write_gguf(model, "llama", tmp_path / "extra.gguf", extra=extra)
    with pytest.raises(ModelError, match=r"not part of this architecture: blk\.0\.attn_sinks\.weight"):
        load(tmp_path / "extra.gguf")


def test_progress_ends_at_the_total(tmp_path):
    write_gguf(hf_model("llama"), "llama", tmp_path / "m.gguf")
    seen = []
    load(tmp_path / "m.gguf", progress=lambda *event: seen.append(event))
    for phase in ("weights", "digest"):
        done = [event[1] for event in seen if event[0] == phase]
        assert done == sorted(done)
        assert done[-1] == next(event[2] for event in seen if event[0] == phase)
