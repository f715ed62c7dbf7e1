"""DeepSeek-V4: window, compressed entries, experts, and a residual of several streams."""

import re

import torch

from kernels.interface import KernelBackend
from models.config import ModelConfig
from models.forward import ForwardBatch
from models.layer_types import LayerType
from models.layers.compressed import CompressedAttention, plan_compressed
from models.layers.ends import DecoderEnds, plan_ends
from models.layers.hyper_connections import HyperConnection, HyperHead, plan_hyper_connection, plan_hyper_head
from models.layers.layer_views import LayerLeaves, LayerViews
from models.layers.rope import build_cos_sin
from models.layers.shared_moe import SharedMoe, plan_shared_moe
from models.parallel import TensorParallel
from models.sharding import Sharding
from models.weight_plan import WeightPlan

# From the names of published checkpoints to those of transformers' modules; in order.
_ENDS = {
    "embed.weight": "model.embed_tokens.weight",
    "head.weight": "lm_head.weight",
    "norm.weight": "model.norm.weight",
    "hc_head_fn": "model.hc_head.hc_fn",
    "hc_head_base": "model.hc_head.hc_base",
    "hc_head_scale": "model.hc_head.hc_scale",
}
_IN_LAYERS = [
    (r"^layers\.", "model.layers."),
    (r"\.hc_(attn|ffn)_(fn|base|scale)$", r".\1_hc.\2"),
    (r"\.attn_norm\.", ".input_layernorm."),
    (r"\.ffn_norm\.", ".post_attention_layernorm."),
    (r"\.attn\.", ".self_attn."),
    (r"\.ffn\.", ".mlp."),
    (r"\.attn_sink$", ".sinks"),
    (r"\.indexer\.compressor\.", ".compressor.indexer."),
    (r"\.self_attn\.indexer\.weights_proj\.", ".self_attn.compressor.indexer.scorer.weights_proj."),
    (r"\.self_attn\.indexer\.wq_b\.", ".self_attn.compressor.indexer.q_b_proj."),
    (r"\.norm\.", ".kv_norm."),
    (r"\.ape$", ".position_bias"),
    (r"\.wq_a\.", ".q_a_proj."),
    (r"\.wq_b\.", ".q_b_proj."),
    (r"\.wkv\.", ".kv_proj."),
    (r"\.wgate\.", ".gate_proj."),
    (r"\.wo_a\.", ".o_a_proj."),
    (r"\.wo_b\.", ".o_b_proj."),
    (r"\.q_norm\.", ".q_a_norm."),
    (r"\.gate\.bias$", ".gate.e_score_correction_bias"),
    (r"\.w1\.", ".gate_proj."),
    (r"\.w2\.", ".down_proj."),
    (r"\.w3\.", ".up_proj."),
]
_PATTERNS = [(re.compile(pattern), target) for pattern, target in _IN_LAYERS]
_LAYER = re.compile(r"^(?:model\.)?layers\.(\d+)\.")


def checkpoint_name(config: ModelConfig, name: str) -> str | None:
    """Published names and those of transformers are known; layers that predict further tokens are not served."""
    if name.startswith(("mtp.", "model.mtp.")):
        return None
    layer = _LAYER.match(name)
    if layer is None:
        return _ENDS.get(name, name)
    if int(layer[1]) >= config.num_layers:
        return None
    for pattern, target in _PATTERNS:
        name = pattern.sub(target, name)
    return name


def plan_weights(config: ModelConfig, sharding: Sharding) -> WeightPlan:
    """Every tensor of this rank."""
    plan, hyper = WeightPlan(), config.hyper_connections
    plan_ends(plan, config, sharding)
    plan_hyper_head(plan, "collapse", "model.hc_head", hyper, config.hidden_size)
    for layer in range(config.num_layers):
        for half in ("attn", "ffn"):
            prefix = f"model.layers.{layer}.{half}_hc"
            plan_hyper_connection(plan, f"{layer}.{half}_hc", prefix, hyper, config.hidden_size)
        plan_compressed(plan, layer, config, sharding)
        plan_shared_moe(plan, layer, config, sharding)
    return plan


class Layer:
    """Attention and experts, each between a collapse of the streams and their renewal."""

    def __init__(
        self,
        weights: dict[str, torch.Tensor],
        layer: int,
        config: ModelConfig,
        attention: CompressedAttention,
        tp: TensorParallel,
        backend: KernelBackend,
    ) -> None:
        hyper, self.eps = config.hyper_connections, config.rms_norm_eps
        self.attention = attention
        self.experts = SharedMoe(weights, layer, config, tp, backend)
        self.around_attention = HyperConnection(weights, f"{layer}.attn_hc", hyper, self.eps)
        self.around_experts = HyperConnection(weights, f"{layer}.ffn_hc", hyper, self.eps)
        self.backend = backend

    def mix(self, streams: torch.Tensor, leaves: LayerLeaves, batch: ForwardBatch) -> torch.Tensor:
        """The first half: streams [T, N, H] -> new streams."""
        x, shares, mixing = self.around_attention.collapse(streams)
        return HyperConnection.spread(streams, self.attention.forward(x, leaves, batch), shares, mixing)

    def feed_forward(self, streams: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
        """The second half."""
        x, shares, mixing = self.around_experts.collapse(streams)
        normed = self.backend.rms_norm(x, self.experts.norm, self.eps)
        return HyperConnection.spread(streams, self.experts.mix(normed, token_ids), shares, mixing)


class DeepseekV4Model(DecoderEnds):
    """One rank's part, on the tensors that `plan_weights` asked for."""

    def __init__(
        self,
        config: ModelConfig,
        weights: dict[str, torch.Tensor],
        sharding: Sharding,
        tp: TensorParallel,
        backend: KernelBackend,
        *,
        device: torch.device,
        max_positions: int,
    ) -> None:
        plain = build_cos_sin(config.rope, max_positions, device)
        compressed = build_cos_sin(config.compression.rope, max_positions, device)
        super().__init__(config, weights, sharding, tp, backend, plain.nbytes + compressed.nbytes)
        self.views = LayerViews(config)
        self.collapse = HyperHead(weights, "collapse", config.hyper_connections, config.rms_norm_eps)
        self.blocks: list[Layer] = []
        for layer in range(config.num_layers):
            cos_sin = plain if config.layer_type(layer) is LayerType.SHARED_WINDOW else compressed
            attention = CompressedAttention(weights, layer, config, sharding, tp, backend, cos_sin)
            self.blocks.append(Layer(weights, layer, config, attention, tp, backend))

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """Run one step; float32 logits [R, vocab] of the rows in `batch.logits_rows`, the same on every rank."""
        token_ids = batch.token_ids
        x = self.backend.embedding(token_ids, self.embedding)
        streams = x[:, None].repeat(1, self.config.hyper_connections.num_streams, 1)
        for block, leaves in zip(self.blocks, self.views.of(batch.leaves), strict=True):
            streams = block.mix(streams, leaves, batch)
            if block is self.blocks[-1]:
                # What follows the last layer's states is wanted for few tokens of a prompt, or for none.
                streams, token_ids = streams[batch.logits_rows], token_ids[batch.logits_rows]
            if len(streams):
                streams = block.feed_forward(streams, token_ids)
        return self.logits(self.collapse.collapse(streams))


build_model = DeepseekV4Model
