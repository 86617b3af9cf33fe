"""Measures a run: percentiles of times, what became of each request, what a service promises, and the sum of it all."""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from math import expm1, log1p
from typing import Final, Self

from octavo.workload.job import Job

# -- percentiles ------------------------------------------------------------------------------------------------------


# A bucket is this part of its times wide, and of one microsecond more.
_BUCKET_WIDTH: Final = 0.01
_BUCKETS_PER_E: Final = 1 / log1p(_BUCKET_WIDTH)
# The last one ends after 30 years.
_NUM_BUCKETS: Final = 3500


def percentile(ordered: Sequence[float], q: float) -> float:
    """Returns the value that `q` % of `ordered`, in rising order, do not exceed; between two neighbours, on the line
    from one to the other. Raises `ValueError` if there is no value."""
    rank, share = _place(q, len(ordered))
    return ordered[rank] + share * (ordered[rank + 1] - ordered[rank]) if share else ordered[rank]


def _place(q: float, count: int) -> tuple[int, float]:
    if not count:
        raise ValueError("there are no values, so they have no percentile")
    if not 0.0 <= q <= 100.0:
        raise ValueError(f"a percentile is from 0 to 100, not {q}")
    place = q / 100 * (count - 1)
    return int(place), place - int(place)


@dataclass(frozen=True)
class Spread:
    """Holds the mean, percentiles and maximum of times, in seconds."""

    mean: float
    p50: float
    p90: float
    p95: float
    p99: float
    max: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread | None":
        """Returns the exact spread of `values`; None if there is no value."""
        ordered = sorted(values)
        if not ordered:
            return None
        p50, p90, p95, p99 = (percentile(ordered, q) for q in (50, 90, 95, 99))
        return cls(sum(ordered) / len(ordered), p50, p90, p95, p99, ordered[-1])


STATISTICS: Final = tuple(field.name for field in fields(Spread))


class Gaps:
    """Counts many times, such as those between tokens, in a histogram. The buckets are 1 % wide, so the percentiles are
    within 1 % of the exact (of times below a microsecond, within 0.01 us); mean and maximum are exact."""

    __slots__ = ("_counts", "_max", "_total")

    def __init__(self) -> None:
        self._counts = [0] * _NUM_BUCKETS
        self._total = 0.0
        self._max = 0.0

    def add(self, seconds: float, count: int = 1) -> None:
        """Counts a time `count` times. Raises `ValueError` if it is negative."""
        if seconds < 0.0:
            raise ValueError(f"a time cannot be negative: {seconds} s")
        self._counts[int(log1p(seconds * 1e6) * _BUCKETS_PER_E)] += count
        self._total += seconds * count
        if seconds > self._max:
            self._max = seconds

    def merge(self, other: "Gaps") -> None:
        """Adds all that `other` has counted."""
        self._counts = [mine + its for mine, its in zip(self._counts, other._counts, strict=True)]
        self._total += other._total
        self._max = max(self._max, other._max)

    @property
    def count(self) -> int:
        return sum(self._counts)

    @property
    def mean(self) -> float:
        """Returns the mean in seconds; 0 if nothing was counted."""
        return self._total / max(self.count, 1)

    def percentile(self, q: float) -> float:
        """Returns the time in seconds that `q` % of all do not exceed. Raises `ValueError` if nothing was counted."""
        rank, share = _place(q, self.count)
        low = self._at(rank)
        return low + share * (self._at(rank + 1) - low) if share else low

    def spread(self) -> Spread | None:
        """Returns the spread, None if nothing was counted."""
        if not self.count:
            return None
        p50, p90, p95, p99 = (self.percentile(q) for q in (50, 90, 95, 99))
        return Spread(self.mean, p50, p90, p95, p99, self._max)

    def _at(self, rank: int) -> float:
        seen = 0
        for bucket, count in enumerate(self._counts):
            seen += count
            if seen > rank:
                return min(expm1((bucket + 0.5) / _BUCKETS_PER_E) * 1e-6, self._max)
        raise IndexError(rank)


# -- requests ---------------------------------------------------------------------------------------------------------


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
    cached_tokens: int = 0

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


# -- targets ----------------------------------------------------------------------------------------------------------


_UNITS: Final = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0}
_TARGET: Final = re.compile(r"([a-z_0-9]+)\s*<\s*(\d+(?:\.\d+)?)\s*([a-z]+)")


@dataclass(frozen=True)
class Target:
    """Limits a metric, in seconds: its `statistic` over all requests; or, where that is "", each request's own value
    (of `itl`, that is the mean of its gaps)."""

    metric: str
    statistic: str
    limit: float

    @classmethod
    def parse(cls, text: str) -> Self:
        """Reads such as "ttft_p99<1s" or "itl<50ms". Raises `ValueError`."""
        match = _TARGET.fullmatch(text.strip())
        if not match or match[3] not in _UNITS:
            units = ", ".join(_UNITS)
            raise ValueError(f"{text.strip()!r} is no target: write METRIC<TIME, as in ttft_p99<1s (times in {units})")
        metric, statistic = _named(match[1])
        return cls(metric, statistic, float(match[2]) * _UNITS[match[3]])

    @property
    def name(self) -> str:
        return f"{self.metric}_{self.statistic}" if self.statistic else self.metric

    def __str__(self) -> str:
        return f"{self.name}<{time_text(self.limit)}"


