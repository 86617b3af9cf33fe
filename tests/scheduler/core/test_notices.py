"""What requests are told besides their tokens: once, when it is true, and nothing after their end."""

from itertools import pairwise

import pytest

from octavo.scheduler.core.config import Policy, Preemption
from octavo.scheduler.core.events import FrontendJoined, PrefixPinned, RequestSubmitted
from octavo.scheduler.core.sequence import SequenceStatus
from octavo.testing.cluster import Cluster, make_request, resubmitted
from octavo.testing.scenarios import answer, step_until
from octavo.wire.requests import Deltas, NoticeKind, Notices, Prefix

from ..conftest import MakeCluster

QUEUED, PREEMPTED = NoticeKind.QUEUED, NoticeKind.PREEMPTED
RESUMED, WORKER_LOST = NoticeKind.RESUMED, NoticeKind.WORKER_LOST


def told(cluster: Cluster, request_id: str) -> list[tuple[NoticeKind, int]]:
    return [(notice.kind, notice.queue_position) for notice in cluster.notices[request_id]]


def messages(cluster: Cluster) -> list[Notices]:
    return [message for message in cluster.to_frontend if isinstance(message, Notices)]


def narrow(make_cluster: MakeCluster, num_waiting: int) -> Cluster:
    """One request runs, of whatever length is left; `num_waiting` wait for its place."""
    cluster = make_cluster(max_num_seqs=1, max_steps_in_flight=1)
    cluster.join()
    cluster.submit(make_request("runs", 4, max_tokens=40))
    cluster.submit(*(make_request(f"w{i}", 4, max_tokens=40) for i in range(num_waiting)))
    cluster.schedule()
    return cluster


class TestQueued:
    def test_whoever_is_admitted_at_once_is_told_nothing(self, make_cluster: MakeCluster) -> None:
        cluster = make_cluster()
        cluster.join()
        cluster.submit(make_request("a", 4, max_tokens=3), make_request("b", 4, max_tokens=3))
        cluster.run()
        assert messages(cluster) == []

    def test_whoever_is_left_waiting_is_told_its_position(self, make_cluster: MakeCluster) -> None:
        cluster = narrow(make_cluster, 2)
        assert cluster.notices.keys() == {"w0", "w1"}
        assert (told(cluster, "w0"), told(cluster, "w1")) == ([(QUEUED, 1)], [(QUEUED, 2)])
        cluster.schedule()
        assert len(messages(cluster)) == 1

    def test_without_a_worker_it_is_told_at_once(self, make_cluster: MakeCluster) -> None:
        cluster = make_cluster()
        cluster.submit(make_request("a", 4, max_tokens=3))
        cluster.schedule()
        assert told(cluster, "a") == [(QUEUED, 1)]

    def test_while_a_step_is_under_way_nobody_is_told_yet(self, make_cluster: MakeCluster) -> None:
        """The next step may have room."""
        cluster = make_cluster(max_steps_in_flight=1)
        cluster.join()
        cluster.submit(make_request("a", 4, max_tokens=9))
        cluster.schedule()
        cluster.submit(make_request("b", 4, max_tokens=9))
        cluster.schedule()
        assert messages(cluster) == []
        answer(cluster)
        cluster.schedule()
        assert cluster.groups["b"].status is SequenceStatus.RUNNING
        assert messages(cluster) == []

    def test_a_step_that_never_ends_does_not_hide_the_queue(self, make_cluster: MakeCluster) -> None:
        cluster = make_cluster(max_steps_in_flight=1, first_step_timeout_s=100.0)
        cluster.join()
        cluster.submit(make_request("a", 4, max_tokens=9))
        cluster.schedule()
        cluster.submit(make_request("b", 4, max_tokens=9))
        cluster.tick(1.0)
        assert told(cluster, "b") == [(QUEUED, 1)]

    def test_positions_go_by_the_order_of_admission(self, make_cluster: MakeCluster) -> None:
        """Tenants that were served less come first; within one, priorities."""
        cluster = make_cluster(max_num_seqs=1, max_steps_in_flight=1)
        cluster.join()
        cluster.submit(make_request("runs", 4, max_tokens=40, tenant="a"))
        cluster.schedule()
        cluster.submit(make_request("a0", 4, 9, tenant="a"), make_request("a1", 4, 9, tenant="a", priority=5))
        cluster.submit(make_request("b0", 4, 9, tenant="b"))
        answer(cluster)
        cluster.schedule()
        places = {name: notices[0].queue_position for name, notices in cluster.notices.items()}
        waiting = [group.request_id for group in cluster.core.waiting]
        assert places == {name: place for place, name in enumerate(waiting, start=1)}
        assert waiting.index("a1") < waiting.index("a0")

    def test_a_changed_position_is_told_again_and_an_unchanged_one_is_not(self, make_cluster: MakeCluster) -> None:
        cluster = narrow(make_cluster, 3)
        cluster.tick(1.0)
        assert len(messages(cluster)) == 1
        cluster.abort("w1")
        cluster.tick(1.0)
        assert told(cluster, "w0") == [(QUEUED, 1)]
        assert told(cluster, "w2") == [(QUEUED, 3), (QUEUED, 2)]

    def test_at_most_once_a_second(self, make_cluster: MakeCluster) -> None:
        cluster = narrow(make_cluster, 30)
        times: dict[str, list[float]] = {name: [cluster.now] for name in cluster.notices}
        for i in range(25):
            cluster.abort(f"w{i}")
            before = len(messages(cluster))
            cluster.tick(0.1)
            for message in messages(cluster)[before:]:
                for notice in message.notices:
                    times[notice.request_id].append(cluster.now)
        assert max(map(len, times.values())) == 3
        assert all(b - a >= 1.0 for each in times.values() for a, b in pairwise(each))

    def test_the_first_256_are_followed(self, make_cluster: MakeCluster) -> None:
        cluster = narrow(make_cluster, 300)
        cluster.abort("w0")
        cluster.tick(1.0)
        moved = [name for name, notices in cluster.notices.items() if len(notices) == 2]
        assert moved == [f"w{i}" for i in range(1, 257)]

    def test_one_that_is_submitted_again_is_told_again(self, make_cluster: MakeCluster) -> None:
        cluster = narrow(make_cluster, 1)
        again = resubmitted(cluster.groups["w0"].request)
        cluster.submit(again)
        cluster.tick(0.5)
        answer(cluster)
        cluster.schedule()
        assert [(notice.attempt, notice.kind) for notice in cluster.notices["w0"]] == [(1, QUEUED), (2, QUEUED)]

    def test_its_admission_is_told_too(self, make_cluster: MakeCluster) -> None:
        cluster = narrow(make_cluster, 1)
        cluster.run()
        assert told(cluster, "w0") == [(QUEUED, 1), (RESUMED, 0)]


