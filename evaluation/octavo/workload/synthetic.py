"""Draws jobs at random."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice, takewhile
from math import inf
from random import Random

from octavo.workload.arrivals import Arrivals
from octavo.workload.job import Job
from octavo.workload.lengths import Chatbot, Dataset


@dataclass(frozen=True)
class Workload:
    """Requests that come for `seconds`, or until there are `num_requests`, whichever is first (None: no such end).

    Each has `n` samples, or beams, and its drawn prompt comes behind one of `num_prefixes` prefixes of `prefix_tokens`
    (0: no prefix). Raises `ValueError` on what has no end or cannot be.
    """

    dataset: Dataset | Chatbot
    arrivals: Arrivals
    seconds: float | None = None
    num_requests: int | None = None
    n: int = 1
    beam_width: int = 0
    prefix_tokens: int = 0
    num_prefixes: int = 1

    def __post_init__(self) -> None:
        if self.num_requests is None and (self.seconds is None or self.arrivals.rate == inf):
            raise ValueError("requests without an end: give a number of requests, or a rate and a time in seconds")
        if (self.num_requests or 0) < 0 or not 0.0 <= (self.seconds or 0.0) < inf:
            raise ValueError(f"{self.num_requests} requests in {self.seconds} s: neither can be negative or infinite")
        if self.prefix_tokens < 0 or self.num_prefixes < 1:
            raise ValueError(f"{self.num_prefixes} prefixes of {self.prefix_tokens} tokens cannot be")

    def jobs(self, seed: int) -> list[Job]:
        """Returns the jobs in order of arrival. Times, lengths and prefixes are drawn apart: to change one changes none
        of the others."""
        lengths, prefixes = _stream(seed, "lengths"), _stream(seed, "prefixes")
        return [self._job(arrival_s, lengths, prefixes) for arrival_s in self._times(seed)]

    def _times(self, seed: int) -> Iterator[float]:
        end = inf if self.seconds is None else self.seconds
        times = islice(self.arrivals.times(_stream(seed, "arrivals")), self.num_requests)
        return takewhile(lambda time: time < end, times)

    def _job(self, arrival_s: float, lengths: Random, prefixes: Random) -> Job:
        prompt, output = self.dataset.draw(lengths, self.prefix_tokens)
        prefix = f"prefix-{prefixes.randrange(self.num_prefixes)}" if self.prefix_tokens else ""
        return Job(
            arrival_s=arrival_s,
            prompt_tokens=self.prefix_tokens + prompt,
            output_tokens=output,
            n=self.n,
            beam_width=self.beam_width,
            prefix=prefix,
            prefix_tokens=self.prefix_tokens,
        )


def _stream(seed: int, name: str) -> Random:
    return Random(f"{seed}/{name}")
