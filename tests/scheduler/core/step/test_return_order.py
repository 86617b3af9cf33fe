"""All that lose their blocks come back in one order, that of their arrival, whatever became of their KV: swapped groups
and those that are recomputed, on one replica or several."""

import os
import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pytest

from octavo.scheduler.core.admission import has_capacity
from octavo.scheduler.core.config import Policy, Preemption
from octavo.scheduler.core.events import StepAnswered, WorkerCordoned, WorkerDrained, WorkerReadmitted
from octavo.scheduler.core.faults.poison import DEATHS_TO_SUSPECT, Death, Verdict
from octavo.scheduler.core.replica import Replica
from octavo.scheduler.core.sequence import RequestGroup, SequenceStatus
from octavo.scheduler.core.step.policies import empty_step
from octavo.scheduler.server.event_log import Record, replay
from octavo.testing.cluster import Cluster, make_request, reference_tokens
from octavo.testing.scenarios import step_until
from octavo.wire.sampling import BeamSearch, EarlyStopping

from ...conftest import MakeCluster

_SEEDS = 4 * int(os.environ.get("OCTAVO_TEST_LONG", "1"))


@dataclass
class Order:
    """Watches a cluster's planning: what comes back, in which way, and before whom."""

    cluster: Cluster
    came_back: Counter[SequenceStatus] = field(default_factory=Counter)
    inversions: list[str] = field(default_factory=list)

    def schedule(self) -> None:
        """Plans once."""
        core = self.cluster.core
        swapped = {replica: list(replica.swapped) for replica in core.replicas.values()}
        waiting = [group for group in core.waiting if group.cached_prompt_tokens is not None]
        claims = {
            replica: [*there, *(group for group in waiting if may_come(self.cluster, replica, group))]
            for replica, there in swapped.items()
        }
        was = {group: group.status for groups in claims.values() for group in groups}
        preemptions = {group: group.preemptions for group in was}
        self.cluster.schedule()
        for replica, groups in claims.items():
            back = [group for group in groups if group in replica.running]
            self.came_back.update(was[group] for group in back)
            # One that has come back may have been the one to go at once.
            left = [g for g in groups if g.status is not SequenceStatus.RUNNING and g.preemptions == preemptions[g]]
            self.inversions += [
                f"{group.request_id} before {other.request_id}"
                for group in back
                for other in left
                if other.order < group.order
            ]


def may_come(cluster: Cluster, replica: Replica, group: RequestGroup) -> bool:
    """Whether the replica would take a waiting group, now or once it has room."""
    is_suspect = group in cluster.core.request_table.suspects
    return not is_suspect and cluster.core.replica_table.takes(replica, group) and has_capacity(group.request, replica)


SETTINGS: list[dict[str, Any]] = [
    {"policy": policy, "preemption": preemption, "max_steps_in_flight": in_flight}
    for policy in Policy
    for preemption in (Preemption.AUTO, Preemption.SWAP)
    for in_flight in (1, 2)
]


def crowded(make_cluster: MakeCluster, settings: dict[str, Any], rng: random.Random, record: list[Record]) -> Cluster:
    """One or two replicas with too few blocks, and CPU memory for one or two of their groups."""
    cluster = make_cluster(record=record.append, max_num_batched_tokens=24, watermark=0.0, **settings)
    for incarnation in range(1, rng.randint(1, 2) + 1):
        num_blocks, num_cpu_blocks = rng.randint(16, 28), rng.randint(3, 12)
        cluster.join(incarnation, num_blocks=num_blocks, block_size=2, num_cpu_blocks=num_cpu_blocks)
    return cluster


def some_request(rng: random.Random, name: str) -> Any:
    decoding: list[dict[str, Any]] = [
        {},
        {"num_sequences": rng.randint(2, 3), "temperature": 1.0},
        {"beam": BeamSearch(2, 1.0, EarlyStopping.OFF)},
    ]
    return make_request(
        name,
        rng.randint(2, 7),
        rng.choice([3, 6, 10]) if rng.random() < 0.7 else 3,
        shared=rng.choice([0, 2]),
        priority=rng.choice([0, 0, 0, 2]),
        tenant=rng.choice(["", "a"]),
        **rng.choices(decoding, [3, 2, 1])[0],
    )


def disturb(cluster: Cluster, rng: random.Random) -> None:
    """Sometimes a worker gets nothing new for a while, or is drained, or a step fails."""
    if not cluster.replicas or rng.random() > 0.08:
        return
    incarnation = rng.choice(sorted(cluster.replicas))
    worker_id = f"worker-{incarnation}"
    match rng.randrange(4):
        case 0:
            cluster.handle(WorkerCordoned(worker_id))
        case 1 if len(cluster.replicas) > 1:
            cluster.handle(WorkerDrained(worker_id, 0.05))
        case 2 if cluster.replicas[incarnation].plans:
            cluster.handle(StepAnswered(incarnation, cluster.replicas[incarnation].execute(fail=True)))
        case _:
            for each in list(cluster.replicas):
                cluster.handle(WorkerReadmitted(f"worker-{each}"))


