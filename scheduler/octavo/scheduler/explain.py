"""Where a request stands and what it waits for, in numbers: read from the core's books, which stay as they are."""

import math
from dataclasses import dataclass, field

from octavo.scheduler.admission import Obstacle, ObstacleKind, has_capacity, obstacle, worst_case_blocks
from octavo.scheduler.config import Policy
from octavo.scheduler.draft import Draft
from octavo.scheduler.replica import Replica
from octavo.scheduler.running import survey
from octavo.scheduler.scheduler import Scheduler
from octavo.scheduler.sequence import Sequence, SequenceGroup, SequenceStatus


@dataclass(frozen=True, slots=True)
class ReplicaObstacle:
    """What keeps a group from a replica's next step. `replica` is None where it is not a matter of one."""

    replica: Replica | None
    obstacle: Obstacle


@dataclass(frozen=True, slots=True)
class Explanation:
    """Where a group stands. `replica`: where it runs or is swapped out; `queue_position`: from 1 on, 0 while it runs;
    `ahead`: groups before it in its queue, the next one first; `step_ids`: outstanding steps with it.

    The obstacles are those it would meet in the next step if it were its turn; none, if any replica has room. With
    nobody ahead and no obstacle it joins the next step.
    """

    group: SequenceGroup
    replica: Replica | None
    queue_position: int
    ahead: list[SequenceGroup] = field(default_factory=list)
    obstacles: list[ReplicaObstacle] = field(default_factory=list)
    step_ids: list[int] = field(default_factory=list)


def explain(core: Scheduler, request_id: str, now: float) -> list[Explanation]:
    """One explanation for each request of this id: two frontends may use the same."""
    homes = homes_of_groups(core)
    groups = [group for group in core.groups if group.request_id == request_id]
    return [_explain(core, group, homes.get(group), now) for group in groups]


def homes_of_groups(core: Scheduler) -> dict[SequenceGroup, Replica]:
    """The replica of each group that is not waiting."""
    return {group: replica for replica in core.replicas.values() for group in (*replica.running, *replica.swapped)}


def _explain(core: Scheduler, group: SequenceGroup, home: Replica | None, now: float) -> Explanation:
    if home is None:
        ahead = _ahead(core, group)
        head = ahead[0] if ahead else group
        obstacles = _admission_obstacles(core, group, head_waited=now - head.arrival)
        return Explanation(group, None, len(ahead) + 1, ahead, obstacles)
    steps = [step.step_id for step in home.outstanding if group in step.groups or group in step.swapped_out]
    is_running = group.status is SequenceStatus.RUNNING
    ahead = [] if is_running else home.swapped[: home.swapped.index(group)]
    if home.isolates and group is not home.suspect:
        found: Obstacle | None = _isolation(core, group)
    else:
        found = None if is_running else _return_obstacle(home, group)
    obstacles = [ReplicaObstacle(home, found)] if found else []
    return Explanation(group, home, 0 if is_running else len(ahead) + 1, ahead, obstacles, steps)


def _isolation(core: Scheduler, group: SequenceGroup) -> Obstacle:
    """By the rules of `octavo.scheduler.isolation`."""
    return Obstacle(ObstacleKind.ISOLATION, 0, sum(other is not group for other in core.ledger.suspects))


@dataclass(frozen=True, slots=True)
class _NextStep:
    """A replica's next step as what runs there leaves it, and the free blocks that takes."""

    draft: Draft
    num_taken: int


def _next_step(replica: Replica, *, decodes: bool) -> _NextStep:
    found, budget = survey(replica), replica.token_budget
    decoding = [sequence for _, sequence in found.decodes] if decodes else []
    num_prefill = sum(_prefill_tokens(replica, group) for group in (*found.prefilling, *replica.prefixes))
    num_tokens = min(budget, num_prefill + len(decoding))
    draft = Draft(replica, budget - num_tokens, num_tokens=num_tokens, prefills=num_prefill > 0)
    return _NextStep(draft, replica.kv.num_missing(decoding))


def _prefill_tokens(replica: Replica, group: SequenceGroup) -> int:
    ready: list[Sequence] = [each for each in replica.holders(group) if each.is_ready and not each.is_decoding]
    return sum(group.may_compute(sequence) for sequence in ready)


# -- waiting --------------------------------------------------------------------------------------------------------


