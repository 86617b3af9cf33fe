"""PoisonDetector prove their innocence, or their guilt, alone; nobody else is ever failed for it."""

from typing import Any

import msgspec
import pytest

from octavo.scheduler.core.config import Policy, Preemption
from octavo.scheduler.core.events import (
    LeaseRenewed,
    LossCause,
    PrefixPinned,
    ReplicaHeard,
    ReplicaLeft,
    RequestQuarantined,
    WorkerCordoned,
    WorkerDrained,
    WorkerReadmitted,
)
from octavo.scheduler.core.faults.poison import STEPS_TO_CLEAR
from octavo.testing.cluster import FRONTEND, Cluster, ended, make_request, reference_tokens
from octavo.testing.poison import Poison, computed
from octavo.testing.scenarios import beams, ids, step_until
from octavo.wire.requests import Lease, Prefix, RejectReason, Request
from octavo.wire.steps import Ending

from ...conftest import MakeCluster

POISON = make_request("poison", 8, 20)


def innocents(count: int, **sampling: Any) -> list[Request]:
    return [make_request(f"innocent{i}", 6 + i % 5, 12 + i % 7, **sampling) for i in range(count)]


def kill(cluster: Cluster, incarnation: int, then: int | None = None) -> None:
    """A replica crashes, and its worker comes back as another."""
    cluster.schedule()
    process = cluster.replicas[incarnation].hello.process
    cluster.leave(incarnation, LossCause.UNREACHABLE)
    if then is not None:
        cluster.join(then, worker_id=f"worker-{incarnation}", predecessor=ended(process))


def planned(cluster: Cluster, incarnation: int) -> set[str]:
    """The requests in a replica's outstanding steps, once all is planned that can be."""
    cluster.schedule()
    return computed(cluster, incarnation)


def suspects(cluster: Cluster) -> list[str]:
    return ids(cluster.core.request_table.suspects)


@pytest.mark.parametrize("num_replicas", [1, 2, 4])
@pytest.mark.parametrize("config", [{}, {"policy": Policy.PAPER}, {"max_steps_in_flight": 1}], ids=str)
def test_poison_ends_three_workers_and_no_other_request(
    make_cluster: MakeCluster, num_replicas: int, config: dict[str, Any]
) -> None:
    cluster = make_cluster(**config)
    for incarnation in range(1, num_replicas + 1):
        cluster.join(incarnation, num_blocks=256)
    requests = innocents(16)
    cluster.submit(*requests[:8], POISON, *requests[8:])
    poison = Poison(cluster, "poison")
    poison.run()
    assert len(poison.deaths) <= 3
    assert poison.deaths[-1] == {"poison"}
    assert cluster.rejected.keys() == {"poison"}
    assert cluster.rejected["poison"].reason is RejectReason.QUARANTINED
    assert cluster.tokens == {"poison": []} | {each.request_id: reference_tokens(each) for each in requests}


def test_an_operator_learns_of_a_quarantine(make_cluster: MakeCluster) -> None:
    cluster = make_cluster()
    cluster.join(1)
    cluster.submit(POISON)
    kill(cluster, 1, then=2)
    kill(cluster, 2, then=3)
    cluster.schedule()
    effects = cluster.core.handle(ReplicaLeft(3, LossCause.OVERDUE, "step 1 has taken 9 s of 2 s"), cluster.now)
    [told] = [effect for effect in effects if isinstance(effect, RequestQuarantined)]
    assert told.request_id == "poison"
    assert "worker-1 (signal SIGSEGV), worker-1 (signal SIGSEGV), and then" in told.reason
    assert "worker-2 (step 1 has taken 9 s of 2 s), which computed nothing else" in told.reason


def test_the_same_payload_under_other_names_goes_with_it(make_cluster: MakeCluster) -> None:
    cluster = make_cluster()
    cluster.join(1, num_blocks=256)
    copies = [msgspec.structs.replace(POISON, request_id=f"poison{i}") for i in range(4)]
    cluster.submit(*innocents(3), *copies)
    poison = Poison(cluster, "poison0")
    poison.run()
    assert len(poison.deaths) == 3
    assert cluster.rejected.keys() == {each.request_id for each in copies}
    assert {each.reason for each in cluster.rejected.values()} == {RejectReason.QUARANTINED}


