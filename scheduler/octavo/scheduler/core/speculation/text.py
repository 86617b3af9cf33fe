"""A growing text of tokens in which the places are found where the latest tokens of a sequence stood before.

An index of hash chains, as compressors of the Lempel-Ziv kind have it: a table holds for each hash of n tokens the last
place behind such tokens, an array for each place the one before it with the same hash. That is 8 to 12 bytes for each
token. The tokens themselves are not copied.
"""

from array import array
from collections.abc import Sequence
from itertools import islice
from typing import NamedTuple

# The fewest tokens that a match has, and the most that are compared.
SHORTEST_MATCH = 3
LONGEST_MATCH = 32
# Places of one hash that are tried, the latest first.
_MOST_PLACES = 16
_FIRST_SLOTS = 256
# Odd numbers without a pattern, by which tokens are hashed; the lowest bits of the products depend on few of a token.
_FIRST, _SECOND, _THIRD = 0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D
_UNMIXED_BITS = 13


class Match(NamedTuple):
    """Names a place in a text: the `length` tokens before it are the latest of a sequence. Without any: 0, 0."""

    place: int
    length: int


_NO_MATCH = Match(0, 0)


class Tail(NamedTuple):
    """Holds the latest tokens of a sequence, the last first, and the hash of as many as the shortest match has."""

    tokens: list[int]
    hash: int


def tail(tokens: list[int]) -> Tail:
    """Makes the tail of a sequence's latest `tokens`, in their order; at least as many as the shortest match has."""
    return Tail(tokens[::-1], _hashes(tokens, len(tokens) - 1, len(tokens))[0])


class Text:
    """Indexes `tokens`, to which others may append."""

    __slots__ = ("_earlier", "_latest", "tokens")

    def __init__(self, tokens: "list[int] | array[int]") -> None:
        self.tokens = tokens
        # By the hash of the tokens before a place, as many as the shortest match has; 0: none.
        self._latest = array("i", bytes(4 * _FIRST_SLOTS))
        # By the place, less one.
        self._earlier = array("i")

    @property
    def num_indexed(self) -> int:
        return len(self._earlier)

    @property
    def num_bytes(self) -> int:
        """Returns the bytes that the index takes."""
        return 4 * (len(self._latest) + len(self._earlier))

    def index(self, most: int) -> int:
        """Indexes further tokens, `most` at most; returns how many."""
        tokens, earlier = self.tokens, self._earlier
        start = len(earlier)
        stop = min(start + most, len(tokens))
        if stop <= start:
            return 0
        while len(self._latest) < stop:
            # Each slot becomes two, both of which find what the one found.
            self._latest *= 2
        latest, mask = self._latest, len(self._latest) - 1
        note = earlier.append
        # The first tokens end no run of so many.
        while len(earlier) < min(stop, SHORTEST_MATCH - 1):
            note(0)
        start_of_runs = len(earlier)
        for place, slot in enumerate(_hashes(tokens, start_of_runs, stop), start_of_runs + 1):
            slot &= mask
            note(latest[slot])
            latest[slot] = place
        return stop - start

    def find(self, tail: Tail, beyond: int = 0) -> Match:
        """Returns the place behind the longest match of a sequence's tail, if it has more than `beyond` tokens; of
        several the latest place among the few that are tried. Nothing follows the end of the text, which is no such
        place."""
        place = self._latest[tail.hash & (len(self._latest) - 1)]
        if not place:
            return _NO_MATCH
        latest_tokens, tokens, earlier = tail.tokens, self.tokens, self._earlier
        best, length = 0, max(beyond, SHORTEST_MATCH - 1)
        reach, end = len(latest_tokens), len(tokens)
        for _ in range(_MOST_PLACES):
            if not place:
                break
            if length < reach and length < place < end and tokens[place - 1 - length] == latest_tokens[length]:
                found = _common(tokens, place, latest_tokens)
                if found > length:
                    best, length = place, found
            place = earlier[place - 1]
        return Match(best, length) if best else _NO_MATCH


def _hashes(tokens: Sequence[int], start: int, stop: int) -> list[int]:
    """Returns the hash of the last tokens up to each of those at `start` to `stop`. It is our own, so that a replay
    finds the same places by another Python."""
    runs = zip(tokens[start - 2 : stop - 2], tokens[start - 1 : stop - 1], tokens[start:stop], strict=True)
    return [(first * _FIRST + second * _SECOND + third * _THIRD) >> _UNMIXED_BITS for first, second, third in runs]


def _common(tokens: Sequence[int], place: int, latest_tokens: Sequence[int]) -> int:
    """Counts the tokens before `place` that are the latest of a sequence."""
    length = 0
    for token in islice(latest_tokens, place):
        place -= 1
        if tokens[place] != token:
            break
        length += 1
    return length
