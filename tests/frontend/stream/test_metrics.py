"""What the frontend counts of requests, and what it tells of those it holds."""

import asyncio
import time
from pathlib import Path
from typing import cast

import pytest

from octavo.frontend.access.admission import Admission
from octavo.frontend.config import FrontendConfig
from octavo.frontend.errors import Broken, Overloaded, Reason, Unavailable
from octavo.frontend.request.events import RequestUsage
from octavo.frontend.request.request import GenerationRequest
from octavo.frontend.scheduler.client import SchedulerAvailability
from octavo.frontend.scheduler.journal import Journal
from octavo.frontend.scheduler.pool import SchedulerPool
from octavo.frontend.stream.metrics import LOAD_METRICS, CellMetrics, FrontendMetrics
from octavo.testing.metrics import FakeCell, FakeCells, told
from octavo.wire.requests import BlockUse, FinishReason, ServiceLoad
from octavo.wire.sampling import SamplingParams

USAGE = RequestUsage(
    prompt_tokens=5,
    completion_tokens=4,
    preemptions=0,
    swaps=0,
    cached_prompt_tokens=0,
    time_to_first_token_s=0.1,
    decode_time_s=0.3,
)


@pytest.fixture
def admission() -> Admission:
    return Admission(FrontendConfig(Path(), "model", "", ()))


@pytest.fixture
def journals() -> list[Journal]:
    return []


@pytest.fixture
def metrics(admission: Admission, journals: list[Journal]) -> FrontendMetrics:
    return FrontendMetrics("model", admission, lambda: journals)


def counted(metrics: FrontendMetrics) -> dict[str, float]:
    """But for the service rate, which is an estimate from the start."""
    found = told(metrics, "reason", "tenant")
    del found["octavo_service_rate_tokens_per_second"]
    return found


def test_a_request_counts_once_from_its_arrival_to_its_end(metrics: FrontendMetrics) -> None:
    metrics.arrived()
    assert counted(metrics) == {"octavo_requests_arrived_total": 1, "octavo_requests_in_flight": 1}
    metrics.prompt_tokens(5, 2)
    metrics.first_token(0.1)
    metrics.tokens(1, None)
    metrics.tokens(3, 0.3)
    metrics.sequence_finished(FinishReason.LENGTH)
    metrics.finished(USAGE, 0.5)
    assert counted(metrics) == pytest.approx(
        {
            "octavo_requests_arrived_total": 1,
            "octavo_requests_finished_total": 1,
            "octavo_sequences_finished_total length": 1,
            "octavo_prompt_tokens_total": 5,
            "octavo_cached_prompt_tokens_total": 2,
            "octavo_generated_tokens_total": 4,
            "octavo_time_to_first_token_seconds_count": 1,
            "octavo_time_to_first_token_seconds_sum": 0.1,
            "octavo_inter_token_latency_seconds_count": 3,
            "octavo_inter_token_latency_seconds_sum": 0.3,
            "octavo_request_latency_seconds_count": 1,
            "octavo_request_latency_seconds_sum": 0.5,
            "vllm:prompt_tokens_total": 5,
            "vllm:generation_tokens_total": 4,
            "vllm:time_to_first_token_seconds_count": 1,
            "vllm:time_to_first_token_seconds_sum": 0.1,
            "vllm:inter_token_latency_seconds_count": 3,
            "vllm:inter_token_latency_seconds_sum": 0.3,
            "vllm:e2e_request_latency_seconds_count": 1,
            "vllm:e2e_request_latency_seconds_sum": 0.5,
        }
    )


def test_every_other_end_is_counted_by_its_reason(metrics: FrontendMetrics) -> None:
    for _ in range(4):
        metrics.arrived()
    metrics.refused(Overloaded(Reason.QUEUE_FULL, "full"))
    metrics.failed(Broken(Reason.STEP_FAILED, "broken"))
    metrics.failed(Unavailable(Reason.DRAINING, "gone"))
    metrics.left()
    assert counted(metrics) == {
        "octavo_requests_arrived_total": 4,
        "octavo_requests_refused_total QUEUE_FULL": 1,
        "octavo_requests_failed_total STEP_FAILED": 1,
        "octavo_requests_failed_total DRAINING": 1,
        "octavo_requests_left_total": 1,
    }