@pytest.mark.parametrize("decoding", [{"num_sequences": 3, "temperature": 1.0}, {"beam": beams(3)}], ids=["n", "beams"])
def test_groups_of_several_sequences_prove_themselves_too(make_cluster: MakeCluster, decoding: dict[str, Any]) -> None:
    cluster = make_cluster()
    cluster.join(1, num_blocks=256)
    cluster.submit(*innocents(3, **decoding), POISON)
    poison = Poison(cluster, "poison")
    poison.run()
    assert (len(poison.deaths), set(cluster.rejected)) == (3, {"poison"})


def two_suspects(make_cluster: MakeCluster, *others: Request, **config: Any) -> Cluster:
    """On replica 3, the only one, two suspects wait to run, and `others` that are none."""
    cluster = make_cluster(**config)
    cluster.join(1)
    cluster.submit(make_request("first", 8, 30), make_request("second", 8, 30))
    cluster.step()
    kill(cluster, 1, then=2)
    cluster.submit(*others)
    kill(cluster, 2, then=3)
    assert suspects(cluster) == ["first", "second"]
    return cluster


def test_suspects_run_one_by_one_with_one_step_in_flight(make_cluster: MakeCluster) -> None:
    cluster = two_suspects(make_cluster)
    seen: list[str] = []
    while suspects(cluster):
        cluster.schedule()
        replica = cluster.core.replicas[3]
        assert len(replica.outstanding) == 1
        assert len(computed(cluster, 3)) == 1
        seen += computed(cluster, 3)
        cluster.step()
    assert seen == ["first"] * STEPS_TO_CLEAR + ["second"] * STEPS_TO_CLEAR
    cluster.step()
    assert computed(cluster, 3) == {"first", "second"}
    assert len(cluster.core.replicas[3].outstanding) == 1
    cluster.run()
    assert cluster.tokens == {name: reference_tokens(make_request(name, 8, 30)) for name in ("first", "second")}


SUSPECT = make_request("suspect", 8, 30)


def suspect_beside(
    make_cluster: MakeCluster, *hosts: list[Request], num_blocks: int = 64, num_cpu_blocks: int = 0, **config: Any
) -> Cluster:
    """One suspect waits. Replicas from 3 on, of `num_blocks`, run what `hosts` says, over which nothing has died."""
    cluster = make_cluster(**config)
    cluster.join(1)
    cluster.submit(SUSPECT)
    kill(cluster, 1, then=2)
    cluster.step()
    cluster.handle(WorkerCordoned("worker-1"))
    for incarnation, requests in enumerate(hosts, 3):
        cluster.join(incarnation, num_blocks=num_blocks, num_cpu_blocks=num_cpu_blocks)
        cluster.submit(*requests)
        cluster.step()
        assert cluster.core.replicas[incarnation].requests == [cluster.groups[each.request_id] for each in requests]
        cluster.handle(WorkerCordoned(f"worker-{incarnation}"))
    for incarnation in range(3, 3 + len(hosts)):
        cluster.handle(WorkerReadmitted(f"worker-{incarnation}"))
    kill(cluster, 2)
    assert suspects(cluster) == ["suspect"]
    return cluster


def test_what_runs_already_stands_still_and_keeps_its_blocks(make_cluster: MakeCluster) -> None:
    cluster = suspect_beside(make_cluster, [other := make_request("other", 8, 60)])
    step_until(cluster, lambda: planned(cluster, 3) == {"suspect"}, 3)
    standing = list(cluster.tokens["other"])
    step_until(cluster, lambda: not suspects(cluster), STEPS_TO_CLEAR + 1)
    assert cluster.tokens["other"] == standing
    step_until(cluster, lambda: planned(cluster, 3) == {"suspect", "other"}, 2)
    assert cluster.groups["other"].preemptions == 0
    cluster.run()
    assert cluster.tokens == {request.request_id: reference_tokens(request) for request in (SUSPECT, other)}


def test_a_worker_that_dies_over_a_suspect_accuses_none_that_stood_still(make_cluster: MakeCluster) -> None:
    cluster = suspect_beside(make_cluster, [other := make_request("other", 8, 60)])
    step_until(cluster, lambda: planned(cluster, 3) == {"suspect"}, 3)
    kill(cluster, 3, then=4)
    assert cluster.rejected.keys() == {"suspect"}
    kill(cluster, 4, then=5)
    assert suspects(cluster) == []
    cluster.run()
    assert cluster.tokens["other"] == reference_tokens(other)


