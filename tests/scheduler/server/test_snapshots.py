"""How often a long reading is made."""

import itertools

import pytest

from octavo.scheduler.server.admin_messages import Snapshots


class Books:
    """Each reading takes `took` seconds of their clock, and gives its number."""

    def __init__(self, took: float) -> None:
        self.now, self.took = 100.0, took
        self._numbers = itertools.count(1)
        self.snapshots = Snapshots(self._read, lambda: self.now)

    def _read(self) -> int:
        self.now += self.took
        return next(self._numbers)


def test_a_reading_is_shared_until_its_time_is_one_in_a_hundred() -> None:
    books = Books(took=0.04)
    assert books.snapshots.latest() == 1
    assert books.snapshots.seconds_to_next == pytest.approx(3.96)
    books.now += 3.95
    assert books.snapshots.latest() == 1
    books.now += 0.02
    assert books.snapshots.seconds_to_next == 0.0
    assert books.snapshots.latest() == 2


def test_no_reading_gets_older_than_five_seconds() -> None:
    books = Books(took=3.0)
    assert books.snapshots.latest() == 1
    books.now += 1.9
    assert books.snapshots.latest() == 1
    books.now += 0.2
    assert books.snapshots.latest() == 2


def test_a_quick_reading_is_made_as_often_as_it_is_asked_for() -> None:
    books = Books(took=0.0)
    assert [books.snapshots.latest() for _ in range(3)] == [1, 2, 3]
    assert books.snapshots.seconds_to_next == 0.0
