"""The shares of a model: pure arithmetic, the same on all ranks.

Shoeybi et al., "Megatron-LM" (2019): heads, columns of the MLP and rows of the vocabulary are divided whole, in the
order of the ranks. Shares need not be equal.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self

from torch import Tensor

from octavo.worker.loading.tensor_file import TensorPart
from octavo.worker.models.config_file import ModelConfigError
from octavo.worker.tensor_parallel.group import ShardGroup


@dataclass(frozen=True, slots=True)
class Share:
    """Names one rank's share, `mine`, of `whole` things in a row."""

    whole: int
    mine: range

    def __len__(self) -> int:
        return len(self.mine)

    def times(self, width: int) -> Self:
        """Returns the share of rows, if each of the things is `width` rows."""
        return type(self)(self.whole * width, range(self.mine.start * width, self.mine.stop * width))

    def along(self, dim: int) -> TensorPart:
        """Returns the part of a tensor that has one of the things at each place of `dim`."""
        return stacked(dim, [self])


def stacked(dim: int, shares: Sequence[Share]) -> TensorPart:
    """Returns the part of a tensor along whose `dim` the things of all `shares` lie, one kind after the other."""
    ranges, before = [], 0
    for share in shares:
        ranges.append(range(before + share.mine.start, before + share.mine.stop))
        before += share.whole
    return TensorPart(dim, tuple(ranges))


@dataclass(frozen=True, slots=True)
class HeadShares:
    """The shares of attention heads; `copies` tells how many ranks hold each KV head."""

    query: Share
    kv: Share
    copies: int


@dataclass(frozen=True, slots=True)
class Shards:
    """Computes the shares of rank `rank` of `size`."""

    rank: int
    size: int

    def split(self, whole: int, what: str, *, unit: int = 1) -> Share:
        """Returns this rank's share of `whole` things, called `what`, that stay together by `unit`. Raises
        `ModelConfigError` if there are too few."""
        return Share(whole, self._all(whole, what, unit)[self.rank])

    def sizes(self, whole: int, what: str, *, unit: int = 1) -> list[int]:
        """Returns the number of things that each rank has. Raises `ModelConfigError` as `split` does."""
        return [len(places) for places in self._all(whole, what, unit)]

    def heads(self, num_heads: int, num_kv_heads: int) -> HeadShares:
        """Returns the share of heads: each query head is on the rank of its KV head.

        Where there are fewer KV heads than ranks, several ranks hold the same one, with some of its query heads each.
        Raises `ModelConfigError` if the numbers do not divide.
        """
        if not _fits(self.size, num_heads, num_kv_heads):
            others = ", ".join(str(size) for size in range(1, num_heads + 1) if _fits(size, num_heads, num_kv_heads))
            raise ModelConfigError(
                f"--tp {self.size} does not fit a model of {num_heads} attention heads and {num_kv_heads} KV heads;"
                f" one of {others} does"
            )
        queries = num_heads // num_kv_heads
        copies = max(1, self.size // num_kv_heads)
        kv = _nth(num_kv_heads, self.size // copies, self.rank // copies)
        some = _nth(queries, copies, self.rank % copies)
        query = range(kv.start * queries + some.start, (kv.stop - 1) * queries + some.stop)
        return HeadShares(Share(num_heads, query), Share(num_kv_heads, kv), copies)

    def _all(self, whole: int, what: str, unit: int) -> list[range]:
        units = -(-whole // unit)
        if units < self.size:
            raise ModelConfigError(
                f"--tp {self.size} leaves a rank without any of the model's {whole} {what}; give less"
            )
        shares = (_nth(units, self.size, rank) for rank in range(self.size))
        return [range(each.start * unit, min(whole, each.stop * unit)) for each in shares]


def _fits(size: int, num_heads: int, num_kv_heads: int) -> bool:
    return size <= num_kv_heads or (size % num_kv_heads == 0 and size <= num_heads)


def _nth(count: int, size: int, rank: int) -> range:
    """Returns the share of `rank` in `count` things that are divided among `size` as evenly as possible."""
    return range(-(-count * rank // size), -(-count * (rank + 1) // size))


class ShardedVocabulary:
    """Divides `size` tokens among the ranks of `group`, each of which holds a `share`. Raises `ModelConfigError` if
    there are too few."""

    def __init__(self, size: int, group: ShardGroup) -> None:
        shards = Shards(group.rank, group.size)
        self.size = size
        self.share = shards.split(size, "tokens of the vocabulary")
        self._sizes = shards.sizes(size, "tokens of the vocabulary")
        self._group = group

    def look_up(self, input_ids: Tensor, rows_at: Callable[[Tensor], Tensor]) -> Tensor:
        """Returns the rows of `input_ids`, [tokens, width], on every rank.

        `rows_at` looks up places in this rank's share of the embedding, and returns a tensor of its own.
        """
        if self._group.size == 1:
            return rows_at(input_ids)
        places = input_ids - self.share.mine.start
        on_other_ranks = (places < 0) | (places >= len(self.share))
        rows = rows_at(places.masked_fill_(on_other_ranks, 0))
        return self._group.all_reduce(rows.masked_fill_(on_other_ranks.unsqueeze(-1), 0))

    def gather(self, logits: Tensor) -> Tensor:
        """Returns each rank's `logits` ([rows, len(share)]) side by side, [rows, size], on rank 0; [0, size] on the
        others."""
        gathered = self._group.gather_columns(logits, self._sizes)
        return logits.new_empty((0, self.size)) if gathered is None else gathered
