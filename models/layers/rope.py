"""Tables of rotary position embeddings (Su et al. 2021) with the scalings that checkpoints use.

Formulas and order of operations follow transformers' modeling_rope_utils, so that float32 agrees with it.
"""

import math

import torch

from models.config import RopeConfig


def build_cos_sin(rope: RopeConfig, max_positions: int, device: torch.device) -> torch.Tensor:
    """float32 [max_positions, 2 * R]: cos of R = rotary_dim / 2 angles, then sin; attention scaling multiplied in."""
    frequencies, scale = inverse_frequencies(rope)
    angles = torch.arange(max_positions, dtype=torch.float32)[:, None] * frequencies
    return torch.cat((angles.cos() * scale, angles.sin() * scale), dim=1).to(device)


def inverse_frequencies(rope: RopeConfig) -> tuple[torch.Tensor, float]:
    """float32 [rotary_dim / 2], and the factor on cos and sin."""
    exponents = torch.arange(0, rope.rotary_dim, 2, dtype=torch.float32) / rope.rotary_dim
    powers = rope.theta**exponents
    scale = 1.0
    if rope.rope_type == "yarn":
        frequencies, scale = _yarn(rope, powers)
    elif rope.rope_type == "llama3":
        frequencies = _llama3(rope, 1.0 / powers)
    else:
        frequencies = 1.0 / powers / rope.factor
    if rope.frequency_factors is not None:
        frequencies = frequencies / torch.tensor(rope.frequency_factors)
    return frequencies, scale


def _llama3(rope: RopeConfig, plain: torch.Tensor) -> torch.Tensor:
    """Llama 3.1: long waves divided by the factor, short ones kept, a ramp between."""
    context = rope.original_context
    wavelength = 2 * math.pi / plain
    scaled = torch.where(wavelength > context / rope.low_freq_factor, plain / rope.factor, plain)
    smooth = (context / wavelength - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    ramp = (1 - smooth) * scaled / rope.factor + smooth * scaled
    is_between = (wavelength >= context / rope.high_freq_factor) & (wavelength <= context / rope.low_freq_factor)
    return torch.where(is_between, ramp, scaled)


def _yarn(rope: RopeConfig, powers: torch.Tensor) -> tuple[torch.Tensor, float]:
    """YaRN (Peng et al. 2023): dimensions that turn less than beta_slow times are interpolated."""

    def dimension_of(rotations: float) -> float:
        turns = rope.original_context / (rotations * 2 * math.pi)
        return rope.rotary_dim * math.log(turns) / (2 * math.log(rope.theta))

    low, high = dimension_of(rope.beta_fast), dimension_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.rotary_dim - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(rope.rotary_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    kept = 1 - ramp
    frequencies = 1.0 / (rope.factor * powers) * (1 - kept) + 1.0 / powers * kept
    return frequencies, _yarn_scale(rope)


def _yarn_scale(rope: RopeConfig) -> float:
    def mscale(weight: float) -> float:
        return 0.1 * weight * math.log(rope.factor) + 1.0 if rope.factor > 1 else 1.0

    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return mscale(rope.mscale) / mscale(rope.mscale_all_dim)
    return mscale(1.0)
