"""What frontends are told of the work that a scheduler holds, by which they choose among several."""

from octavo.scheduler.core.events import FrontendJoined, LeaseRenewed
from octavo.testing.cluster import FRONTEND, Cluster, make_request
from octavo.wire.requests import EXPECTED_ANSWER, Lease

from ..conftest import MakeCluster


def renew(cluster: Cluster, *names: str, frontend: int = FRONTEND) -> int:
    """The work told in the answer."""
    cluster.handle(LeaseRenewed(frontend, [Lease(name, 1) for name in names]))
    return cluster.core.status().work_tokens


def test_it_counts_what_waits_and_what_is_left_of_what_runs(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(max_num_seqs=1, max_steps_in_flight=1)
    cluster.join()
    assert renew(cluster) == 0
    cluster.submit(make_request("runs", 4, max_tokens=8), make_request("waits", 5, max_tokens=6))
    assert renew(cluster, "runs", "waits") == 4 + 8 + 5 + 6
    for _ in range(3):
        cluster.step()
    generated = cluster.groups["runs"].sequences[0].num_generated
    left = renew(cluster, "runs", "waits") - 11
    assert generated > 0
    assert 8 - generated <= left <= 8 - generated + 1


def test_the_prompt_of_several_sequences_counts_once(make_cluster: MakeCluster) -> None:
    cluster = make_cluster()
    cluster.join()
    cluster.submit(make_request("r", 4, max_tokens=8, num_sequences=3, temperature=1.0))
    assert renew(cluster, "r") == 4 + 3 * 8


def test_a_far_limit_counts_as_what_answers_usually_take(make_cluster: MakeCluster) -> None:
    cluster = make_cluster()
    cluster.submit(make_request("r", 4, max_tokens=EXPECTED_ANSWER * 4))
    assert renew(cluster, "r") == 4 + EXPECTED_ANSWER


def test_what_others_hold_counts_and_goes_with_them(make_cluster: MakeCluster) -> None:
    cluster = make_cluster()
    cluster.submit(make_request("r", 4, max_tokens=8))
    assert renew(cluster, "r") == 12
    cluster.handle(FrontendJoined(FRONTEND + 1))
    assert renew(cluster, frontend=FRONTEND + 1) == 12
    cluster.now += cluster.core.config.lease_s - 0.1
    renew(cluster, frontend=FRONTEND + 1)
    cluster.tick(0.2)
    assert renew(cluster, frontend=FRONTEND + 1) == 0
