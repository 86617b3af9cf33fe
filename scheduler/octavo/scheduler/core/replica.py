"""A replica as the scheduler knows it: its blocks, its running groups, its outstanding steps."""

import bisect
import enum
from collections import deque
from dataclasses import dataclass, field

from octavo.scheduler.core.config import SchedulerConfig
from octavo.scheduler.core.sequence import Sequence, SequenceGroup, SequenceStatus
from octavo.scheduler.core.step_limits import StepDeadlines, StepSize
from octavo.scheduler.kv.memory import KVMemory
from octavo.wire.requests import RejectReason
from octavo.wire.steps import BlockMove, Remap, StepResult, WorkerHello


class ReplicaState(enum.Enum):
    """States a replica is in: READY gets new requests; CORDONED gets none until an operator readmits it; DRAINING gets
    none and is let go once it holds none."""

    READY = enum.auto()
    CORDONED = enum.auto()
    DRAINING = enum.auto()


@dataclass(frozen=True, slots=True)
class OutstandingStep:
    """A plan that has been sent and whose result is not back."""

    step_id: int
    # Groups that compute in the step, once for each of their sequences that does; and groups whose blocks it swaps out.
    groups: list[SequenceGroup]
    swapped_out: list[SequenceGroup]
    # Sequences whose tables the plan changes, whether they compute in the step or not.
    remapped: list[Sequence]
    # Sequences that sample, and beams that want candidates, each in the plan's order, with their groups.
    samplers: list[tuple[SequenceGroup, Sequence]]
    beams: list[tuple[SequenceGroup, Sequence]]
    num_tokens: int
    # A prompt is computed in the step.
    prefills: bool
    sent_at: float


@dataclass(slots=True)
class ReplicaStats:
    """Totals since the worker registered; times are in microseconds."""

    steps: int = 0
    tokens_computed: int = 0
    tokens_sampled: int = 0
    prepare_us: int = 0
    model_us: int = 0
    sample_us: int = 0

    @property
    def token_rate(self) -> float:
        """Returns tokens computed per second of work; 0 before the first step."""
        busy = self.prepare_us + self.model_us + self.sample_us
        return self.tokens_computed * 1e6 / busy if busy else 0.0

    def add(self, step: OutstandingStep, result: StepResult) -> None:
        self.steps += 1
        self.tokens_computed += step.num_tokens
        self.tokens_sampled += len(result.sampled) + len(result.candidates)
        self.prepare_us += result.times.prepare_us
        self.model_us += result.times.model_us
        self.sample_us += result.times.sample_us


def _order(group: SequenceGroup) -> tuple[float, int]:
    return group.order


