"""The core's books as the Admin service's messages; those that take long to read are read only so often."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from google.protobuf.duration_pb2 import Duration

from octavo.scheduler.core.admission import ObstacleKind
from octavo.scheduler.core.explain import Explanation, ReplicaObstacle
from octavo.scheduler.core.faults.poison import Entry
from octavo.scheduler.core.lookups.history import CacheExplanation, MissReason
from octavo.scheduler.core.replica import Replica, ReplicaState
from octavo.scheduler.core.scheduler import Scheduler
from octavo.scheduler.core.sequence import Lookup, PrefixGroup, RequestGroup, SequenceGroup, SequenceStatus, Tier
from octavo.scheduler.core.steps_in_flight import ReplicaStats
from octavo.scheduler.core.waiting_queue import WaitingQueue
from octavo.scheduler.kv.blocks import present
from octavo.scheduler.kv.prefix_cache import TierUse
from octavo.v1 import admin_pb2 as pb
from octavo.wire.requests import Prefix

_FREE: Final = int(pb.BLOCK_STATE_FREE)
_CACHED: Final = int(pb.BLOCK_STATE_CACHED)
_PRIVATE: Final = int(pb.BLOCK_STATE_PRIVATE)
_SHARED: Final = int(pb.BLOCK_STATE_SHARED)
_PINNED: Final = int(pb.BLOCK_STATE_PINNED)
_PARKED: Final = int(pb.BLOCK_STATE_PARKED)
_SWAPPED: Final = int(pb.BLOCK_STATE_SWAPPED)
_ARRIVING: Final = int(pb.BLOCK_STATE_ARRIVING)
# By the state of a block: its state once another sequence holds it too.
_WITH_ONE_MORE: Final = bytes(_SHARED if state in (_PRIVATE, _SHARED) else _PRIVATE for state in range(8))


@dataclass(frozen=True, slots=True)
class Owner:
    """A request, or a prefix that is pinned or computed to be, and the blocks it holds, each named once."""

    name: str
    is_prefix: bool
    block_ids: list[int]
    cpu_block_ids: list[int]


@dataclass(frozen=True, slots=True)
class BlockMap:
    """A map of a replica's blocks: `states` and `cpu_states` hold a `BlockState` for each block, by its id. Parked
    blocks have no owner."""

    states: bytes
    cpu_states: bytes
    owners: list[Owner]


def block_map(replica: Replica) -> BlockMap:
    """Reads what every block of the replica is used for, and by whom, in a walk over all tables; changes nothing."""
    kv = replica.kv
    # Each kind of holder covers those before it.
    states = bytearray([_FREE]) * kv.num_blocks
    _mark(states, kv.cached_free_block_ids, _CACHED)
    _mark(states, kv.lent_block_ids, _CACHED)
    _mark(states, kv.parked_block_ids, _PARKED)
    owners = [_running_owner(replica, group, states) for group in replica.running]
    cpu_states = bytearray([_FREE]) * kv.num_cpu_blocks
    _mark(cpu_states, kv.cpu_cached_block_ids, _CACHED)
    _mark(cpu_states, kv.arriving_block_ids, _ARRIVING)
    owners += [_swapped_owner(replica, group, cpu_states) for group in replica.swapped]
    owners += list(_pinned_owners(replica, states))
    return BlockMap(bytes(states), bytes(cpu_states), owners)


def _mark(states: bytearray, block_ids: Iterable[int], state: int) -> None:
    for block_id in block_ids:
        states[block_id] = state


def _running_owner(replica: Replica, group: SequenceGroup, states: bytearray) -> Owner:
    tables = _tables(replica, group)
    for block_ids in tables:
        for block_id in block_ids:
            states[block_id] = _WITH_ONE_MORE[states[block_id]]
    if isinstance(group, PrefixGroup):
        return Owner(group.prefix_name, True, _joined(tables), [])
    return Owner(group.request_id, False, _joined(tables), [])


def _swapped_owner(replica: Replica, group: SequenceGroup, cpu_states: bytearray) -> Owner:
    block_ids = _joined(_tables(replica, group))
    _mark(cpu_states, block_ids, _SWAPPED)
    return Owner(group.request_id, False, [], block_ids)


def _pinned_owners(replica: Replica, states: bytearray) -> Iterator[Owner]:
    for name, block_ids in replica.kv.pinned.items():
        _mark(states, block_ids, _PINNED)
        yield Owner(name, True, block_ids, [])


def _tables(replica: Replica, group: SequenceGroup) -> list[list[int]]:
    """Returns the blocks of each of the group's sequences that has any."""
    return [present(replica.kv.block_table(sequence)) for sequence in group.holders]


