"""Records for those who follow: in order, without end, and never at the cost of the one who writes them."""

import asyncio
import sys
from contextlib import aclosing

from octavo.scheduler.server.event_log import LogEntry, StepFeed

_PATIENCE_S = 60.0


def record(number: int) -> bytes:
    """All of one size."""
    return b"record %04d" % number


def feed_of(kept: int, appended: int) -> StepFeed:
    """A feed with room for `kept` records, to which so many were appended."""
    feed = StepFeed(kept * sys.getsizeof(record(0)))
    for number in range(1, appended + 1):
        feed.append(record(number))
    return feed


async def read(feed: StepFeed, start: int, count: int) -> list[LogEntry]:
    async with aclosing(feed.follow(start)) as entries, asyncio.timeout(_PATIENCE_S):
        return [await anext(entries) for _ in range(count)]


async def test_records_come_from_the_one_that_is_wanted() -> None:
    assert await read(feed_of(9, 5), 3, 2) == [LogEntry(3, record(3), 0), LogEntry(4, record(4), 0)]


async def test_without_a_number_they_come_from_the_oldest_kept_and_none_counts_as_missed() -> None:
    assert await read(feed_of(3, 8), 0, 2) == [LogEntry(6, record(6), 0), LogEntry(7, record(7), 0)]


async def test_those_that_are_not_kept_are_counted() -> None:
    assert await read(feed_of(3, 8), 2, 2) == [LogEntry(6, record(6), 4), LogEntry(7, record(7), 0)]


async def test_a_record_larger_than_the_room_is_kept_until_the_next() -> None:
    feed = feed_of(2, 1)
    feed.append(b"large" * 1000)
    assert (await read(feed, 0, 1))[0].number == 2
    feed.append(record(3))
    assert await read(feed, 1, 1) == [LogEntry(3, record(3), 2)]


async def test_every_reader_hears_of_what_comes_later() -> None:
    feed = feed_of(9, 1)
    readers = [asyncio.create_task(read(feed, start, 3)) for start in (1, 2)]
    for number in range(2, 6):
        await asyncio.sleep(0)
        feed.append(record(number))
    async with asyncio.timeout(_PATIENCE_S):
        found = [[entry.number for entry in await reader] for reader in readers]
    assert found == [[1, 2, 3], [2, 3, 4]]


async def test_a_reader_that_falls_behind_goes_on_with_what_is_left() -> None:
    feed = feed_of(3, 2)
    async with aclosing(feed.follow(1)) as entries:
        assert await anext(entries) == LogEntry(1, record(1), 0)
        for number in range(3, 9):
            feed.append(record(number))
        assert await anext(entries) == LogEntry(6, record(6), 4)
        assert await anext(entries) == LogEntry(7, record(7), 0)
