"""Groups move between replicas with what is computed of them, and nothing of it is computed again; where anything goes
wrong, they go on where they were, or start over."""

from typing import Any

import msgspec
import pytest

from octavo.scheduler.core.admission import ObstacleKind
from octavo.scheduler.core.config import Preemption
from octavo.scheduler.core.events import (
    CacheReset,
    LossCause,
    PrefixPinned,
    PullAnswered,
    ReplicaHeard,
    RequestsAborted,
    SequenceEnded,
    WorkerDrained,
    WorkerReadmitted,
)
from octavo.scheduler.core.explain import explain
from octavo.scheduler.core.workers import look_at_reads
from octavo.testing.cluster import FRONTEND, Cluster, FakeReplica, make_request, reference_tokens
from octavo.testing.scenarios import plans
from octavo.wire.requests import Prefix, Request
from octavo.wire.sampling import BeamSearch, EarlyStopping
from octavo.wire.steps import BlocksPulled, PullBlocks

from ...conftest import MakeCluster
from ...views import cached_tokens

PROMPT, TOKENS = 13, 12
BEAMS = BeamSearch(width=3, length_penalty=1.0, early_stopping=EarlyStopping.NEVER)


def request(name: str = "r", prompt: int = PROMPT, tokens: int = TOKENS, **sampling: Any) -> Request:
    return make_request(name, prompt, tokens, **sampling)


def two_replicas(make_cluster: MakeCluster, **worker: Any) -> Cluster:
    """A cluster of two workers that read each other's blocks; the second has nothing to do."""
    cluster = make_cluster(watermark=0.0)
    for incarnation in (1, 2):
        join(cluster, incarnation, **worker)
    return cluster


def join(cluster: Cluster, incarnation: int, **worker: Any) -> FakeReplica:
    sizes = {"num_blocks": 64, "block_size": 2, "num_cpu_blocks": 64, "is_read": True}
    return cluster.join(incarnation, **{**sizes, **worker})


def home(cluster: Cluster, name: str) -> int:
    """The replica where a request runs or is swapped out."""
    for incarnation, replica in cluster.core.replicas.items():
        if any(group.request_id == name for group in replica.requests):
            return incarnation
    raise AssertionError(f"{name} is nowhere")


def tables(cluster: Cluster, name: str, incarnation: int) -> list[list[int]]:
    kv = cluster.core.replicas[incarnation].kv
    return [blocks for sequence in cluster.groups[name].holders for blocks in kv.block_table(sequence)]


def pulls(cluster: Cluster) -> list[PullBlocks]:
    return [each for replica in cluster.replicas.values() for each in replica.received if isinstance(each, PullBlocks)]


def outputs_alone(make_cluster: MakeCluster, wanted: Request, **worker: Any) -> list[list[int]]:
    """What the request gets on one replica that nobody drains."""
    cluster = make_cluster(watermark=0.0)
    join(cluster, 1, **worker)
    cluster.submit(wanted)
    cluster.run()
    return cluster.outputs(wanted.request_id)


def under_way(make_cluster: MakeCluster, wanted: Request, steps: int = 4, **worker: Any) -> tuple[Cluster, int, int]:
    """A cluster in which a request is being copied to another replica; returns where from and where to."""
    cluster = two_replicas(make_cluster, **worker)
    source = run_at(cluster, wanted, steps=steps)
    cluster.pulls_answer = False
    drain(cluster, source)
    for _ in range(3):
        cluster.step()
    assert len(pulls(cluster)) == 1
    return cluster, source, 3 - source


def run_at(cluster: Cluster, *requests: Request, steps: int = 4) -> int:
    """Lets all run for some steps; returns where they do, all on one replica."""
    cluster.submit(*requests)
    for _ in range(steps):
        cluster.step()
    (incarnation,) = {home(cluster, each.request_id) for each in requests}
    return incarnation


def drain(cluster: Cluster, incarnation: int) -> None:
    cluster.handle(WorkerDrained(f"worker-{incarnation}", 0.0))


def computed(*replicas: FakeReplica) -> int:
    return sum(work.num_tokens for replica in replicas for plan in plans(replica) for work in plan.work)


def finish(cluster: Cluster, *requests: Request) -> None:
    """Runs to the end; the tokens are right and no block is held."""
    cluster.run()
    for _ in range(6):
        cluster.step()
    for each in requests:
        if each.sampling.beam is None:
            expected = [reference_tokens(each, index) for index in range(each.sampling.num_sequences)]
            assert cluster.outputs(each.request_id) == expected
    for replica in cluster.core.replicas.values():
        assert replica.kv.num_cpu_free == replica.kv.num_cpu_blocks
        assert replica.kv.num_free == replica.kv.num_blocks
        assert not replica.moving
    moves = cluster.core.state.moves
    assert not moves.under_way
    assert not moves.pulling
    assert not cluster.core.state.prefix_copies.under_way


