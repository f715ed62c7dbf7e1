"""Qwen3: llama with RMSNorm on each query and key head before the rotation."""

from models.layers.decoder import DecoderModel, plan_decoder


class Qwen3Model(DecoderModel):
    """The shared decoder; what differs stands in the config."""


plan_weights = plan_decoder
build_model = Qwen3Model
