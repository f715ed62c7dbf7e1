"""What a step takes of a device's memory beside weights and pools."""

from models.config import ModelConfig
from models.sharding import Sharding
from models.state_layout import DTYPE_BYTES

# Result of all graphs, the tensor that a capture computes it into, and what sampling makes of it.
_LOGITS_COPIES = 3
_GRAPH_ROWS = 512
# Libraries' workspaces, kernels' code, and what blocks of memory lose between them.
_SLACK_BYTES = 512 << 20


def step_bytes(
    config: ModelConfig, sharding: Sharding, dtype: str, batch_max_tokens: int, max_rows: int, max_context: int
) -> int:
    """Bytes that the largest prefill step and the captured decode steps take on a CUDA device, from above.

    They never run at once, but captured steps keep their memory. batch_max_tokens: of a step; max_rows: requests at
    once; max_context: tokens of the longest request, whose keys and values of a layer are gathered.
    """
    size, dim = DTYPE_BYTES[dtype], config.head_dim
    heads = sharding.heads.num_q_heads + 2 * sharding.heads.num_kv_heads
    inner = max(sharding.mlp[1] - sharding.mlp[0], 0)
    if config.moe is not None:
        inner = max(inner, (sharding.expert[1] - sharding.expert[0]) * config.moe.top_k)
    values_a_token = 4 * config.hidden_size + 2 * heads * dim + 3 * inner
    rows = min(max_rows, _GRAPH_ROWS)
    activations = (batch_max_tokens + rows) * values_a_token * size
    gathered = 4 * sharding.heads.num_kv_heads * dim * (max_context + batch_max_tokens) * size
    return activations + gathered + rows * config.vocab_size * 4 * _LOGITS_COPIES + _SLACK_BYTES
