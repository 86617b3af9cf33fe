"""Pauses between trials: what was tried in vain is tried again after twice as many occasions each time."""

from dataclasses import dataclass


@dataclass(slots=True)
class Pause:
    """Lets occasions to try something pass: `shortest` of them at first, and twice as many after each trial that was
    in vain, up to `longest`."""

    shortest: int
    longest: int
    length: int = 0
    passed: int = 0

    def __post_init__(self) -> None:
        self.length = self.shortest

    def is_over(self) -> bool:
        """Counts an occasion; tells whether this one is to be used. It is offered again until it `was_used`."""
        self.passed = min(self.passed + 1, self.length)
        return self.passed == self.length

    def was_used(self) -> None:
        """Notes that a trial begins: until it pays, it counts as in vain."""
        self.passed, self.length = 0, min(2 * self.length, self.longest)

    def paid(self) -> None:
        """Notes that a trial has paid."""
        self.passed, self.length = 0, self.shortest
