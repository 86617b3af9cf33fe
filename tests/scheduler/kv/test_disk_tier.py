"""The third tier of the prefix cache: a worker's disk keeps what device blocks held, and gives it to whoever comes
later, in this life of a worker or the next."""

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from octavo.scheduler.core import workers
from octavo.scheduler.core.admission import ObstacleKind
from octavo.scheduler.core.events import DiskAnswered, LossCause, PrefixPinned, StepAnswered, WorkerDrained
from octavo.scheduler.core.explain import explain
from octavo.scheduler.kv.block_reads import BlockReads
from octavo.scheduler.kv.blocks import CachedBlocks
from octavo.scheduler.kv.disk_tier import DiskTier, disk_pays
from octavo.scheduler.kv.prefix_cache import CachedBlock
from octavo.testing.cluster import Cluster, FakeDisk, FakeReplica, make_request, reference_tokens
from octavo.testing.scenarios import plans
from octavo.wire.costs import PrefillCosts, StepCosts, SwapCosts
from octavo.wire.requests import Prefix, Request
from octavo.wire.sampling import BeamSearch, EarlyStopping
from octavo.wire.steps import BlocksFetched, KVDisk

from ..conftest import MakeCluster
from ..views import cached_tokens, kv_of

OLD, NEW = make_request("old", 16, 3), make_request("new", 24, 3)


def again(request: Request, name: str = "again") -> Request:
    """The same prompt and sampling, as another request."""
    return msgspec.structs.replace(request, request_id=name)


def tier_of(cluster: Cluster, incarnation: int = 1) -> DiskTier:
    disk = cluster.core.replicas[incarnation].kv.disk
    assert disk is not None
    return disk


def served(make_cluster: MakeCluster, disk: FakeDisk, *requests: Request, **config: Any) -> Cluster:
    """A cluster whose only worker has served these with a mirror, and has ended."""
    cluster = make_cluster(watermark=0.0, **{"max_steps_in_flight": 1, **config})
    cluster.join(1, num_blocks=40, block_size=2, num_cpu_blocks=40, disk=disk, mirror=True)
    for request in requests or (OLD,):
        cluster.submit(request)
        cluster.run()
    settle(cluster)
    cluster.leave(1)
    return cluster


def settle(cluster: Cluster) -> None:
    """Lets plans of moves alone leave, and be answered."""
    for _ in range(8):
        cluster.step()


def restarted(cluster: Cluster, disk: FakeDisk, **worker: Any) -> FakeReplica:
    return cluster.join(2, **{"num_blocks": 40, "block_size": 2, "num_cpu_blocks": 40, "disk": disk, **worker})


def finish(cluster: Cluster, *requests: Request) -> None:
    """Runs to the end; the tokens are right and no block is held."""
    cluster.run()
    settle(cluster)
    for request in requests:
        assert cluster.tokens[request.request_id] == reference_tokens(request)
    for replica in cluster.core.replicas.values():
        assert replica.kv.num_cpu_free == replica.kv.num_cpu_blocks
        assert replica.kv.num_free == replica.kv.num_blocks


def test_a_prompt_served_before_comes_from_the_disk_after_a_restart(make_cluster: MakeCluster) -> None:
    disk = FakeDisk()
    cluster = served(make_cluster, disk)
    # 16 prompt tokens and those generated but the last, in blocks of 2.
    assert len(disk) == 9
    restarted(cluster, disk)
    cluster.submit(again(OLD))
    finish(cluster, again(OLD))
    assert cached_tokens(cluster)["again"] == 14
    assert tier_of(cluster, 2).num_found == 7


