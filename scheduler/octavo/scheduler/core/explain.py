"""Explanations: where a request stands and what it waits for, found by planning the next step on a copy of the
books."""

import copy
from dataclasses import dataclass, field, fields
from typing import TypeVar

from octavo.scheduler.core.admission import (
    Obstacle,
    ObstacleKind,
    capacity_obstacle,
    read_obstacle,
)
from octavo.scheduler.core.faults import isolation
from octavo.scheduler.core.replica import Replica
from octavo.scheduler.core.sequence import Placement, PrefixGroup, RequestGroup, Sequence, SequenceGroup, SequenceStatus
from octavo.scheduler.core.state import SchedulerState
from octavo.scheduler.core.step.builder import StepBuilder
from octavo.scheduler.core.step.policies import StepPolicy, empty_step
from octavo.scheduler.core.step.running import shortage

_Part = TypeVar("_Part", SequenceGroup, Sequence, Placement)
_FIELDS = {kind: [each.name for each in fields(kind)] for kind in (RequestGroup, PrefixGroup, Sequence, Placement)}


@dataclass(frozen=True)
class Rehearsal:
    """A step of a replica, planned on a copy as far as the groups that run or are swapped out there go: it shows what
    is left to waiting groups. `stands` tells whether the step is planned at all before outstanding steps are
    answered."""

    builder: StepBuilder
    stands: bool
    _copies: dict[int, object]

    @property
    def preempts(self) -> bool:
        """Tells whether any group loses its blocks in the step, or in one as soon as outstanding steps are answered."""
        return self.builder.has_preempted or not self.stands

    def double(self, group: RequestGroup) -> RequestGroup:
        """Returns the copy of a request that is on the replica."""
        double = self._copies[id(group)]
        assert isinstance(double, RequestGroup)
        return double


def rehearse(
    state: SchedulerState, policy: StepPolicy, replica: Replica, head: RequestGroup | None, now: float
) -> Rehearsal:
    """Plans the next step of `replica` on a copy; `head` is the first of the waiting queue. Copying takes some
    microseconds for each sequence that is there, so this is for those who ask, not for every step."""
    copies: dict[int, object] = {id(part): part for part in _unchanged(replica)}
    _double_groups(replica, copies)
    builder = empty_step(state, copy.deepcopy(replica, copies))
    return Rehearsal(builder, policy.begin(builder, head, now), copies)


def _double_groups(replica: Replica, copies: dict[int, object]) -> None:
    """Adds copies of all groups and sequences on the replica to `copies`, by the `id` of the original. They share
    everything that the originals hold but each other: planning sets fields anew, and changes nothing that is in
    them."""
    groups = [(group, _double(group)) for group in (*replica.running, *replica.swapped, *replica.prefixes.to_compute)]
    copies.update((id(group), double) for group, double in groups)
    doubles = [(sequence, _double(sequence)) for group, _ in groups for sequence in group.sequences]
    copies.update((id(sequence), double) for sequence, double in doubles)
    for _, double in groups:
        double.sequences = copy.deepcopy(double.sequences, copies)
    for sequence, twin in doubles:
        here, there = sequence.placement, _double(sequence.placement)
        twin.placement = there
        # Few sequences have any of these.
        if here.leader is not None or here.parent is not None or here.waits_for is not None:
            others = (here.leader, here.parent, here.waits_for)
            there.leader, there.parent, there.waits_for = copy.deepcopy(others, copies)


def _double(original: _Part) -> _Part:
    """Makes another object with the same fields."""
    double = object.__new__(type(original))
    for name in _FIELDS[type(original)]:
        setattr(double, name, getattr(original, name))
    return double


def _unchanged(replica: Replica) -> list[object]:
    """Returns the objects that planning reads and leaves as they are, besides what groups and sequences hold."""
    found: list[object] = [
        replica.hello,
        replica.config,
        replica.stats,
        replica.size,
        replica.prices,
        replica.steps,
        replica.availability,
    ]
    if replica.suspect is not None and not replica.isolates:
        found.append(replica.suspect)
    return found


# -- explanations -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ReplicaObstacle:
    """An obstacle that keeps a group from a replica's next step. `replica` is None where it is not a matter of one."""

    replica: Replica | None
    obstacle: Obstacle


