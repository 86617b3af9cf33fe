"""What a plan has of a sequence that failed in the step before is skipped: nobody relies on what it was to compute."""

from typing import Any

import msgspec
import pytest

from octavo.scheduler.core.events import PrefixPinned, StepAnswered
from octavo.scheduler.core.sequence import PrefixGroup
from octavo.testing.cluster import VOCABULARY, Cluster, make_request, reference_tokens, resubmitted
from octavo.wire.requests import Prefix, RejectReason, Request
from octavo.wire.sampling import BeamSearch, EarlyStopping
from octavo.wire.steps import FailureReason, SequenceFailure
from octavo.worker.fake.runner import expected_tokens

from ...conftest import MakeCluster

BEAMS: dict[str, Any] = {"beam": BeamSearch(2, 1.0, EarlyStopping.OFF)}
SAMPLES: dict[str, Any] = {"num_sequences": 3, "temperature": 1.0}
WINDOWS = pytest.mark.parametrize("windows", [(0,), (4,), (0, 5)], ids=["all", "window", "both"])


def sharer(name: str, prompt_length: int = 14, shared: int = 12, **sampling: Any) -> Request:
    """One that begins as the long prompt does, of which the first three blocks are twelve tokens."""
    return make_request(name, prompt_length, 6, shared=shared, **sampling)


# One token of each is computed, and needs a mask: there is not time for all in one step.
MASKED = [sharer(f"masked-{i}", 13, grammar="900") for i in range(8)]


def begun(
    make_cluster: MakeCluster, *requests: Request, first: Request | None = None, windows: tuple[int, ...] = (0,)
) -> Cluster:
    """Eight tokens of the long prompt "x" are computed, or of `first`. A plan is under way with the other six, which
    fill a block, and with all of `requests`."""
    cluster = make_cluster(max_num_batched_tokens=16, max_steps_in_flight=2)
    cluster.join(block_size=4, windows=windows)
    # It takes half of the first step, and ends.
    cluster.submit(make_request("filler", 8, 1), first or make_request("x", 14, 4, shared=14))
    cluster.schedule()
    cluster.submit(*requests)
    cluster.schedule()
    assert len(cluster.core.replicas[1].outstanding) == 2
    assert all(cluster.groups[request.request_id].cached_prompt_tokens for request in requests)
    return cluster


def assert_served(cluster: Cluster, *requests: Request, windows: tuple[int, ...] = (0,)) -> None:
    cluster.run()
    window = 0 if 0 in windows else max(windows)
    for request in requests:
        for index in range(request.sampling.num_sequences):
            prompt, sampling = request.prompt_token_ids, request.sampling
            alone = expected_tokens(prompt, sampling, index, sampling.max_tokens, VOCABULARY, window)
            assert cluster.streams[request.request_id, index] == alone
    for replica in cluster.core.replicas.values():
        assert replica.kv.num_free + replica.kv.num_pinned == replica.kv.num_blocks


@WINDOWS
@pytest.mark.parametrize("decoding", [{}, SAMPLES], ids=["one", "three"])
def test_one_that_shares_a_block_of_a_skipped_chunk_gets_its_own_tokens(
    make_cluster: MakeCluster, windows: tuple[int, ...], decoding: dict[str, Any]
) -> None:
    cluster = begun(make_cluster, other := sharer("y", **decoding), windows=windows)
    cluster.answer(1, spoil_output="x")
    assert cluster.rejected["x"].reason is RejectReason.NOT_FINITE
    cluster.answer(1)
    assert not cluster.deltas["y", 0], "a token of what was never computed"
    assert_served(cluster, other, windows=windows)
    assert cluster.rejected.keys() == {"x"}
    assert cluster.groups == {}


def test_a_search_that_shares_such_a_block_finds_what_it_finds_alone(make_cluster: MakeCluster) -> None:
    alone = make_cluster()
    alone.join(block_size=4)
    alone.submit(sharer("y", **BEAMS))
    alone.run()
    cluster = begun(make_cluster, sharer("y", **BEAMS))
    cluster.answer(1, spoil_output="x")
    cluster.run()
    assert cluster.outputs("y") == alone.outputs("y")


