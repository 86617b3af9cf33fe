"""Limits of a replica's steps: how large one may be, and how long it may take before its worker counts as lost."""

from collections import deque
from dataclasses import dataclass

from octavo.scheduler.core.config import SchedulerConfig

_FACTOR = 5.0
_KEPT = 100


class StepDeadlines:
    """Deadlines of one replica's steps, from the slowest recent duration by shape; shapes are powers of two of the
    number of tokens computed."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._config = config
        self._recent: dict[int, deque[float]] = {}

    def observe(self, num_tokens: int, seconds: float) -> None:
        self._recent.setdefault(num_tokens.bit_length(), deque(maxlen=_KEPT)).append(seconds)

    def allowance(self, num_tokens: int) -> float:
        """Returns how many seconds a step of `num_tokens` tokens may take.

        Of a hundred durations the slowest stands for the 99th percentile. A new shape is measured by the one next to
        it, a larger one as if it took longer by as much: else what is recomputed after a loss, in the largest of steps,
        would wait for a worker that hangs as long as for the very first step.
        """
        if not self._recent:
            return self._config.first_step_timeout_s
        shape = num_tokens.bit_length()
        nearest = min(self._recent, key=lambda known: abs(known - shape))
        expected: float = max(self._recent[nearest]) * 2 ** max(0, shape - nearest)
        return max(self._config.step_timeout_s, _FACTOR * expected)


# Steps that must pass before their size doubles, at first and at most: each time that growing was too much, twice as
# many as before.
MIN_PATIENCE = 32
MAX_PATIENCE = 4096


@dataclass(slots=True)
class StepSize:
    """Limits the size of steps: at most `tokens` computed in a step and `seqs` sequences side by side; never more than
    `max_tokens` and `max_seqs`, nor less than `min_tokens` and one."""

    max_tokens: int
    max_seqs: int
    min_tokens: int = 1
    tokens: int = 0
    seqs: int = 0
    _passed: int = 0
    _patience: int = MIN_PATIENCE
    _has_grown: bool = False

    def __post_init__(self) -> None:
        self.min_tokens = min(self.min_tokens, self.max_tokens)
        self.tokens, self.seqs = self.max_tokens, self.max_seqs

    def ran_out(self, num_tokens: int, num_seqs: int) -> None:
        """Halves the limits after a step of this size found no memory."""
        self.tokens = max(self.min_tokens, min(self.tokens, num_tokens // 2))
        self.seqs = max(1, min(self.seqs, num_seqs // 2))
        self._passed = 0
        if self._has_grown:
            self._patience = min(MAX_PATIENCE, 2 * self._patience)
            self._has_grown = False

    def passed(self) -> None:
        """Counts a step that was computed; doubles the limits after enough of them."""
        if self.tokens == self.max_tokens and self.seqs == self.max_seqs:
            return
        self._passed += 1
        if self._passed >= self._patience:
            self._passed, self._has_grown = 0, True
            self.tokens, self.seqs = min(self.max_tokens, 2 * self.tokens), min(self.max_seqs, 2 * self.seqs)
