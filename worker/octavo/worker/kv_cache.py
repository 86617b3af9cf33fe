"""The paged keys and values of one worker: one tensor for all layers, and how many blocks of it fit."""

from pathlib import Path

import torch
from torch import Tensor

from octavo.worker.models.config import DecoderConfig

# Shares of the memory that is free once the weights are loaded; activations and other processes need the rest.
_CPU_SHARE, _CPU_LIMIT = 0.1, 4 << 30
_GPU_SHARE = 0.5


class KVCacheError(Exception):
    """There is no room for the keys and values asked for."""


class KVCache:
    """Keys and values of `num_blocks` blocks of `block_size` slots, on the model's device in its dtype.

    `layers` holds each layer's key cache and value cache, [num_blocks, block_size, kv_heads, head_dim].
    """

    def __init__(
        self, config: DecoderConfig, *, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        if num_blocks < 1:
            raise KVCacheError(f"{num_blocks} KV blocks are asked for; a sequence needs at least one")
        shape = (config.num_layers, 2, num_blocks, block_size, config.num_kv_heads, config.head_dim)
        try:
            # Zeros cost nothing on the CPU until a page is touched, and unwritten slots are read under a mask.
            self._storage = torch.zeros(shape, dtype=dtype, device=device)
        except RuntimeError as error:
            raise KVCacheError(
                f"{num_blocks} KV blocks of {block_size} tokens take"
                f" {num_blocks * block_size * kv_bytes_per_token(config, dtype)} bytes, which {device} does not have;"
                " give fewer with --kv-cache-memory"
            ) from error
        self.layers = [(layer[0], layer[1]) for layer in self._storage]

    def clear(self, block_ids: Tensor) -> None:
        """Zeroes blocks ([blocks] int64) about to be filled: masked slots are still multiplied by zero, and a NaN that
        an earlier owner left there would survive that."""
        if len(block_ids):
            self._storage.index_fill_(2, block_ids, 0)


def kv_bytes_per_token(config: DecoderConfig, dtype: torch.dtype) -> int:
    """Bytes that one token's keys and values take in all layers."""
    return 2 * config.num_layers * config.num_kv_heads * config.head_dim * dtype.itemsize


def num_blocks_in(memory: int | None, block_size: int, bytes_per_token: int, device: torch.device) -> int:
    """How many blocks fit into `memory` bytes; None takes a share of what is free on `device`.

    Raises `KVCacheError` if not one does.
    """
    chosen = _default_memory(device) if memory is None else memory
    num_blocks = chosen // (block_size * bytes_per_token)
    if num_blocks < 1:
        raise KVCacheError(
            f"{chosen} bytes of KV cache hold no block of {block_size} tokens, {bytes_per_token} bytes each;"
            f" give at least {block_size * bytes_per_token} with --kv-cache-memory"
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
