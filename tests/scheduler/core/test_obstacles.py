"""Room for a request: now, later or never; and room for one more token of what runs."""

from typing import Any

import pytest

from octavo.scheduler.core.admission import Obstacle, ObstacleKind, start_obstacle
from octavo.scheduler.core.config import Preemption
from octavo.scheduler.core.sequence import Sequence, new_sequences
from octavo.scheduler.core.step.builder import StepBuilder
from octavo.scheduler.kv.manager import KVCacheManager
from octavo.testing.cluster import Cluster, make_request
from octavo.testing.scenarios import beams, drain, end_sequence, ids, step_until
from octavo.wire.requests import RejectReason, Request

from ..conftest import MakeCluster
from ..views import group_of

BLOCK = 4


def sequence(name: str, num_tokens: int) -> Sequence:
    return new_sequences(make_request(name, num_tokens, max_tokens=99))[0]


def decoding(kv: KVCacheManager, num_tokens: int, num_forks: int = 0) -> list[Sequence]:
    """A sequence with `num_tokens` tokens computed and the next one known, and forks of it that have another."""
    first = sequence("decoding", num_tokens)
    kv.allocate(group_of(first), 1)
    first.placement.num_computed = num_tokens
    forks = [first.fork(index + 1) for index in range(num_forks)]
    for index, each in enumerate((first, *forks)):
        if each is not first:
            kv.fork(first, each)
        each.append(index)
    return [first, *forks]


def can_start(kv: KVCacheManager, num_tokens: int) -> bool:
    """Whether a prompt of so many tokens gets its blocks."""
    return start_obstacle(kv, group_of(sequence("r", num_tokens))) is None


class TestCanAllocate:
    """Of 8 blocks, 2 are to stay free while others run."""

    @pytest.mark.parametrize(("num_blocks", "fits"), [(5, True), (6, False)])
    def test_leaves_the_watermark_free_beside_others(self, num_blocks: int, fits: bool) -> None:
        kv = KVCacheManager(8, BLOCK, watermark=0.25)
        kv.allocate(group_of(sequence("other", BLOCK)), 1)
        assert can_start(kv, num_blocks * BLOCK) is fits

    @pytest.mark.parametrize(("num_blocks", "fits"), [(8, True), (9, False)])
    def test_a_request_that_is_alone_may_have_all(self, num_blocks: int, fits: bool) -> None:
        kv = KVCacheManager(8, BLOCK, watermark=0.25)
        assert can_start(kv, num_blocks * BLOCK) is fits

    def test_every_kv_group_needs_its_own_blocks(self) -> None:
        kv = KVCacheManager(8, BLOCK, windows=(0, 16))
        assert can_start(kv, 4 * BLOCK)
        assert not can_start(kv, 4 * BLOCK + 1)

    def test_what_others_hold_costs_nothing_and_what_nobody_holds_is_taken(self) -> None:
        """3 full blocks are known. Held by another, they leave all others free; held by nobody, they are 3 fewer."""
        kv = KVCacheManager(8, BLOCK)
        first = sequence("same", 3 * BLOCK + 1)
        kv.allocate(group_of(first), 1)
        first.placement.num_computed = 3 * BLOCK + 1
        kv.index(first, step_id=1)
        kv.step_answered(1, valid=True)
        assert kv.num_needed(group_of(sequence("same", 3 * BLOCK + 1))) == 1
        kv.free(first)
        assert kv.num_needed(group_of(sequence("same", 3 * BLOCK + 1))) == 4


