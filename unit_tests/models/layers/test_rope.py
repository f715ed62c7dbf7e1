"""Rotation tables against transformers."""

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from models.config import RopeConfig
from models.layers.rope import build_cos_sin, inverse_frequencies

CPU = torch.device("cpu")
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 256}
CASES = [
    ({"rope_type": "default"}, RopeConfig("default", 10000.0, 64)),
    ({"rope_type": "linear", "factor": 3.0}, RopeConfig("linear", 10000.0, 64, factor=3.0)),
    (
        {"rope_type": "llama3", "factor": 8.0, **LLAMA3},
        RopeConfig("llama3", 10000.0, 64, factor=8.0, original_context=256),
    ),
    (
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512},
        RopeConfig("yarn", 10000.0, 64, factor=4.0, original_context=512),
    ),
    (
        {
            "rope_type": "yarn",
            "factor": 40.0,
            "original_max_position_embeddings": 128,
            "beta_fast": 16.0,
            "beta_slow": 2.0,
            "mscale": 0.7,
            "mscale_all_dim": 1.0,
            "truncate": False,
        },
        RopeConfig(
            "yarn",
            10000.0,
            64,
            factor=40.0,
            original_context=128,
            beta_fast=16.0,
            beta_slow=2.0,
            mscale=0.7,
            mscale_all_dim=1.0,
            truncate=False,
        ),
    ),
    (
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512, "attention_factor": 1.3},
        RopeConfig("yarn", 10000.0, 64, factor=4.0, original_context=512, attention_factor=1.3),
    ),
]


@pytest.mark.parametrize(("parameters", "rope"), CASES)
def test_tables_are_those_of_transformers(parameters, rope):
    config = LlamaConfig(
        hidden_size=256,
        num_attention_heads=4,
        max_position_embeddings=2048,
        rope_parameters={"rope_theta": 10000.0, **parameters},
    )
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), torch.arange(2048)[None])
    table = build_cos_sin(rope, 2048, CPU)
    assert table.dtype == torch.float32
    assert table.shape == (2048, 64)
    expected = torch.cat((cos[0, :, :32], sin[0, :, :32]), dim=1)
    assert (table - expected).abs().max() <= 1e-6


def test_divisors_of_single_frequencies():
    factors = tuple(float(1 + index) for index in range(4))
    plain, _ = inverse_frequencies(RopeConfig("default", 10000.0, 8))
    divided, _ = inverse_frequencies(RopeConfig("default", 10000.0, 8, frequency_factors=factors))
    assert torch.equal(divided * torch.tensor(factors), plain)