def test_a_drained_worker_hands_its_requests_over_and_nothing_is_computed_again(make_cluster: MakeCluster) -> None:
    cluster = two_replicas(make_cluster)
    wanted = request()
    source = run_at(cluster, wanted)
    replicas = [*cluster.replicas.values()]
    drain(cluster, source)
    finish(cluster, wanted)
    assert source not in cluster.core.replicas
    # The last token is generated, not computed; and one more row may have been under way as the request ended.
    assert computed(*replicas) in (PROMPT + TOKENS - 1, PROMPT + TOKENS)
    assert cluster.groups == {}


@pytest.mark.parametrize(
    "sampling", [{"num_sequences": 3, "seed": 5, "temperature": 1.0}, {"beam": BEAMS}], ids=["n", "beams"]
)
def test_sequences_that_share_blocks_share_them_where_they_go(
    make_cluster: MakeCluster, sampling: dict[str, Any]
) -> None:
    cluster = two_replicas(make_cluster)
    wanted = request(**sampling)
    source = run_at(cluster, wanted, steps=6)
    held = {block for each in tables(cluster, wanted.request_id, source) for block in each}
    drain(cluster, source)
    while home(cluster, wanted.request_id) == source:
        cluster.step()
    (move,) = pulls(cluster)
    assert len(move.moves) <= len(held)
    cluster.run()
    finish(cluster)
    assert cluster.outputs(wanted.request_id) == outputs_alone(make_cluster, wanted)


@pytest.mark.parametrize("windows", [(4,), (0, 4)])
def test_blocks_that_windows_have_passed_are_not_missed(make_cluster: MakeCluster, windows: tuple[int, ...]) -> None:
    cluster = two_replicas(make_cluster, windows=windows)
    wanted = request(tokens=20)
    source = run_at(cluster, wanted, steps=6)
    replicas = [*cluster.replicas.values()]
    drain(cluster, source)
    cluster.run()
    finish(cluster)
    assert cluster.outputs("r") == outputs_alone(make_cluster, wanted, windows=windows)
    assert computed(*replicas) in (PROMPT + 19, PROMPT + 20)


