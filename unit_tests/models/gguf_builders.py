"""Writes small GGUF files out of transformers models, the way that llama.cpp's converter names and orders tensors."""

from pathlib import Path

import gguf
import numpy as np
import torch
import transformers
from gguf.constants import GGMLQuantizationType

ARCHITECTURES = {
    "llama": "llama",
    "mistral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe",
    "gemma3": "gemma3",
}
_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
}


_GEMMA_NAMES = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


def interleave_heads(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows of each head from half-split to interleaved order, as the converter does for llama's q and k."""
    split = weight.reshape(num_heads, 2, weight.shape[0] // num_heads // 2, *weight.shape[1:])
    return np.ascontiguousarray(split.swapaxes(1, 2).reshape(weight.shape))


def gguf_tensors(model: transformers.PreTrainedModel, family: str) -> dict[str, np.ndarray]:
    """Name and float32 values of every tensor as they stand in the file."""
    config, found = model.config, {}
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    tied = config.tie_word_embeddings
    for name, weight in model.state_dict().items():
        values = weight.float().numpy()
        if family == "gemma3" and "norm" in name:
            values = values + 1
        if name.startswith("model.layers."):
            _, _, layer, rest = name.split(".", 3)
            permuted = heads if family in ("llama", "mistral") else {}
            names = {**_NAMES, **(_GEMMA_NAMES if family == "gemma3" else {})}
            found.update(_layer_tensors(f"blk.{layer}", rest, values, permuted, names))
        elif not (tied and name == "lm_head.weight"):
            stem, kind = name.rsplit(".", 1)
            found[f"{_NAMES[stem]}.{kind}"] = values
    return found


def _layer_tensors(
    prefix: str, rest: str, values: np.ndarray, heads: dict[str, int], names: dict[str, str]
) -> dict[str, np.ndarray]:
    if rest == "mlp.experts.gate_up_proj":
        gate, up = np.split(values, 2, axis=1)
        return {f"{prefix}.ffn_gate_exps.weight": gate, f"{prefix}.ffn_up_exps.weight": up}
    if rest == "mlp.experts.down_proj":
        return {f"{prefix}.ffn_down_exps.weight": values}
    stem, kind = rest.rsplit(".", 1)
    part = names[stem]
    if part in heads:
        values = interleave_heads(values, heads[part])
    return {f"{prefix}.{part}.{kind}": values}


def write_gguf(
    model: transformers.PreTrainedModel,
    family: str,
    path: Path,
    quant: GGMLQuantizationType = GGMLQuantizationType.F32,
    extra: dict[str, np.ndarray] | None = None,
    without: tuple[str, ...] = (),
) -> dict[str, np.ndarray]:
    """Write the model with its matrices in `quant`; returns the written tensors, dequantized again."""
    config, architecture = model.config, ARCHITECTURES[family]
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    ropes = config.rope_parameters
    writer.add_rope_freq_base(ropes.get("full_attention", ropes)["rope_theta"])
    if family == "gemma3":
        writer.add_sliding_window(config.sliding_window)
    writer.add_key_length(model.model.layers[0].self_attn.head_dim)
    writer.add_value_length(model.model.layers[0].self_attn.head_dim)
    writer.add_file_type(0 if quant is GGMLQuantizationType.F32 else 1)
    writer.add_token_list([f"token{index}" for index in range(config.vocab_size)])
    writer.add_eos_token_id(2)
    writer.add_eot_token_id(9)
    writer.add_bos_token_id(1)
    if family == "qwen3_moe":
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    written = {}
    for name, values in {**gguf_tensors(model, family), **(extra or {})}.items():
        if name in without:
            continue
        kind = quant if values.ndim > 1 else GGMLQuantizationType.F32
        packed = gguf.quants.quantize(values, kind)
        writer.add_tensor(name, packed, raw_dtype=kind)
        written[name] = gguf.quants.dequantize(packed, kind).astype(np.float32).reshape(values.shape)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return written


def state_dict_of(written: dict[str, np.ndarray], model: transformers.PreTrainedModel) -> dict[str, torch.Tensor]:
    """transformers' llama state dict out of the tensors of a llama GGUF file."""
    stems = {short: long for long, short in _NAMES.items()}
    heads = {"attn_q": model.config.num_attention_heads, "attn_k": model.config.num_key_value_heads}
    found = {}
    for name, values in written.items():
        if name.startswith("blk."):
            _, layer, part, kind = name.split(".")
            if part in heads:
                values = restore_heads(values, heads[part])
            found[f"model.layers.{layer}.{stems[part]}.{kind}"] = torch.from_numpy(values)
        else:
            stem, kind = name.rsplit(".", 1)
            found[f"{stems[stem]}.{kind}"] = torch.from_numpy(values)
    if model.config.tie_word_embeddings:
        found["lm_head.weight"] = found["model.embed_tokens.weight"]
    return found


def restore_heads(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """The inverse of `interleave_heads`."""
    split = weight.reshape(num_heads, weight.shape[0] // num_heads // 2, 2, *weight.shape[1:])
    return np.ascontiguousarray(split.swapaxes(1, 2).reshape(weight.shape))
