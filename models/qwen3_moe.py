"""Qwen3 with experts: every decoder_sparse_step-th MLP is a mixture of experts."""

from models.layers.decoder import DecoderModel, plan_decoder


class Qwen3MoeModel(DecoderModel):
    """The shared decoder; what differs stands in the config."""


plan_weights = plan_decoder
build_model = Qwen3MoeModel
