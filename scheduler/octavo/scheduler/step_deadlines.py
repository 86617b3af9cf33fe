"""How long a step may take before its worker counts as lost: by what steps of its shape took lately."""

from collections import defaultdict, deque

from octavo.scheduler.config import SchedulerConfig

_FACTOR = 5.0
_KEPT = 100


class StepDeadlines:
    """Slowest recent duration by shape; shapes are powers of two of the number of tokens computed."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._config = config
        self._recent: dict[int, deque[float]] = defaultdict(lambda: deque(maxlen=_KEPT))

    def observe(self, num_tokens: int, seconds: float) -> None:
        self._recent[num_tokens.bit_length()].append(seconds)

    def allowance(self, num_tokens: int) -> float:
        """Seconds a step of `num_tokens` tokens may take.

        Of a hundred durations the slowest stands for the 99th percentile.
        """
        recent = self._recent.get(num_tokens.bit_length())
        if not recent:
            return self._config.first_step_timeout_s
        return max(self._config.step_timeout_s, _FACTOR * max(recent))
