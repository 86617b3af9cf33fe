"""Requests as the scheduler sees them: groups of sequences, and which of their tokens are known, planned and
computed."""

import enum
from collections.abc import Iterable
from collections.abc import Sequence as Ordered
from dataclasses import dataclass, field, replace

import msgspec

from octavo.scheduler.core.speculation.draft import Draft, DraftSource
from octavo.scheduler.core.speculation.pauses import Pause
from octavo.scheduler.core.step.beam_search import BeamSearchState
from octavo.wire import history
from octavo.wire.requests import (
    NO_CACHE_KEY,
    CacheKey,
    FinishReason,
    GeneratedSequence,
    Request,
    answer_work,
)
from octavo.wire.sampling import Logprobs, SamplingParams

# The assumed cost of a token whose grammar has not been timed yet: it is compiled, and its first mask filled.
_UNKNOWN_GRAMMAR_US = 1_000
# A grammar does not take longer than this: the rest of a longer time has other causes.
_MOST_GRAMMAR_US = 250_000


class SequenceStatus(enum.Enum):
    """States a sequence is in. (Why it finished is its `finish_reason`.)"""

    WAITING = enum.auto()
    RUNNING = enum.auto()
    SWAPPED = enum.auto()
    FINISHED = enum.auto()


class CacheUse(enum.Enum):
    """Says what a sequence has to do with the prefix cache: it shares blocks as others do; it looks nothing up, for its
    prompt's logprobs are wanted; or it is a pinned prefix, whose blocks are indexed even where caching is off."""

    SHARED = enum.auto()
    BYPASSED = enum.auto()
    PINNED = enum.auto()


@dataclass(slots=True, eq=False)
class Placement:
    """Holds what a replica has of a sequence, and what its worker knows of it: filled from admission on, dropped at a
    restart. A sequence that waits has an empty one.

    The first `num_computed` tokens of the sequence have their KV computed, or planned in an outstanding step;
    `num_in_flight` tokens are still to come of such steps. `sequence_id` names one stay on the device: it is drawn anew
    whenever the sequence comes (back) to it.

    A placement with a `leader` is of a sequence with the same tokens as that one and no blocks of its own yet: it is
    computed along, and forked where the leader's next token is chosen. One that `waits_for` another sequence shares the
    blocks of its first tokens with that one, which computes them.
    """

    sequence_id: int = 0
    num_computed: int = 0
    num_in_flight: int = 0
    # What the outstanding step checks; `NO_GUESSES` where it only makes some. Nothing more is planned of the sequence
    # before that is answered. (Beside what is read with it in every step: of thousands of sequences another cache line
    # is felt.)
    draft: Draft | None = None
    # The last step planned with the sequence.
    last_step_id: int = 0
    leader: "Sequence | None" = None
    waits_for: "tuple[Sequence, int] | None" = None
    # Outstanding steps that were still to fill blocks found at the start, each with the id of the sequence it computes.
    builds_on: frozenset[tuple[int, int]] = frozenset()
    # One of those turned out not finite; a window may have passed those blocks by now.
    shares_distrusted: bool = False
    # The worker knows the sequence by its id; if not, it is to be forked from `parent`, or started.
    is_introduced: bool = False
    parent: "Sequence | None" = None
    # Known tokens that the worker knows; a beam's next one is sent with the work that computes it.
    num_sent: int = 0
    # The drafter has found no text that the sequence repeats, and looks for one less and less often.
    silence: Pause | None = None

    @property
    def is_ready(self) -> bool:
        """Tells whether the tokens that the sequence shares with the one it waits for are computed, or planned to
        be."""
        if self.waits_for is not None:
            leader, num_tokens = self.waits_for
            if leader.placement.is_ready and leader.placement.num_computed >= num_tokens:
                self.waits_for = None
        return self.waits_for is None

    def leave_device(self) -> None:
        """Makes the worker know nothing of the sequence; tokens that outstanding steps sample of it are discarded."""
        self.num_in_flight = 0
        self.is_introduced = False
        self.parent = None


