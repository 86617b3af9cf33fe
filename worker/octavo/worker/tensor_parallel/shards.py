"""Which share of a model is whose: pure arithmetic, the same on all ranks.

Shoeybi et al., "Megatron-LM" (2019): heads, columns of the MLP and rows of the vocabulary are dealt out whole, in the
order of the ranks. Shares need not be equal.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from octavo.worker.loading.tensor_file import Part
from octavo.worker.models.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Share:
    """Of `whole` things in a row, those that are `mine`."""

    whole: int
    mine: range

    def __len__(self) -> int:
        return len(self.mine)

    def times(self, width: int) -> Self:
        """The share of rows, if each of the things is `width` rows."""
        return type(self)(self.whole * width, range(self.mine.start * width, self.mine.stop * width))

    def along(self, dim: int) -> Part:
        """Of a tensor that has one of the things at each place of `dim`."""
        return stacked(dim, [self])


def stacked(dim: int, shares: Sequence[Share]) -> Part:
    """The part of a tensor along whose `dim` lie all of what the first of `shares` is of, then of the second, ..."""
    ranges, before = [], 0
    for share in shares:
        ranges.append(range(before + share.mine.start, before + share.mine.stop))
        before += share.whole
    return Part(dim, tuple(ranges))


@dataclass(frozen=True, slots=True)
class HeadShares:
    """Of attention heads. `copies`: how many ranks hold each KV head."""

    query: Share
    kv: Share
    copies: int


@dataclass(frozen=True, slots=True)
class Shards:
    """The shares of rank `rank` of `size`."""

    rank: int
    size: int

    def split(self, whole: int, what: str, *, unit: int = 1) -> Share:
        """Of `whole` things, called `what`, that stay together by `unit`. Raises `ConfigError` if there are too few."""
        return Share(whole, self._all(whole, what, unit)[self.rank])

    def sizes(self, whole: int, what: str, *, unit: int = 1) -> list[int]:
        """How many of them each rank has. Raises `ConfigError` as `split` does."""
        return [len(places) for places in self._all(whole, what, unit)]

    def heads(self, num_heads: int, num_kv_heads: int) -> HeadShares:
        """Each query head is where its KV head is; where there are fewer KV heads than ranks, several ranks hold the
        same one, with some of its query heads each. Raises `ConfigError` if that does not come out."""
        if not _fits(self.size, num_heads, num_kv_heads):
            others = ", ".join(str(size) for size in range(1, num_heads + 1) if _fits(size, num_heads, num_kv_heads))
            raise ConfigError(
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
            raise ConfigError(f"--tp {self.size} leaves a rank without any of the model's {whole} {what}; give less")
        shares = (_nth(units, self.size, rank) for rank in range(self.size))
        return [range(each.start * unit, min(whole, each.stop * unit)) for each in shares]


def _fits(size: int, num_heads: int, num_kv_heads: int) -> bool:
    return size <= num_kv_heads or (size % num_kv_heads == 0 and size <= num_heads)


def _nth(count: int, size: int, rank: int) -> range:
    """Of `count` things dealt out to `size` as evenly as they come, those of `rank`."""
    return range(-(-count * rank // size), -(-count * (rank + 1) // size))
