"""Prefixes that are computed once on every replica and kept under a name (paper §4.4)."""

import msgspec
import pytest

from octavo.scheduler.core.config import Preemption
from octavo.scheduler.core.events import FrontendJoined, PrefixesNamed, PrefixPinned, PrefixUnpinned, StepAnswered
from octavo.testing.cluster import FRONTEND, Cluster, make_request, reference_tokens, resubmitted
from octavo.wire.requests import (
    MAX_PREFIXES,
    CacheKey,
    PinRefused,
    Prefix,
    PrefixesChanged,
    RejectReason,
    Request,
    StatusChanged,
)
from octavo.wire.sampling import BeamSearch, EarlyStopping
from octavo.wire.steps import BlockMove

from ..conftest import MakeCluster
from ..views import cached_tokens, computed, kv_of, num_held, plans, sequence, table


def prefix_of(length: int, name: str = "system") -> Prefix:
    """The beginning of all requests with as many `shared` tokens."""
    return Prefix(name, list(range(length)))


def pin(cluster: Cluster, prefix: Prefix) -> None:
    """An operator pins a prefix, and every replica computes it."""
    assert cluster.core.pin_refusal(prefix) is None
    cluster.handle(PrefixPinned(prefix))
    settle(cluster)


def unpin(cluster: Cluster, name: str = "system") -> None:
    cluster.handle(PrefixUnpinned(name))


def name_prefixes(cluster: Cluster, *prefixes: Prefix) -> None:
    """A frontend tells of the prefixes that it knows."""
    cluster.handle(PrefixesNamed(FRONTEND, list(prefixes)))


def naming(length: int, request: Request) -> Request:
    """The request as it continues a prefix of this length, which its salt does not count for."""
    key = msgspec.structs.replace(request.cache_key, salted_from=length)
    return msgspec.structs.replace(request, cache_key=key)


def settle(cluster: Cluster, steps: int = 12) -> None:
    for _ in range(steps):
        cluster.step()


def run(cluster: Cluster, *requests: Request) -> None:
    cluster.submit(*requests)
    cluster.run()


def told(cluster: Cluster) -> list[list[str]]:
    """The names of all prefixes, each time that the frontend was told."""
    messages = (message for message in cluster.to_frontend if isinstance(message, PrefixesChanged))
    return [[prefix.name for prefix in message.prefixes] for message in messages]


def capacities(cluster: Cluster) -> list[int]:
    messages = (message for message in cluster.to_frontend if isinstance(message, StatusChanged))
    return [message.status.capacity_tokens for message in messages]


def refusals(cluster: Cluster) -> list[PinRefused]:
    return [message for message in cluster.to_frontend if isinstance(message, PinRefused)]


