"""Resets of the prefix cache: what was computed, or planned to be, before one is found by nobody after it, whatever
holds it; and whoever runs goes on with the same tokens."""

import io
from collections.abc import Callable
from typing import Any, ClassVar

import msgspec
import pytest

from octavo.scheduler.core.config import Preemption
from octavo.scheduler.core.events import CacheReset, PrefixPinned, SchedulerObserver, StepAnswered
from octavo.scheduler.core.sequence import PrefixGroup
from octavo.scheduler.core.speculation.drafter import Drafter
from octavo.scheduler.core.state import CacheCounts
from octavo.scheduler.server.event_log import log_file, read_records, recorder, replay
from octavo.testing.cluster import FRONTEND, Cluster, make_request, reference_tokens, resubmitted
from octavo.testing.oracles.paged import paged
from octavo.wire.requests import CacheKey, Prefix, PrefixCacheReset, Request
from octavo.wire.sampling import BeamSearch, EarlyStopping

from .conftest import MakeCluster
from .views import blocks, cached_tokens, kv_of, step_until

BEAMS = BeamSearch(2, 1.0, EarlyStopping.NEVER)


def reset(cluster: Cluster, salt: str | None = None) -> CacheCounts:
    """An operator's reset, and what it concerned."""
    found = cluster.core.state.count_cached(salt)
    cluster.handle(CacheReset(salt))
    return found


def run(cluster: Cluster, *requests: Request) -> None:
    cluster.submit(*requests)
    cluster.run()


def cached(cluster: Cluster, request: Request) -> int:
    """How many tokens of the request's prompt are found, once it runs."""
    run(cluster, request)
    return cached_tokens(cluster)[request.request_id]


def prompt_of(request_id: str, token_ids: list[int], max_tokens: int = 2, **fields: Any) -> Request:
    return msgspec.structs.replace(make_request(request_id, 1, max_tokens, **fields), prompt_token_ids=token_ids)


@pytest.mark.parametrize(("salt", "is_copied"), [(None, False), ("s", False), ("other", True)])
def test_no_draft_is_copied_from_outputs_of_before(
    make_cluster: MakeCluster, salt: str | None, is_copied: bool
) -> None:
    class Told(SchedulerObserver):
        sources: ClassVar[set[str]] = set()

        def drafted(self, source: str, guesses: int, accepted: int) -> None:
            self.sources.add(source)

    cluster = make_cluster(speculation=8, drafter=Drafter(), observer=Told())
    cluster.join(num_blocks=200)
    request = make_request("ended", 9, 40, salt="s")
    run(cluster, request)
    running = make_request("running", 7, 60, salt="s")
    cluster.submit(running)
    step_until(cluster, lambda: len(cluster.tokens["running"]) > 20)
    reset(cluster, salt)
    cluster.run()
    Told.sources.clear()
    for name, before in (("again", request), ("as well", running)):
        run(cluster, msgspec.structs.replace(before, request_id=name))
        assert cluster.tokens[name] == reference_tokens(before)
        assert ("store" in Told.sources) == is_copied
        # What came after the reset is as good as any.
        Told.sources.clear()


def test_no_draft_is_copied_from_what_was_submitted_again_after_a_reset(make_cluster: MakeCluster) -> None:
    sources: set[str] = set()

    class Told(SchedulerObserver):
        def drafted(self, source: str, guesses: int, accepted: int) -> None:
            sources.add(source)

    cluster = make_cluster(speculation=8, drafter=Drafter(), observer=Told())
    cluster.join(num_blocks=200)
    request = make_request("r", 7, 60)
    cluster.submit(request)
    step_until(cluster, lambda: len(cluster.tokens["r"]) > 20)
    reset(cluster)
    cluster.submit(resubmitted(request, list(cluster.tokens["r"])))
    cluster.run()
    run(cluster, msgspec.structs.replace(request, request_id="again"))
    assert cluster.tokens["r"] == cluster.tokens["again"] == reference_tokens(request)
    assert "store" not in sources
    run(cluster, msgspec.structs.replace(request, request_id="once more"))
    assert "store" in sources


def test_what_nobody_holds_is_found_no_more_and_what_comes_after_is(make_cluster: MakeCluster) -> None:
    cluster = make_cluster()
    cluster.join(1, block_size=4)
    cluster.join(2, block_size=4)
    run(cluster, *(make_request(name, 9, 2, shared=9) for name in "ab"))
    found = reset(cluster)
    assert found.num_blocks >= 2
    assert found == CacheCounts(found.num_blocks, 0, 0)
    assert all(replica.kv.num_cached == 0 for replica in cluster.core.replicas.values())
    for replica in cluster.core.replicas.values():
        assert replica.kv.num_free == replica.kv.num_blocks
    cluster.leave(2)
    assert cached(cluster, make_request("c", 9, 2, shared=9)) == 0
    assert cached(cluster, make_request("d", 9, 2, shared=9)) == 8
    assert reset(cluster).num_blocks >= 2


