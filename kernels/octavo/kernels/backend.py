"""Defines the interface between the worker and any implementation of paged attention."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class CacheShape:
    """Describes one layer's keys (or values) of a block: `block_size` tokens x `num_kv_heads` x `head_dim`."""

    block_size: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def width(self) -> int:
        """Returns the elements that a token takes in a block for each KV head: of int8 with the bytes of its scales."""
        return self.head_dim + (int8_scale_bytes(self.head_dim) if self.dtype == torch.int8 else 0)


def int8_scale_bytes(head_dim: int) -> int:
    """Returns the bytes of a token's scales for one KV head in a cache of int8: keys have a bf16 for every 32 elements,
    values one fp32, and both the same room."""
    return -(-(2 * -(-head_dim // 32)) // 4) * 4


@dataclass(frozen=True, slots=True)
class GroupBatch:
    """Describes one step as the layers of one KV group see it, all on the CPU.

    `slot_mapping`: [tokens] int64, slot = block id * block size + offset; `block_tables`: [sequences, blocks] int64,
    rows padded with anything; and by sequence the tokens in the cache once this step has written its own, and the
    tokens of this step. `window` 0: none.
    """

    slot_mapping: Tensor
    block_tables: Tensor
    context_lens: Sequence[int]
    query_lens: Sequence[int]
    window: int


class AttentionBackend(Protocol):
    """Computes paged attention on one kind of device.

    Caches are [num_blocks, block_size, kv_heads, `CacheShape.width`], but the layout of the bytes inside a block is the
    backend's own: whoever moves blocks moves them whole, and only `write` and `attend` look into them. A slot that was
    never written may hold anything if the backend `masks_unwritten`, and must be finite if not.
    """

    name: str
    masks_unwritten: bool

    def step(self, batch: GroupBatch) -> Any:
        """Returns the inputs that all layers of a group share in one step: an argument for `write` and `attend`.

        Raises `ValueError` on lengths that do not fit the tables, and on a table without a block that is to be read.
        """

    def write(self, key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, step: Any) -> None:
        """Writes the step's `key` and `value` ([tokens, kv_heads, head_dim]) into their slots."""

    def attend(
        self,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        step: Any,
        scale: float,
        *,
        softcap: float = 0.0,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Returns the causal attention of `query` ([tokens, query_heads, head_dim]), in its shape and dtype. The
        mathematics, `softcap` and `sinks` are those of `octavo.kernels.reference.paged_attention`."""