@dataclass(slots=True)
class DraftCounts:
    """Counts drafts of a sequence's tokens that steps have checked, the guesses in them, and those that became its
    tokens; and of those that its client predicted the right and the wrong ones."""

    drafts: int = 0
    drafted: int = 0
    accepted: int = 0
    accepted_predictions: int = 0
    rejected_predictions: int = 0

    def checked(self, draft: Draft, num_accepted: int) -> None:
        """Counts a draft of which so many guesses became tokens."""
        self.drafts += 1
        self.drafted += len(draft.token_ids)
        self.accepted += num_accepted
        if draft.source is DraftSource.PREDICTION:
            self.accepted_predictions += num_accepted
            self.rejected_predictions += len(draft.token_ids) - num_accepted


@dataclass(slots=True, eq=False)
class Sequence:
    """One continuation of a prompt: its tokens, and by its `placement` what a replica holds of them.

    Its tokens are the *known* ones (prompt and generated) and, after them, those in flight that outstanding steps
    sample.
    """

    index: int
    prompt_token_ids: list[int]
    generated_token_ids: list[int]
    history_hash: int
    # Besides tokens, this must be equal for KV to be shared.
    cache_key: CacheKey = NO_CACHE_KEY
    cache_use: CacheUse = CacheUse.SHARED
    # Hashes of full blocks, by block size.
    block_hashes: dict[int, list[bytes]] = field(default_factory=dict)
    status: SequenceStatus = SequenceStatus.WAITING
    placement: Placement = field(default_factory=Placement)
    num_prompt: int = field(init=False)
    num_known: int = field(init=False)
    # The frontend has ended the sequence, which goes on only until others no longer need what is computed of it.
    is_unwanted: bool = False
    # None before the first draft.
    draft_counts: DraftCounts | None = None

    def __post_init__(self) -> None:
        self.num_prompt = len(self.prompt_token_ids)
        self.num_known = self.num_prompt + len(self.generated_token_ids)

    def known_tokens(self, start: int, stop: int) -> list[int]:
        """Returns the known tokens at positions `start` to `stop`, prompt first."""
        border = self.num_prompt
        prompt = self.prompt_token_ids[start : min(stop, border)]
        return prompt + self.generated_token_ids[max(0, start - border) : max(0, stop - border)]

    @property
    def num_tokens(self) -> int:
        """Counts known tokens and those in flight."""
        return self.num_known + self.placement.num_in_flight

    @property
    def num_uncomputed(self) -> int:
        placement = self.placement
        return self.num_known + placement.num_in_flight - placement.num_computed

    @property
    def num_generated(self) -> int:
        return self.num_known - self.num_prompt

    @property
    def is_live(self) -> bool:
        return self.status is not SequenceStatus.FINISHED

    @property
    def is_decoding(self) -> bool:
        """Tells whether the next step with this sequence computes just the token chosen last."""
        num_computed = self.placement.num_computed
        return num_computed + 1 == self.num_known + self.placement.num_in_flight and num_computed >= self.num_prompt

    def append(self, token_id: int) -> None:
        """Adds a token that a step has sampled, or that was chosen for a beam."""
        self.generated_token_ids.append(token_id)
        self.num_known += 1
        self.history_hash = history.append(self.history_hash, token_id)

    def fork(self, index: int) -> "Sequence":
        """Makes a beam that goes on from here beside this one."""
        here = self.placement
        return Sequence(
            index=index,
            prompt_token_ids=self.prompt_token_ids,
            generated_token_ids=list(self.generated_token_ids),
            history_hash=self.history_hash,
            cache_key=self.cache_key,
            block_hashes={size: list(hashes) for size, hashes in self.block_hashes.items()},
            status=self.status,
            placement=Placement(
                num_computed=here.num_computed, last_step_id=here.last_step_id, parent=self, num_sent=here.num_sent
            ),
        )

    def leave(self, status: SequenceStatus) -> None:
        """Takes the sequence off its device."""
        self.status = status
        self.placement.leave_device()

    def restart(self) -> None:
        """Makes the sequence wait, if it is live and wanted, and forgets where it was."""
        if self.is_live:
            self.status = SequenceStatus.FINISHED if self.is_unwanted else SequenceStatus.WAITING
        self.placement = Placement()


@dataclass(slots=True)
class GrammarCost:
    """Says what a grammar takes for a token of one sequence, in microseconds: as it is reckoned, and as it was for the
    last token. A single long time may have other causes."""

    us: int = _UNKNOWN_GRAMMAR_US
    last_us: int = _UNKNOWN_GRAMMAR_US

    def took(self, microseconds: int) -> None:
        """Notes what the grammar took for the latest token of each sequence, on average."""
        microseconds = min(microseconds, _MOST_GRAMMAR_US)
        self.us, self.last_us = min(microseconds, self.last_us), microseconds


