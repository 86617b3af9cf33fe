"""Which tokens of a group must be computed again once some of its blocks are gone."""

from collections.abc import Iterable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from octavo.scheduler.block_table import BlockTable
from octavo.scheduler.sequence import Sequence
from octavo.wire.base import NULL_BLOCK


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens of a sequence, `num_tokens` after the first `context`."""

    context: int
    num_tokens: int


def lost_spans(tables: Iterable[tuple[Sequence, BlockTable]], lost: AbstractSet[int], block_size: int) -> list[Span]:
    """What of each of a group's sequences is computed again, all after its first lost block; but what several of them
    share only for the first."""
    spans, recomputed = [], set[int]()
    for sequence, table in tables:
        gone = lost - recomputed
        num_found = _num_found(sequence, table, gone, block_size) * block_size
        recomputed.update(table.block_ids)
        spans.append(Span(num_found, sequence.num_known - num_found))
    return spans


def _num_found(sequence: Sequence, table: BlockTable, gone: AbstractSet[int], block_size: int) -> int:
    """Full blocks that a hit would cover: never the last known token, and nothing of which no KV group has a block."""
    limit = (sequence.num_known - 1) // block_size
    for index, blocks in enumerate(zip(*table.groups, strict=True)):
        held = [block_id for block_id in blocks if block_id != NULL_BLOCK]
        if index == limit or not held or not gone.isdisjoint(held):
            return index
    return min(limit, len(table))
