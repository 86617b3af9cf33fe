"""Random weights of any configuration, for measuring and testing without a download."""

import hashlib
from collections.abc import Mapping
from types import MappingProxyType

import torch
from torch import Tensor

# As transformers initialises: activations stay finite through any number of layers.
_STANDARD_DEVIATION = 0.02
_NOTHING_STORED: Mapping[str, tuple[int, ...]] = MappingProxyType({})


class DummyWeights:
    """A `WeightSource` that makes what is taken: norms are ones, the rest is normal with a small deviation.

    A tensor depends on its name and shape only, so every process makes the same model.
    """

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Nothing is stored."""
        return _NOTHING_STORED

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """A float32 tensor of `shape`."""
        if len(shape) == 1 and name.endswith("weight"):
            return torch.ones(shape)
        seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")
        return torch.empty(shape).normal_(0, _STANDARD_DEVIATION, generator=torch.Generator().manual_seed(seed))

    def drop(self, name: str) -> None:
        """Nothing is stored, so nothing can be left over."""

    def finish(self) -> None:
        """Never raises."""