def test_what_is_taken_on_the_device_and_what_is_used_twice_are_kept(make_cluster: MakeCluster) -> None:
    disk = FakeDisk()
    cluster = make_cluster(watermark=0.0, max_steps_in_flight=1)
    cluster.join(num_blocks=14, block_size=2, num_cpu_blocks=4, disk=disk)
    cluster.submit(OLD)
    finish(cluster, OLD)
    assert not disk
    cluster.submit(again(OLD, "twice"))
    finish(cluster, again(OLD, "twice"))
    assert len(disk) == 7
    cluster.submit(NEW)
    finish(cluster, NEW)
    # Of `OLD` what it has generated too.
    assert len(disk) == 9
    # Until nothing of `OLD` is in the CPU's blocks either.
    for name in ("other", "another"):
        cluster.submit(make_request(name, 24, 3))
        cluster.run()
    cluster.submit(again(OLD))
    finish(cluster, again(OLD))
    # Half of the CPU's blocks at most are filled at once.
    assert tier_of(cluster).num_found == 4
    assert cached_tokens(cluster)["again"] == 8


def test_nothing_is_stored_twice(make_cluster: MakeCluster) -> None:
    disk = FakeDisk()
    cluster = make_cluster(watermark=0.0, max_steps_in_flight=1)
    replica = cluster.join(num_blocks=14, block_size=2, num_cpu_blocks=20, disk=disk, mirror=True)
    for name in "abcd":
        cluster.submit(again(OLD, f"old {name}"), again(NEW, f"new {name}"))
        cluster.run()
    settle(cluster)
    names = [(each.value, each.kv_group) for plan in plans(replica) if plan.disk for each in plan.disk.store]
    assert len(names) == len(set(names)) == len(disk) == 9 + 13


def test_an_unknown_prompt_asks_for_its_first_block_alone(make_cluster: MakeCluster) -> None:
    cluster = served(make_cluster, FakeDisk())
    replica = restarted(cluster, FakeDisk())
    cluster.submit(NEW)
    finish(cluster, NEW)
    fetched = [len(plan.disk.fetch) for plan in plans(replica) if plan.disk and plan.disk.fetch]
    assert fetched == [1]
    assert tier_of(cluster, 2).num_found == 0


def test_others_go_on_and_come_while_one_waits_for_the_disk(make_cluster: MakeCluster) -> None:
    disk = FakeDisk()
    cluster = served(make_cluster, disk)
    replica = restarted(cluster, disk)
    running = make_request("running", 4, 30)
    cluster.submit(running)
    cluster.step()
    cluster.step()
    cluster.disks_answer = False
    cluster.submit(again(OLD))
    cluster.step()
    (explanation,) = explain(cluster.core.state, cluster.core.policy, "again", cluster.now)
    (found,) = explanation.obstacles
    assert found.obstacle.kind is ObstacleKind.DISK
    assert found.replica is cluster.core.replicas[2]
    late = make_request("late", 1, 3)
    cluster.submit(late)
    for _ in range(12):
        cluster.step()
    assert cluster.finished["late"]
    assert not cluster.tokens["again"]
    assert len(cluster.tokens["running"]) > 12
    cluster.disks_answer = True
    finish(cluster, again(OLD), running, late)
    assert cached_tokens(cluster)["again"] == 14
    assert len(replica.to_read) == 0


def test_two_that_begin_alike_wait_for_one_read(make_cluster: MakeCluster) -> None:
    disk = FakeDisk()
    cluster = served(make_cluster, disk)
    restarted(cluster, disk)
    cluster.submit(again(OLD, "one"), again(OLD, "two"))
    finish(cluster, again(OLD, "one"), again(OLD, "two"))
    assert tier_of(cluster, 2).num_asked == 7
    assert cached_tokens(cluster)["one"] == cached_tokens(cluster)["two"] == 14


