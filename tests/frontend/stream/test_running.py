"""A reader sees what comes, and the first reason why nothing more will; another may take its place."""

import asyncio
from unittest.mock import Mock

import pytest

from octavo.frontend.access.admission import Ticket
from octavo.frontend.errors import Aborted, Broken, DeadlineExceeded, Reason
from octavo.frontend.request.events import RequestNotice
from octavo.frontend.request.request import ANYBODY, GenerationRequest
from octavo.frontend.stream.observer import Observer
from octavo.frontend.stream.running import RunningRequest
from octavo.runtime.telemetry import tracing
from octavo.wire.requests import NoticeKind


@pytest.fixture
def running() -> RunningRequest:
    return RunningRequest(
        GenerationRequest("x"), "mine", "", ANYBODY, 0.0, Mock(spec=Ticket), tracing.NOTHING, Observer()
    )


async def waits(running: RunningRequest, reader: int) -> bool:
    try:
        async with asyncio.timeout(0):
            await running.wait(reader)
    except TimeoutError:
        return True
    return False


async def test_every_wait_but_the_first_is_for_something_new(running: RunningRequest) -> None:
    reader = running.take()
    assert not await waits(running, reader)
    assert await waits(running, reader)
    running.notify()
    running.notify()
    assert not await waits(running, reader)
    assert await waits(running, reader)


async def test_the_first_failure_stays_for_every_reader(running: RunningRequest) -> None:
    running.fail(Aborted(Reason.ABORTED, "first"))
    running.fail(Broken(Reason.STEP_FAILED, "second"))
    for _ in range(2):
        with pytest.raises(Aborted, match="first"):
            await running.wait(running.take())


async def test_a_reader_that_is_superseded_is_woken_and_told_so(running: RunningRequest) -> None:
    first = running.take()
    await running.wait(first)
    waiting = asyncio.create_task(running.wait(first))
    await asyncio.sleep(0)
    second = running.take()
    with pytest.raises(Aborted) as caught:
        await waiting
    assert caught.value.reason is Reason.SUPERSEDED
    with pytest.raises(Aborted):
        running.check_reading(first)
    running.check_reading(second)
    assert (running.is_read_by(first), running.is_read_by(second)) == (False, True)
    assert not await waits(running, second)


async def test_news_are_for_who_reads_now(running: RunningRequest) -> None:
    first = running.take()
    await running.wait(first)
    superseded = asyncio.create_task(running.wait(first))
    await asyncio.sleep(0)
    second = running.take()
    await asyncio.wait([superseded])
    # Neither one that is woken because it was superseded, nor one that comes back later, takes them away.
    for waiting in (superseded, running.wait(first)):
        with pytest.raises(Aborted):
            await waiting
    assert not await waits(running, second)
    running.notify()
    assert not await waits(running, second)
    assert await waits(running, second)


async def test_a_superseded_reader_does_not_wait_in_the_place_of_who_reads_now(running: RunningRequest) -> None:
    first, second = running.take(), running.take()
    await running.wait(second)
    waiting = asyncio.create_task(running.wait(second))
    await asyncio.sleep(0)
    with pytest.raises(Aborted):
        await running.wait(first)
    running.notify()
    await waiting


async def test_an_error_of_the_reading_alone_wakes_its_reader_and_no_other(running: RunningRequest) -> None:
    late = DeadlineExceeded(Reason.DEADLINE, "late")
    first = running.take()
    await running.wait(first)
    waiting = asyncio.create_task(running.wait(first))
    await asyncio.sleep(0)
    running.end_reading(first, late)
    with pytest.raises(DeadlineExceeded):
        await waiting
    with pytest.raises(DeadlineExceeded):
        running.check_reading(first)
    assert running.is_read_by(first)
    second = running.take()
    await running.wait(second)
    running.end_reading(first, late)
    assert await waits(running, second)
    assert running.failure is None


async def test_of_a_kind_of_notice_the_latest_is_kept_in_the_order_of_time(running: RunningRequest) -> None:
    reader = running.take()
    await running.wait(reader)
    for notice in (
        RequestNotice(NoticeKind.QUEUED, 3),
        RequestNotice(NoticeKind.PREEMPTED),
        RequestNotice(NoticeKind.QUEUED, 1),
        RequestNotice(NoticeKind.RESUMED),
    ):
        running.tell(notice)
    assert not await waits(running, reader)
    assert running.take_notices() == [
        RequestNotice(NoticeKind.PREEMPTED),
        RequestNotice(NoticeKind.QUEUED, 1),
        RequestNotice(NoticeKind.RESUMED),
    ]
    assert running.take_notices() == []
