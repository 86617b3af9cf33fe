"""Watches which mechanisms of the scheduler meet: seen from outside, in plans, results and what the core shows of
itself.

A mechanism is *on* a group or on a replica.

* What a plan does once (a prefix hit, a block copied, a fork of followers, ...) is on the group from that plan until
  its answer has been taken in. So what an outstanding plan does meets what later plans do beside it, and whatever its
  answer brings.
* What lasts (a group swapped out, a search, a window that has passed blocks, a prompt that is computed in chunks, a
  replica that is cordoned, ...) is on it from beginning to end.
* A loss or a failure is on the groups that it struck from that event until the first plan in which they come back has
  been answered.

Two mechanisms have *met* when, right after one event or one turn of the scheduler, both are on one group, or one on a
group and the other on the replica where that group is (running or swapped out), or both on one replica. An event that
ends what it strikes (a failure, a loss) meets what was on that when it came.
"""

import enum
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from itertools import combinations

from octavo.scheduler.core.events import (
    CacheReset,
    Effect,
    Event,
    ReplicaLost,
    RequestSubmitted,
    SendToReplica,
    StepAnswered,
)
from octavo.scheduler.core.replica import Replica, ReplicaState
from octavo.scheduler.core.scheduler import Scheduler
from octavo.scheduler.core.sequence import PrefixGroup, RequestGroup, Sequence, SequenceGroup, SequenceStatus
from octavo.testing.oracles.paged import paged
from octavo.wire.base import NULL_BLOCK
from octavo.wire.steps import StepOutcome, StepPlan


class Mechanism(enum.StrEnum):
    """In the order in which the matrix has them."""

    # A prompt, or what is computed again, takes more than one step.
    CHUNK = "chunk"
    # A sequence starts with blocks that were computed before, or are to be by an outstanding step; or it comes back
    # from CPU memory to blocks that others hold.
    HIT = "prefix hit"
    # A sequence starts with a block that an outstanding step is to fill; on the one that fills it, too.
    PROVISIONAL = "provisional entry"
    # A block that was filled is given up for an older one with the same content, until the worker has been told.
    DUPLICATE = "duplicate"
    # A block is copied for one of several that share it, a pinned prefix's last block too.
    COPY_ON_WRITE = "copy-on-write"
    SWAP = "swap"
    # A group was preempted without being swapped out, until all that was known of it is computed.
    RECOMPUTE = "recompute"
    # A prefix that is computed to be pinned, and whoever has blocks of one that is.
    PIN = "pin"
    # The prefix cache was reset while the group held blocks, until it starts over.
    RESET = "cache reset"
    # A window has left blocks of the group behind.
    WINDOW = "window"
    BEAM = "beam"
    # A sequence is computed along with another, until the plan that forks it has been answered.
    FOLLOWER = "follower"
    # A step checks guesses of what a sequence goes on with.
    DRAFT = "draft"
    # A sequence failed; on its group, and on those that start over with it.
    FAILED_SEQUENCE = "failed sequence"
    FAILED_STEP = "failed step"
    # A step found no memory; on the groups in it, and on the replica while its steps are smaller.
    HALVED_STEP = "halved step"
    CORDON = "cordon"
    DRAIN = "drain"
    # A replica has, or is to have, a suspect alone in its steps.
    ISOLATION = "isolation"
    LOST_WORKER = "lost worker"
    LOST_SCHEDULER = "lost scheduler"
    # A group comes before one of higher priority, for it came long enough before.
    AGEING = "ageing"
    # A group is admitted before another that does not fit and would have been first; on both.
    OVERTAKING = "overtaking"


Pair = tuple[Mechanism, Mechanism]
_PLACE = {mechanism: place for place, mechanism in enumerate(Mechanism)}
PAIRS: list[Pair] = list(combinations(Mechanism, 2))
# A step, by its replica and its number there.
_Step = tuple[int, int]
# What is on a group, each until a step is answered; None: it is not known yet which.
_Marks = dict[Mechanism, _Step | None]
# Those that end with the answer to the next plan that has the group.
_UNTIL_BACK = {
    Mechanism.FAILED_SEQUENCE,
    Mechanism.FAILED_STEP,
    Mechanism.HALVED_STEP,
    Mechanism.LOST_WORKER,
    Mechanism.LOST_SCHEDULER,
}
_FAILURES = {StepOutcome.FAILED: Mechanism.FAILED_STEP, StepOutcome.OUT_OF_MEMORY: Mechanism.HALVED_STEP}