class TestPinning:
    def test_every_replica_computes_a_prefix_once_and_finds_it_ever_after(self, make_cluster: MakeCluster) -> None:
        cluster = make_cluster(max_num_batched_tokens=16)
        replicas = [cluster.join(incarnation, num_blocks=64, block_size=4) for incarnation in (1, 2)]
        pin(cluster, prefix_of(40))
        assert [computed(replica) for replica in replicas] == [[16, 16, 8]] * 2
        assert [kv_of(cluster, incarnation).num_pinned for incarnation in (1, 2)] == [10, 10]
        requests = [make_request(f"r{i}", 44, 3, shared=40) for i in range(6)]
        run(cluster, *requests)
        assert cluster.tokens == {request.request_id: reference_tokens(request) for request in requests}
        assert set(cached_tokens(cluster).values()) == {40}
        # Nothing but their own four tokens and what they generated.
        assert sum(map(sum, map(computed, replicas))) == 2 * 40 + 6 * (4 + 2)

    def test_what_is_cached_already_is_not_computed_again(self, make_cluster: MakeCluster) -> None:
        cluster = make_cluster()
        replica = cluster.join(block_size=4)
        run(cluster, make_request("r", 24, 1, shared=24))
        pin(cluster, prefix_of(20))
        assert computed(replica) == [24, 4]

    def test_frontends_are_told_of_every_change_and_when_they_join(self, make_cluster: MakeCluster) -> None:
        cluster = make_cluster()
        cluster.join()
        pin(cluster, prefix_of(8, "a"))
        pin(cluster, prefix_of(12, "b"))
        unpin(cluster, "a")
        assert told(cluster) == [[], ["a"], ["a", "b"], ["b"]]
        cluster.handle(FrontendJoined(FRONTEND))
        assert told(cluster)[-1] == ["b"]
        assert cluster.core.prefixes.all == [prefix_of(12, "b")]

    def test_a_prefix_is_computed_before_what_came_earlier(self, make_cluster: MakeCluster) -> None:
        cluster = make_cluster(max_num_batched_tokens=8, max_steps_in_flight=1)
        replica = cluster.join(block_size=4)
        cluster.submit(make_request("early", 20, 2, shared=12))
        cluster.handle(PrefixPinned(prefix_of(12)))
        cluster.step()
        assert [start.prompt_token_ids for start in plans(replica)[0].starts] == [list(range(12))]
        cluster.run()
        assert cached_tokens(cluster) == {"early": 12}

    def test_a_pinned_prefix_survives_whatever_presses_on_the_pool(self, make_cluster: MakeCluster) -> None:
        cluster = make_cluster(watermark=0.0)
        cluster.join(num_blocks=24, block_size=4)
        pin(cluster, prefix_of(18))
        for i in range(8):
            run(cluster, make_request(f"large{i}", 50, 26))
        run(cluster, make_request("r", 20, 3, shared=18))
        assert cached_tokens(cluster)["r"] == 18
        assert set(cached_tokens(cluster).values()) == {0, 18}

    def test_its_own_blocks_are_found_though_another_request_filled_the_same_first(
        self, make_cluster: MakeCluster
    ) -> None:
        cluster = make_cluster(max_num_batched_tokens=8, max_steps_in_flight=1, watermark=0.0)
        cluster.join(num_blocks=24, block_size=4)
        cluster.submit(make_request("first", 12, 1, shared=12))
        cluster.step()
        # Both compute the third block in one step, and the other's is the one to be found.
        pin(cluster, prefix_of(12))
        run(cluster, *(make_request(f"large{i}", 40, 36) for i in range(3)))
        run(cluster, make_request("r", 14, 1, shared=12))
        assert cached_tokens(cluster)["r"] == 12

    def test_it_does_not_while_nobody_pins_it(self, make_cluster: MakeCluster) -> None:
        cluster = make_cluster(watermark=0.0)
        cluster.join(num_blocks=24, block_size=4)
        run(cluster, make_request("first", 20, 3, shared=18))
        for i in range(8):
            run(cluster, make_request(f"large{i}", 50, 26))
        run(cluster, make_request("r", 20, 3, shared=18))
        assert cached_tokens(cluster)["r"] == 0

    @pytest.mark.parametrize("windows", [(0,), (6,), (0, 6), (4, 9), (5,), (2,)], ids=str)
    @pytest.mark.parametrize("length", range(7, 18))
    def test_it_survives_in_every_kv_group(
        self, make_cluster: MakeCluster, windows: tuple[int, ...], length: int
    ) -> None:
        cluster = make_cluster(max_steps_in_flight=1, max_num_batched_tokens=9)
        cluster.join(num_blocks=24 * len(windows), block_size=4, windows=windows)
        pin(cluster, prefix_of(length))
        for i in range(3):
            run(cluster, make_request(f"large{i}", 30, 36))
        request = make_request("r", length + 3, 4, shared=length)
        run(cluster, request)
        assert cached_tokens(cluster)["r"] == length
        fresh = make_cluster()
        fresh.join(windows=windows)
        run(fresh, request)
        assert cluster.tokens["r"] == fresh.tokens["r"]

    def test_two_prefixes_with_one_beginning_share_its_blocks(self, make_cluster: MakeCluster) -> None:
        cluster = make_cluster()
        replica = cluster.join(block_size=4)
        pin(cluster, prefix_of(10, "short"))
        pin(cluster, prefix_of(18, "long"))
        # Two full blocks are common, and the short one's tail saves two tokens more.
        assert computed(replica) == [10, 8]
        assert kv_of(cluster).num_pinned == 3 + 3
        unpin(cluster, "short")
        run(cluster, *(make_request(f"large{i}", 100, 28) for i in range(3)))
        run(cluster, make_request("r", 20, 1, shared=18))
        assert cached_tokens(cluster)["r"] == 18