def _joined(tables: list[list[int]]) -> list[int]:
    """Returns all blocks of some tables, each once, in order."""
    if len(tables) == 1:
        return tables[0]
    return list(dict.fromkeys(block_id for block_ids in tables for block_id in block_ids))


# -- readings ---------------------------------------------------------------------------------------------------------


Reading = TypeVar("Reading")
# The share of time that is spent on readings; but none is older than the other bound, in seconds.
_SHARE: Final = 0.01
_MOST_SECONDS: Final = 5.0


class Snapshots(Generic[Reading]):
    """Shares the latest reading among all who ask; `read` makes a new one once the last has paid for its time, as
    measured by `clock` (in seconds)."""

    def __init__(self, read: Callable[[], Reading], clock: Callable[[], float]) -> None:
        self._read = read
        self._clock = clock
        self._latest: Reading | None = None
        self._next_at = float("-inf")

    def latest(self) -> Reading:
        """Returns a new reading, or the last one while it is too early for another."""
        began = self._clock()
        if self._latest is None or began >= self._next_at:
            self._latest = self._read()
            took = self._clock() - began
            self._next_at = began + min(took / _SHARE, _MOST_SECONDS)
        return self._latest

    @property
    def seconds_to_next(self) -> float:
        """Returns the seconds until there may be a new reading; not below 0."""
        return max(0.0, self._next_at - self._clock())


# -- messages ---------------------------------------------------------------------------------------------------------

_MAX_AHEAD = 100
_STATES = {
    SequenceStatus.WAITING: pb.REQUEST_STATE_WAITING,
    SequenceStatus.RUNNING: pb.REQUEST_STATE_RUNNING,
    SequenceStatus.SWAPPED: pb.REQUEST_STATE_SWAPPED,
}
_WORKER_STATES = {
    ReplicaState.READY: pb.WORKER_STATE_READY,
    ReplicaState.CORDONED: pb.WORKER_STATE_CORDONED,
    ReplicaState.DRAINING: pb.WORKER_STATE_DRAINING,
}
_KINDS = {
    ObstacleKind.TOKEN_BUDGET: pb.Obstacle.KIND_TOKEN_BUDGET,
    ObstacleKind.SEQUENCE_SLOTS: pb.Obstacle.KIND_SEQUENCE_SLOTS,
    ObstacleKind.KV_BLOCKS: pb.Obstacle.KIND_KV_BLOCKS,
    ObstacleKind.SWAPPED: pb.Obstacle.KIND_SWAPPED,
    ObstacleKind.PREEMPTION: pb.Obstacle.KIND_PREEMPTION,
    ObstacleKind.CAPACITY: pb.Obstacle.KIND_CAPACITY,
    ObstacleKind.DELAY: pb.Obstacle.KIND_DELAY,
    ObstacleKind.NO_WORKER: pb.Obstacle.KIND_NO_WORKER,
    ObstacleKind.ISOLATION: pb.Obstacle.KIND_ISOLATION,
    ObstacleKind.DISK: pb.Obstacle.KIND_DISK,
    ObstacleKind.MOVE: pb.Obstacle.KIND_MOVE,
    ObstacleKind.PREFIX_COPY: pb.Obstacle.KIND_PREFIX_COPY,
}
_TIERS = {Tier.DEVICE: pb.TIER_DEVICE, Tier.CPU: pb.TIER_CPU, Tier.DISK: pb.TIER_DISK}
_MISS_REASONS = {
    MissReason.SHORT: pb.CacheLookup.REASON_SHORT,
    MissReason.OFF: pb.CacheLookup.REASON_OFF,
    MissReason.BYPASSED: pb.CacheLookup.REASON_BYPASSED,
    MissReason.EVICTED: pb.CacheLookup.REASON_EVICTED,
    MissReason.OTHER_WORKER: pb.CacheLookup.REASON_OTHER_WORKER,
    MissReason.NOT_KEPT: pb.CacheLookup.REASON_NOT_KEPT,
    MissReason.DIFFERS: pb.CacheLookup.REASON_DIFFERS,
    MissReason.ENDS: pb.CacheLookup.REASON_ENDS,
    MissReason.OTHER_SALT: pb.CacheLookup.REASON_OTHER_SALT,
    MissReason.UNKNOWN: pb.CacheLookup.REASON_UNKNOWN,
}