@dataclass
class Meetings:
    """Counts how often each pair has met."""

    counts: Counter[Pair] = field(default_factory=Counter)

    def meet(self, mechanisms: Iterable[Mechanism]) -> None:
        present = sorted(set(mechanisms), key=_PLACE.__getitem__)
        self.counts.update(combinations(present, 2))

    @property
    def missing(self) -> set[Pair]:
        """Returns the pairs that have never met."""
        return {pair for pair in PAIRS if not self.counts[pair]}

    def matrix(self, impossible: Collection[Pair]) -> str:
        """A row and a column for each mechanism: how often they met, `.` where they never did and `-` where they
        cannot."""
        width = max(map(len, Mechanism))
        heads = [f"{number:>6}" for number in range(1, len(Mechanism))]
        lines = [" " * (width + 4) + "".join(heads)]
        for number, row in enumerate(Mechanism, 1):
            cells = [self._cell((column, row), impossible) for column in list(Mechanism)[: number - 1]]
            lines.append(f"{number:>2}  {row:<{width}}" + "".join(cells))
        return "\n".join(lines)

    def _cell(self, pair: Pair, impossible: Collection[Pair]) -> str:
        return f"{self.counts[pair] or ('-' if pair in impossible else '.'):>6}"


def label(pair: Pair) -> str:
    """Returns the pair's name for people."""
    return f"{pair[0]} x {pair[1]}"


