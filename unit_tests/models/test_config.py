"""Configs of transformers' checkpoints, of versions 4 and 5."""

import contextlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

from models.config import ModelConfig, MoeConfig, RopeConfig, load_model_config
from models.errors import ModelError
from models.layer_types import LayerType
from models.source import ModelSource
from unit_tests.models.builders import tiny_config

LLAMA_31_8B = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 8.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
}
GEMMA3_1B = {
    "architectures": ["Gemma3ForCausalLM"],
    "attention_bias": False,
    "attn_logit_softcapping": None,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "final_logit_softcapping": None,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 1152,
    "intermediate_size": 6912,
    "max_position_embeddings": 32768,
    "num_attention_heads": 4,
    "num_hidden_layers": 26,
    "num_key_value_heads": 1,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06,
    "rope_local_base_freq": 10000,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
    "torch_dtype": "bfloat16",
    "vocab_size": 262144,
}
QWEN3_8B = {
    "architectures": ["Qwen3ForCausalLM"],
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "max_position_embeddings": 40960,
    "max_window_layers": 36,
    "num_attention_heads": 32,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vocab_size": 151936,
}
QWEN3_30B_A3B = {
    **QWEN3_8B,
    "architectures": ["Qwen3MoeForCausalLM"],
    "decoder_sparse_step": 1,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "mlp_only_layers": [],
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
}


def read(directory: Path, data: dict, generation: dict | None = None) -> ModelConfig:
    (directory / "config.json").write_text(json.dumps(data))
    if generation is not None:
        (directory / "generation_config.json").write_text(json.dumps(generation))
    return load_model_config(ModelSource("dummy", directory, (), "m", ()))


def error_of(directory: Path, data: dict) -> str:
    with pytest.raises(ModelError) as caught:
        read(directory, data)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_llama_31_8b(tmp_path):
    config = read(tmp_path, LLAMA_31_8B)
    assert (config.family, config.num_layers, config.num_kv_heads, config.head_dim) == ("llama", 32, 8, 128)
    assert config.rope == RopeConfig("llama3", 500000.0, 128, factor=8.0, original_context=8192)
    assert config.eos_token_ids == (128001, 128008, 128009)
    assert (config.bos_token_id, config.dtype, config.tie_word_embeddings) == (128000, "bfloat16", False)


def test_qwen3_has_head_norms_and_a_head_dim_of_its_own(tmp_path):
    config = read(tmp_path, QWEN3_8B)
    assert (config.qk_norm, config.attention_bias, config.head_dim) == (True, False, 128)
    without = {key: value for key, value in QWEN3_8B.items() if key != "head_dim"} | {"hidden_size": 1024}
    assert read(tmp_path, without).head_dim == 128


def test_qwen3_moe_has_experts(tmp_path):
    config = read(tmp_path, {**QWEN3_30B_A3B, "mlp_only_layers": [3], "decoder_sparse_step": 2})
    assert config.moe == MoeConfig(128, 8, 768, True, sparse_step=2, dense_layers=(3,))
    assert [config.moe.is_sparse(layer) for layer in range(6)] == [False, True, False, False, False, True]


def test_the_number_of_experts_has_two_names(tmp_path):
    data = {key: value for key, value in QWEN3_30B_A3B.items() if key != "num_experts"}
    assert read(tmp_path, {**data, "num_local_experts": 16}).moe.num_experts == 16
    assert "field 'num_experts' is missing" in error_of(tmp_path, data)


def test_qwen2_always_has_biases_on_q_k_and_v_only(tmp_path):
    config = read(tmp_path, {**LLAMA_31_8B, "architectures": ["Qwen2ForCausalLM"]})
    assert (config.attention_bias, config.attention_out_bias, config.qk_norm) == (True, False, False)


def test_llama_with_attention_bias_has_it_on_the_output_too(tmp_path):
    config = read(tmp_path, {**LLAMA_31_8B, "attention_bias": True})
    assert (config.attention_bias, config.attention_out_bias) == (True, True)


def test_ends_of_text_come_from_both_files_without_repeats(tmp_path):
    config = read(tmp_path, {**QWEN3_8B, "eos_token_id": 5}, {"eos_token_id": [7, 5]})
    assert config.eos_token_ids == (7, 5)


def test_rope_parameters_of_transformers_5(tmp_path):
    data = {key: value for key, value in QWEN3_8B.items() if key not in ("rope_theta", "rope_scaling")}
    rope = {"rope_type": "yarn", "rope_theta": 7.0, "factor": 4.0, "original_max_position_embeddings": 32768}
    config = read(tmp_path, {**data, "rope_parameters": rope})
    assert config.rope == RopeConfig("yarn", 7.0, 128, factor=4.0, original_context=32768)


def test_linear_rope_of_transformers_4_uses_the_key_type(tmp_path):
    config = read(tmp_path, {**LLAMA_31_8B, "rope_scaling": {"type": "linear", "factor": 2}})
    assert config.rope == RopeConfig("linear", 500000.0, 128, factor=2.0)


@pytest.mark.parametrize("kind", ["dynamic", "longrope", "mystery"])
def test_a_rope_type_that_depends_on_the_length_is_refused(tmp_path, kind):
    message = error_of(tmp_path, {**LLAMA_31_8B, "rope_scaling": {"rope_type": kind, "factor": 2.0}})
    assert f"rope type '{kind}' is not supported" in message


def test_an_unknown_architecture_is_named_with_the_known_ones(tmp_path):
    message = error_of(tmp_path, {**LLAMA_31_8B, "architectures": ["BertModel"]})
    assert "'BertModel'" in message
    assert "LlamaForCausalLM" in message


