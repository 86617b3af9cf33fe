"""The paged keys and values of one worker: a tensor on its device, one on the CPU, and how many blocks of them fit."""

import errno
import logging
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from octavo.kernels.native.memory import zeros
from octavo.wire.steps import BlockMoves
from octavo.worker.gpu.pinned_memory import PinningError, pinned_zeros
from octavo.worker.step.block_mover import block_mover
from octavo.worker.step.kv_layout import KVLayout

logger = logging.getLogger(__name__)

# The share of the CPU's memory that is free once the weights are loaded; activations and other processes need the rest.
_CPU_SHARE, _CPU_LIMIT = 0.1, 4 << 30


class KVCacheError(Exception):
    """There is no room for the keys and values asked for."""


@dataclass(frozen=True, slots=True)
class LayerCache:
    """One layer's keys and values in the blocks of KV `group`: [num_blocks, block_size, kv_heads, head_dim] each, views
    with gaps into the pool of all layers. In a narrow cache a key is what is stored times `key_scale`; values alike."""

    group: int
    keys: Tensor
    values: Tensor
    key_scale: float = 1.0
    value_scale: float = 1.0


class KVCache:
    """Keys and values of `num_blocks` blocks on the model's device, and of `num_cpu_blocks` in the CPU's memory.

    `layers` holds each layer's cache, with its (key scale, value scale) of `scales` if those are given. On a GPU the
    tokens of a head lie side by side in a block: a kernel reads them as one piece. A host that pins no memory for a GPU
    leaves it without CPU blocks: `num_cpu_blocks` are there. Raises `KVCacheError` if there is no room.
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
        self.num_cpu_blocks = len(cpu_blocks)
        self._mover = block_mover(self._blocks, cpu_blocks)
        tokens_first = self._blocks.transpose(3, 4) if heads_first else self._blocks
        self.layers = _layer_caches(layout, tokens_first, scales)

    def move(self, moves: BlockMoves) -> None:
        """As `octavo.worker.step.block_mover.BlockMover.move`: on a GPU, blocks that leave may still be read for a
        while."""
        self._mover.move(moves)

    def before_writing(self, block_ids: Iterable[int]) -> None:
        """To be called before a step that writes these blocks, on the stream that computes it."""
        self._mover.before_writing(block_ids)

    def finish_moves(self) -> None:
        """What the device is given from now on begins only after all moves so far."""
        self._mover.before_writing_any()

    def clear(self, block_ids: Tensor) -> None:
        """Zeroes blocks ([blocks] int64) about to be filled: masked slots are still multiplied by zero, and a NaN that
        an earlier owner left there would survive that."""
        if len(block_ids):
            self._mover.before_writing_any()
            self._blocks.index_fill_(0, block_ids, 0)


def _device_blocks(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    if device.type == "cpu":
        return zeros(shape, dtype, touched=True)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise KVCacheError(f"there is no GPU, or no driver for one, to hold KV blocks on {device}")
    return torch.zeros(shape, dtype=dtype, device=device)


def _cpu_blocks(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Pinned where a GPU swaps to them: it reads and fills them fastest so. Else they take no memory until used."""
    if device.type == "cpu":
        return zeros(shape, dtype)
    if math.prod(shape) * dtype.itemsize > available_memory():
        # Pinned memory is taken at once, and whoever takes too much is killed.
        raise OSError(errno.ENOMEM, "too little memory is free")
    try:
        return pinned_zeros(shape, dtype)
    except PinningError as error:
        logger.warning("no blocks to swap to: %s; whoever is preempted is recomputed", error)
    with suppress(RuntimeError):
        # CUDA tells once more of what it refused, at the next launch of whoever comes first.
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
    """In the order of the layers: a group's layers lie in the places 0, 1, ... of its blocks. `blocks`: [num_blocks,
    layers_per_group, 2, block_size, kv_heads, head_dim]."""
    caches = {
        layer: LayerCache(index, blocks[:, place, 0], blocks[:, place, 1], *(scales[layer] if scales else ()))
        for index, group in enumerate(layout.groups)
        for place, layer in enumerate(group.layers)
    }
    return [caches[layer] for layer in range(len(caches))]


def memory_for_cache() -> int:
    """Bytes: a share of what is free of the CPU's memory."""
    return min(_CPU_LIMIT, int(_CPU_SHARE * available_memory()))


def num_blocks_in(memory: int, block_bytes: int, block_size: int) -> int:
    """How many blocks of `block_bytes` (`block_size` tokens) fit into `memory` bytes.

    Raises `KVCacheError` if not one does.
    """
    num_blocks = memory // block_bytes
    if num_blocks < 1:
        raise KVCacheError(
            f"{memory} bytes of KV cache hold no block of {block_size} tokens;"
            f" give at least {block_bytes} with --kv-cache-memory"
        )
    return num_blocks


def available_memory() -> int:
    """Bytes that this process may still take: what the kernel calls available, less where a cgroup says so."""
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