class MechanismWatch:
    """Watches one scheduler after the other. To be told of every event and every turn, before and after."""

    def __init__(self, meetings: Meetings) -> None:
        self._meetings = meetings
        self._marks: defaultdict[SequenceGroup, _Marks] = defaultdict(dict)
        # What was so before the event or the turn.
        self._on_replica: dict[int, set[Mechanism]] = {}
        self._on_group: dict[SequenceGroup, set[Mechanism]] = {}
        self._held: dict[int, list[SequenceGroup]] = {}
        self._names: dict[int, dict[int, SequenceGroup]] = {}
        self._queue: list[RequestGroup] = []
        # How a replica's last failed step failed.
        self._failures: dict[int, Mechanism] = {}
        # Requests, by frontend, that a lost scheduler held.
        self._orphans: set[str] = set()

    def before(self, core: Scheduler) -> None:
        """Something is about to happen."""
        self._on_replica = {each.replica_id: _of_replica(each) for each in core.replicas.values()}
        self._held = {each.replica_id: _held(each) for each in core.replicas.values()}
        self._queue = list(core.waiting)
        self._on_group = {
            group: self._of_group(group, replica) | self._on_replica[replica.replica_id]
            for replica in core.replicas.values()
            for group in self._held[replica.replica_id]
        }
        self._names = {
            replica.replica_id: {
                sequence.placement.sequence_id: group
                for group in self._held[replica.replica_id]
                for sequence in group.sequences
                if sequence.placement.is_introduced
            }
            for replica in core.replicas.values()
        }

    def after_event(self, core: Scheduler, event: Event, effects: list[Effect]) -> None:
        """An event has been handled."""
        answered: _Step | None = None
        match event:
            case StepAnswered(replica_id, result):
                answered = replica_id, result.step_id
                replica = core.replicas.get(replica_id)
                restarting = set(replica.restarts) if replica else set()
                names = self._names.get(replica_id, {})
                failed = {names[f.sequence_id] for f in result.failed if f.sequence_id in names}
                if result.failed:
                    self._strike(Mechanism.FAILED_SEQUENCE, failed | restarting)
                if result.outcome is not StepOutcome.DONE:
                    # A step is skipped for one that failed before.
                    kind = self._failures[replica_id] = _FAILURES.get(result.outcome) or self._failures[replica_id]
                    # Those that start over at once are in no list any more.
                    gone = set(self._held.get(replica_id, [])) - set(_held(replica) if replica else [])
                    self._strike(kind, restarting | gone)
                    self._meet_on(replica_id, kind)
            case CacheReset(salt):
                for replica_id, held in self._held.items():
                    self._strike(
                        Mechanism.RESET, (group for group in held if salt in (None, group.request.cache_key.salt))
                    )
                    self._meet_on(replica_id, Mechanism.RESET)
            case RequestSubmitted(_, request) if request.request_id in self._orphans:
                self._orphans.discard(request.request_id)
                for group in core.waiting:
                    if group.request_id == request.request_id:
                        self._marks[group].setdefault(Mechanism.LOST_SCHEDULER, None)
        for effect in effects:
            if isinstance(effect, ReplicaLost):
                self._strike(Mechanism.LOST_WORKER, self._held.get(effect.replica_id, []))
                self._meet_on(effect.replica_id, Mechanism.LOST_WORKER)
                self._end({until for until in self._open_steps() if until[0] == effect.replica_id})
        self._look(core)
        if answered is not None:
            self._end({answered})
        self._forget(core)

    def after_turn(self, core: Scheduler, effects: list[Effect]) -> None:
        """Plans have been made."""
        self._see_preemptions(core)
        self._see_overtaking(core)
        for effect in effects:
            if isinstance(effect, SendToReplica) and isinstance(effect.message, StepPlan):
                self._see_plan(core.replicas[effect.replica_id], effect.message)
        self._look(core)
        self._forget(core)

    def scheduler_lost(self, core: Scheduler) -> None:
        """Ends the scheduler; requests that it held will be submitted to the next one."""
        self.before(core)
        for mechanisms in self._on_group.values():
            self._meetings.meet({*mechanisms, Mechanism.LOST_SCHEDULER})
        for group in core.waiting:
            self._meetings.meet({*self._of_waiting(group, core), Mechanism.LOST_SCHEDULER})
        for replica_id in core.replicas:
            self._meet_on(replica_id, Mechanism.LOST_SCHEDULER)
        self._orphans = {group.request_id for group in core.groups}
        self._marks.clear()

    # -- marks ------------------------------------------------------------------------------------------------------

    def _strike(self, mechanism: Mechanism, groups: Iterable[SequenceGroup]) -> None:
        """A loss or a failure meets what was on these groups, and stays with them."""
        for group in groups:
            self._meetings.meet({*self._on_group.get(group, ()), mechanism})
            self._marks[group][mechanism] = None

    def _meet_on(self, replica_id: int, mechanism: Mechanism) -> None:
        self._meetings.meet({*self._on_replica.get(replica_id, ()), mechanism})

    def _open_steps(self) -> set[_Step]:
        return {until for marks in self._marks.values() for until in marks.values() if until is not None}

    def _end(self, steps: set[_Step]) -> None:
        """Ends the marks that lasted until one of `steps` was answered."""
        for marks in self._marks.values():
            for mechanism in [each for each, until in marks.items() if until in steps]:
                del marks[mechanism]

    def _forget(self, core: Scheduler) -> None:
        alive = {group for replica in core.replicas.values() for group in _held(replica)} | set(core.groups)
        for group in self._marks.keys() - alive:
            del self._marks[group]

    # -- plans ------------------------------------------------------------------------------------------------------

    def _see_preemptions(self, core: Scheduler) -> None:
        """Counts every group that lost its blocks in a turn as preempted."""
        waiting = set(core.waiting)
        for held in self._held.values():
            for group in held:
                if group in waiting:
                    self._meetings.meet({*self._on_group[group], Mechanism.RECOMPUTE})
                    self._marks[group][Mechanism.RECOMPUTE] = None

    def _see_overtaking(self, core: Scheduler) -> None:
        # PoisonDetector come out of turn, and what no replica holds is passed over.
        suspects, waiting = core.request_table.suspects, set(core.waiting)
        passed: list[RequestGroup] = []
        for group in self._queue:
            if group in waiting:
                if group not in suspects and core.replica_table.can_hold(group):
                    passed.append(group)
            elif passed and group not in suspects and (replica := core.request_table.replica_of(group)):
                step = replica.replica_id, replica.next_plan.step_id - 1
                for each in (group, *passed):
                    self._marks[each][Mechanism.OVERTAKING] = step

    def _see_plan(self, replica: Replica, plan: StepPlan) -> None:
        step = replica.replica_id, plan.step_id
        booked = replica.outstanding[-1]
        groups = list(dict.fromkeys((*booked.groups, *booked.swapped_out)))
        names = {sequence.placement.sequence_id: group for group in _held(replica) for sequence in group.sequences}
        owners = {
            block_id: g for g in groups for s in g.live if replica.kv.holds(s) for block_id in _blocks(replica, s)
        }

        def mark(mechanism: Mechanism, *marked: SequenceGroup | None) -> None:
            for group in marked:
                if group is not None:
                    self._marks[group][mechanism] = step

        pinned = {block_id for blocks in replica.kv.pinned.values() for block_id in blocks}
        copied = {move.target for move in plan.moves.copy}
        brought = {move.target for move in plan.moves.swap_in}
        mark(Mechanism.SWAP, *booked.swapped_out)
        for start in plan.starts:
            group = names[start.sequence_id]
            if Mechanism.SWAP in self._on_group.get(group, ()):
                mark(Mechanism.SWAP, group)
                if _finds_more(replica, group, brought):
                    mark(Mechanism.HIT, group)
            elif start.num_computed:
                mark(Mechanism.HIT, group)
        for group in groups:
            for sequence in group.sequences:
                for step_id, filler in sequence.placement.builds_on:
                    if step_id > replica.next_plan.answered_step_id:
                        mark(Mechanism.PROVISIONAL, group, names.get(filler))
        for remap in plan.remaps:
            if remap.block_id not in copied:
                mark(Mechanism.DUPLICATE, names.get(remap.sequence_id))
        for move in plan.moves.copy:
            mark(Mechanism.COPY_ON_WRITE, owners.get(move.target))
            if move.source in pinned:
                mark(Mechanism.PIN, owners.get(move.target))
        for work in plan.work:
            if work.follower_ids:
                mark(Mechanism.FOLLOWER, names.get(work.sequence_id))
        for draft in plan.drafts:
            mark(Mechanism.DRAFT, names.get(draft.sequence_id))
        for group in groups:
            self._see_progress(group, step, any(group is each for each, _ in (*booked.samplers, *booked.beams)))

    def _see_progress(self, group: SequenceGroup, step: _Step, chooses: bool) -> None:
        marks = self._marks[group]
        if any(
            0 < each.placement.num_computed < each.num_known for each in group.live if each.placement.leader is None
        ):
            marks[Mechanism.CHUNK] = None
        elif Mechanism.CHUNK in marks:
            marks[Mechanism.CHUNK] = step
        if chooses and Mechanism.RECOMPUTE in marks:
            marks[Mechanism.RECOMPUTE] = step
        for mechanism in marks.keys() & _UNTIL_BACK:
            marks[mechanism] = step

    # -- what is on whom --------------------------------------------------------------------------------------------

    def _look(self, core: Scheduler) -> None:
        for replica in core.replicas.values():
            on_replica = _of_replica(replica)
            self._meetings.meet(on_replica)
            for group in _held(replica):
                self._meetings.meet(self._of_group(group, replica) | on_replica)
        for group in core.waiting:
            # Whoever waits has lost its blocks, and finds none from before.
            self._marks[group].pop(Mechanism.RESET, None)
            self._meetings.meet(self._of_waiting(group, core))

    def _of_waiting(self, group: SequenceGroup, core: Scheduler) -> set[Mechanism]:
        found = set(self._marks.get(group, ()))
        others = (each for each in core.waiting if each.request.tenant == group.request.tenant)
        if core.config.priority_ageing_s and _is_before_higher(group, others):
            found.add(Mechanism.AGEING)
        if group.search is not None:
            found.add(Mechanism.BEAM)
        return found

    def _of_group(self, group: SequenceGroup, replica: Replica) -> set[Mechanism]:
        found = set(self._marks.get(group, ()))
        held = [sequence for sequence in group.live if replica.kv.holds(sequence)]
        blocks = {block_id for sequence in held for block_id in _blocks(replica, sequence)}
        if group.status is SequenceStatus.SWAPPED:
            found.add(Mechanism.SWAP)
        if isinstance(group, PrefixGroup) or any(not blocks.isdisjoint(held) for held in replica.kv.pinned.values()):
            found.add(Mechanism.PIN)
        if any(NULL_BLOCK in blocks for each in held for blocks in replica.kv.block_table(each)):
            found.add(Mechanism.WINDOW)
        if group.search is not None:
            found.add(Mechanism.BEAM)
        if any(sequence.placement.leader is not None for sequence in group.live):
            found.add(Mechanism.FOLLOWER)
        if any(owner in group.sequences for owner, _ in replica.next_plan.remaps):
            found.add(Mechanism.DUPLICATE)
        if replica.config.priority_ageing_s and _is_before_higher(group, replica.requests):
            found.add(Mechanism.AGEING)
        return found