@dataclass(slots=True)
class Faults:
    """Counts what went wrong with a group's steps: those that failed; the smallest ones that ran out of memory with
    nothing else in them. `non_finite_on` is the replica that last gave the group nothing finite, where that was not
    held against the group."""

    failed_steps: int = 0
    memory_failures: int = 0
    non_finite_on: int | None = None


@dataclass(slots=True, eq=False)
class BlockRead:
    """Blocks that are read for a replica, from its disk, or from another replica, that of the worker `source`; groups
    that begin with them wait until the read `is_over`. `is_complete`: all were found. `is_late`: nobody waits any
    longer, but the answer has not come yet."""

    num_blocks: int
    source: str
    timeout_s: float
    is_over: bool = False
    is_complete: bool = False
    is_late: bool = False
    # The first time of the scheduler's clock at which it was seen to be under way.
    _seen_at: float | None = None

    def end(self, *, is_complete: bool) -> None:
        """Ends the read."""
        self.is_over, self.is_complete, self.is_late = True, is_complete, False

    def look(self, now: float) -> None:
        """Lets nobody wait any longer if the read takes too long."""
        if self._seen_at is None:
            self._seen_at = now
        elif now - self._seen_at > self.timeout_s:
            self.give_up()

    def give_up(self) -> None:
        """Lets nobody wait any longer."""
        if not self.is_over:
            self.is_over = self.is_late = True


class Tier(enum.StrEnum):
    """Names the tiers of a replica's prefix cache."""

    DEVICE = "device"
    CPU = "cpu"
    DISK = "disk"


@dataclass(frozen=True, slots=True)
class TierTokens:
    """Counts the tokens that a group's first admission found computed, by `Tier`: on the device, in CPU blocks, and in
    those into which its replica's disk had read them; and in those into which they had been copied from another
    `replica`, that of the worker `source`."""

    device: int = 0
    cpu: int = 0
    disk: int = 0
    replica: int = 0
    source: str = ""

    @property
    def total(self) -> int:
        """Counts those of all tiers."""
        return sum(self.of(tier) for tier in Tier) + self.replica

    def of(self, tier: Tier) -> int:
        """Counts those of one tier."""
        count: int = getattr(self, tier)
        return count


@dataclass(slots=True, eq=False)
class Lookup:
    """Holds what the first admission of a request found computed, and what is needed to say why that was no more
    (`octavo.scheduler.core.lookups`): nothing of it is worked out before somebody asks.

    `at` is the time of the scheduler's clock. Of the `num_known` tokens of sequence `index` the first were `found`; its
    `output` grows with it. `shares`: the replica's requests find what others have computed.
    """

    request: Request
    frontend_id: int
    replica_id: int
    worker_id: str
    at: float
    block_size: int
    index: int
    output: list[int]
    num_known: int
    found: TierTokens
    shares: bool
    is_bypassed: bool
    is_over: bool = False
    # Tokens that it counts for in the history that holds it.
    num_counted: int = 0


# Reads that a group may ask one disk for in one wait: the first block, then the others.
_MAX_READS = 2


