"""Bytes a token and a checkpoint, from the configs of published models alone, against the numbers known of them."""

import math
from dataclasses import dataclass

import pytest
import transformers

from models.config import CompressionConfig, LinearAttentionConfig, MlaConfig, ModelConfig, RopeConfig
from models.config_hf import read_hf_config
from models.layer_types import LayerType
from models.state_layout import HitPolicy, StateGroup, StateKind, derive_layout, page_multiple
from unit_tests.models.builders import tiny_config

MIB = 1 << 20
FULL, WINDOW, LATENT, LINEAR = LayerType.FULL, LayerType.WINDOW, LayerType.LATENT, LayerType.LINEAR
SHARED, C4, C128 = LayerType.SHARED_WINDOW, LayerType.COMPRESSED, LayerType.HEAVILY_COMPRESSED


def attention(layers: int, kv: int, dim: int, pattern: tuple[LayerType, ...] = (FULL,), window: int = 0) -> ModelConfig:
    """`layers` layers whose types repeat `pattern`, with K/V of `kv` heads."""
    types = (pattern * layers)[:layers]
    return tiny_config(
        num_layers=layers, num_q_heads=kv, num_kv_heads=kv, head_dim=dim, layer_types=types, window=window
    )


def latent(layers: int, rank: int = 512, rope: int = 64, index: int = 0) -> ModelConfig:
    mla = MlaConfig(rank, rope, qk_nope_head_dim=128, v_head_dim=128, index_head_dim=index)
    return tiny_config(num_layers=layers, layer_types=(LATENT,) * layers, mla=mla)


def linear(layers: int, kv: int, v_heads: int = 32, k_heads: int = 16) -> ModelConfig:
    """Three gated delta nets to one layer of full attention, heads of 128 and 256 dimensions."""
    delta = LinearAttentionConfig(k_heads, v_heads, 128, 128, conv_kernel=4)
    config = attention(layers, kv, 256, (LINEAR, LINEAR, LINEAR, FULL))
    return ModelConfig(**{**vars(config), "linear_attention": delta})


def compressed(types: tuple[LayerType, ...]) -> ModelConfig:
    compression = CompressionConfig(4, 128, index_head_dim=128)
    return tiny_config(num_layers=len(types), head_dim=512, layer_types=types, window=128, compression=compression)


MODELS = {
    "smollm2-1.7b": attention(24, 32, 64),
    "llama-3.1-8b": attention(32, 8, 128),
    "llama-3.1-70b": attention(80, 8, 128),
    "qwen2.5-7b": attention(28, 4, 128),
    "qwen3-8b": attention(36, 8, 128),
    "qwen3-235b-a22b": attention(94, 4, 128),
    "mistral-7b-v0.1": attention(32, 8, 128, (WINDOW,), 4096),
    "gemma3-270m": attention(18, 1, 256, (WINDOW,) * 5 + (FULL,), 512),
    "gemma3-1b": attention(26, 1, 256, (WINDOW,) * 5 + (FULL,), 512),
    "gemma3-27b": attention(62, 16, 128, (WINDOW,) * 5 + (FULL,), 1024),
    "gpt-oss-20b": attention(24, 8, 64, (WINDOW, FULL), 128),
    "gpt-oss-120b": attention(36, 8, 64, (WINDOW, FULL), 128),
    "deepseek-v2-lite": latent(27),
    "deepseek-v3": latent(61),
    "deepseek-v3.2": latent(61, index=128),
    "deepseek-v4-flash": compressed((SHARED, SHARED) + (C4, C128) * 20 + (C4,)),
    "qwen3-next-80b": linear(48, 2),
    "qwen3.5-32-layers": linear(32, 4),
    "qwen3.5-35b-a3b": linear(40, 2),
}


@dataclass(frozen=True)
class Sizes:
    """bfloat16 caches over all ranks. full: bytes a token; checkpoint: bytes of all that stands at one boundary."""

    full: float
    checkpoint: int = 0