def test_a_suspect_waits_for_room_and_nobody_new_takes_it(make_cluster: MakeCluster) -> None:
    # One of 13 blocks of 4 is free: enough for the late one, and not for the suspect.
    first, second = make_request("first", 20, 4), make_request("second", 20, 8)
    cluster = suspect_beside(make_cluster, [first, second], num_blocks=13, watermark=0.0)
    cluster.submit(late := make_request("late", 3, 4))
    for _ in range(2):
        assert planned(cluster, 3) == {"first", "second"}
        cluster.step()
    assert ids(cluster.core.waiting) == ["suspect", "late"]
    cluster.run()
    assert list(cluster.finished).index("first") == 0
    assert cluster.tokens == {each.request_id: reference_tokens(each) for each in (SUSPECT, first, second, late)}


def test_others_are_admitted_to_other_replicas_meanwhile(make_cluster: MakeCluster) -> None:
    cluster = two_suspects(make_cluster)
    cluster.join(4)
    cluster.submit(*innocents(3))
    cluster.step()
    homes = {inc: ids(replica.running) for inc, replica in cluster.core.replicas.items()}
    assert sorted(homes.values()) == [["first"], ["innocent0", "innocent1", "innocent2"]]


@pytest.mark.parametrize(("lengths", "chosen"), [((8, 40), 3), ((40, 8), 4), ((40, 20, 30), 4)])
def test_the_replica_with_the_least_to_lose_is_chosen(
    make_cluster: MakeCluster, lengths: tuple[int, ...], chosen: int
) -> None:
    cluster = suspect_beside(make_cluster, *([make_request(f"r{length}", length, 60)] for length in lengths))
    step_until(cluster, lambda: planned(cluster, chosen) == {"suspect"}, 3)


def test_a_suspect_that_is_aborted_makes_room_for_the_next(make_cluster: MakeCluster) -> None:
    cluster = two_suspects(make_cluster)
    cluster.step()
    cluster.abort("first")
    step_until(cluster, lambda: ids(cluster.core.replicas[3].running) == ["second"], 3)


def test_a_suspect_that_finishes_makes_room_for_others(make_cluster: MakeCluster) -> None:
    cluster = make_cluster()
    cluster.join(1)
    cluster.submit(short := make_request("short", 8, 4))
    kill(cluster, 1, then=2)
    kill(cluster, 2, then=3)
    cluster.submit(other := make_request("other", 8, 4))
    cluster.run()
    assert cluster.tokens == {"short": reference_tokens(short), "other": reference_tokens(other)}


def test_a_replica_that_is_cordoned_gives_its_place_to_another(make_cluster: MakeCluster) -> None:
    cluster = two_suspects(make_cluster)
    cluster.schedule()
    cluster.abort("first")
    cluster.handle(WorkerCordoned("worker-2"))
    cluster.join(4)
    cluster.step()
    assert ids(cluster.core.replicas[4].running) == ["second"]


def test_a_suspect_moves_on_with_a_drain_and_is_alone_there_too(make_cluster: MakeCluster) -> None:
    cluster = suspect_beside(make_cluster, [], [make_request("other", 8, 60)])
    step_until(cluster, lambda: planned(cluster, 3) == {"suspect"}, 3)
    cluster.handle(WorkerDrained("worker-3", 0.0))
    cluster.step()
    assert set(cluster.core.replicas) == {4}
    step_until(cluster, lambda: planned(cluster, 4) == {"suspect"}, 3)
    cluster.run()
    assert cluster.tokens["suspect"] == reference_tokens(SUSPECT)
    assert cluster.rejected == {}


@pytest.mark.parametrize("priority", [0, 5], ids=["the other is swapped out", "the suspect starts over"])
def test_a_suspect_that_runs_out_of_blocks_stays_alone(make_cluster: MakeCluster, priority: int) -> None:
    # The other holds 11 blocks of 4; the suspect soon wants a fourth.
    other = make_request("other", 40, 14, priority=priority)
    cluster = suspect_beside(
        make_cluster, [other], num_blocks=14, num_cpu_blocks=14, preemption=Preemption.SWAP, watermark=0.0
    )
    replica = cluster.core.replicas[3]
    while suspects(cluster):
        assert not set(replica.swapped).intersection(cluster.core.request_table.suspects)
        cluster.step()
    assert cluster.core.preemptions == 1
    cluster.run()
    assert cluster.tokens == {each.request_id: reference_tokens(each) for each in (SUSPECT, other)}


