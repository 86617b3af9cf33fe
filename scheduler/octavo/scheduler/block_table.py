"""Logical to physical: the blocks of one sequence, and what a step must be told when they change."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from octavo.wire.base import NULL_BLOCK
from octavo.wire.steps import BlockMove, Remap


@dataclass(slots=True)
class BlockTable:
    """One sequence's blocks, one list per KV group, all of one length; `NULL_BLOCK` where a window has passed.

    The first `num_indexed` have been offered to the prefix cache. The first `num_passed` of each windowed group are
    null.
    """

    groups: list[list[int]]
    num_indexed: int = 0
    num_passed: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        if not self.num_passed:
            self.num_passed = [_leading_nulls(blocks) for blocks in self.groups]

    def __len__(self) -> int:
        return len(self.groups[0])

    def copy(self) -> "BlockTable":
        return BlockTable([list(blocks) for blocks in self.groups], self.num_indexed, list(self.num_passed))

    @property
    def block_ids(self) -> list[int]:
        """All blocks of all groups."""
        return present(self.groups)


@dataclass(slots=True)
class Growth:
    """What a worker must be told so that a sequence's tables are what they are here: blocks appended (one list per KV
    group, or none at all), entries that changed, and what to copy first."""

    new_block_ids: list[list[int]] = field(default_factory=list)
    remaps: list[Remap] = field(default_factory=list)
    copies: list[BlockMove] = field(default_factory=list)


def present(groups: Iterable[Iterable[int]]) -> list[int]:
    """All entries that are blocks."""
    return [block_id for blocks in groups for block_id in blocks if block_id != NULL_BLOCK]


def first_visible(window: int, position: int, block_size: int) -> int:
    """The first logical block that the token at `position` can see, in a KV group of this window (0: all)."""
    return max(0, position - window + 1) // block_size if window else 0


def _leading_nulls(blocks: list[int]) -> int:
    return next((i for i, block_id in enumerate(blocks) if block_id != NULL_BLOCK), len(blocks))
