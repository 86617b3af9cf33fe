"""The paged keys and values of one worker: a tensor on its device, one on the CPU, and how many blocks of them fit."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from octavo.kernels.cache_ops import copy_blocks, swap_blocks
from octavo.kernels.native.memory import zeros
from octavo.wire.steps import BlockMove, BlockMoves
from octavo.worker.kv_layout import KVLayout

# Shares of the memory that is free once the weights are loaded; activations and other processes need the rest.
_CPU_SHARE, _CPU_LIMIT = 0.1, 4 << 30
_GPU_SHARE = 0.5


class KVCacheError(Exception):
    """There is no room for the keys and values asked for."""


@dataclass(frozen=True, slots=True)
class LayerCache:
    """One layer's keys and values in the blocks of KV `group`: [num_blocks, block_size, kv_heads, head_dim] each."""

    group: int
    keys: Tensor
    values: Tensor


class KVCache:
    """Keys and values of `num_blocks` blocks on the model's device, and of `num_cpu_blocks` in the CPU's memory.

    `layers` holds each layer's cache. Raises `KVCacheError` if there is no room.
    """

    def __init__(self, layout: KVLayout, *, num_blocks: int, num_cpu_blocks: int, device: torch.device) -> None:
        if num_blocks < 1:
            raise KVCacheError(f"{num_blocks} KV blocks are asked for; a sequence needs at least one")
        with _room_for(layout, num_blocks, device, "--kv-cache-memory"):
            self._blocks = _device_blocks(layout.shape(num_blocks), layout.dtype, device)
        with _room_for(layout, num_cpu_blocks, torch.device("cpu"), "--swap-memory"):
            self._cpu_blocks = _cpu_blocks(layout.shape(num_cpu_blocks), layout.dtype, device)
        self.layers = _layer_caches(layout, self._blocks)

    def move(self, moves: BlockMoves) -> None:
        """Swaps and copies whole blocks, in that order: all layers and all blocks of a kind at once.

        Raises `ValueError` on a block id out of range and on a target that two moves of a kind name.
        """
        swap_blocks(self._blocks, self._cpu_blocks, _pairs(moves.swap_out))
        swap_blocks(self._cpu_blocks, self._blocks, _pairs(moves.swap_in))
        copy_blocks(self._blocks, _pairs(moves.copy))

    def clear(self, block_ids: Tensor) -> None:
        """Zeroes blocks ([blocks] int64) about to be filled: masked slots are still multiplied by zero, and a NaN that
        an earlier owner left there would survive that."""
        if len(block_ids):
            self._blocks.index_fill_(2, block_ids, 0)


def _device_blocks(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    if device.type == "cpu":
        return zeros(shape, dtype, touched=True)
    return torch.zeros(shape, dtype=dtype, device=device)


def _cpu_blocks(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Pinned where a GPU swaps to them: it reads and fills them fastest so. Else they take no memory until used."""
    return zeros(shape, dtype) if device.type == "cpu" else torch.zeros(shape, dtype=dtype, pin_memory=True)


@contextmanager
def _room_for(layout: KVLayout, num_blocks: int, device: torch.device, option: str) -> Iterator[None]:
    try:
        yield
    except (OSError, RuntimeError) as error:
        raise KVCacheError(
            f"{num_blocks} KV blocks of {layout.block_size} tokens take {num_blocks * layout.bytes_per_block} bytes,"
            f" which {device} does not have; give fewer with {option}"
        ) from error


def _layer_caches(layout: KVLayout, blocks: Tensor) -> list[LayerCache]:
    """In the order of the layers: a group's layers lie in the places 0, 1, ... of its blocks."""
    caches = {
        layer: LayerCache(index, blocks[place, 0], blocks[place, 1])
        for index, group in enumerate(layout.groups)
        for place, layer in enumerate(group.layers)
    }
    return [caches[layer] for layer in range(len(caches))]


def _pairs(moves: list[BlockMove]) -> list[tuple[int, int]]:
    return [(move.source, move.target) for move in moves]


def num_blocks_in(memory: int | None, layout: KVLayout, device: torch.device) -> int:
    """How many blocks fit into `memory` bytes; None takes a share of what is free on `device`.

    Raises `KVCacheError` if not one does.
    """
    chosen = _default_memory(device) if memory is None else memory
    num_blocks = chosen // layout.bytes_per_block
    if num_blocks < 1:
        raise KVCacheError(
            f"{chosen} bytes of KV cache hold no block of {layout.block_size} tokens;"
            f" give at least {layout.bytes_per_block} with --kv-cache-memory"
        )
    return num_blocks


def _default_memory(device: torch.device) -> int:
    if device.type == "cuda":
        return int(_GPU_SHARE * torch.cuda.mem_get_info(device)[0])
    return min(_CPU_LIMIT, int(_CPU_SHARE * available_memory()))


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
