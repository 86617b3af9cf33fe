"""The chances of guesses: how often guesses of their kind have come true lately, and how often those of their sequence
have.

Every guess that is followed counts, whether or not a step has checked it: the tokens that come show what was right. So
a sequence whose guesses fail costs nothing while they fail, and is believed again once they would have come true.
"""

import sys
from bisect import bisect_right
from dataclasses import dataclass

# Lengths of matches that differ in what they promise; a longer match counts as the last of them.
_BOUNDS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 48, 64)
# A copy that goes on for longer counts as one of this length.
LONGEST_COPY = _BOUNDS[-1]
_KIND_OF_LENGTH = [max(bisect_right(_BOUNDS, length) - 1, 0) for length in range(LONGEST_COPY + 1)]
# The lengths at which the next kind begins; after the last there is none.
_ENDS = [*_BOUNDS[1:], sys.maxsize]
# What guesses are expected to be worth before any was seen, and how many seen ones that counts for.
_FIRST_CHANCES = (0.2, 0.25, 0.25, 0.3, 0.35, 0.4, 0.5, 0.55, 0.65, 0.75, 0.8, 0.85, 0.9, 0.92, 0.94)
_FIRST_WEIGHT = 8.0
# Guesses seen are forgotten by halves: those of a kind after about so many, those of one sequence after about so many.
_KEPT_OF_KIND = 2048.0
_KEPT_OF_SEQUENCE = 24.0
# What a sequence counts for at first: it is to show that its guesses come true as often as others of their kind.
_FIRST_RIGHT, _FIRST_EXPECTED = 4.0, 6.0
# No guess is certain.
HIGHEST_CHANCE = 0.98
# The chance that a guess and all before it come true below which it is worth no row of any step.
LEAST_WORTH = 0.02


@dataclass(slots=True)
class TrackRecord:
    """Holds how many guesses of one sequence came true, and how many were expected to; the latest count most."""

    right: float = _FIRST_RIGHT
    expected: float = _FIRST_EXPECTED

    def note(self, chance: float, came_true: bool) -> None:
        """Notes what became of a guess that its kind gave this chance."""
        keep = 1.0 - 1.0 / _KEPT_OF_SEQUENCE
        self.right = self.right * keep + came_true
        self.expected = self.expected * keep + chance

    @property
    def factor(self) -> float:
        """Returns how much more, or less, often the sequence's guesses came true than others of their kind."""
        return self.right / self.expected


class Acceptance:
    """Learns the chances of guesses from one source by the length of the match that they follow; of a draft model's, by
    their depth. `first_chance` is expected of all of them at first, where it is given."""

    def __init__(self, first_chance: float | None = None) -> None:
        self._right = [_FIRST_WEIGHT * (first_chance or chance) for chance in _FIRST_CHANCES]
        self._seen = [_FIRST_WEIGHT] * len(_FIRST_CHANCES)

    def chances(self, length: int, count: int, record: TrackRecord, worth: float = LEAST_WORTH) -> list[float]:
        """Returns the chances of up to `count` guesses of a sequence, each given that those before it come true: by
        each of them the match is longer. Guesses are left out that come true, with all before them, less often than it
        takes to be `worth` a row."""
        right, seen, factor = self._right, self._seen, record.factor
        chances: list[float] = []
        all_true, kind = 1.0, _KIND_OF_LENGTH[length]
        while count > 0:
            chance = min(HIGHEST_CHANCE, factor * right[kind] / seen[kind])
            for _ in range(min(count, _ENDS[kind] - length)):
                all_true *= chance
                if all_true < worth:
                    return chances
                chances.append(chance)
            count -= _ENDS[kind] - length
            length = _ENDS[kind]
            kind += 1
        return chances

    def note(self, length: int, record: TrackRecord, came_true: bool) -> None:
        """Notes whether the guess that followed a match of `length` tokens came true."""
        kind = _KIND_OF_LENGTH[length]
        right, seen = self._right, self._seen
        record.note(right[kind] / seen[kind], came_true)
        right[kind] += came_true
        seen[kind] += 1.0
        if seen[kind] > _KEPT_OF_KIND:
            right[kind] /= 2.0
            seen[kind] /= 2.0
