"""Cancelled in whatever state, by whatever means: nothing is held once outstanding steps are answered, and others do
not notice."""

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from octavo.scheduler.core.config import Preemption
from octavo.scheduler.core.events import LeaseRenewed, SequenceEnded
from octavo.scheduler.core.sequence import SequenceGroup, SequenceStatus
from octavo.scheduler.core.step.beam_search import BeamSearchState
from octavo.testing.cluster import FRONTEND, Cluster, make_request
from octavo.testing.scenarios import answer, beams, drain, outputs, plan_until, references, step_until
from octavo.wire.requests import GeneratedSequence, Lease, Request

from .conftest import MakeCluster
from .views import kv_of

LEASE_S = 5.0
PATIENT: dict[str, Any] = {"lease_s": LEASE_S, **dict.fromkeys(("idle_timeout_s", "step_timeout_s"), 1e9)}
OTHER = make_request("other", 4, max_tokens=40)


# -- states ---------------------------------------------------------------------------------------------------------
# Each brings the request `r`, beside `other`, to where its name says, and asserts that it is there.


def cluster_with(make_cluster: MakeCluster, request: Request, **config: Any) -> Cluster:
    """`other` decodes and `request` has just been submitted; a step has room for 4 of its tokens."""
    defaults: dict[str, Any] = {"max_num_batched_tokens": 5, "max_steps_in_flight": 1, "first_step_timeout_s": 1e9}
    cluster = make_cluster(**{**PATIENT, **defaults, **config})
    cluster.join(num_blocks=64, num_cpu_blocks=16)
    cluster.submit(OTHER)
    cluster.step()
    drain(cluster)
    cluster.submit(request)
    return cluster


def crowded(make_cluster: MakeCluster, **config: Any) -> Cluster:
    """`r` is going to lose its blocks to `other`."""
    cluster = make_cluster(
        **{**PATIENT, "first_step_timeout_s": 1e9, "watermark": 0.0, "preemption": Preemption.SWAP, **config}
    )
    cluster.join(num_blocks=14, block_size=2, num_cpu_blocks=14)
    cluster.submit(make_request("other", 8, max_tokens=14))
    cluster.now += 0.001
    cluster.submit(make_request("r", 5, max_tokens=9, num_sequences=2, temperature=1.0))
    return cluster


def steps(cluster: Cluster, count: int) -> Cluster:
    for _ in range(count):
        cluster.step()
    return cluster


def of(cluster: Cluster) -> SequenceGroup:
    return cluster.groups["r"]


def search_of(cluster: Cluster) -> BeamSearchState:
    search = of(cluster).search
    assert search is not None
    return search


def outstanding_with_r(cluster: Cluster) -> int:
    return sum(of(cluster) in step.groups for step in cluster.core.replicas[1].outstanding)


def waiting(make_cluster: MakeCluster) -> Cluster:
    cluster = cluster_with(make_cluster, make_request("r", 4, 9), max_num_seqs=1)
    steps(cluster, 2)
    assert of(cluster).status is SequenceStatus.WAITING
    assert not of(cluster).preemptions
    return cluster


def first_chunk_outstanding(make_cluster: MakeCluster) -> Cluster:
    cluster = cluster_with(make_cluster, make_request("r", 20, 9))
    cluster.schedule()
    assert outstanding_with_r(cluster) == 1
    assert of(cluster).sequences[0].placement.num_computed == 4
    return cluster


def after_two_chunks_of_five(make_cluster: MakeCluster) -> Cluster:
    cluster = steps(cluster_with(make_cluster, make_request("r", 20, 9)), 2)
    assert outstanding_with_r(cluster) == 0
    assert of(cluster).sequences[0].placement.num_computed == 8
    return cluster


def decoding(make_cluster: MakeCluster) -> Cluster:
    cluster = steps(cluster_with(make_cluster, make_request("r", 4, 9)), 3)
    assert outstanding_with_r(cluster) == 0
    assert of(cluster).sequences[0].is_decoding
    return cluster


