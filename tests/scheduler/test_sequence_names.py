"""A sequence's name lasts for one stay on one replica: what it was called before may be another's name there."""

from octavo.scheduler.core.events import SequenceEnded
from octavo.testing.cluster import FRONTEND, make_request

from .conftest import MakeCluster


def test_prompt_logprobs_are_not_booked_to_one_that_had_the_name_on_another_replica(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(max_steps_in_flight=1, max_num_batched_tokens=16)
    cluster.join(1, num_blocks=8, block_size=4)
    cluster.submit(make_request("mover", 4, 8, num_sequences=2))
    cluster.step()
    cluster.join(2, num_blocks=64, block_size=4)
    long = make_request("long", 60, 2, prompt_logprobs=0)
    cluster.submit(make_request("first there", 40, 8), long)
    for _ in range(4):
        cluster.step()
    mover, chunked = cluster.groups["mover"].sequences, cluster.groups["long"].sequences
    # Of the mover's equal sequences the second follows the first for a prefill, and has no name of its own then.
    assert mover[1].placement.sequence_id == chunked[0].placement.sequence_id
    assert 0 < chunked[0].placement.num_computed < 60
    cluster.leave(1)
    cluster.run()
    (report,) = (delta.prompt_logprobs for delta in cluster.deltas["long", 0] if delta.prompt_logprobs)
    assert len(report) == 59


def test_one_that_has_ended_keeps_no_name_of_a_replica_that_its_group_has_left(make_cluster: MakeCluster) -> None:
    cluster = make_cluster()
    cluster.join(1)
    cluster.submit(make_request("r", 4, 8, num_sequences=2))
    cluster.step()
    sequences = cluster.groups["r"].sequences
    cluster.handle(SequenceEnded(FRONTEND, "r", 1, 0))
    assert [each.is_live for each in sequences] == [False, True]
    assert all(each.placement.sequence_id for each in sequences)
    cluster.leave(1)
    assert [each.placement.sequence_id for each in sequences] == [0, 0]
