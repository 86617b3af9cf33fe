"""Every system of the paper on random jobs: nothing is lost, nothing overlaps, nothing stays behind."""

from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.paper.accounting import shares_of
from octavo.paper.contiguous_kv import ContiguousKV
from octavo.paper.systems import SYSTEMS, VLLM, run
from octavo.runtime.models.step_times import StepShape
from octavo.scheduler.core.config import Preemption
from octavo.scheduler.core.scheduler import Scheduler
from octavo.simulator.device import ReplicaSpec
from octavo.wire.requests import Prefix
from octavo.workload.job import Job
from octavo.workload.measures import Served

MAX_LEN = 64


class StepTimes:
    """Half a second for a step and more for what it holds."""

    def __init__(self) -> None:
        self.copies = 0

    def seconds(self, shape: StepShape) -> float:
        self.copies += shape.copies
        return 0.5 + 0.01 * shape.num_tokens


def spec_of(num_slots: int = 200, latency: StepTimes | None = None, num_cpu_blocks: int = 50) -> ReplicaSpec:
    return ReplicaSpec(
        num_slots // 4, 4, latency or StepTimes(), num_cpu_blocks=num_cpu_blocks, max_model_len=MAX_LEN, vocab_size=999
    )


class Inspector:
    """Asserts at every moment that it sees that the books agree, and that no two chunks have a slot in common."""

    def __init__(self) -> None:
        self.num_seen = 0
        self.core: Scheduler | None = None

    def __call__(self, time: float, core: Scheduler) -> None:
        self.num_seen += 1
        self.core = core
        core.check()
        for replica in core.replicas.values():
            shares = shares_of(replica)
            parts = (shares.tokens, shares.reserved, shares.internal, shares.external)
            assert min(parts) >= 0.0
            assert sum(parts) == pytest.approx(1.0)
            if isinstance(replica.kv, ContiguousKV):
                _assert_apart(replica.kv)

    def assert_all_free(self) -> None:
        """To be asked after the end."""
        assert self.core is not None
        self.core.check()
        for replica in self.core.replicas.values():
            assert replica.kv.num_free == replica.kv.num_blocks
            assert not replica.running
            if isinstance(replica.kv, ContiguousKV):
                assert replica.kv.buddy.num_free == replica.kv.buddy.size
                assert not replica.kv.holdings


def _assert_apart(kv: ContiguousKV) -> None:
    chunks = [
        range(holding.chunk, holding.chunk + holding.allotment.size)
        for holding in kv.holdings.values()
        if holding.chunk is not None
    ]
    assert all(one.stop <= other.start or other.stop <= one.start for one, other in combinations(chunks, 2))


@st.composite
def jobs_of(draw: st.DrawFn) -> Job:
    prompt = draw(st.integers(1, 40))
    output = draw(st.integers(1, min(24, MAX_LEN - prompt)))
    width = draw(st.sampled_from([0, 0, 0, 2, 3]))
    n = draw(st.integers(1, width or 3))
    return Job(draw(st.integers(0, 40)) / 4, prompt, output, n=n, beam_width=width)


@pytest.mark.parametrize("name", SYSTEMS)
@settings(max_examples=25, deadline=None)
@given(jobs=st.lists(jobs_of(), min_size=1, max_size=12))
def test_every_job_ends_with_all_its_tokens_and_nothing_stays_behind(name: str, jobs: list[Job]) -> None:
    inspector = Inspector()
    outcome = run(name, spec_of(), jobs, sample_every_s=0.25, probe=inspector)
    by_arrival = sorted(jobs, key=lambda job: job.arrival_s)
    assert [served.job for served in outcome.served] == by_arrival
    for served in outcome.served:
        assert served.error == ""
        assert served.num_tokens == served.job.output_tokens * served.job.n
        assert served.first_token_s is not None
        assert served.finished_s is not None
        assert served.job.arrival_s < served.first_token_s <= served.finished_s <= outcome.seconds
    assert inspector.num_seen > 2
    inspector.assert_all_free()
    if name != VLLM:
        assert outcome.preemptions == 0


@pytest.mark.parametrize("name", SYSTEMS)
def test_two_runs_are_equal(name: str) -> None:
    jobs = [Job(number / 3, 5 + number % 7, 1 + number % 11) for number in range(30)]
    first, second = (run(name, spec_of(), jobs) for _ in range(2))
    assert first.served == second.served
    assert first.seconds == second.seconds


def test_the_more_is_reserved_the_fewer_run_together() -> None:
    jobs = [Job(0.0, 4 + number % 9, 6 + number % 12) for number in range(120)]
    batched = []
    for name in SYSTEMS:
        samples = run(name, spec_of(400), jobs, sample_every_s=0.5).samples
        batched.append(sum(sample.running for sample in samples) / len(samples))
    assert batched == sorted(batched)
    assert batched[-1] > 2 * batched[1]


def mean_wait(served: list[Served]) -> float:
    return sum(each.latency or 0.0 for each in served) / len(served)


def test_answers_come_sooner_when_requests_need_not_wait_for_a_batch_to_end() -> None:
    jobs = [Job(float(number), 4, 20 if number % 2 else 2) for number in range(20)]
    by_batch, by_iteration = (mean_wait(run(name, spec_of(), jobs).served) for name in list(SYSTEMS)[:2])
    assert by_iteration < by_batch


@pytest.mark.parametrize("name", [name for name in SYSTEMS if name != VLLM])
def test_only_paged_memory_shares_what_parallel_samples_have_in_common(name: str) -> None:
    """A prompt of 20 tokens for three samples: its 5 blocks are copied for two of them, or are not."""
    job, contiguous, paged = Job(0.0, 20, 4, n=3), StepTimes(), StepTimes()
    run(name, spec_of(latency=contiguous), [job])
    run(VLLM, spec_of(latency=paged), [job])
    assert contiguous.copies == 2 * 5
    assert paged.copies == 0


def test_beams_are_copied_whole_where_memory_is_contiguous() -> None:
    job, contiguous, paged = Job(0.0, 24, 12, beam_width=4), StepTimes(), StepTimes()
    run("Orca (Oracle)", spec_of(256, latency=contiguous), [job])
    run(VLLM, spec_of(256, latency=paged), [job])
    assert contiguous.copies > 3 * paged.copies > 0


@pytest.mark.parametrize(("preemption", "swaps"), [(Preemption.SWAP, True), (Preemption.RECOMPUTE, False)])
def test_paged_memory_that_runs_out_preempts_as_told(preemption: Preemption, swaps: bool) -> None:
    jobs = [Job(0.0, 10, 30) for _ in range(12)]
    inspector = Inspector()
    outcome = run(VLLM, spec_of(), jobs, preemption=preemption, sample_every_s=0.25, probe=inspector)
    assert outcome.preemptions > 0
    assert (outcome.swaps > 0) == swaps
    inspector.assert_all_free()


@pytest.mark.parametrize("name", [name for name in SYSTEMS if name != VLLM])
def test_what_a_system_does_not_have_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="neither preempts nor shares"):
        run(name, spec_of(), [], preemption=Preemption.SWAP)
    with pytest.raises(ValueError, match="neither preempts nor shares"):
        run(name, spec_of(), [], pinned=[Prefix("p", [1, 2, 3])])
