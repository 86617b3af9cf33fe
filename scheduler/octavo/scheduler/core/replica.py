"""A replica as the scheduler knows it: its blocks, its groups, and whether it gets new ones."""

import bisect
import enum
from collections import deque
from dataclasses import dataclass, field

from octavo.scheduler.core.config import SchedulerConfig
from octavo.scheduler.core.sequence import BlockRead, PrefixGroup, RequestGroup, Sequence, SequenceGroup, SequenceStatus
from octavo.scheduler.core.speculation.asking import AskingPrices
from octavo.scheduler.core.speculation.pricing import Prices
from octavo.scheduler.core.steps_in_flight import NextPlan, OutstandingStep, ReplicaStats, StepsInFlight, StepSize
from octavo.scheduler.kv.memory import KVMemory
from octavo.wire.base import MAX_MESSAGE_BYTES
from octavo.wire.requests import Prefix, RejectReason
from octavo.wire.steps import BlockMove, Remap, StepOutcome, StepResult, WorkerHello


class ReplicaState(enum.Enum):
    """States a replica is in: READY gets new requests; CORDONED gets none until an operator readmits it; DRAINING gets
    none and is let go once it holds none."""

    READY = enum.auto()
    CORDONED = enum.auto()
    DRAINING = enum.auto()


@dataclass(slots=True)
class Availability:
    """Says what operators and the worker itself have made of a replica: whether it gets new requests, and whether its
    plans leave."""

    is_cordoned: bool = False
    # While draining: until when requests may go on that another replica could take; and whether the worker has said
    # that its process is to end.
    drain_until: float | None = None
    wants_to_leave: bool = False
    # No plan leaves: once outstanding steps are answered, requests move away or the worker ends.
    is_paused: bool = False

    @property
    def state(self) -> ReplicaState:
        if self.drain_until is not None:
            return ReplicaState.DRAINING
        return ReplicaState.CORDONED if self.is_cordoned else ReplicaState.READY

    def cordon(self) -> None:
        """Gives the replica no new requests until it is readmitted."""
        self.is_cordoned = True

    def drain(self, until: float) -> None:
        """Gives the replica no new requests; those there may go on until `until`, if others could take them."""
        self.drain_until = until

    def ask_to_leave(self, until: float) -> None:
        """Notes that the worker's process is to end; drains it, unless it is drained already."""
        self.wants_to_leave = True
        if self.drain_until is None:
            self.drain_until = until

    def readmit(self) -> None:
        """Takes a cordon or a drain back."""
        self.is_cordoned = self.is_paused = False
        self.drain_until = None

    def pause(self, is_paused: bool) -> None:
        """Lets no plan leave, or lets them leave again."""
        self.is_paused = is_paused


@dataclass(slots=True)
class ReplicaPrefixes:
    """The pinned prefixes of one replica: the names of those it has or is to have; the groups that are still to compute
    some, before anything else that is new there; and by name, with the blocks that each takes, those it is without
    while a request that was accepted needs their blocks."""

    names: set[str] = field(default_factory=set)
    to_compute: list[PrefixGroup] = field(default_factory=list)
    owed: dict[str, int] = field(default_factory=dict)


# Of all outputs of a step: half of what a message holds.
_MAX_OUTPUT_BYTES = MAX_MESSAGE_BYTES // 2


def _order(group: SequenceGroup) -> tuple[float, int]:
    return group.order