def test_a_prefix_waits_until_a_suspect_is_cleared(make_cluster: MakeCluster) -> None:
    cluster = two_suspects(make_cluster)
    cluster.step()
    cluster.handle(PrefixPinned(Prefix("p", list(range(8)))))
    step_until(cluster, lambda: not suspects(cluster))
    cluster.run()
    assert cluster.core.replicas[3].kv.num_pinned == 2


@pytest.mark.parametrize("cause", [LossCause.UNREACHABLE, LossCause.OVERDUE, LossCause.RETURNED, LossCause.CONFUSED])
def test_every_death_accuses(make_cluster: MakeCluster, cause: LossCause) -> None:
    cluster = make_cluster()
    for incarnation in (1, 2):
        cluster.join(incarnation)
        if incarnation == 1:
            cluster.submit(POISON)
        cluster.schedule()
        cluster.leave(incarnation, cause)
    assert suspects(cluster) == ["poison"]


@pytest.mark.parametrize("is_noticed", [True, False], ids=["lost, then back", "back before it was missed"])
def test_a_connection_that_ends_again_and_again_accuses_nobody(make_cluster: MakeCluster, is_noticed: bool) -> None:
    cluster = make_cluster()
    cluster.join(1, process=1)
    cluster.submit(*innocents(3))
    for incarnation in range(1, 6):
        cluster.step()
        if is_noticed:
            kill(cluster, incarnation)
        cluster.join(incarnation + 1, worker_id="worker-1", process=1)
    assert suspects(cluster) == []
    cluster.run()
    assert cluster.tokens == {each.request_id: reference_tokens(each) for each in innocents(3)}


@pytest.mark.parametrize("cause", [LossCause.OVERDUE, LossCause.CONFUSED])
def test_a_process_that_has_hung_or_erred_is_no_witness(make_cluster: MakeCluster, cause: LossCause) -> None:
    cluster = make_cluster()
    cluster.join(1, process=1)
    cluster.submit(POISON)
    for incarnation in (1, 2):
        cluster.schedule()
        cluster.leave(incarnation, cause)
        cluster.join(incarnation + 1, worker_id="worker-1", process=1)
    assert suspects(cluster) == ["poison"]


@pytest.mark.parametrize("cause", [LossCause.GOODBYE, LossCause.BROKEN, LossCause.RECONNECTED])
def test_a_loss_that_is_no_death_accuses_nobody(make_cluster: MakeCluster, cause: LossCause) -> None:
    cluster = make_cluster()
    cluster.join(1)
    cluster.submit(POISON)
    for incarnation in (1, 2, 3, 4):
        cluster.schedule()
        cluster.leave(incarnation, cause)
        cluster.join(incarnation + 1)
    assert suspects(cluster) == []
    cluster.run()
    assert cluster.tokens["poison"] == reference_tokens(POISON)


def lose(cluster: Cluster, incarnation: int, ending: Ending | None, cause: LossCause = LossCause.UNREACHABLE) -> None:
    """A replica's connection ends; if it is known how its process did, the next of its name tells at once."""
    cluster.schedule()
    hello = cluster.replicas[incarnation].hello
    cluster.leave(incarnation, cause)
    if ending is not None:
        cluster.join(incarnation + 100, worker_id=hello.worker_id, predecessor=ended(hello.process, ending))


@pytest.mark.parametrize("ending", [Ending.KILLED, Ending.UNKNOWN])
@pytest.mark.parametrize("num_workers", [1, 2])
def test_a_long_prefill_that_loses_its_worker_thrice_to_kills_is_no_poison(
    make_cluster: MakeCluster, ending: Ending, num_workers: int
) -> None:
    cluster = make_cluster(max_num_batched_tokens=4)
    for incarnation in range(1, num_workers + 1):
        cluster.join(incarnation)
    cluster.submit(long := make_request("long", 100, 8))
    for _ in range(3):
        cluster.step()
        cluster.step()
        [home] = [each for each, replica in cluster.core.replicas.items() if replica.running]
        lose(cluster, home, ending)
        assert (suspects(cluster) == []) or ending is Ending.UNKNOWN
    cluster.run()
    assert cluster.rejected == {}
    assert cluster.tokens["long"] == reference_tokens(long)


