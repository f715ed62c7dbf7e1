"""Config of a checkpoint directory: the only reader of field names of transformers' config.json (versions 4 and 5)."""

from pathlib import Path

from models.config import ModelConfig, MoeConfig, check_config
from models.errors import ModelError
from models.hf_families import FAMILY_READERS
from models.hf_fields import HfFields, read_json
from models.hf_rope import read_rope
from models.layer_types import LayerType
from models.registry import family_of

_DTYPES = ("float32", "bfloat16", "float16")
_ACTIVATIONS = {"gemma3": "gelu_pytorch_tanh"}  # where it is not silu
# Every so many-th layer is FULL and the others have a window, where config.json does not name the layers.
_WINDOW_PERIODS = {"gemma3": 6, "gpt_oss": 2}
_QWEN3_HEAD_DIM = 128  # Qwen3Config's default where config.json leaves it out
_READ_BY_FAMILY = {("gpt_oss", "quantization_config")}
_REFUSED = {"mlp_bias": "biases in the MLP", "quantization_config": "checkpoints quantized in this way"}


def read_hf_config(directory: Path) -> ModelConfig:
    """The config of checkpoint `directory`; ModelError names the field or architecture that is missing or unknown."""
    path = directory / "config.json"
    fields = HfFields(read_json(path), str(path))
    architecture = _architecture(fields)
    family = family_of(architecture)
    fields = _text_fields(fields)
    for name, what in _REFUSED.items():
        if fields.get(name) and (family, name) not in _READ_BY_FAMILY:
            raise ModelError(f"{path}: {what} ({name}) are not supported yet")
    activation, wanted = fields.get("hidden_act", "hidden_activation"), _ACTIVATIONS.get(family, "silu")
    if activation not in (None, wanted):
        raise ModelError(f"{path}: field 'hidden_act': {activation!r} is not supported ({wanted} is)")
    layer_types = _layer_types(fields, family, architecture)
    heads, head_dim = fields.number("num_attention_heads"), _head_dim(fields, family)
    bias = bool(fields.get("attention_bias"))
    config = ModelConfig(
        architecture=architecture,
        family=family,
        vocab_size=fields.number("vocab_size"),
        hidden_size=fields.number("hidden_size"),
        intermediate_size=fields.number("intermediate_size", "moe_intermediate_size"),
        num_layers=fields.number("num_hidden_layers"),
        num_q_heads=heads,
        num_kv_heads=fields.number("num_key_value_heads", default=heads),
        head_dim=head_dim,
        rms_norm_eps=fields.number("rms_norm_eps", default=1e-6, kind=float),
        rope=read_rope(fields, head_dim),
        max_position_embeddings=fields.number("max_position_embeddings"),
        tie_word_embeddings=bool(fields.get("tie_word_embeddings")),
        attention_bias=bias or family == "qwen2",
        attention_out_bias=bias and family != "qwen2",
        qk_norm=family in ("qwen3", "qwen3_moe"),
        moe=_read_moe(fields) if family == "qwen3_moe" else None,
        eos_token_ids=_end_tokens(fields, directory),
        bos_token_id=fields.number("bos_token_id") if fields.get("bos_token_id") is not None else None,
        dtype=_dtype(fields),
        layer_types=layer_types,
        window=fields.number("sliding_window") if LayerType.WINDOW in layer_types else 0,
    )
    if family in FAMILY_READERS:
        config = FAMILY_READERS[family](fields, config)
    return check_config(config, str(path))


def _architecture(fields: HfFields) -> str:
    names = fields.get("architectures")
    if not isinstance(names, list) or not names or not isinstance(names[0], str):
        raise ModelError(f"{fields.where}: field 'architectures' is missing")
    return names[0]


def _text_fields(fields: HfFields) -> HfFields:
    """Fields of the language model of a checkpoint that sees images too."""
    text = fields.get("text_config")
    if not isinstance(text, dict):
        return fields
    return HfFields({**fields.data, **text}, fields.where)


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


def _layer_types(fields: HfFields, family: str, architecture: str) -> tuple[LayerType, ...]:
    """Of each layer, where they differ by a window alone; empty where all are FULL, as with a window that no context
    is longer than, and where a family's own reader must say."""
    if fields.get("sliding_window") is None:
        return ()
    if fields.number("sliding_window") >= fields.number("max_position_embeddings"):
        return ()
    count, named = fields.number("num_hidden_layers"), fields.get("layer_types")
    if family == "llama":
        has_window = [architecture == "MistralForCausalLM"] * count
    elif isinstance(named, list):
        if not set(map(str, named)) <= {LayerType.FULL.value, LayerType.WINDOW.value}:
            return ()
        has_window = [name == LayerType.WINDOW.value for name in named]
    elif family in _WINDOW_PERIODS:
        period = fields.number("sliding_window_pattern", default=_WINDOW_PERIODS[family])
        has_window = [(layer + 1) % period != 0 for layer in range(count)]
    else:
        first = fields.number("max_window_layers", default=28) if fields.get("use_sliding_window") else count
        has_window = [layer >= first for layer in range(count)]
    if not any(has_window):
        return ()
    return tuple(LayerType.WINDOW if has else LayerType.FULL for has in has_window)


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