def write_load(core: Scheduler, dropped_messages: int) -> pb.GetLoadResponse:
    """Writes queues, workers, tenants and counts of the whole scheduler."""
    workers = [_worker(replica) for replica in core.replicas.values()]
    return pb.GetLoadResponse(
        waiting=len(core.waiting),
        waiting_tokens=sum(leader.num_known for group in core.waiting for leader in group.leaders()),
        running=sum(worker.running for worker in workers),
        swapped=sum(worker.swapped for worker in workers),
        frontends=core.num_frontends,
        workers=workers,
        preemptions=core.preemptions,
        swaps=core.swaps,
        pinned_prefixes=len(core.prefixes.all),
        tenants=_tenants(core.waiting),
        dropped_messages=dropped_messages,
    )


def _worker(replica: Replica) -> pb.Worker:
    hello, stats, kv = replica.hello, replica.stats, replica.kv
    parked, pinned = kv.num_parked, kv.num_pinned
    return pb.Worker(
        id=hello.worker_id,
        state=_WORKER_STATES[replica.availability.state],
        device=hello.device,
        world_size=hello.world_size,
        model=hello.model.name,
        # The scheduler's own requests, which compute pinned prefixes, do not count.
        running=sum(isinstance(group, RequestGroup) for group in replica.running),
        swapped=len(replica.swapped),
        block_size=hello.block_size,
        blocks_total=kv.num_blocks,
        blocks_free=kv.num_free,
        blocks_cached=kv.num_cached,
        blocks_cached_free=len(kv.cached_free_block_ids),
        blocks_parked=parked,
        blocks_pinned=pinned,
        blocks_referenced=kv.num_blocks - kv.num_free - parked - pinned,
        cpu_blocks_total=kv.num_cpu_blocks,
        cpu_blocks_free=kv.num_cpu_free,
        cpu_blocks_referenced=kv.num_cpu_blocks - kv.num_cpu_free,
        steps_in_flight=len(replica.outstanding),
        steps=stats.steps,
        tokens_computed=stats.tokens_computed,
        tokens_sampled=stats.tokens_sampled,
        token_rate=stats.token_rate,
        drafted_tokens=stats.drafted,
        accepted_tokens=stats.accepted,
        times=pb.StageTimes(prepare_us=stats.prepare_us, model_us=stats.model_us, sample_us=stats.sample_us),
        tiers=[_tier(use, stats) for use in kv.tiers],
        moved_in=stats.taken_in,
    )


def _tier(use: TierUse, stats: ReplicaStats) -> pb.CacheTier:
    return pb.CacheTier(
        tier=_TIERS[use.tier],
        blocks=use.num_held,
        capacity=use.num_blocks,
        hits=stats.hits[use.tier],
        hit_tokens=stats.hit_tokens[use.tier],
        evicted_blocks=use.num_evicted,
        missed_blocks=use.num_missed,
        moves=[pb.TierMoves(to=_TIERS[tier], blocks=count) for tier, count in use.moved.items()],
        place=use.place,
    )


def write_blocks(replica: Replica) -> pb.WorkerBlocks:
    """Writes what each of a worker's blocks is used for."""
    found = block_map(replica)
    return pb.WorkerBlocks(
        worker_id=replica.hello.worker_id,
        states=found.states,
        cpu_states=found.cpu_states,
        owners=[_owner(owner) for owner in found.owners],
    )


def _owner(owner: Owner) -> pb.BlockOwner:
    if owner.is_prefix:
        return pb.BlockOwner(prefix_name=owner.name, block_ids=owner.block_ids, cpu_block_ids=owner.cpu_block_ids)
    return pb.BlockOwner(request_id=owner.name, block_ids=owner.block_ids, cpu_block_ids=owner.cpu_block_ids)


def _tenants(queue: WaitingQueue) -> list[pb.TenantLoad]:
    waiting = Counter(group.request.tenant for group in queue)
    return [
        pb.TenantLoad(
            tenant=tenant.name,
            weight=tenant.weight,
            virtual_time=tenant.virtual_time,
            waiting=waiting[tenant.name],
            held=tenant.num_groups,
        )
        for tenant in queue.tenants
    ]


