"""What a worker counts of its steps, and what traces tell of its sequences."""

import select
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import msgspec
import pytest

from octavo.runtime.telemetry import tracing
from octavo.testbed.tiny_model import write_byte_model
from octavo.testing.fakes.otlp_collector import Collector, otlp_collector
from octavo.testing.fakes.spoilable import SpoilableRunner
from octavo.testing.metrics import told
from octavo.testing.oracles.worker_plans import EPOCH, INCARNATION, plan, start, work
from octavo.wire.steps import BlockContent, KVDisk, SequenceFork, SequenceStart, StepPlan, StepTimes, WorkerWelcome
from octavo.worker.block_disk import BlockDisk
from octavo.worker.kv_store.store import KVStore
from octavo.worker.metrics import WorkerMetrics
from octavo.worker.protocol import WorkerProtocol
from octavo.worker.runner import BlockContents

PARENT = f"00-{0xABC:032x}-{0xDEF:016x}-01"


class Worker:
    """A worker's protocol with the metrics that its loop would keep; one clock for both."""

    def __init__(self, directory: Path) -> None:
        write_byte_model(directory)
        self.now = 100.0
        self.runner = SpoilableRunner(directory, block_size=4, num_blocks=16)
        self.metrics = WorkerMetrics(lambda: self.now)
        self.protocol = WorkerProtocol("w0", self.runner, count(INCARNATION).__next__)
        self.protocol.receive(WorkerWelcome(EPOCH))

    def step(self, step: StepPlan) -> None:
        self.metrics.received(step)
        self.protocol.receive(step)
        result = self.protocol.answer()
        times = StepTimes(prepare_us=1_000, model_us=20_000, sample_us=3_000)
        self.metrics.answered(msgspec.structs.replace(result, times=times), self.protocol.num_sequences)

    def told(self) -> dict[str, float]:
        return told(self.metrics, "outcome", "reason", "stage")


@pytest.fixture
def worker(tmp_path: Path) -> Worker:
    return Worker(tmp_path)


@pytest.fixture
def collector() -> Iterator[Collector]:
    with otlp_collector() as collector:
        tracing.configure(collector.address, "octavo-worker")
        try:
            yield collector
        finally:
            tracing.close()


def traced(sequence_id: int, prompt: list[int], generated: list[int] | None = None) -> SequenceStart:
    return msgspec.structs.replace(start(sequence_id, prompt, generated), traceparent=PARENT)


def test_steps_are_counted_with_their_tokens_and_their_time(worker: Worker) -> None:
    worker.metrics.loaded("w0", worker.runner)
    worker.step(plan(1, starts=[start(1, [5, 6, 7])], work=[work(1, 3, [0])]))
    worker.step(plan(2, work=[work(1, 1)]))
    worker.now += 30
    assert worker.told() == pytest.approx(
        {
            "octavo_worker_model_info": 1,
            "octavo_worker_kv_blocks": 16,
            "octavo_worker_cpu_kv_blocks": 4,
            "octavo_worker_sequences": 1,
            "octavo_worker_steps_total done": 2,
            "octavo_worker_tokens_total": 4,
            "octavo_worker_stage_seconds_total prepare": 0.002,
            "octavo_worker_stage_seconds_total model": 0.04,
            "octavo_worker_stage_seconds_total sample": 0.006,
            "octavo_worker_step_seconds_count": 2,
            "octavo_worker_step_seconds_sum": 0.048,
            "octavo_worker_step_tokens_count": 2,
            "octavo_worker_step_tokens_sum": 4,
            "octavo_worker_last_step_age_seconds": 30,
        }
    )


def test_a_failed_step_and_a_failed_sequence_are_counted(worker: Worker) -> None:
    worker.step(plan(1, work=[work(9, 1)]))
    worker.runner.to_spoil = {2}
    worker.step(plan(2, starts=[start(2, [5])], work=[work(2, 1, [0])]))
    found = worker.told()
    assert found["octavo_worker_steps_total failed"] == found["octavo_worker_steps_total done"] == 1
    assert found["octavo_worker_failed_sequences_total not_finite"] == 1
    assert "octavo_worker_sequences" not in found