def test_a_worker_that_does_not_end_in_time_and_is_killed_accuses_nobody(make_cluster: MakeCluster) -> None:
    cluster = make_cluster()
    cluster.join(1)
    cluster.submit(POISON)
    for incarnation in (1, 101, 201):
        cluster.schedule()
        cluster.handle(ReplicaHeard(incarnation, draining=True))
        lose(cluster, incarnation, Ending.UNKNOWN)
    assert suspects(cluster) == []


def thrice_lost(make_cluster: MakeCluster, **config: Any) -> Cluster:
    """The suspect was alone when the last of three workers was lost; that one's successor is not there yet."""
    cluster = make_cluster(**config)
    cluster.join(1)
    cluster.submit(POISON)
    for incarnation in (1, 101):
        lose(cluster, incarnation, Ending.CRASHED)
    cluster.join(2)
    cluster.step()
    assert ids(cluster.core.replicas[2].running) == ["poison"]
    lose(cluster, 2, None)
    cluster.join(3)
    return cluster


def renewed(cluster: Cluster, seconds: int) -> None:
    """Time passes, and nobody is silent."""
    for _ in range(seconds):
        cluster.now += 1.0
        cluster.handle(LeaseRenewed(FRONTEND, [Lease(each.request_id, 1) for each in cluster.core.groups]))
        for incarnation in cluster.core.replicas:
            cluster.handle(ReplicaHeard(incarnation))
        cluster.tick(0.0)
        cluster.schedule()


def test_a_suspect_ends_no_other_worker_before_it_is_known_how_the_last_died(make_cluster: MakeCluster) -> None:
    cluster = thrice_lost(make_cluster)
    cluster.submit(other := make_request("other", 6, 8))
    step_until(cluster, lambda: "other" in cluster.finished)
    assert cluster.tokens["other"] == reference_tokens(other)
    renewed(cluster, 59)
    assert ids(cluster.core.waiting) == ["poison"]
    cluster.join(4, worker_id="worker-2", predecessor=ended(2))
    assert cluster.rejected.keys() == {"poison"}


def test_a_suspect_goes_on_when_the_last_worker_was_killed(make_cluster: MakeCluster) -> None:
    cluster = thrice_lost(make_cluster)
    cluster.join(4, worker_id="worker-2", predecessor=ended(2, Ending.KILLED))
    cluster.run()
    assert cluster.tokens["poison"] == reference_tokens(POISON)


def test_a_suspect_goes_on_when_nobody_says_how_the_last_worker_died(make_cluster: MakeCluster) -> None:
    cluster = thrice_lost(make_cluster, death_grace_s=5.0)
    renewed(cluster, 4)
    assert ids(cluster.core.waiting) == ["poison"]
    renewed(cluster, 3)
    cluster.run()
    assert cluster.tokens["poison"] == reference_tokens(POISON)


def test_a_suspect_goes_where_no_worker_has_died_over_it(make_cluster: MakeCluster) -> None:
    cluster = make_cluster()
    cluster.join(1)
    cluster.submit(POISON)
    for incarnation in (1, 101):
        lose(cluster, incarnation, Ending.CRASHED)
    cluster.join(2)
    cluster.handle(WorkerCordoned("worker-1"))
    cluster.submit(make_request("other", 8, 60))
    cluster.step()
    cluster.handle(WorkerReadmitted("worker-1"))
    # Worker 1 has nothing to lose, and dying once more would prove little.
    step_until(cluster, lambda: planned(cluster, 2) == {"poison"}, 3)
    lose(cluster, 2, Ending.CRASHED)
    assert cluster.rejected.keys() == {"poison"}


def test_deaths_far_apart_make_no_suspect(make_cluster: MakeCluster) -> None:
    cluster = make_cluster()
    cluster.join(1)
    cluster.submit(long := make_request("long", 8, 100))
    for incarnation in range(1, 6):
        for _ in range(STEPS_TO_CLEAR + 1):
            cluster.step()
        kill(cluster, incarnation, then=incarnation + 1)
        assert suspects(cluster) == []
    cluster.run()
    assert cluster.tokens["long"] == reference_tokens(long)