@dataclass(frozen=True, slots=True)
class Explanation:
    """Says where a group is and what it waits for. `replica`: where it runs or is swapped out; `queue_position`: from 1
    on, 0 while it runs; `ahead`: groups before it in its queue, the next one first; `step_ids`: outstanding steps with
    it.

    The obstacles are those it would meet in the next step if it were its turn; none, if any replica has room. With no
    group ahead and no obstacle it joins the next step.
    """

    group: RequestGroup
    replica: Replica | None
    queue_position: int
    ahead: list[RequestGroup] = field(default_factory=list)
    obstacles: list[ReplicaObstacle] = field(default_factory=list)
    step_ids: list[int] = field(default_factory=list)


def explain(state: SchedulerState, policy: StepPolicy, request_id: str, now: float) -> list[Explanation]:
    """Returns an explanation for each request of this id: two frontends may use the same. `now` is in seconds on the
    scheduler's clock."""
    homes = homes_of_groups(state)
    groups = [group for group in state.requests.groups if group.request_id == request_id]
    return [_explain(state, policy, group, homes.get(group), now) for group in groups]


def describe(explanation: Explanation) -> str:
    """Puts an explanation in one line, for a log."""
    group, steps = explanation.group, ", ".join(map(str, explanation.step_ids))
    where = f"{group.request_id} is {group.status.name.lower()}"
    if explanation.replica is not None:
        where += f" on {explanation.replica.hello.worker_id}"
    if explanation.queue_position > 1:
        where += f" behind {len(explanation.ahead)}"
    whys = [
        f"{each.obstacle.kind.value} ({each.obstacle.needed} needed, {each.obstacle.available} available)"
        for each in explanation.obstacles
    ]
    return f"{where}; steps under way with it: {steps or 'none'}; what keeps it: {', '.join(whys) or 'nothing'}"


def homes_of_groups(state: SchedulerState) -> dict[SequenceGroup, Replica]:
    """Returns the replica of each group that is not waiting."""
    return {group: replica for replica in state.replicas for group in (*replica.running, *replica.swapped)}


def _explain(
    state: SchedulerState, policy: StepPolicy, group: RequestGroup, home: Replica | None, now: float
) -> Explanation:
    if home is None:
        ahead = _ahead(state, group)
        obstacles = _admission_obstacles(state, policy, group, ahead, now)
        return Explanation(group, None, len(ahead) + 1, ahead, obstacles)
    if move := state.moves.of(group):
        copied = ReplicaObstacle(move.target, Obstacle(ObstacleKind.MOVE, move.num_blocks, 0))
        return Explanation(group, home, _place_at(home, group), [], [copied])
    steps = [step.step_id for step in home.outstanding if group in step.groups or group in step.swapped_out]
    is_running = group.status is SequenceStatus.RUNNING
    ahead = [] if is_running else _ahead_of_swapped(state, home, group)
    if group is not home.suspect and _stands_still(state, home):
        found: Obstacle | None = _isolation(state, group)
    else:
        found = None if is_running else _return_obstacle(state, policy, home, group, ahead, now)
    obstacles = [ReplicaObstacle(home, found)] if found else []
    return Explanation(group, home, 0 if is_running else len(ahead) + 1, ahead, obstacles, steps)


def _place_at(home: Replica, group: RequestGroup) -> int:
    """Returns the position of a group among those that are swapped out; 0 if it is not."""
    return 0 if group.status is SequenceStatus.RUNNING else home.swapped.index(group) + 1


def _stands_still(state: SchedulerState, replica: Replica) -> bool:
    """Tells whether the replica's next step is a suspect's alone."""
    suspect = isolation.suspect_of(state, replica)
    if suspect is None or suspect.status is not SequenceStatus.WAITING:
        return replica.isolates
    return empty_step(state, replica).obstacle(suspect) is None


def _isolation(state: SchedulerState, group: RequestGroup) -> Obstacle:
    """Returns the obstacle of a group that waits for the isolation of others (`octavo.scheduler.core.faults`)."""
    return Obstacle(ObstacleKind.ISOLATION, 0, sum(other is not group for other in state.requests.suspects))


# -- waiting --------------------------------------------------------------------------------------------------------


