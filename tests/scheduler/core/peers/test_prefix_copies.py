"""What one replica has computed of a prompt another one copies instead of computing it; where anything goes wrong, it
is computed, with the same tokens, and no block leaks."""

import io
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
    RequestsAborted,
    WorkerCordoned,
    WorkerDrained,
    WorkerReadmitted,
)
from octavo.scheduler.core.explain import explain
from octavo.scheduler.core.sequence import TierTokens
from octavo.scheduler.core.workers import look_at_reads
from octavo.scheduler.server.event_log import log_file, read_records, recorder, replay
from octavo.testing.cluster import FRONTEND, Cluster, FakeDisk, FakeReplica, make_request, reference_tokens
from octavo.testing.scenarios import plans
from octavo.wire.costs import PrefillCosts, StepCosts, SwapCosts
from octavo.wire.requests import CacheKey, Prefix, Request
from octavo.wire.sampling import BeamSearch, EarlyStopping
from octavo.wire.steps import BlocksPulled, PullBlocks

from ...conftest import MakeCluster
from ...views import cached_tokens, kv_of

OLD = make_request("old", 21, 5)
BEAMS = BeamSearch(width=3, length_penalty=1.0, early_stopping=EarlyStopping.NEVER)


def again(request: Request = OLD, name: str = "again", **changes: Any) -> Request:
    """The same prompt and sampling, as another request."""
    return msgspec.structs.replace(request, request_id=name, **changes)


def join(cluster: Cluster, incarnation: int, **worker: Any) -> FakeReplica:
    sizes = {"num_blocks": 64, "block_size": 2, "num_cpu_blocks": 64, "is_read": True}
    return cluster.join(incarnation, **{**sizes, **worker})


def served(
    make_cluster: MakeCluster, *requests: Request, config: dict[str, Any] | None = None, **worker: Any
) -> Cluster:
    """A cluster of two workers, of which the first has served these requests, and takes nothing new."""
    cluster = make_cluster(watermark=0.0, **(config or {}))
    join(cluster, 1, **worker)
    for request in requests or (OLD,):
        cluster.submit(request)
        cluster.run()
    settle(cluster)
    cluster.handle(WorkerCordoned("worker-1"))
    join(cluster, 2, **worker)
    return cluster


def settle(cluster: Cluster) -> None:
    for _ in range(4):
        cluster.step()


def pulls(cluster: Cluster, incarnation: int = 2) -> list[PullBlocks]:
    return [each for each in cluster.replicas[incarnation].received if isinstance(each, PullBlocks)]


def waiting(make_cluster: MakeCluster, *requests: Request, **worker: Any) -> Cluster:
    """A cluster whose second worker is to copy what `requests` begin with, and has not answered."""
    cluster = served(make_cluster, **worker)
    cluster.pulls_answer = False
    cluster.submit(*(requests or (again(),)))
    settle(cluster)
    assert len(pulls(cluster)) == 1
    assert len(kv_of(cluster).lent_block_ids) == 10
    return cluster


def computed(replica: FakeReplica) -> int:
    return sum(work.num_tokens for plan in plans(replica) for work in plan.work)


def finish(cluster: Cluster, *requests: Request) -> None:
    """Runs to the end; the tokens are right and no block is held."""
    cluster.run()
    settle(cluster)
    for each in requests:
        if each.sampling.beam is None:
            expected = [reference_tokens(each, index) for index in range(each.sampling.num_sequences)]
            assert cluster.outputs(each.request_id) == expected
    for replica in cluster.core.replicas.values():
        assert replica.kv.num_cpu_free == replica.kv.num_cpu_blocks
        assert replica.kv.num_free + replica.kv.num_pinned == replica.kv.num_blocks
    assert not cluster.core.state.prefix_copies.under_way