def test_what_is_here_already_stays_while_the_rest_is_waited_for(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(watermark=0.0, max_steps_in_flight=1)
    cluster.join(num_blocks=20, block_size=2, num_cpu_blocks=4, disk=FakeDisk())
    # What takes blocks later, and asks the disk for nothing.
    later, running = make_request("later", 12, 3), make_request("running", 1, 22)
    for request in (OLD, later):
        cluster.submit(request)
        finish(cluster, request)
    # It begins with the blocks that were used first, and asks the disk in vain for what comes behind these.
    prompt = [*OLD.prompt_token_ids, *range(1, 7)]
    longer = msgspec.structs.replace(again(OLD, "longer"), prompt_token_ids=prompt)
    cluster.disks_answer = False
    cluster.submit(running, longer)
    while not cluster.finished.get("running"):
        cluster.step()
    assert not cluster.tokens["longer"]
    cluster.disks_answer = True
    finish(cluster, longer, running)
    assert cached_tokens(cluster)["longer"] == 16


@pytest.mark.parametrize("in_flight", [1, 2])
def test_a_failed_step_reads_nothing_and_its_reader_goes_on_without(make_cluster: MakeCluster, in_flight: int) -> None:
    disk = FakeDisk()
    cluster = served(make_cluster, disk, max_steps_in_flight=in_flight)
    replica = restarted(cluster, disk)
    cluster.submit(again(OLD))
    cluster.schedule()
    assert replica.plans[-1].disk is not None
    assert replica.plans[-1].disk.fetch
    cluster.handle(StepAnswered(2, replica.execute(fail=True)))
    assert not kv_of(cluster, 2).reads.held
    finish(cluster, again(OLD))
    assert cached_tokens(cluster)["again"] == 0


def test_what_a_failed_step_was_to_store_is_stored_later(make_cluster: MakeCluster) -> None:
    disk = FakeDisk()
    cluster = make_cluster(watermark=0.0, max_steps_in_flight=1)
    replica = cluster.join(num_blocks=40, block_size=2, num_cpu_blocks=40, disk=disk, mirror=True)
    cluster.submit(OLD)
    # The first asks the disk in vain.
    cluster.step()
    cluster.step()
    cluster.schedule()
    assert replica.plans[-1].disk is not None
    assert replica.plans[-1].disk.store
    cluster.handle(StepAnswered(1, replica.execute(fail=True)))
    assert not disk
    cluster.submit(again(OLD))
    finish(cluster, OLD, again(OLD))
    assert len(disk) == 9


def test_a_lost_worker_leaves_nobody_waiting(make_cluster: MakeCluster) -> None:
    disk = FakeDisk()
    cluster = served(make_cluster, disk)
    restarted(cluster, disk)
    cluster.disks_answer = False
    cluster.submit(again(OLD))
    cluster.step()
    assert cluster.groups["again"].is_fetching
    cluster.leave(2, LossCause.UNREACHABLE)
    assert not cluster.groups["again"].is_fetching
    cluster.disks_answer = True
    cluster.join(3, num_blocks=40, block_size=2, num_cpu_blocks=40, disk=disk)
    finish(cluster, again(OLD))
    assert cached_tokens(cluster)["again"] == 14


def test_running_requests_of_a_lost_worker_go_on_from_its_mirror(make_cluster: MakeCluster) -> None:
    disk = FakeDisk()
    cluster = make_cluster(watermark=0.0, max_steps_in_flight=1)
    cluster.join(1, num_blocks=60, block_size=2, num_cpu_blocks=60, disk=disk, mirror=True)
    requests = [make_request(name, 12, 20) for name in "abc"]
    cluster.submit(*requests)
    for _ in range(10):
        cluster.step()
    before = {request.request_id: len(cluster.tokens[request.request_id]) for request in requests}
    assert min(before.values()) > 4
    second = cluster.join(2, num_blocks=60, block_size=2, num_cpu_blocks=60, disk=disk, mirror=True)
    cluster.leave(1, LossCause.UNREACHABLE)
    finish(cluster, *requests)
    computed = sum(work.num_tokens for plan in plans(second) for work in plan.work)
    left = sum(20 - before[request.request_id] for request in requests)
    # Beside the tokens that were still to come: of each the last block, and what was not written yet.
    assert computed <= left + 3 * 5


def test_a_stuck_disk_keeps_nobody_for_long_and_gets_its_blocks_back(make_cluster: MakeCluster) -> None:
    disk = FakeDisk()
    cluster = served(make_cluster, disk)
    replica = restarted(cluster, disk)
    cluster.disks_answer = False
    cluster.submit(again(OLD))
    cluster.step()
    for later in (0.0, 4.0):
        workers.look_at_reads(cluster.core.state, cluster.now + later)
        assert cluster.groups["again"].is_fetching
    workers.look_at_reads(cluster.core.state, cluster.now + 6.0)
    assert not cluster.groups["again"].is_fetching
    held = kv_of(cluster, 2).reads.held
    assert held
    cluster.submit(make_request("other", 16, 3))
    cluster.run()
    # It is asked for nothing more, and the blocks are its own until it answers.
    assert kv_of(cluster, 2).reads.held == held
    assert cached_tokens(cluster)["again"] == cached_tokens(cluster)["other"] == 0
    cluster.disks_answer = True
    cluster.read(2)
    assert not replica.to_read
    finish(cluster, again(OLD))


def test_a_reset_empties_the_disk_and_what_is_being_read(make_cluster: MakeCluster) -> None:
    disk = FakeDisk()
    cluster = served(make_cluster, disk)
    restarted(cluster, disk)
    cluster.disks_answer = False
    cluster.submit(again(OLD))
    cluster.step()
    cluster.core.state.reset_cache(None)
    cluster.disks_answer = True
    # The disk may have read it before it was cleared.
    cluster.read(2)
    finish(cluster, again(OLD))
    assert cached_tokens(cluster)["again"] == 0
    assert not disk


def test_a_salt_finds_its_own_alone(make_cluster: MakeCluster) -> None:
    disk = FakeDisk()
    salted = make_request("salted", 16, 3, salt="mine")
    cluster = served(make_cluster, disk, salted)
    restarted(cluster, disk)
    plain = msgspec.structs.replace(salted, request_id="plain", cache_key=OLD.cache_key)
    other = make_request("salted", 16, 3, salt="another's")
    requests = [plain, again(other, "other"), again(salted, "mine")]
    for request in requests:
        cluster.submit(request)
        cluster.run()
    found = cached_tokens(cluster)
    assert (found["plain"], found["other"], found["mine"]) == (0, 0, 14)
    finish(cluster, *requests)


def test_nothing_of_a_non_finite_sequence_is_asked_for_again(make_cluster: MakeCluster) -> None:
    disk = FakeDisk()
    cluster = make_cluster(watermark=0.0, max_steps_in_flight=1)
    cluster.join(num_blocks=40, block_size=2, num_cpu_blocks=40, disk=disk, mirror=True)
    cluster.submit(make_request("old", 16, 12))
    for _ in range(5):
        cluster.step()
    assert disk
    before = len(disk)
    kv = kv_of(cluster)
    (sequence,) = cluster.groups["old"].sequences
    contents = [kv.blocks.cache.content(block_id) for block_id in kv.block_table(sequence)[0]]
    kv.distrust(sequence.placement.sequence_id, sequence)
    cluster.core.check()
    assert tier_of(cluster).fetch([content for content in contents if content is not None], [], goes_on=True) == []
    # Nor is what was to be stored.
    cluster.schedule()
    assert len(disk) == before


def test_swapped_groups_and_reads_share_cpu_memory(make_cluster: MakeCluster) -> None:
    disk = FakeDisk()
    cluster = served(make_cluster, disk)
    restarted(cluster, disk, num_blocks=14, num_cpu_blocks=10)
    cluster.disks_answer = False
    cluster.submit(again(OLD))
    cluster.step()
    cluster.step()
    held = len(kv_of(cluster, 2).reads.held)
    assert 0 < held <= 5
    others = [make_request("early", 8, 14), make_request("late", 5, 9, num_sequences=2, temperature=1.0)]
    for request in others:
        cluster.submit(request)
        cluster.now += 0.001
    for _ in range(60):
        cluster.step()
    cluster.disks_answer = True
    finish(cluster, again(OLD), *others)
    assert cluster.core.preemptions > 0


@pytest.mark.parametrize("windows", [(6,), (0, 4)])
def test_windows_find_what_they_see(make_cluster: MakeCluster, windows: tuple[int, ...]) -> None:
    disk = FakeDisk()
    cluster = make_cluster(watermark=0.0, max_steps_in_flight=1, max_num_batched_tokens=8)
    size: dict[str, Any] = {"num_blocks": 60, "block_size": 2, "num_cpu_blocks": 60, "windows": windows, "disk": disk}
    cluster.join(1, mirror=True, **size)
    cluster.submit(OLD)
    cluster.run()
    settle(cluster)
    cluster.leave(1)
    cluster.join(2, **size)
    cluster.submit(again(OLD))
    finish(cluster)
    assert cluster.tokens["again"] == cluster.tokens["old"]
    assert cached_tokens(cluster)["again"] == 14


def test_an_aborted_reader_leaves_what_comes_for_others(make_cluster: MakeCluster) -> None:
    disk = FakeDisk()
    cluster = served(make_cluster, disk)
    restarted(cluster, disk)
    cluster.disks_answer = False
    cluster.submit(again(OLD))
    cluster.step()
    cluster.abort("again")
    cluster.disks_answer = True
    settle(cluster)
    cluster.submit(again(OLD, "later"))
    finish(cluster, again(OLD, "later"))
    assert cached_tokens(cluster)["later"] == 14


def test_a_drained_worker_is_let_go_and_its_readers_go_elsewhere(make_cluster: MakeCluster) -> None:
    disk = FakeDisk()
    cluster = served(make_cluster, disk)
    replica = restarted(cluster, disk)
    cluster.disks_answer = False
    cluster.submit(again(OLD))
    cluster.step()
    assert cluster.groups["again"].is_fetching
    cluster.handle(WorkerDrained(replica.hello.worker_id, 0.0))
    cluster.tick(0.1)
    cluster.tick(0.1)
    assert 2 not in cluster.core.replicas
    cluster.join(3, num_blocks=40, block_size=2, num_cpu_blocks=40, disk=disk)
    cluster.disks_answer = True
    finish(cluster, again(OLD))
    assert cached_tokens(cluster)["again"] == 14


@pytest.mark.parametrize(
    "wrong",
    [
        lambda right: msgspec.structs.replace(right, step_id=right.step_id + 1),
        lambda right: msgspec.structs.replace(right, found=right.found[1:]),
        lambda right: msgspec.structs.replace(right, found=[*right.found, True]),
    ],
    ids=["another step", "too few", "too many"],
)
def test_a_worker_whose_disk_answers_what_it_was_not_asked_is_lost(
    make_cluster: MakeCluster, wrong: Callable[[BlocksFetched], BlocksFetched]
) -> None:
    disk = FakeDisk()
    cluster = served(make_cluster, disk)
    replica = restarted(cluster, disk)
    cluster.disks_answer = False
    cluster.submit(again(OLD))
    cluster.step()
    cluster.handle(DiskAnswered(2, wrong(replica.read())))
    assert not cluster.core.replicas
    assert not cluster.groups["again"].is_fetching


def test_an_answer_before_its_step_is_one_too_many(make_cluster: MakeCluster) -> None:
    disk = FakeDisk()
    cluster = served(make_cluster, disk)
    replica = restarted(cluster, disk)
    cluster.submit(again(OLD))
    cluster.schedule()
    plan = replica.plans[-1]
    assert plan.disk is not None
    answer = BlocksFetched(plan.epoch, plan.incarnation, plan.step_id, [True] * len(plan.disk.fetch))
    cluster.handle(DiskAnswered(2, answer))
    assert not cluster.core.replicas


def test_a_disk_that_is_slower_than_computing_is_not_used(make_cluster: MakeCluster) -> None:
    def costs(token_s: float) -> StepCosts:
        return StepCosts(PrefillCosts(0.0, token_s, 0.0), SwapCosts(0.0, 1e-4, 1e-4))

    disk = FakeDisk()
    cluster = make_cluster()
    slow, fast = KVDisk(block_read_s=0.05), KVDisk(block_read_s=0.001)
    sizes: dict[str, Any] = {"num_blocks": 20, "block_size": 2, "num_cpu_blocks": 20, "disk": disk}
    hellos = [
        cluster.join(1, costs=costs(0.01), kv_disk=slow, **sizes).hello,
        cluster.join(2, costs=costs(0.01), kv_disk=fast, **sizes).hello,
        cluster.join(3, kv_disk=slow, **sizes).hello,
    ]
    assert [disk_pays(hello) for hello in hellos] == [False, True, True]
    assert [cluster.core.replicas[each].kv.disk is not None for each in (1, 2, 3)] == [False, True, True]


def test_samples_of_one_prompt_share_what_comes_from_the_disk(make_cluster: MakeCluster) -> None:
    disk = FakeDisk()
    samples = make_request("samples", 12, 8, num_sequences=3, temperature=1.0)
    cluster = served(make_cluster, disk, samples)
    restarted(cluster, disk)
    same = again(samples)
    cluster.submit(same)
    finish(cluster, same)
    assert cluster.outputs("again") == [reference_tokens(same, index) for index in range(3)]
    assert cached_tokens(cluster)["again"] == 10


def test_beams_that_lost_their_worker_go_on_from_its_mirror(make_cluster: MakeCluster) -> None:
    def tokens(mirror: bool) -> tuple[list[list[int]], int]:
        disk = FakeDisk()
        cluster = make_cluster(watermark=0.0, max_steps_in_flight=1)
        sizes: dict[str, Any] = {"num_blocks": 60, "block_size": 2, "num_cpu_blocks": 60, "disk": disk}
        cluster.join(1, mirror=mirror, **sizes)
        cluster.submit(make_request("beams", 12, 10, beam=BeamSearch(3, 1.0, EarlyStopping.NEVER)))
        for _ in range(8):
            cluster.step()
        second = cluster.join(2, **sizes)
        cluster.leave(1, LossCause.UNREACHABLE)
        cluster.run()
        computed = sum(work.num_tokens for plan in plans(second) for work in plan.work)
        return cluster.outputs("beams"), computed

    (mirrored, few), (plain, many) = tokens(mirror=True), tokens(mirror=False)
    assert mirrored == plain
    assert few < many


def test_a_pinned_prefix_is_computed_beside_a_disk_and_is_kept_there(make_cluster: MakeCluster) -> None:
    disk = FakeDisk()
    cluster = make_cluster(watermark=0.0, max_steps_in_flight=1)
    cluster.join(1, num_blocks=40, block_size=2, num_cpu_blocks=40, disk=disk, mirror=True)
    cluster.handle(PrefixPinned(Prefix("system", OLD.prompt_token_ids)))
    settle(cluster)
    cluster.submit(again(OLD))
    cluster.run()
    settle(cluster)
    assert cached_tokens(cluster)["again"] == 15 or cached_tokens(cluster)["again"] == 14
    assert len(disk) == 9


def test_a_suspect_asks_no_disk(make_cluster: MakeCluster) -> None:
    disk = FakeDisk()
    cluster = served(make_cluster, disk)
    cluster.disks_answer = False
    for incarnation in (2, 3):
        cluster.join(incarnation, num_blocks=40, block_size=2, num_cpu_blocks=40, process=incarnation)
        if incarnation == 2:
            cluster.submit(again(OLD), make_request("beside", 4, 30))
        cluster.step()
        cluster.schedule()
        cluster.leave(incarnation, LossCause.UNREACHABLE)
    suspects = list(cluster.core.request_table.suspects)
    assert suspects
    cluster.join(4, num_blocks=40, block_size=2, num_cpu_blocks=40, process=4, disk=disk)
    # Alone, one after the other, and without a disk that nobody answers for.
    for _ in range(200):
        if not any(suspect in cluster.core.request_table.suspects for suspect in suspects):
            break
        cluster.step()
    cluster.disks_answer = True
    finish(cluster, again(OLD))


def test_what_an_outstanding_step_fills_is_stored_once_that_is_done(make_cluster: MakeCluster) -> None:
    disk = FakeDisk()
    cluster = make_cluster(watermark=0.0, max_steps_in_flight=2)
    replica = cluster.join(num_blocks=40, block_size=2, num_cpu_blocks=40, disk=disk)
    cluster.submit(OLD)
    # It asks the disk, in vain.
    cluster.step()
    cluster.schedule()
    # The same begins beside it, with blocks that are still to be filled.
    cluster.submit(again(OLD))
    cluster.schedule()
    assert len(replica.plans) == 2
    assert replica.plans[1].starts
    assert replica.plans[1].disk is None
    finish(cluster, OLD, again(OLD))
    assert len(disk) == 7


def contents(count: int, kv_group: int = 0) -> list[CachedBlock]:
    return [CachedBlock(bytes([number]) * 32, kv_group, number) for number in range(count)]


def alone(num_cpu_blocks: int) -> tuple[DiskTier, CachedBlocks]:
    """A tier by itself, and its CPU blocks."""
    cpu = CachedBlocks(num_cpu_blocks, 1, prefix_caching=True)
    return DiskTier(CachedBlocks(4, 1, prefix_caching=True), BlockReads(cpu), KVDisk()), cpu


def test_a_block_that_holds_something_else_by_then_is_not_stored_for_what_it_held() -> None:
    device = CachedBlocks(1, 1, prefix_caching=True)
    tier = DiskTier(device, BlockReads(CachedBlocks(4, 1, prefix_caching=True)), KVDisk())
    first, second = contents(2)
    for content in (first, second):
        (block_id,) = device.take(1)
        device.cache.insert(content, block_id, None)
        if content is first:
            tier.keep([block_id])
        device.release([block_id])
    assert tier.moves(1) is None
    tier.keep([block_id])
    moves = tier.moves(1)
    assert moves is not None
    assert [(each.value, each.block_id) for each in moves.store] == [(second.value, block_id)]


def test_what_a_group_has_in_cpu_memory_makes_no_way_for_what_it_reads() -> None:
    tier, cpu = alone(4)
    first, second, *_ = contents(2)
    # The block that would be taken next.
    (held,) = cpu.take(1)
    cpu.cache.insert(first, held, None)
    cpu.release([held])
    for block_id in [block_id for block_id in cpu.pool.free_block_ids if block_id != held]:
        cpu.pool.used(block_id)
    assert next(iter(cpu.pool.free_block_ids)) == held
    (read,) = tier.fetch([second], [held], goes_on=True)
    assert read.num_blocks == 1
    assert cpu.cache.content(held) == first
    assert held not in tier._reads.held


def test_reads_take_half_of_the_cpu_blocks_at_most() -> None:
    tier, cpu = alone(10)
    (read,) = tier.fetch(contents(8), [], goes_on=True)
    assert read.num_blocks == len(tier._reads.held) == 5
    assert tier.fetch(contents(12)[8:], [], goes_on=True) == []
    assert cpu.pool.num_free == 5


def test_a_step_that_reads_alone_tells_nothing_of_how_long_the_models_first_may_take(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(first_step_timeout_s=77.0, step_timeout_s=1.0)
    cluster.join(num_blocks=40, block_size=2, num_cpu_blocks=40, disk=FakeDisk())
    cluster.submit(OLD)
    cluster.step()
    steps = cluster.core.replicas[1].steps
    assert cluster.core.replicas[1].stats.steps == 1
    assert steps.deadlines.allowance(16) == 77.0
    cluster.run()
    assert steps.deadlines.allowance(16) < 77.0
