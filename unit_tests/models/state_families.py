"""Tiny random models of transformers whose layers keep other states than keys and values of all tokens.

Random weights of the usual size hardly depend on a recurrent state or on old tokens; these are made to.
"""

import copy
from pathlib import Path
from typing import Any

import torch
import transformers

from unit_tests.models.builders import TINY

COMMON = {**TINY, "max_position_embeddings": 4096}
MLA = {
    **{key: value for key, value in COMMON.items() if key != "head_dim"},
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": 48,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 24,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "num_hidden_layers": 3,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
    "mscale": 0.8,
    "mscale_all_dim": 1.2,
}
DELTA = {
    **COMMON,
    "num_hidden_layers": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "linear_conv_kernel_dim": 4,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
}
EXPERTS = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 64,
}
WINDOWS = {**COMMON, "sliding_window": 32}
GEMMA = {
    **WINDOWS,
    "num_hidden_layers": 3,
    "query_pre_attn_scalar": 24,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
}
COMPRESSED = {
    **{key: value for key, value in COMMON.items() if key != "intermediate_size"},
    "num_hidden_layers": 4,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "q_lora_rank": 32,
    "moe_intermediate_size": 32,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": 16,
    "o_groups": 2,
    "o_lora_rank": 16,
    "index_n_heads": 32,  # with few, many scores are exactly 0, and the choice among equals is anybody's
    "index_head_dim": 16,
    "index_topk": 8,
    "hc_mult": 2,
    "hc_sinkhorn_iters": 3,
    "partial_rotary_factor": 0.25,
    "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 16},
    "layer_types": [
        "sliding_attention",
        "heavily_compressed_attention",
        "compressed_sparse_attention",
        "heavily_compressed_attention",
    ],
    "mlp_layer_types": ["hash_moe", "moe", "moe", "moe"],
}
OSS = {
    **WINDOWS,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "intermediate_size": 32,
    "rope_parameters": {"rope_type": "default", "rope_theta": 150000.0},
}
LFM = {
    **{key: value for key, value in COMMON.items() if key != "head_dim"},
    "num_hidden_layers": 4,
    "layer_types": ["conv", "full_attention", "conv", "conv"],
    "conv_L_cache": 3,
    "intermediate_size": 192,
    "block_multiple_of": 32,
}
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "deepseek_v2": ("DeepseekV2Config", "DeepseekV2ForCausalLM", {**MLA, "topk_method": "group_limited_greedy"}),
    "deepseek_v2_lite": (
        "DeepseekV2Config",
        "DeepseekV2ForCausalLM",
        {**MLA, "topk_method": "greedy", "q_lora_rank": None, "rope_parameters": YARN},
    ),
    "deepseek_v3": ("DeepseekV3Config", "DeepseekV3ForCausalLM", {**MLA, "rope_parameters": YARN}),
    "deepseek_v3_halves": (
        "DeepseekV3Config",
        "DeepseekV3ForCausalLM",
        {**MLA, "rope_interleave": False, "norm_topk_prob": False},
    ),
    "qwen3_next": ("Qwen3NextConfig", "Qwen3NextForCausalLM", {**DELTA, **EXPERTS}),
    "qwen3_next_mixed": (
        "Qwen3NextConfig",
        "Qwen3NextForCausalLM",
        {**DELTA, **EXPERTS, "mlp_only_layers": [1], "linear_num_value_heads": 2, "linear_conv_kernel_dim": 3},
    ),
    "qwen3_5": ("Qwen3_5TextConfig", "Qwen3_5ForCausalLM", {**DELTA, "tie_word_embeddings": True}),
    "gemma3": ("Gemma3TextConfig", "Gemma3ForCausalLM", GEMMA),
    "gemma3_linear_rope": (
        "Gemma3TextConfig",
        "Gemma3ForCausalLM",
        {
            **GEMMA,
            "sliding_window": 100,
            "num_key_value_heads": 1,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
    "gpt_oss": ("GptOssConfig", "GptOssForCausalLM", OSS),
    "gpt_oss_yarn": (
        "GptOssConfig",
        "GptOssForCausalLM",
        {
            **OSS,
            "num_hidden_layers": 3,
            "sliding_window": 128,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 150000.0,
                "factor": 32.0,
                "original_max_position_embeddings": 128,
                "truncate": False,
            },
        },
    ),
    "lfm2": ("Lfm2Config", "Lfm2ForCausalLM", LFM),
    "mistral": ("MistralConfig", "MistralForCausalLM", WINDOWS),
    "qwen3_window": (
        "Qwen3Config",
        "Qwen3ForCausalLM",
        {**WINDOWS, "use_sliding_window": True, "max_window_layers": 1, "num_hidden_layers": 3},
    ),
    "qwen3_5_moe": ("Qwen3_5MoeTextConfig", "Qwen3_5MoeForCausalLM", {**DELTA, **EXPERTS}),
    "deepseek_v4": ("DeepseekV4Config", "DeepseekV4ForCausalLM", COMPRESSED),
    "deepseek_v4_published": (
        "DeepseekV4Config",
        "DeepseekV4ForCausalLM",
        {
            **COMPRESSED,
            "compress_rates": None,
            "sliding_window": 128,
            "swiglu_limit": 0.05,
            "rope_parameters": {key: YARN[key] for key in ("rope_type", "factor", "original_max_position_embeddings")},
            "layer_types": ["heavily_compressed_attention", "compressed_sparse_attention"] * 2,
        },
    ),
}
FAMILIES = (
    "gemma3",
    "gpt_oss",
    "lfm2",
    "mistral",
    "deepseek_v2",
    "deepseek_v3",
    "qwen3_next",
    "qwen3_5",
    "deepseek_v4",
)