@pytest.mark.parametrize("windows", [(0,), (0, 6), (8,)])
@pytest.mark.parametrize(
    "decoding", [{}, {"num_sequences": 3, "temperature": 1.0}, {"beam": BEAMS, "num_sequences": 2}], ids=str
)
@pytest.mark.parametrize("steps", [1, 3, 7])
def test_who_runs_keeps_all_blocks_and_tokens_and_shows_nobody_what_comes_of_them(
    make_cluster: MakeCluster, windows: tuple[int, ...], decoding: dict[str, Any], steps: int
) -> None:
    undisturbed, cluster = make_cluster(), make_cluster()
    request = make_request("a", 9, 16, **decoding)
    for each in (undisturbed, cluster):
        each.join(num_blocks=128, block_size=2, windows=windows)
        each.submit(request)
        for _ in range(steps):
            each.step()
    found = reset(cluster)
    assert 0 < found.num_in_use <= found.num_blocks
    for each in (undisturbed, cluster):
        each.run()
    assert cluster.outputs("a") == undisturbed.outputs("a")
    # Neither the prompt, nor an answer, which would be a prompt's beginning in the next turn of a conversation.
    for index, tokens in enumerate(cluster.outputs("a")):
        again = [*request.prompt_token_ids, *tokens]
        assert cached(undisturbed, prompt_of(f"again {index}", again)) > 0
        assert cached(cluster, prompt_of(f"again {index}", again)) == 0
        reset(cluster)


def test_what_others_make_of_the_same_prompt_is_not_joined_with_what_is_older(make_cluster: MakeCluster) -> None:
    cluster = make_cluster()
    cluster.join(block_size=4)
    old = make_request("old", 8, 24, shared=8)
    cluster.submit(old)
    cluster.step()
    cluster.step()
    reset(cluster)
    # It computes the prompt anew, beside the one that still runs and goes on in blocks that continue it.
    assert cached_with_company(cluster, make_request("new", 8, 2, shared=8)) == 0
    step_until(cluster, lambda: len(cluster.tokens["old"]) >= 16)
    answer = [*old.prompt_token_ids, *cluster.tokens["old"][:12]]
    assert cached_with_company(cluster, prompt_of("answer", answer)) == 8
    cluster.run()
    assert cluster.tokens["old"] == reference_tokens(old)


def cached_with_company(cluster: Cluster, request: Request) -> int:
    """As `cached`, while others run."""
    cluster.submit(request)
    step_until(cluster, lambda: request.request_id in cached_tokens(cluster))
    return cached_tokens(cluster)[request.request_id]


@pytest.fixture
def provisional(make_cluster: MakeCluster) -> Cluster:
    """`first` fills blocks in a step that is under way, which `follower` of the next shares."""
    cluster = make_cluster(max_steps_in_flight=2)
    cluster.join(block_size=4)
    cluster.submit(make_request("first", 9, 4, shared=8))
    cluster.schedule()
    cluster.submit(make_request("follower", 9, 4, shared=8))
    cluster.schedule()
    assert cluster.groups["follower"].cached_prompt_tokens == 8
    return cluster


def test_what_a_step_under_way_fills_stays_with_those_who_share_it_already(provisional: Cluster) -> None:
    assert reset(provisional) == CacheCounts(2, 2, 0)
    late = make_request("late", 9, 4, shared=8)
    assert cached_with_company(provisional, late) == 0
    provisional.run()
    for name in ("first", "follower", "late"):
        (request,) = [make_request(name, 9, 4, shared=8)]
        assert provisional.tokens[name] == reference_tokens(request)


@pytest.mark.parametrize("is_gone", [False, True])
def test_who_shares_what_then_fails_starts_over_as_if_nothing_had_been_forgotten(
    provisional: Cluster, is_gone: bool
) -> None:
    failing = {each.placement.sequence_id for each in provisional.groups["first"].live}
    if is_gone:
        provisional.abort("first")
    reset(provisional)
    provisional.handle(StepAnswered(1, provisional.replicas[1].execute(spoil=failing)))
    provisional.run()
    assert set(provisional.rejected) <= {"first"}
    assert provisional.tokens["follower"] == reference_tokens(make_request("follower", 9, 4, shared=8))


