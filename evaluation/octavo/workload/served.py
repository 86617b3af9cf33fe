"""Records what became of one request, and sums up all requests."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from octavo.workload.gaps import Spread
from octavo.workload.job import Job


@dataclass(slots=True)
class Served:
    """Records what became of a job, by the experiment's clock (None: it never came to that).

    `num_tokens` came, in all its sequences together. Where a server did not generate what was asked,
    `job.output_tokens` must be set to what one sequence has.
    """

    job: Job
    first_token_s: float | None = None
    finished_s: float | None = None
    num_tokens: int = 0
    preemptions: int = 0
    error: str = ""

    @property
    def whole(self) -> bool:
        """Returns whether the job came to its end, without an error."""
        return self.first_token_s is not None and self.finished_s is not None and not self.error

    @property
    def ttft(self) -> float | None:
        """Returns the seconds from the job's arrival to its first token."""
        return None if self.first_token_s is None else self.first_token_s - self.job.arrival_s

    @property
    def itl(self) -> float | None:
        """Returns the mean seconds from a token to the next, over the request's whole life; 0 if it has but one."""
        if self.first_token_s is None or self.finished_s is None:
            return None
        return (self.finished_s - self.first_token_s) / max(self.job.output_tokens - 1, 1)

    @property
    def latency(self) -> float | None:
        """Returns the seconds from the job's arrival to its end."""
        return None if self.finished_s is None else self.finished_s - self.job.arrival_s

    @property
    def normalised_latency(self) -> float | None:
        """Returns the latency by output token of one sequence, in seconds."""
        latency = self.latency
        return None if latency is None else latency / self.job.output_tokens


# What is measured of a request; a `Summary` has a field of each name for all of them.
METRICS: Final[dict[str, Callable[[Served], float | None]]] = {
    "ttft": lambda served: served.ttft,
    "itl": lambda served: served.itl,
    "latency": lambda served: served.latency,
    "normalised_latency": lambda served: served.normalised_latency,
}


@dataclass(frozen=True)
class Summary:
    """Sums up a run of `seconds`. What neither `finished` nor `failed` was still under way at its end. Rates of tokens
    count all that came, and the prompts of requests of which some came.

    Spreads are those of the finished requests (None: there is none), and `itl` is that of all single gaps between
    tokens. `good` requests finished and kept every limit of the targets (None: those limit no single request).
    """

    requests: int
    finished: int
    failed: int
    preemptions: int
    seconds: float
    requests_per_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    ttft: Spread | None
    itl: Spread | None
    latency: Spread | None
    normalised_latency: Spread | None
    good: int | None = None
    goodput_per_s: float | None = None
