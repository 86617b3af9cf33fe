"""Rotary position embedding (Su et al., "RoFormer", 2021), in the half-split layout of the Llama family."""

import math
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from octavo.worker.models.rope import LinearScaling, Llama3Scaling, LongRopeScaling, RotaryConfig, YarnScaling

# Cosines and signed sines of a step's tokens, each [tokens, 1, rotary_dim], in the dtype of the heads.
Angles = tuple[Tensor, Tensor]


@dataclass(frozen=True, eq=False, slots=True)
class RotaryTable:
    """Cosines and sines of every position, each [max_position, rotary_dim / 2] fp32, times the attention factor."""

    cos: Tensor
    sin: Tensor

    @classmethod
    def of(cls, config: RotaryConfig, max_position: int, device: torch.device) -> Self:
        angles = torch.outer(torch.arange(max_position, dtype=torch.float32), inverse_frequencies(config))
        cos, sin = angles.cos(), angles.sin_()
        return cls(*(table.mul_(config.attention_factor).to(device) for table in (cos, sin)))

    def at(self, positions: Tensor, dtype: torch.dtype) -> Angles:
        """Of `positions` ([tokens]), for `rotate`."""
        cos, sin = (table.index_select(0, positions).unsqueeze(1).to(dtype) for table in (self.cos, self.sin))
        # The minus of rotating by 90 degrees is folded in.
        return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


def rotate(heads: Tensor, angles: Angles) -> Tensor:
    """`heads` ([tokens, heads, head_dim]), the first rotary_dim of each turned by their positions' `angles`."""
    cos, signed_sin = angles
    turning, fixed = heads.tensor_split([cos.shape[-1]], dim=-1)
    first, second = turning.chunk(2, dim=-1)
    turned = torch.addcmul(turning * cos, torch.cat((second, first), dim=-1), signed_sin)
    return torch.cat((turned, fixed), dim=-1) if fixed.shape[-1] else turned


def halves_first(turning_heads: int, other_heads: int, head_dim: int, rotary_dim: int) -> Tensor:
    """The order of rows ([(turning_heads + other_heads) * head_dim] int64) that makes of heads whose neighbouring rows
    turn in pairs such as `rotate` takes. Products of queries and keys do not change if both are put in this order."""
    rows = torch.arange((turning_heads + other_heads) * head_dim).view(-1, head_dim)
    turning = rows[:turning_heads, :rotary_dim]
    turning.copy_(torch.cat((turning[:, ::2], turning[:, 1::2]), dim=1))
    return rows.flatten()


def inverse_frequencies(config: RotaryConfig) -> Tensor:
    """[rotary_dim / 2] fp32: theta^(-2i/d), scaled as `config.scaling` says."""
    exponents = torch.arange(0, config.rotary_dim, 2, dtype=torch.int64).float() / config.rotary_dim
    wavelengths = config.theta**exponents
    match config.scaling:
        case None:
            return 1.0 / wavelengths
        case LinearScaling(factor):
            return 1.0 / wavelengths / factor
        case LongRopeScaling(factors):
            return 1.0 / (torch.tensor(factors, dtype=torch.float32) * wavelengths)
        case Llama3Scaling() as llama3:
            return _stretched(1.0 / wavelengths, llama3.factor, _llama3_kept(1.0 / wavelengths, llama3))
        case YarnScaling() as yarn:
            return _stretched(1.0 / wavelengths, yarn.factor, _yarn_kept(config, yarn))


def _stretched(frequencies: Tensor, factor: float, kept: Tensor) -> Tensor:
    """Between `frequencies` / `factor` (where `kept` is 0) and `frequencies` (1)."""
    return frequencies / factor * (1.0 - kept) + frequencies * kept


def _llama3_kept(frequencies: Tensor, scaling: Llama3Scaling) -> Tensor:
    """Llama 3.1: long waves are stretched, short ones kept, those between interpolated."""
    turns = scaling.original_max_position * frequencies / (2 * math.pi)
    span = scaling.high_frequency_factor - scaling.low_frequency_factor
    return ((turns - scaling.low_frequency_factor) / span).clamp(0.0, 1.0)


def _yarn_kept(config: RotaryConfig, scaling: YarnScaling) -> Tensor:
    """Peng et al., "YaRN" (2023): dimensions that turn more than `beta_fast` times within the original context are
    kept, those that turn less than `beta_slow` times stretched, those between interpolated."""

    def dimension(turns: float) -> float:
        ratio = scaling.original_max_position / (turns * 2 * math.pi)
        return config.rotary_dim * math.log(ratio) / (2 * math.log(config.theta))

    low, high = dimension(scaling.beta_fast), dimension(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, config.rotary_dim - 1)
    # A width of zero would divide by it.
    width = (high - low) or 0.001
    ramp = (torch.arange(config.rotary_dim // 2, dtype=torch.float32) - low) / width
    return 1.0 - ramp.clamp(0.0, 1.0)
