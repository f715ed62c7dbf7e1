"""Config of a checkpoint directory: the only reader of field names of transformers' config.json (versions 4 and 5)."""

import json
import math
from pathlib import Path
from typing import Any

from models.config import ModelConfig, MoeConfig, RopeConfig, check_config
from models.errors import ModelError
from models.registry import family_of

_ROPE_TYPES = ("default", "linear", "llama3", "yarn")
_DTYPES = ("float32", "bfloat16", "float16")
_QWEN3_HEAD_DIM = 128  # Qwen3Config's default where config.json leaves it out
_REFUSED = {"mlp_bias": "biases in the MLP", "quantization_config": "checkpoints quantized in this way"}


class HfFields:
    """Fields of one JSON object, with errors that name the file and the field."""

    def __init__(self, data: dict[str, Any], where: str) -> None:
        self.data = data
        self.where = where

    def get(self, *names: str) -> Any:
        """The first of `names` that is present and not null, else None."""
        for name in names:
            if self.data.get(name) is not None:
                return self.data[name]
        return None

    def number(self, *names: str, default: float | None = None, kind: type = int) -> Any:
        """A number of `kind`; ModelError if it is missing without a default or of another type."""
        value = self.get(*names)
        if value is None:
            value = default
        if value is None:
            raise ModelError(f"{self.where}: field '{names[0]}' is missing")
        allowed = (int, float) if kind is float else (int,)
        if isinstance(value, bool) or not isinstance(value, allowed):
            raise ModelError(f"{self.where}: field '{names[0]}' must be a number, not {value!r}")
        if not math.isfinite(value):
            raise ModelError(f"{self.where}: field '{names[0]}' must be finite")
        return kind(value)


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`; ModelError if it is missing or is something else."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{path.parent}: {path.name} is missing") from None
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: cannot be read ({error})") from None
    if not isinstance(data, dict):
        raise ModelError(f"{path}: is not a JSON object")
    return data


def read_hf_config(directory: Path) -> ModelConfig:
    """The config of checkpoint `directory`; ModelError names the field or architecture that is missing or unknown."""
    path = directory / "config.json"
    fields = HfFields(read_json(path), str(path))
    architecture = _architecture(fields)
    family = family_of(architecture)
    for name, what in _REFUSED.items():
        if fields.get(name):
            raise ModelError(f"{path}: {what} ({name}) are not supported yet")
    if fields.get("hidden_act") not in (None, "silu"):
        raise ModelError(f"{path}: field 'hidden_act': {fields.get('hidden_act')!r} is not supported (silu is)")
    _refuse_sliding_window(fields, family, architecture)
    heads, head_dim = fields.number("num_attention_heads"), _head_dim(fields, family)
    bias = bool(fields.get("attention_bias"))
    config = ModelConfig(
        architecture=architecture,
        family=family,
        vocab_size=fields.number("vocab_size"),
        hidden_size=fields.number("hidden_size"),
        intermediate_size=fields.number("intermediate_size"),
        num_layers=fields.number("num_hidden_layers"),
        num_q_heads=heads,
        num_kv_heads=fields.number("num_key_value_heads", default=heads),
        head_dim=head_dim,
        rms_norm_eps=fields.number("rms_norm_eps", default=1e-6, kind=float),
        rope=_read_rope(fields, head_dim),
        max_position_embeddings=fields.number("max_position_embeddings"),
        tie_word_embeddings=bool(fields.get("tie_word_embeddings")),
        attention_bias=bias or family == "qwen2",
        attention_out_bias=bias and family != "qwen2",
        qk_norm=family in ("qwen3", "qwen3_moe"),
        moe=_read_moe(fields) if family == "qwen3_moe" else None,
        eos_token_ids=_end_tokens(fields, directory),
        bos_token_id=fields.number("bos_token_id") if fields.get("bos_token_id") is not None else None,
        dtype=_dtype(fields),
    )
    return check_config(config, str(path))


def _architecture(fields: HfFields) -> str:
    names = fields.get("architectures")
    if not isinstance(names, list) or not names or not isinstance(names[0], str):
        raise ModelError(f"{fields.where}: field 'architectures' is missing")
    return names[0]


def _head_dim(fields: HfFields, family: str) -> int:
    if fields.get("head_dim") is None and family in ("qwen3", "qwen3_moe"):
        return _QWEN3_HEAD_DIM
    heads = fields.number("num_attention_heads")
    return fields.number("head_dim", default=fields.number("hidden_size") // max(heads, 1))


def _dtype(fields: HfFields) -> str:
    name = str(fields.get("dtype", "torch_dtype") or "float32").removeprefix("torch.")
    if name not in _DTYPES:
        raise ModelError(f"{fields.where}: field 'dtype': {name!r} is not supported ({', '.join(_DTYPES)} are)")
    return name


def _refuse_sliding_window(fields: HfFields, family: str, architecture: str) -> None:
    """Raise if any layer attends to a window that is shorter than the context."""
    if fields.get("sliding_window") is None:
        return
    window = fields.number("sliding_window")
    if window >= fields.number("max_position_embeddings"):
        return
    layer_types = fields.get("layer_types")
    if family == "llama":
        active = architecture == "MistralForCausalLM"
    elif layer_types is not None:
        active = "sliding_attention" in layer_types
    else:
        first = fields.number("max_window_layers", default=28)
        active = bool(fields.get("use_sliding_window")) and first < fields.number("num_hidden_layers")
    if active:
        raise ModelError(f"{fields.where}: sliding-window attention (sliding_window={window}) is not supported yet")


def _read_moe(fields: HfFields) -> MoeConfig:
    return MoeConfig(
        num_experts=fields.number("num_experts", "num_local_experts"),
        top_k=fields.number("num_experts_per_tok"),
        intermediate_size=fields.number("moe_intermediate_size"),
        norm_topk_prob=bool(fields.get("norm_topk_prob")),
        sparse_step=fields.number("decoder_sparse_step", default=1),
        dense_layers=_dense_layers(fields),
    )


def _dense_layers(fields: HfFields) -> tuple[int, ...]:
    layers = fields.get("mlp_only_layers") or []
    if not isinstance(layers, list) or not all(isinstance(layer, int) for layer in layers):
        raise ModelError(f"{fields.where}: field 'mlp_only_layers' must hold layer numbers, not {layers!r}")
    return tuple(layers)


def _end_tokens(fields: HfFields, directory: Path) -> tuple[int, ...]:
    """Ids of generation_config.json (which adds the chat ends) and of config.json, without repeats."""
    found: list[int] = []
    extra = directory / "generation_config.json"
    sources = [HfFields(read_json(extra), str(extra))] if extra.exists() else []
    for source in [*sources, fields]:
        ids = source.get("eos_token_id")
        for token in ids if isinstance(ids, list) else [ids]:
            if isinstance(token, int) and not isinstance(token, bool):
                found.append(token)
            elif token is not None:
                raise ModelError(f"{source.where}: field 'eos_token_id' must hold token ids, not {token!r}")
    return tuple(dict.fromkeys(found))


def _read_rope(fields: HfFields, head_dim: int) -> RopeConfig:
    """`rope_parameters` (transformers 5), or `rope_scaling` and `rope_theta` (4)."""
    data: dict[str, Any] = {}
    for name in ("rope_scaling", "rope_parameters"):
        found = fields.get(name) or {}
        if not isinstance(found, dict):
            raise ModelError(f"{fields.where}: field '{name}' must be an object, not {found!r}")
        data.update(found)
    rope = HfFields(data, fields.where)
    kind = rope.get("rope_type", "type") or "default"
    if kind not in _ROPE_TYPES:
        raise ModelError(f"{fields.where}: rope type {kind!r} is not supported ({', '.join(_ROPE_TYPES)} are)")
    theta = rope.number("rope_theta", default=fields.number("rope_theta", default=10000.0, kind=float), kind=float)
    partial = fields.number("partial_rotary_factor", default=1.0, kind=float)
    partial = rope.number("partial_rotary_factor", default=partial, kind=float)
    common = {"rope_type": kind, "theta": theta, "rotary_dim": int(head_dim * partial)}
    if kind == "default":
        return RopeConfig(**common)
    context = fields.number("max_position_embeddings")
    original = fields.number("original_max_position_embeddings", default=context)
    original = rope.number("original_max_position_embeddings", default=original)
    default_factor = context / max(original, 1) if kind == "yarn" else None
    common["factor"] = rope.number("factor", default=default_factor, kind=float)
    if kind == "linear":
        return RopeConfig(**common)
    common["original_context"] = original
    if kind == "llama3":
        for name in ("low_freq_factor", "high_freq_factor"):
            common[name] = rope.number(name, kind=float)
        return RopeConfig(**common)
    for name, default in (("beta_fast", 32.0), ("beta_slow", 1.0)):
        common[name] = rope.number(name, default=default, kind=float)
    for name in ("attention_factor", "mscale", "mscale_all_dim"):
        if rope.get(name) is not None:
            common[name] = rope.number(name, kind=float)
    return RopeConfig(**common, truncate=rope.get("truncate") is not False)