def test_what_another_replica_has_computed_is_copied(make_cluster: MakeCluster) -> None:
    cluster = served(make_cluster)
    cluster.submit(again())
    finish(cluster, again())
    (pull,) = pulls(cluster)
    # The last token is computed, with the block that it is in.
    assert len(pull.moves) == 10
    assert cached_tokens(cluster)["again"] == 20
    # A row may be under way as the request ends.
    assert computed(cluster.replicas[2]) in (1 + 4, 1 + 5)
    (lookup,) = cluster.core.state.lookups.of("again")
    assert lookup.found == TierTokens(replica=20, source="worker-1")


def test_only_what_is_missing_is_copied(make_cluster: MakeCluster) -> None:
    cluster = served(make_cluster)
    short = again(name="short", prompt_token_ids=OLD.prompt_token_ids[:9])
    cluster.submit(short)
    finish(cluster, short)
    cluster.submit(again())
    finish(cluster, again())
    assert [len(pull.moves) for pull in pulls(cluster)] == [4, 6]
    assert cached_tokens(cluster)["again"] == 20


def test_the_copy_is_found_by_all_that_come_later(make_cluster: MakeCluster) -> None:
    cluster = served(make_cluster)
    for name in ("again", "later"):
        cluster.submit(again(name=name))
        finish(cluster, again(name=name))
    assert len(pulls(cluster)) == 1
    assert cached_tokens(cluster)["later"] == 20


def test_the_replica_that_has_most_is_copied_from(make_cluster: MakeCluster) -> None:
    short = again(name="short", prompt_token_ids=OLD.prompt_token_ids[:9])
    cluster = served(make_cluster, short)
    cluster.submit(OLD)
    finish(cluster, OLD)
    cluster.handle(WorkerCordoned("worker-2"))
    join(cluster, 3)
    cluster.submit(again())
    finish(cluster, again())
    assert [(pull.source, len(pull.moves)) for pull in pulls(cluster, 3)] == [(2, 10)]


def test_two_that_want_the_same_wait_for_one_copy(make_cluster: MakeCluster) -> None:
    wanted = [again(name=name) for name in ("first", "second")]
    cluster = waiting(make_cluster, *wanted)
    assert not plans(cluster.replicas[2])
    cluster.pulls_answer = True
    finish(cluster, *wanted)
    assert len(pulls(cluster)) == 1
    assert {cached_tokens(cluster)[each.request_id] for each in wanted} == {20}


def test_others_go_on_while_one_waits_for_a_copy(make_cluster: MakeCluster) -> None:
    cluster = waiting(make_cluster)
    other = make_request("other", 6, 4)
    cluster.submit(other)
    while "other" not in cluster.finished:
        cluster.step()
    assert "again" not in cluster.finished
    cluster.pulls_answer = True
    finish(cluster, other, again())


@pytest.mark.parametrize("sampling", [{"num_sequences": 3, "seed": 5, "temperature": 1.0}, {"beam": BEAMS}])
def test_sequences_of_one_request_share_what_was_copied(make_cluster: MakeCluster, sampling: dict[str, Any]) -> None:
    # The last block is partly filled, so that each of them copies it to write to it.
    wanted = make_request("old", 22, 5, **sampling)
    alone = make_cluster(watermark=0.0)
    join(alone, 1)
    alone.submit(again(wanted))
    alone.run()
    cluster = served(make_cluster, wanted)
    cluster.submit(again(wanted))
    finish(cluster, again(wanted))
    assert [len(pull.moves) for pull in pulls(cluster)] == [10]
    assert cluster.outputs("again") == alone.outputs("again")


@pytest.mark.parametrize("windows", [(4,), (0, 4), (0, 6)])
def test_of_windows_what_is_seen_is_copied(make_cluster: MakeCluster, windows: tuple[int, ...]) -> None:
    # What it generates has made the windows slide; a shorter beginning of it is not there.
    cluster = served(make_cluster, make_request("old", 21, 1), windows=windows)
    cluster.submit(again())
    finish(cluster)
    assert cached_tokens(cluster)["again"] == 20
    (pull,) = pulls(cluster)
    seen = {4: 2, 6: 3}[windows[-1]]
    assert len(pull.moves) == seen + (10 if 0 in windows else 0)


