"""Rotary position embeddings with the scalings of the supported families.

B batch, T tokens, H heads, D head dimension.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from refusion.model.config import ModelConfig, RopeScaling


def inverse_frequencies(config: ModelConfig) -> tuple[Tensor, float]:
    """Rotation speeds [D/2] in float32 and the factor on cos and sin.

    llama3: Llama 3.1 release; yarn: arXiv 2309.00071, as in Hugging Face configs.
    """
    dim, theta = config.head_dim, config.rope_theta
    plain = 1.0 / theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    scaling = config.rope_scaling
    if scaling is None:
        return plain, 1.0
    if scaling.kind == "linear":
        return plain / scaling.factor, 1.0
    if scaling.kind == "llama3":
        return _llama3(plain, scaling), 1.0
    if scaling.kind == "yarn":
        return _yarn(plain, scaling, config)
    raise ValueError(f"RoPE scaling '{scaling.kind}' is not supported (linear, llama3 and yarn are)")


def _llama3(plain: Tensor, scaling: RopeScaling) -> Tensor:
    wavelength = 2 * math.pi / plain
    low = scaling.original_max_positions / scaling.low_freq_factor
    high = scaling.original_max_positions / scaling.high_freq_factor
    smooth = (scaling.original_max_positions / wavelength - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    blended = (1 - smooth) * plain / scaling.factor + smooth * plain
    scaled = torch.where(wavelength > low, plain / scaling.factor, plain)
    between = (wavelength <= low) & (wavelength >= high)
    return torch.where(between, blended, scaled)


def _yarn(plain: Tensor, scaling: RopeScaling, config: ModelConfig) -> tuple[Tensor, float]:
    dim, theta = config.head_dim, config.rope_theta
    original = scaling.original_max_positions or config.max_positions

    def correction(rotations: float) -> float:
        return dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = correction(scaling.beta_fast), correction(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / max(high - low, 0.001)).clamp(0, 1)
    frequencies = plain / scaling.factor * ramp + plain * (1 - ramp)
    factor = scaling.attention_factor
    if factor is None:
        factor = 0.1 * math.log(scaling.factor) + 1.0 if scaling.factor > 1 else 1.0
    return frequencies, factor


def rotation(frequencies: Tensor, factor: float, positions_T: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin [..., 1, D/2] in float32 for true positions [...], one entry per token."""
    angles = positions_T.float().unsqueeze(-1) * frequencies
    return (angles.cos() * factor).unsqueeze(-2), (angles.sin() * factor).unsqueeze(-2)


def rotate(x_THD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates [..., H, D] by the half-split convention; computes in float32, keeps the type."""
    first, second = x_THD.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x_THD.dtype)