@dataclass(eq=False)
class Replica:
    """A registered worker; it begins with an empty pool and nothing running. `hello.incarnation` is its id."""

    hello: WorkerHello
    config: SchedulerConfig
    registered_at: float
    kv: KVMemory
    is_cordoned: bool = False
    # While draining: until when requests may go on that another replica could take; and whether the worker has said
    # that its process is to end.
    drain_until: float | None = None
    wants_to_leave: bool = False
    # No plan leaves: once outstanding steps are answered, requests move away or the worker ends.
    is_paused: bool = False
    # The suspect that this replica isolates, or is to: no other group comes, and while the suspect runs, no other is in
    # a step.
    suspect: SequenceGroup | None = None
    # In order of arrival; changed by `add` and `remove` alone.
    running: list[SequenceGroup] = field(default_factory=list)
    num_running_seqs: int = 0
    # In order of arrival.
    swapped: list[SequenceGroup] = field(default_factory=list)
    # Prefixes to be pinned here, by name; and those still to be computed, which come before everything else.
    prefix_names: set[str] = field(default_factory=set)
    prefixes: list[SequenceGroup] = field(default_factory=list)
    # Prefixes that the replica is without while a request that was accepted needs their blocks, and how many blocks.
    owed_prefixes: dict[str, int] = field(default_factory=dict)
    outstanding: deque[OutstandingStep] = field(default_factory=deque)
    # Groups that start over once nothing is outstanding, and why: their step failed, or was skipped after one that did;
    # or what they shared with one that failed made them fail too.
    restarts: dict[SequenceGroup, tuple[RejectReason, str]] = field(default_factory=dict)
    # Sequences to forget, and changed table entries with their sequences, for the next plan to report.
    forget: list[int] = field(default_factory=list)
    remaps: list[tuple[Sequence, Remap]] = field(default_factory=list)
    answered_step_id: int = 0
    # Seconds that the last step with a prompt in it took.
    prefill_latency: float = 0.0
    # Times of steps in which several groups chose and none got anything finite.
    non_finite_at: list[float] = field(default_factory=list)
    stats: ReplicaStats = field(default_factory=ReplicaStats)

    def __post_init__(self) -> None:
        device = self.hello.device
        budget, max_seqs = self.config.token_budget(device), self.config.max_parallel_on(device)
        self.size = StepSize(budget, max_seqs, min_tokens=self.hello.block_size)
        self._deadlines = StepDeadlines(self.config)
        self.next_step_id = 1
        self._next_sequence_id = 1
        self._heard_at = self.registered_at
        self._answered_at = self.registered_at

    @property
    def replica_id(self) -> int:
        return self.hello.incarnation

    @property
    def state(self) -> ReplicaState:
        if self.drain_until is not None:
            return ReplicaState.DRAINING
        return ReplicaState.CORDONED if self.is_cordoned else ReplicaState.READY

    @property
    def is_ready(self) -> bool:
        """Tells whether this replica gets new requests."""
        return self.drain_until is None and not self.is_cordoned

    @property
    def requests(self) -> list[SequenceGroup]:
        """Returns the groups held here for frontends, running or swapped out."""
        return [group for group in (*self.running, *self.swapped) if group.prefix_name is None]

    @property
    def may_plan(self) -> bool:
        """Tells whether another plan may leave now."""
        # Every replica is asked whenever one has answered, so what most often decides comes first.
        if (num_outstanding := len(self.outstanding)) >= self.config.max_steps_in_flight:
            return False
        return not (self.restarts or self.is_paused or (num_outstanding and self.isolates))

    @property
    def has_work(self) -> bool:
        """Tells whether a step could go on with, or begin, anything that is here."""
        return bool(self.running or self.swapped or self.prefixes or self.suspect)

    @property
    def isolates(self) -> bool:
        """Tells whether a suspect runs here, alone in its steps."""
        return self.suspect is not None and self.suspect.status is SequenceStatus.RUNNING

    @property
    def stepping(self) -> list[SequenceGroup]:
        """Returns the running groups that may be in the next step."""
        return [self.suspect] if self.isolates and self.suspect else self.running

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

    @property
    def answered_at(self) -> float:
        """Returns when the worker last answered a step, or else registered, on the scheduler's clock."""
        return self._answered_at

    @property
    def step_allowance(self) -> float:
        """Returns how many seconds the oldest outstanding step may take; 0 if none is outstanding."""
        return self._deadlines.allowance(self.outstanding[0].num_tokens) if self.outstanding else 0.0

    def new_sequence_id(self) -> int:
        """Draws a name for one stay of a sequence on this replica."""
        self._next_sequence_id += 1
        return self._next_sequence_id - 1

    def heard(self, now: float) -> None:
        self._heard_at = now

    def answered(self, step: OutstandingStep, now: float, *, done: bool) -> float:
        """Books the answer to `step`, the oldest that is outstanding; returns how long the step took, in seconds."""
        assert self.outstanding[0] is step
        seconds = now - max(step.sent_at, self._answered_at)
        self._deadlines.observe(step.num_tokens, seconds)
        if step.prefills:
            self.prefill_latency = seconds
        self._heard_at = self._answered_at = now
        self.answered_step_id = step.step_id
        self.outstanding.popleft()
        self.kv.step_answered(step.step_id, valid=done)
        return seconds

    def step_elapsed(self, now: float) -> float:
        """Returns how many seconds the oldest outstanding step has taken; 0 if none is outstanding."""
        # Plans run in order: the clock of a step starts at the answer before it.
        return now - max(self.outstanding[0].sent_at, self._answered_at) if self.outstanding else 0.0

    def overdue(self, now: float) -> str | None:
        """Returns why the worker counts as lost: its step is late, or it has nothing to compute and is silent. Returns
        None if it does not."""
        if not self.outstanding:
            silence = now - self._heard_at
            return f"silent for {silence:.1f} s" if silence > self.config.idle_timeout_s else None
        step = self.outstanding[0]
        elapsed = self.step_elapsed(now)
        allowance = self.step_allowance
        return f"step {step.step_id} has taken {elapsed:.1f} s of {allowance:.1f} s" if elapsed > allowance else None

    def add(self, group: SequenceGroup) -> None:
        """Adds a group to those that run here."""
        bisect.insort(self.running, group, key=_order)
        group.num_slots = group.parallel
        self.num_running_seqs += group.num_slots

    def place(self, group: SequenceGroup) -> int:
        """Returns how many running groups come before `group`, which runs here too."""
        place = bisect.bisect_left(self.running, group.order, key=_order)
        assert self.running[place] is group, f"request {group.request_id} does not run here"
        return place

    def remove(self, group: SequenceGroup) -> None:
        """Takes a group out of those that run here."""
        del self.running[self.place(group)]
        self.num_running_seqs -= group.num_slots

    def release(self, sequence: Sequence) -> None:
        """Takes back the blocks of a sequence that leaves this replica, once no outstanding step can touch them."""
        if sequence.leader is not None:
            # A follower has no blocks of its own yet.
            return
        in_flight = self.outstanding and sequence.last_step_id >= self.outstanding[0].step_id
        self.kv.free(sequence, sequence.last_step_id if in_flight else None)
        if sequence.status is not SequenceStatus.SWAPPED:
            self.forget.append(sequence.sequence_id)

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
        self._take_out(group)
        for sequence in group.live:
            self.release(sequence)
            sequence.restart()

    def swap_out(self, group: SequenceGroup) -> list[BlockMove]:
        """Moves a whole group to CPU memory and returns the block moves; no step with it may be outstanding."""
        self.remove(group)
        bisect.insort(self.swapped, group, key=_order)
        moves = self.kv.swap_out(group)
        self.forget += [sequence.sequence_id for sequence in group.holders]
        for sequence in group.live:
            sequence.leave(SequenceStatus.SWAPPED)
        return moves

    def swap_in(self, group: SequenceGroup) -> list[BlockMove]:
        """Brings a swapped group back and returns the block moves; its sequences are new to the worker."""
        self.swapped.remove(group)
        moves = self.kv.swap_in(group)
        self.add(group)
        for sequence in group.live:
            sequence.status = SequenceStatus.RUNNING
        for sequence in group.holders:
            sequence.sequence_id = self.new_sequence_id()
        return moves

    def pin(self, group: SequenceGroup) -> None:
        """Keeps the blocks of the prefix that `group` has computed, and ends the group."""
        assert group.prefix_name is not None
        self.remove(group)
        for sequence in group.live:
            self.kv.pin(group.prefix_name, sequence)
            self.forget.append(sequence.sequence_id)
            sequence.leave(SequenceStatus.FINISHED)

    def _take_out(self, group: SequenceGroup) -> None:
        if group.status is SequenceStatus.SWAPPED:
            self.swapped.remove(group)
        else:
            self.remove(group)

    def check(self) -> None:
        """Asserts that blocks, sequences and counts agree."""
        self.kv.check()
        assert self.num_running_seqs == sum(group.num_slots for group in self.running) <= self.size.max_seqs
        if self.isolates:
            assert all(group is self.suspect for step in self.outstanding for group in step.groups), "not alone"
        for groups, status in ((self.running, SequenceStatus.RUNNING), (self.swapped, SequenceStatus.SWAPPED)):
            for group in groups:
                assert group.num_slots >= len(group.live)
                for sequence in group.live:
                    assert sequence.status is status
                    assert 0 <= sequence.num_computed <= sequence.num_tokens
                    assert self.kv.holds(sequence) == (status is SequenceStatus.RUNNING and sequence.leader is None)
