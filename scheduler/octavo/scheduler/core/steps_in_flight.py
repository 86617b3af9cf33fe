"""The steps of a replica that are under way: what they compute, when its worker last spoke, and how late an answer may
be."""

from collections import deque
from dataclasses import dataclass, field

from octavo.scheduler.core.config import SchedulerConfig
from octavo.scheduler.core.sequence import RequestGroup, Sequence, SequenceGroup
from octavo.scheduler.core.step_limits import StepDeadlines
from octavo.wire.steps import Remap, StepResult

# A replica is broken that has so many steps, within so many seconds, in which none of several requests got anything
# finite.
MAX_NON_FINITE = 3
NON_FINITE_WINDOW_S = 60.0


@dataclass(frozen=True, slots=True)
class OutstandingStep:
    """A plan that has been sent and whose result is not back."""

    step_id: int
    # Groups that compute in the step, once for each of their sequences that does; and groups whose blocks it swaps out.
    groups: list[SequenceGroup]
    swapped_out: list[RequestGroup]
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


@dataclass(slots=True)
class NextPlan:
    """Holds what the next plan tells the worker whatever it computes; and the ids that this plan, and the next sequence
    that comes, will have."""

    step_id: int = 1
    sequence_id: int = 1
    answered_step_id: int = 0
    # Sequences to forget, and changed table entries with their sequences.
    forget: list[int] = field(default_factory=list)
    remaps: list[tuple[Sequence, Remap]] = field(default_factory=list)

    def new_sequence_id(self) -> int:
        """Draws a name for one stay of a sequence on the replica."""
        self.sequence_id += 1
        return self.sequence_id - 1

    def remaps_of(self, sequence: Sequence) -> list[Remap]:
        """Returns the changes in the table of `sequence`."""
        return [remap for owner, remap in self.remaps if owner is sequence]

    def sent(self, remaps: list[tuple[Sequence, Remap]]) -> None:
        """Goes on to the plan after one that was sent; that one will tell of `remaps`."""
        self.step_id += 1
        self.forget, self.remaps = [], remaps


@dataclass(slots=True)
class StepsInFlight:
    """Holds the outstanding steps in the order in which they were sent, and the times of the worker's answers, in
    seconds of the scheduler's clock."""

    config: SchedulerConfig
    deadlines: StepDeadlines
    # When the worker last spoke; and when it last answered a step, or else registered.
    heard_at: float
    answered_at: float
    outstanding: deque[OutstandingStep] = field(default_factory=deque)
    # Seconds that the last step with a prompt in it took.
    prefill_latency: float = 0.0
    # Times of steps in which several groups chose and none got anything finite.
    non_finite_at: list[float] = field(default_factory=list)

    @property
    def allowance(self) -> float:
        """Returns how many seconds the oldest outstanding step may take; 0 if none is outstanding."""
        return self.deadlines.allowance(self.outstanding[0].num_tokens) if self.outstanding else 0.0

    def elapsed(self, now: float) -> float:
        """Returns how many seconds the oldest outstanding step has taken; 0 if none is outstanding."""
        # Plans run in order: the clock of a step starts at the answer before it.
        return now - max(self.outstanding[0].sent_at, self.answered_at) if self.outstanding else 0.0

    def heard(self, now: float) -> None:
        """Notes that the worker spoke."""
        self.heard_at = now

    def answered(self, step: OutstandingStep, now: float) -> float:
        """Books the answer to `step`, the oldest that is outstanding; returns how long the step took, in seconds."""
        assert self.outstanding[0] is step
        seconds = self.elapsed(now)
        self.deadlines.observe(step.num_tokens, seconds)
        if step.prefills:
            self.prefill_latency = seconds
        self.heard_at = self.answered_at = now
        self.outstanding.popleft()
        return seconds

    def overdue(self, now: float) -> str | None:
        """Returns why the worker counts as lost: its step is late, or it has nothing to compute and is silent. Returns
        None if it does not."""
        if not self.outstanding:
            silence = now - self.heard_at
            return f"silent for {silence:.1f} s" if silence > self.config.idle_timeout_s else None
        elapsed, allowance, step_id = self.elapsed(now), self.allowance, self.outstanding[0].step_id
        return f"step {step_id} has taken {elapsed:.1f} s of {allowance:.1f} s" if elapsed > allowance else None

    def was_non_finite(self, now: float) -> bool:
        """Notes another step in which several groups chose and none got anything finite; tells whether there have been
        too many."""
        self.non_finite_at = [at for at in self.non_finite_at if now - at < NON_FINITE_WINDOW_S] + [now]
        return len(self.non_finite_at) >= MAX_NON_FINITE
