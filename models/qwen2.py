"""Qwen2 and Qwen2.5: llama with biases on q, k and v."""

from models.layers.decoder import DecoderModel, plan_decoder


class Qwen2Model(DecoderModel):
    """The shared decoder; what differs stands in the config."""


plan_weights = plan_decoder
build_model = Qwen2Model