def growing(make_cluster: MakeCluster, preemption: Preemption) -> Cluster:
    """Three requests that fit at first, and of which the last is preempted as they grow."""
    cluster = make_cluster(watermark=0.0, preemption=preemption)
    cluster.join(num_blocks=16, block_size=2, num_cpu_blocks=16)
    for name in ("first", "second", "third"):
        cluster.submit(make_request(name, 5, max_tokens=11))
        cluster.now += 0.001
    return cluster


class TestPreempted:
    @pytest.mark.parametrize("preemption", [Preemption.SWAP, Preemption.RECOMPUTE])
    def test_is_told_with_the_position_and_then_that_it_runs_again(
        self, make_cluster: MakeCluster, preemption: Preemption
    ) -> None:
        cluster = growing(make_cluster, preemption)
        cluster.run()
        assert cluster.core.preemptions == 1
        assert cluster.notices.keys() == {"third"}
        assert told(cluster, "third") == [(PREEMPTED, 1), (RESUMED, 0)]

    @pytest.mark.parametrize("policy", list(Policy))
    @pytest.mark.parametrize("preemption", [Preemption.SWAP, Preemption.RECOMPUTE])
    def test_every_loss_is_told_once_and_followed_by_a_return(
        self, make_cluster: MakeCluster, preemption: Preemption, policy: Policy
    ) -> None:
        cluster = make_cluster(watermark=0.0, preemption=preemption, policy=policy)
        cluster.join(num_blocks=16, block_size=2, num_cpu_blocks=16)
        for i in range(8):
            cluster.submit(make_request(f"r{i}", 3, max_tokens=12, num_sequences=1 + i % 2, temperature=1.0))
            cluster.now += 0.001
        cluster.run()
        kinds = [[notice.kind for notice in notices] for notices in cluster.notices.values()]
        assert sum(each.count(PREEMPTED) for each in kinds) == cluster.core.preemptions > 2
        for each in kinds:
            assert each[-1] is RESUMED
            assert (RESUMED, RESUMED) not in pairwise(each)

    def test_a_failed_step_is_told_as_a_preemption(self, make_cluster: MakeCluster) -> None:
        cluster = make_cluster(max_steps_in_flight=1)
        cluster.join()
        cluster.submit(make_request("a", 4, max_tokens=3))
        cluster.step(fail=True)
        assert told(cluster, "a") == [(PREEMPTED, 1)]
        cluster.run()
        assert told(cluster, "a") == [(PREEMPTED, 1), (RESUMED, 0)]

    def test_one_that_waits_for_its_recomputation_is_followed_as_queued(self, make_cluster: MakeCluster) -> None:
        cluster = make_cluster(max_steps_in_flight=1, max_num_seqs=2)
        cluster.join()
        cluster.submit(make_request("a", 4, max_tokens=30), make_request("b", 4, max_tokens=30))
        cluster.step(fail=True)
        assert told(cluster, "b") == [(PREEMPTED, 2)]
        cluster.abort("a")
        cluster.tick(1.0)
        assert told(cluster, "b") == [(PREEMPTED, 2), (QUEUED, 1)]