class TestCanAppend:
    """What one more token each costs: a block where the last is full, a copy where it is shared."""

    @pytest.mark.parametrize(
        ("num_tokens", "num_forks", "missing"),
        [
            pytest.param(6, 0, 0, id="own-slot"),
            pytest.param(8, 0, 1, id="full-block"),
            pytest.param(6, 1, 1, id="the-last-holder-writes-in-place"),
            pytest.param(6, 3, 3, id="one-copy-for-each-but-the-last"),
            pytest.param(8, 3, 4, id="shared-and-full"),
        ],
    )
    @pytest.mark.parametrize("windows", [(0,), (0, 64)])
    def test_is_what_extending_takes(
        self, num_tokens: int, num_forks: int, missing: int, windows: tuple[int, ...]
    ) -> None:
        kv = KVCacheManager(32, BLOCK, windows=windows)
        sequences = decoding(kv, num_tokens, num_forks)
        free = kv.num_free
        assert kv.num_missing(sequences) == missing * len(windows)
        for each in sequences:
            kv.extend(each)
        assert free - kv.num_free == missing * len(windows)

    def test_a_holder_that_does_not_write_keeps_what_it_has(self) -> None:
        """Of three holders two go on: both must copy."""
        kv = KVCacheManager(32, BLOCK)
        _, *writers = decoding(kv, num_tokens=6, num_forks=2)
        assert kv.num_missing(writers) == 2

    def test_adds_up_over_groups(self) -> None:
        kv = KVCacheManager(32, BLOCK)
        assert kv.num_missing(decoding(kv, 8) + decoding(kv, 6, 2) + decoding(kv, 5)) == 1 + 2 + 0


class TestWorstCase:
    """A request is judged by what it can grow to if nothing is shared: 16 tokens, 4 blocks, for each sequence."""

    @pytest.mark.parametrize(
        ("decoding", "num_blocks"),
        [
            ({}, 4),
            ({"num_sequences": 4, "temperature": 1.0}, 16),
            ({"num_sequences": 1, "beam": beams(4)}, 16),
        ],
        ids=["one", "n", "beam"],
    )
    def test_is_refused_at_one_block_less(
        self, make_cluster: MakeCluster, decoding: dict[str, Any], num_blocks: int
    ) -> None:
        for available in (num_blocks, num_blocks - 1):
            cluster = make_cluster()
            cluster.join(num_blocks=available, block_size=BLOCK)
            cluster.submit(make_request("r", 6, max_tokens=10, **decoding))
            cluster.run()
            refused = available < num_blocks
            assert ("r" in cluster.rejected) == refused
            assert ("r" in cluster.finished) != refused
        assert cluster.rejected["r"].reason is RejectReason.NEVER_FITS_KV
        assert "16 tokens" in cluster.rejected["r"].detail

    @pytest.mark.parametrize("limits", [{"max_num_seqs": 3}, {"max_num_batched_tokens": 3}])
    def test_more_sequences_than_a_step_can_take_are_refused(
        self, make_cluster: MakeCluster, limits: dict[str, int]
    ) -> None:
        cluster = make_cluster(**limits)
        cluster.join()
        cluster.submit(make_request("three", 2, 2, num_sequences=3), make_request("four", 2, 2, num_sequences=4))
        cluster.run()
        assert cluster.rejected["four"].reason is RejectReason.TOO_MANY_SEQUENCES
        assert "three" in cluster.finished


