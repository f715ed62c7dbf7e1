"""The types of layers, by how they mix tokens. What each keeps between tokens stands in `models/layer_states.py`."""

from enum import Enum


class LayerType(Enum):
    """FULL: attention over all tokens, WINDOW: over the last `window`, by key and value heads. LATENT: over a latent
    vector a token (MLA). LINEAR: gated delta net. SHORT_CONV: a convolution over a few tokens. SHARED_WINDOW: a window
    over one vector a token that is key and value of all heads; COMPRESSED and HEAVILY_COMPRESSED add entries that stand
    for several tokens (deepseek_v4)."""

    FULL = "full_attention"
    WINDOW = "sliding_attention"
    LATENT = "latent_attention"
    LINEAR = "linear_attention"
    SHORT_CONV = "conv"
    SHARED_WINDOW = "shared_sliding_attention"
    COMPRESSED = "compressed_sparse_attention"
    HEAVILY_COMPRESSED = "heavily_compressed_attention"
