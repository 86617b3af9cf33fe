"""A run written down and fed again gives the same plans; one that does not is found at its first difference."""

import io
import random
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner

from octavo.cli.main import main
from octavo.scheduler.core.events import (
    PrefixPinned,
    PrefixUnpinned,
    SequenceEnded,
    Tick,
    WorkerCordoned,
    WorkerDrained,
    WorkerReadmitted,
)
from octavo.scheduler.server.event_log import (
    Began,
    EventLogError,
    Handled,
    LogWriter,
    Planned,
    Record,
    log_file,
    read_records,
    recorder,
    replay,
)
from octavo.testing.cluster import FRONTEND, make_request
from octavo.wire.base import SCHEMA_VERSION
from octavo.wire.requests import Prefix
from octavo.wire.sampling import BeamSearch, EarlyStopping

from ..conftest import MakeCluster


@pytest.fixture
def log(make_cluster: MakeCluster) -> bytes:
    """A run with all that may happen: preemption both ways, aborts, ends, pins, a failed step, replicas that come, go
    and are drained."""
    file = io.BytesIO()
    cluster = make_cluster(record=recorder(log_file(file)), max_num_batched_tokens=16, max_steps_in_flight=2)
    rng = random.Random(3)
    cluster.join(1, num_blocks=24, block_size=2, num_cpu_blocks=24)
    cluster.join(2, num_blocks=28, block_size=2, num_cpu_blocks=28)
    for i in range(20):
        cluster.submit(make_request(f"r{i}", rng.randint(1, 8), rng.randint(1, 12), priority=i % 2, **WAYS[i % 4]))
        cluster.step(fail=i == 7)
        if i == 3:
            cluster.handle(PrefixPinned(Prefix("prefix", [1, 2, 3])))
        if i == 11:
            cluster.leave(1)
            cluster.handle(PrefixUnpinned("prefix"))
        if i == 12:
            cluster.join(3, num_blocks=24, block_size=2, num_cpu_blocks=24)
            cluster.handle(WorkerCordoned("worker-3"))
        if i == 15:
            cluster.handle(WorkerReadmitted("worker-3"))
            cluster.handle(WorkerDrained("worker-2", 0.02))
        if i % 5 == 4:
            cluster.abort(f"r{i}")
            cluster.handle(SequenceEnded(FRONTEND, f"r{i - 3}", 1, 1))
    cluster.run()
    assert cluster.core.preemptions > cluster.core.swaps > 0
    assert set(cluster.core.replicas) == {3}
    return file.getvalue()


# Ways to decode.
WAYS: list[dict[str, Any]] = [
    # Grammars that take microseconds; what they took decides who is in a step.
    {"grammar": "8000"},
    {"num_sequences": 2, "temperature": 1.0, "grammar": "3000"},
    {"beam": BeamSearch(2, 1.0, EarlyStopping.OFF)},
    {"logprobs": 2, "prompt_logprobs": 1},
]


def records(log: bytes) -> list[Record]:
    return list(read_records(io.BytesIO(log)))


def test_a_replay_plans_the_same(log: bytes) -> None:
    result = replay(iter(records(log)))
    assert result.difference is None
    assert result.plans == sum(isinstance(record, Planned) for record in records(log)) > 0
    assert result.events == sum(isinstance(record, Handled) for record in records(log))


def test_the_first_plan_that_differs_is_told(log: bytes) -> None:
    entries = records(log)
    positions = [i for i, record in enumerate(entries) if isinstance(record, Planned)]
    changed = entries[positions[9]]
    assert isinstance(changed, Planned)
    wrong = msgspec.structs.replace(changed.plan, forget=[12345])
    entries[positions[9]] = Planned(wrong)
    result = replay(iter(entries))
    assert result.plans == 9
    assert result.difference == (wrong, changed.plan)


def test_a_plan_that_is_no_longer_made_is_a_difference(log: bytes) -> None:
    entries = records(log)
    last = max(i for i, record in enumerate(entries) if isinstance(record, Planned))
    result = replay(iter([*entries, entries[last]]))
    assert result.difference is not None
    assert result.difference[1] is None


def test_an_event_that_is_left_out_changes_what_follows(log: bytes) -> None:
    entries = records(log)
    submitted = [i for i, record in enumerate(entries) if isinstance(record, Handled)]
    del entries[submitted[4]]
    assert replay(iter(entries)).difference is not None


def test_a_log_that_ends_in_the_middle_of_a_record_is_read_up_to_there(log: bytes) -> None:
    assert records(log[:-3]) == records(log)[:-1]


@pytest.mark.parametrize("garbage", [b"\xff" * 64, b"\0\0\0\x04abcd", b"\0\0\0\x01\xc1"])
def test_garbage_is_no_log(garbage: bytes) -> None:
    with pytest.raises(EventLogError, match="no event log"):
        records(garbage)


def test_a_log_of_another_schema_or_without_a_beginning_is_refused(log: bytes) -> None:
    began, *rest = records(log)
    assert isinstance(began, Began)
    older = msgspec.structs.replace(began, schema_version=SCHEMA_VERSION - 1)
    with pytest.raises(EventLogError, match=f"schema {SCHEMA_VERSION - 1}, this version {SCHEMA_VERSION}"):
        replay(iter([older, *rest]))
    with pytest.raises(EventLogError, match="does not begin"):
        replay(iter([Handled(0.0, Tick())]))


def test_the_command_says_how_it_went(log: bytes, tmp_path: Path) -> None:
    path = tmp_path / "events.log"
    path.write_bytes(log)
    good = CliRunner().invoke(main, ["replay", str(path)])
    assert (good.exit_code, good.output.endswith("plans: all equal\n")) == (0, True)
    path.write_bytes(b"no log at all, but long enough")
    bad = CliRunner().invoke(main, ["replay", str(path)])
    assert bad.exit_code == 1
    assert "no event log" in bad.output


def test_a_restarted_scheduler_writes_a_log_of_its_own_beside_the_earlier_one(tmp_path: Path) -> None:
    path = tmp_path / "events.log"
    for epoch in (7, 8):
        with LogWriter(path, epoch) as log:
            log.write(b"%d" % epoch)
    assert path.read_bytes() == b"\0\0\0\x017"
    assert (tmp_path / "events.log.0000000000000008").read_bytes() == b"\0\0\0\x018"
    assert path.stat().st_mode & 0o777 == 0o600