def in_one_outstanding_step(make_cluster: MakeCluster) -> Cluster:
    cluster = decoding(make_cluster)
    cluster.schedule()
    assert outstanding_with_r(cluster) == 1
    return cluster


def in_two_outstanding_steps(make_cluster: MakeCluster) -> Cluster:
    cluster = steps(cluster_with(make_cluster, make_request("r", 4, 9), max_steps_in_flight=2), 3)
    cluster.schedule()
    assert outstanding_with_r(cluster) == 2
    return cluster


def ends_with_the_outstanding_step(make_cluster: MakeCluster) -> Cluster:
    cluster = steps(cluster_with(make_cluster, make_request("r", 4, 3)), 2)
    cluster.schedule()
    assert of(cluster).may_compute(of(cluster).sequences[0]) == 0
    return cluster


def follower_not_forked_yet(make_cluster: MakeCluster) -> Cluster:
    request = make_request("r", 20, 9, num_sequences=3, temperature=1.0)
    cluster = steps(cluster_with(make_cluster, request), 2)
    assert [sequence.placement.leader is None for sequence in of(cluster).sequences] == [True, False, False]
    return cluster


def followers_being_forked(make_cluster: MakeCluster) -> Cluster:
    cluster = cluster_with(make_cluster, make_request("r", 4, 9, num_sequences=3, temperature=1.0))
    cluster.schedule()
    assert [sequence.placement.num_in_flight for sequence in of(cluster).sequences] == [1, 1, 1]
    return cluster


def forked(make_cluster: MakeCluster) -> Cluster:
    request = make_request("r", 6, 9, num_sequences=3, temperature=1.0)
    cluster = steps(cluster_with(make_cluster, request, max_num_batched_tokens=8), 3)
    tables = [cluster.core.replicas[1].kv.block_table(sequence)[0] for sequence in of(cluster).sequences]
    assert len({table[0] for table in tables}) == 1
    assert len({table[1] for table in tables}) == 3
    return cluster


def one_of_three_ended(make_cluster: MakeCluster) -> Cluster:
    cluster = forked(make_cluster)
    cluster.handle(SequenceEnded(FRONTEND, "r", 1, 1))
    cluster.schedule()
    assert len(of(cluster).live) == 2
    return cluster


def unequal_sequences_that_wait_for_one_another(make_cluster: MakeCluster) -> Cluster:
    request = make_request("r", 9, 9, num_sequences=3, temperature=1.0)
    tokens = references(request)["r"]
    known = [GeneratedSequence(tokens[index][: index + 1], finished=False) for index in range(3)]
    cluster = cluster_with(make_cluster, msgspec.structs.replace(request, resubmitted=True, generated=known))
    cluster.step()
    assert any(sequence.placement.waits_for for sequence in of(cluster).sequences)
    return cluster


def beams_between_steps(make_cluster: MakeCluster) -> Cluster:
    cluster = steps(cluster_with(make_cluster, make_request("r", 4, 12, beam=beams(3))), 4)
    assert len(of(cluster).live) == 3
    assert outstanding_with_r(cluster) == 0
    return cluster


def beams_in_flight(make_cluster: MakeCluster) -> Cluster:
    cluster = beams_between_steps(make_cluster)
    cluster.schedule()
    assert [beam.placement.num_in_flight for beam in of(cluster).live] == [1, 1, 1]
    return cluster


def beams_of_which_one_has_its_candidates(make_cluster: MakeCluster) -> Cluster:
    """A failed step made all start over; they do not come back in one step."""
    cluster = beams_between_steps(make_cluster)
    cluster.step(fail=True)
    step_until(cluster, lambda: bool(search_of(cluster).candidates))
    assert len(search_of(cluster).candidates) < len(of(cluster).live)
    return cluster


def swap_out_outstanding(make_cluster: MakeCluster) -> Cluster:
    cluster = crowded(make_cluster)
    plan_until(cluster, lambda plan: bool(plan.moves.swap_out))
    assert of(cluster) in cluster.core.replicas[1].outstanding[-1].swapped_out
    return cluster


