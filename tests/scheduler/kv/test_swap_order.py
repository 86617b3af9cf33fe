"""Groups that were swapped out come back in the order in which they had come, whoever went first."""

import pytest

from octavo.scheduler.core.config import Policy, Preemption
from octavo.testing.cluster import Cluster, make_request, reference_tokens

from ..conftest import MakeCluster


def swapped(cluster: Cluster) -> list[str]:
    return [group.request_id for group in cluster.core.replicas[1].swapped]


@pytest.mark.parametrize("policy", list(Policy))
def test_is_that_of_arrival(make_cluster: MakeCluster, policy: Policy) -> None:
    """An old request grows until both younger ones are out, the youngest first; once it ends there is room for one."""
    cluster = make_cluster(watermark=0.0, max_steps_in_flight=1, preemption=Preemption.SWAP, policy=policy)
    cluster.join(num_blocks=24, block_size=2, num_cpu_blocks=24)
    requests = [make_request("old", 4, 40), make_request("young", 12, 26), make_request("youngest", 12, 26)]
    cluster.submit(*requests)
    seen = [swapped(cluster)]
    while cluster.core.groups:
        cluster.step()
        if swapped(cluster) != seen[-1]:
            seen.append(swapped(cluster))
    assert seen == [[], ["youngest"], ["young", "youngest"], ["youngest"], []]
    assert [cluster.tokens[request.request_id] for request in requests] == list(map(reference_tokens, requests))
