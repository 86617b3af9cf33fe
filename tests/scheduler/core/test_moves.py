"""Groups move between replicas with what is computed of them, and nothing of it is computed again; where anything goes
wrong, they go on where they were, or start over."""

from typing import Any

import pytest

from octavo.scheduler.core.events import WorkerDrained
from octavo.testing.cluster import Cluster, FakeReplica, make_request, reference_tokens
from octavo.testing.scenarios import plans
from octavo.wire.requests import Request
from octavo.wire.sampling import BeamSearch, EarlyStopping

from ..conftest import MakeCluster

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
    assert not moves._under_way
    assert not moves._pulls


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
    alone = make_cluster(watermark=0.0)
    join(alone, 1)
    alone.submit(wanted)
    alone.run()
    finish(cluster, wanted)
    assert cluster.outputs(wanted.request_id) == alone.outputs(wanted.request_id)


def tables(cluster: Cluster, name: str, incarnation: int) -> list[list[int]]:
    kv = cluster.core.replicas[incarnation].kv
    return [blocks for sequence in cluster.groups[name].holders for blocks in kv.block_table(sequence)]


def pulls(cluster: Cluster) -> list[Any]:
    return [
        message
        for replica in cluster.replicas.values()
        for message in replica.received
        if type(message).__name__ == "PullBlocks"
    ]
