"""Checks what a service promises: limits of percentiles, and of each request's own times."""

import re
from dataclasses import dataclass
from typing import Final, Self

from octavo.workload.gaps import STATISTICS, Spread
from octavo.workload.served import METRICS, Served, Summary

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
