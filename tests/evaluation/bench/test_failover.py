from pathlib import Path

import pytest

from octavo.bench.whole.failover import TimeSpread, read_losses
from octavo.scheduler.core.events import LossCause
from octavo.scheduler.server.event_log import EventLogError, Record, Scheduled
from octavo.testing.cluster import Cluster, make_request, write_fake_model


def test_the_log_tells_when_moved_requests_were_planned_and_answered(tmp_path: Path) -> None:
    records: list[Record] = []
    cluster = Cluster(write_fake_model(tmp_path), records.append)
    for incarnation in (1, 2):
        cluster.join(incarnation)
    cluster.submit(*(make_request(str(i), 6, 12) for i in range(4)))
    for _ in range(3):
        cluster.step()
    running = {group.request_id for group in cluster.core.replicas[1].running}
    cluster.leave(1, LossCause.UNREACHABLE)
    lost_at = cluster.now
    cluster.run()
    [loss] = read_losses(records)
    assert loss.at == lost_at
    assert set(loss.moved) == running
    assert 0 < len(running) < 4
    for moved in loss.moved.values():
        assert lost_at <= moved.planned_at < moved.answered_at <= cluster.now


def test_a_log_without_a_loss_tells_of_none(tmp_path: Path) -> None:
    records: list[Record] = []
    cluster = Cluster(write_fake_model(tmp_path), records.append)
    cluster.join()
    cluster.submit(make_request("a", 6, 3))
    cluster.run()
    assert list(read_losses(records)) == []


def test_what_is_no_log_is_refused() -> None:
    with pytest.raises(EventLogError, match="does not begin"):
        list(read_losses([Scheduled(0.0)]))


def test_a_spread_is_in_milliseconds() -> None:
    spread = TimeSpread.of([n / 1000 for n in range(1, 101)])
    assert [spread.p50, spread.p99, spread.longest] == pytest.approx([51, 100, 100])
    assert TimeSpread.of([0.25]) == TimeSpread(250, 250, 250)
