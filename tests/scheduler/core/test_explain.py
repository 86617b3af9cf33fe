"""Why a request is where it is: the numbers are the core's own, and what they promise happens."""

import random
from typing import Any

import pytest

from octavo.scheduler.core.admission import Obstacle, ObstacleKind
from octavo.scheduler.core.config import Policy, Preemption
from octavo.scheduler.core.events import FrontendJoined, LossCause, RequestSubmitted, WorkerCordoned, WorkerReadmitted
from octavo.scheduler.core.explain import Explanation, explain
from octavo.scheduler.core.sequence import SequenceStatus
from octavo.scheduler.server.event_log import Planned, Record
from octavo.testing.cluster import FRONTEND, Cluster, make_request
from octavo.testing.scenarios import step_until
from octavo.wire.sampling import BeamSearch, EarlyStopping

from ..conftest import MakeCluster


def explained(cluster: Cluster, request_id: str) -> Explanation:
    [explanation] = explain(cluster.core.state, cluster.core.policy, request_id, cluster.now)
    return explanation


def obstacles(explanation: Explanation) -> dict[str, Obstacle]:
    """By worker id."""
    return {each.replica.hello.worker_id if each.replica else "": each.obstacle for each in explanation.obstacles}


def ahead(explanation: Explanation) -> list[str]:
    return [group.request_id for group in explanation.ahead]


def test_an_unknown_or_finished_request_has_no_explanation(make_cluster: MakeCluster) -> None:
    cluster = make_cluster()
    cluster.join()
    cluster.submit(make_request("r", 3, max_tokens=2))
    cluster.run()
    assert (
        explain(cluster.core.state, cluster.core.policy, "r", cluster.now)
        == explain(cluster.core.state, cluster.core.policy, "other", cluster.now)
        == []
    )


