"""The KV cache of one replica: how blocks lie in memory, and the pools that hold them."""

import errno
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
import torch
from torch import Tensor

from octavo.kernels.backend import CacheShape
from octavo.kernels.native.memory import zeros
from octavo.wire.steps import BlockMoves
from octavo.worker.gpu.swap import PinningError, pinned_zeros
from octavo.worker.gpu.transfer import download, upload
from octavo.worker.model_settings import ModelSettings
from octavo.worker.models.decoder import LayerCache, ModelSizes
from octavo.worker.step.block_mover import Blocks, block_mover

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
    GB/s; gathering into a staging buffer first 34; whole blocks 46 to 48 of the link's 51.

    `dtype` is the cache's, which may be narrower than the model's; of int8, scales lie in the same block.
    """

    groups: list[LayerGroup]
    block_size: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @classmethod
    def of(cls, config: ModelSizes, block_size: int, dtype: torch.dtype) -> Self:
        return cls(group_layers(config.windows), block_size, config.num_kv_heads, config.head_dim, dtype)

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

    def shape(self, num_blocks: int, *, heads_first: bool = False) -> tuple[int, ...]:
        """Returns the shape of the tensor that holds `num_blocks` blocks.

        It is [num_blocks, layers_per_group, 2, block_size, kv_heads, `CacheShape.width`] (2: keys, values), or with
        `heads_first` [..., kv_heads, block_size, `CacheShape.width`].
        """
        tokens_and_heads = self.block_size, self.num_kv_heads
        inner = reversed(tokens_and_heads) if heads_first else tokens_and_heads
        return (num_blocks, self.layers_per_group, 2, *inner, self.cache_shape.width)


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

    `layers` holds each layer's cache, with its (key scale, value scale) of `scales` if those are given. On a GPU the
    tokens of a head lie side by side in a block: a kernel reads them as one piece. A host that cannot pin memory for a
    GPU leaves it without CPU blocks: `num_cpu_blocks` tells how many there are. Raises `KVCacheError` if there is no
    room.
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
            self._blocks = _device_blocks(layout.shape(num_blocks, heads_first=heads_first), layout.dtype, device)
        with _room_for(layout, num_cpu_blocks, torch.device("cpu"), "--swap-memory"):
            cpu_blocks = _cpu_blocks(layout.shape(num_cpu_blocks, heads_first=heads_first), layout.dtype, device)
        self.num_blocks, self.num_cpu_blocks = num_blocks, len(cpu_blocks)
        self.layout = layout
        self._rows, self._cpu_rows = _rows(self._blocks), _rows(cpu_blocks)
        self._mover = block_mover(self._blocks, cpu_blocks)
        tokens_first = self._blocks.transpose(3, 4) if heads_first else self._blocks
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
            self._blocks.index_fill_(0, block_ids, 0)
            self._mover.used([range(len(self._blocks))])

    @property
    def bytes_per_block(self) -> int:
        return self.layout.bytes_per_block

    @property
    def is_here(self) -> bool:
        """Tells whether device blocks are in memory that this process reads itself."""
        return self._blocks.device.type == "cpu"

    def read(self, block_ids: Sequence[int]) -> list[Tensor]:
        """Returns the bytes of device blocks, [bytes] uint8 each: the blocks themselves where they are `is_here`, else
        copies, valid once the device has done what it was given so far."""
        if self.is_here:
            return [self._rows[block_id] for block_id in block_ids]
        wanted = upload(np.array(block_ids, dtype=np.int64), self._blocks.device)
        copies = list(download(self._rows.index_select(0, wanted)))
        self._mover.used([tuple(block_ids)])
        return copies

    def rows(self, *, in_cpu: bool) -> Tensor | None:
        """Returns the bytes of all blocks, [blocks, bytes] uint8, of the device or `in_cpu`; None where they are not in
        this process's memory."""
        return self._cpu_rows if in_cpu else (self._rows if self.is_here else None)

    def fill(self, block_id: int, content: Tensor) -> None:
        """Writes the bytes of a block into a CPU block, once no swap is under way."""
        self._mover.finish_swaps()
        self._cpu_rows[block_id].copy_(content)

    def is_finite(self, content: Tensor) -> bool:
        """Tells whether the bytes of a block are finite numbers all: of int8, its scales."""
        return all(_is_finite(part) for part in self._floats(content))

    def _floats(self, content: Tensor) -> list[Tensor]:
        layout = self.layout
        if layout.dtype == torch.float8_e4m3fn:
            return [content.view(layout.dtype).float()]
        if layout.dtype != torch.int8:
            return [content.view(layout.dtype)]
        # Of each head, all codes come before all scales (`octavo.kernels.backend.int8_scale_bytes`).
        heads = content.view(layout.layers_per_group, 2, layout.num_kv_heads, -1)
        scales = heads[..., layout.block_size * layout.head_dim :]
        keys, values = scales[:, 0].contiguous(), scales[:, 1, :, : 4 * layout.block_size].contiguous()
        return [keys.view(torch.bfloat16), values.view(torch.float32)]


