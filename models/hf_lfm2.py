"""Fields of LFM2 checkpoints: short convolutions, with attention in some layers."""

from dataclasses import replace

from models.config import ModelConfig
from models.errors import ModelError
from models.hf_fields import HfFields
from models.layer_types import LayerType


def read_lfm2(fields: HfFields, config: ModelConfig) -> ModelConfig:
    """`config` with what lfm2 has beside the common fields."""
    if fields.get("conv_bias"):
        raise ModelError(f"{fields.where}: biases in convolutions (conv_bias) are not supported yet")
    full, names = fields.get("full_attn_idxs"), fields.get("layer_types")
    if names is None:
        chosen = range(config.num_layers) if full is None else full
        names = ["full_attention" if layer in chosen else "conv" for layer in range(config.num_layers)]
    return replace(
        config,
        intermediate_size=_inner(fields),
        layer_types=tuple(LayerType.FULL if name == "full_attention" else LayerType.SHORT_CONV for name in names),
        rms_norm_eps=fields.number("norm_eps", default=1e-5, kind=float),
        conv_kernel=fields.number("conv_L_cache", default=3),
        qk_norm=True,
        tie_word_embeddings=fields.data.get("tie_embedding", fields.data.get("tie_word_embeddings", True)) is not False,
    )


def _inner(fields: HfFields) -> int:
    """config.json has the size before it is cut to two thirds and rounded up."""
    inner = fields.number("block_ff_dim", "intermediate_size")
    if fields.get("block_auto_adjust_ff_dim") is False:
        return inner
    step = fields.number("block_multiple_of", default=256)
    inner = int(fields.number("block_ffn_dim_multiplier", default=1.0, kind=float) * int(2 * inner / 3))
    return -(-inner // step) * step
