"""The fake device's draft model: it guesses right as often as it is told to, and keeps a memory of its own in the fake
model's blocks."""

import zlib
from array import array
from collections.abc import Callable
from dataclasses import dataclass

from octavo.wire.steps import BlockMoves, KVGroup
from octavo.worker.fake.cache import FakeCache, FakeCacheError
from octavo.worker.sequences import WorkItem

# Chooses what follows the known tokens of an item's sequence and these further ones, as the fake model does.
Choose = Callable[[WorkItem, list[int]], int]


@dataclass(frozen=True)
class FakeDraftModel:
    """Guesses what `choose` returns with the probability `hit_rate`, by a hash of the history, and else a token below
    `vocab_size` beside it.

    Its `cache` holds the tokens of every sequence as far as the fake model's does, or an error is raised: whatever is
    to move or to be recomputed for the one model is so for the other.
    """

    name: str
    hit_rate: float
    vocab_size: int
    cache: FakeCache
    kv_groups: list[KVGroup]

    def move(self, moves: BlockMoves) -> None:
        self.cache.move(moves)

    def compute(self, item: WorkItem) -> None:
        """Takes in the tokens of an item, as the fake model does."""
        self._write(item, item.start, item.token_ids)

    def propose(self, item: WorkItem, chosen: list[int], choose: Choose) -> list[int]:
        """Returns guesses of what follows the tokens that were `chosen` for the sequence of `item`. Raises
        `FakeCacheError` if the cache does not hold what came before, and what `choose` raises."""
        known = item.sequence.token_ids[: item.known_end]
        self._write(item, item.known_end, chosen)
        guesses: list[int] = []
        while len(guesses) < item.num_proposed:
            tokens = [*known, *chosen, *guesses]
            self._check(item, tokens)
            guess = choose(item, [*chosen, *guesses])
            is_right = zlib.crc32(array("i", tokens).tobytes()) < self.hit_rate * 2**32
            guesses.append(guess if is_right else (guess + 1) % self.vocab_size)
            if len(guesses) < item.num_proposed:
                self._write(item, len(tokens), guesses[-1:])
        return guesses

    def _write(self, item: WorkItem, start: int, token_ids: list[int]) -> None:
        for table in item.sequence.block_tables:
            self.cache.write(table, start, token_ids)

    def _check(self, item: WorkItem, tokens: list[int]) -> None:
        end = len(tokens)
        for group, table in zip(self.kv_groups, item.sequence.block_tables, strict=True):
            first = max(0, end - group.window) if group.window else 0
            if self.cache.read(table, first, end) != array("i", tokens[first:]).tobytes():
                raise FakeCacheError(f"the draft model has other tokens of {item.sequence} before {end} than it has")