def test_before_a_model_is_loaded_there_is_none_to_tell_of(worker: Worker) -> None:
    assert worker.told() == {}


def test_a_sequence_is_a_span_from_its_start_until_it_is_forgotten(worker: Worker, collector: Collector) -> None:
    worker.step(plan(1, starts=[traced(1, [5, 6])], work=[work(1, 2, [0])]))
    worker.step(plan(2, work=[work(1, 1)]))
    worker.step(plan(3, forget=[1]))
    tracing.close()
    (received,) = collector.wait_for(1)
    assert (received.service, received.span.name) == ("octavo-worker", "sequence")
    assert (received.span.trace_id.hex(), received.span.parent_span_id.hex()) == (f"{0xABC:032x}", f"{0xDEF:016x}")
    assert received.events == ["first_token"]
    assert received.attributes == {"octavo.index": 0, "octavo.prompt_tokens": 2, "octavo.computed_tokens": 0}


def test_a_sequence_that_comes_back_has_its_first_token_behind_it(worker: Worker, collector: Collector) -> None:
    worker.step(plan(1, starts=[traced(1, [5, 6], [7])], work=[work(1, 3, [0])]))
    worker.step(plan(2, forget=[1]))
    tracing.close()
    assert [received.events for received in collector.wait_for(1)] == [[]]


def test_a_sequence_that_fails_says_why(worker: Worker, collector: Collector) -> None:
    worker.runner.to_spoil = {1}
    worker.step(plan(1, starts=[traced(1, [5])], work=[work(1, 1, [0])]))
    tracing.close()
    (received,) = collector.wait_for(1)
    assert received.span.status.message == "not_finite"


def test_what_is_not_traced_and_forks_are_no_spans(worker: Worker, collector: Collector) -> None:
    worker.step(plan(1, starts=[start(1, [5]), traced(2, [6])], work=[work(1, 1, [0]), work(2, 1, [1])]))
    worker.step(plan(2, forks=[SequenceFork(2, 3, 1)]))
    assert worker.told()["octavo_worker_sequences"] == 3
    worker.step(plan(3, forget=[1, 2, 3]))
    tracing.close()
    assert len(collector.wait_for(1)) == 1


def test_a_new_incarnation_ends_every_span(worker: Worker, collector: Collector) -> None:
    worker.step(plan(1, starts=[traced(1, [5])], work=[work(1, 1, [0])]))
    worker.protocol.reset()
    tracing.close()
    assert len(collector.wait_for(1)) == 1


def test_a_disk_is_told_of_by_what_became_of_blocks(worker: Worker, tmp_path: Path) -> None:
    assert not any("disk" in name for name in worker.told())
    runner = worker.runner
    identity, content = runner.kv_identity, BlockContent(bytes([7]) * 32, 0, 0)
    with KVStore(tmp_path / "kv", 1 << 30, identity) as store:
        disk = BlockDisk(store, KVDisk(), identity.block_bytes, runner.fill_cpu_block)
        worker.metrics.loaded("w0", runner, disk)
        for _ in range(2):
            disk.store([content], BlockContents(False, lambda: [[memoryview(bytes(identity.block_bytes))]], bool))
            assert store.flush(60)
        disk.fetch(1, [BlockContent(bytes([8]) * 32, 0, 0)])
        disk.step_done(1)
        assert select.select([disk], [], [], 60)[0]
        assert disk.fetched() == [(1, [False])]
        found = told(worker.metrics, "end")
        assert {name: value for name, value in found.items() if "disk" in name} == {
            "octavo_worker_disk_moves_total written": 1,
            "octavo_worker_disk_moves_total kept": 1,
            "octavo_worker_disk_moves_total missed": 1,
        }