def run(make_cluster: MakeCluster, settings: dict[str, Any], seed: int, record: list[Record]) -> tuple[Cluster, Order]:
    rng = random.Random(seed)
    cluster = crowded(make_cluster, {**settings, "max_failed_steps": 10**6}, rng, record)
    order = Order(cluster)
    for number in range(20):
        cluster.submit(some_request(rng, f"r{number}"))
        if rng.random() < 0.5:
            cluster.now += 0.003
    for _ in range(2000):
        if not cluster.groups:
            return cluster, order
        disturb(cluster, rng)
        for _ in range(cluster.core.config.max_steps_in_flight):
            order.schedule()
        cluster.now += 0.01
        for incarnation, replica in list(cluster.replicas.items()):
            if replica.plans:
                cluster.handle(StepAnswered(incarnation, replica.execute()))
        if not cluster.replicas:
            cluster.join(9, num_blocks=30, block_size=2, num_cpu_blocks=6)
    raise AssertionError(f"{sorted(cluster.groups)} never end")


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_nobody_comes_back_before_an_older_one(make_cluster: MakeCluster, settings: dict[str, Any]) -> None:
    inversions: list[str] = []
    came_back: Counter[SequenceStatus] = Counter()
    for seed in range(_SEEDS):
        record: list[Record] = []
        _, order = run(make_cluster, settings, seed, record)
        inversions += [f"seed {seed}: {each}" for each in order.inversions]
        came_back += order.came_back
        assert replay(iter(record)).difference is None
    assert inversions == []
    # Both ways were taken, and met.
    assert min(came_back[SequenceStatus.WAITING], came_back[SequenceStatus.SWAPPED]) > _SEEDS, came_back


@pytest.mark.parametrize("policy", list(Policy))
def test_an_older_group_that_is_recomputed_comes_before_younger_ones_that_were_swapped(
    make_cluster: MakeCluster, policy: Policy
) -> None:
    """CPU memory is full when the second of three must go too."""
    cluster = make_cluster(policy=policy, preemption=Preemption.SWAP, watermark=0.0, max_steps_in_flight=1)
    cluster.join(num_blocks=20, block_size=2, num_cpu_blocks=9)
    requests = [make_request("old", 4, 34), make_request("middle", 8, 20), make_request("young", 8, 20)]
    cluster.submit(*requests)
    replica, middle, young = cluster.core.replicas[1], cluster.groups["middle"], cluster.groups["young"]
    step_until(cluster, lambda: middle.status is SequenceStatus.WAITING and middle.preemptions > 0)
    assert replica.swapped == [young]
    step_until(cluster, lambda: middle.status is SequenceStatus.RUNNING)
    assert replica.swapped == [young]
    cluster.run()
    assert cluster.tokens == {each.request_id: reference_tokens(each) for each in requests}


def test_an_older_group_that_fits_only_another_worker_holds_nobody_back(make_cluster: MakeCluster) -> None:
    """`large` has lost its blocks on worker 2, which alone could hold it, and is full for long."""
    cluster = make_cluster(preemption=Preemption.AUTO, watermark=0.0, max_steps_in_flight=1)
    cluster.join(2, num_blocks=40, block_size=2)
    cluster.submit(make_request("first", 30, 40), make_request("large", 10, 66))
    cluster.step()
    large = cluster.groups["large"]
    step_until(cluster, lambda: large.preemptions > 0)
    cluster.join(1, num_blocks=16, block_size=2, num_cpu_blocks=16)
    small = cluster.core.replicas[1]
    builder = empty_step(cluster.core.state, small)
    assert has_capacity(large.request, cluster.core.replicas[2])
    assert not has_capacity(large.request, small)
    assert builder.returning is None
    assert list(cluster.core.replica_table.returning(small)) == []
    assert list(cluster.core.replica_table.returning(cluster.core.replicas[2])) == [large]
    cluster.run()


def test_a_suspect_has_its_place_in_the_order_only_where_it_is_isolated(make_cluster: MakeCluster) -> None:
    cluster = make_cluster()
    cluster.join(1)
    cluster.submit(make_request("suspect", 4, 20), make_request("innocent", 4, 20))
    cluster.step()
    suspect, replica_table, suspects = (
        cluster.groups["suspect"],
        cluster.core.replica_table,
        cluster.core.request_table.suspects,
    )
    steps = list(cluster.core.replicas[1].outstanding)
    cluster.leave(1)
    cluster.join(2)
    other = cluster.core.replicas[2]
    assert next(replica_table.returning(other)) is suspect
    for process in range(DEATHS_TO_SUSPECT):
        suspects.died(steps, Death(f"w{process}", process, 0.0, "signal SIGSEGV", Verdict.CRASHED))
    assert list(replica_table.returning(other)) == []
    other.suspect = suspect
    assert list(replica_table.returning(other)) == [suspect]
