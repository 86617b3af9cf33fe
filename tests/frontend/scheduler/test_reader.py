"""A reader sees what comes, and the first reason why nothing more will; another may take its place."""

import asyncio

import pytest

from octavo.frontend.errors import Aborted, Broken, DeadlineExceeded, Reason
from octavo.frontend.request.events import Notice
from octavo.frontend.scheduler.reader import Reader, ReadLease
from octavo.wire.requests import NoticeKind


async def waits(turn: ReadLease) -> bool:
    try:
        async with asyncio.timeout(0):
            await turn.wait()
    except TimeoutError:
        return True
    return False


async def test_every_wait_but_the_first_is_for_something_new() -> None:
    reader = Reader()
    turn = reader.take()
    assert not await waits(turn)
    assert await waits(turn)
    reader.notify()
    reader.notify()
    assert not await waits(turn)
    assert await waits(turn)


async def test_the_first_failure_stays_for_every_reader() -> None:
    reader = Reader()
    reader.fail(Aborted(Reason.ABORTED, "first"))
    reader.fail(Broken(Reason.STEP_FAILED, "second"))
    for _ in range(2):
        turn = reader.take()
        with pytest.raises(Aborted, match="first"):
            await turn.wait()


async def test_a_reader_that_is_superseded_is_woken_and_told_so() -> None:
    reader = Reader()
    first = reader.take()
    await first.wait()
    waiting = asyncio.create_task(first.wait())
    await asyncio.sleep(0)
    second = reader.take()
    with pytest.raises(Aborted) as caught:
        await waiting
    assert caught.value.reason is Reason.SUPERSEDED
    assert (reader.is_held_by(first), reader.is_held_by(second)) == (False, True)
    assert not await waits(second)


async def test_news_are_for_who_reads_now() -> None:
    reader = Reader()
    reader.take()
    turn = reader.take()
    await turn.wait()
    reader.notify()
    assert not await waits(turn)


async def test_the_end_of_a_reading_is_not_that_of_what_is_read() -> None:
    reader = Reader()
    turn = reader.take()
    turn.end(DeadlineExceeded(Reason.DEADLINE, "its time is up"))
    with pytest.raises(DeadlineExceeded):
        turn.check()
    with pytest.raises(DeadlineExceeded):
        await turn.wait()
    await reader.take().wait()


async def test_of_a_kind_of_notice_the_latest_is_kept_in_the_order_of_time() -> None:
    reader = Reader()
    turn = reader.take()
    await turn.wait()
    for notice in (
        Notice(NoticeKind.QUEUED, 3),
        Notice(NoticeKind.PREEMPTED),
        Notice(NoticeKind.QUEUED, 1),
        Notice(NoticeKind.RESUMED),
    ):
        reader.tell(notice)
    assert not await waits(turn)
    assert reader.take_notices() == [
        Notice(NoticeKind.PREEMPTED),
        Notice(NoticeKind.QUEUED, 1),
        Notice(NoticeKind.RESUMED),
    ]
    assert reader.take_notices() == []