KNOWN = {
    "smollm2-1.7b": Sizes(196_608),
    "llama-3.1-8b": Sizes(131_072),
    "llama-3.1-70b": Sizes(327_680),
    "qwen2.5-7b": Sizes(57_344),
    "qwen3-8b": Sizes(147_456),
    "qwen3-235b-a22b": Sizes(192_512),
    "mistral-7b-v0.1": Sizes(0, 4095 * 131_072),
    "gemma3-270m": Sizes(3_072, 511 * 15_360),
    "gemma3-1b": Sizes(4_096, 511 * 22_528),
    "gemma3-27b": Sizes(81_920, 1023 * 425_984),
    "gpt-oss-20b": Sizes(24_576, 127 * 24_576),
    "gpt-oss-120b": Sizes(36_864, 127 * 36_864),
    "deepseek-v2-lite": Sizes(31_104),
    "deepseek-v3": Sizes(70_272),
    "deepseek-v3.2": Sizes(85_888),
    # Four rows of values and gates would be 420 KiB; reduced by channel to three they are 3/8 of that.
    "deepseek-v4-flash": Sizes(6_880, 43 * 127 * 1024 + 420 * 1024 * 3 // 8),
    "qwen3-next-80b": Sizes(24_576, 36 * (2 * MIB + 48 * 1024)),
    "qwen3.5-32-layers": Sizes(32_768, 24 * (2 * MIB + 48 * 1024)),
    "qwen3.5-35b-a3b": Sizes(20_480, 30 * (2 * MIB + 48 * 1024)),
}
ROUNDED_MIB = {  # as they are quoted; a window counts the tokens that it needs, not whole pages
    "mistral-7b-v0.1": 512,
    "gemma3-270m": 7.5,
    "gemma3-1b": 11.0,
    "gemma3-27b": 416,
    "gpt-oss-20b": 3.0,
    "gpt-oss-120b": 4.5,
    "deepseek-v4-flash": 5.33 + 0.15,
    "qwen3-next-80b": 73.7,
    "qwen3.5-32-layers": 49.1,
    "qwen3.5-35b-a3b": 61.4,
}


def at_boundary(group: StateGroup) -> int:
    """Bytes of `group` that a boundary needs beside the FULL pages."""
    if group.hit_policy is HitPolicy.TRAILING_PAGES:
        return group.bytes_per_page // group.page_tokens * group.window_tokens
    return group.bytes_per_page


@pytest.mark.parametrize("name", MODELS)
def test_bytes_a_token_and_a_checkpoint_are_the_published_ones(name: str):
    config, known = MODELS[name], KNOWN[name]
    page = math.lcm(64, page_multiple(config))
    groups = derive_layout(config, page, "bfloat16").groups
    full = [group for group in groups if group.kind is StateKind.FULL]
    assert sum(group.bytes_per_page for group in full) / page == known.full
    checkpoint = sum(at_boundary(group) for group in groups if group.kind is not StateKind.FULL)
    assert checkpoint == known.checkpoint
    assert math.isclose(checkpoint / MIB, ROUNDED_MIB.get(name, 0), rel_tol=0.01)


FLASH_RATIOS = [0, 0, *[4, 128] * 20, 4]
PUBLISHED = {  # the defaults of transformers' config classes, and where they are another model's, what differs
    "mistral-7b-v0.1": ("MistralConfig", "MistralForCausalLM", {}),
    "gpt-oss-120b": ("GptOssConfig", "GptOssForCausalLM", {}),
    "deepseek-v3": ("DeepseekV3Config", "DeepseekV3ForCausalLM", {}),
    "qwen3-next-80b": ("Qwen3NextConfig", "Qwen3NextForCausalLM", {}),
    "qwen3.5-32-layers": ("Qwen3_5TextConfig", "Qwen3_5ForCausalLM", {}),
    "deepseek-v4-flash": ("DeepseekV4Config", "DeepseekV4ForCausalLM", {"compress_ratios": FLASH_RATIOS}),
    "deepseek-v4-pro": ("DeepseekV4Config", "DeepseekV4ForCausalLM", {"num_hidden_layers": 61}),
}
KNOWN_ONLY_AS_PUBLISHED = {"deepseek-v4-pro": Sizes(29 * 320 + 32 * 8, 61 * 127 * 1024 + 29 * 3 * 640 * 4)}


@pytest.mark.parametrize("name", PUBLISHED)
def test_bytes_come_from_the_published_config_alone(name: str, tmp_path):
    config_name, architecture, changes = PUBLISHED[name]
    written = getattr(transformers, config_name)(architectures=[architecture], **changes)
    written.save_pretrained(tmp_path)
    config = read_hf_config(tmp_path)
    page = math.lcm(64, page_multiple(config))
    groups = derive_layout(config, page, "bfloat16").groups
    full = sum(group.bytes_per_page for group in groups if group.kind is StateKind.FULL) / page
    checkpoint = sum(at_boundary(group) for group in groups if group.kind is not StateKind.FULL)
    assert Sizes(full, checkpoint) == {**KNOWN, **KNOWN_ONLY_AS_PUBLISHED}[name]


def test_recurrent_states_are_float32_whatever_the_caches_are():
    for dtype in ("bfloat16", "float32"):
        (group,) = [each for each in derive_layout(MODELS["qwen3-next-80b"], 64, dtype).groups if each.num_heads == 16]
        dtypes = {leaf.name: leaf.dtype for leaf in group.leaves}
        assert dtypes == {"recurrent": "float32", "conv_q": dtype, "conv_k": dtype, "conv_v": dtype}


def test_pages_hold_whole_rows_of_compressed_entries():
    config = MODELS["deepseek-v4-flash"]
    assert page_multiple(config) == 128
    with pytest.raises(ValueError, match="page size 64 is no multiple of 128"):
        derive_layout(config, 64, "bfloat16")
    full, window, tail = derive_layout(config, 256, "bfloat16").groups
    assert [group.name for group in (full, window, tail)] == ["full", "window", "tail"]
    assert {leaf.name: full.rows(leaf) for leaf in full.leaves} == {
        "compressed": 64,
        "compressed_index": 64,
        "heavily_compressed": 2,
    }
    assert len(window.leaves[0].layers) == 43
    assert {leaf.name for leaf in tail.scratch_leaves} == {"partial", "index_partial", "heavy_partial"}


def test_the_rope_of_a_window_does_not_change_what_is_kept():
    config = MODELS["gemma3-270m"]
    other = ModelConfig(**{**vars(config), "window_rope": RopeConfig("default", 1e4, 256)})
    assert derive_layout(config, 64, "bfloat16") == derive_layout(other, 64, "bfloat16")
