"""The head of the queue may be overtaken where it does not fit, and only for a while: no idle blocks, no starvation."""

from itertools import count
from typing import Any

import pytest

from octavo.scheduler.core.config import Policy, Preemption
from octavo.testing.cluster import Cluster, make_request
from octavo.testing.scenarios import admissions, ids, outputs, references, step_until

from ..conftest import MakeCluster

# Virtual seconds of a step.
STEP_S = 0.01
SMALL_TOKENS = 6


def blocked(make_cluster: MakeCluster, **config: float) -> Cluster:
    """16 blocks of 4, of which `runs` takes 7 to 10; `large`, at the head of the queue, needs 11 and must wait."""
    cluster = make_cluster(max_steps_in_flight=1, watermark=0.0, **config)
    cluster.join(num_blocks=16)
    cluster.submit(make_request("runs", 26, 14))
    cluster.step()
    cluster.submit(make_request("large", 42, 2))
    return cluster


class TestWhileTheHeadDoesNotFit:
    def test_those_behind_it_run_in_their_order(self, make_cluster: MakeCluster) -> None:
        cluster = blocked(make_cluster)
        small = [make_request(f"small{i}", 4, 2) for i in range(3)]
        cluster.submit(*small)
        cluster.step()
        cluster.step()
        assert ids(cluster.core.waiting)[0] == "large"
        assert admissions(cluster.replicas[1], *small) == ["small0", "small1", "small2"]
        cluster.run()

    def test_one_that_fits_is_overtaken_by_nobody(self, make_cluster: MakeCluster) -> None:
        cluster = make_cluster(max_num_batched_tokens=4, max_steps_in_flight=1)
        replica = cluster.join()
        requests = [make_request("long", 30, 2), *(make_request(f"small{i}", 2, 2) for i in range(3))]
        cluster.submit(*requests)
        cluster.run()
        assert admissions(replica, *requests)[0] == "long"

    def test_many_sequences_are_overtaken_by_one_where_slots_are_short(self, make_cluster: MakeCluster) -> None:
        cluster = make_cluster(max_num_seqs=4)
        replica = cluster.join()
        many = make_request("many", 3, 8, num_sequences=3)
        requests = [make_request("a", 3, 8), make_request("b", 4, 8), many, make_request("one", 5, 2)]
        cluster.submit(*requests)
        cluster.run()
        assert admissions(replica, *requests) == ["a", "b", "one", "many"]
        assert outputs(cluster, *requests) == references(*requests)

    @pytest.mark.parametrize(("num_large", "overtakes"), [(7, True), (8, False)])
    def test_no_more_than_eight_are_looked_at(self, make_cluster: MakeCluster, num_large: int, overtakes: bool) -> None:
        cluster = blocked(make_cluster)
        cluster.submit(*(make_request(f"large{i}", 42, 2) for i in range(1, num_large)), make_request("small", 4, 2))
        cluster.step()
        assert ("small" in ids(cluster.core.waiting)) is not overtakes
        cluster.run()

    def test_one_that_lost_its_blocks_is_overtaken_by_nobody(self, make_cluster: MakeCluster) -> None:
        cluster = make_cluster(watermark=0.0, preemption=Preemption.RECOMPUTE, overtaking_s=100.0)
        cluster.join(num_blocks=14, block_size=2)
        cluster.submit(make_request("old", 8, 12), make_request("late", 8, 12))
        step_until(cluster, lambda: ids(cluster.core.waiting) == ["late"])
        cluster.submit(make_request("small", 1, 1))
        while ids(cluster.core.waiting)[:1] == ["late"]:
            assert ids(cluster.core.waiting) == ["late", "small"]
            cluster.step()
        cluster.run()


class TestPatience:
    @pytest.mark.parametrize("overtaking_s", [0.0, 0.03, 0.08])
    def test_nobody_overtakes_once_the_head_has_waited_so_long(
        self, make_cluster: MakeCluster, overtaking_s: float
    ) -> None:
        cluster = blocked(make_cluster, overtaking_s=overtaking_s)
        arrival, waits = cluster.now, list[float]()
        overtook: list[int] = []
        while "large" in ids(cluster.core.waiting):
            overtook = [i for i in range(len(waits)) if cluster.tokens[f"small{i}"]]
            cluster.submit(make_request(f"small{len(waits)}", 2, 1))
            waits.append(cluster.now - arrival)
            cluster.step()
        assert overtook == [i for i, waited in enumerate(waits) if waited < overtaking_s - STEP_S / 2]
        assert overtook or not overtaking_s
        assert len(waits) > len(overtook)
        cluster.run()

    @pytest.mark.parametrize("overtaking_s", [0.0, 0.1, 0.4, 1.0])
    def test_a_long_prompt_starts_within_it_and_the_time_of_those_that_run(
        self, make_cluster: MakeCluster, overtaking_s: float
    ) -> None:
        """Small requests come without end and fill the pool; the long prompt needs three quarters of it."""
        cluster = make_cluster(overtaking_s=overtaking_s)
        cluster.join(num_blocks=32, block_size=4)
        names = count()

        def flood() -> None:
            while len(cluster.core.waiting) < 4:
                cluster.submit(make_request(f"small{next(names)}", 8, SMALL_TOKENS))
            cluster.step()

        for _ in range(30):
            flood()
        arrival = cluster.now
        cluster.submit(make_request("long", 96, 2))
        while not cluster.tokens["long"]:
            flood()
            assert cluster.now - arrival < 10.0, "starved"
        service = (SMALL_TOKENS + 3) * STEP_S
        assert overtaking_s - STEP_S <= cluster.now - arrival <= overtaking_s + 2 * service