class TestPartlyFilledLastBlock:
    def test_is_copied_by_everyone_who_goes_on_from_it(self, make_cluster: MakeCluster) -> None:
        cluster = make_cluster(max_steps_in_flight=1)
        replica = cluster.join(block_size=4)
        pin(cluster, prefix_of(10))
        kv, steps = kv_of(cluster), len(plans(replica))
        (full, other, tail) = (block_id for block_id in range(64) if kv.ref_count(block_id))
        requests = [make_request(f"r{i}", 13, 3, shared=10) for i in range(2)]
        cluster.submit(*requests)
        cluster.step()
        plan = plans(replica)[steps]
        tables = [table(cluster, request.request_id) for request in requests]
        assert [blocks[:2] for blocks in tables] == [[full, other]] * 2
        assert plan.moves.copy == [BlockMove(tail, blocks[2]) for blocks in tables]
        assert [start.num_computed for start in plan.starts] == [10, 10]
        assert [kv.ref_count(block_id) for block_id in (full, other, tail)] == [3, 3, 1]
        cluster.run()
        assert cluster.tokens == {request.request_id: reference_tokens(request) for request in requests}
        assert cached_tokens(cluster) == {"r0": 10, "r1": 10}

    @pytest.mark.parametrize(
        ("prompt_length", "shared", "found"),
        [
            # The prefix and nothing more: its last token must be computed for its logits.
            (10, 10, 8),
            (11, 10, 10),
            # Not the whole tail.
            (11, 9, 8),
            (9, 9, 8),
            (8, 8, 4),
        ],
    )
    def test_counts_only_where_the_whole_of_it_goes_on(
        self, make_cluster: MakeCluster, prompt_length: int, shared: int, found: int
    ) -> None:
        cluster = make_cluster()
        cluster.join(block_size=4)
        pin(cluster, prefix_of(10))
        request = make_request("r", prompt_length, 3, shared=shared)
        run(cluster, request)
        assert cached_tokens(cluster) == {"r": found}
        assert cluster.tokens["r"] == reference_tokens(request)

    def test_is_no_beginning_of_its_own(self, make_cluster: MakeCluster) -> None:
        cluster = make_cluster()
        cluster.join(block_size=4)
        pin(cluster, prefix_of(10))
        request = msgspec.structs.replace(make_request("r", 1, 3), prompt_token_ids=[8, 9, 10, 11])
        run(cluster, request)
        assert cached_tokens(cluster) == {"r": 0}
        assert cluster.tokens["r"] == reference_tokens(request)

    def test_of_the_longest_prefix_is_taken(self, make_cluster: MakeCluster) -> None:
        cluster = make_cluster()
        cluster.join(block_size=8)
        for length in (10, 13, 11):
            pin(cluster, prefix_of(length, f"of {length}"))
        run(cluster, make_request("r", 15, 1, shared=15), make_request("other", 13, 1, shared=12))
        assert cached_tokens(cluster) == {"r": 13, "other": 11}

    def test_of_a_prefix_shorter_than_a_block_is_found(self, make_cluster: MakeCluster) -> None:
        cluster = make_cluster()
        cluster.join(block_size=16)
        pin(cluster, prefix_of(5))
        request = make_request("r", 7, 3, shared=5)
        run(cluster, request)
        assert cached_tokens(cluster) == {"r": 5}
        assert cluster.tokens["r"] == reference_tokens(request)

    @pytest.mark.parametrize("window", [2, 3, 4, 5, 6])
    def test_leaves_those_who_go_on_from_it_no_block_that_their_window_has_passed(
        self, make_cluster: MakeCluster, window: int
    ) -> None:
        """Else a worker would keep it in its table when it has long been somebody else's."""
        cluster = make_cluster(max_steps_in_flight=1, prefix_caching=False)
        replica = cluster.join(num_blocks=16, block_size=4, windows=(window,))
        pin(cluster, prefix_of(7))
        cluster.submit(make_request("r", 8, 20, shared=7))
        cluster.step()
        unpin(cluster)
        for _ in range(18):
            cluster.step()
            (known,) = replica.table
            assert known.block_tables == kv_of(cluster).block_table(sequence(cluster, "r"))
        cluster.run()

    def test_serves_samples_and_beams(self, make_cluster: MakeCluster) -> None:
        sampled = make_request("sampled", 13, 6, shared=10, num_sequences=3, temperature=1.0)
        beams = make_request("beams", 12, 6, shared=10, num_sequences=2, beam=BeamSearch(3, 1.0, EarlyStopping.NEVER))
        outputs = []
        for pinned in (True, False):
            cluster = make_cluster()
            cluster.join(block_size=4)
            if pinned:
                pin(cluster, prefix_of(10))
            run(cluster, sampled, beams)
            outputs.append([cluster.outputs(name) for name in ("sampled", "beams")])
            assert set(cached_tokens(cluster).values()) == ({10} if pinned else {0, 8})
        assert outputs[0] == outputs[1]