def _named(name: str) -> tuple[str, str]:
    if name in METRICS:
        return name, ""
    metric, _, statistic = name.rpartition("_")
    if metric in METRICS and statistic in STATISTICS:
        return metric, statistic
    statistics = ", ".join("_" + each for each in STATISTICS)
    raise ValueError(f"{name!r} is no metric: there are {', '.join(METRICS)}; of all requests with {statistics}")


def time_text(seconds: float) -> str:
    """Returns a time as people write it: "1.2 s", "35 ms"."""
    if seconds >= 1.0:
        return f"{seconds:.3g} s" if seconds < 1000 else f"{seconds:.0f} s"
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 or not seconds else f"{seconds * 1e6:.3g} us"


@dataclass(frozen=True)
class Targets:
    """Holds the limits that must be kept. Limits without a statistic apply to every single request: a request that
    keeps them all is good."""

    of_all: tuple[Target, ...]
    of_each: tuple[Target, ...]

    @classmethod
    def parse(cls, text: str) -> Self:
        """Reads targets between commas: "ttft_p99<1s,itl_p99<50ms". Raises `ValueError` that says what is wrong."""
        targets = [Target.parse(each) for each in text.split(",")]
        return cls(
            tuple(each for each in targets if each.statistic), tuple(each for each in targets if not each.statistic)
        )

    def kept_by(self, served: Served) -> bool:
        """Returns whether the request came to its end and is good."""
        return served.whole and all((METRICS[each.metric](served) or 0.0) < each.limit for each in self.of_each)

    def unmet(self, summary: Summary) -> list[str]:
        """Returns what a run did not keep, with what it did instead. A request that did not finish breaks every target,
        and one that is not good those of each. The summary must be made with these targets."""
        faults = [_fault(each, summary) for each in self.of_all]
        if lost := summary.requests - summary.finished:
            faults.insert(0, f"{lost} of {summary.requests} requests did not finish")
        if self.of_each and (missed := summary.finished - (summary.good or 0)):
            faults.append(f"{missed} of {summary.finished} requests missed {', '.join(map(str, self.of_each))}")
        return [fault for fault in faults if fault]


def _fault(target: Target, summary: Summary) -> str:
    spread: Spread | None = getattr(summary, target.metric)
    value: float = getattr(spread, target.statistic) if spread else 0.0
    return "" if value < target.limit else f"{target.name} is {time_text(value)}, not below {time_text(target.limit)}"


# -- a run ------------------------------------------------------------------------------------------------------------


def summarise(served: Sequence[Served], gaps: Gaps, seconds: float, targets: Targets | None = None) -> Summary:
    """Sums up a run of `seconds` in which these requests came, with the `gaps` between their tokens. Percentiles are
    exact, but for those of `gaps`."""
    finished = [each for each in served if each.whole]
    good = sum(map(targets.kept_by, finished)) if targets and targets.of_each else None
    output = sum(each.num_tokens for each in served)
    prompts = sum(each.job.prompt_tokens for each in served if each.first_token_s is not None)
    return Summary(
        requests=len(served),
        finished=len(finished),
        failed=sum(bool(each.error) for each in served),
        preemptions=sum(each.preemptions for each in served),
        seconds=seconds,
        requests_per_s=_rate(len(finished), seconds),
        output_tokens_per_s=_rate(output, seconds),
        total_tokens_per_s=_rate(output + prompts, seconds),
        ttft=_spread("ttft", finished),
        itl=gaps.spread(),
        latency=_spread("latency", finished),
        normalised_latency=_spread("normalised_latency", finished),
        good=good,
        goodput_per_s=None if good is None else _rate(good, seconds),
    )


def _rate(count: int, seconds: float) -> float:
    # Where nothing came, no time passed.
    return count / seconds if count else 0.0


def _spread(metric: str, finished: Iterable[Served]) -> Spread | None:
    of = METRICS[metric]
    return Spread.of([value for each in finished if (value := of(each)) is not None])


@dataclass(frozen=True)
class ErrorCount:
    """Requests that failed, or were refused, in one way, with the message that the first of them got."""

    kind: str
    count: int
    example: str


def count_errors(errors: Iterable[tuple[str, str]]) -> list[ErrorCount]:
    """Counts the requests by the kind of their error, the most frequent first; takes the kind and the message of
    each."""
    messages: dict[str, list[str]] = {}
    for kind, message in errors:
        messages.setdefault(kind, []).append(message)
    counts = [ErrorCount(kind, len(found), found[0]) for kind, found in messages.items()]
    return sorted(counts, key=lambda each: each.count, reverse=True)


def to_text(summary: Summary) -> str:
    """Returns the summary as a table for people."""
    lines = [
        f"{summary.finished} of {summary.requests} requests finished in {time_text(summary.seconds)}"
        f" ({summary.failed} failed, {summary.preemptions} preemptions)",
        f"{summary.requests_per_s:.4g} requests/s, {summary.output_tokens_per_s:.4g} output tokens/s,"
        f" {summary.total_tokens_per_s:.4g} tokens/s with prompts",
    ]
    if summary.good is not None:
        lines.append(f"{summary.good} kept the targets: {summary.goodput_per_s:.4g} good requests/s")
    lines.append(f"{'':20}" + "".join(f"{each:>10}" for each in STATISTICS))
    lines += [_row(metric, getattr(summary, metric)) for metric in METRICS]
    return "\n".join(lines)


def _row(metric: str, spread: Spread | None) -> str:
    values = [time_text(getattr(spread, each)) if spread else "-" for each in STATISTICS]
    return f"{metric.replace('_', ' '):20}" + "".join(f"{each:>10}" for each in values)
