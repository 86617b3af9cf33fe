"""Two servers that had the same work, in figures of the second by those of the first."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final

from octavo.loadgen.report import Report
from octavo.workload.served import Summary

# Rates, and statistics of spreads.
_RATES: Final = ("requests_per_s", "output_tokens_per_s", "goodput_per_s")
_SPREADS: Final = ("ttft", "itl", "latency", "normalised_latency")
_STATISTICS: Final = ("mean", "p50", "p99")


@dataclass(frozen=True)
class Ratio:
    """The second's value by the first's: the middle one of the rounds, the lowest and the highest."""

    metric: str
    median: float
    low: float
    high: float


def ratios(first: Sequence[Report], second: Sequence[Report]) -> list[Ratio]:
    """One for every metric that both have in every round; the reports in order of their rounds."""
    pairs = [(_values(a.summary), _values(b.summary)) for a, b in zip(first, second, strict=True)]
    if not pairs:
        return []
    shared = [name for name in pairs[0][0] if all(a.get(name) and name in b for a, b in pairs)]
    return [_ratio(name, [b[name] / a[name] for a, b in pairs]) for name in shared]


def _ratio(name: str, values: Sequence[float]) -> Ratio:
    return Ratio(name, median(values), min(values), max(values))


def _values(summary: Summary) -> dict[str, float]:
    rates = {name: value for name in _RATES if (value := getattr(summary, name)) is not None}
    spreads = {
        f"{name}_{statistic}": getattr(spread, statistic)
        for name in _SPREADS
        if (spread := getattr(summary, name)) is not None
        for statistic in _STATISTICS
    }
    return rates | spreads


def ratios_text(found: Sequence[Ratio]) -> str:
    """A table for people."""
    width = max((len(ratio.metric) for ratio in found), default=6)
    lines = [f"{'B / A':<{width}}  median     low    high"]
    lines += [f"{r.metric:<{width}}  {r.median:6.3f}  {r.low:6.3f}  {r.high:6.3f}" for r in found]
    return "\n".join(lines)
