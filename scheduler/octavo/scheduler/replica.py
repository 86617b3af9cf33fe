"""One replica as the scheduler knows it: its blocks, its running groups, its outstanding steps."""

import bisect
from collections import deque
from dataclasses import dataclass, field

from octavo.scheduler.config import SchedulerConfig
from octavo.scheduler.kv_cache_manager import KVCacheManager
from octavo.scheduler.sequence import Sequence, SequenceGroup, SequenceStatus
from octavo.scheduler.step_deadlines import StepDeadlines
from octavo.wire.steps import StepTimes, WorkerHello


@dataclass(frozen=True, slots=True)
class OutstandingStep:
    """A plan whose result is not back."""

    step_id: int
    # The sequences that compute in it, and those of them that sample, with the group of each; in the plan's order.
    scheduled: list[tuple[SequenceGroup, Sequence]]
    sampling: list[tuple[SequenceGroup, Sequence]]
    num_tokens: int
    sent_at: float


@dataclass(slots=True)
class ReplicaStats:
    """Totals since registration."""

    steps: int = 0
    tokens_computed: int = 0
    tokens_sampled: int = 0
    prepare_us: int = 0
    model_us: int = 0
    sample_us: int = 0

    def add(self, step: OutstandingStep, times: StepTimes) -> None:
        self.steps += 1
        self.tokens_computed += step.num_tokens
        self.tokens_sampled += len(step.sampling)
        self.prepare_us += times.prepare_us
        self.model_us += times.model_us
        self.sample_us += times.sample_us


@dataclass(eq=False)
class Replica:
    """A registered worker (`hello.incarnation` is its id) with an empty pool and nothing running."""

    hello: WorkerHello
    config: SchedulerConfig
    registered_at: float
    kv: KVCacheManager = field(init=False)
    # In order of arrival; changed by `add` and `remove` alone.
    running: list[SequenceGroup] = field(default_factory=list)
    num_running_seqs: int = 0
    outstanding: deque[OutstandingStep] = field(default_factory=deque)
    # A step has failed; what is outstanding will come back skipped, and all of it restarts then.
    failed: list[OutstandingStep] = field(default_factory=list)
    # Sequences to name in the next plan's `forget`.
    forget: list[int] = field(default_factory=list)
    answered_step_id: int = 0
    stats: ReplicaStats = field(default_factory=ReplicaStats)

    def __post_init__(self) -> None:
        self.kv = KVCacheManager(
            self.hello.num_blocks,
            self.hello.block_size,
            self.config.watermark,
            prefix_caching=self.config.prefix_caching,
        )
        self._deadlines = StepDeadlines(self.config)
        self._next_step_id = 1
        self._heard_at = self.registered_at
        self._answered_at = self.registered_at

    @property
    def replica_id(self) -> int:
        return self.hello.incarnation

    @property
    def may_plan(self) -> bool:
        """Whether another plan may leave now."""
        return not self.failed and len(self.outstanding) < self.config.max_steps_in_flight

    @property
    def load(self) -> int:
        """Tokens still to be computed of those running: what a new request would wait behind."""
        return sum(sequence.num_uncomputed for group in self.running for sequence in group.live)

    def next_step_id(self) -> int:
        step_id = self._next_step_id
        self._next_step_id += 1
        return step_id

    def heard(self, now: float) -> None:
        self._heard_at = now

    def answered(self, step: OutstandingStep, now: float, *, done: bool) -> None:
        """Books the answer to the oldest outstanding step."""
        assert self.outstanding[0] is step
        self._deadlines.observe(step.num_tokens, now - max(step.sent_at, self._answered_at))
        self._heard_at = self._answered_at = now
        self.answered_step_id = step.step_id
        self.outstanding.popleft()
        self.kv.step_answered(step.step_id, valid=done)

    def overdue(self, now: float) -> str | None:
        """Why the worker counts as lost, if it does: its step is late, or with nothing to compute it is silent."""
        if not self.outstanding:
            silence = now - self._heard_at
            return f"silent for {silence:.1f} s" if silence > self.config.idle_timeout_s else None
        step = self.outstanding[0]
        # Plans run in order: the clock of a step starts at the answer before it.
        elapsed = now - max(step.sent_at, self._answered_at)
        allowance = self._deadlines.allowance(step.num_tokens)
        return f"step {step.step_id} has taken {elapsed:.1f} s of {allowance:.1f} s" if elapsed > allowance else None

    def add(self, group: SequenceGroup) -> None:
        """The group runs here from now on."""
        bisect.insort(self.running, group, key=lambda running: running.order)
        self.num_running_seqs += len(group.sequences)

    def remove(self, group: SequenceGroup) -> None:
        """The group no longer runs here."""
        self.running.remove(group)
        self.num_running_seqs -= len(group.sequences)

    def release(self, sequence: Sequence) -> None:
        """The sequence leaves this replica: its blocks come back, once no outstanding step can touch them."""
        in_flight = self.outstanding and sequence.last_step_id >= self.outstanding[0].step_id
        self.kv.free(sequence, sequence.last_step_id if in_flight else None)
        self.forget.append(sequence.sequence_id)

    def evict(self, group: SequenceGroup) -> None:
        """Takes a whole group off this replica, back to its known tokens."""
        self.remove(group)
        group.preemptions += 1
        for sequence in group.live:
            self.release(sequence)
            sequence.restart()

    def check(self) -> None:
        """Asserts that blocks, sequences and counts agree."""
        self.kv.check()
        assert self.num_running_seqs == sum(len(group.sequences) for group in self.running)
        for group in self.running:
            for sequence in group.live:
                assert sequence.status is SequenceStatus.RUNNING
                assert 0 <= sequence.num_computed <= sequence.num_tokens