class TestWorkerLost:
    def test_is_told_and_then_that_it_runs_on(self, make_cluster: MakeCluster) -> None:
        cluster = make_cluster()
        cluster.join(1)
        cluster.submit(make_request("a", 4, max_tokens=9), make_request("b", 4, max_tokens=9))
        cluster.step()
        cluster.leave(1)
        assert (told(cluster, "a"), told(cluster, "b")) == ([(WORKER_LOST, 1)], [(WORKER_LOST, 2)])
        assert len(messages(cluster)) == 1
        cluster.join(2)
        cluster.run()
        assert told(cluster, "a") == [(WORKER_LOST, 1), (RESUMED, 0)]

    def test_is_told_of_one_that_is_swapped_out(self, make_cluster: MakeCluster) -> None:
        cluster = growing(make_cluster, Preemption.SWAP)
        step_until(cluster, lambda: cluster.groups["third"].status is SequenceStatus.SWAPPED)
        cluster.leave(1)
        assert told(cluster, "third") == [(PREEMPTED, 1), (WORKER_LOST, 3)]


def test_a_return_is_told_before_the_tokens_that_follow_from_it(make_cluster: MakeCluster) -> None:
    cluster = narrow(make_cluster, 1)
    cluster.run()
    said = [
        type(message)
        for message in cluster.to_frontend
        if (isinstance(message, Notices) and message.notices[0].kind is RESUMED)
        or (isinstance(message, Deltas) and message.deltas[0].request_id == "w0")
    ]
    assert said[:2] == [Notices, Deltas]


def test_each_frontend_is_told_of_its_own_requests_in_one_message(make_cluster: MakeCluster) -> None:
    cluster = make_cluster()
    cluster.handle(FrontendJoined(8))
    cluster.submit(make_request("a", 4, 3), make_request("b", 4, 3))
    cluster.handle(RequestSubmitted(8, make_request("c", 4, 3)))
    cluster.schedule()
    assert [[notice.request_id for notice in message.notices] for message in messages(cluster)] == [["a", "b"], ["c"]]


@pytest.mark.parametrize("loss", ["abort", "lease"])
def test_nothing_is_said_of_a_request_that_has_gone(make_cluster: MakeCluster, loss: str) -> None:
    cluster = make_cluster()
    cluster.submit(make_request("a", 4, max_tokens=3))
    if loss == "abort":
        cluster.abort("a")
    else:
        cluster.tick(cluster.core.config.lease_s + 1.0)
    cluster.schedule()
    cluster.tick(1.0)
    assert messages(cluster) == []
    assert not cluster.core.request_table.notices._sent


def test_the_schedulers_own_requests_are_not_spoken_of(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(max_steps_in_flight=1)
    cluster.join()
    cluster.handle(PrefixPinned(Prefix("p", list(range(9)))))
    cluster.step(fail=True)
    cluster.step()
    assert "p" in cluster.core.replicas[1].kv.pinned
    assert messages(cluster) == []
