import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.workload.job import Job
from octavo.workload.measures import Gaps, Served, Summary, Targets, summarise, to_text


def served(ttft: float = 0.5, latency: float = 2.5, arrival_s: float = 10.0, tokens: int = 5) -> Served:
    return Served(Job(arrival_s, 8, tokens), arrival_s + ttft, arrival_s + latency, tokens)


def gaps_of(*seconds: float) -> Gaps:
    gaps = Gaps()
    for each in seconds:
        gaps.add(each)
    return gaps


def test_times_count_from_the_arrival() -> None:
    one = served()
    assert (one.ttft, one.latency, one.normalised_latency, one.itl) == (0.5, 2.5, 0.5, 0.5)


def test_a_single_token_has_no_gap() -> None:
    assert served(ttft=0.5, latency=0.5, tokens=1).itl == 0.0


def test_what_never_came_has_no_time() -> None:
    lost = Served(Job(0.0, 8, 5), error="refused")
    assert (lost.ttft, lost.latency, lost.normalised_latency, lost.itl) == (None, None, None, None)
    assert not lost.whole


def test_the_spread_of_requests_is_exact() -> None:
    summary = summarise([served(ttft=place / 100) for place in range(101)], Gaps(), 60.0)
    assert summary.ttft is not None
    assert (summary.ttft.p50, summary.ttft.p90, summary.ttft.p99) == pytest.approx((0.5, 0.9, 0.99))
    assert (summary.ttft.mean, summary.ttft.max) == pytest.approx((0.5, 1.0))


def test_the_mean_normalised_latency_weighs_requests_alike() -> None:
    summary = summarise([served(latency=1.0, tokens=1), served(latency=1.0, tokens=100)], Gaps(), 60.0)
    assert summary.normalised_latency is not None
    assert summary.normalised_latency.mean == pytest.approx((1.0 + 0.01) / 2)


def test_rates_count_every_token_but_only_finished_requests() -> None:
    stopped = Served(Job(0.0, 8, 5), first_token_s=1.0, num_tokens=3, preemptions=2)
    refused = Served(Job(0.0, 8, 5), error="refused")
    summary = summarise([served(), stopped, refused], gaps_of(0.5), seconds=2.0)
    assert (summary.requests, summary.finished, summary.failed, summary.preemptions) == (3, 1, 1, 2)
    assert (summary.requests_per_s, summary.output_tokens_per_s, summary.total_tokens_per_s) == (0.5, 4.0, 12.0)


def test_a_request_that_failed_counts_in_no_spread() -> None:
    failed = served(ttft=100.0)
    failed.error = "connection lost"
    summary = summarise([served(ttft=0.5), failed], Gaps(), 60.0)
    assert summary.ttft is not None
    assert summary.ttft.max == 0.5


def test_nothing_served_has_rates_of_none_and_no_spread() -> None:
    summary = summarise([], Gaps(), 0.0)
    assert (summary.requests_per_s, summary.ttft, summary.itl) == (0.0, None, None)
    assert "0 of 0 requests finished" in to_text(summary)


def test_the_summary_goes_through_json() -> None:
    summary = summarise([served()], gaps_of(0.5), 60.0, Targets.parse("ttft<1s"))
    assert msgspec.json.decode(json.dumps(msgspec.to_builtins(summary)), type=Summary) == summary


def test_the_table_shows_every_metric_in_readable_units() -> None:
    text = to_text(summarise([served(), served(latency=3.5)], gaps_of(0.035), 60.0, Targets.parse("latency<3s")))
    assert "2 of 2 requests finished in 60 s" in text
    assert "1 kept the targets" in text
    (ttft,) = (line.split() for line in text.splitlines() if line.startswith("ttft"))
    assert ttft == ["ttft", *["500", "ms"] * 6]
    assert "35 ms" in text
    assert "normalised latency" in text


@pytest.mark.parametrize(("ttft", "latency", "good"), [(0.4, 1.0, 1), (0.6, 1.0, 0), (0.4, 2.6, 0)])
def test_a_request_is_good_if_it_keeps_every_limit(ttft: float, latency: float, good: int) -> None:
    summary = summarise([served(ttft, latency)], Gaps(), 10.0, Targets.parse("ttft<500ms, itl<500ms"))
    assert (summary.good, summary.goodput_per_s) == (good, good / 10)


def test_what_did_not_finish_is_not_good() -> None:
    summary = summarise([Served(Job(0.0, 8, 5), 0.1), served()], Gaps(), 10.0, Targets.parse("ttft<1s"))
    assert summary.good == 1


def test_targets_of_all_requests_alone_make_no_request_good_or_bad() -> None:
    assert summarise([served()], Gaps(), 10.0, Targets.parse("ttft_p99<1s")).good is None


def test_what_is_not_kept_is_told_with_its_value() -> None:
    targets = Targets.parse("ttft_p99<1s,itl_p99<50ms,normalised_latency_mean<0.2s")
    summary = summarise([served()], gaps_of(0.060), 10.0, targets)
    assert targets.unmet(summary) == [
        "itl_p99 is 59.9 ms, not below 50 ms",
        "normalised_latency_mean is 500 ms, not below 200 ms",
    ]


def test_targets_that_are_kept_leave_nothing_to_tell() -> None:
    targets = Targets.parse("ttft_p99<1s,itl_p99<50ms,ttft<1s")
    assert targets.unmet(summarise([served()], gaps_of(0.04), 10.0, targets)) == []


def test_requests_that_are_not_good_break_the_targets() -> None:
    targets = Targets.parse("ttft<1s,latency<3s")
    summary = summarise([served(), served(ttft=2.0)], Gaps(), 10.0, targets)
    assert targets.unmet(summary) == ["1 of 2 requests missed ttft<1 s, latency<3 s"]


def test_requests_that_did_not_finish_break_every_target() -> None:
    targets = Targets.parse("ttft_p99<1s")
    summary = summarise([served(), Served(Job(0.0, 8, 5), error="refused")], Gaps(), 10.0, targets)
    assert targets.unmet(summary) == ["1 of 2 requests did not finish"]


def test_outputs_of_one_token_keep_any_limit_of_gaps() -> None:
    targets = Targets.parse("itl_p99<1ms,itl<1ms")
    assert targets.unmet(summarise([served(latency=0.5, tokens=1)], Gaps(), 10.0, targets)) == []


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "is no target: write METRIC<TIME"),
        ("ttft_p99", "is no target"),
        ("ttft_p99>1s", "is no target"),
        ("ttft_p99<1", "is no target"),
        ("ttft_p99<-1s", "is no target"),
        ("ttft_p99<1h", r"times in us, ms, s, min"),
        ("ttft_p99<1s,", "'' is no target"),
        ("tpot_p99<1s", "'tpot_p99' is no metric: there are ttft, itl"),
        ("ttft_p98<1s", "_p90, _p95, _p99"),
    ],
)
def test_a_target_that_is_none_is_refused(text: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        Targets.parse(text)


@given(st.lists(st.floats(0, 1e4), min_size=1, max_size=30), st.floats(0.001, 1e4))
def test_a_limit_of_each_holds_just_where_that_of_the_maximum_does(times: list[float], limit: float) -> None:
    each, greatest = Targets.parse(f"ttft<{limit:f}s"), Targets.parse(f"ttft_max<{limit:f}s")
    all_served = [served(ttft=time, latency=time + 1) for time in times]
    assert bool(each.unmet(summarise(all_served, Gaps(), 1.0, each))) == bool(
        greatest.unmet(summarise(all_served, Gaps(), 1.0, greatest))
    )