def _ahead(core: Scheduler, group: SequenceGroup) -> list[SequenceGroup]:
    """Those that come first. What none of the replicas could ever hold is passed over; suspects have a queue of their
    own."""
    queue = list(core.waiting)
    before = queue[: queue.index(group)]
    if group in core.ledger.suspects:
        return [other for other in before if other in core.ledger.suspects]
    return [other for other in before if core.fleet.can_hold(other)] if core.replicas else before


def _admission_obstacles(core: Scheduler, group: SequenceGroup, head_waited: float) -> list[ReplicaObstacle]:
    replicas = [replica for replica in core.replicas.values() if core.fleet.may_take(replica, group)]
    if not replicas:
        return [ReplicaObstacle(None, Obstacle(ObstacleKind.NO_WORKER, 1, 0))]
    if group in core.ledger.suspects:
        return _isolation_obstacles(core, group)
    obstacles = []
    for replica in replicas:
        is_isolating = replica.suspect is not None
        found = _isolation(core, group) if is_isolating else _admission_obstacle(replica, group, head_waited)
        if found is None:
            return []
        obstacles.append(ReplicaObstacle(replica, found))
    return obstacles


def _isolation_obstacles(core: Scheduler, suspect: SequenceGroup) -> list[ReplicaObstacle]:
    """Of a suspect: that it is another's turn, or what the replica lacks that is to isolate it."""
    replica = next((replica for replica in core.replicas.values() if replica.suspect is suspect), None)
    if replica is None:
        return [ReplicaObstacle(None, _isolation(core, suspect))]
    found = obstacle(Draft(replica, replica.token_budget), suspect)
    return [ReplicaObstacle(replica, found)] if found else []


def _admission_obstacle(replica: Replica, group: SequenceGroup, head_waited: float) -> Obstacle | None:
    kv, paper = replica.kv, replica.config.policy is Policy.PAPER
    if not has_capacity(group.request, replica):
        worst_case = worst_case_blocks(group.request, replica)
        return Obstacle(ObstacleKind.CAPACITY, worst_case, kv.num_blocks - kv.reserved_blocks)
    # The paper's steps are all prefill or all decode.
    step = _next_step(replica, decodes=not paper)
    if paper and not step.draft.prefills and (delay := _delay(replica, head_waited)):
        return delay
    if step.num_taken > kv.num_free:
        return Obstacle(ObstacleKind.PREEMPTION, step.num_taken, kv.num_free)
    if found := obstacle(step.draft, group, whole_prompt=paper):
        return found
    needed = kv.num_needed(group.leaders()) + kv.watermark_blocks + step.num_taken
    return Obstacle(ObstacleKind.KV_BLOCKS, needed, kv.num_free) if step.num_taken and needed > kv.num_free else None


def _delay(replica: Replica, head_waited: float) -> Obstacle | None:
    """The paper policy lets prompts gather for a while, unless nothing runs. In milliseconds."""
    delay = replica.config.delay_factor * replica.prefill_latency
    if not replica.running or head_waited > delay:
        return None
    return Obstacle(ObstacleKind.DELAY, math.ceil(delay * 1000), int(head_waited * 1000))


# -- swapped out ----------------------------------------------------------------------------------------------------


def _return_obstacle(replica: Replica, group: SequenceGroup) -> Obstacle | None:
    """By the rules of `octavo.scheduler.running.resume_swapped`."""
    kv, config, holders = replica.kv, replica.config, replica.holders(group)
    step = _next_step(replica, decodes=True)
    if step.num_taken > kv.num_free:
        return Obstacle(ObstacleKind.PREEMPTION, step.num_taken, kv.num_free)
    slots = replica.max_parallel - replica.num_running_seqs
    if group.parallel > slots:
        return Obstacle(ObstacleKind.SEQUENCE_SLOTS, group.parallel, slots)
    # The paper's swapped groups come back in decode steps.
    budget = 0 if config.policy is Policy.PAPER and step.draft.prefills else step.draft.budget
    if len(holders) > budget:
        return Obstacle(ObstacleKind.TOKEN_BUDGET, len(holders), budget)
    spare = kv.watermark_blocks + group.parallel * kv.blocks_for(1) if replica.running else 0
    needed = kv.swapper.num_missing(holders) + spare + step.num_taken
    return Obstacle(ObstacleKind.KV_BLOCKS, needed, kv.num_free) if needed > kv.num_free else None