def _is_finite(numbers: Tensor) -> bool:
    """Tells whether all numbers of a float type are finite, by their bits, in no memory of its own. NumPy looks at
    them, alone: torch would wake threads of its own, for which the kernels' threads leave no core."""
    bits, unsigned = (torch.int16, np.uint16) if numbers.element_size() == 2 else (torch.int32, np.uint32)
    infinity = int(torch.tensor(math.inf, dtype=numbers.dtype).view(bits))
    signed = numbers.contiguous().view(bits).numpy()
    # As signed numbers the largest is positive, if any is; as unsigned ones negative, if any is.
    sign = torch.iinfo(bits).max + 1
    return int(signed.max()) < infinity and int(signed.view(unsigned).max()) < sign + infinity


def _rows(blocks: Tensor) -> Tensor:
    """Returns the bytes of each block, [num_blocks, bytes]."""
    return blocks.reshape(len(blocks), math.prod(blocks.shape[1:])).view(torch.uint8)


def _device_blocks(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    if device.type == "cpu":
        return zeros(shape, dtype, touched=True)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise KVCacheError(f"there is no GPU, or no driver for one, to hold KV blocks on {device}")
    return torch.zeros(shape, dtype=dtype, device=device)


def _cpu_blocks(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Allocates CPU blocks: pinned where a GPU swaps to them, which is fastest; else they take no memory until used."""
    if device.type == "cpu":
        return zeros(shape, dtype)
    if math.prod(shape) * dtype.itemsize > available_memory():
        # Pinned memory is taken at once, and a process that takes too much is killed.
        raise OSError(errno.ENOMEM, "too little memory is free")
    try:
        return pinned_zeros(shape, dtype)
    except PinningError as error:
        logger.warning("no blocks to swap to: %s; whoever is preempted is recomputed", error)
    with suppress(RuntimeError):
        # CUDA reports a refusal once more, at the next launch.
        torch.zeros(1, device=device)
    return torch.empty((0, *shape[1:]), dtype=dtype)


@contextmanager
def _room_for(layout: KVLayout, num_blocks: int, device: torch.device, option: str) -> Iterator[None]:
    try:
        yield
    except (OSError, RuntimeError) as error:
        raise KVCacheError(
            f"{num_blocks} KV blocks of {layout.block_size} tokens take {num_blocks * layout.bytes_per_block} bytes,"
            f" which {device} does not have; give fewer with {option}"
        ) from error


def _layer_caches(layout: KVLayout, blocks: Tensor, scales: Sequence[tuple[float, float]] | None) -> list[LayerCache]:
    """Returns the caches in the order of the layers: a group's layers lie in the places 0, 1, ... of its blocks.

    `blocks` is [num_blocks, layers_per_group, 2, block_size, kv_heads, width].
    """
    caches = {
        layer: LayerCache(index, blocks[:, place, 0], blocks[:, place, 1], *(scales[layer] if scales else ()))
        for index, group in enumerate(layout.groups)
        for place, layer in enumerate(group.layers)
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
