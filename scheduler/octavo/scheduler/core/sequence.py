"""Requests as the scheduler sees them: groups of sequences, and which of their tokens are known, planned and
computed."""

import enum
from collections.abc import Sequence as Ordered
from dataclasses import dataclass, field

import msgspec

from octavo.scheduler.core.step.beam_search import BeamSearch
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
from octavo.wire.steps import Candidates

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


@dataclass(slots=True, eq=False)
class Sequence:
    """One continuation of a prompt: it has tokens, and KV of the first of them.

    Its tokens are the *known* ones (prompt and generated) and, after them, `num_in_flight` that outstanding steps
    sample. The first `num_computed` of all these have their KV computed, or planned in an outstanding step.
    `sequence_id` names one stay on one replica: it is drawn anew whenever the sequence comes (back) to a device.

    A sequence with a `leader` has the same tokens as that one and no blocks of its own yet: it is computed along, and
    forked where the leader's next token is chosen. A sequence that `waits_for` another shares the blocks of its first
    tokens with that one, which computes them.
    """

    index: int
    prompt_token_ids: list[int]
    generated_token_ids: list[int]
    history_hash: int
    # Besides tokens, this must be equal for KV to be shared.
    cache_key: CacheKey = NO_CACHE_KEY
    bypasses_cache: bool = False
    # The sequence is a pinned prefix: its blocks are indexed even where caching is off.
    is_prefix: bool = False
    # Hashes of full blocks, by block size.
    block_hashes: dict[int, list[bytes]] = field(default_factory=dict)
    sequence_id: int = 0
    status: SequenceStatus = SequenceStatus.WAITING
    num_prompt: int = field(init=False)
    num_known: int = field(init=False)
    num_computed: int = 0
    num_in_flight: int = 0
    # The last step planned with the sequence.
    last_step_id: int = 0
    finish_reason: FinishReason | None = None
    cumulative_logprob: float = 0.0
    leader: "Sequence | None" = None
    waits_for: "tuple[Sequence, int] | None" = None
    # Outstanding steps that were still to fill blocks found at the start, each with the id of the sequence it computes.
    builds_on: frozenset[tuple[int, int]] = frozenset()
    # One of those turned out not finite; a window may have passed those blocks by now.
    shares_distrusted: bool = False
    # The last block may be another's too: the sequence has been forked, or is a fork.
    shares_last_block: bool = False
    # The worker knows the sequence by its id; if not, it is to be forked from `parent`, or started.
    is_introduced: bool = False
    parent: "Sequence | None" = None
    # Known tokens that the worker knows; a beam's next one is sent with the work that computes it.
    num_sent: int = 0
    # The frontend has ended the sequence, which goes on only until others no longer need what is computed of it.
    is_unwanted: bool = False
    # Tokens that a beam may go on with; kept until all beams of its group have theirs.
    candidates: Candidates | None = None

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
        return self.num_known + self.num_in_flight

    @property
    def num_uncomputed(self) -> int:
        return self.num_known + self.num_in_flight - self.num_computed

    @property
    def num_generated(self) -> int:
        return self.num_known - self.num_prompt

    @property
    def is_live(self) -> bool:
        return self.status is not SequenceStatus.FINISHED

    @property
    def is_decoding(self) -> bool:
        """Tells whether the next step with this sequence computes just the token chosen last."""
        return self.num_uncomputed == 1 and self.num_computed >= self.num_prompt

    @property
    def is_ready(self) -> bool:
        """Tells whether the tokens that this sequence shares with the one it waits for are computed, or planned to
        be."""
        if self.waits_for is not None:
            leader, num_tokens = self.waits_for
            if leader.is_ready and leader.num_computed >= num_tokens:
                self.waits_for = None
        return self.waits_for is None

    def append(self, token_id: int) -> None:
        """Adds a token that a step has sampled, or that was chosen for a beam."""
        self.generated_token_ids.append(token_id)
        self.num_known += 1
        self.history_hash = history.extend(self.history_hash, (token_id,))

    def fork(self, index: int) -> "Sequence":
        """Makes a beam that goes on from here beside this one."""
        return Sequence(
            index=index,
            prompt_token_ids=self.prompt_token_ids,
            generated_token_ids=list(self.generated_token_ids),
            history_hash=self.history_hash,
            cache_key=self.cache_key,
            block_hashes={size: list(hashes) for size, hashes in self.block_hashes.items()},
            status=self.status,
            num_computed=self.num_computed,
            last_step_id=self.last_step_id,
            cumulative_logprob=self.cumulative_logprob,
            parent=self,
            num_sent=self.num_sent,
        )

    def leave(self, status: SequenceStatus) -> None:
        """Takes the sequence off its device; tokens that outstanding steps sample of it are discarded."""
        self.status = status
        self.num_in_flight = 0
        self.is_introduced = False
        self.parent = None

    def restart(self) -> None:
        """Puts the sequence back to waiting with its known tokens, none of them computed (paper §4.5,
        recomputation)."""
        self.leave(SequenceStatus.FINISHED if self.is_unwanted else SequenceStatus.WAITING)
        # Steps are counted by replica, and the sequence may come to another.
        self.num_computed = self.last_step_id = 0
        self.leader = self.waits_for = self.candidates = None
        self.builds_on, self.shares_distrusted = frozenset(), False