class TestRefusals:
    def test_a_budget_bounds_all_pins_together(self, make_cluster: MakeCluster) -> None:
        cluster = make_cluster(max_pinned_share=0.25)
        cluster.join(num_blocks=40, block_size=4)
        pin(cluster, prefix_of(24, "a"))
        refusal = cluster.core.pin_refusal(prefix_of(17, "b"))
        assert refusal is not None
        assert "takes 5 blocks" in refusal
        assert "10 of 40 blocks with 6 taken" in refusal
        assert "--max-pinned-share" in refusal
        assert cluster.core.pin_refusal(prefix_of(16, "b")) is None
        unpin(cluster, "a")
        assert cluster.core.pin_refusal(prefix_of(40, "b")) is None

    def test_the_smallest_replicas_budget_counts(self, make_cluster: MakeCluster) -> None:
        cluster = make_cluster(max_pinned_share=0.5)
        cluster.join(1, num_blocks=64, block_size=4)
        cluster.join(2, num_blocks=8, block_size=4)
        refusal = cluster.core.pin_refusal(prefix_of(20))
        assert refusal is not None
        assert "worker-2" in refusal

    def test_one_name_stands_for_one_prefix(self, make_cluster: MakeCluster) -> None:
        cluster = make_cluster()
        cluster.join()
        pin(cluster, prefix_of(8))
        refusal = cluster.core.pin_refusal(prefix_of(9))
        assert refusal is not None
        assert "'system' is pinned already" in refusal

    @pytest.mark.parametrize(
        ("token_ids", "reason"),
        [(list(range(100)), "no room in the context"), ([1, 2, 1000], "outside the vocabulary")],
    )
    def test_what_the_model_cannot_take_is_refused(
        self, make_cluster: MakeCluster, token_ids: list[int], reason: str
    ) -> None:
        cluster = make_cluster()
        replica = cluster.join()
        cluster.core.replica_table.model = msgspec.structs.replace(replica.hello.model, max_model_len=101)
        refusal = cluster.core.pin_refusal(Prefix("bad", token_ids))
        assert refusal is not None
        assert reason in refusal
        assert cluster.core.pin_refusal(prefix_of(99)) is None

    def test_there_is_a_limit_to_their_number(self, make_cluster: MakeCluster) -> None:
        cluster = make_cluster()
        for i in range(MAX_PREFIXES):
            cluster.handle(PrefixPinned(Prefix(f"p{i}", [i])))
        refusal = cluster.core.pin_refusal(Prefix("one more", [1]))
        assert refusal is not None
        assert "256 prefixes are pinned" in refusal

    @pytest.mark.parametrize("steps", [0, 3])
    def test_nobody_who_was_accepted_is_left_without_the_blocks_he_may_need(
        self, make_cluster: MakeCluster, steps: int
    ) -> None:
        cluster = make_cluster()
        cluster.join(num_blocks=16, block_size=4)
        request = make_request("large", 10, 46)
        cluster.submit(request)
        for _ in range(steps):
            cluster.step()
        refusal = cluster.core.pin_refusal(prefix_of(12))
        assert refusal is not None
        assert "request large may need the blocks" in refusal
        assert cluster.core.pin_refusal(prefix_of(8)) is None
        pin(cluster, prefix_of(8))
        cluster.run()
        assert cluster.tokens["large"] == reference_tokens(request)
        assert cluster.core.pin_refusal(prefix_of(12, "another")) is None

    def test_a_frontends_prefix_is_refused_by_name(self, make_cluster: MakeCluster) -> None:
        cluster = make_cluster(max_pinned_share=0.25)
        cluster.join(num_blocks=16, block_size=4)
        name_prefixes(cluster, prefix_of(17, "large"), prefix_of(16, "fits"), prefix_of(8, "late"))
        assert [refused.name for refused in refusals(cluster)] == ["large", "late"]
        assert told(cluster)[-1] == ["fits"]


