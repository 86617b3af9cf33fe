"""The seam between the model runner and whatever computes a decoder-only model."""

from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from octavo.kernels.backend import AttentionBackend
from octavo.worker.step.kv_cache import LayerCache
from octavo.worker.step.kv_layout import ModelShape


@dataclass(frozen=True, slots=True)
class PagedStep:
    """One forward pass: all tokens of all sequences in one row, sequence after sequence, and where their keys go.

    `input_ids`, `positions`: [tokens] int64; `rows`: int64 indices of the tokens whose last hidden states are wanted;
    `groups`: by KV group, what `attention` made of the batch; `caches`: by layer.
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
        """Writes the tokens' `key` and `value` ([tokens, kv_heads, head_dim]) into the cache of `layer`, then gives the
        attention of `query` ([tokens, query_heads, head_dim]) over everything each token sees there."""
        cache = self.caches[layer]
        group = self.groups[cache.group]
        scales = _scales(cache)
        self.attention.write(key, value, cache.keys, cache.values, group, **scales)
        return self.attention.attend(
            query, cache.keys, cache.values, group, scale, softcap=softcap, sinks=sinks, **scales
        )


def _scales(cache: LayerCache) -> dict[str, Any]:
    """What attention over a narrow cache must be told besides; other kinds of attention know of none."""
    if cache.key_scale == cache.value_scale == 1.0:
        return {}
    return {"key_scale": cache.key_scale, "value_scale": cache.value_scale}


class Decoder(Protocol):
    """A decoder-only model with its LM head, on one device in one dtype; or one rank's share of it. Both of its methods
    are then collectives, and `config` has the KV heads of this rank."""

    @property
    def config(self) -> ModelShape: ...

    def forward(self, step: PagedStep) -> Tensor:
        """The last hidden states of `step.rows`, [len(rows), hidden_size], for `logits`."""

    def logits(self, hidden: Tensor) -> Tensor:
        """[rows, vocab_size], float, of what `forward` gave; on ranks after the first [0, vocab_size]."""
