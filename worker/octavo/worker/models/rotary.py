"""Rotary position embedding (Su et al., "RoFormer", 2021), in the half-split layout of the Llama family."""

import math

import torch
from torch import Tensor

from octavo.worker.models.config import RotaryConfig

# Cosines and signed sines of a step's tokens, each [tokens, 1, head_dim].
Angles = tuple[Tensor, Tensor]


class RotaryEmbedding:
    """The table of angles for positions 0 to `max_position` - 1, kept in `dtype`."""

    def __init__(
        self, config: RotaryConfig, head_dim: int, max_position: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        angles = torch.outer(torch.arange(max_position, dtype=torch.float32), inverse_frequencies(config, head_dim))
        cos, sin = angles.cos(), angles.sin()
        self._cos = torch.cat((cos, cos), dim=-1).to(device, dtype)
        # The minus of rotating by 90 degrees is folded into the table.
        self._signed_sin = torch.cat((-sin, sin), dim=-1).to(device, dtype)

    def at(self, positions: Tensor) -> Angles:
        """Cosines and signed sines of `positions` ([tokens]), each [tokens, 1, head_dim]: for `rotate`."""
        return (
            self._cos.index_select(0, positions).unsqueeze(1),
            self._signed_sin.index_select(0, positions).unsqueeze(1),
        )


def rotate(heads: Tensor, angles: Angles) -> Tensor:
    """`heads` ([tokens, heads, head_dim]) turned by their positions' `angles`."""
    cos, signed_sin = angles
    first, second = heads.chunk(2, dim=-1)
    return torch.addcmul(heads * cos, torch.cat((second, first), dim=-1), signed_sin)


def inverse_frequencies(config: RotaryConfig, head_dim: int) -> Tensor:
    """[head_dim / 2] fp32: theta^(-2i/d), stretched as `config.kind` says."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    frequencies = 1.0 / config.theta**exponents
    match config.kind:
        case "linear":
            return frequencies / config.factor
        case "llama3":
            return _stretch_low_frequencies(frequencies, config)
    return frequencies


def _stretch_low_frequencies(frequencies: Tensor, config: RotaryConfig) -> Tensor:
    """Llama 3.1: long waves are stretched by `factor`, short ones kept, those between interpolated."""
    turns = config.original_max_position * frequencies / (2 * math.pi)
    span = config.high_frequency_factor - config.low_frequency_factor
    kept = ((turns - config.low_frequency_factor) / span).clamp(0.0, 1.0)
    return frequencies * (kept + (1.0 - kept) / config.factor)