class TestCapacity:
    def test_shrinks_and_grows_and_is_told(self, make_cluster: MakeCluster) -> None:
        cluster = make_cluster()
        cluster.join(num_blocks=20, block_size=4)
        pin(cluster, prefix_of(18))
        unpin(cluster)
        assert capacities(cluster) == [80, 60, 80]

    def test_of_an_empty_replica_with_a_pin_decides_what_can_never_fit(self, make_cluster: MakeCluster) -> None:
        cluster = make_cluster()
        cluster.join(num_blocks=20, block_size=4)
        pin(cluster, prefix_of(18))
        fits, too_large = make_request("fits", 40, 20), make_request("too large", 40, 21)
        run(cluster, fits, too_large)
        assert cluster.rejected.keys() == {"too large"}
        assert cluster.rejected["too large"].reason is RejectReason.NEVER_FITS_KV
        assert cluster.tokens["fits"] == reference_tokens(fits)

    def test_a_prefix_that_is_being_computed_is_never_preempted(self, make_cluster: MakeCluster) -> None:
        cluster = make_cluster(max_num_batched_tokens=4, watermark=0.0, preemption=Preemption.SWAP)
        replica = cluster.join(num_blocks=20, block_size=4, num_cpu_blocks=20)
        requests = [make_request(f"r{i}", 3, 30) for i in range(3)]
        cluster.submit(*requests)
        settle(cluster, 16)
        cluster.handle(PrefixPinned(prefix_of(28)))
        cluster.run()
        settle(cluster)
        starts = [
            start for plan in plans(replica) for start in plan.starts if start.prompt_token_ids[:28] == [*range(28)]
        ]
        assert len(starts) == 1
        assert cluster.core.preemptions > 0
        assert cluster.tokens == {request.request_id: reference_tokens(request) for request in requests}
        assert kv_of(cluster).num_pinned == 7