class TestObstacle:
    """What keeps a waiting group out of a step is said with numbers."""

    @staticmethod
    def reason(cluster: Cluster, request: Request, budget: int = 32) -> Obstacle | None:
        cluster.submit(request)
        return StepBuilder(cluster.core.replicas[1], budget).obstacle(cluster.groups[request.request_id])

    def test_none(self, make_cluster: MakeCluster) -> None:
        cluster = make_cluster()
        cluster.join()
        assert self.reason(cluster, make_request("r", 5, 5)) is None

    def test_sequence_slots(self, make_cluster: MakeCluster) -> None:
        cluster = make_cluster(max_num_seqs=4)
        cluster.join()
        cluster.submit(make_request("other", 3, 9, num_sequences=2))
        cluster.step()
        wanted = Obstacle(ObstacleKind.SEQUENCE_SLOTS, needed=3, available=2)
        assert self.reason(cluster, make_request("r", 5, 5, num_sequences=3)) == wanted

    def test_token_budget(self, make_cluster: MakeCluster) -> None:
        cluster = make_cluster()
        cluster.join()
        wanted = Obstacle(ObstacleKind.TOKEN_BUDGET, needed=1, available=0)
        assert self.reason(cluster, make_request("r", 5, 5), budget=0) == wanted

    @pytest.mark.parametrize(("reserved", "worst_case"), [(0, 9), (3, 6)])
    def test_capacity(self, make_cluster: MakeCluster, reserved: int, worst_case: int) -> None:
        """What grows beyond all 8 blocks but the pinned ones never runs."""
        cluster = make_cluster()
        cluster.join(num_blocks=8, block_size=BLOCK)
        cluster.core.replicas[1].kv.reserve("p", reserved * BLOCK)
        fits, never = (make_request(f"r{n}", BLOCK, n * BLOCK - BLOCK) for n in (worst_case - 1, worst_case))
        assert self.reason(cluster, fits) is None
        waiting = group_of(sequence("never", BLOCK))
        waiting.request = never
        wanted = Obstacle(ObstacleKind.CAPACITY, needed=worst_case, available=8 - reserved)
        assert StepBuilder(cluster.core.replicas[1], 32).obstacle(waiting) == wanted

    def test_kv_blocks(self, make_cluster: MakeCluster) -> None:
        """2 of 8 blocks are another's, 1 is the watermark; 6 are wanted."""
        cluster = make_cluster(watermark=0.125)
        cluster.join(num_blocks=8, block_size=BLOCK)
        cluster.submit(make_request("other", 2 * BLOCK - 1, max_tokens=9))
        cluster.step()
        wanted = Obstacle(ObstacleKind.KV_BLOCKS, needed=6 + 1, available=6)
        assert self.reason(cluster, make_request("r", 6 * BLOCK, max_tokens=BLOCK)) == wanted

    def test_capacity_when_only_a_replica_that_was_lost_could_hold_it(self, make_cluster: MakeCluster) -> None:
        cluster = make_cluster()
        cluster.join(num_blocks=8, block_size=BLOCK)
        cluster.join(2, num_blocks=9, block_size=BLOCK)
        wanted = Obstacle(ObstacleKind.CAPACITY, needed=9, available=8)
        assert self.reason(cluster, make_request("r", 8 * BLOCK, max_tokens=BLOCK)) == wanted

    def test_swapped_groups(self, make_cluster: MakeCluster) -> None:
        cluster = make_cluster(preemption=Preemption.SWAP, watermark=0.0, max_steps_in_flight=1)
        cluster.join(num_blocks=8, block_size=2, num_cpu_blocks=8)
        cluster.submit(make_request("early", 4, max_tokens=12), make_request("late", 4, max_tokens=12))
        step_until(cluster, lambda: bool(cluster.core.replicas[1].swapped))
        wanted = Obstacle(ObstacleKind.SWAPPED, needed=0, available=1)
        assert self.reason(cluster, make_request("r", 1, 1)) == wanted

    def test_a_preemption_in_the_same_step(self, make_cluster: MakeCluster) -> None:
        cluster = make_cluster()
        cluster.join()
        cluster.submit(make_request("other", 4, max_tokens=12))
        cluster.step()
        drain(cluster)
        cluster.submit(make_request("r", 1, 1))
        builder = StepBuilder(cluster.core.replicas[1], 32)
        builder.evicted.append(cluster.groups["other"])
        assert builder.obstacle(cluster.groups["r"]) == Obstacle(ObstacleKind.PREEMPTION, needed=0, available=1)


class TestSlots:
    def test_a_group_takes_a_slot_for_each_sequence_from_its_first_chunk_on(self, make_cluster: MakeCluster) -> None:
        cluster = make_cluster(max_num_seqs=4, max_num_batched_tokens=4, max_steps_in_flight=1)
        cluster.join()
        cluster.submit(make_request("long", 20, 4, num_sequences=3), make_request("two", 3, 4, num_sequences=2))
        cluster.step()
        assert cluster.core.replicas[1].num_running_seqs == 3
        assert ids(cluster.core.waiting) == ["two"]
        cluster.run()

    def test_a_sequence_that_ends_leaves_its_slot_to_others(self, make_cluster: MakeCluster) -> None:
        """Three sequences of which one stops early make room for a fourth request among three slots."""
        free_run = make_request("r", 4, 12, num_sequences=3, temperature=1.0)
        cluster = make_cluster(max_num_seqs=3, max_steps_in_flight=1)
        cluster.join()
        cluster.submit(free_run, make_request("next", 3, 2))
        cluster.step()
        cluster.step()
        assert ids(cluster.core.waiting) == ["next"]
        end_sequence(cluster, "r", 1)
        cluster.step()
        assert ids(cluster.core.waiting) == []
        cluster.run()
