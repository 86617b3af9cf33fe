"""Random weights of any configuration, for measuring and testing without a download."""

import functools
import hashlib
from collections.abc import Mapping
from types import MappingProxyType

import torch
from torch import Tensor

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


class DummyWeights:
    """A `WeightSource` that makes what is taken: norms are ones, the rest is as if drawn from a normal
    distribution of small deviation.

    A tensor depends on its name and shape only, so every process makes the same model.
    """

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Nothing is stored."""
        return _NOTHING_STORED

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """A float32 tensor of `shape`."""
        if len(shape) == 1 and name.endswith("weight"):
            return torch.ones(shape)
        first = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little") % _NUM_DRAWN
        filled = torch.empty(shape)
        for part in torch.split(filled.view(-1), _NUM_DRAWN):
            part.copy_(_drawn()[first : first + len(part)])
        return filled

    def drop(self, name: str) -> None:
        """Nothing is stored, so nothing can be left over."""

    def finish(self) -> None:
        """Never raises."""
