"""Llama, and what shares its architecture: SmolLM2, Mistral without a sliding window."""

from models.layers.decoder import DecoderModel, plan_decoder


class LlamaModel(DecoderModel):
    """The shared decoder; what differs stands in the config."""


plan_weights = plan_decoder
build_model = LlamaModel
