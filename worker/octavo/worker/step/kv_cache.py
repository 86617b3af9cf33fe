"""The KV cache of one replica: how blocks lie in memory, and the pools that hold them."""

import errno
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from octavo.kernels.backend import CacheShape
from octavo.kernels.native.memory import zeros
from octavo.wire.steps import BlockMoves
from octavo.worker.gpu.swap import PinningError, pinned_zeros
from octavo.worker.model_settings import ModelSettings
from octavo.worker.models.decoder import LayerCache, ModelSizes
from octavo.worker.step.block_mover import Blocks, block_mover
from octavo.worker.step.layer_pool import LayerPool

logger = logging.getLogger(__name__)
# The share of the CPU's memory that is free once the weights are loaded; activations and other processes need the rest.
_CPU_SHARE, _CPU_LIMIT = 0.1, 4 << 30
# The share of CPU memory that may be pinned: pinned memory is taken from all other processes on the host.
_PINNED_SHARE = 0.25


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Names the layers that share one block table per sequence, and so attend to the same `window` (0: everything)."""

    window: int
    layers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class KVLayout:
    """The layout of blocks: a block holds the keys and values of `block_size` tokens in one group's layers.

    A block of any group takes the same number of bytes, so that any group may use any block: each block has room for as
    many layers as the smallest kind of layer has. The room that a group does not fill is lost.

    Blocks come first, and a block's layers lie side by side, so that a block moves as one piece. Measurements of others
    on an H100, between its memory and the CPU's: copies of 32 KB, as of a block scattered over its layers, reach 8
    GB/s; gathering into a staging buffer first 34; whole blocks 46 to 48 of the link's 51. But each layer reads a part
    of every block, and so all pages of the pool: with `layers_together` only so many layers lie side by side (0: all),
    in a pool of their own, whose pages the other layers leave alone. A block is the same bytes in the same order.

    `dtype` is the cache's, which may be narrower than the model's; of int8, scales lie in the same block.
    """

    groups: list[LayerGroup]
    block_size: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    layers_together: int = 0

    @classmethod
    def of(cls, config: ModelSizes, block_size: int, dtype: torch.dtype, layers_together: int = 0) -> Self:
        groups = group_layers(config.windows)
        return cls(groups, block_size, config.num_kv_heads, config.head_dim, dtype, layers_together)

    @property
    def cache_shape(self) -> CacheShape:
        return CacheShape(self.block_size, self.num_kv_heads, self.head_dim, self.dtype)

    @property
    def layers_per_group(self) -> int:
        return max(len(group.layers) for group in self.groups)

    @property
    def bytes_per_layer_token(self) -> int:
        """Returns the bytes of one token's key and value in one layer."""
        return kv_bytes_per_token(1, self.num_kv_heads, self.cache_shape.width, self.dtype.itemsize)

    @property
    def bytes_per_token(self) -> int:
        """Returns the bytes of one token in all groups, unfilled room included."""
        return len(self.groups) * self.layers_per_group * self.bytes_per_layer_token

    @property
    def bytes_per_block(self) -> int:
        return self.block_size * self.layers_per_group * self.bytes_per_layer_token

    @property
    def layers_per_pool(self) -> int:
        """Returns the layers of a group that lie in one pool; the last pool may have fewer."""
        return min(self.layers_together or self.layers_per_group, self.layers_per_group)

    @property
    def shape(self) -> tuple[int, ...]:
        """Returns the shape of a block whose tokens come first: [layers_per_group, 2 (keys, values), block_size,
        kv_heads, `CacheShape.width`]."""
        return (self.layers_per_group, 2, self.block_size, self.num_kv_heads, self.cache_shape.width)

    def shapes(self, num_blocks: int, *, heads_first: bool = False) -> list[tuple[int, ...]]:
        """Returns the shape of each pool that holds some layers of `num_blocks` blocks.

        It is [num_blocks, layers, 2, block_size, kv_heads, `CacheShape.width`] (2: keys, values), or with `heads_first`
        [..., kv_heads, block_size, `CacheShape.width`].
        """
        tokens_and_heads = self.block_size, self.num_kv_heads
        inner = (2, *(reversed(tokens_and_heads) if heads_first else tokens_and_heads), self.cache_shape.width)
        each, num_layers = self.layers_per_pool, self.layers_per_group
        return [(num_blocks, min(each, num_layers - first), *inner) for first in range(0, num_layers, each)]


