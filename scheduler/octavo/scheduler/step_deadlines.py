"""How long a step may take before its worker counts as lost: by what steps of its shape took lately."""

from collections import deque

from octavo.scheduler.config import SchedulerConfig

_FACTOR = 5.0
_KEPT = 100


class StepDeadlines:
    """Slowest recent duration by shape; shapes are powers of two of the number of tokens computed."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._config = config
        self._recent: dict[int, deque[float]] = {}

    def observe(self, num_tokens: int, seconds: float) -> None:
        self._recent.setdefault(num_tokens.bit_length(), deque(maxlen=_KEPT)).append(seconds)

    def allowance(self, num_tokens: int) -> float:
        """Seconds a step of `num_tokens` tokens may take.

        Of a hundred durations the slowest stands for the 99th percentile. A shape that is new is measured by the one
        next to it, a larger one as if it took longer by as much: else what is recomputed after a loss, in the largest
        of steps, would wait for a worker that hangs as long as for the very first step.
        """
        if not self._recent:
            return self._config.first_step_timeout_s
        shape = num_tokens.bit_length()
        nearest = min(self._recent, key=lambda known: abs(known - shape))
        expected: float = max(self._recent[nearest]) * 2 ** max(0, shape - nearest)
        return max(self._config.step_timeout_s, _FACTOR * expected)
