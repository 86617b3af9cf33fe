"""A shadow of a replica's memory: what every slot holds is written down as the history its KV was computed from."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from octavo.scheduler.core.sequence import Sequence
from octavo.wire.base import NULL_BLOCK
from octavo.wire.steps import BlockMove

# What a slot's KV was computed from: the salt, where it counts, and all tokens up to its own.
History = tuple[str, tuple[int, ...]]
Slot = tuple[int, int]
Slots = dict[Slot, History]


@dataclass
class Share:
    """A sequence's share of a step: its tables as the worker has them, and the positions from `start` to `end` - 1."""

    sequence: Sequence
    tables: list[list[int]]
    start: int
    end: int


@dataclass
class Check:
    """A draft that a step checks: the tokens that come of it are those guesses that are right, and one more."""

    sequence: Sequence
    num_guesses: int
    token_ids: list[int]


@dataclass
class Step:
    """One plan, as far as memory goes; a worker moves, then writes, then reads. `sampled` are the next tokens, but for
    sequences with a draft, which `checks` tell of."""

    step_id: int
    swap_out: list[BlockMove] = field(default_factory=list)
    swap_in: list[BlockMove] = field(default_factory=list)
    copies: list[BlockMove] = field(default_factory=list)
    shares: list[Share] = field(default_factory=list)
    sampled: list[tuple[Sequence, int]] = field(default_factory=list)
    checks: list[Check] = field(default_factory=list)

    @property
    def sequences(self) -> list[Sequence]:
        """Those that are computed, or forked for a token."""
        return [share.sequence for share in self.shares] + [sequence for sequence, _ in self.sampled]


class ShadowMemory:
    """Device and CPU blocks of `block_size` slots under KV groups of these `windows`. `tokens` of each sequence: those
    that are known, then those in flight; or guesses, while they are checked."""

    def __init__(self, block_size: int, windows: tuple[int, ...]) -> None:
        self.tokens: dict[Sequence, list[int]] = {}
        self._size = block_size
        self._windows = windows
        self._device: Slots = {}
        self._cpu: Slots = {}

    def execute(self, step: Step) -> None:
        """Does what a worker does. Asserts that whoever computes reads its own history."""
        self._move(self._device, self._cpu, step.swap_out)
        self._move(self._cpu, self._device, step.swap_in)
        self._move(self._device, self._device, step.copies)
        for share in step.shares:
            for position in range(share.start, share.end):
                for slot in self._slots(share.tables, position):
                    self._device[slot] = self._history(share.sequence, position)
        for share in step.shares:
            self.assert_readable(share.sequence, share.tables, share.start, share.end)

    def assert_readable(self, sequence: Sequence, tables: list[list[int]], start: int, end: int) -> None:
        """Asserts that what a sequence needs to compute the positions `start` to `end` - 1 is its own history, in every
        KV group as far as the window goes."""
        for window, blocks in zip(self._windows, tables, strict=True):
            for position in range(max(0, start - window + 1) if window else 0, end):
                (slot,) = self._slots([blocks], position)
                assert slot[0] != NULL_BLOCK, "a block that a window still sees was given up"
                assert self._device.get(slot) == self._history(sequence, position)

    def spoil(self, step: Step) -> None:
        """The step failed: whatever it was to write may hold anything."""
        targets = [move.target for move in (*step.swap_in, *step.copies)]
        written = [(block_id, offset) for block_id in targets for offset in range(self._size)]
        for share in step.shares:
            written += [slot for at in range(share.start, share.end) for slot in self._slots(share.tables, at)]
        for slot in written:
            self._device.pop(slot, None)
        for move in step.swap_out:
            for offset in range(self._size):
                self._cpu.pop((move.target, offset), None)

    def skip(self, step: Step, skipped: list[Sequence]) -> None:
        """Of a step that has been executed nothing was computed of these sequences; nor, so, of whoever read that."""
        for share in step.shares:
            if share.sequence in skipped or not self._is_readable(share):
                for position in range(share.start, share.end):
                    for slot in self._slots(share.tables, position):
                        self._device.pop(slot, None)

    def _is_readable(self, share: Share) -> bool:
        try:
            self.assert_readable(share.sequence, share.tables, share.start, share.end)
        except AssertionError:
            return False
        return True

    def _move(self, source: Slots, target: Slots, moves: list[BlockMove]) -> None:
        # All is read before any is written.
        content = {(move.target, at): source.get((move.source, at)) for move in moves for at in range(self._size)}
        for slot, held in content.items():
            target.pop(slot, None)
            if held is not None:
                target[slot] = held

    def _slots(self, tables: list[list[int]], position: int) -> Iterator[Slot]:
        index, offset = divmod(position, self._size)
        return ((blocks[index], offset) for blocks in tables)

    def _history(self, sequence: Sequence, position: int) -> History:
        key = sequence.cache_key
        return key.salt if position >= key.salted_from else "", tuple(self.tokens[sequence][: position + 1])
