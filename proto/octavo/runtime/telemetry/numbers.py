"""Holds numbers that one thread writes and any thread may read, and makes metric families of them when somebody
asks."""

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

# Upper bounds in seconds: of steps and gaps between tokens, of what clients wait for, and of whole requests.
SHORT_S: Final = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.025, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
WAIT_S: Final = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0)
LONG_S: Final = (0.1, 0.3, 0.5, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 60.0, 120.0, 300.0, 900.0, 3600.0)
SIZES: Final = tuple(float(2**power) for power in range(15))


class Histogram:
    """Counts the values that were at most as large as each of `bounds`, which grow, and adds up all values."""

    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    @property
    def total(self) -> tuple[int, float]:
        """Returns the number of values observed, and their sum. In the writing thread both are of one moment."""
        return sum(self._counts), self._sum

    def family(self, name: str, text: str, labels: Mapping[str, str] | None = None) -> Metric:
        # The number of values is read off the same copy, so the buckets agree whatever is observed meanwhile.
        cumulative = accumulate(self._counts.copy())
        names = [*map(str, self._bounds), "+Inf"]
        labels = labels or {}
        family = HistogramMetricFamily(name, text, labels=list(labels))
        family.add_metric(list(labels.values()), list(zip(names, map(float, cumulative), strict=True)), self._sum)
        return family


class Tally:
    """Counts how often each of a few names came, some dozens at most. The `known` names are reported from the start."""

    __slots__ = ("_counts",)

    def __init__(self, *known: str) -> None:
        self._counts = dict.fromkeys(known, 0.0)

    def add(self, name: str, count: float = 1) -> None:
        self._counts[name] = self._counts.get(name, 0) + count

    @property
    def total(self) -> float:
        return sum(self.counts.values())

    @property
    def counts(self) -> dict[str, float]:
        """Returns the counts by their names, as they are now."""
        return self._counts.copy()

    def family(self, name: str, text: str, label: str) -> Metric:
        return counters(name, text, [label], [((value,), count) for value, count in self.counts.items()])


def counter(name: str, text: str, value: float, labels: Mapping[str, str] | None = None) -> Metric:
    """Makes the metric of a number that only grows; `name` is without its `_total`."""
    labels = labels or {}
    family = CounterMetricFamily(name, text, labels=list(labels))
    family.add_metric(list(labels.values()), value)
    return family


def gauge(name: str, text: str, value: float, labels: Mapping[str, str] | None = None) -> Metric:
    """Makes the metric of a number that rises and falls."""
    return gauges(name, text, tuple(labels or ()), [(tuple((labels or {}).values()), value)])


def gauges(name: str, text: str, labels: Sequence[str], rows: Iterable[tuple[Sequence[str], float]]) -> Metric:
    """Makes one gauge for each of `rows`: its values of `labels`, and its own value."""
    family = GaugeMetricFamily(name, text, labels=labels)
    for values, value in rows:
        family.add_metric(values, value)
    return family


def counters(name: str, text: str, labels: Sequence[str], rows: Iterable[tuple[Sequence[str], float]]) -> Metric:
    """Makes one counter for each of `rows`: its values of `labels`, and its own value; `name` is without its
    `_total`."""
    family = CounterMetricFamily(name, text, labels=labels)
    for values, value in rows:
        family.add_metric(values, value)
    return family