class TestUnpinning:
    def test_leaves_ordinary_cached_blocks(self, make_cluster: MakeCluster) -> None:
        cluster = make_cluster(watermark=0.0)
        cluster.join(num_blocks=24, block_size=4)
        pin(cluster, prefix_of(18))
        unpin(cluster)
        assert num_held(cluster) == 0
        run(cluster, make_request("soon", 20, 1, shared=18))
        for i in range(4):
            run(cluster, make_request(f"large{i}", 60, 30))
        run(cluster, make_request("late", 20, 1, shared=18))
        found = cached_tokens(cluster)
        assert (found["soon"], found["late"]) == (16, 0)

    def test_does_not_disturb_those_who_use_it(self, make_cluster: MakeCluster) -> None:
        cluster = make_cluster()
        cluster.join(num_blocks=24, block_size=4)
        pin(cluster, prefix_of(18))
        request = make_request("r", 20, 12, shared=18)
        cluster.submit(request)
        cluster.schedule()
        unpin(cluster)
        cluster.submit(*(make_request(f"o{i}", 30, 10) for i in range(2)))
        cluster.run()
        assert cluster.tokens["r"] == reference_tokens(request)
        assert num_held(cluster) == 0

    @pytest.mark.parametrize("in_flight", [1, 2])
    @pytest.mark.parametrize("steps", range(5))
    def test_while_it_is_computed_leaves_nothing_once_the_steps_are_answered(
        self, make_cluster: MakeCluster, in_flight: int, steps: int
    ) -> None:
        cluster = make_cluster(max_num_batched_tokens=8, max_steps_in_flight=in_flight)
        cluster.join(block_size=4)
        cluster.handle(PrefixPinned(prefix_of(30)))
        for _ in range(steps):
            cluster.step()
        cluster.schedule()
        unpin(cluster)
        settle(cluster)
        assert num_held(cluster) == 0
        assert kv_of(cluster).num_usable == kv_of(cluster).num_blocks
        pin(cluster, prefix_of(30))
        assert kv_of(cluster).num_pinned == 8

    def test_before_any_worker_came_leaves_nothing(self, make_cluster: MakeCluster) -> None:
        cluster = make_cluster()
        cluster.handle(PrefixPinned(prefix_of(30)))
        unpin(cluster)
        replica = cluster.join()
        settle(cluster)
        assert plans(replica) == []


class TestReplicas:
    def test_one_that_joins_later_computes_what_is_pinned(self, make_cluster: MakeCluster) -> None:
        cluster = make_cluster()
        cluster.join(1)
        pin(cluster, prefix_of(10, "a"))
        pin(cluster, prefix_of(6, "b"))
        later = cluster.join(2)
        settle(cluster)
        assert sum(computed(later)) == 10 + 6 - 4
        assert all(name in kv_of(cluster, 2).pinned for name in ("a", "b"))

    def test_one_with_too_small_a_budget_serves_without(self, make_cluster: MakeCluster) -> None:
        cluster = make_cluster()
        cluster.join(1)
        pin(cluster, prefix_of(40, "large"))
        pin(cluster, prefix_of(6, "small"))
        cluster.join(2, num_blocks=16)
        settle(cluster)
        assert [name in kv_of(cluster, 2).pinned for name in ("large", "small")] == [False, True]
        cluster.leave(1)
        request = make_request("r", 44, 4, shared=40)
        run(cluster, request)
        assert cluster.tokens["r"] == reference_tokens(request)
        unpin(cluster, "large")
        assert kv_of(cluster, 2).num_blocks - kv_of(cluster, 2).num_usable == 2

    @pytest.mark.parametrize("steps", range(4))
    def test_a_loss_concerns_no_other_replica(self, make_cluster: MakeCluster, steps: int) -> None:
        cluster = make_cluster(max_num_batched_tokens=8)
        cluster.join(1)
        cluster.join(2)
        cluster.handle(PrefixPinned(prefix_of(22)))
        request = make_request("r", 24, 6, shared=22)
        cluster.submit(request)
        for _ in range(steps):
            cluster.step()
        cluster.schedule()
        cluster.leave(1)
        cluster.run()
        settle(cluster)
        assert "system" in kv_of(cluster, 2).pinned
        assert cluster.tokens["r"] == reference_tokens(request)
        third = cluster.join(3)
        settle(cluster)
        assert sum(computed(third)) == 22

    @pytest.mark.parametrize("failing", range(3))
    @pytest.mark.parametrize("in_flight", [1, 2])
    def test_a_failed_step_has_it_computed_again(self, make_cluster: MakeCluster, failing: int, in_flight: int) -> None:
        cluster = make_cluster(max_num_batched_tokens=8, max_steps_in_flight=in_flight)
        cluster.join()
        cluster.handle(PrefixPinned(prefix_of(22)))
        request = make_request("r", 24, 6, shared=22)
        cluster.submit(request)
        for step in range(failing + 1):
            cluster.step(fail=step == failing)
        settle(cluster, 20)
        assert "system" in kv_of(cluster).pinned
        assert cluster.tokens["r"] == reference_tokens(request)

    def test_steps_that_keep_failing_give_it_up_and_serve_on(self, make_cluster: MakeCluster) -> None:
        cluster = make_cluster(max_failed_steps=3, max_steps_in_flight=1)
        replica = cluster.join()
        cluster.handle(PrefixPinned(prefix_of(22)))
        for _ in range(3):
            cluster.step(fail=True)
        request = make_request("r", 24, 6, shared=22)
        run(cluster, request)
        assert len(plans(replica)) == 3 + 6
        assert "system" not in kv_of(cluster).pinned
        assert [each.name for each in cluster.given_up] == ["system"]
        assert capacities(cluster)[-1] == kv_of(cluster).num_blocks * kv_of(cluster).block_size
        unpin(cluster)
        assert cluster.tokens["r"] == reference_tokens(request)

    def test_what_came_before_any_worker_and_does_not_suit_its_model_is_not_computed(
        self, make_cluster: MakeCluster
    ) -> None:
        cluster = make_cluster()
        cluster.handle(PrefixPinned(Prefix("foreign", [1, 2, 1000])))
        request = make_request("r", 5, 4)
        cluster.submit(request)
        cluster.join()
        cluster.run()
        assert cluster.tokens["r"] == reference_tokens(request)
        assert "foreign" not in kv_of(cluster).pinned