def two_sizes(make_cluster: MakeCluster, **config: Any) -> Cluster:
    """Replica 1 of 8 blocks of 4 and replica 2 of 32, of which `runs` takes 26 for long; only that could ever hold
    `large`, which waits at the head of the queue."""
    cluster = make_cluster(max_steps_in_flight=1, watermark=0.0, **config)
    cluster.join(1, num_blocks=8)
    cluster.join(2, num_blocks=32)
    cluster.submit(make_request("runs", 60, 44))
    cluster.step()
    cluster.submit(make_request("large", 80, 20))
    return cluster


class TestReplicasOfSeveralSizes:
    @pytest.mark.parametrize("overtaking_s", [0.0, 0.05])
    def test_a_head_that_only_a_large_one_can_hold_idles_no_small_one(
        self, make_cluster: MakeCluster, overtaking_s: float
    ) -> None:
        cluster = two_sizes(make_cluster, overtaking_s=overtaking_s)
        names, idle = count(), 0
        while "large" in ids(cluster.core.waiting):
            cluster.submit(make_request(f"small{next(names)}", 8, 2))
            cluster.step()
            idle += not cluster.core.replicas[1].running
        assert next(names) > 1
        assert idle <= 1
        cluster.run()

    def test_and_is_itself_not_held_up_by_those_that_pass_it(self, make_cluster: MakeCluster) -> None:
        alone = two_sizes(make_cluster, overtaking_s=0.05)
        step_until(alone, lambda: "large" not in ids(alone.core.waiting))
        crowded, names = two_sizes(make_cluster, overtaking_s=0.05), count()
        while "large" in ids(crowded.core.waiting):
            for _ in range(4):
                crowded.submit(make_request(f"small{next(names)}", 8, 2))
            crowded.step()
            # Those that had overtaken it by then on its own replica are short.
            assert crowded.now <= alone.now + 0.1, "starved"
        crowded.run()

    def test_a_small_one_past_its_bound_holds_back_both(self, make_cluster: MakeCluster) -> None:
        cluster = make_cluster(max_steps_in_flight=1, watermark=0.0, overtaking_s=0.0)
        for incarnation in (1, 2):
            cluster.join(incarnation, num_blocks=8)
        cluster.submit(make_request("a", 16, 8), make_request("b", 16, 8))
        cluster.step()
        cluster.submit(make_request("head", 18, 2), make_request("late", 4, 2))
        while "head" in ids(cluster.core.waiting):
            assert ids(cluster.core.waiting) == ["head", "late"]
            cluster.step()
        cluster.run()

    def test_many_heads_that_only_a_large_one_can_hold_idle_no_small_one(self, make_cluster: MakeCluster) -> None:
        cluster = two_sizes(make_cluster, overtaking_s=0.0)
        cluster.submit(*(make_request(f"large{i}", 80, 2) for i in range(20)), make_request("small", 8, 2))
        step_until(cluster, lambda: "small" in cluster.finished, 5)
        cluster.run()

    def test_one_that_lost_a_large_worker_idles_no_small_one(self, make_cluster: MakeCluster) -> None:
        cluster = make_cluster(max_steps_in_flight=1, watermark=0.0)
        cluster.join(1, num_blocks=8)
        cluster.join(2, num_blocks=32)
        cluster.join(3, num_blocks=32)
        for name in ("first", "second"):
            cluster.submit(make_request(name, 80, 20))
        cluster.step()
        cluster.leave(3)
        assert len(cluster.core.waiting) == 1
        cluster.submit(make_request("small", 8, 2))
        cluster.step()
        assert ids(cluster.core.replicas[1].running) == ["small"]
        cluster.run()

    def test_the_papers_policy_looks_at_the_head_alone(self, make_cluster: MakeCluster) -> None:
        cluster = two_sizes(make_cluster, policy=Policy.PAPER)
        cluster.submit(make_request("small", 8, 2))
        while "large" in ids(cluster.core.waiting):
            assert not cluster.core.replicas[1].running
            cluster.step()
        cluster.run()
