"""Families that are not served yet, in the words of state groups: their bytes are the published ones, a rank's part of
each is what another number of ranks reads, and their pools have views of every leaf."""

import itertools
import math

import pytest
import torch

from models.layer_states import FULL, RECURRENT, TAIL, LayerState, window_rule
from models.state_layout import HitPolicy, StateGroup, StateKind, StateLayout, group_states, rank_extents
from serve.model_infer.attention_state.coordinator import StateCoordinator

MIB, BF16, F32, U8 = 1 << 20, "bfloat16", "float32", "uint8"
Kept = list[tuple[int, LayerState]]


def layers(count: int, *states: LayerState, first: int = 0) -> Kept:
    return [(first + layer, state) for layer in range(count) for state in states]


def kv(heads: int, dim: int, window: int = 0) -> LayerState:
    return LayerState(window_rule(window) if window else FULL, "kv", (2, dim), BF16, heads)


def kimi_delta(heads: int) -> list[LayerState]:
    """Kimi delta attention: decay by channel; a convolution over q, k and v of each head."""
    convs = [LayerState(RECURRENT, f"conv_{part}", (128, 3), BF16, heads) for part in "qkv"]
    return [LayerState(RECURRENT, "recurrent", (128, 128), F32, heads), *convs]


def mamba2(heads: int, groups: int) -> list[LayerState]:
    """Heads of 64 x 128; x | B | C are segments of their own. One group of B and C is on every rank."""
    if groups == 1:
        return [
            LayerState(RECURRENT, "ssm", (64, 128), F32, heads),
            LayerState(RECURRENT, "conv_x", (64, 3), BF16, heads),
            *(LayerState(RECURRENT, f"conv_{part}", (128, 3), BF16) for part in "bc"),
        ]
    shared = heads // groups
    return [
        LayerState(RECURRENT, "ssm", (shared, 64, 128), F32, groups),
        LayerState(RECURRENT, "conv_x", (shared * 64, 3), BF16, groups),
        *(LayerState(RECURRENT, f"conv_{part}", (128, 3), BF16, groups) for part in "bc"),
    ]


def glm5_next() -> Kept:
    """Delta nets, and latent attention whose indexer has one pooled key for 16 tokens, with what is not pooled yet."""
    latent = LayerState(FULL, "latent", (512,), BF16)
    pooled = LayerState(FULL, "pooled_index", (128,), BF16, tokens_per_row=16)
    rest = LayerState(TAIL, "pool_rest", (16, 256), BF16, is_scratch=True)
    last = LayerState(TAIL, "pool_count", (1,), F32)
    return layers(34, *kimi_delta(64)) + layers(11, latent, pooled, rest, last, first=34)


def packed(bytes_per_row: int, name: str = "latent", tokens_per_row: int = 1) -> LayerState:
    """Rows whose numbers and scales are packed by a format of their own."""
    return LayerState(FULL, name, (bytes_per_row,), U8, tokens_per_row=tokens_per_row)


def int8_kv() -> Kept:
    """K and V in int8, with a float32 scale by token and head."""
    return layers(
        32,
        LayerState(FULL, "kv", (2, 128), "int8", 8),
        LayerState(FULL, "scale", (2, 1), F32, 8),
    )


def gemma4_e2b() -> Kept:
    """Of 35 layers 15 have keys and values, with heads of two sizes; the last 20 read those of the last of each
    type."""
    return layers(12, kv(1, 256, 512)) + layers(3, kv(1, 512), first=12)


LATENT = LayerState(FULL, "latent", (576,), BF16)
CASES: dict[str, tuple[Kept, float, float]] = {  # what is kept, FULL bytes a token, MiB at a boundary
    "kimi-linear-48b": (layers(20, *kimi_delta(32)) + layers(7, LATENT, first=20), 8_064, 41.4),
    "glm-5.3-flash": (glm5_next(), 11_440, 140.8),
    "minimax-text-01": (
        layers(70, LayerState(RECURRENT, "recurrent", (128, 128), F32, 64)) + layers(10, kv(8, 128), first=70),
        40_960,
        280,
    ),
    "nemotron-3-nano-30b": (layers(23, *mamba2(64, 8)) + layers(6, kv(2, 128), first=23), 6_144, 46.8),
    "nemotron-h-8b": (layers(24, *mamba2(128, 8)) + layers(4, kv(8, 128), first=24), 16_384, 97.4),
    "granite-4.0-h-small": (layers(36, *mamba2(128, 1)) + layers(4, kv(8, 128), first=36), 16_384, 145.7),
    "lfm2-1.2b": (
        layers(10, LayerState(RECURRENT, "conv", (256, 2), BF16, 8)) + layers(6, kv(8, 64), first=10),
        12_288,
        80 / 1024,
    ),
    "gemma4-e2b": (gemma4_e2b(), 6_144, 6.0),
    "gemma4-31b": (layers(50, kv(16, 256, 1024)) + layers(10, kv(4, 512), first=50), 81_920, 799),
    "deepseek-v3-fp8": (layers(61, packed(656)), 40_016, 0),
    "deepseek-v3.2-fp8": (layers(61, packed(656), packed(132, "index")), 48_068, 0),
    "int8-kv": (int8_kv(), 32 * 8 * 2 * (128 + 4), 0),
}


def at_boundary(group: StateGroup) -> int:
    """Bytes of `group` that a boundary needs beside the FULL pages."""
    if group.hit_policy is HitPolicy.TRAILING_PAGES:
        return group.bytes_per_page // group.page_tokens * group.window_tokens
    return group.bytes_per_page


def layout_of(name: str) -> StateLayout:
    return group_states(CASES[name][0], 64)


@pytest.mark.parametrize("name", CASES)
def test_bytes_are_the_published_ones(name: str):
    _, full_bytes, boundary_mib = CASES[name]
    groups = layout_of(name).groups
    assert sum(group.bytes_per_page for group in groups if group.kind is StateKind.FULL) / 64 == full_bytes
    found = sum(at_boundary(group) for group in groups if group.kind is not StateKind.FULL) / MIB
    assert math.isclose(found, boundary_mib, rel_tol=0.01)


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("name", CASES)
def test_what_ranks_store_is_every_byte_once_and_what_they_load_covers_it(name: str, tp: int):
    for group in layout_of(name).groups:
        stored = sorted((each.offset, each.length) for rank in range(tp) for each in rank_extents(group, tp, rank))
        assert stored[0][0] == 0
        assert all(a + n == b for (a, n), (b, _) in itertools.pairwise(stored))
        assert sum(stored[-1]) == group.bytes_per_page


@pytest.mark.parametrize("name", [name for name in CASES if name not in ("gemma4-31b", "minimax-text-01")])
def test_a_pool_has_a_view_of_every_leaf(name: str):
    layout = layout_of(name)
    states = StateCoordinator(layout, 2, 1, torch.device("cpu"))
    states.allocate({group.name: 1 for group in layout.groups})
    for group in layout.groups:
        views = states.leaves()[group.name]
        kept = [views[leaf.name][0] for leaf in (*group.head_leaves, *group.replicated_leaves)]
        assert sum(view.numel() * view.element_size() for view in kept) == states.pools()[group.name].shape[1]


def test_layers_that_disagree_are_refused():
    with pytest.raises(ValueError, match="'full': layers disagree"):
        group_states([(0, kv(2, 64)), (1, kv(2, 128))], 16)
    with pytest.raises(ValueError, match="'window': layers disagree"):
        group_states([(0, kv(2, 64, 32)), (1, kv(2, 64, 48))], 16)