def swapped(make_cluster: MakeCluster) -> Cluster:
    cluster = swap_out_outstanding(make_cluster)
    drain(cluster)
    assert of(cluster).status is SequenceStatus.SWAPPED
    assert not cluster.core.replicas[1].outstanding
    return cluster


def swap_in_outstanding(make_cluster: MakeCluster) -> Cluster:
    cluster = crowded(make_cluster)
    plan_until(cluster, lambda plan: bool(plan.moves.swap_in))
    assert outstanding_with_r(cluster) == 1
    return cluster


def swapped_with_one_sequence_ended(make_cluster: MakeCluster) -> Cluster:
    cluster = swapped(make_cluster)
    cluster.handle(SequenceEnded(FRONTEND, "r", 1, 0))
    assert len(of(cluster).live) == 1
    return cluster


def waiting_to_be_recomputed(make_cluster: MakeCluster) -> Cluster:
    cluster = crowded(make_cluster, preemption=Preemption.RECOMPUTE)
    step_until(cluster, lambda: of(cluster).preemptions > 0)
    assert of(cluster).status is SequenceStatus.WAITING
    return cluster


def beside_a_failed_step(make_cluster: MakeCluster) -> Cluster:
    """One step has failed, the next is to be skipped; `r` is in both."""
    cluster = in_two_outstanding_steps(make_cluster)
    answer(cluster, fail=True)
    assert cluster.core.replicas[1].restarts
    assert outstanding_with_r(cluster) == 1
    return cluster


def sharing_blocks_with_another(make_cluster: MakeCluster) -> Cluster:
    cluster = make_cluster(**PATIENT, first_step_timeout_s=1e9)
    cluster.join()
    cluster.submit(make_request("other", 18, 20, shared=17))
    cluster.step()
    cluster.submit(make_request("r", 19, 20, shared=17))
    steps(cluster, 2)
    kv = kv_of(cluster)
    shared = kv.block_table(of(cluster).sequences[0])[0][:4]
    assert [kv.ref_count(block) for block in shared] == [2] * 4
    assert outstanding_with_r(cluster) > 0
    return cluster


def whose_blocks_are_being_remapped(make_cluster: MakeCluster) -> Cluster:
    """It has generated what stands in another's prompt: from the next plan on it uses the other's blocks."""
    cluster = make_cluster(**PATIENT, first_step_timeout_s=1e9, max_steps_in_flight=1)
    cluster.join(block_size=2)
    request, other = make_request("r", 4, 12), make_request("other", 9, 12)
    longer = request.prompt_token_ids + references(request)["r"][0][:5]
    cluster.submit(msgspec.structs.replace(other, prompt_token_ids=longer), request)
    step_until(cluster, lambda: bool(cluster.core.replicas[1].next_plan.remaps))
    assert [owner for owner, _ in cluster.core.replicas[1].next_plan.remaps] == of(cluster).sequences
    return cluster


STATES: list[Callable[[MakeCluster], Cluster]] = [
    waiting,
    first_chunk_outstanding,
    after_two_chunks_of_five,
    decoding,
    in_one_outstanding_step,
    in_two_outstanding_steps,
    ends_with_the_outstanding_step,
    follower_not_forked_yet,
    followers_being_forked,
    forked,
    one_of_three_ended,
    unequal_sequences_that_wait_for_one_another,
    beams_between_steps,
    beams_in_flight,
    beams_of_which_one_has_its_candidates,
    swap_out_outstanding,
    swapped,
    swapped_with_one_sequence_ended,
    swap_in_outstanding,
    waiting_to_be_recomputed,
    beside_a_failed_step,
    sharing_blocks_with_another,
    whose_blocks_are_being_remapped,
]


# -- means ----------------------------------------------------------------------------------------------------------


def by_abort(cluster: Cluster) -> None:
    cluster.abort("r")


def by_a_lease_that_is_not_renewed(cluster: Cluster) -> None:
    cluster.handle(LeaseRenewed(FRONTEND, [Lease("other", 1)]))