def group_layers(windows: Sequence[int]) -> list[LayerGroup]:
    """Returns the KV groups of layers with these `windows`.

    Layers of equal window are cut into groups as large as the number of layers with the rarest window; the last group
    of each window may be smaller.
    """
    kinds: dict[int, list[int]] = {}
    for layer, window in enumerate(windows):
        kinds.setdefault(window, []).append(layer)
    size = min(map(len, kinds.values()))
    return [
        LayerGroup(window, tuple(layers[first : first + size]))
        for window, layers in kinds.items()
        for first in range(0, len(layers), size)
    ]


def kv_bytes_per_token(num_layers: int, num_kv_heads: int, width: int, itemsize: int) -> int:
    """Returns the bytes that one token's keys and values take in `num_layers` layers, `width` elements a head."""
    return 2 * num_layers * num_kv_heads * width * itemsize


class KVCacheError(Exception):
    """Raised if there is no room for the keys and values asked for."""


class KVCache:
    """Holds the keys and values of `num_blocks` blocks on the model's device, and of `num_cpu_blocks` in CPU memory.

    `layers` holds each layer's cache, with its (key scale, value scale) of `scales` if those are given; `pools` the
    blocks as bytes, some layers each. On a GPU the tokens of a head lie side by side in a block: a kernel reads them as
    one piece. A host that cannot pin memory for a GPU leaves it without CPU blocks: `num_cpu_blocks` tells how many
    there are. Raises `KVCacheError` if there is no room.
    """

    def __init__(
        self,
        layout: KVLayout,
        *,
        num_blocks: int,
        num_cpu_blocks: int,
        device: torch.device,
        scales: Sequence[tuple[float, float]] | None = None,
    ) -> None:
        if num_blocks < 1:
            raise KVCacheError(f"{num_blocks} KV blocks are asked for; a sequence needs at least one")
        heads_first = device.type != "cpu"
        with _room_for(layout, num_blocks, device, "--kv-cache-memory"):
            self._blocks = _device_blocks(layout.shapes(num_blocks, heads_first=heads_first), layout.dtype, device)
        with _room_for(layout, num_cpu_blocks, torch.device("cpu"), "--swap-memory"):
            cpu_blocks = _cpu_blocks(layout.shapes(num_cpu_blocks, heads_first=heads_first), layout.dtype, device)
        self.num_blocks, self.num_cpu_blocks = num_blocks, len(cpu_blocks[0])
        self.layout = layout
        self._mover = block_mover(self._blocks, cpu_blocks)
        self.pools = [
            LayerPool(*blocks, layout.cache_shape, self._mover) for blocks in zip(self._blocks, cpu_blocks, strict=True)
        ]
        tokens_first = [blocks.transpose(3, 4) if heads_first else blocks for blocks in self._blocks]
        self.layers = _layer_caches(layout, tokens_first, scales)

    def move(self, moves: BlockMoves) -> None:
        """Moves blocks as `octavo.worker.step.block_mover.BlockMover.move`: on a GPU, blocks that leave may be read for
        a while."""
        self._mover.move(moves)

    def before_writing(self, block_ids: Iterable[int]) -> None:
        """Orders the swap-outs under way before a step that writes `block_ids`. Call it on the stream of that step."""
        self._mover.before_writing(block_ids)

    def used(self, block_ids: Blocks) -> None:
        """Notes that the stream of steps has been given work on these blocks, as
        `octavo.worker.step.block_mover.BlockMover.used` does. Swaps of other blocks do not wait for it."""
        self._mover.used(block_ids)

    def finish_moves(self) -> None:
        """Makes the work that the device is given from now on wait for all moves so far."""
        self._mover.before_writing_any()

    def clear(self, block_ids: Tensor) -> None:
        """Zeroes blocks ([blocks] int64) that are about to be filled.

        Masked slots are still multiplied by zero, and a NaN that an earlier owner left there would survive that.
        """
        if len(block_ids):
            self._mover.before_writing_any()
            for blocks in self._blocks:
                blocks.index_fill_(0, block_ids, 0)
            self._mover.used([range(self.num_blocks)])