def build(case: str, **changes: Any) -> transformers.PreTrainedModel:
    """transformers' model of `case` in float32 with weights that depend on their state."""
    config_name, model_name, settings = CASES[case]
    config = getattr(transformers, config_name)(**copy.deepcopy({**settings, **changes}))
    torch.manual_seed(0)
    model = getattr(transformers, model_name)(config).eval()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            _strengthen(name, weight, generator)
        for name, table in model.named_buffers():
            if "correction_bias" in name:
                table.copy_(0.2 * torch.randn(table.shape, generator=generator))
            elif "tid2eid" in name:
                table.copy_(torch.rand(table.shape[0], 4, generator=generator).argsort(dim=1)[:, : table.shape[1]])
    return model


def _strengthen(name: str, weight: torch.Tensor, generator: torch.Generator) -> None:
    if name.endswith("A_log"):
        weight.fill_(-4.0)
    elif name.endswith("dt_bias"):
        weight.copy_(0.5 + 0.3 * torch.randn(weight.shape, generator=generator))
    elif "conv1d" in name or "conv.conv" in name:
        weight.copy_(0.5 * torch.randn(weight.shape, generator=generator))
    elif name.endswith(("position_bias", "sinks", "base")):
        weight.copy_(0.3 * torch.randn(weight.shape, generator=generator))
    elif name.endswith(("sinks", "bias")):
        weight.copy_(0.5 * torch.randn(weight.shape, generator=generator))
    elif "norm" in name:
        weight.add_(0.3 * torch.randn(weight.shape, generator=generator))
    elif weight.dim() >= 2 and "lm_head" not in name:
        weight.mul_(5.0)


def save(model: transformers.PreTrainedModel, directory: Path) -> Path:
    """Write it as its checkpoints are written."""
    model.save_pretrained(directory)
    return directory


def some_tokens(count: int, seed: int) -> list[int]:
    return torch.randint(3, 256, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def logits_of(model: transformers.PreTrainedModel, tokens: list[int]) -> torch.Tensor:
    """float32 [len(tokens), vocab], in one pass."""
    with torch.no_grad():
        return model(torch.tensor([tokens])).logits[0].float()


def greedy(model: transformers.PreTrainedModel, prompt: list[int], count: int) -> list[int]:
    """The tokens that transformers' own cache gives."""
    settings = {"max_new_tokens": count, "do_sample": False, "eos_token_id": None, "use_cache": True}
    return model.generate(torch.tensor([prompt]), **settings)[0, len(prompt) :].tolist()
