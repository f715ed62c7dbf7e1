"""Fields of DeepSeek-V4 checkpoints, by the names of transformers and by those of the published files."""

from dataclasses import replace
from typing import Any

from models.config import CompressionConfig, ExpertScore, HyperConnectionConfig, ModelConfig, MoeConfig, RopeConfig
from models.errors import ModelError
from models.hf_fields import HfFields
from models.hf_rope import read_rope
from models.layer_types import LayerType

_SLIDING, _LIGHT, _HEAVY = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"
_TYPES = {
    _SLIDING: LayerType.SHARED_WINDOW,
    _LIGHT: LayerType.COMPRESSED,
    _HEAVY: LayerType.HEAVILY_COMPRESSED,
}
_OF_RATIO = {0: LayerType.SHARED_WINDOW, 4: LayerType.COMPRESSED, 128: LayerType.HEAVILY_COMPRESSED}
_SCORES = {"sqrtsoftplus": ExpertScore.SQRT_SOFTPLUS, "sigmoid": ExpertScore.SIGMOID, "softmax": ExpertScore.SOFTMAX}
_ROTATED, _NUM_HASH_LAYERS = 64 / 512, 3


def read_deepseek_v4(fields: HfFields, config: ModelConfig) -> ModelConfig:
    """`config` with what deepseek_v4 has beside the common fields."""
    head_dim = fields.number("head_dim")
    partial = _ROTATED
    if fields.get("qk_rope_head_dim") is not None:
        partial = fields.number("qk_rope_head_dim") / max(head_dim, 1)
    fields = HfFields({"partial_rotary_factor": partial, **fields.data}, fields.where)
    plain, compressed = _ropes(fields, head_dim)
    compression = _compression(fields, compressed)
    if config.num_q_heads % compression.output_groups:
        raise ModelError(f"{fields.where}: {config.num_q_heads} heads make no {compression.output_groups} equal groups")
    return replace(
        config,
        num_kv_heads=1,
        head_dim=head_dim,
        rope=plain,
        layer_types=_layer_types(fields, config.num_layers),
        window=fields.number("sliding_window"),
        compression=compression,
        hyper_connections=HyperConnectionConfig(
            num_streams=fields.number("hc_mult"),
            num_iterations=fields.number("hc_sinkhorn_iters"),
            eps=fields.number("hc_eps", default=1e-6, kind=float),
        ),
        moe=_experts(fields, config),
    )


def _compression(fields: HfFields, rope: RopeConfig) -> CompressionConfig:
    rates = HfFields(fields.get("compress_rates") or {}, fields.where)
    found = CompressionConfig(
        ratio=rates.number(_LIGHT, default=fields.number("compress_rate_csa", default=4)),
        heavy_ratio=rates.number(_HEAVY, default=fields.number("compress_rate_hca", default=128)),
        index_head_dim=fields.number("index_head_dim"),
        index_heads=fields.number("index_n_heads"),
        index_top_k=fields.number("index_topk"),
        q_lora_rank=fields.number("q_lora_rank"),
        output_groups=fields.number("o_groups"),
        output_rank=fields.number("o_lora_rank"),
        rope=rope,
    )
    sizes = (found.ratio, found.heavy_ratio, found.index_heads, found.index_top_k, found.q_lora_rank)
    if min(*sizes, found.output_groups, found.output_rank) < 1:
        raise ModelError(f"{fields.where}: sizes of the compressed attention must be positive")
    if not rope.rotary_dim <= found.index_head_dim:
        raise ModelError(f"{fields.where}: index_head_dim {found.index_head_dim} does not suit the rotary embedding")
    return found


def _ropes(fields: HfFields, head_dim: int) -> tuple[RopeConfig, RopeConfig]:
    """Of layers with a window alone, and of compressed ones: the latter have a theta of their own, and YaRN, whose
    factor on cosines and sines is 1 unless the file says otherwise."""
    given = fields.get("rope_parameters", "rope_scaling") or {}
    if not isinstance(given, dict):
        raise ModelError(f"{fields.where}: field 'rope_parameters' must be an object, not {given!r}")
    others = {key: value for key, value in fields.data.items() if key not in ("rope_parameters", "rope_scaling")}

    def rope(parameters: dict[str, Any]) -> RopeConfig:
        return read_rope(HfFields({**others, "rope_parameters": parameters}, fields.where), head_dim)

    plain, compressed = given.get("main"), given.get("compress")
    if not isinstance(plain, dict) or not isinstance(compressed, dict):
        plain = {}
        compressed = {**given, "rope_theta": fields.number("compress_rope_theta", default=160000.0, kind=float)}
    if compressed.get("rope_type", compressed.get("type")) == "yarn":
        compressed = {"attention_factor": 1.0, **compressed}
    return rope(plain), rope(compressed)


def _layer_types(fields: HfFields, num_layers: int) -> tuple[LayerType, ...]:
    """Named, or by ratio (a longer list covers layers that are not served), or two heavy ones and then in turn."""
    names, ratios = fields.get("layer_types"), fields.get("compress_ratios")
    known: dict[Any, LayerType] = _TYPES if names is not None else dict(_OF_RATIO)
    given = names if names is not None else ratios
    if given is None:
        given = [_HEAVY if layer < 2 or layer % 2 == 0 else _LIGHT for layer in range(num_layers)]
        known = _TYPES
    if not isinstance(given, list) or len(given) < num_layers or any(each not in known for each in given[:num_layers]):
        field = "layer_types" if names is not None else "compress_ratios"
        raise ModelError(f"{fields.where}: field '{field}' must hold {', '.join(map(str, known))} for every layer")
    return tuple(known[each] for each in given[:num_layers])


def _experts(fields: HfFields, config: ModelConfig) -> MoeConfig:
    score = fields.get("scoring_func") or "sqrtsoftplus"
    if score not in _SCORES:
        raise ModelError(f"{fields.where}: field 'scoring_func': {score!r} is not supported ({', '.join(_SCORES)} are)")
    kinds = fields.get("mlp_layer_types")
    if kinds is None:
        num_hashed = fields.number("num_hash_layers", default=_NUM_HASH_LAYERS)
        kinds = ["hash_moe" if layer < num_hashed else "moe" for layer in range(config.num_layers)]
    if not isinstance(kinds, list) or len(kinds) < config.num_layers or not set(kinds) <= {"hash_moe", "moe"}:
        raise ModelError(f"{fields.where}: field 'mlp_layer_types' must hold hash_moe or moe for every layer")
    inner = fields.number("moe_intermediate_size")
    return MoeConfig(
        num_experts=fields.number("n_routed_experts"),
        top_k=fields.number("num_experts_per_tok"),
        intermediate_size=inner,
        norm_topk_prob=True,
        score=_SCORES[score],
        has_correction=True,
        routed_scale=fields.number("routed_scaling_factor", default=1.0, kind=float),
        shared_intermediate_size=fields.number("n_shared_experts", default=1) * inner,
        limit=fields.number("swiglu_limit", default=10.0, kind=float),
        hash_layers=tuple(layer for layer in range(config.num_layers) if kinds[layer] == "hash_moe"),
    )