@dataclass(slots=True, eq=False)
class SequenceGroup:
    """A request and its sequences: they are admitted, preempted and aborted together.

    `frontend_id` is None for the scheduler's own requests, which compute pinned prefixes.
    """

    request: Request
    frontend_id: int | None
    # Scheduler's clock; earlier for a request that was submitted before.
    arrival: float
    # The sort key among groups: the arrival, moved by the priority, and a serial number of submission.
    order: tuple[float, int]
    sequences: list[Sequence]
    search: BeamSearch | None = None
    # The name of the prefix that the group computes to be pinned, if it does.
    prefix_name: str | None = None
    preemptions: int = 0
    swaps: int = 0
    # Prompt tokens that the first admission found computed; None before that.
    cached_prompt_tokens: int | None = None
    failed_steps: int = 0
    # Smallest steps that ran out of memory with nothing else in them.
    memory_failures: int = 0
    # The replica that last gave the group nothing finite, where that was not held against the group.
    non_finite_on: int | None = None
    # The replica where the group ran until it lost its blocks.
    former_replica_id: int | None = None
    # By position; kept until the first token of sequence 0 takes them along.
    prompt_logprobs: dict[int, Logprobs] = field(default_factory=dict)
    # Beams forked so far: names for new ones.
    num_forks: int = 0
    # Sequence slots that the group takes up where it runs.
    num_slots: int = 0
    # Microseconds that the grammar is reckoned to take for a token of one sequence, and took for the last one: a single
    # long time may have other causes.
    grammar_us: int = _UNKNOWN_GRAMMAR_US
    last_grammar_us: int = _UNKNOWN_GRAMMAR_US
    has_grammar: bool = field(init=False)
    sampling: SamplingParams = field(init=False)
    max_tokens: int = field(init=False)
    # Tokens, with the prompt's, that a sequence of the group can grow to.
    longest: int = field(init=False)
    stop_token_ids: frozenset[int] = field(init=False)

    def __post_init__(self) -> None:
        self.sampling = self.request.sampling
        self.has_grammar = bool(self.sampling.grammar)
        self.max_tokens = self.sampling.max_tokens
        self.longest = len(self.request.prompt_token_ids) + self.max_tokens
        self.stop_token_ids = frozenset(self.sampling.stop_token_ids)
        if self.sampling.prompt_logprobs is not None and any(s.generated_token_ids for s in self.sequences):
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
    def live(self) -> list[Sequence]:
        return [sequence for sequence in self.sequences if sequence.status is not SequenceStatus.FINISHED]

    @property
    def holders(self) -> list[Sequence]:
        """Returns the live sequences that have blocks of their own where the group runs: those without a leader."""
        return [sequence for sequence in self.live if sequence.leader is None]

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
        return known + self.parallel * answer_work(self.max_tokens, longest) if live else 0

    def leaders(self) -> list[Sequence]:
        """Returns the live sequences with different tokens, each the first of its kind; makes the others follow
        theirs."""
        leaders: list[Sequence] = []
        for sequence in self.live:
            same = (leader for leader in leaders if leader.generated_token_ids == sequence.generated_token_ids)
            sequence.leader = next(same, None)
            if sequence.leader is None:
                leaders.append(sequence)
        return leaders

    def followers(self, leader: Sequence) -> list[Sequence]:
        """Returns the live sequences that are computed along with `leader`."""
        if len(self.sequences) == 1:
            return []
        return [sequence for sequence in self.sequences if sequence.leader is leader and sequence.is_live]

    def needs(self, sequence: Sequence) -> bool:
        """Tells whether other sequences still need what is computed of `sequence`: they follow it, or wait for it."""
        return bool(self.followers(sequence)) or any(
            other.waits_for is not None and other.waits_for[0] is sequence and not other.is_ready for other in self.live
        )

    def may_compute(self, sequence: Sequence) -> int:
        """Returns how many tokens of `sequence` a step may compute now.

        Returns 0 once the tokens in flight reach `max_tokens`: whatever they are, the sequence ends with them. Returns
        0 for a beam whose last result is not back: its next token is still to be chosen.
        """
        in_flight = sequence.num_in_flight
        if in_flight and (self.search is not None or sequence.num_known + in_flight >= self.longest):
            return 0
        return sequence.num_known + in_flight - sequence.num_computed

    def finish_reason(self, sequence: Sequence) -> FinishReason | None:
        """Returns why the token that `sequence` ends with now is its last; None if it is not."""
        stops = sequence.generated_token_ids[-1] in self.stop_token_ids
        if stops and sequence.num_generated > self.sampling.min_tokens:
            return FinishReason.STOP
        return FinishReason.LENGTH if sequence.num_known >= self.longest else None

    def took_for_grammar(self, microseconds: int) -> None:
        """Notes what the grammar took for the latest token of each of its sequences, on average."""
        microseconds = min(microseconds, _MOST_GRAMMAR_US)
        self.grammar_us = min(microseconds, self.last_grammar_us)
        self.last_grammar_us = microseconds

    def prompt_logprobs_delivered(self) -> None:
        """Drops the prompt's logprobs, which the frontend has: recomputing the prompt need not report them again."""
        self.prompt_logprobs = {}
        self.sampling = msgspec.structs.replace(self.sampling, prompt_logprobs=None)
        for sequence in self.sequences:
            sequence.bypasses_cache = False


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
            bypasses_cache=sampling.prompt_logprobs is not None,
            status=SequenceStatus.FINISHED if known.is_over(sampling.max_tokens) else SequenceStatus.WAITING,
        )
        for index, known in enumerate(generated)
    ]