def _device_blocks(shapes: list[tuple[int, ...]], dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    if device.type == "cpu":
        return [zeros(shape, dtype, touched=True) for shape in shapes]
    if device.type == "cuda" and not torch.cuda.is_available():
        raise KVCacheError(f"there is no GPU, or no driver for one, to hold KV blocks on {device}")
    return [torch.zeros(shape, dtype=dtype, device=device) for shape in shapes]


def _cpu_blocks(shapes: list[tuple[int, ...]], dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """Allocates CPU blocks: pinned where a GPU swaps to them, which is fastest; else they take no memory until used."""
    if device.type == "cpu":
        return [zeros(shape, dtype) for shape in shapes]
    if sum(map(math.prod, shapes)) * dtype.itemsize > available_memory():
        # Pinned memory is taken at once, and a process that takes too much is killed.
        raise OSError(errno.ENOMEM, "too little memory is free")
    try:
        return [pinned_zeros(shape, dtype) for shape in shapes]
    except PinningError as error:
        logger.warning("no blocks to swap to: %s; whoever is preempted is recomputed", error)
    with suppress(RuntimeError):
        # CUDA reports a refusal once more, at the next launch.
        torch.zeros(1, device=device)
    return [torch.empty((0, *shape[1:]), dtype=dtype) for shape in shapes]


@contextmanager
def _room_for(layout: KVLayout, num_blocks: int, device: torch.device, option: str) -> Iterator[None]:
    try:
        yield
    except (OSError, RuntimeError) as error:
        raise KVCacheError(
            f"{num_blocks} KV blocks of {layout.block_size} tokens take {num_blocks * layout.bytes_per_block} bytes,"
            f" which {device} does not have; give fewer with {option}"
        ) from error


def _layer_caches(
    layout: KVLayout, pools: list[Tensor], scales: Sequence[tuple[float, float]] | None
) -> list[LayerCache]:
    """Returns the caches in the order of the layers: a group's layers lie in the places 0, 1, ... of its blocks.

    Each of `pools` is [num_blocks, layers, 2, block_size, kv_heads, width].
    """
    places = [blocks[:, place] for blocks in pools for place in range(blocks.shape[1])]
    caches = {
        layer: LayerCache(index, place[:, 0], place[:, 1], *(scales[layer] if scales else ()))
        for index, group in enumerate(layout.groups)
        for layer, place in zip(group.layers, places, strict=False)
    }
    return [caches[layer] for layer in range(len(caches))]


def memory_for_cache() -> int:
    """Returns the bytes that the cache takes by default: a share of the free CPU memory."""
    return min(_CPU_LIMIT, int(_CPU_SHARE * available_memory()))


def num_blocks_in(memory: int, block_bytes: int, block_size: int) -> int:
    """Returns how many blocks of `block_bytes` (`block_size` tokens) fit into `memory` bytes.

    Raises `KVCacheError` if not one does.
    """
    num_blocks = memory // block_bytes
    if num_blocks < 1:
        raise KVCacheError(
            f"{memory} bytes of KV cache hold no block of {block_size} tokens;"
            f" give at least {block_bytes} with --kv-cache-memory"
        )
    return num_blocks


def num_cpu_blocks_in(settings: ModelSettings, num_blocks: int, block_bytes: int, agreed: Callable[[int], int]) -> int:
    """Returns how many blocks of `block_bytes` CPU memory holds beside `num_blocks` on the device.

    `agreed` returns the least number of all ranks.
    """
    num_cpu_blocks = settings.num_cpu_blocks
    if num_cpu_blocks is None:
        memory = settings.swap_memory
        affordable = int(_PINNED_SHARE * available_memory()) if memory is None else memory
        num_cpu_blocks = agreed(affordable) // block_bytes
        if memory is None:
            num_cpu_blocks = min(num_cpu_blocks, num_blocks // 4)
    return num_cpu_blocks


def available_memory() -> int:
    """Returns the bytes that this process may still take: the kernel's available memory, or less where a cgroup limits
    it."""
    fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines())
    free = int(fields["MemAvailable"].split()[0]) * 1024
    limit, used = (_cgroup_value(name) for name in ("memory.max", "memory.current"))
    return free if limit is None or used is None else min(free, max(0, limit - used))


def _cgroup_value(name: str) -> int | None:
    try:
        text = Path("/sys/fs/cgroup", name).read_text(encoding="ascii").strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None
