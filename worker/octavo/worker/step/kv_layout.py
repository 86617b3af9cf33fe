"""How a model's keys and values are cut into KV groups and blocks. Pure numbers: no tensor is made here."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, Self

import torch

from octavo.kernels.backend import CacheShape


class ModelShape(Protocol):
    """What the KV cache and the contract with the scheduler need to know of a model. `windows`: how many tokens each
    layer attends to, the querying one included; 0: all."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def max_model_len(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def windows(self) -> Sequence[int]: ...


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers that share one block table per sequence, and so attend to the same `window` (0: everything)."""

    window: int
    layers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class KVLayout:
    """A block holds `block_size` tokens' keys and values of one group's layers.

    A block of any group takes the same bytes, so that any group may use any block: all have room for as many layers as
    the smallest kind of layer has. What a group does not fill of that is lost.

    Blocks come first, and a block's layers lie side by side, so that it moves as one piece. Measured elsewhere on an
    H100, between its memory and the CPU's: copies of 32 KB, as of a block scattered over its layers, reach 8 GB/s;
    gathering into a staging buffer first 34; whole blocks 46 to 48 of the link's 51.

    `dtype` is that of the cache, which may be narrower than the model's.
    """

    groups: list[LayerGroup]
    block_size: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @classmethod
    def of(cls, config: ModelShape, block_size: int, dtype: torch.dtype) -> Self:
        return cls(group_layers(config.windows), block_size, config.num_kv_heads, config.head_dim, dtype)

    @property
    def cache_shape(self) -> CacheShape:
        return CacheShape(self.block_size, self.num_kv_heads, self.head_dim, self.dtype)

    @property
    def layers_per_group(self) -> int:
        return max(len(group.layers) for group in self.groups)

    @property
    def bytes_per_layer_token(self) -> int:
        """Bytes of one token's key and value in one layer."""
        return kv_bytes_per_token(1, self.num_kv_heads, self.head_dim, self.dtype.itemsize)

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token in all groups, with what they do not fill."""
        return len(self.groups) * self.layers_per_group * self.bytes_per_layer_token

    @property
    def bytes_per_block(self) -> int:
        return self.block_size * self.layers_per_group * self.bytes_per_layer_token

    def shape(self, num_blocks: int, *, heads_first: bool = False) -> tuple[int, ...]:
        """That of the tensor that holds `num_blocks` blocks: [num_blocks, layers_per_group, 2, block_size, kv_heads,
        head_dim] (2: keys, values), or with `heads_first` [..., kv_heads, block_size, head_dim]."""
        tokens_and_heads = self.block_size, self.num_kv_heads
        inner = reversed(tokens_and_heads) if heads_first else tokens_and_heads
        return (num_blocks, self.layers_per_group, 2, *inner, self.head_dim)


def group_layers(windows: Sequence[int]) -> list[LayerGroup]:
    """The KV groups of layers with these `windows`: those of equal window, cut into groups of as many as there are of
    the rarest window; the last of each may have fewer."""
    kinds: dict[int, list[int]] = {}
    for layer, window in enumerate(windows):
        kinds.setdefault(window, []).append(layer)
    size = min(map(len, kinds.values()))
    return [
        LayerGroup(window, tuple(layers[first : first + size]))
        for window, layers in kinds.items()
        for first in range(0, len(layers), size)
    ]


def kv_bytes_per_token(num_layers: int, num_kv_heads: int, head_dim: int, itemsize: int) -> int:
    """Bytes that one token's keys and values take in `num_layers` layers."""
    return 2 * num_layers * num_kv_heads * head_dim * itemsize
