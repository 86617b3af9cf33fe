"""Groups that lose their blocks while one sequence still waits for the prefill of another, whose blocks it shares."""

import pytest

from octavo.scheduler.core.config import Preemption
from octavo.scheduler.core.sequence import SequenceStatus
from octavo.scheduler.core.step.builder import StepBuilder
from octavo.testing.cluster import Cluster, make_request, reference_tokens, resubmitted

from ...conftest import MakeCluster


def half_computed(make_cluster: MakeCluster) -> Cluster:
    """A prompt of 14 tokens, then one and two tokens that were generated before; 6 of the prompt are computed, of the
    first sequence, for both."""
    cluster = make_cluster(max_num_batched_tokens=6, max_steps_in_flight=1, preemption=Preemption.SWAP)
    cluster.join(num_blocks=40, block_size=2, num_cpu_blocks=40)
    request = make_request("r", 14, 6, num_sequences=2, temperature=1.0)
    known = [reference_tokens(request, index)[: index + 1] for index in range(2)]
    cluster.submit(resubmitted(request, *known))
    cluster.step()
    first, second = cluster.groups["r"].sequences
    assert first.placement.num_computed == 6
    assert not second.placement.is_ready
    assert second.placement.num_computed > 0
    return cluster


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_are_recomputed_until_none_waits(make_cluster: MakeCluster, steps: int) -> None:
    cluster = half_computed(make_cluster)
    group = cluster.groups["r"]
    for _ in range(steps):
        cluster.step()
    waits = not all(sequence.placement.is_ready for sequence in group.sequences)
    assert waits == (steps < 2)
    StepBuilder(cluster.core.replicas[1], 6).preempt(group)
    assert group.status is (SequenceStatus.WAITING if waits else SequenceStatus.SWAPPED)
