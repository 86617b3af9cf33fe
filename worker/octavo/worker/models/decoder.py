"""The interface between the model runner and a decoder-only model: its sizes, a step, and each layer's cache."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from octavo.kernels.backend import AttentionBackend


class ModelSizes(Protocol):
    """The sizes of a model that its KV cache and the contract with the scheduler need.

    `windows` holds the number of tokens that each layer attends to, the querying one included; 0 means all.
    """

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
class LayerCache:
    """Holds one layer's keys and values in the blocks of KV `group`: [num_blocks, block_size, kv_heads, width] each.

    Both are views with gaps into the pool of all layers. In a narrow cache a key is the stored value times `key_scale`;
    values alike.
    """

    group: int
    keys: Tensor
    values: Tensor
    key_scale: float = 1.0
    value_scale: float = 1.0


@dataclass(frozen=True, slots=True)
class PagedStep:
    """One forward pass: all tokens of all sequences in one row, sequence after sequence, and the places of their keys.

    `input_ids`, `positions`: [tokens] int64; `rows`: int64 indices of the tokens whose last hidden states are wanted;
    `groups`: for each KV group, the batch as `attention` prepared it; `caches`: by layer.
    """

    input_ids: Tensor
    positions: Tensor
    rows: Tensor
    attention: AttentionBackend
    groups: list[Any]
    caches: list[LayerCache]

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float,
        *,
        softcap: float = 0.0,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Writes the tokens' keys and values into the cache of `layer` and returns the attention of their queries.

        `key` and `value` are [tokens, kv_heads, head_dim], `query` is [tokens, query_heads, head_dim]. Each token
        attends to everything that it sees in the cache.
        """
        cache = self.caches[layer]
        group = self.groups[cache.group]
        scales = _scales(cache)
        self.attention.write(key, value, cache.keys, cache.values, group, **scales)
        return self.attention.attend(
            query, cache.keys, cache.values, group, scale, softcap=softcap, sinks=sinks, **scales
        )


def _scales(cache: LayerCache) -> dict[str, Any]:
    """Returns the arguments that attention over a narrow cache takes besides; other kinds of attention take none."""
    if cache.key_scale == cache.value_scale == 1.0:
        return {}
    return {"key_scale": cache.key_scale, "value_scale": cache.value_scale}


class Decoder(Protocol):
    """A decoder-only model with its LM head, on one device in one dtype; or one rank's share of it.

    For a share, both methods are collectives, and `config` has the KV heads of this rank.
    """

    @property
    def config(self) -> ModelSizes: ...

    def forward(self, step: PagedStep) -> Tensor:
        """Computes the last hidden states of `step.rows`, [len(rows), hidden_size], for `logits`."""

    def logits(self, hidden: Tensor) -> Tensor:
        """Computes the logits of hidden states from `forward`, [rows, vocab_size], float; [0, vocab_size] on ranks
        after the first."""