def write_status(group: RequestGroup, replica: Replica | None, target: Replica | None, now: float) -> pb.RequestStatus:
    """Writes the status of one request; `replica` is where it runs or is swapped out, and `target` where it moves."""
    request = group.request
    age = Duration()
    age.FromNanoseconds(round((now - group.arrival) * 1e9))
    drafts = [sequence.draft_counts for sequence in group.sequences if sequence.draft_counts is not None]
    return pb.RequestStatus(
        request_id=group.request_id,
        frontend_id=f"{group.frontend_id:016x}",
        tenant=request.tenant,
        priority=request.priority,
        state=_STATES[group.status],
        worker_id=replica.hello.worker_id if replica else "",
        prompt_tokens=len(request.prompt_token_ids),
        computed_tokens=max(sequence.placement.num_computed for sequence in group.live),
        output_tokens=sum(sequence.num_generated for sequence in group.sequences),
        sequences=len(group.live),
        preemptions=group.preemptions,
        swaps=group.swaps,
        age=age,
        drafts=sum(counts.drafts for counts in drafts),
        drafted_tokens=sum(counts.drafted for counts in drafts),
        accepted_tokens=sum(counts.accepted for counts in drafts),
        moves_to=target.hello.worker_id if target else "",
    )


def write_explanation(
    explanation: Explanation, target: Replica | None, cache: CacheExplanation | None, now: float
) -> pb.Explanation:
    """Writes why a request is where it is, where it moves, if it does, and what was found of it, if that is known."""
    group = explanation.group
    return pb.Explanation(
        status=write_status(group, explanation.replica, target, now),
        queue_position=explanation.queue_position,
        ahead_request_ids=[other.request_id for other in explanation.ahead[:_MAX_AHEAD]],
        obstacles=[_obstacle(found) for found in explanation.obstacles],
        step_ids=explanation.step_ids,
        tokens_in_flight=sum(sequence.placement.num_in_flight for sequence in group.live),
        cache=_cache(cache) if cache is not None else None,
    )


def write_ended(lookup: Lookup, cache: CacheExplanation, now: float) -> pb.Explanation:
    """Writes what was found of a request that is no longer held. Its age is from its admission on."""
    age = Duration()
    age.FromNanoseconds(round((now - lookup.at) * 1e9))
    status = pb.RequestStatus(
        request_id=lookup.request.request_id,
        frontend_id=f"{lookup.frontend_id:016x}",
        tenant=lookup.request.tenant,
        priority=lookup.request.priority,
        state=pb.REQUEST_STATE_ENDED,
        prompt_tokens=len(lookup.request.prompt_token_ids),
        age=age,
    )
    return pb.Explanation(status=status, cache=_cache(cache))


def _cache(told: CacheExplanation) -> pb.CacheLookup:
    evicted = None
    if told.evicted_s is not None:
        evicted = Duration()
        evicted.FromMilliseconds(round(told.evicted_s * 1000))
    return pb.CacheLookup(
        tokens=told.num_tokens,
        device_tokens=told.found.device,
        cpu_tokens=told.found.cpu,
        disk_tokens=told.found.disk,
        replica_tokens=told.found.replica,
        source=told.found.source,
        worker_id=told.worker_id,
        reason=_MISS_REASONS[told.reason],
        position=told.position,
        token=told.token,
        other_token=told.other_token,
        evicted=evicted,
        elsewhere=told.elsewhere,
    )


def _obstacle(found: ReplicaObstacle) -> pb.Obstacle:
    return pb.Obstacle(
        worker_id=found.replica.hello.worker_id if found.replica else "",
        kind=_KINDS[found.obstacle.kind],
        needed=found.obstacle.needed,
        available=found.obstacle.available,
    )


def read_state(state: pb.RequestState) -> SequenceStatus | None:
    """Reads the state that a query asks for; None if it asks for none. Raises `ValueError` for one that does not
    exist."""
    if state == pb.REQUEST_STATE_UNSPECIFIED:
        return None
    if state not in _STATES.values():
        raise ValueError(f"state {state} is none of those that a request can be in")
    return next(status for status, value in _STATES.items() if value == state)


def write_prefix(prefix: Prefix, core: Scheduler) -> pb.PinnedPrefix:
    """Writes a pinned prefix, and which workers have it."""
    there = [replica for replica in core.replicas.values() if prefix.name in replica.prefixes.names]
    return pb.PinnedPrefix(
        name=prefix.name,
        tokens=len(prefix.token_ids),
        ready_worker_ids=[r.hello.worker_id for r in there if prefix.name in r.kv.pinned],
        pending_worker_ids=[r.hello.worker_id for r in there if prefix.name not in r.kv.pinned],
    )


def write_quarantined(entry: Entry, now: float) -> pb.QuarantinedPayload:
    """Writes a payload that is refused, and for how long."""
    remaining = Duration()
    remaining.FromMilliseconds(max(0, round((entry.until - now) * 1000)))
    return pb.QuarantinedPayload(
        payload=entry.payload,
        request_id=entry.request_id,
        prompt_tokens=entry.num_prompt_tokens,
        remaining=remaining,
        reason=entry.why,
    )