def test_blocks_in_the_cpu_memory_of_the_other_replica_are_copied_too(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(watermark=0.0)
    join(cluster, 1, num_blocks=14)
    for request in (OLD, make_request("new", 12, 3)):
        cluster.submit(request)
        cluster.run()
    settle(cluster)
    cluster.handle(WorkerCordoned("worker-1"))
    join(cluster, 2)
    cluster.submit(again())
    finish(cluster, again())
    assert {pull.from_cpu for pull in pulls(cluster)} == {False, True}
    assert sum(len(pull.moves) for pull in pulls(cluster)) == 10
    assert cached_tokens(cluster)["again"] == 20


def test_a_salt_keeps_others_from_what_is_behind_it(make_cluster: MakeCluster) -> None:
    mine = again(OLD, "mine", cache_key=CacheKey(salt="a"))
    cluster = served(make_cluster, mine)
    wanted = [again(name="none"), again(name="other", cache_key=CacheKey(salt="b"))]
    cluster.submit(*wanted)
    finish(cluster, *wanted)
    assert not pulls(cluster)
    cluster.submit(again(mine))
    finish(cluster, again(mine))
    assert len(pulls(cluster)) == 1


def test_what_is_being_computed_is_not_copied_before_it_is(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(watermark=0.0, max_num_batched_tokens=8)
    join(cluster, 1)
    cluster.submit(OLD)
    cluster.schedule()
    cluster.handle(WorkerCordoned("worker-1"))
    join(cluster, 2)
    cluster.submit(again())
    cluster.schedule()
    assert not pulls(cluster)
    finish(cluster, OLD, again())


@pytest.mark.parametrize("lack", ["server", "alike", "cpu blocks", "caching", "tier"])
def test_who_takes_no_part_computes(make_cluster: MakeCluster, lack: str) -> None:
    cluster = make_cluster(watermark=0.0, prefix_caching=lack != "caching")
    dear = StepCosts(PrefillCosts(0.0, 1e-6, 0.0), SwapCosts(0.0, 1.0, 1.0))
    join(cluster, 1, is_read=lack != "server")
    cluster.submit(OLD)
    cluster.run()
    cluster.handle(WorkerCordoned("worker-1"))
    other: dict[str, dict[str, Any]] = {
        "cpu blocks": {"num_cpu_blocks": 0},
        "alike": {"block_size": 4},
        "tier": {"costs": dear},
    }
    join(cluster, 2, **other.get(lack, {}))
    cluster.submit(again())
    finish(cluster, again())
    assert not pulls(cluster)
    assert computed(cluster.replicas[2]) >= 21 + 4


# -- cost ------------------------------------------------------------------------------------------------------------


def costs(token_s: float) -> StepCosts:
    return StepCosts(PrefillCosts(0.0, token_s, 0.0), SwapCosts(0.0, 1e-6, 1e-6))


@pytest.mark.parametrize(("token_s", "is_copied"), [(0.01, True), (0.0001, False)])
def test_what_is_sooner_computed_than_copied_is_computed(
    make_cluster: MakeCluster, token_s: float, is_copied: bool
) -> None:
    cluster = served(make_cluster, OLD, make_request("other", 21, 5), costs=costs(token_s))
    first = again(make_request("other", 21, 5), "first")
    # What copies take is not known yet; this one took a step of 10 ms.
    cluster.submit(first)
    finish(cluster, first)
    assert len(pulls(cluster)) == 1
    cluster.submit(again())
    finish(cluster, again())
    assert len(pulls(cluster)) == 1 + is_copied
    assert (cached_tokens(cluster)["again"] == 20) is is_copied


def test_what_copies_took_is_not_believed_for_ever(make_cluster: MakeCluster) -> None:
    cluster = served(make_cluster, OLD, make_request("other", 21, 5), costs=costs(0.0001))
    first = again(make_request("other", 21, 5), "first")
    cluster.submit(first)
    finish(cluster, first)
    cluster.now += 121
    cluster.submit(again())
    finish(cluster, again())
    assert len(pulls(cluster)) == 2


# -- placement -------------------------------------------------------------------------------------------------------


def measured(make_cluster: MakeCluster, token_s: float = 0.01, **kwargs: Any) -> Cluster:
    """Two workers that take new requests. The first has served `OLD`; of the second it is known that a copy from there
    takes 10 ms."""
    other = make_request("other", 21, 5)
    cluster = served(make_cluster, OLD, other, costs=costs(token_s), **kwargs)
    cluster.submit(again(other, "first"))
    finish(cluster, again(other, "first"))
    assert len(pulls(cluster)) == 1
    cluster.handle(WorkerReadmitted("worker-1"))
    return cluster


def home(cluster: Cluster, num_busy: int = 0) -> int:
    """The worker that computes `OLD` again, beside so many others that run on the first one."""
    busy = [make_request(f"busy{i}", 3, 8) for i in range(num_busy)]
    cluster.handle(WorkerCordoned("worker-2"))
    cluster.submit(*busy)
    cluster.step()
    cluster.handle(WorkerReadmitted("worker-2"))
    cluster.submit(again())
    finish(cluster, again(), *busy)
    (lookup,) = cluster.core.state.lookups.of("again")
    return lookup.replica_id


# More than a copy of what `OLD` begins with takes, and fewer than its tokens.
BUSY = 5


def test_what_can_be_copied_draws_no_request_to_a_busy_replica(make_cluster: MakeCluster) -> None:
    cluster = measured(make_cluster)
    assert home(cluster, BUSY) == 2
    assert len(pulls(cluster)) == 2
    assert cached_tokens(cluster)["again"] == 20


def test_a_copy_counts_as_the_tokens_that_are_computed_in_its_time(make_cluster: MakeCluster) -> None:
    # 10 of the 20: fewer than run on the first worker in the second case alone.
    assert home(measured(make_cluster, token_s=0.001), 5) == 1
    assert home(measured(make_cluster, token_s=0.001), 12) == 2


@pytest.mark.parametrize("case", ["dear", "long ago", "failed"])
def test_what_cannot_be_copied_cheaply_counts_as_computed(make_cluster: MakeCluster, case: str) -> None:
    cluster = measured(make_cluster, token_s=0.0001 if case == "dear" else 0.01)
    if case == "long ago":
        cluster.now += 121
    elif case == "failed":
        state, (source, target) = cluster.core.state, cluster.core.replicas.values()
        state.pulls.has_failed(source, target, cluster.now)
    assert home(cluster, BUSY) == 1
    assert len(pulls(cluster)) == 1


def test_requests_that_go_where_something_is_copied_replay_exactly(make_cluster: MakeCluster) -> None:
    file = io.BytesIO()
    cluster = measured(make_cluster, config={"record": recorder(log_file(file))})
    assert home(cluster, BUSY) == 2
    file.seek(0)
    result = replay(read_records(file))
    assert result.difference is None
    assert result.plans == sum(len(plans(replica)) for replica in cluster.replicas.values())


# -- faults ----------------------------------------------------------------------------------------------------------


def test_a_copy_that_fails_has_the_prompt_computed(make_cluster: MakeCluster) -> None:
    cluster = waiting(make_cluster)
    pull = cluster.replicas[2].to_pull.popleft()
    cluster.handle(PullAnswered(2, BlocksPulled(pull.epoch, 2, pull.pull_id, is_complete=False)))
    cluster.pulls_answer = True
    later = again(name="later", prompt_token_ids=[*OLD.prompt_token_ids, 7, 8])
    finish(cluster, again())
    assert cached_tokens(cluster)["again"] == 0
    # These two are not tried together again for a while.
    cluster.handle(CacheReset("nobody's"))
    cluster.submit(later)
    finish(cluster, later)
    assert len(pulls(cluster)) == 1


def test_nobody_waits_for_a_copy_that_is_late_and_it_serves_who_comes_later(make_cluster: MakeCluster) -> None:
    cluster = waiting(make_cluster)
    for seconds in (0.0, 4.9):
        look_at_reads(cluster.core.state, cluster.now + seconds)
    settle(cluster)
    assert not plans(cluster.replicas[2])
    look_at_reads(cluster.core.state, cluster.now + 5.1)
    cluster.run()
    assert cached_tokens(cluster)["again"] == 0
    # The other worker has not answered, and may still read.
    assert (len(kv_of(cluster).lent_block_ids), kv_of(cluster, 2).num_arriving) == (10, 10)
    cluster.pull(2)
    finish(cluster, again())


def test_nobody_waits_much_longer_than_computing_would_take(make_cluster: MakeCluster) -> None:
    cluster = waiting(make_cluster, costs=costs(0.1))
    for seconds in (0.0, 1.9):
        look_at_reads(cluster.core.state, cluster.now + seconds)
    settle(cluster)
    assert not plans(cluster.replicas[2])
    # 20 tokens.
    look_at_reads(cluster.core.state, cluster.now + 2.1)
    cluster.run()
    cluster.pull(2)
    finish(cluster, again())


def test_the_source_gives_nothing_away_that_is_being_copied(make_cluster: MakeCluster) -> None:
    cluster = served(make_cluster, num_blocks=26)
    cluster.pulls_answer = False
    cluster.submit(again())
    settle(cluster)
    (pull,) = pulls(cluster)
    lent = {move.source for move in pull.moves}
    cluster.handle(WorkerReadmitted("worker-1"))
    cluster.handle(WorkerCordoned("worker-2"))
    # It takes all blocks that are free there.
    large = make_request("large", 28, 4)
    cluster.submit(large)
    for _ in range(3):
        cluster.step()
    (sequence,) = cluster.groups["large"].live
    assert not lent & {block for blocks in kv_of(cluster).block_table(sequence) for block in blocks}
    cluster.handle(WorkerReadmitted("worker-2"))
    cluster.pulls_answer = True
    finish(cluster, large, again())
    assert cached_tokens(cluster)["again"] == 20


def test_no_more_than_half_of_what_is_free_is_lent(make_cluster: MakeCluster) -> None:
    # Of 14 blocks all are free.
    cluster = served(make_cluster, num_blocks=14)
    cluster.submit(again())
    finish(cluster, again())
    assert [len(pull.moves) for pull in pulls(cluster)] == [7]
    assert cached_tokens(cluster)["again"] == 14


def test_a_lost_source_lets_the_prompt_be_computed_at_once(make_cluster: MakeCluster) -> None:
    cluster = waiting(make_cluster)
    cluster.leave(1, LossCause.UNREACHABLE)
    cluster.run()
    assert cached_tokens(cluster)["again"] == 0
    # What the other worker still may write to is its own until it answers; whatever it says, nobody relies on that.
    assert kv_of(cluster, 2).num_arriving == 10
    pull = cluster.replicas[2].to_pull.popleft()
    cluster.handle(PullAnswered(2, BlocksPulled(pull.epoch, 2, pull.pull_id, is_complete=True)))
    assert not kv_of(cluster, 2).cpu_blocks.cache.block_ids
    finish(cluster, again())


def test_a_lost_target_gives_the_loan_back(make_cluster: MakeCluster) -> None:
    cluster = waiting(make_cluster)
    cluster.leave(2, LossCause.UNREACHABLE)
    assert not kv_of(cluster).lent_block_ids
    cluster.handle(WorkerReadmitted("worker-1"))
    finish(cluster, again())


@pytest.mark.parametrize("salt", [None, "a", "b"])
def test_a_reset_counts_for_what_is_being_copied(make_cluster: MakeCluster, salt: str | None) -> None:
    mine = again(OLD, "mine", cache_key=CacheKey(salt="a"))
    cluster = served(make_cluster, mine)
    cluster.pulls_answer = False
    cluster.submit(again(mine))
    settle(cluster)
    cluster.handle(CacheReset(salt))
    cluster.pulls_answer = True
    finish(cluster, again(mine))
    assert cached_tokens(cluster)["again"] == (20 if salt == "b" else 0)


def test_a_request_that_is_aborted_leaves_its_copy_to_others(make_cluster: MakeCluster) -> None:
    cluster = waiting(make_cluster)
    cluster.handle(RequestsAborted(FRONTEND, ["again"]))
    cluster.pulls_answer = True
    settle(cluster)
    cluster.submit(again(name="later"))
    finish(cluster, again(name="later"))
    assert cached_tokens(cluster)["later"] == 20
    assert len(pulls(cluster)) == 1


def test_a_source_that_is_drained_gives_what_it_can_and_goes(make_cluster: MakeCluster) -> None:
    cluster = waiting(make_cluster)
    cluster.handle(WorkerDrained("worker-1", 0.0))
    # It has nothing to do any more.
    assert 1 not in cluster.core.replicas
    cluster.pulls_answer = True
    finish(cluster, again())
    assert cached_tokens(cluster)["again"] == 0


def test_who_waits_at_a_target_that_is_drained_goes_elsewhere(make_cluster: MakeCluster) -> None:
    cluster = waiting(make_cluster)
    cluster.handle(WorkerReadmitted("worker-1"))
    cluster.handle(WorkerDrained("worker-2", 0.0))
    finish(cluster, again())
    assert 2 not in cluster.core.replicas
    assert not kv_of(cluster).lent_block_ids


def test_nothing_of_a_non_finite_sequence_is_found_by_a_copy(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(watermark=0.0)
    join(cluster, 1)
    wanted = make_request("old", 21, 40)
    cluster.submit(wanted)
    for _ in range(6):
        cluster.step()
    cluster.handle(WorkerCordoned("worker-1"))
    join(cluster, 2)
    cluster.pulls_answer = False
    cluster.submit(again())
    settle(cluster)
    assert len(pulls(cluster)) == 1
    kv = kv_of(cluster)
    (sequence,) = cluster.groups["old"].live
    kv.distrust(sequence.placement.sequence_id, sequence)
    cluster.pulls_answer = True
    while "again" not in cluster.finished:
        cluster.step()
    assert cached_tokens(cluster)["again"] == 0
    finish(cluster, again(), wanted)


def test_a_failed_step_of_the_target_leaves_nothing_that_might_not_be_there(make_cluster: MakeCluster) -> None:
    cluster = served(make_cluster)
    cluster.submit(again())
    while not cluster.replicas[2].plans:
        cluster.schedule()
        if cluster.replicas[2].to_pull:
            cluster.pull(2)
    cluster.answer(2, fail=True)
    finish(cluster, again())


def test_a_failed_step_of_the_source_leaves_what_was_computed_before(make_cluster: MakeCluster) -> None:
    cluster = waiting(make_cluster)
    cluster.handle(WorkerReadmitted("worker-1"))
    other = make_request("other", 8, 8)
    cluster.submit(other)
    cluster.schedule()
    if cluster.replicas[1].plans:
        cluster.answer(1, fail=True)
    cluster.pulls_answer = True
    finish(cluster, again(), other)
    assert cached_tokens(cluster)["again"] == 20


# -- other mechanisms ------------------------------------------------------------------------------------------------


def test_a_pinned_prefix_goes_on_with_what_is_copied(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(watermark=0.0)
    join(cluster, 1)
    cluster.handle(PrefixPinned(Prefix("p", list(range(7)))))
    settle(cluster)
    wanted = make_request("old", 21, 5, shared=7)
    cluster.submit(wanted)
    cluster.run()
    cluster.handle(WorkerCordoned("worker-1"))
    join(cluster, 2)
    settle(cluster)
    cluster.submit(again(wanted))
    finish(cluster, again(wanted))
    # Its full blocks are here.
    assert [len(pull.moves) for pull in pulls(cluster)] == [7]
    assert cached_tokens(cluster)["again"] == 20


def test_a_copy_waits_for_its_room_behind_swapped_groups(make_cluster: MakeCluster) -> None:
    config = {"preemption": Preemption.SWAP, "max_steps_in_flight": 1}
    cluster = served(make_cluster, config=config, num_blocks=26, num_cpu_blocks=20)
    wanted = [make_request(name, 13, 24) for name in ("first", "second")]
    cluster.submit(*wanted)
    while not cluster.core.replicas[2].swapped:
        cluster.step()
    cluster.submit(again())
    finish(cluster, again(), *wanted)


def test_a_group_that_moves_takes_what_is_on_loan_along(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(watermark=0.0)
    join(cluster, 1)
    long = again(name="old", sampling=msgspec.structs.replace(OLD.sampling, max_tokens=30))
    cluster.submit(long)
    for _ in range(6):
        cluster.step()
    cluster.handle(WorkerCordoned("worker-1"))
    join(cluster, 2)
    cluster.pulls_answer = False
    cluster.submit(again())
    settle(cluster)
    assert not kv_of(cluster).lent_block_ids, "its group holds them too"
    cluster.handle(WorkerDrained("worker-1", 0.0))
    settle(cluster)
    assert len(pulls(cluster)) == 2
    cluster.pulls_answer = True
    finish(cluster, again(), long)
    assert cached_tokens(cluster)["again"] == 20


def test_the_disk_is_asked_for_what_no_replica_has(make_cluster: MakeCluster) -> None:
    disk = FakeDisk()
    cluster = make_cluster(watermark=0.0, max_steps_in_flight=1)
    join(cluster, 1, disk=disk, mirror=True)
    cluster.submit(OLD)
    cluster.run()
    for _ in range(8):
        cluster.step()
    cluster.leave(1)
    short = again(name="short", prompt_token_ids=OLD.prompt_token_ids[:9])
    join(cluster, 2)
    cluster.submit(short)
    cluster.run()
    cluster.handle(WorkerCordoned("worker-2"))
    join(cluster, 3, disk=disk)
    cluster.submit(again())
    finish(cluster, again())
    (lookup,) = cluster.core.state.lookups.of("again")
    assert lookup.found == TierTokens(disk=12, replica=8, source="worker-2")


def test_what_the_disk_is_reading_already_is_not_copied(make_cluster: MakeCluster) -> None:
    disk = FakeDisk()
    cluster = make_cluster(watermark=0.0, max_steps_in_flight=1)
    join(cluster, 1, disk=disk, mirror=True)
    cluster.submit(OLD)
    cluster.run()
    for _ in range(8):
        cluster.step()
    cluster.leave(1)
    join(cluster, 2, disk=disk)
    cluster.disks_answer = False
    cluster.submit(again(name="first"))
    settle(cluster)
    # Another replica that has it joins late, in the eyes of the one that reads.
    cluster.handle(WorkerCordoned("worker-2"))
    join(cluster, 3)
    cluster.submit(again(name="elsewhere"))
    while "elsewhere" not in cluster.finished:
        cluster.step()
    cluster.handle(WorkerCordoned("worker-3"))
    cluster.handle(WorkerReadmitted("worker-2"))
    cluster.submit(again())
    settle(cluster)
    assert sum(len(pull.moves) for pull in pulls(cluster)) == 9
    cluster.disks_answer = True
    finish(cluster, again(name="first"), again())


def test_explain_says_what_is_copied(make_cluster: MakeCluster) -> None:
    cluster = waiting(make_cluster)
    (told,) = explain(cluster.core.state, cluster.core.policy, "again", cluster.now)
    (found,) = told.obstacles
    assert found.replica is cluster.core.replicas[2]
    assert (found.obstacle.kind, found.obstacle.needed) == (ObstacleKind.PREFIX_COPY, 10)
    cluster.pulls_answer = True
    finish(cluster, again())
