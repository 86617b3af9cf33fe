"""What metrics are told of the core's doings: everything once, in plain numbers."""

from typing import Any

import msgspec
import pytest

from octavo.scheduler.core.config import Preemption
from octavo.scheduler.core.events import LeaseRenewed, SchedulerObserver
from octavo.testing.cluster import FRONTEND, Cluster, make_request, resubmitted
from octavo.testing.scenarios import beams, end_sequence

from ..conftest import MakeCluster


class Log(SchedulerObserver):
    """Every call, by name."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []

    def __getattribute__(self, name: str) -> Any:
        if name in ("calls", "of") or name.startswith("_"):
            return super().__getattribute__(name)
        return lambda *args, **named: self.calls.append((name, args or tuple(named.values())))

    def of(self, name: str) -> list[Any]:
        return [args for called, args in self.calls if called == name]


@pytest.fixture
def log() -> Log:
    return Log()


def observed(make_cluster: MakeCluster, log: Log, **config: Any) -> Cluster:
    cluster = make_cluster(observer=log, **config)
    cluster.join()
    return cluster


def test_the_log_knows_every_method() -> None:
    log = Log()
    methods = [name for name in vars(SchedulerObserver) if not name.startswith("_")]
    for name in methods:
        getattr(log, name)()
    assert [name for name, _ in log.calls] == methods


def test_the_first_admission_counts_with_its_time_and_its_hits(make_cluster: MakeCluster, log: Log) -> None:
    cluster = observed(make_cluster, log)
    cluster.submit(make_request("a", 9, max_tokens=3, shared=8))
    cluster.run()
    cluster.submit(msgspec.structs.replace(make_request("b", 9, max_tokens=3, shared=8), age_ms=500))
    cluster.run()
    assert log.of("admitted") == [(0.0,), (pytest.approx(0.5),)]
    assert log.of("prefix_lookup") == [(9, 0), (9, 8)]


def test_one_that_comes_back_is_not_admitted_again(make_cluster: MakeCluster, log: Log) -> None:
    cluster = observed(make_cluster, log, max_steps_in_flight=1)
    cluster.submit(make_request("a", 4, max_tokens=5))
    cluster.step(fail=True)
    cluster.submit(resubmitted(make_request("b", 4, max_tokens=5), [1, 2], age_ms=60_000))
    cluster.run()
    assert log.of("admitted") == [(0.0,)]
    assert log.of("prefix_lookup") == [(4, 0), (4, 0)]


@pytest.mark.parametrize("preemption", [Preemption.SWAP, Preemption.RECOMPUTE])
def test_preemptions_count_by_kind(make_cluster: MakeCluster, log: Log, preemption: Preemption) -> None:
    cluster = make_cluster(observer=log, watermark=0.0, preemption=preemption)
    cluster.join(num_blocks=16, block_size=2, num_cpu_blocks=16)
    cluster.submit(*(make_request(str(i), 5, max_tokens=11) for i in range(4)))
    cluster.run()
    assert len(log.of("preempted")) == cluster.core.preemptions > 0
    assert set(log.of("preempted")) == {(preemption is Preemption.SWAP,)}


def test_steps_count_with_their_size_and_time(make_cluster: MakeCluster, log: Log) -> None:
    cluster = observed(make_cluster, log, max_steps_in_flight=1)
    cluster.submit(make_request("a", 4, max_tokens=2), make_request("b", 6, max_tokens=2))
    cluster.run()
    first, second = log.of("step")
    assert first == (10, 2, 2, pytest.approx(0.01))
    assert second == (2, 2, 2, pytest.approx(0.01))


def test_a_failed_step_does_not_count(make_cluster: MakeCluster, log: Log) -> None:
    cluster = observed(make_cluster, log, max_steps_in_flight=1)
    cluster.submit(make_request("a", 4, max_tokens=2))
    cluster.step(fail=True)
    assert log.of("step") == []


def test_every_sequence_ends_once_and_says_why(make_cluster: MakeCluster, log: Log) -> None:
    cluster = observed(make_cluster, log, max_steps_in_flight=1)
    cluster.submit(make_request("a", 4, max_tokens=4, num_sequences=3, temperature=1.0))
    cluster.submit(make_request("b", 4, max_tokens=3, num_sequences=2, beam=beams(2)))
    cluster.step()
    cluster.step()
    end_sequence(cluster, "a", 1)
    end_sequence(cluster, "a", 1)
    cluster.run()
    assert sorted(log.of("finished")) == [("length",)] * 4 + [("stop",)]
    assert log.of("aborted") == []


def test_the_last_sequence_that_its_frontend_ends_is_no_abort(make_cluster: MakeCluster, log: Log) -> None:
    cluster = observed(make_cluster, log)
    cluster.submit(make_request("a", 4, max_tokens=4))
    end_sequence(cluster, "a", 0)
    assert (log.of("finished"), log.of("aborted")) == ([("stop",)], [])


def test_what_nobody_wants_any_more_is_aborted(make_cluster: MakeCluster, log: Log) -> None:
    cluster = observed(make_cluster, log)
    cluster.submit(*(make_request(name, 4, max_tokens=4) for name in "abc"))
    cluster.abort("a")
    cluster.handle(LeaseRenewed(FRONTEND, []))
    assert len(log.of("aborted")) == 3
    cluster.submit(make_request("d", 4, max_tokens=4))
    cluster.tick(60.0)
    assert len(log.of("aborted")) == 4


def test_a_submission_that_replaces_another_aborts_nothing(make_cluster: MakeCluster, log: Log) -> None:
    cluster = observed(make_cluster, log)
    cluster.submit(request := make_request("a", 4, max_tokens=4))
    cluster.submit(resubmitted(request))
    assert log.of("aborted") == []


def test_rejections_count_by_reason(make_cluster: MakeCluster, log: Log) -> None:
    cluster = observed(make_cluster, log, max_waiting=1)
    cluster.submit(make_request("a", 0, max_tokens=4))
    cluster.submit(msgspec.structs.replace(make_request("b", 4, max_tokens=4), max_queue_ms=0))
    cluster.submit(make_request("c", 4, max_tokens=4))
    cluster.now += 0.1
    cluster.schedule()
    assert log.of("rejected") == [("empty_prompt",), ("queue_full",), ("queue_timeout",)]
    assert log.of("aborted") == []


def test_a_lost_worker_counts(make_cluster: MakeCluster, log: Log) -> None:
    cluster = observed(make_cluster, log)
    cluster.leave(1)
    assert log.of("replica_lost") == [("goodbye",)]