@dataclass(slots=True, eq=False)
class _Group:
    """A request and its sequences: they are admitted, preempted and aborted together."""

    request: Request
    # Scheduler's clock; earlier for a request that was submitted before.
    arrival: float
    # The sort key among groups: the arrival, moved by the priority, and a serial number of submission.
    order: tuple[float, int]
    sequences: list[Sequence] = field(init=False)
    search: BeamSearchState | None = field(init=False)
    sampling: SamplingParams = field(init=False)
    stop_token_ids: frozenset[int] = field(init=False)
    # Tokens, with the prompt's, that a sequence of the group can grow to.
    longest: int = field(init=False)
    grammar: GrammarCost | None = field(init=False)
    preemptions: int = 0
    swaps: int = 0
    # Prompt tokens that the first admission found computed; None before that.
    cached_prompt_tokens: int | None = None
    faults: Faults = field(default_factory=Faults)
    # The replica where the group ran until it lost its blocks.
    former_replica_id: int | None = None
    # By position; kept until the first token of sequence 0 takes them along.
    prompt_logprobs: dict[int, Logprobs] = field(default_factory=dict)
    # Sequence slots that the group takes up where it runs.
    num_slots: int = 0
    # What was asked for since the group began to wait, of disks and of other replicas, by the replica that it is for.
    reads: dict[int, list[BlockRead]] | None = None
    # What the first admission found, of the first of its sequences; None before that.
    found: TierTokens | None = None
    # The first admission, as those who ask are told of it.
    lookup: Lookup | None = None

    def __post_init__(self) -> None:
        self.sampling = sampling = self.request.sampling
        self.sequences = new_sequences(self.request)
        self.stop_token_ids = frozenset(sampling.stop_token_ids)
        self.search = (
            BeamSearchState(sampling.beam, sampling.max_tokens, self.stop_token_ids) if sampling.beam else None
        )
        self.longest = self.request.longest
        self.grammar = GrammarCost() if sampling.grammar else None
        if sampling.prompt_logprobs is not None and any(s.generated_token_ids for s in self.sequences):
            self.prompt_logprobs_delivered()

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def has_run(self) -> bool:
        """Tells whether the request was ever admitted, as far as is known: here, or before it was submitted again."""
        return self.cached_prompt_tokens is not None or any(known.token_ids for known in self.request.generated)

    @property
    def comes_back(self) -> bool:
        """Tells whether the group was admitted before: if it waits, or is swapped out, it has lost its blocks."""
        return self.cached_prompt_tokens is not None

    @property
    def is_fetching(self) -> bool:
        """Tells whether what the group begins with is being read."""
        return self.reads is not None and bool(self.open_reads)

    @property
    def open_reads(self) -> list[BlockRead]:
        """Returns the reads that the group waits for."""
        return [read for reads in (self.reads or {}).values() for read in reads if not read.is_over]

    def reads_of(self, replica_id: int, *, from_disk: bool) -> list[BlockRead]:
        """Returns what was read for the replica since the group began to wait, from its disk or from other replicas."""
        return [read for read in (self.reads or {}).get(replica_id, []) if from_disk is not bool(read.source)]

    def may_fetch(self, replica_id: int) -> bool:
        """Tells whether the group may ask the replica's disk: again only if it had all that it was asked for."""
        former = self.reads_of(replica_id, from_disk=True)
        return len(former) < _MAX_READS and all(read.is_complete for read in former)

    def fetches(self, replica_id: int, reads: list[BlockRead]) -> None:
        """Lets the group wait for these reads of the replica."""
        self.reads = self.reads or {}
        self.reads.setdefault(replica_id, []).extend(reads)

    @property
    def live(self) -> list[Sequence]:
        return [sequence for sequence in self.sequences if sequence.status is not SequenceStatus.FINISHED]

    @property
    def holders(self) -> list[Sequence]:
        """Returns the live sequences that have blocks of their own where the group runs: those without a leader."""
        return [sequence for sequence in self.live if sequence.placement.leader is None]

    @property
    def is_finished(self) -> bool:
        return all(sequence.status is SequenceStatus.FINISHED for sequence in self.sequences)

    @property
    def status(self) -> SequenceStatus:
        """Returns the status that all live sequences share; FINISHED if none is live."""
        return next((sequence.status for sequence in self.live), SequenceStatus.FINISHED)

    @property
    def parallel(self) -> int:
        """Returns how many sequences the group may still run side by side, at most."""
        return self.search.params.width if self.search else len(self.live)

    @property
    def work_tokens(self) -> int:
        """Returns the tokens still to be computed: of the known ones, and of the answer as far as it is expected to
        grow."""
        live = self.live
        known = max((sequence.num_uncomputed for sequence in live), default=0)
        longest = max((sequence.num_generated for sequence in live), default=0)
        return known + self.parallel * answer_work(self.sampling.max_tokens, longest) if live else 0

    def leaders(self) -> list[Sequence]:
        """Returns the live sequences with different tokens, each the first of its kind."""
        leaders: list[Sequence] = []
        for sequence in self.live:
            if _leader(sequence, leaders) is None:
                leaders.append(sequence)
        return leaders

    def place(self) -> list[Sequence]:
        """Begins a stay on a replica, where the first sequence of each kind leads those with the same tokens; returns
        the leaders."""
        self.reads = None
        leaders: list[Sequence] = []
        for sequence in self.live:
            sequence.status = SequenceStatus.RUNNING
            leader = sequence.placement.leader = _leader(sequence, leaders)
            if leader is None:
                leaders.append(sequence)
        return leaders

    def restart(self) -> None:
        """Puts the live sequences back to waiting with their known tokens, none of them computed (paper §4.5,
        recomputation). Of a beam the candidates are to be found again."""
        self.preemptions += 1
        for sequence in self.sequences:
            sequence.restart()
        if self.search is not None:
            self.search = replace(self.search, candidates={})

    def followers(self, leader: Sequence) -> list[Sequence]:
        """Returns the live sequences that are computed along with `leader`."""
        if len(self.sequences) == 1:
            return []
        return [sequence for sequence in self.sequences if sequence.placement.leader is leader and sequence.is_live]

    def needs(self, sequence: Sequence) -> bool:
        """Tells whether other sequences still need what is computed of `sequence`: they follow it, or wait for it."""
        return bool(self.followers(sequence)) or self.awaits(sequence)

    def awaits(self, sequence: Sequence) -> bool:
        """Tells whether other sequences wait until what they share with `sequence` is computed of that."""
        placements = [other.placement for other in self.live]
        return any(
            each.waits_for is not None and each.waits_for[0] is sequence and not each.is_ready for each in placements
        )

    def may_compute(self, sequence: Sequence) -> int:
        """Returns how many tokens of `sequence` a step may compute now.

        Returns 0 once the tokens in flight reach `max_tokens`: whatever they are, the sequence ends with them. Returns
        0 for a beam, or a sequence with a draft, whose last result is not back: its next token is still to be chosen.
        """
        placement = sequence.placement
        in_flight = placement.num_in_flight
        if in_flight and (
            self.search is not None or placement.draft is not None or sequence.num_known + in_flight >= self.longest
        ):
            return 0
        return sequence.num_known + in_flight - placement.num_computed

    def finish_reason(self, sequence: Sequence) -> FinishReason | None:
        """Returns why the token that `sequence` ends with now is its last; None if it is not."""
        stops = sequence.generated_token_ids[-1] in self.stop_token_ids
        if stops and sequence.num_generated > self.sampling.min_tokens:
            return FinishReason.STOP
        return FinishReason.LENGTH if sequence.num_known >= self.longest else None

    def prompt_logprobs_delivered(self) -> None:
        """Drops the prompt's logprobs, which the frontend has: recomputing the prompt need not report them again."""
        self.prompt_logprobs = {}
        self.sampling = msgspec.structs.replace(self.sampling, prompt_logprobs=None)
        for sequence in self.sequences:
            sequence.cache_use = CacheUse.SHARED


