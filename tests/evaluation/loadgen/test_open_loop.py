import asyncio
from collections.abc import Awaitable, Callable, Iterator

import pytest

from octavo.loadgen.servers import AnswerRecorder, Call, Failure, Lot, Record, Said
from octavo.loadgen.session import OpenLoop, ahead, warm_up_jobs
from octavo.workload.job import Job

JOBS = [Job(float(second), 8, 2) for second in range(4)]


class VirtualTime:
    """Passes only while somebody sleeps, and then by what is asked for and `too_long` more."""

    def __init__(self, too_long: float = 0.0) -> None:
        self.now = 100.0
        self._too_long = too_long

    def clock(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        # Others do what they can before it passes.
        for _ in range(5):
            await asyncio.sleep(0)
        self.now += seconds + (self._too_long if seconds else 0.0)


def loop_of(
    jobs: list[Job],
    call: Call,
    time: VirtualTime,
    *,
    timeout_s: float = 60.0,
    changed: Callable[[Record], None] = lambda _: None,
) -> OpenLoop:
    return OpenLoop(
        jobs, lambda job, index, said: call, timeout_s=timeout_s, changed=changed, clock=time.clock, sleep=time.sleep
    )


async def at_once(answer: AnswerRecorder) -> None:
    answer.usage(8, 2)
    answer.end()


async def test_requests_are_sent_when_they_are_due_though_no_answer_has_come() -> None:
    all_sent, sent = asyncio.Event(), []

    async def slow(answer: AnswerRecorder) -> None:
        sent.append(answer.record)
        if len(sent) == len(JOBS):
            all_sent.set()
        await all_sent.wait()
        await at_once(answer)

    run = await loop_of(JOBS, slow, VirtualTime()).serve()
    assert [record.sent_s for record in run.records] == [0.0, 1.0, 2.0, 3.0]
    assert [record.finished_s for record in run.records] == [3.0] * 4
    assert (run.seconds, run.interrupted) == (3.0, False)


async def test_jobs_are_sent_in_order_of_their_arrival() -> None:
    run = await loop_of(JOBS[::-1], at_once, VirtualTime()).serve()
    assert [record.job for record in run.records] == JOBS


async def test_the_generators_own_lag_is_kept() -> None:
    run = await loop_of(JOBS, at_once, VirtualTime(too_long=0.25)).serve()
    assert [record.lag_s for record in run.records] == [0.0, 0.25, 0.25, 0.25]
    # A user would have waited that long too.
    assert [record.served().ttft for record in run.records] == [0.0, 0.25, 0.25, 0.25]


async def test_a_request_that_takes_too_long_has_failed() -> None:
    async def never(answer: AnswerRecorder) -> None:
        await asyncio.Event().wait()

    run = await loop_of(JOBS[:1], never, VirtualTime(), timeout_s=0.001).serve()
    assert run.records[0].failure is not None
    assert run.records[0].failure.kind == "timeout"


@pytest.mark.parametrize(
    ("error", "kind"), [(Failure("HTTP 429", "full"), "HTTP 429"), (ZeroDivisionError("oh"), "ZeroDivisionError")]
)
async def test_one_request_that_fails_in_any_way_ends_no_other(error: Exception, kind: str) -> None:
    async def fails(answer: AnswerRecorder) -> None:
        if answer.record.job is JOBS[1]:
            raise error
        await at_once(answer)

    run = await loop_of(JOBS, fails, VirtualTime()).serve()
    assert [record.failure and record.failure.kind for record in run.records] == [None, kind, None, None]


async def test_what_was_not_sent_or_answered_when_it_was_stopped_is_told() -> None:
    changes = []

    def changed(record: Record) -> None:
        changes.append(record)
        if len(changes) == 3:
            loop.stop()

    async def first_only(answer: AnswerRecorder) -> None:
        if answer.record.job is not JOBS[0]:
            await asyncio.Event().wait()
        await at_once(answer)

    loop = loop_of(JOBS, first_only, VirtualTime(), changed=changed)
    run = await loop.serve()
    assert run.interrupted
    assert [record.finished_s for record in run.records] == [0.0, None, None, None]
    assert [record.sent_s for record in run.records] == [0.0, 1.0, None, None]
    assert [record.failure for record in run.records] == [None] * 4


async def test_an_error_of_the_one_who_prepares_is_raised() -> None:
    def broken(job: Job, index: int, said: Said) -> Call:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await OpenLoop(JOBS, broken, timeout_s=1.0).serve()


async def test_numbers_of_jobs_are_those_of_their_arrival() -> None:
    prepared: list[tuple[Job, int]] = []

    def prepare(job: Job, index: int, said: Said) -> Callable[[AnswerRecorder], Awaitable[None]]:
        prepared.append((job, index))
        return at_once

    time = VirtualTime()
    await OpenLoop(JOBS[::-1], prepare, timeout_s=1.0, clock=time.clock, sleep=time.sleep).serve()
    assert prepared == [(job, index) for index, job in enumerate(JOBS)]


def test_some_items_are_made_before_they_are_asked_for() -> None:
    made = []

    def items() -> Iterator[int]:
        for item in range(6):
            made.append(item)
            yield item

    taken = ahead(items(), 3)
    assert made == [0, 1, 2]
    assert next(taken) == 0
    assert list(taken) == [1, 2, 3, 4, 5]


def test_a_warm_up_is_like_the_run_but_leaves_its_prefixes_cold() -> None:
    jobs = [Job(5.0, 8, 2, prefix="p", prefix_tokens=4), Job(6.0, 9, 3)]
    warm = warm_up_jobs(jobs, 3)
    assert [(job.arrival_s, job.prompt_tokens) for job in warm] == [(0.0, 8), (0.0, 9), (0.0, 8)]
    assert [job.prefix for job in warm] == ["warm-up p", "", "warm-up p"]
    assert warm_up_jobs(jobs, 0) == warm_up_jobs([], 3) == []


def test_connections_are_made_as_they_are_needed_and_used_again() -> None:
    lot = Lot(object, size=2)
    assert [lot.take() for _ in range(5)] == [0, 0, 1, 1, 2]
    assert len(lot.members) == 3
    lot.give_back(1)
    assert [lot.take() for _ in range(3)] == [1, 2, 3]
