"""Random weights of any configuration, for measuring and testing without a download."""

import functools
import hashlib
import math
from collections.abc import Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from octavo.worker.loading.tensor_file import Part

# As transformers initialises: activations stay finite through any number of layers.
_STANDARD_DEVIATION = 0.02
# Numbers that are drawn, once; a prime, so that no two rows of a matrix begin with the same one.
_NUM_DRAWN = 1_048_573
_NOTHING_STORED: Mapping[str, tuple[int, ...]] = MappingProxyType({})


@functools.cache
def _drawn() -> Tensor:
    """All that tensors are filled with, twice, one after the other: a model has billions of numbers, which take minutes
    to draw and seconds to copy."""
    drawn = torch.empty(_NUM_DRAWN).normal_(0, _STANDARD_DEVIATION, generator=torch.Generator().manual_seed(0))
    return torch.cat((drawn, drawn))


def _fill(flat: Tensor, begin: int) -> None:
    """With what is drawn from the place `begin` on, over and over."""
    first = begin % _NUM_DRAWN
    for piece in torch.split(flat, _NUM_DRAWN):
        piece.copy_(_drawn()[first : first + len(piece)])


class DummyWeights:
    """A `WeightSource` that makes what is taken: norms are ones, the rest is as if drawn from a normal
    distribution of small deviation.

    A tensor depends on its name and shape only, so every process makes the same model.
    """

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Nothing is stored."""
        return _NOTHING_STORED

    def take(self, name: str, shape: tuple[int, ...], part: Part | None = None) -> Tensor:
        """A float32 tensor of `shape`, or `part` of it."""
        filled = torch.empty(shape if part is None else part.shape(shape))
        if len(shape) == 1 and name.endswith("weight"):
            return filled.fill_(1)
        begin = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")
        flat, end = filled.view(-1), 0
        for first, count in [(0, math.prod(shape))] if part is None else part.pieces(shape):
            end += count
            _fill(flat[end - count : end], begin + first)
        return filled

    def drop(self, name: str) -> None:
        """Nothing is stored, so nothing can be left over."""

    def finish(self) -> None:
        """Never raises."""