@WINDOWS
@pytest.mark.parametrize("gone", ["nobody", "x", "y"])
def test_nor_does_one_that_shares_only_what_was_built_upon_it(
    make_cluster: MakeCluster, windows: tuple[int, ...], gone: str
) -> None:
    """Through windows it sees just the latter. Whoever is aborted meanwhile: the one that fails, or the one in
    between."""
    between, last = sharer("y", 17, 17), sharer("z", 18, 16)
    cluster = begun(make_cluster, between, last, windows=windows)
    assert [cluster.groups[name].cached_prompt_tokens for name in "yz"] == [12, 16]
    failing = {each.placement.sequence_id for each in cluster.groups["x"].live}
    if gone != "nobody":
        cluster.abort(gone)
    cluster.handle(StepAnswered(1, cluster.replicas[1].execute(spoil_output=failing)))
    cluster.answer(1)
    assert not cluster.deltas["y", 0]
    assert not cluster.deltas["z", 0]
    assert_served(cluster, *([last] if gone == "y" else [between, last]), windows=windows)
    assert cluster.rejected.keys() <= {"x"}


@WINDOWS
def test_what_was_built_upon_it_is_not_found_again(make_cluster: MakeCluster, windows: tuple[int, ...]) -> None:
    """Not even once somebody has computed what was skipped, and the chain is whole."""
    cluster = begun(make_cluster, other := sharer("y", 17, 17), windows=windows)
    cluster.answer(1, spoil_output="x")
    cluster.abort("y")
    cluster.run()
    cluster.submit(between := sharer("between", 14, 14))
    assert_served(cluster, between, windows=windows)
    cluster.submit(again := msgspec.structs.replace(other, request_id="again"))
    assert_served(cluster, again, windows=windows)
    assert cluster.deltas["again", 0][0].cached_prompt_tokens == 12


