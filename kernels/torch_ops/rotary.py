"""Rotary embedding of neighbouring pairs (GPT-J's and DeepSeek's order)."""

import torch


def rotate_pairs(x: torch.Tensor, cos_sin: torch.Tensor, *, inverse: bool = False) -> torch.Tensor:
    """Rotate each pair (x[2i], x[2i + 1]) of x [T, heads, 2R] by angle i; cos_sin [T, 2R]: R cosines, then R sines.

    The order of the pairs is kept. inverse: by the negative angle. Fresh tensor of x's dtype.
    """
    wide = x.double() if x.dtype == torch.float64 else x.float()
    cos, sin = cos_sin.to(wide.dtype).unsqueeze(1).chunk(2, dim=-1)  # [T, 1, R]
    if inverse:
        sin = -sin
    even, odd = wide[..., 0::2], wide[..., 1::2]
    return torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1).flatten(-2).to(x.dtype)


def rotate_tail_halves(x: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
    """Rotate the pairs (i, i + R) of the last 2R dimensions of x [T, heads, D]; the others stay."""
    wide = x.double() if x.dtype == torch.float64 else x.float()
    cos, sin = cos_sin.to(wide.dtype).unsqueeze(1).chunk(2, dim=-1)
    kept = x.shape[-1] - cos_sin.shape[-1]
    first, second = wide[..., kept:].chunk(2, dim=-1)
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return torch.cat((x[..., :kept], turned.to(x.dtype)), dim=-1)


def rotate_tail(x: torch.Tensor, cos_sin: torch.Tensor, *, inverse: bool = False) -> torch.Tensor:
    """Like `rotate_pairs` for the last 2R of the dimensions of x [T, heads, D]; the others stay."""
    kept = x.shape[-1] - cos_sin.shape[-1]
    return torch.cat((x[..., :kept], rotate_pairs(x[..., kept:], cos_sin, inverse=inverse)), dim=-1)
