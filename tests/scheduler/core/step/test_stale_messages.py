"""What comes late, or twice, and what a replica that was lost leaves behind."""

import msgspec
import pytest

from octavo.scheduler.core.events import PrefixPinned, ReplicaJoined, SendToReplica, StepAnswered
from octavo.testing.cluster import make_request, reference_tokens
from octavo.testing.scenarios import answer
from octavo.wire.requests import Prefix
from octavo.wire.steps import WorkerWelcome

from ...conftest import MakeCluster


def test_an_incarnation_that_was_lost_is_not_registered_again(make_cluster: MakeCluster) -> None:
    """It may hold plans, whose results would be taken for those of new ones."""
    cluster = make_cluster()
    replica = cluster.join(1)
    cluster.leave(1)
    effects = cluster.core.handle(ReplicaJoined(replica.hello), cluster.now)
    assert effects == [SendToReplica(1, WorkerWelcome(cluster.core.epoch))]
    assert not cluster.core.replicas
    anew = msgspec.structs.replace(replica.hello, incarnation=2)
    cluster.core.handle(ReplicaJoined(anew), cluster.now)
    assert set(cluster.core.replicas) == {2}


@pytest.mark.parametrize("off_by", [-1, 1])
def test_the_right_tokens_under_another_steps_number_are_not_taken(make_cluster: MakeCluster, off_by: int) -> None:
    """A replica that loses count cannot be relied on: what it had is computed elsewhere."""
    cluster = make_cluster()
    replica = cluster.join(1)
    request = make_request("r", 3, max_tokens=5)
    cluster.submit(request)
    cluster.step()
    heard = list(cluster.tokens["r"])
    result = replica.execute()
    cluster.handle(StepAnswered(1, msgspec.structs.replace(result, step_id=result.step_id + off_by)))
    assert not cluster.core.replicas
    assert cluster.tokens["r"] == heard
    cluster.join(2)
    cluster.run()
    assert cluster.tokens["r"] == reference_tokens(request)


def test_what_comes_from_another_replica_waits_for_no_step_of_that_one(make_cluster: MakeCluster) -> None:
    """Steps are counted by replica: its blocks must not be parked for a step that is far off here."""
    cluster = make_cluster(max_num_batched_tokens=4, prefix_caching=False)
    cluster.join(1)
    cluster.submit(make_request("r", 3, max_tokens=30, num_sequences=2, temperature=1.0))
    for _ in range(10):
        cluster.step()
    cluster.leave(1)
    cluster.join(2)
    cluster.schedule()
    # One of the two sequences has blocks, but no part in the step.
    assert len(cluster.replicas[2].plans[0].work) == 1
    cluster.abort("r")
    answer(cluster, 2)
    assert cluster.core.replicas[2].kv.num_free == 64


def test_a_prefix_is_charged_to_nobody(make_cluster: MakeCluster) -> None:
    cluster = make_cluster()
    for request_id in ("acme", "zenith"):
        cluster.submit(make_request(request_id, 3, max_tokens=5, tenant=request_id))
    cluster.handle(PrefixPinned(Prefix("p", [1, 2, 3])))
    cluster.join()
    cluster.run()
    assert not cluster.core.waiting.tenants