@pytest.mark.parametrize("field", ["hidden_size", "num_hidden_layers", "vocab_size", "architectures"])
def test_a_missing_field_is_named(tmp_path, field):
    message = error_of(tmp_path, {key: value for key, value in LLAMA_31_8B.items() if key != field})
    assert f"'{field}' is missing" in message


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"hidden_size": "big"}, "'hidden_size' must be a number"),
        ({"num_attention_heads": 30}, "cannot be shared evenly"),
        ({"num_hidden_layers": 0}, "num_layers must be positive"),
        ({"hidden_act": "gelu"}, "'gelu' is not supported"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        ({"torch_dtype": "int4"}, "'int4' is not supported"),
        ({"eos_token_id": "end"}, "'eos_token_id' must hold token ids"),
    ],
)
def test_what_cannot_be_served_is_one_clear_line(tmp_path, change, part):
    assert part in error_of(tmp_path, {**LLAMA_31_8B, **change})


@pytest.mark.parametrize(
    ("change", "windowed"),
    [
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 4096}, range(32)),
        (
            {
                "architectures": ["Qwen2ForCausalLM"],
                "sliding_window": 4096,
                "use_sliding_window": True,
                "max_window_layers": 9,
            },
            range(9, 32),
        ),
        (
            {
                "architectures": ["Qwen3ForCausalLM"],
                "sliding_window": 64,
                "layer_types": ["sliding_attention", "full_attention"] * 16,
            },
            range(0, 32, 2),
        ),
    ],
)
def test_layers_with_a_sliding_window(tmp_path, change, windowed):
    config = read(tmp_path, {**LLAMA_31_8B, **change})
    assert config.window == change["sliding_window"]
    assert [layer for layer in range(32) if config.layer_type(layer) is LayerType.WINDOW] == list(windowed)
    assert ModelConfig.from_dict(config.to_dict()) == config


def test_gemma3_as_the_hub_has_it(tmp_path):
    """The fields of google/gemma-3-1b-pt."""
    config = read(tmp_path, GEMMA3_1B)
    assert [layer for layer in range(26) if config.layer_type(layer) is LayerType.FULL] == [5, 11, 17, 23]
    assert (config.window, config.qk_norm, config.tie_word_embeddings, config.norm_offset) == (512, True, True, 1.0)
    assert config.rope == RopeConfig("default", 1_000_000.0, 256)
    assert config.window_rope == RopeConfig("default", 10_000.0, 256)
    assert (config.query_scale, config.embedding_scale) == (1 / 16, 1152**0.5)
    scaled = read(tmp_path, {**GEMMA3_1B, "rope_scaling": {"rope_type": "linear", "factor": 8.0}})
    assert scaled.rope == RopeConfig("linear", 1_000_000.0, 256, factor=8.0)
    assert scaled.window_rope == config.window_rope
    assert "softcapping" in error_of(tmp_path, {**GEMMA3_1B, "final_logit_softcapping": 30.0})
    assert "'silu' is not supported" in error_of(tmp_path, {**GEMMA3_1B, "hidden_activation": "silu"})


@pytest.mark.parametrize(
    "change",
    [
        {"architectures": ["MistralForCausalLM"], "sliding_window": None},
        {"architectures": ["MistralForCausalLM"], "sliding_window": 131072},
        {"architectures": ["Qwen2ForCausalLM"], "sliding_window": 4096, "use_sliding_window": False},
        {
            "architectures": ["Qwen2ForCausalLM"],
            "sliding_window": 64,
            "use_sliding_window": True,
            "max_window_layers": 32,
        },
    ],
)
def test_a_window_that_no_layer_uses_is_no_obstacle(tmp_path, change):
    assert read(tmp_path, {**LLAMA_31_8B, **change}).num_layers == 32


@pytest.mark.parametrize("value", [None, "x", [], {}, ["x"], -1, 0, 1.5, True, float("inf"), 10**30])
def test_any_nonsense_in_any_field_is_a_model_error_or_harmless(tmp_path, value):
    yarn = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 7.0, "original_max_position_embeddings": 9}
    for base in (LLAMA_31_8B, {**QWEN3_30B_A3B, "rope_scaling": yarn}):
        for field in base:
            changed = {**base, field: value}
            if field == "rope_scaling":
                for inner in base[field]:
                    try_to_read(tmp_path, {**base, field: {**base[field], inner: value}})
            try_to_read(tmp_path, changed)


def try_to_read(directory: Path, data: dict) -> None:
    with contextlib.suppress(ModelError):
        config = read(directory, data)
        assert ModelConfig.from_dict(config.to_dict()) == config


def test_a_missing_or_broken_file_is_one_line(tmp_path):
    with pytest.raises(ModelError, match=r"config\.json is missing"):
        load_model_config(ModelSource("dummy", tmp_path, (), "m", ()))
    for text in ("{", "[]"):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ModelError, match="config"):
            load_model_config(ModelSource("dummy", tmp_path, (), "m", ()))


def test_a_config_crosses_processes_as_plain_data(tmp_path):
    for config in (read(tmp_path, QWEN3_30B_A3B), read(tmp_path, LLAMA_31_8B), tiny_config()):
        assert ModelConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    with pytest.raises(ModelError, match="model config"):
        ModelConfig.from_dict({"family": "llama"})


@pytest.mark.parametrize("module", ["config_gguf", "config_hf", "source", "pull", "state_layout", "weights_digest"])
def test_light_modules_do_not_import_torch(module):
    code = f"import sys, models.{module}; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