@pytest.mark.parametrize("when", ["before", "while", "after"])
def test_what_is_swapped_out_comes_back_and_is_found_by_nobody(make_cluster: MakeCluster, when: str) -> None:
    cluster = make_cluster(preemption=Preemption.SWAP, watermark=0.0)
    cluster.join(num_blocks=6, block_size=4, num_cpu_blocks=6)
    requests = [make_request("a", 8, 12), make_request("b", 8, 12)]
    cluster.submit(*requests)
    replica = cluster.core.replicas[1]
    conditions: dict[str, Callable[[], object]] = {
        "before": lambda: len(replica.running) == 2,
        "while": lambda: replica.swapped,
        "after": lambda: cluster.core.swaps and not replica.swapped,
    }
    step_until(cluster, conditions[when])
    assert cluster.core.swaps == (when != "before")
    reset(cluster)
    assert kv_of(cluster).num_cached == 0
    cluster.run()
    assert cluster.core.swaps
    for request in requests:
        assert cluster.tokens[request.request_id] == reference_tokens(request)
        assert cached(cluster, prompt_of(f"again {request.request_id}", request.prompt_token_ids)) == 0


def test_what_comes_back_from_before_is_not_joined_with_what_others_have_computed_since(
    make_cluster: MakeCluster,
) -> None:
    cluster = make_cluster(preemption=Preemption.SWAP, watermark=0.0)
    cluster.join(num_blocks=20, block_size=4, num_cpu_blocks=20)
    first, old = make_request("first", 8, 44), make_request("old", 16, 40)
    cluster.submit(first, old)
    step_until(cluster, lambda: cluster.core.replicas[1].swapped)
    (swapped,) = cluster.core.replicas[1].swapped
    assert swapped.request_id == "old"
    reset(cluster)
    # The same prompt, computed anew, is held while the old one comes back with blocks of its own.
    cluster.submit(prompt_of("new", old.prompt_token_ids, max_tokens=12, priority=9))
    step_until(cluster, lambda: "new" in cached_tokens(cluster))
    cluster.abort("first")
    step_until(cluster, lambda: swapped in cluster.core.replicas[1].running)
    assert blocks(cluster, "old").isdisjoint(blocks(cluster, "new"))
    cluster.run()
    assert cluster.tokens["old"] == reference_tokens(old)


