"""Config of a GGUF file: the only reader of GGUF metadata keys that describe the model."""

import struct
from dataclasses import replace
from pathlib import Path

from models.config import ModelConfig, MoeConfig, RopeConfig, check_config
from models.errors import ModelError
from models.gguf_file import GgufFile
from models.layer_types import LayerType
from models.registry import family_of

_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3moe": "Qwen3MoeForCausalLM",
}
_END_FIELDS = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")
_FILE_TYPE_F32 = 0
_GEMMA3_PERIOD = 6
_GEMMA3_27B_LAYERS = 62


class _Fields:
    """Metadata of one architecture, with errors that name the key."""

    def __init__(self, file: GgufFile, prefix: str) -> None:
        self.file = file
        self.prefix = prefix

    def get(self, name: str, default=None):
        return self.file.fields.get(f"{self.prefix}.{name}", default)

    def number(self, name: str, default: float | None = None):
        value = self.get(name, default)
        if value is None:
            raise ModelError(f"{self.file.path}: field '{self.prefix}.{name}' is missing")
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise ModelError(f"{self.file.path}: field '{self.prefix}.{name}' is not a number")
        return value


def read_gguf_config(path: Path) -> ModelConfig:
    """The config of the GGUF file at `path`; ModelError if a field is missing or the architecture is unknown."""
    file = GgufFile(path)
    prefix = str(file.fields.get("general.architecture", ""))
    if not prefix:
        raise ModelError(f"{path}: field 'general.architecture' is missing")
    architecture = _ARCHITECTURES.get(prefix, prefix)
    family = family_of(architecture)
    fields = _Fields(file, prefix)
    if file.fields.get("split.count", 1) != 1:
        raise ModelError(
            f"{path}: is one of {file.fields['split.count']} parts; GGUF files in parts are not supported yet"
        )
    if fields.get("attention.sliding_window") and prefix != "gemma3":
        raise ModelError(f"{path}: sliding-window attention ({prefix}) is not supported yet")
    moe = _read_moe(fields)
    if moe is not None and prefix != "qwen3moe":
        raise ModelError(f"{path}: experts in architecture {prefix!r} are not supported yet")
    hidden, heads = fields.number("embedding_length"), fields.number("attention.head_count")
    head_dim = fields.number("attention.key_length", hidden // max(heads, 1))
    if fields.get("attention.value_length", head_dim) != head_dim:
        raise ModelError(f"{path}: key and value heads of different size are not supported")
    config = ModelConfig(
        architecture=architecture,
        family=family,
        vocab_size=_vocab_size(file, fields),
        hidden_size=hidden,
        intermediate_size=fields.number("feed_forward_length", moe.intermediate_size if moe else None),
        num_layers=fields.number("block_count"),
        num_q_heads=heads,
        num_kv_heads=fields.number("attention.head_count_kv", heads),
        head_dim=head_dim,
        rms_norm_eps=_shortest_float(fields.number("attention.layer_norm_rms_epsilon")),
        rope=_read_rope(fields, head_dim),
        max_position_embeddings=fields.number("context_length"),
        tie_word_embeddings="output.weight" not in file.tensors,
        attention_bias="blk.0.attn_q.bias" in file.tensors,
        attention_out_bias="blk.0.attn_output.bias" in file.tensors,
        qk_norm="blk.0.attn_q_norm.weight" in file.tensors,
        moe=moe,
        eos_token_ids=_end_tokens(file),
        bos_token_id=file.fields.get("tokenizer.ggml.bos_token_id"),
        dtype="float32" if file.fields.get("general.file_type") == _FILE_TYPE_F32 else "bfloat16",
    )
    if prefix == "gemma3":
        config = _with_gemma3(fields, config)
    return check_config(config, str(path))


def _with_gemma3(fields: _Fields, config: ModelConfig) -> ModelConfig:
    """What llama.cpp knows of gemma3 beyond the file: its converter adds one to norm weights, and of six layers five
    have a window with a rotation of its own."""
    layers = range(1, config.num_layers + 1)
    return replace(
        config,
        layer_types=tuple(LayerType.WINDOW if layer % _GEMMA3_PERIOD else LayerType.FULL for layer in layers),
        window=fields.number("attention.sliding_window"),
        window_rope=RopeConfig("default", fields.number("rope.freq_base_swa", 10000.0), config.head_dim),
        query_scale=_gemma3_query_width(config) ** -0.5,
        embedding_scale=config.hidden_size**0.5,
    )


def _gemma3_query_width(config: ModelConfig) -> int:
    """The 27B model alone scales queries by its hidden size a head instead of by the head's size."""
    return config.hidden_size // config.num_q_heads if config.num_layers == _GEMMA3_27B_LAYERS else config.head_dim


def _shortest_float(value: float) -> float:
    """1e-05 for the float32 9.999999747378752e-06: GGUF rounds what the original config gives in decimal."""
    for digits in range(1, 9):
        candidate = float(f"{value:.{digits}g}")
        if struct.pack("<f", candidate) == struct.pack("<f", value):
            return candidate
    return value


def _vocab_size(file: GgufFile, fields: _Fields) -> int:
    table = file.tensors.get("token_embd.weight")
    if table is not None and len(table.shape) == 2:
        return table.shape[0]
    return fields.number("vocab_size")


def _end_tokens(file: GgufFile) -> tuple[int, ...]:
    found = [file.fields[name] for name in _END_FIELDS if name in file.fields]
    return tuple(dict.fromkeys(found))


def _read_moe(fields: _Fields) -> MoeConfig | None:
    if not fields.get("expert_count"):
        return None
    return MoeConfig(
        num_experts=fields.number("expert_count"),
        top_k=fields.number("expert_used_count"),
        intermediate_size=fields.number("expert_feed_forward_length"),
        norm_topk_prob=True,  # what llama.cpp does for qwen3moe; the file does not say
    )


def _read_rope(fields: _Fields, head_dim: int) -> RopeConfig:
    kind = fields.get("rope.scaling.type", "none")
    theta = _shortest_float(fields.number("rope.freq_base", 10000.0))
    rotary_dim = fields.number("rope.dimension_count", head_dim)
    if kind == "none" and fields.get("rope.scale_linear"):
        return RopeConfig("linear", theta, rotary_dim, factor=_shortest_float(fields.number("rope.scale_linear")))
    if kind in ("none", "linear"):
        factor = fields.number("rope.scaling.factor", 1.0) if kind == "linear" else 1.0
        name = "linear" if kind == "linear" else "default"
        return RopeConfig(name, theta, rotary_dim, factor=factor, frequency_factors=_frequency_factors(fields.file))
    if kind == "yarn":
        return RopeConfig(
            "yarn",
            theta,
            rotary_dim,
            factor=fields.number("rope.scaling.factor"),
            original_context=fields.number("rope.scaling.original_context_length", fields.number("context_length")),
            beta_fast=fields.number("rope.scaling.yarn_beta_fast", 32.0),
            beta_slow=fields.number("rope.scaling.yarn_beta_slow", 1.0),
        )
    raise ModelError(f"{fields.file.path}: rope scaling type {kind!r} is not supported")


def _frequency_factors(file: GgufFile) -> tuple[float, ...] | None:
    """Tensor rope_freqs.weight: llama3's scaling, written out by the converter as one divisor a frequency."""
    tensor = file.tensors.get("rope_freqs.weight")
    if tensor is None:
        return None
    return struct.unpack(f"<{tensor.num_bytes // 4}f", file.bytes_of(tensor))
