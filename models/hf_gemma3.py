"""Fields of Gemma 3 checkpoints: two rotations, and norm weights that are kept less one."""

from dataclasses import replace

from models.config import ModelConfig
from models.errors import ModelError
from models.hf_fields import HfFields
from models.hf_rope import read_rope

_REFUSED = ("attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention")


def read_gemma3(fields: HfFields, config: ModelConfig) -> ModelConfig:
    """`config` with what gemma3 has beside the common fields."""
    for name in _REFUSED:
        if fields.get(name):
            raise ModelError(f"{fields.where}: field '{name}' is not supported")
    ropes = fields.get("rope_parameters")
    if ropes is None:
        theta = fields.number("rope_theta", default=1_000_000.0, kind=float)
        local = fields.number("rope_local_base_freq", default=10_000.0, kind=float)
        ropes = {
            "full_attention": {**(fields.get("rope_scaling") or {}), "rope_theta": theta},
            "sliding_attention": {"rope_theta": local},
        }
    full, window = (
        read_rope(
            HfFields({**fields.data, "rope_scaling": None, "rope_parameters": ropes.get(name)}, fields.where),
            config.head_dim,
        )
        for name in ("full_attention", "sliding_attention")
    )
    return replace(
        config,
        rope=full,
        window_rope=window,
        query_scale=fields.number("query_pre_attn_scalar", default=256, kind=float) ** -0.5,
        norm_offset=1.0,
        embedding_scale=config.hidden_size**0.5,
        qk_norm=True,
        tie_word_embeddings=fields.data.get("tie_word_embeddings", True) is not False,
    )