def test_a_prefix_that_shares_such_a_block_is_pinned_only_once_it_is_computed(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(max_num_batched_tokens=16, max_steps_in_flight=2)
    cluster.join(block_size=4)
    cluster.submit(make_request("filler", 8, 1), make_request("x", 14, 4, shared=14))
    cluster.schedule()
    cluster.handle(PrefixPinned(Prefix("p", list(range(13)))))
    cluster.schedule()
    (prefix,) = [group for group in cluster.core.replicas[1].running if isinstance(group, PrefixGroup)]
    assert prefix.live[0].placement.num_computed == 13
    cluster.answer(1, spoil_output="x")
    cluster.answer(1)
    assert "p" not in cluster.core.replicas[1].kv.pinned
    cluster.run()
    cluster.step()
    cluster.step()
    assert "p" in cluster.core.replicas[1].kv.pinned
    cluster.submit(other := sharer("y", 17, 13))
    assert_served(cluster, other)
    assert cluster.deltas["y", 0][0].cached_prompt_tokens == 13


def test_one_that_shares_what_a_failing_prefix_was_to_compute_gets_its_own_tokens(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(max_num_batched_tokens=8, max_steps_in_flight=2)
    replica = cluster.join(block_size=4)
    cluster.handle(PrefixPinned(Prefix("p", list(range(14)))))
    cluster.schedule()
    cluster.submit(other := sharer("y"))
    cluster.schedule()
    failing = {each.placement.sequence_id for group in cluster.core.replicas[1].running for each in group.live}
    cluster.handle(
        StepAnswered(1, replica.execute(spoil_output=failing - {cluster.groups["y"].live[0].placement.sequence_id}))
    )
    assert [each.name for each in cluster.given_up] == ["p"]
    assert_served(cluster, other)


def test_one_of_several_that_fails_takes_what_the_others_were_to_compute_along(make_cluster: MakeCluster) -> None:
    """A group that comes back after two different tokens: the second sequence goes on from what the first computes."""
    request = make_request("x", 12, 8, shared=12, num_sequences=2, temperature=1.0)
    known = [reference_tokens(request, index)[:6] for index in range(2)]
    first = resubmitted(request, *known)
    cluster = begun(make_cluster, first=first)
    mine = [*first.prompt_token_ids, *known[1]]
    cluster.core.replicas[1].kv.check()
    # Of the first alone its second chunk is skipped; the second sequence computes over it, and fills a block.
    leader = cluster.groups["x"].sequences[0]
    cluster.handle(StepAnswered(1, cluster.replicas[1].execute(spoil_output={leader.placement.sequence_id})))
    cluster.run()
    plain = make_request("plain", 12, 4, shared=12)
    cluster.submit(plain)
    assert_served(cluster, plain)
    same = msgspec.structs.replace(make_request("same", 18, 4), prompt_token_ids=mine)
    cluster.submit(same)
    assert_served(cluster, same)


@pytest.mark.parametrize("reason", [FailureReason.NO_TOKEN_LEFT, FailureReason.BAD_GRAMMAR])
def test_one_that_shares_a_prompt_loses_nothing_by_a_failure_at_its_end(
    make_cluster: MakeCluster, reason: FailureReason
) -> None:
    """What was planned of the failed one behind its prompt nobody shares."""
    cluster = make_cluster(max_steps_in_flight=2)
    replica = cluster.join(block_size=4)
    cluster.submit(make_request("x", 13, 4, shared=13), other := sharer("y"))
    cluster.schedule()
    cluster.schedule()
    result = replica.execute()
    sampled, *others = result.sampled
    failure = SequenceFailure(sampled.sequence_id, reason, "no rule is left")
    cluster.handle(StepAnswered(1, msgspec.structs.replace(result, sampled=others, failed=[failure])))
    assert len(cluster.deltas["y", 0]) == 1
    cluster.handle(StepAnswered(1, _without(replica.execute(), failure)))
    assert_served(cluster, other)
    assert cluster.deltas["y", 0][-1].preemptions == 0
    assert cluster.rejected.keys() == {"x"}


def _without(result: Any, failure: SequenceFailure) -> Any:
    sampled = [each for each in result.sampled if each.sequence_id != failure.sequence_id]
    return msgspec.structs.replace(result, sampled=sampled, failed=[failure])


def test_those_that_start_over_for_it_are_not_to_blame(make_cluster: MakeCluster) -> None:
    cluster = begun(make_cluster, other := sharer("y"))
    cluster.answer(1, spoil_output="x")
    cluster.answer(1)
    assert cluster.groups["y"].faults.failed_steps == 0
    assert cluster.groups["y"].preemptions == 1
    assert_served(cluster, other)


def test_those_that_share_only_what_was_computed_go_on(make_cluster: MakeCluster) -> None:
    cluster = begun(make_cluster, near := sharer("near", 14, 8), far := sharer("far"))
    cluster.answer(1, spoil_output="x")
    cluster.answer(1)
    assert len(cluster.deltas["near", 0]) == 1
    assert_served(cluster, near, far)
    assert cluster.deltas["near", 0][-1].preemptions == 0


def those_whose_turn_has_not_come(cluster: Cluster) -> list[Request]:
    """Returns those of `MASKED` that are admitted, and of which the plan under way computes nothing."""
    (*_, step) = cluster.core.replicas[1].outstanding
    return [each for each in MASKED if cluster.groups[each.request_id] not in step.groups]


@WINDOWS
def test_one_that_was_admitted_without_work_gets_its_own_tokens_too(
    make_cluster: MakeCluster, windows: tuple[int, ...]
) -> None:
    """It shares the block that is skipped, and waits for its grammar's turn: no plan computes anything of it yet."""
    cluster = begun(make_cluster, *MASKED, windows=windows)
    assert those_whose_turn_has_not_come(cluster)
    cluster.answer(1, spoil_output="x")
    cluster.answer(1)
    assert not any(cluster.deltas[each.request_id, 0] for each in MASKED)
    assert_served(cluster, *MASKED, windows=windows)
    assert cluster.rejected.keys() == {"x"}


@WINDOWS
def test_one_that_was_admitted_without_work_to_a_step_that_fails_starts_over(
    make_cluster: MakeCluster, windows: tuple[int, ...]
) -> None:
    """The step was to fill the block that it shares."""
    cluster = begun(make_cluster, *MASKED, windows=windows)
    idle = those_whose_turn_has_not_come(cluster)
    assert idle
    cluster.answer(1)
    cluster.answer(1, fail=True)
    assert all(cluster.groups[each.request_id].faults.failed_steps == 0 for each in idle)
    assert_served(cluster, *MASKED, windows=windows)
    assert cluster.rejected == {}