def _of_replica(replica: Replica) -> set[Mechanism]:
    size = replica.size
    states = {
        Mechanism.CORDON: replica.availability.is_cordoned,
        Mechanism.DRAIN: replica.availability.state is ReplicaState.DRAINING,
        Mechanism.ISOLATION: replica.suspect is not None,
        Mechanism.HALVED_STEP: size.tokens < size.max_tokens or size.seqs < size.max_seqs,
    }
    return {mechanism for mechanism, is_on in states.items() if is_on}


def _finds_more(replica: Replica, group: SequenceGroup, brought: set[int]) -> bool:
    """Tells whether a group that comes back from CPU memory shares blocks that others hold, instead of bringing them
    back."""
    size = replica.kv.block_size
    blocks = {
        block_id
        for sequence in group.holders
        for table in replica.kv.block_table(sequence)
        for block_id in table[: min(sequence.placement.num_computed, sequence.num_known - 1) // size]
    }
    return any(each not in brought and each != NULL_BLOCK and paged(replica).ref_count(each) > 1 for each in blocks)


def _held(replica: Replica) -> list[SequenceGroup]:
    return [*replica.running, *replica.swapped]


def _blocks(replica: Replica, sequence: Sequence) -> list[int]:
    return [block_id for blocks in replica.kv.block_table(sequence) for block_id in blocks]


def _is_before_higher(group: SequenceGroup, others: Iterable[SequenceGroup]) -> bool:
    priority = group.request.priority
    return isinstance(group, RequestGroup) and any(
        other.request.priority > priority and other.order > group.order for other in others
    )