def _ahead(state: SchedulerState, group: RequestGroup) -> list[RequestGroup]:
    """Returns the waiting groups that come before `group`. Groups that no replica could ever hold are passed over;
    suspects have a queue of their own."""
    queue = list(state.requests.waiting)
    before = queue[: queue.index(group)]
    if group in state.requests.suspects:
        return [other for other in before if other in state.requests.suspects]
    return [other for other in before if state.replica_table.can_hold(other)] if state.replicas else before


def _admission_obstacles(
    state: SchedulerState, policy: StepPolicy, group: RequestGroup, ahead: list[RequestGroup], now: float
) -> list[ReplicaObstacle]:
    replicas = [replica for replica in state.replicas if state.replica_table.may_take(replica, group)]
    if not replicas:
        return [ReplicaObstacle(None, Obstacle(ObstacleKind.NO_WORKER, 1, 0))]
    if group in state.requests.suspects:
        return _isolation_obstacles(state, group)
    if reading := read_obstacle(group):
        return [ReplicaObstacle(_reader(state, group), reading)]
    obstacles = []
    for replica in replicas:
        if isolation.suspect_of(state, replica) is not None:
            found: Obstacle | None = _isolation(state, group)
        else:
            head = next((other for other in ahead if state.replica_table.takes(replica, other)), group)
            found = _admission_obstacle(state, policy, replica, group, head, now)
        if found is None:
            return []
        obstacles.append(ReplicaObstacle(replica, found))
    return obstacles


def _reader(state: SchedulerState, group: RequestGroup) -> Replica | None:
    """Returns the replica for which is read what the group waits for."""
    reads = (group.reads or {}).items()
    waits = (replica_id for replica_id, asked in reads if not all(read.is_over for read in asked))
    return next((state.replica_table.replicas.get(replica_id) for replica_id in waits), None)


def _isolation_obstacles(state: SchedulerState, suspect: RequestGroup) -> list[ReplicaObstacle]:
    """Returns the obstacles of a suspect: it is another's turn, or the replica that is to isolate it lacks
    something."""
    homes = (replica for replica in state.replicas if isolation.suspect_of(state, replica) is suspect)
    replica = next(homes, None)
    if replica is None:
        return [ReplicaObstacle(None, _isolation(state, suspect))]
    found = empty_step(state, replica).obstacle(suspect)
    return [ReplicaObstacle(replica, found)] if found else []


def _admission_obstacle(
    state: SchedulerState, policy: StepPolicy, replica: Replica, group: RequestGroup, head: RequestGroup, now: float
) -> Obstacle | None:
    if lacks := capacity_obstacle(group.request, replica):
        return lacks
    rehearsal = rehearse(state, policy, replica, head, now)
    builder = rehearsal.builder
    if rehearsal.preempts:
        return shortage(replica)
    if builder.budget and not policy.admits(builder):
        return policy.keeps_out(empty_step(state, replica), head, now) or Obstacle(ObstacleKind.TOKEN_BUDGET, 1, 0)
    return builder.obstacle(group, whole_prompt=policy.whole_prompts)


# -- swapped out ----------------------------------------------------------------------------------------------------


def _ahead_of_swapped(state: SchedulerState, replica: Replica, group: RequestGroup) -> list[RequestGroup]:
    """Returns the groups that come back to the replica before `group`: swapped out too, or to be computed again."""
    waiting = state.replica_table.returning(replica)
    return sorted((other for other in (*replica.swapped, *waiting) if other.order < group.order), key=_order)


def _order(group: RequestGroup) -> tuple[float, int]:
    return group.order


def _return_obstacle(
    state: SchedulerState,
    policy: StepPolicy,
    replica: Replica,
    group: RequestGroup,
    ahead: list[RequestGroup],
    now: float,
) -> Obstacle | None:
    head = next(state.requests.waiting.candidates(1, state.replica_table.can_hold), None)
    rehearsal = rehearse(
        state, policy, replica, head if head and state.replica_table.takes(replica, head) else None, now
    )
    double = rehearsal.double(group)
    if double in rehearsal.builder.resumed:
        return None
    if rehearsal.preempts:
        return shortage(replica)
    found = rehearsal.builder.return_obstacle(double)
    if found is None and not ahead:
        # A step of prompts alone brings nothing back.
        return Obstacle(ObstacleKind.TOKEN_BUDGET, len(group.holders), 0)
    return found