def test_who_starts_over_after_a_reset_is_found_again(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(max_steps_in_flight=1)
    cluster.join(block_size=4)
    request = make_request("a", 9, 8)
    cluster.submit(request)
    cluster.step()
    reset(cluster)
    cluster.step(fail=True)
    cluster.run()
    assert cluster.tokens["a"] == reference_tokens(request)
    assert cached(cluster, prompt_of("again", request.prompt_token_ids)) == 8


# -- pinned prefixes --------------------------------------------------------------------------------------------------


def pinned(cluster: Cluster, length: int = 10) -> Cluster:
    cluster.handle(PrefixPinned(Prefix("system", list(range(length)))))
    for _ in range(8):
        cluster.step()
    return cluster


def test_pinned_prefixes_are_computed_anew_on_every_replica(make_cluster: MakeCluster) -> None:
    cluster = make_cluster()
    for incarnation in (1, 2):
        cluster.join(incarnation, block_size=4)
    pinned(cluster)
    computed = sum(replica.stats.tokens_computed for replica in cluster.core.replicas.values())
    assert reset(cluster) == CacheCounts(4, 4, 1)
    assert all(not replica.kv.pinned for replica in cluster.core.replicas.values())
    for _ in range(8):
        cluster.step()
    assert all(replica.kv.pinned.keys() == {"system"} for replica in cluster.core.replicas.values())
    assert sum(replica.stats.tokens_computed for replica in cluster.core.replicas.values()) == computed + 2 * 10
    # Its last, partly filled block too.
    assert cached(cluster, make_request("a", 12, 2, shared=12)) == 10


def test_who_runs_on_a_pinned_prefix_keeps_its_blocks_while_it_is_computed_anew(make_cluster: MakeCluster) -> None:
    cluster = make_cluster()
    cluster.join(block_size=4)
    pinned(cluster)
    request = make_request("a", 14, 12, shared=12)
    cluster.submit(request)
    cluster.step()
    assert cluster.groups["a"].cached_prompt_tokens == 10
    reset(cluster)
    cluster.run()
    assert cluster.tokens["a"] == reference_tokens(request)
    assert kv_of(cluster).pinned.keys() == {"system"}
    assert kv_of(cluster).num_free + kv_of(cluster).num_pinned == kv_of(cluster).num_blocks


def test_a_prefix_that_is_half_computed_begins_again(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(max_num_batched_tokens=4, max_steps_in_flight=1)
    cluster.join(block_size=4)
    cluster.handle(PrefixPinned(Prefix("system", list(range(10)))))
    cluster.step()
    (half,) = (group for group in cluster.core.replicas[1].running if isinstance(group, PrefixGroup))
    reset(cluster)
    for _ in range(8):
        cluster.step()
    assert half.is_finished
    assert cluster.core.replicas[1].stats.tokens_computed == 4 + 10
    assert kv_of(cluster).pinned.keys() == {"system"}


# -- one salt ---------------------------------------------------------------------------------------------------------


def test_a_reset_of_one_salt_leaves_all_others(make_cluster: MakeCluster) -> None:
    cluster = make_cluster()
    cluster.join(block_size=4)
    pinned(cluster)
    salts = ("", "s", "t")
    run(cluster, *(make_request(f"first {salt}", 14, 2, shared=14, salt=salt) for salt in salts))
    found = reset(cluster, "s")
    assert (found.num_blocks, found.num_in_use, found.num_prefixes) == (3, 0, 0)
    assert kv_of(cluster).pinned.keys() == {"system"}
    again = {salt: cached(cluster, make_request(f"again {salt}", 14, 2, shared=14, salt=salt)) for salt in salts}
    assert again == {"": 12, "s": 0, "t": 12}
    assert reset(cluster, "nobody's") == CacheCounts(0, 0, 0)


def test_a_salt_counts_from_its_pinned_prefix_on(make_cluster: MakeCluster) -> None:
    cluster = make_cluster()
    cluster.join(block_size=4)
    pinned(cluster, 8)

    def naming(name: str) -> Request:
        request = make_request(name, 18, 2, shared=18)
        return msgspec.structs.replace(request, cache_key=CacheKey(salt="s", salted_from=8))

    assert cached(cluster, naming("a")) == 8
    assert cached(cluster, naming("b")) == 16
    assert reset(cluster, "s").num_blocks == 2
    assert cached(cluster, naming("c")) == 8


def test_what_comes_before_a_salt_is_found_after_its_reset_whoever_computed_it(make_cluster: MakeCluster) -> None:
    cluster = make_cluster()
    cluster.join(block_size=4)
    key = CacheKey(salt="s", salted_from=8)
    run(cluster, msgspec.structs.replace(make_request("a", 18, 2, shared=18), cache_key=key))
    assert reset(cluster, "s").num_blocks == 2
    assert cached(cluster, make_request("b", 18, 2, shared=18)) == 8


def test_who_runs_with_another_salt_is_found_after_the_reset_of_one(make_cluster: MakeCluster) -> None:
    cluster = make_cluster()
    cluster.join(block_size=4)
    requests = {salt: make_request(f"r {salt}", 9, 12, salt=salt) for salt in ("s", "t")}
    cluster.submit(*requests.values())
    cluster.step()
    assert reset(cluster, "s").num_in_use == 2
    cluster.run()
    for salt, num_found in (("s", 0), ("t", 16)):
        prompt = [*requests[salt].prompt_token_ids, *cluster.tokens[f"r {salt}"]][:18]
        assert cached(cluster, prompt_of(f"again {salt}", prompt, salt=salt)) == num_found


# -- around it --------------------------------------------------------------------------------------------------------


def test_a_frontend_that_asks_is_answered_with_what_went(make_cluster: MakeCluster) -> None:
    cluster = make_cluster()
    cluster.join(block_size=4)
    pinned(cluster)
    run(cluster, make_request("a", 17, 1))
    cluster.handle(CacheReset(None, FRONTEND, serial=7))
    (answer,) = (message for message in cluster.to_frontend if isinstance(message, PrefixCacheReset))
    assert answer == PrefixCacheReset(cluster.core.epoch, 7, 2 + 4, 2, 1)


def test_without_a_cache_and_without_workers_there_is_nothing_to_reset(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(prefix_caching=False)
    assert reset(cluster) == CacheCounts(0, 0, 0)
    cluster.join(block_size=4)
    cluster.submit(make_request("a", 9, 4))
    cluster.step()
    assert reset(cluster) == CacheCounts(0, 0, 0)
    cluster.run()
    assert cluster.tokens["a"] == reference_tokens(make_request("a", 9, 4))
    assert paged(cluster.core.replicas[1]).num_free == 64


def test_a_run_with_resets_is_replayed_plan_for_plan(make_cluster: MakeCluster) -> None:
    file = io.BytesIO()
    cluster = make_cluster(record=recorder(log_file(file)), max_num_batched_tokens=16, preemption=Preemption.SWAP)
    cluster.join(num_blocks=30, block_size=2, num_cpu_blocks=24)
    pinned(cluster, 5)
    for i in range(24):
        cluster.submit(make_request(f"r{i}", 4 + i % 6, 1 + i % 9, shared=4 + i % 3, salt="s" if i % 4 == 0 else ""))
        cluster.step()
        if i % 5 == 4:
            reset(cluster, "s" if i % 2 else None)
    cluster.run()
    file.seek(0)
    found = replay(read_records(file))
    assert found.difference is None
    assert found.plans > 24