@dataclass(eq=False)
class Replica:
    """A registered worker; it begins with an empty pool and nothing running. `hello.incarnation` is its id."""

    hello: WorkerHello
    config: SchedulerConfig
    steps: StepsInFlight
    availability: Availability
    kv: KVMemory
    # The suspect that this replica isolates, or is to: no other group comes, and while the suspect runs, no other is in
    # a step.
    suspect: RequestGroup | None = None
    # Nothing is kept between steps, so that each group's tokens are computed in one.
    computes_whole: bool = field(init=False)
    size: StepSize = field(init=False)
    prices: Prices = field(init=False)
    asking: AskingPrices = field(init=False)
    # In order of arrival; changed by `add` and `remove` alone.
    running: list[SequenceGroup] = field(default_factory=list)
    num_running_seqs: int = 0
    # Groups that are to go on elsewhere, with their blocks; they are in no new step. And how many come from elsewhere.
    moving: set[SequenceGroup] = field(default_factory=set)
    num_coming: int = 0
    # In order of arrival.
    swapped: list[RequestGroup] = field(default_factory=list)
    prefixes: ReplicaPrefixes = field(default_factory=ReplicaPrefixes)
    next_plan: NextPlan = field(default_factory=NextPlan)
    # Groups that start over once nothing is outstanding, and why: their step failed, or was skipped after one that did;
    # or what they shared with one that failed made them fail too.
    restarts: dict[SequenceGroup, tuple[RejectReason, str]] = field(default_factory=dict)
    stats: ReplicaStats = field(default_factory=ReplicaStats)

    def __post_init__(self) -> None:
        device, pooling = self.hello.device, self.hello.model.pooling
        budget, max_seqs = self.config.token_budget(device), self.config.max_parallel_on(device)
        min_tokens = self.hello.block_size
        self.computes_whole = not self.hello.kv_groups
        if self.computes_whole:
            # The longest text must fit, however small steps have to become.
            min_tokens = self.hello.model.max_model_len
            budget = max(budget, min_tokens)
        if pooling is not None:
            # Outputs of all sequences travel in one message.
            max_seqs = max(1, min(max_seqs, _MAX_OUTPUT_BYTES // (4 * pooling.num_outputs)))
        self.size = StepSize(budget, max_seqs, min_tokens)
        self.prices = Prices(self.hello.costs.rows if self.hello.costs else [])
        self.asking = AskingPrices(self.hello.costs.proposals if self.hello.costs else [])

    @property
    def replica_id(self) -> int:
        return self.hello.incarnation

    @property
    def outstanding(self) -> deque[OutstandingStep]:
        """Returns the steps that are under way, in the order in which they were sent."""
        return self.steps.outstanding

    @property
    def is_ready(self) -> bool:
        """Tells whether this replica gets new requests."""
        return self.availability.state is ReplicaState.READY

    @property
    def requests(self) -> list[RequestGroup]:
        """Returns the groups held here for frontends, running or swapped out."""
        return [group for group in (*self.running, *self.swapped) if isinstance(group, RequestGroup)]

    @property
    def may_plan(self) -> bool:
        """Tells whether another plan may leave now."""
        # Every replica is asked whenever one has answered, so what most often decides comes first.
        if (num_outstanding := len(self.steps.outstanding)) >= self.config.max_steps_in_flight:
            return False
        # Who moves would stand still for one step more, at either end.
        if num_outstanding and (self.steps.is_awaited or self.isolates or self.moving or self.num_coming):
            return False
        return not (self.restarts or self.availability.is_paused)

    @property
    def has_work(self) -> bool:
        """Tells whether a step could go on with, or begin, anything that is here."""
        if self.running or self.swapped or self.prefixes.to_compute or self.suspect:
            return True
        return self.kv.disk is not None and self.kv.disk.wants_plan

    @property
    def isolates(self) -> bool:
        """Tells whether a suspect runs here, alone in its steps."""
        return self.suspect is not None and self.suspect.status is SequenceStatus.RUNNING

    @property
    def stepping(self) -> list[SequenceGroup]:
        """Returns the running groups that may be in the next step."""
        if self.isolates and self.suspect:
            return [self.suspect]
        return [group for group in self.running if group not in self.moving] if self.moving else self.running

    @property
    def token_budget(self) -> int:
        """Returns how many tokens the next step may compute: at least one for each sequence that runs."""
        return max(self.size.tokens, self.num_running_seqs)

    @property
    def max_parallel(self) -> int:
        """Returns how many sequences may run side by side. A group that would be alone may be wider."""
        return self.size.seqs if self.running else self.size.max_seqs

    @property
    def load(self) -> int:
        """Returns the tokens still to be computed of running groups: what a new request would wait behind."""
        return sum(sequence.num_uncomputed for group in self.running for sequence in group.live)

    @property
    def pinned_budget(self) -> int:
        """Returns how many blocks pinned prefixes may take."""
        return int(self.kv.num_blocks * self.config.max_pinned_share)

    def sent(self, step: OutstandingStep, remaps: list[tuple[Sequence, Remap]], *, is_awaited: bool = False) -> None:
        """Books a plan that leaves; `remaps` are changes that the one after it tells the worker. Where the step
        `is_awaited`, no other leaves before it is answered."""
        self.steps.outstanding.append(step)
        self.steps.is_awaited = is_awaited
        self.next_plan.sent(remaps)

    def answered(self, step: OutstandingStep, result: StepResult, now: float) -> float:
        """Books the answer to `step`, the oldest that is outstanding; returns how long the step took, in seconds."""
        seconds, done = self.steps.answered(step, now), result.outcome is StepOutcome.DONE
        self.next_plan.answered_step_id = step.step_id
        self.kv.step_answered(step.step_id, valid=done)
        if done:
            self.stats.add(step, result)
            if step.is_alone and step.num_tokens and self.prices.is_known:
                self.prices.answered_alone(seconds, result.times)
            if step.proposals and not step.prefills:
                self.asking.answered(len(step.proposals), max(step.proposals.values()), result.times.propose_us)
            if step.num_tokens and not step.prefills and self.prices.is_known:
                self.prices.answered(step.num_tokens - step.num_guesses, step.num_tokens, result.times)
            self.size.passed()
        return seconds

    def restart_later(self, group: SequenceGroup, reason: RejectReason, detail: str) -> None:
        """Lets a group start over once nothing is outstanding, for the first reason that is given."""
        self.restarts.setdefault(group, (reason, detail))

    def take_restarts(self) -> dict[SequenceGroup, tuple[RejectReason, str]]:
        """Returns the groups that start over now, and why."""
        restarts, self.restarts = self.restarts, {}
        return restarts

    def isolate(self, suspect: RequestGroup | None) -> None:
        """Keeps this replica for `suspect` alone, or for nobody in particular any more."""
        self.suspect = suspect

    def add(self, group: SequenceGroup) -> None:
        """Adds a group to those that run here."""
        if isinstance(group, PrefixGroup):
            self.prefixes.to_compute.remove(group)
        bisect.insort(self.running, group, key=_order)
        group.num_slots = group.parallel
        self.num_running_seqs += group.num_slots

    def fetch(self, group: SequenceGroup) -> bool:
        """Has the disk read what the group begins with and no block holds; returns whether it has to wait for that."""
        if self.kv.disk is None or not group.may_fetch(self.replica_id):
            return False
        # What ran before is likely to be there from the first block on: its worker was lost, or its blocks were taken.
        goes_on = group.comes_back or bool(group.reads_of(self.replica_id, from_disk=True))
        reads = self.kv.fetch(group, goes_on=goes_on)
        if reads:
            self.awaits(group, reads)
        return bool(reads)

    def awaits(self, group: SequenceGroup, reads: list[BlockRead]) -> None:
        """Lets a group wait for these reads; what it begins with besides stays here, as far as others leave room."""
        group.fetches(self.replica_id, reads)
        self.kv.use(group)

    def place(self, group: SequenceGroup) -> int:
        """Returns how many running groups come before `group`, which runs here too."""
        place = bisect.bisect_left(self.running, group.order, key=_order)
        assert self.running[place] is group, f"request {group.request_id} does not run here"
        return place

    def remove(self, group: SequenceGroup) -> None:
        """Takes a group out of those that run here."""
        del self.running[self.place(group)]
        self.num_running_seqs -= group.num_slots
        self.moving.discard(group)

    def release(self, sequence: Sequence) -> None:
        """Takes back the blocks of a sequence that leaves this replica, once no outstanding step can touch them."""
        placement = sequence.placement
        if placement.leader is not None:
            # A follower has no blocks of its own yet.
            return
        in_flight = self.outstanding and placement.last_step_id >= self.outstanding[0].step_id
        self.kv.free(sequence, placement.last_step_id if in_flight else None)
        if sequence.status is not SequenceStatus.SWAPPED:
            self.next_plan.forget.append(placement.sequence_id)

    def fork(self, group: SequenceGroup, beam: Sequence) -> Sequence:
        """Makes another beam of the group that goes on from `beam`, and shares its blocks."""
        assert group.search is not None
        group.search.num_forks += 1
        child = beam.fork(group.search.num_forks)
        child.placement.sequence_id = self.next_plan.new_sequence_id()
        self.kv.fork(beam, child)
        return child

    def finish(self, group: SequenceGroup, sequence: Sequence) -> None:
        """Ends one sequence; the others of its group go on without it."""
        self.release(sequence)
        sequence.leave(SequenceStatus.FINISHED)
        if group.search is None:
            group.num_slots -= 1
            self.num_running_seqs -= group.status is not SequenceStatus.SWAPPED

    def drop(self, group: SequenceGroup) -> None:
        """Ends all sequences of a group, running or swapped out here."""
        self._take_out(group)
        for sequence in group.live:
            self.release(sequence)
            sequence.leave(SequenceStatus.FINISHED)

    def evict(self, group: SequenceGroup) -> None:
        """Takes a whole group off this replica; it starts over from its known tokens."""
        self.let_go(group)
        group.restart()

    def let_go(self, group: SequenceGroup) -> None:
        """Takes a whole group off this replica, and its blocks back."""
        self._take_out(group)
        for sequence in group.live:
            self.release(sequence)

    def take_in(self, group: RequestGroup) -> None:
        """Adds a group that another replica has let go, and whose blocks have come to CPU memory here."""
        self.stats.taken_in += 1
        bisect.insort(self.swapped, group, key=_order)
        for sequence in group.live:
            sequence.leave(SequenceStatus.SWAPPED)
            # Numbers of steps are the former replica's.
            sequence.placement.last_step_id, sequence.placement.builds_on = 0, frozenset()

    def swap_out(self, group: RequestGroup) -> list[BlockMove]:
        """Moves a whole group to CPU memory and returns the block moves; no step with it may be outstanding."""
        group.preemptions += 1
        group.swaps += 1
        self.remove(group)
        bisect.insort(self.swapped, group, key=_order)
        moves = self.kv.swap_out(group, self.next_plan.step_id)
        self.next_plan.forget += [sequence.placement.sequence_id for sequence in group.holders]
        for sequence in group.live:
            sequence.leave(SequenceStatus.SWAPPED)
        return moves

    def swap_in(self, group: RequestGroup) -> list[BlockMove]:
        """Brings a swapped group back and returns the block moves; its sequences are new to the worker."""
        self._take_out(group)
        moves = self.kv.swap_in(group)
        self.add(group)
        for sequence in group.live:
            sequence.status = SequenceStatus.RUNNING
        for sequence in group.holders:
            sequence.placement.sequence_id = self.next_plan.new_sequence_id()
        return moves

    def index(self, sequence: Sequence) -> None:
        """Offers the blocks that the latest tokens have filled to the prefix cache; what that changes in the sequence's
        table is for the next plan to tell."""
        remaps = self.kv.index(sequence, sequence.placement.last_step_id)
        self.next_plan.remaps += [(sequence, remap) for remap in remaps]

    def confirm(self, sequence: Sequence) -> None:
        """Gives up the room of guesses that were wrong, and offers the blocks that those which were right have filled
        to the prefix cache, as `index` does."""
        self.next_plan.remaps += [(sequence, remap) for remap in self.kv.confirm(sequence)]

    # -- pinned prefixes --------------------------------------------------------------------------------------------

    def keep_prefix(self, group: PrefixGroup) -> None:
        """Sets blocks aside for a prefix, and has `group` compute it before anything else that is new here."""
        self.prefixes.owed.pop(group.prefix_name, None)
        self.prefixes.names.add(group.prefix_name)
        self.kv.reserve(group.prefix_name, len(group.request.prompt_token_ids))
        self.prefixes.to_compute.append(group)

    def recompute_prefix(self, group: PrefixGroup) -> None:
        """Lets a group that was evicted compute its prefix from the beginning."""
        self.prefixes.to_compute.append(group)

    def give_up_prefix(self, prefix: Prefix) -> None:
        """Goes on without a prefix, as far as this replica has it, or is to have it."""
        self.prefixes.owed.pop(prefix.name, None)
        if prefix.name not in self.prefixes.names:
            return
        self.prefixes.names.remove(prefix.name)
        self.kv.unpin(prefix.name)
        running = (group for group in self.running if isinstance(group, PrefixGroup))
        for group in [group for group in running if group.prefix_name == prefix.name]:
            self.drop(group)
        self.prefixes.to_compute = [each for each in self.prefixes.to_compute if each.prefix_name != prefix.name]

    def owe_prefix(self, prefix: Prefix) -> None:
        """Goes on without a prefix until its blocks are needed by nobody else."""
        self.give_up_prefix(prefix)
        self.prefixes.owed[prefix.name] = self.kv.blocks_for(len(prefix.token_ids))

    def pin(self, group: PrefixGroup) -> None:
        """Keeps the blocks of the prefix that `group` has computed, and ends the group."""
        self.remove(group)
        for sequence in group.live:
            self.kv.pin(group.prefix_name, sequence)
            self.next_plan.forget.append(sequence.placement.sequence_id)
            sequence.leave(SequenceStatus.FINISHED)

    def _take_out(self, group: SequenceGroup) -> None:
        if isinstance(group, RequestGroup) and group.status is SequenceStatus.SWAPPED:
            self.swapped.remove(group)
            self.moving.discard(group)
        else:
            self.remove(group)

    def check(self) -> None:
        """Asserts that blocks, sequences and counts agree."""
        self.kv.check()
        assert self.num_running_seqs == sum(group.num_slots for group in self.running) <= self.size.max_seqs
        if self.isolates:
            assert all(group is self.suspect for step in self.outstanding for group in step.groups), "not alone"
        for status, groups in ((SequenceStatus.RUNNING, self.running), (SequenceStatus.SWAPPED, [*self.swapped])):
            for group in groups:
                assert group.num_slots >= len(group.live)
                for sequence in group.live:
                    assert sequence.status is status
                    assert 0 <= sequence.placement.num_computed <= sequence.num_tokens
                    is_holder = status is SequenceStatus.RUNNING and sequence.placement.leader is None
                    assert self.kv.holds(sequence) == is_holder
