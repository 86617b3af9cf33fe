"""Metrics made of plain numbers agree with a plain count, whatever is counted meanwhile."""

import threading
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.core import Metric

from octavo.runtime.telemetry.numbers import LONG_S, SHORT_S, SIZES, WAIT_S, Histogram, Tally, counter, gauges

BOUNDS = (0.5, 1.0, 2.0)
values = st.sampled_from([0.0, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0])


def samples(metric: Metric) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    return {(sample.name, tuple(sorted(sample.labels.items()))): sample.value for sample in metric.samples}


def test_a_histogram_tells_how_many_values_it_has_and_their_sum() -> None:
    histogram = Histogram(BOUNDS)
    assert histogram.total == (0, 0.0)
    histogram.observe(0.5)
    histogram.observe(100.0, 3)
    assert histogram.total == (4, 300.5)


@given(st.lists(st.tuples(values, st.integers(1, 5))))
def test_a_bucket_holds_all_values_up_to_its_bound(observed: list[tuple[float, int]]) -> None:
    histogram = Histogram(BOUNDS)
    for value, times in observed:
        histogram.observe(value, times)
    found = samples(histogram.family("h", "text", {"model": "m"}))
    plain = [value for value, times in observed for _ in range(times)]
    for bound, name in [*zip(BOUNDS, map(str, BOUNDS), strict=True), (float("inf"), "+Inf")]:
        assert found["h_bucket", (("le", name), ("model", "m"))] == sum(value <= bound for value in plain)
    assert found["h_count", (("model", "m"),)] == len(plain)
    assert found["h_sum", (("model", "m"),)] == sum(plain)


@given(st.lists(st.sampled_from("abc")))
def test_a_tally_counts_names_and_tells_known_ones_from_the_start(names: list[str]) -> None:
    tally = Tally("a", "d")
    for name in names:
        tally.add(name)
    counted = Counter(names)
    expected = {("t_total", (("reason", name),)): counted[name] for name in {"a", "d", *names}}
    assert samples(tally.family("t", "text", "reason")) == expected
    assert tally.total == len(names)


def test_bounds_of_histograms_grow() -> None:
    for bounds in (SHORT_S, WAIT_S, LONG_S, SIZES):
        assert list(bounds) == sorted(set(bounds))


def test_a_histogram_read_while_it_is_written_agrees_with_itself() -> None:
    histogram, stop = Histogram(BOUNDS), threading.Event()

    def write() -> None:
        while not stop.is_set():
            for value in (0.1, 0.7, 1.5, 9.0):
                histogram.observe(value)

    writer = threading.Thread(target=write)
    writer.start()
    last = 0.0
    try:
        for _ in range(300):
            found = samples(histogram.family("h", "text"))
            buckets = [found["h_bucket", (("le", name),)] for name in ("0.5", "1.0", "2.0", "+Inf")]
            assert buckets == sorted(buckets)
            assert buckets[-1] == found["h_count", ()] >= last
            last = buckets[-1]
    finally:
        stop.set()
        writer.join()


def test_counters_and_gauges_carry_their_labels() -> None:
    assert samples(counter("c", "text", 3, {"kind": "swap"})) == {("c_total", (("kind", "swap"),)): 3}
    rows = [(("w0",), 1.0), (("w1",), 2.0)]
    expected = {("g", (("worker", "w0"),)): 1.0, ("g", (("worker", "w1"),)): 2.0}
    assert samples(gauges("g", "text", ["worker"], rows)) == expected