def test_a_running_request_is_in_the_steps_under_way(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(max_steps_in_flight=2)
    replica = cluster.join()
    cluster.submit(make_request("r", 3, max_tokens=9, num_sequences=2, temperature=1.0))
    cluster.schedule()
    cluster.schedule()
    explanation = explained(cluster, "r")
    assert explanation.replica is cluster.core.replicas[replica.hello.incarnation]
    assert explanation.step_ids == [1, 2]
    assert (explanation.queue_position, explanation.ahead, explanation.obstacles) == (0, [], [])


def test_one_that_joins_the_next_step_waits_for_nothing(make_cluster: MakeCluster) -> None:
    cluster = make_cluster()
    cluster.join()
    cluster.submit(make_request("r", 3, max_tokens=9))
    explanation = explained(cluster, "r")
    assert (explanation.queue_position, explanation.ahead, explanation.obstacles) == (1, [], [])


def test_without_a_worker_everything_waits_for_one(make_cluster: MakeCluster) -> None:
    cluster = make_cluster()
    cluster.submit(make_request("r", 3, max_tokens=9))
    assert obstacles(explained(cluster, "r")) == {"": Obstacle(ObstacleKind.NO_WORKER, 1, 0)}


@pytest.fixture
def with_suspects(make_cluster: MakeCluster) -> Cluster:
    """Worker 3 runs `other`, over which nothing has died, and is to isolate `first`, and then `second`."""
    cluster = make_cluster()
    cluster.join(3)
    cluster.submit(make_request("other", 8, 30))
    cluster.step()
    cluster.handle(WorkerCordoned("worker-3"))
    cluster.submit(make_request("first", 8, 30), make_request("second", 8, 30))
    for incarnation in (1, 2):
        cluster.join(incarnation)
        cluster.schedule()
        cluster.leave(incarnation, LossCause.UNREACHABLE)
    cluster.handle(WorkerReadmitted("worker-3"))
    return cluster


def test_suspects_are_told_to_wait_for_each_other(with_suspects: Cluster) -> None:
    step_until(with_suspects, lambda: explained(with_suspects, "first").replica is not None, 5)
    second = explained(with_suspects, "second")
    assert (second.queue_position, ahead(second)) == (1, [])
    assert obstacles(second) == {"": Obstacle(ObstacleKind.ISOLATION, 0, 1)}


def test_what_suspects_keep_from_running_is_told_so(with_suspects: Cluster) -> None:
    with_suspects.submit(make_request("late", 8, 30))
    step_until(with_suspects, lambda: explained(with_suspects, "first").replica is not None, 5)
    assert obstacles(explained(with_suspects, "late")) == {"worker-3": Obstacle(ObstacleKind.ISOLATION, 0, 2)}
    standing = explained(with_suspects, "other")
    assert (standing.queue_position, standing.step_ids) == (0, [])
    assert obstacles(standing) == {"worker-3": Obstacle(ObstacleKind.ISOLATION, 0, 2)}


def test_a_suspect_is_told_what_its_worker_lacks(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(watermark=0.0)
    cluster.join(3, num_blocks=12)
    cluster.submit(make_request("other", 40, 8))
    cluster.step()
    cluster.handle(WorkerCordoned("worker-3"))
    cluster.submit(make_request("suspect", 12, 8))
    for incarnation in (1, 2):
        cluster.join(incarnation)
        cluster.schedule()
        cluster.leave(incarnation, LossCause.UNREACHABLE)
    cluster.handle(WorkerReadmitted("worker-3"))
    cluster.schedule()
    assert obstacles(explained(cluster, "suspect")) == {"worker-3": Obstacle(ObstacleKind.KV_BLOCKS, 3, 1)}


def test_a_worker_that_gets_nothing_new_is_none_to_wait_for(make_cluster: MakeCluster) -> None:
    cluster = make_cluster()
    cluster.join(num_blocks=64)
    cluster.handle(WorkerCordoned("worker-1"))
    cluster.submit(make_request("r", 3, max_tokens=9))
    assert obstacles(explained(cluster, "r")) == {"": Obstacle(ObstacleKind.NO_WORKER, 1, 0)}
    cluster.join(2, num_blocks=64)
    assert obstacles(explained(cluster, "r")) == {}


def test_sequence_slots_are_counted_with_all_that_run_side_by_side(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(max_num_seqs=4, max_steps_in_flight=1)
    cluster.join()
    cluster.submit(make_request("r0", 3, max_tokens=9, num_sequences=3, temperature=1.0))
    cluster.submit(make_request("r1", 3, max_tokens=9, num_sequences=2, temperature=1.0))
    cluster.step()
    assert obstacles(explained(cluster, "r1")) == {"worker-1": Obstacle(ObstacleKind.SEQUENCE_SLOTS, 2, 1)}


def test_blocks_are_told_for_every_worker(make_cluster: MakeCluster) -> None:
    """Blocks of 4 tokens; r0 and r1 take 5 blocks each."""
    cluster = make_cluster(watermark=0.0, max_steps_in_flight=1)
    cluster.join(1, num_blocks=7)
    cluster.join(2, num_blocks=8)
    cluster.submit(*(make_request(f"r{i}", 18, max_tokens=2) for i in range(3)))
    cluster.step()
    found = obstacles(explained(cluster, "r2"))
    assert found == {
        "worker-1": Obstacle(ObstacleKind.KV_BLOCKS, 5, 2),
        "worker-2": Obstacle(ObstacleKind.KV_BLOCKS, 5, 3),
    }


def test_a_worker_with_room_is_enough(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(watermark=0.0, max_steps_in_flight=1)
    cluster.join(1, num_blocks=6)
    cluster.submit(make_request("r0", 18, max_tokens=2), make_request("r1", 18, max_tokens=2))
    cluster.step()
    assert obstacles(explained(cluster, "r1"))
    cluster.join(2, num_blocks=6)
    assert not obstacles(explained(cluster, "r1"))


def test_blocks_that_decodes_are_about_to_take_are_not_free(make_cluster: MakeCluster) -> None:
    """r0 fills its one block of 4 and takes another of the 3 free ones for its next token; r1 wants 3."""
    cluster = make_cluster(watermark=0.0, max_steps_in_flight=1)
    cluster.join(num_blocks=4)
    cluster.submit(make_request("r0", 3, max_tokens=9))
    cluster.step()
    cluster.step()
    cluster.submit(make_request("r1", 10, max_tokens=2))
    assert obstacles(explained(cluster, "r1")) == {"worker-1": Obstacle(ObstacleKind.KV_BLOCKS, 3, 2)}


def test_nothing_is_admitted_where_decodes_must_preempt(make_cluster: MakeCluster) -> None:
    """r0 and r1 have filled a block each and want another one; one is free."""
    cluster = make_cluster(watermark=0.0, max_steps_in_flight=1)
    cluster.join(num_blocks=3)
    cluster.submit(make_request("r0", 3, max_tokens=5), make_request("r1", 3, max_tokens=5))
    cluster.step()
    cluster.step()
    cluster.submit(make_request("r2", 1, max_tokens=1))
    assert obstacles(explained(cluster, "r2")) == {"worker-1": Obstacle(ObstacleKind.PREEMPTION, 2, 1)}


def test_what_its_worker_alone_could_hold_waits_for_capacity_and_is_ahead_of_nobody(make_cluster: MakeCluster) -> None:
    cluster = make_cluster()
    cluster.join(1, num_blocks=20)
    cluster.join(2, num_blocks=4)
    cluster.submit(make_request("large", 40, max_tokens=20))
    cluster.step()
    cluster.leave(1)
    cluster.submit(make_request("small", 3, max_tokens=2))
    assert obstacles(explained(cluster, "large")) == {"worker-2": Obstacle(ObstacleKind.CAPACITY, 15, 4)}
    assert ahead(explained(cluster, "small")) == []


def test_decodes_and_running_prefills_take_the_token_budget_first(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(max_num_batched_tokens=8, max_steps_in_flight=1)
    cluster.join()
    cluster.submit(make_request("r0", 3, max_tokens=9), make_request("r1", 40, max_tokens=9))
    cluster.step()
    cluster.submit(make_request("r2", 3, max_tokens=9))
    assert obstacles(explained(cluster, "r2")) == {"worker-1": Obstacle(ObstacleKind.TOKEN_BUDGET, 1, 0)}


def swap_out(cluster: Cluster) -> None:
    """Two groups of two sequences, of which blocks run out: the later one is swapped."""
    cluster.join(num_blocks=10, num_cpu_blocks=10)
    for name in ("r0", "r1"):
        cluster.submit(make_request(name, 6, max_tokens=14, num_sequences=2, temperature=1.0))
    while cluster.groups["r1"].status is not SequenceStatus.SWAPPED:
        cluster.step()


def test_a_swapped_request_waits_for_blocks_to_come_back_and_stay(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(watermark=0.0, max_steps_in_flight=1)
    swap_out(cluster)
    explanation = explained(cluster, "r1")
    kv = cluster.core.replicas[1].kv
    group = cluster.groups["r1"]
    spare = len(group.live)
    [found] = obstacles(explanation).values()
    assert found.kind is ObstacleKind.KV_BLOCKS
    assert found.needed >= kv.num_to_return(group) + spare > found.available == kv.num_free
    assert (explanation.queue_position, ahead(explanation)) == (1, [])


def test_new_requests_wait_for_those_swapped_out(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(watermark=0.0, max_steps_in_flight=1)
    swap_out(cluster)
    cluster.submit(make_request("new", 2, max_tokens=2))
    assert obstacles(explained(cluster, "new")) == {"worker-1": Obstacle(ObstacleKind.SWAPPED, 0, 1)}


def test_the_papers_policy_lets_prompts_gather(make_cluster: MakeCluster) -> None:
    """The prefill of r0 took 10 ms, so the head waits until 30 ms have passed."""
    cluster = make_cluster(policy=Policy.PAPER, delay_factor=3.0, max_steps_in_flight=1)
    cluster.join()
    cluster.submit(make_request("r0", 4, max_tokens=20))
    cluster.step()
    cluster.submit(make_request("r1", 4, max_tokens=2))
    cluster.step()
    assert obstacles(explained(cluster, "r1")) == {"worker-1": Obstacle(ObstacleKind.DELAY, 30, 10)}
    cluster.now += 0.03
    assert not obstacles(explained(cluster, "r1"))


def test_the_delay_is_over_at_its_very_end(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(policy=Policy.PAPER, delay_factor=3.0, max_steps_in_flight=1)
    cluster.join()
    cluster.submit(make_request("r0", 4, max_tokens=20))
    cluster.step()
    cluster.submit(make_request("r1", 4, max_tokens=2))
    group, replica = cluster.groups["r1"], cluster.core.replicas[1]
    cluster.now = group.arrival + 3.0 * replica.steps.prefill_latency
    assert cluster.now - group.arrival == 3.0 * replica.steps.prefill_latency
    assert obstacles(explained(cluster, "r1")) == {}
    cluster.schedule()
    assert group.status is SequenceStatus.RUNNING


def test_the_papers_policy_does_not_cut_a_prompt_to_fill_a_step(make_cluster: MakeCluster) -> None:
    """Of r0's 12 tokens 4 are left for a step of 8, too few beside r1's 6."""
    cluster = make_cluster(policy=Policy.PAPER, max_num_batched_tokens=8, max_steps_in_flight=1)
    cluster.join()
    cluster.submit(make_request("r0", 12, max_tokens=4))
    cluster.step()
    cluster.submit(make_request("r1", 6, max_tokens=4))
    assert obstacles(explained(cluster, "r1")) == {"worker-1": Obstacle(ObstacleKind.TOKEN_BUDGET, 6, 4)}


def test_those_ahead_are_named_in_the_order_of_the_queue(make_cluster: MakeCluster) -> None:
    cluster = make_cluster()
    cluster.submit(make_request("low", 3, max_tokens=2), make_request("high", 3, max_tokens=2, priority=2))
    cluster.submit(make_request("last", 3, max_tokens=2))
    assert ahead(explained(cluster, "last")) == ["high", "low"]
    assert explained(cluster, "last").queue_position == 3


def test_a_request_id_of_two_frontends_has_two_explanations(make_cluster: MakeCluster) -> None:
    cluster = make_cluster()
    cluster.handle(FrontendJoined(FRONTEND + 1))
    cluster.submit(make_request("r", 3, max_tokens=2))
    cluster.handle(RequestSubmitted(FRONTEND + 1, make_request("r", 3, max_tokens=2)))
    frontends = [each.group.frontend_id for each in explain(cluster.core.state, cluster.core.policy, "r", cluster.now)]
    assert frontends == [FRONTEND, FRONTEND + 1]


SETTINGS = [
    {"policy": Policy.CHUNKED},
    {"policy": Policy.CHUNKED, "preemption": Preemption.SWAP, "max_num_seqs": 5},
    {"policy": Policy.CHUNKED, "preemption": Preemption.RECOMPUTE, "max_num_batched_tokens": 9},
    {"policy": Policy.PAPER, "delay_factor": 1.5},
    {"policy": Policy.PAPER, "preemption": Preemption.SWAP, "max_num_batched_tokens": 9},
]


def busy_cluster(make_cluster: MakeCluster, settings: dict[str, Any], seed: int, record: list[Record]) -> Cluster:
    rng = random.Random(seed)
    cluster = make_cluster(record=record.append, **{"max_num_batched_tokens": 24, **settings, "max_steps_in_flight": 1})
    cluster.join(1, num_blocks=18, block_size=2, num_cpu_blocks=12)
    cluster.join(2, num_blocks=24, block_size=2, num_cpu_blocks=12)
    for i in range(24):
        kinds: list[dict[str, Any]] = [
            {},
            {"num_sequences": rng.randint(2, 3), "temperature": 1.0},
            {"beam": BeamSearch(2, 1.0, EarlyStopping.OFF)},
        ]
        cluster.submit(
            make_request(
                f"r{i}",
                rng.randint(2, 9),
                rng.randint(1, 5),
                shared=rng.choice([0, 2]),
                priority=rng.choice([0, 0, 3]),
                tenant=rng.choice(["", "a"]),
                **rng.choice(kinds),
            )
        )
    return cluster


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_an_explanation_holds_in_the_next_step(make_cluster: MakeCluster, settings: dict[str, Any]) -> None:
    """Nobody ahead and no obstacle: it joins. First in its queue and an obstacle everywhere: it does not."""
    joined, kept_out = 0, set()
    for seed in range(4):
        cluster = busy_cluster(make_cluster, settings, seed, [])
        while cluster.groups:
            explanations = [explained(cluster, name) for name in cluster.groups]
            first = [(each, each.group.preemptions) for each in explanations if each.queue_position == 1]
            cluster.schedule()
            for explanation, preemptions in first:
                kinds = {each.obstacle.kind for each in explanation.obstacles}
                group = explanation.group
                # It may be the one to go where a decode of the same step finds no block.
                joins = group.status is SequenceStatus.RUNNING or group.preemptions > preemptions
                assert joins == (not kinds), (group.request_id, obstacles(explanation))
                joined += joins
                kept_out |= kinds
            cluster.step()
    assert joined
    assert kept_out & {ObstacleKind.KV_BLOCKS, ObstacleKind.SEQUENCE_SLOTS}


def test_explaining_changes_nothing(make_cluster: MakeCluster) -> None:
    plans: list[list[Record]] = []
    for asks in (False, True):
        record: list[Record] = []
        cluster = busy_cluster(make_cluster, {"preemption": Preemption.SWAP}, 0, record)
        while cluster.groups:
            for name in cluster.groups if asks else ():
                explain(cluster.core.state, cluster.core.policy, name, cluster.now)
            cluster.step()
        plans.append([entry for entry in record if isinstance(entry, Planned)])
    assert plans[0] == plans[1]
