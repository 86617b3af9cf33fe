"""Counts what became of speculation's guesses: how many were drafted, and how many were right at each depth."""

from collections import Counter
from dataclasses import dataclass, field


@dataclass
class Guesses:
    """Counts the steps of sequences that had guesses, the guesses `drafted` in them, those `checked` at each depth (one
    behind a wrong one is not looked at), and those that were right."""

    steps: int = 0
    drafted: int = 0
    checked: Counter[int] = field(default_factory=Counter)
    right: Counter[int] = field(default_factory=Counter)

    def add(self, length: int, num_right: int) -> None:
        """Counts a step of a sequence with so many guesses, of which the first `num_right` were right."""
        self.steps += 1
        self.drafted += length
        self.right.update(range(num_right))
        self.checked.update(range(min(length, num_right + 1)))

    def merge(self, other: "Guesses") -> None:
        """Adds all that `other` has counted."""
        self.steps += other.steps
        self.drafted += other.drafted
        self.checked.update(other.checked)
        self.right.update(other.right)

    @property
    def accepted(self) -> int:
        return self.right.total()

    @property
    def tokens_per_step(self) -> float:
        """Returns the tokens that a step of a sequence with guesses gave; 0 if none had any."""
        return 1 + self.accepted / self.steps if self.steps else 0.0

    @property
    def right_by_depth(self) -> list[float]:
        """Returns the share of the first, second, ... guesses that were right, of those that were checked."""
        return [self.right[depth] / count for depth, count in sorted(self.checked.items())]
