"""The event log on a disk that fails: it ends where it must, and says so once."""

from pathlib import Path

import pytest

from octavo.runtime.telemetry import optional
from octavo.runtime.telemetry.numbers import Tally
from octavo.scheduler.core.config import SchedulerConfig
from octavo.scheduler.core.events import Tick
from octavo.scheduler.server.event_log import Began, Handled, LogWriter, Record, read_records, recorder
from octavo.testing.fakes.failing_disk import BROKEN, FULL, READ_ONLY, failing_disk
from octavo.wire.base import SCHEMA_VERSION

BEGAN: Record = Began(SCHEMA_VERSION, 7, SchedulerConfig())
TICKS: list[Record] = [Handled(float(n), Tick()) for n in range(3000)]


@pytest.fixture(autouse=True)
def nothing_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optional, "_failures", Tally(optional.EVENT_LOG))
    monkeypatch.setattr(optional, "_failing", set())


def count() -> float:
    return sum(sample.value for sample in optional.family().samples if sample.name.endswith("_total"))


def test_it_ends_at_the_first_gap_though_the_disk_has_room_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "events"
    with failing_disk(tmp_path, FULL, room=10_000) as disk, LogWriter(path, 7) as log:
        record = recorder(log.write)
        for each in [BEGAN, *TICKS]:
            record(each)
        assert disk.met
        length = path.stat().st_size
        disk.mend()
        for each in TICKS:
            record(each)
    assert path.stat().st_size == length == 10_000
    assert count() == 1
    assert len([line for line in caplog.messages if line.startswith("event log: ")]) == 1


def test_what_could_not_be_written_at_the_end_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with failing_disk(tmp_path, BROKEN), LogWriter(tmp_path / "events", 7) as log:
        recorder(log.write)(BEGAN)
    assert caplog.messages[-1].endswith("the last records are missing")
    assert count() == 1


def test_a_place_where_nothing_can_be_made_has_no_log(tmp_path: Path) -> None:
    with failing_disk(tmp_path, READ_ONLY), LogWriter(tmp_path / "events", 7) as log:
        recorder(log.write)(BEGAN)
    assert list(tmp_path.iterdir()) == []
    assert count() == 1


def test_all_is_there_where_nothing_fails(tmp_path: Path) -> None:
    with LogWriter(tmp_path / "events", 7) as log:
        record = recorder(log.write)
        for each in [BEGAN, *TICKS]:
            record(each)
    with (tmp_path / "events").open("rb") as file:
        assert list(read_records(file)) == [BEGAN, *TICKS]
    assert count() == 0
