"""Order within a tenant: priority before arrival, but a level of it is worth only so many seconds."""

from itertools import count
from typing import Any

import msgspec
import pytest

from octavo.scheduler.core.config import Policy, Preemption
from octavo.testing.cluster import Cluster, make_request
from octavo.testing.scenarios import admissions, ids, step_until
from octavo.wire.requests import Request

from ..conftest import MakeCluster

# Seconds that one request of the stream below has the only slot.
SERVICE_S = 0.05


def one_slot(make_cluster: MakeCluster, **config: Any) -> Cluster:
    """Requests run one by one, so that the order in which they start is the order of the queue."""
    cluster = make_cluster(max_num_seqs=1, max_steps_in_flight=1, **config)
    cluster.join(num_blocks=256)
    return cluster


def order_of(cluster: Cluster, *requests: Request) -> list[str]:
    cluster.submit(*requests)
    cluster.run()
    return admissions(cluster.replicas[1], *requests)


class TestOrder:
    def test_is_that_of_arrival_among_equals(self, make_cluster: MakeCluster) -> None:
        names = ["c", "a", "d", "b"]
        assert order_of(one_slot(make_cluster), *(make_request(name, 4, 2) for name in names)) == names

    def test_is_that_of_priority_first(self, make_cluster: MakeCluster) -> None:
        requests = [make_request(f"{priority}.{i}", 4, 2, priority=priority) for i in (0, 1) for priority in (0, -1, 2)]
        assert order_of(one_slot(make_cluster), *requests) == ["2.0", "2.1", "0.0", "0.1", "-1.0", "-1.1"]

    def test_ignores_priority_where_it_is_worth_nothing(self, make_cluster: MakeCluster) -> None:
        requests = [make_request(f"{priority}", 4, 2, priority=priority) for priority in (0, -5, 9)]
        assert order_of(one_slot(make_cluster, priority_ageing_s=0.0), *requests) == ["0", "-5", "9"]

    @pytest.mark.parametrize(("age_s", "first"), [(1.9, "urgent"), (2.1, "old")])
    def test_a_level_is_worth_as_much_as_having_come_earlier(
        self, make_cluster: MakeCluster, age_s: float, first: str
    ) -> None:
        """Two levels of a second each; the older request says itself how old it is, as after a restart."""
        cluster = one_slot(make_cluster, priority_ageing_s=1.0)
        old = msgspec.structs.replace(make_request("old", 4, 2), age_ms=int(age_s * 1000))
        assert order_of(cluster, make_request("urgent", 4, 2, priority=2), old)[0] == first

    def test_what_was_preempted_comes_back_before_a_higher_priority_that_never_ran(
        self, make_cluster: MakeCluster
    ) -> None:
        cluster = make_cluster(watermark=0.0, preemption=Preemption.RECOMPUTE, max_steps_in_flight=1)
        replica = cluster.join(num_blocks=14, block_size=2)
        requests = [make_request("old", 8, 12), make_request("late", 8, 12)]
        cluster.submit(*requests)
        step_until(cluster, lambda: ids(cluster.core.waiting) == ["late"])
        urgent = make_request("urgent", 8, 4, priority=50)
        cluster.submit(urgent)
        assert ids(cluster.core.waiting) == ["late", "urgent"]
        cluster.run()
        assert admissions(replica, *requests, urgent)[:3] == ["old", "late", "urgent"]

    def test_says_nothing_about_other_tenants(self, make_cluster: MakeCluster) -> None:
        """One tenant's priorities order its own requests; its share is what it is."""
        cluster = one_slot(make_cluster)
        loud = [make_request(f"loud{i}", 4, 2, tenant="loud", priority=100) for i in range(4)]
        quiet = [make_request(f"quiet{i}", 4, 2, tenant="quiet", priority=-100) for i in range(4)]
        order = order_of(cluster, *loud, *quiet)
        assert {name[:4] for name in order[:2]} == {"loud", "quie"}
        assert [name[:4] for name in order].count("loud") == 4
        assert sum(name.startswith("quiet") for name in order[:4]) == 2


class TestAgeing:
    """Under an endless stream of higher priorities, of which two are always waiting."""

    @staticmethod
    def wait(cluster: Cluster, lead: int, max_s: float = 30.0) -> float:
        """Seconds that a request waits for its first token."""
        names = count()
        cluster.submit(make_request("low", 4, 4))
        start = cluster.now
        while not cluster.tokens["low"]:
            while len(cluster.core.waiting) < 3:
                cluster.submit(make_request(f"high{next(names)}", 4, 5, priority=lead))
            cluster.step()
            assert cluster.now - start < max_s, "starved"
        return cluster.now - start

    @pytest.mark.parametrize("policy", list(Policy))
    @pytest.mark.parametrize(("lead", "ageing_s"), [(1, 0.5), (4, 0.5), (10, 0.1), (100, 0.02)])
    def test_a_request_waits_no_longer_than_its_lag_in_priority_is_worth(
        self, make_cluster: MakeCluster, lead: int, ageing_s: float, policy: Policy
    ) -> None:
        """And about so long: as those go first that came until then, and the one that runs."""
        cluster = one_slot(make_cluster, priority_ageing_s=ageing_s, policy=policy)
        waited = self.wait(cluster, lead)
        assert lead * ageing_s - 2 * SERVICE_S <= waited <= lead * ageing_s + 4 * SERVICE_S

    def test_the_wait_grows_in_proportion_to_the_lag(self, make_cluster: MakeCluster) -> None:
        waits = [self.wait(one_slot(make_cluster, priority_ageing_s=0.2), lead) for lead in (1, 2, 4, 8)]
        assert waits == sorted(waits)
        assert waits[3] - waits[2] == pytest.approx(4 * 0.2, abs=2 * SERVICE_S)

    @pytest.mark.parametrize("budget", [4, 64])
    @pytest.mark.parametrize("preemption", [Preemption.SWAP, Preemption.RECOMPUTE])
    @pytest.mark.parametrize("policy", list(Policy))
    def test_a_low_priority_is_not_preempted_for_ever(
        self, make_cluster: MakeCluster, policy: Policy, preemption: Preemption, budget: int
    ) -> None:
        """Blocks for two: beside a stream of higher priorities it must go whenever they grow, until it is old."""
        cluster = make_cluster(
            policy=policy, preemption=preemption, max_num_batched_tokens=budget, priority_ageing_s=0.1
        )
        cluster.join(num_blocks=12, block_size=2, num_cpu_blocks=12)
        low, names = make_request("low", 8, 12), count()
        cluster.submit(low)
        group = cluster.groups["low"]
        while cluster.groups.get("low"):
            while len(cluster.core.waiting) < 2:
                cluster.submit(make_request(f"high{next(names)}", 4, 8, priority=3))
            cluster.step()
            assert cluster.now < 1.5, "starved"
        assert group.preemptions > 0
