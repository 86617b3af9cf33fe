"""Chooses tiles of products whose rows are a weight's outputs and whose columns are tokens, and checks what such
products are given.

So few tokens fill the matrix instruction: Hopper's has 64 rows, and columns in multiples of 8.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from octavo.kernels.triton.language import POINTERS


@dataclass(frozen=True, slots=True)
class OutputTile:
    """Describes one program's part of the result, its warps, and the pieces of inputs that are under way at once."""

    outputs: int
    tokens: int
    num_warps: int
    loads: int

    def fitted(self, piece_bytes: int, shared: int) -> Self:
        """Returns the tile with as many pieces of so many bytes on their way as `shared` bytes have room for."""
        return replace(self, loads=max(1, min(self.loads, shared // piece_bytes)))


def smallest(tiles: Sequence[OutputTile], num_tokens: int) -> OutputTile:
    """Returns the first of `tiles` with room for all tokens, or else the last."""
    return next((tile for tile in tiles if num_tokens <= tile.tokens), tiles[-1])


def check_linear(inputs: Tensor, weight: tuple[int, int], device: torch.device, bias: Tensor | None) -> None:
    """Raises `ValueError` unless inputs and bias fit a weight of (outputs, inputs) on `device`."""
    num_outputs, num_inputs = weight
    if inputs.dim() != 2 or inputs.shape[1] != num_inputs or inputs.dtype not in POINTERS:
        raise ValueError(
            f"inputs {list(inputs.shape)} {inputs.dtype} for a weight of {num_inputs} inputs in bf16, fp16 or fp32"
        )
    if inputs.stride(1) != 1 or inputs.device != device:
        raise ValueError(f"rows have gaps, or are on {inputs.device} and the weight on {device}")
    if bias is not None and not (bias.shape == (num_outputs,) and bias.dtype == inputs.dtype and bias.is_contiguous()):
        raise ValueError(f"a bias {list(bias.shape)} {bias.dtype} for {num_outputs} outputs in {inputs.dtype}")
