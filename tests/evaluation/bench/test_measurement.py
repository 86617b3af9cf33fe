"""What is made of the times at which tokens came."""

import os

import pytest

from octavo.bench import measurement
from octavo.bench.measurement import OTHERS, CpuMeter, TokenTimes, measured
from octavo.bench.workloads import Case, CaseRequest


def stream(*arrivals: tuple[int, float]) -> TokenTimes:
    result = TokenTimes()
    for num_tokens, at in arrivals:
        result.arrived(num_tokens, at)
    return result


def test_a_run_is_summed_up() -> None:
    case = Case("x", "x", [CaseRequest([1], 3), CaseRequest([1, 2], 5)])
    run = measured(case, 4.0, [stream((1, 1.0), (2, 3.0)), stream((0, 0.5), (1, 2.0), (4, 4.0))], 7)
    assert run.output_tokens_per_s == 2.0
    assert run.ttft_ms == 1500
    assert run.ttft_ms_worst == 2000
    # 1 s and 0.5 s.
    assert run.ms_per_token == 750
    assert run.steps == 7


def test_a_token_alone_has_no_time_per_token() -> None:
    run = measured(Case("x", "x", [CaseRequest([1], 1)]), 1.0, [stream((1, 1.0))], 1)
    assert run.ms_per_token is None


def test_all_sequences_of_a_request_count() -> None:
    case = Case("x", "x", [CaseRequest([1], 2, num_sequences=3)])
    run = measured(case, 1.0, [stream((3, 0.5), (3, 1.0))], 2)
    assert run.output_tokens_per_s == 6
    assert run.ms_per_token == 500


def test_another_number_of_tokens_than_asked_for_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="2 tokens came where 3 were asked for"):
        measured(Case("x", "x", [CaseRequest([1], 3)]), 1.0, [stream((2, 1.0))], 1)


def test_what_no_stage_accounts_for_is_told() -> None:
    run = measured(Case("x", "x", [CaseRequest([1], 1)]), 2.0, [stream((1, 1.0))], 1, {"model": 1.0, "sample": 0.5})
    assert run.stages == {"model": 0.5, "sample": 0.25, "other": 0.25}


def test_others_are_given_as_their_share_of_all_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 4)
    run = measured(
        Case("x", "x", [CaseRequest([1], 1)]), 2.0, [stream((1, 1.0))], 1, None, {"worker": 3.0, OTHERS: 2.0}
    )
    assert run.others_share == 0.25


def test_others_have_no_less_than_nothing_where_the_machines_count_is_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    used = iter([1.0, 2.0])
    monkeypatch.setattr(measurement, "process_cpu_s", lambda _: next(used))
    monkeypatch.setattr(measurement, "machine_cpu_s", lambda: 5.0)
    assert CpuMeter({"us": os.getpid()}).cpu_s() == {"us": 1.0, OTHERS: 0.0}
