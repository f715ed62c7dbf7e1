"""Gemma 3, of checkpoints that see images the language model: windows and full attention with rotations of their own,
and norms before and behind each half."""

from models.config import ModelConfig
from models.layers.decoder import DecoderModel, plan_decoder
from models.layers.mlp import GeluMlp, plan_gelu_mlp
from models.sharding import Sharding
from models.weight_plan import WeightPlan

_NOT_SERVED = ("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector.")
_TEXT = {"language_model.model.": "model.", "language_model.lm_head.": "lm_head.", "model.language_model.": "model."}


def checkpoint_name(config: ModelConfig, name: str) -> str | None:
    """Names of the language model in a larger checkpoint, as versions 4 and 5 of transformers write them."""
    if name.startswith(_NOT_SERVED):
        return None
    prefix = next((prefix for prefix in _TEXT if name.startswith(prefix)), "")
    return _TEXT.get(prefix, "") + name.removeprefix(prefix)


def plan_weights(config: ModelConfig, sharding: Sharding) -> WeightPlan:
    """The shared decoder's tensors, and the norms behind attention."""
    plan = plan_decoder(config, sharding, dense=plan_gelu_mlp)
    for layer in range(config.num_layers):
        name = f"model.layers.{layer}.post_attention_layernorm.weight"
        plan.add_whole(f"{layer}.attn_post_norm", name, (config.hidden_size,), offset=config.norm_offset)
    return plan


class Gemma3Model(DecoderModel):
    """The shared decoder with gemma's feed-forward."""

    dense = GeluMlp


build_model = Gemma3Model