def test_every_reason_is_told_before_it_occurs(metrics: FrontendMetrics) -> None:
    for name in ("octavo_requests_refused", "octavo_requests_failed"):
        (family,) = (family for family in metrics.collect() if family.name == name)
        assert {sample.labels["reason"] for sample in family.samples} == {reason.value for reason in Reason}


def test_what_is_held_is_read_off_the_books(
    metrics: FrontendMetrics, admission: Admission, journals: list[Journal]
) -> None:
    journals += [Journal("a", [1, 2, 3], SamplingParams(max_tokens=4), 0.0)]
    journals[0].sequences[0].token_ids.extend([4, 5])
    ticket = admission.admit(GenerationRequest(prompt=[1, 2, 3], max_new_tokens=7), "research")
    found = counted(metrics)
    assert (found["octavo_journal_requests"], found["octavo_journal_tokens"]) == (1, 5)
    assert (found["octavo_admitted_requests"], found["octavo_admitted_work_tokens"]) == (1, 10)
    assert found["octavo_tenant_work_tokens research"] == 10
    ticket.release()
    assert "octavo_admitted_requests" not in counted(metrics)


def test_tenants_beyond_a_hundred_are_told_as_one(metrics: FrontendMetrics, admission: Admission) -> None:
    for n in range(150):
        admission.admit(GenerationRequest(prompt=[1], max_new_tokens=1), f"tenant-{n}")
    found = {name: value for name, value in counted(metrics).items() if name.startswith("octavo_tenant")}
    assert len(found) == 101
    assert found["octavo_tenant_work_tokens other tenants"] == 100
    assert sum(found.values()) == 300


def test_the_load_of_all_cells_is_told_under_the_names_that_endpoint_pickers_know() -> None:
    loads = ServiceLoad(2, 5, [BlockUse(16, 30, 15), BlockUse(32, 10, 0)]), ServiceLoad(1, 0, [BlockUse(32, 40, 33)])
    cells = FakeCells([FakeCell("a", loads[0]), FakeCell("b", loads[1]), FakeCell("gone", None)])
    found = told(CellMetrics("model", cast(SchedulerPool, cells)), "model_name", "block_size", "num_gpu_blocks")
    assert {name: value for name, value in found.items() if name.startswith("vllm:")} == {
        "vllm:num_requests_waiting model": 3,
        "vllm:num_requests_running model": 5,
        # Each block counts alike: 48 of 80.
        "vllm:kv_cache_usage_perc model": pytest.approx(0.6),
        "vllm:cache_config_info 32 50": 1,
        "vllm:cache_config_info 16 30": 1,
    }


def test_readers_of_one_row_find_the_size_with_most_blocks() -> None:
    cells = FakeCells([FakeCell("a", ServiceLoad(0, 0, [BlockUse(8, 10, 0), BlockUse(16, 30, 0)]))])
    families = {family.name: family for family in CellMetrics("model", cast(SchedulerPool, cells)).collect()}
    assert families["vllm:cache_config_info"].samples[0].labels == {"block_size": "16", "num_gpu_blocks": "30"}


def test_a_cell_without_workers_is_full_and_what_waits_there_counts() -> None:
    cells = FakeCells([FakeCell("a", ServiceLoad(4, 0, []), SchedulerAvailability.NO_WORKER)])
    found = told(CellMetrics("model", cast(SchedulerPool, cells)))
    assert found["vllm:kv_cache_usage_perc"] == 1
    assert found["vllm:num_requests_waiting"] == 4


def test_where_no_load_is_known_every_one_of_its_metrics_is_missing() -> None:
    cells = FakeCells([FakeCell("a", None), FakeCell("b", None)])
    assert not {family.name for family in CellMetrics("model", cast(SchedulerPool, cells)).collect()} & LOAD_METRICS


async def test_the_lag_of_the_event_loop_is_measured(metrics: FrontendMetrics) -> None:
    task = asyncio.create_task(metrics.measure_lag())
    await asyncio.sleep(0)
    # Longer than the loop was to rest: what it does next is late by the difference.
    time.sleep(0.3)
    while not (found := counted(metrics)).get("octavo_event_loop_lag_seconds_count"):
        await asyncio.sleep(0)
    task.cancel()
    assert found["octavo_event_loop_lag_seconds_sum"] > 0.1