class TestNamedByFrontends:
    def test_prefixes_come_back_to_a_new_scheduler(self, make_cluster: MakeCluster) -> None:
        """FrontendLeases and workers find a scheduler that knows nothing, and come in any order."""
        prefixes = [prefix_of(10, "a"), prefix_of(18, "b")]
        cluster = make_cluster()
        request = make_request("r", 20, 6, shared=18)
        cluster.submit(resubmitted(request, reference_tokens(request)[:2]))
        name_prefixes(cluster, *prefixes)
        cluster.join()
        cluster.run()
        settle(cluster)
        assert refusals(cluster) == []
        assert cluster.core.prefixes.all == prefixes
        assert kv_of(cluster).num_pinned == 2 + 1 + 3
        assert cluster.tokens["r"] == reference_tokens(request)

    def test_those_that_are_pinned_already_are_left_alone(self, make_cluster: MakeCluster) -> None:
        cluster = make_cluster()
        replica = cluster.join()
        pin(cluster, prefix_of(10))
        heard = len(cluster.to_frontend)
        name_prefixes(cluster, prefix_of(10))
        settle(cluster)
        assert len(cluster.to_frontend) == heard
        assert computed(replica) == [10]

    def test_another_text_under_a_known_name_is_refused(self, make_cluster: MakeCluster) -> None:
        cluster = make_cluster()
        cluster.join()
        pin(cluster, prefix_of(10))
        name_prefixes(cluster, prefix_of(11))
        assert [refused.name for refused in refusals(cluster)] == ["system"]
        assert cluster.core.prefixes.all == [prefix_of(10)]


