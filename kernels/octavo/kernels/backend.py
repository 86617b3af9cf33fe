"""What the worker asks of paged attention, whatever computes it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class CacheShape:
    """What one layer's keys (or values) of a block are: `block_size` tokens x `num_kv_heads` x `head_dim`."""

    block_size: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class GroupBatch:
    """One step as the layers of one KV group see it, all on the CPU: `slot_mapping` ([tokens] int64; slot = block id *
    block size + offset), `block_tables` ([sequences, blocks] int64, rows padded with anything), and by sequence the
    tokens in the cache once this step has written its own, and the tokens of this step. `window` 0: none."""

    slot_mapping: Tensor
    block_tables: Tensor
    context_lens: Sequence[int]
    query_lens: Sequence[int]
    window: int


class AttentionBackend(Protocol):
    """Paged attention of one kind of device.

    Caches are [num_blocks, block_size, kv_heads, head_dim], but how a block's bytes lie inside it is the backend's own
    affair: whoever moves blocks moves them whole, and only `write` and `attend` look into them. A slot that was never
    written may hold anything if it `masks_unwritten`, and must be finite if not.
    """

    name: str
    masks_unwritten: bool

    def step(self, batch: GroupBatch) -> Any:
        """What all layers of a group need in one step, made once: an argument for `write` and `attend`.

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
        """Causal attention of `query` ([tokens, query_heads, head_dim]), in its shape and dtype; mathematics, `softcap`
        and `sinks` as in `octavo.kernels.reference.paged_attention`."""