@dataclass(slots=True, eq=False)
class RequestGroup(_Group):
    """A request that is held for a frontend."""

    frontend_id: int = field(kw_only=True)


@dataclass(slots=True, eq=False)
class PrefixGroup(_Group):
    """The scheduler's own request, which computes the prefix of this name on one replica, to be pinned there. It is
    never swapped out, accused of a worker's death or tried on another replica."""

    prefix_name: str = field(kw_only=True)

    def __post_init__(self) -> None:
        # `super()` finds no class that slots have made anew.
        _Group.__post_init__(self)
        self.sequences[0].cache_use = CacheUse.PINNED


SequenceGroup = RequestGroup | PrefixGroup
# A sequence, with its group.
Member = tuple[SequenceGroup, Sequence]


def _leader(sequence: Sequence, leaders: Iterable[Sequence]) -> Sequence | None:
    """Returns the one of `leaders` that has the same tokens; None if none has."""
    return next((each for each in leaders if each.generated_token_ids == sequence.generated_token_ids), None)


def new_sequences(request: Request) -> list[Sequence]:
    """Makes the sequences of a request as it was submitted: at its prompt, or after the tokens they had generated."""
    sampling = request.sampling
    count = 1 if sampling.beam else sampling.num_sequences
    generated: Ordered[GeneratedSequence] = request.generated or [GeneratedSequence([], finished=False)] * count
    return [
        Sequence(
            index=index,
            prompt_token_ids=request.prompt_token_ids,
            generated_token_ids=list(known.token_ids),
            history_hash=history.extend(history.EMPTY, known.token_ids),
            cache_key=request.cache_key,
            cache_use=CacheUse.SHARED if sampling.prompt_logprobs is None else CacheUse.BYPASSED,
            status=SequenceStatus.FINISHED if known.is_over(sampling.max_tokens) else SequenceStatus.WAITING,
        )
        for index, known in enumerate(generated)
    ]