class TestWhoMayUseIt:
    def test_it_serves_though_caching_is_off_and_nothing_else_is_shared(self, make_cluster: MakeCluster) -> None:
        cluster = make_cluster(prefix_caching=False)
        replica = cluster.join(block_size=4)
        pin(cluster, prefix_of(10))
        for name in ("first", "again"):
            run(cluster, make_request(name, 20, 1, shared=18))
        assert cached_tokens(cluster) == {"first": 10, "again": 10}
        assert computed(replica) == [10, 10, 10]
        unpin(cluster)
        run(cluster, make_request("late", 20, 1, shared=18))
        assert cached_tokens(cluster)["late"] == 0
        assert kv_of(cluster).num_cached == 0

    def test_a_failed_request_for_it_leaves_nothing_to_be_found_where_caching_is_off(
        self, make_cluster: MakeCluster
    ) -> None:
        cluster = make_cluster(prefix_caching=False, max_steps_in_flight=1, max_num_batched_tokens=8)
        replica = cluster.join(block_size=4)
        cluster.handle(PrefixPinned(prefix_of(16)))
        cluster.schedule()
        unpin(cluster)
        cluster.handle(StepAnswered(1, replica.execute()))
        assert kv_of(cluster).num_cached == 0

    @pytest.mark.parametrize("key", [CacheKey(salt="secret"), CacheKey(adapter="tuned")])
    def test_not_those_with_a_salt_or_an_adapter(self, make_cluster: MakeCluster, key: CacheKey) -> None:
        cluster = make_cluster()
        cluster.join()
        pin(cluster, prefix_of(10))
        request = msgspec.structs.replace(make_request("r", 12, 3, shared=10), cache_key=key)
        run(cluster, request)
        assert cached_tokens(cluster) == {"r": 0}
        assert cluster.tokens["r"] == reference_tokens(request)

    @pytest.mark.parametrize("length", [2, 8, 10])
    @pytest.mark.parametrize("prefix_caching", [True, False])
    def test_those_who_name_it_whatever_their_salt(
        self, make_cluster: MakeCluster, length: int, prefix_caching: bool
    ) -> None:
        cluster = make_cluster(prefix_caching=prefix_caching)
        cluster.join(block_size=4)
        pin(cluster, prefix_of(length))
        requests = [naming(length, make_request(name, 20, 3, shared=18, salt=name)) for name in ("a", "b")]
        run(cluster, *requests)
        assert cached_tokens(cluster) == {"a": length, "b": length}
        assert cluster.tokens == {request.request_id: reference_tokens(request) for request in requests}

    @pytest.mark.parametrize("length", [2, 8, 10])
    def test_behind_it_only_equal_salts_meet(self, make_cluster: MakeCluster, length: int) -> None:
        cluster = make_cluster()
        cluster.join(block_size=4)
        pin(cluster, prefix_of(length))
        for name, salt in (("first", "mine"), ("other", "theirs"), ("again", "mine"), ("none", "")):
            run(cluster, naming(length, make_request(name, 20, 1, shared=18, salt=salt)))
        assert cached_tokens(cluster) == {"first": length, "other": length, "again": 16, "none": length}

    def test_a_salted_request_finds_no_longer_prefix_than_the_one_it_names(self, make_cluster: MakeCluster) -> None:
        cluster = make_cluster()
        cluster.join(block_size=4)
        pin(cluster, prefix_of(8))
        pin(cluster, prefix_of(10, "longer"))
        run(cluster, *(naming(8, make_request(f"r{salt}", 20, 1, shared=18, salt=salt)) for salt in ("", "salt")))
        assert cached_tokens(cluster) == {"r": 10, "rsalt": 8}

    def test_not_those_who_want_prompt_logprobs(self, make_cluster: MakeCluster) -> None:
        cluster = make_cluster()
        cluster.join()
        pin(cluster, prefix_of(10))
        run(cluster, make_request("r", 12, 3, shared=10, prompt_logprobs=0))
        assert cached_tokens(cluster) == {"r": 0}
        assert len(cluster.deltas["r", 0][0].prompt_logprobs) == 11

    def test_those_who_come_back_after_a_preemption(self, make_cluster: MakeCluster) -> None:
        cluster = make_cluster(max_steps_in_flight=1)
        replica = cluster.join(block_size=4)
        pin(cluster, prefix_of(10))
        request = make_request("r", 11, 8, shared=10)
        cluster.submit(request)
        cluster.step()
        known = sequence(cluster, "r").num_known
        cluster.step(fail=True)
        cluster.run()
        again = [start for plan in plans(replica) for start in plan.starts][-1]
        assert (known, again.num_computed) == (12, 10)
        assert cluster.tokens["r"] == reference_tokens(request)