def by_the_loss_of_its_frontend(cluster: Cluster) -> None:
    cluster.tick(LEASE_S + 0.1)
    assert cluster.core.num_frontends == 0


def by_a_higher_attempt(cluster: Cluster) -> None:
    cluster.submit(again(cluster))


def by_the_end_of_every_sequence(cluster: Cluster) -> None:
    for sequence in of(cluster).live:
        cluster.handle(SequenceEnded(FRONTEND, "r", 1, sequence.index))


def again(cluster: Cluster) -> Request:
    """`r` as its frontend would submit it again."""
    request = of(cluster).request
    known = [
        GeneratedSequence(list(cluster.streams.get(("r", index), [])), finished=("r", index) in cluster.ended)
        for index in range(0 if request.sampling.beam else request.sampling.num_sequences)
    ]
    return msgspec.structs.replace(request, attempt=2, resubmitted=True, generated=known)


MEANS: list[Callable[[Cluster], None]] = [
    by_abort,
    by_a_lease_that_is_not_renewed,
    by_the_loss_of_its_frontend,
    by_a_higher_attempt,
    by_the_end_of_every_sequence,
]


# -- tests ----------------------------------------------------------------------------------------------------------


def held_by_others(cluster: Cluster) -> set[int]:
    replica = cluster.core.replicas[1]
    sequences = [sequence for group in replica.running for sequence in group.holders]
    tables = [replica.kv.block_table(sequence) for sequence in sequences]
    return {block for table in tables for blocks in table for block in blocks}


# A stop string does not end a beam.
CASES = [
    pytest.param(reach, cancel, id=f"{reach.__name__}-{cancel.__name__}")
    for reach in STATES
    for cancel in MEANS
    if not (reach.__name__.startswith("beams") and cancel is by_the_end_of_every_sequence)
]


@pytest.mark.parametrize(("reach", "cancel"), CASES)
def test_holds_nothing_once_its_steps_are_answered(
    make_cluster: MakeCluster, reach: Callable[[MakeCluster], Cluster], cancel: Callable[[Cluster], None]
) -> None:
    cluster = reach(make_cluster)
    request, kv = of(cluster).request, cluster.core.replicas[1].kv
    cancel(cluster)
    replaced = cluster.groups.get("r")
    assert replaced is None or replaced.request.attempt == 2
    drain(cluster)
    assert kv.num_free + len(held_by_others(cluster)) == kv.num_blocks
    assert kv.num_cpu_free == kv.num_cpu_blocks
    others = [group.request for group in cluster.groups.values() if group.request_id == "other"]
    cluster.run(max_steps=300)
    assert outputs(cluster, *others) == references(*others)
    if replaced is not None and request.sampling.beam is None:
        assert outputs(cluster, request) == references(request)
    assert kv.num_free == kv.num_blocks


def test_what_arrives_for_a_cancelled_request_reaches_nobody(make_cluster: MakeCluster) -> None:
    cluster = in_two_outstanding_steps(make_cluster)
    before = list(cluster.tokens["r"])
    cluster.abort("r")
    cluster.run()
    assert cluster.tokens["r"] == before


def test_blocks_wait_for_the_last_step_that_may_write_to_them(make_cluster: MakeCluster) -> None:
    """They are not given to others meanwhile, however short blocks are."""
    cluster = in_two_outstanding_steps(make_cluster)
    kv = kv_of(cluster)
    own = set(kv.block_table(of(cluster).sequences[0])[0])
    cluster.abort("r")
    free = kv.num_free
    answer(cluster)
    assert kv.num_free == free
    assert {kv.ref_count(block) for block in own} == {1}
    answer(cluster)
    assert kv.num_free == free + len(own)


def test_an_unknown_request_is_ignored(make_cluster: MakeCluster) -> None:
    cluster = decoding(make_cluster)
    cluster.abort("never")
    cluster.handle(SequenceEnded(FRONTEND, "never", 1, 0))
    cluster.handle(SequenceEnded(FRONTEND, "r", 7, 0))
    cluster.run()
    assert set(cluster.finished) == {"other", "r"}
