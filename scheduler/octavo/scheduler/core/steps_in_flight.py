"""The steps of a replica that are under way: what they compute, when its worker last spoke, how late an answer may be,
and how large the next steps."""

from collections import Counter, deque
from dataclasses import dataclass, field

from octavo.scheduler.core.config import SchedulerConfig
from octavo.scheduler.core.sequence import Member, RequestGroup, Sequence, SequenceGroup, Tier, TierTokens
from octavo.scheduler.core.speculation.draft import Draft
from octavo.wire.steps import Remap, StepResult

# A replica is broken that has so many steps, within so many seconds, in which none of several requests got anything
# finite.
MAX_NON_FINITE = 3
NON_FINITE_WINDOW_S = 60.0


# Not frozen, which would set each field of each step by a call.
@dataclass(slots=True, eq=False)
class OutstandingStep:
    """A plan that has been sent and whose result is not back; it does not change."""

    step_id: int
    # Groups that compute in the step, once for each of their sequences that does; and groups whose blocks it swaps out.
    groups: list[SequenceGroup]
    swapped_out: list[RequestGroup]
    # Sequences whose tables the plan changes, or begins, whether they compute in the step or not.
    changed: list[Sequence]
    # Sequences that sample, and beams that want candidates, each in the plan's order, with their groups.
    samplers: list[Member]
    beams: list[Member]
    # Rows computed: tokens, and guesses of drafts.
    num_tokens: int
    # A prompt is computed in the step.
    prefills: bool
    sent_at: float
    # No other was outstanding when the step was sent.
    is_alone: bool = False
    # Drafts that the step checks, by the ids of sequences in `samplers`.
    drafts: dict[int, Draft] = field(default_factory=dict)
    # How many guesses the draft model is to make, by the ids of sequences in `samplers`.
    proposals: dict[int, int] = field(default_factory=dict)
    # Sequences that get the model's output, in the plan's order, with their groups.
    pooled: list[Member] = field(default_factory=list)

    @property
    def choosers(self) -> list[Member]:
        """Returns all sequences of which the step brings what follows their last token, with their groups."""
        return [*self.samplers, *self.beams, *self.pooled]

    @property
    def num_guesses(self) -> int:
        return sum(len(draft.token_ids) for draft in self.drafts.values())


def num_sampled(result: StepResult) -> int:
    """Counts the tokens, candidates and outputs that sequences got in a step."""
    further = sum(len(each.token_ids) for each in result.further) if result.further else 0
    return len(result.sampled) + len(result.candidates) + len(result.pooled) + further


@dataclass(slots=True)
class ReplicaStats:
    """Totals since the worker registered; times are in microseconds."""

    steps: int = 0
    tokens_computed: int = 0
    tokens_sampled: int = 0
    # Guesses of drafts that were checked, and those that were right, by their places in drafts: the first, the second,
    # and so on.
    drafted: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    prepare_us: int = 0
    model_us: int = 0
    sample_us: int = 0
    # Requests that have come from other replicas.
    taken_in: int = 0
    # By tier of the prefix cache: requests that found some of their beginnings there, and the tokens of these.
    hits: Counter[Tier] = field(default_factory=Counter)
    hit_tokens: Counter[Tier] = field(default_factory=Counter)

    @property
    def token_rate(self) -> float:
        """Returns tokens computed per second of work; 0 before the first step."""
        busy = self.prepare_us + self.model_us + self.sample_us
        return self.tokens_computed * 1e6 / busy if busy else 0.0

    def checked(self, num_guesses: int, num_right: int) -> None:
        """Counts the guesses of a draft, of which so many were right: those before the first wrong one."""
        if (missing := num_guesses - len(self.drafted)) > 0:
            self.drafted += [0] * missing
            self.accepted += [0] * missing
        for place in range(num_guesses):
            self.drafted[place] += 1
            self.accepted[place] += place < num_right

    def found(self, tokens: TierTokens) -> None:
        """Counts what a request has found computed when it was first admitted."""
        for tier in Tier:
            if count := tokens.of(tier):
                self.hits[tier] += 1
                self.hit_tokens[tier] += count

    def add(self, step: OutstandingStep, result: StepResult) -> None:
        self.steps += 1
        self.tokens_computed += step.num_tokens
        self.tokens_sampled += num_sampled(result)
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


# -- time -----------------------------------------------------------------------------------------------------------


_FACTOR = 5.0
_KEPT = 100


class StepDeadlines:
    """Deadlines of one replica's steps, from the slowest recent duration by shape; shapes are powers of two of the
    number of tokens computed."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._config = config
        self._recent: dict[int, deque[float]] = {}

    def observe(self, num_tokens: int, seconds: float) -> None:
        self._recent.setdefault(num_tokens.bit_length(), deque(maxlen=_KEPT)).append(seconds)

    def allowance(self, num_tokens: int) -> float:
        """Returns how many seconds a step of `num_tokens` tokens may take.

        Of a hundred durations the slowest stands for the 99th percentile. A new shape is measured by the one next to
        it, a larger one as if it took longer by as much: else what is recomputed after a loss, in the largest of steps,
        would wait for a worker that hangs as long as for the very first step.
        """
        if not self._recent:
            return self._config.first_step_timeout_s
        shape = num_tokens.bit_length()
        nearest = min(self._recent, key=lambda known: abs(known - shape))
        expected: float = max(self._recent[nearest]) * 2 ** max(0, shape - nearest)
        return max(self._config.step_timeout_s, _FACTOR * expected)


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
    # The last step that was sent has to be answered before the next is planned.
    is_awaited: bool = False
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
        # What moves blocks alone tells nothing of what a first step of the model takes.
        if step.num_tokens:
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


# -- size -----------------------------------------------------------------------------------------------------------


# Steps that must pass before their size doubles, at first and at most: each time that growing was too much, twice as
# many as before.
MIN_PATIENCE = 32
MAX_PATIENCE = 4096


@dataclass(slots=True)
class StepSize:
    """Limits the size of steps: at most `tokens` computed in a step and `seqs` sequences side by side; never more than
    `max_tokens` and `max_seqs`, nor less than `min_tokens` and one."""

    max_tokens: int
    max_seqs: int
    min_tokens: int = 1
    tokens: int = 0
    seqs: int = 0
    _passed: int = 0
    _patience: int = MIN_PATIENCE
    _has_grown: bool = False

    def __post_init__(self) -> None:
        self.min_tokens = min(self.min_tokens, self.max_tokens)
        self.tokens, self.seqs = self.max_tokens, self.max_seqs

    def ran_out(self, num_tokens: int, num_seqs: int) -> None:
        """Halves the limits after a step of this size found no memory."""
        self.tokens = max(self.min_tokens, min(self.tokens, num_tokens // 2))
        self.seqs = max(1, min(self.seqs, num_seqs // 2))
        self._passed = 0
        if self._has_grown:
            self._patience = min(MAX_PATIENCE, 2 * self._patience)
            self._has_grown = False

    def passed(self) -> None:
        """Counts a step that was computed; doubles the limits after enough of them."""
        if self.tokens == self.max_tokens and self.seqs == self.max_seqs:
            return
        self._passed += 1
        if self._passed >= self._patience:
            self._passed, self._has_grown = 0, True
            self.tokens, self.seqs = min(self.max_tokens, 2 * self.tokens), min(self.max_seqs, 2 * self.seqs)