def test_a_prompt_that_is_half_computed_goes_on_in_the_middle(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(watermark=0.0, max_num_batched_tokens=4)
    for incarnation in (1, 2):
        join(cluster, incarnation)
    wanted = request(prompt=30)
    source = run_at(cluster, wanted, steps=3)
    replicas = [*cluster.replicas.values()]
    drain(cluster, source)
    finish(cluster, wanted)
    assert computed(*replicas) in (30 + TOKENS - 1, 30 + TOKENS)


def test_the_others_of_a_drained_worker_go_on_while_some_are_copied(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(watermark=0.0)
    join(cluster, 1, num_blocks=400)
    wanted = [request(f"r{number}", tokens=40) for number in range(7)]
    run_at(cluster, *wanted)
    join(cluster, 2, num_blocks=400, num_cpu_blocks=400)
    cluster.pulls_answer = False
    drain(cluster, 1)
    before = {name: len(tokens) for name, tokens in cluster.tokens.items()}
    for _ in range(5):
        cluster.step()
    standing = [name for name, tokens in cluster.tokens.items() if len(tokens) < before[name] + 4]
    assert len(standing) == len(pulls(cluster)) == 4
    replicas = [*cluster.replicas.values()]
    cluster.pulls_answer = True
    finish(cluster, *wanted)
    assert computed(*replicas) <= 7 * (PROMPT + 40)


def test_a_request_that_is_aborted_while_it_is_copied_leaves_nothing(make_cluster: MakeCluster) -> None:
    cluster, _, target = under_way(make_cluster, request())
    cluster.handle(RequestsAborted(FRONTEND, ["r"]))
    assert cluster.core.replicas[target].kv.num_arriving
    cluster.pull(target)
    finish(cluster)


def test_a_request_that_is_aborted_is_not_taken_over_with_another(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(watermark=0.0)
    join(cluster, 1)
    wanted = request()
    run_at(cluster, request("other"), wanted)
    join(cluster, 2)
    cluster.pulls_answer = False
    drain(cluster, 1)
    for _ in range(3):
        cluster.step()
    cluster.handle(RequestsAborted(FRONTEND, ["other"]))
    cluster.pulls_answer = True
    finish(cluster, wanted)
    assert "other" not in cluster.finished


def test_on_what_its_blocks_were_built_elsewhere_is_forgotten(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(watermark=0.0)
    join(cluster, 1)
    wanted = [make_request(name, PROMPT, TOKENS, shared=8) for name in ("first", "second")]
    run_at(cluster, *wanted, steps=3)
    (sequence,) = cluster.groups["second"].live
    assert sequence.placement.builds_on
    join(cluster, 2)
    drain(cluster, 1)
    while home(cluster, "second") == 1:
        cluster.step()
    assert not sequence.placement.builds_on
    finish(cluster, *wanted)


def test_a_sequence_that_ends_while_it_is_copied_is_not_taken_in(make_cluster: MakeCluster) -> None:
    wanted = request(num_sequences=3, seed=5, temperature=1.0)
    cluster, _, target = under_way(make_cluster, wanted, steps=6)
    cluster.handle(SequenceEnded(FRONTEND, "r", 1, 1))
    cluster.pulls_answer = True
    cluster.run()
    finish(cluster)
    right = [reference_tokens(wanted, index) for index in range(3)]
    assert cluster.outputs("r")[::2] == right[::2]
    assert len(cluster.outputs("r")[1]) < len(right[1])
    assert target in cluster.core.replicas


def test_a_request_whose_worker_is_lost_while_it_is_copied_starts_over(make_cluster: MakeCluster) -> None:
    cluster, source, target = under_way(make_cluster, request())
    del cluster.replicas[source]
    cluster.replicas[source] = FakeReplica(cluster.replicas[target].runner, source)
    cluster.leave(source, LossCause.UNREACHABLE)
    cluster.pull(target)
    finish(cluster, request())


def test_a_request_goes_on_where_it_was_if_the_other_worker_is_lost(make_cluster: MakeCluster) -> None:
    cluster, source, target = under_way(make_cluster, request())
    replicas = [*cluster.replicas.values()]
    cluster.leave(target, LossCause.UNREACHABLE)
    for _ in range(2):
        cluster.step()
    assert home(cluster, "r") == source
    finish(cluster, request())
    assert computed(*replicas) in (PROMPT + TOKENS - 1, PROMPT + TOKENS)


def test_a_copy_that_fails_has_the_request_computed_again_elsewhere(make_cluster: MakeCluster) -> None:
    cluster, source, target = under_way(make_cluster, request())
    replicas = [*cluster.replicas.values()]
    pull = cluster.replicas[target].to_pull.popleft()
    cluster.handle(PullAnswered(target, BlocksPulled(pull.epoch, target, pull.pull_id, is_complete=False)))
    cluster.pulls_answer = True
    finish(cluster, request())
    assert source not in cluster.core.replicas
    assert len(pulls(cluster)) == 1
    assert computed(*replicas) > PROMPT + TOKENS


def test_nobody_waits_for_a_copy_that_takes_too_long_and_its_blocks_stay_taken(make_cluster: MakeCluster) -> None:
    cluster, source, target = under_way(make_cluster, request())
    for seconds in (0.0, 5.1):
        look_at_reads(cluster.core.state, cluster.now + seconds)
    for _ in range(4):
        cluster.handle(ReplicaHeard(target))
        cluster.step()
    assert source not in cluster.core.replicas
    arriving = cluster.core.replicas[target].kv.num_arriving
    assert arriving == len(pulls(cluster)[0].moves)
    cluster.run()
    assert cluster.core.replicas[target].kv.num_arriving == arriving
    cluster.pull(target)
    finish(cluster, request())


def test_a_drain_that_is_taken_back_lets_what_isunder_way_arrive(make_cluster: MakeCluster) -> None:
    cluster, source, target = under_way(make_cluster, request())
    cluster.handle(WorkerReadmitted(f"worker-{source}"))
    cluster.pulls_answer = True
    while home(cluster, "r") == source:
        cluster.step()
    assert home(cluster, "r") == target
    finish(cluster, request())


def test_a_reset_of_the_cache_counts_for_what_isunder_way(make_cluster: MakeCluster) -> None:
    wanted = request(prompt=14)
    cluster, _, _ = under_way(make_cluster, wanted)
    cluster.handle(CacheReset(None, None, 1))
    cluster.pulls_answer = True
    finish(cluster, wanted)
    again = msgspec.structs.replace(wanted, request_id="again")
    cluster.submit(again)
    finish(cluster, again)
    assert cached_tokens(cluster)["again"] == 0


@pytest.mark.parametrize("outcome", ["fail", "spoil"])
def test_a_step_that_fails_before_the_copy_begins_ends_the_move(make_cluster: MakeCluster, outcome: str) -> None:
    cluster = two_replicas(make_cluster)
    wanted = request()
    source = run_at(cluster, wanted)
    cluster.schedule()
    drain(cluster, source)
    assert not pulls(cluster)
    if outcome == "fail":
        cluster.answer(source, fail=True)
    else:
        cluster.answer(source, spoil="r")
    cluster.step()
    assert not pulls(cluster)
    finish(cluster, wanted)


def test_a_replica_that_answers_a_pull_it_was_not_asked_for_is_lost(make_cluster: MakeCluster) -> None:
    cluster = two_replicas(make_cluster)
    cluster.handle(PullAnswered(2, BlocksPulled(99, 2, 7, is_complete=True)))
    assert 2 not in cluster.core.replicas


@pytest.mark.parametrize("lack", ["cpu blocks", "alike", "server"])
def test_what_nobody_can_take_along_is_computed_again(make_cluster: MakeCluster, lack: str) -> None:
    cluster = make_cluster(watermark=0.0)
    join(cluster, 1, is_read=lack != "server")
    wanted = request()
    run_at(cluster, wanted)
    other = {"cpu blocks": {"num_cpu_blocks": 3}, "alike": {"block_size": 4}}
    join(cluster, 2, **other.get(lack, {}))
    replicas = [*cluster.replicas.values()]
    drain(cluster, 1)
    finish(cluster, wanted)
    assert not pulls(cluster)
    assert computed(*replicas) > PROMPT + TOKENS


def test_a_request_that_is_swapped_out_goes_on_where_there_is_room(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(watermark=0.0, preemption=Preemption.SWAP, max_steps_in_flight=1)
    join(cluster, 1, num_blocks=24)
    wanted = [request(name, tokens=30) for name in ("first", "second")]
    cluster.submit(*wanted)
    while not cluster.core.replicas[1].swapped:
        cluster.step()
    (swapped,) = cluster.core.replicas[1].swapped
    join(cluster, 2)
    replicas = [*cluster.replicas.values()]
    cluster.tick(0.1)
    cluster.step()
    (pull,) = pulls(cluster)
    assert pull.from_cpu
    cluster.step()
    assert home(cluster, swapped.request_id) == 2
    finish(cluster, *wanted)
    assert computed(*replicas) <= 2 * (PROMPT + 30)


def test_a_replica_that_joins_takes_over_until_neither_has_much_more_to_do(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(watermark=0.0)
    join(cluster, 1, num_blocks=800)
    wanted = [request(f"r{number}", tokens=100) for number in range(12)]
    run_at(cluster, *wanted)
    join(cluster, 2, num_blocks=800, num_cpu_blocks=800)
    replicas = [*cluster.replicas.values()]
    for _ in range(20):
        cluster.tick(0.05)
        cluster.step()
    counts = [len(replica.requests) for replica in cluster.core.replicas.values()]
    # One more would leave the first with three more than the second, which is not much.
    assert counts == [8, 4]
    finish(cluster, *wanted)
    assert computed(*replicas) <= 12 * (PROMPT + 100)


def test_what_will_soon_be_over_stays_where_it_is(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(watermark=0.0)
    join(cluster, 1, num_blocks=400)
    wanted = [request(f"r{number}", tokens=20) for number in range(12)]
    run_at(cluster, *wanted)
    join(cluster, 2, num_blocks=400)
    cluster.tick(0.1)
    finish(cluster, *wanted)
    assert not pulls(cluster)


def test_a_pinned_prefix_is_shared_no_more_but_moved_along(make_cluster: MakeCluster) -> None:
    cluster = two_replicas(make_cluster)
    cluster.handle(PrefixPinned(Prefix("p", list(range(7)))))
    for _ in range(4):
        cluster.step()
    wanted = make_request("r", PROMPT, TOKENS, shared=7)
    source = run_at(cluster, wanted)
    replicas = [*cluster.replicas.values()]
    before = computed(*replicas)
    drain(cluster, source)
    cluster.run()
    assert cluster.tokens["r"] == reference_tokens(wanted)
    assert computed(*replicas) - before <= TOKENS


def test_explain_says_that_a_request_is_being_copied(make_cluster: MakeCluster) -> None:
    cluster, source, target = under_way(make_cluster, request())
    (told,) = explain(cluster.core.state, cluster.core.policy, "r", cluster.now)
    (found,) = told.obstacles
    assert told.replica is cluster.core.replicas[source]
    assert found.replica is cluster.core.replicas[target]
    assert (found.obstacle.kind, found.obstacle.needed) == (ObstacleKind.MOVE, len(pulls(cluster)[0].moves))
    cluster.pulls_answer = True
    finish(cluster, request())
