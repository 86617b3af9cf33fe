"""A growing text of tokens in which the places are found where the latest tokens of a sequence stood before.

A short text is scanned: to search all of its bytes for those of three tokens takes no longer than to index a few.

A longer one has an index of hash chains, as compressors of the Lempel-Ziv kind have it: a table holds for each hash of
n tokens the last place behind such tokens, an array for each place the one before it with the same hash. That is 8 to
12 bytes for each token. The tokens themselves are not copied.
"""

from array import array
from collections.abc import Iterator, Sequence
from itertools import islice
from struct import pack
from typing import NamedTuple

# The fewest tokens that a match has, and the most that are compared.
SHORTEST_MATCH = 3
LONGEST_MATCH = 32
# Places that are tried, the latest first: behind the same tokens, or tokens with the same hash.
_MOST_PLACES = 16
# A text of more tokens is indexed.
MOST_SCANNED = 2048
_TOKEN_BYTES = 4
_FIRST_SLOTS = 256
# Odd numbers without a pattern, by which tokens are hashed; the lowest bits of the products depend on few of a token.
_FIRST, _SECOND, _THIRD = 0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D
_UNMIXED_BITS = 13


class Match(NamedTuple):
    """Names a place in a text: the `length` tokens before it are the latest of a sequence. Without any: 0, 0."""

    place: int
    length: int


_NO_MATCH = Match(0, 0)


def packed(tokens: list[int]) -> bytes:
    """Returns the bytes of the last `tokens` of a sequence, of as many as the shortest match has."""
    return pack(f"{SHORTEST_MATCH}i", *tokens[-SHORTEST_MATCH:])


class Tail(NamedTuple):
    """Holds the latest tokens of a sequence, the last first; and of as many as the shortest match has the bytes."""

    tokens: list[int]
    packed: bytes

    @property
    def hash(self) -> int:
        """Returns the hash of as many tokens as the shortest match has."""
        return _hashes(self.tokens[SHORTEST_MATCH - 1 :: -1], SHORTEST_MATCH - 1, SHORTEST_MATCH)[0]


def tail(tokens: list[int]) -> Tail:
    """Makes the tail of a sequence's latest `tokens`, in their order; at least as many as the shortest match has."""
    return Tail(tokens[::-1], packed(tokens))


class Text:
    """Finds tails in `tokens`, to which others may append: scans them while they are `most_scanned` at most."""

    __slots__ = ("_earlier", "_latest", "_most_scanned", "_packed", "tokens")

    def __init__(self, tokens: "list[int] | array[int]", most_scanned: int = MOST_SCANNED) -> None:
        self.tokens = tokens
        self._most_scanned = most_scanned
        # The tokens that were scanned, as bytes.
        self._packed = bytearray()
        # By the hash of the tokens before a place, as many as the shortest match has; 0: none. Empty without an index.
        self._latest = array("i")
        # By the place, less one.
        self._earlier = array("i")

    @property
    def is_behind(self) -> bool:
        """Tells whether tokens are still to be indexed."""
        return len(self._earlier) < len(self.tokens) > self._most_scanned

    @property
    def num_indexed(self) -> int:
        return len(self._earlier)

    @property
    def num_bytes(self) -> int:
        """Returns the bytes that the text takes beside its tokens."""
        return len(self._packed) + 4 * (len(self._latest) + len(self._earlier))

    def index(self, most: int) -> int:
        """Indexes further tokens, `most` at most, of a text that is not scanned; returns how many."""
        tokens, earlier = self.tokens, self._earlier
        start = len(earlier)
        stop = min(start + most, len(tokens))
        if stop <= start or len(tokens) <= self._most_scanned:
            return 0
        if not self._latest:
            self._packed = bytearray()
            self._latest = array("i", bytes(4 * _FIRST_SLOTS))
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

    def may_hold(self, wanted: bytes) -> bool:
        """Tells whether there may be a match for a tail that ends with the `wanted` bytes (`packed`)."""
        return len(self.tokens) > self._most_scanned or self._last(wanted) >= 0

    def find(self, tail: Tail, beyond: int = 0) -> Match:
        """Returns the place behind the longest match of a sequence's tail, if it has more than `beyond` tokens; of
        several the latest place among the few that are tried. Nothing follows the end of the text, which is no such
        place."""
        latest_tokens, tokens = tail.tokens, self.tokens
        best, length = 0, max(beyond, SHORTEST_MATCH - 1)
        reach, end = len(latest_tokens), len(tokens)
        places = self._scanned(tail.packed) if end <= self._most_scanned else self._chained(tail)
        for place in islice(places, _MOST_PLACES):
            if length < reach and length < place < end and tokens[place - 1 - length] == latest_tokens[length]:
                found = _common(tokens, place, latest_tokens)
                if found > length:
                    best, length = place, found
        return Match(best, length) if best else _NO_MATCH

    def _scanned(self, wanted: bytes) -> Iterator[int]:
        """Yields the places behind the `wanted` bytes of tokens, the latest first, that something follows."""
        found = self._last(wanted)
        while found >= 0:
            if found % _TOKEN_BYTES == 0:
                yield found // _TOKEN_BYTES + SHORTEST_MATCH
            found = self._packed.rfind(wanted, 0, found + len(wanted) - 1)

    def _last(self, wanted: bytes) -> int:
        """Returns where in the bytes of all tokens the `wanted` ones stand last and something follows them; -1 if
        nowhere."""
        known, tokens = self._packed, self.tokens
        if (missing := len(tokens) - len(known) // _TOKEN_BYTES) > 0:
            known += pack(f"{missing}i", *tokens[-missing:])
        return known.rfind(wanted, 0, max(0, len(known) - _TOKEN_BYTES))

    def _chained(self, tail: Tail) -> Iterator[int]:
        """Yields the places with the tail's hash, the latest first."""
        place = self._latest[tail.hash & (len(self._latest) - 1)] if self._latest else 0
        while place:
            yield place
            place = self._earlier[place - 1]


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
