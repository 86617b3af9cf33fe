"""Holds the truth about one running request: what was asked, what was generated so far, and what may continue it.

A journal checks everything that the scheduler sends about its request before a client sees it. A journal also holds
everything needed to run the request again from any point, so losing the scheduler or a worker loses nothing.
"""

import enum
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from octavo.frontend.request.events import LogprobTable
from octavo.wire import history
from octavo.wire.pooling import PoolingParams
from octavo.wire.requests import NO_CACHE_KEY, CacheKey, Delta, GeneratedSequence, Lease, Request, answer_work
from octavo.wire.sampling import Logprobs, SamplingParams


class DeltaVerdict(enum.Enum):
    """Judges a delta from the scheduler.

    `ACCEPTED`: it brought the next tokens. `STALE`: it no longer matters. `BROKEN`: the two sides no longer agree on
    the history. `FAULTY`: it lacks what was asked for, which no other attempt would bring.
    """

    ACCEPTED = enum.auto()
    STALE = enum.auto()
    BROKEN = enum.auto()
    FAULTY = enum.auto()


@dataclass(frozen=True, slots=True)
class DraftUse:
    """Counts guesses of tokens that steps have checked, and the right ones; and of those that the client gave the right
    and the wrong ones."""

    drafted: int = 0
    accepted: int = 0
    accepted_predictions: int = 0
    rejected_predictions: int = 0

    def __add__(self, other: "DraftUse") -> "DraftUse":
        return DraftUse(
            self.drafted + other.drafted,
            self.accepted + other.accepted,
            self.accepted_predictions + other.accepted_predictions,
            self.rejected_predictions + other.rejected_predictions,
        )


NO_DRAFTS = DraftUse()


class SequenceJournal:
    """Holds the tokens that one sequence has generated, and their logprobs.

    `ended` says that no token follows, whatever the tokens say.
    """

    def __init__(self, sampling: SamplingParams) -> None:
        self.token_ids: list[int] = []
        self._table = None if sampling.logprobs is None else LogprobTable()
        # One entry per token, if logprobs were asked for.
        self.logprobs: Sequence[Logprobs] = () if self._table is None else self._table
        # The score of a beam search's result, from the scheduler.
        self.cumulative_logprob: float | None = None
        self.ended = False
        # What became of guesses of its tokens, in all attempts.
        self.draft_use = NO_DRAFTS
        self._draft_use_before_attempt = NO_DRAFTS
        self._sampling = sampling
        # The rolling hash of the tokens.
        self._hash = history.EMPTY

    @property
    def complete(self) -> bool:
        """Tells whether no token is to come, by `ended` or by the tokens themselves.

        The tokens count too, so that the loss of the last message costs nothing.
        """
        return self.ended or (
            bool(self.token_ids)
            and (
                len(self.token_ids) >= self._sampling.max_tokens or self.token_ids[-1] in self._sampling.stop_token_ids
            )
        )

    def continues(self, delta: Delta) -> bool:
        """Tells whether `delta` begins where the sequence stands, with the same history."""
        return (delta.start_index, delta.previous_hash) == (len(self.token_ids), self._hash)

    def extend(self, delta: Delta) -> None:
        """Appends a `delta` that continues the sequence."""
        self.token_ids.extend(delta.token_ids)
        if self._table is not None:
            self._table.extend(delta.logprobs)
        self.cumulative_logprob = delta.cumulative_logprob
        self.ended = delta.finish_reason is not None
        if delta.drafted:
            self.draft_use = self._draft_use_before_attempt + DraftUse(
                delta.drafted, delta.accepted, delta.accepted_predictions, delta.rejected_predictions
            )
        self._hash = history.extend(self._hash, delta.token_ids)

    def start_attempt(self) -> None:
        """Begins an attempt, whose deltas count from its beginning on."""
        self._draft_use_before_attempt = self.draft_use

    def snapshot(self) -> GeneratedSequence:
        """Returns the sequence's part of a submission."""
        return GeneratedSequence(list(self.token_ids), finished=self.complete)


class Journal:
    """Holds one request and its sequences. Times are seconds of one monotonic clock, given by the caller."""

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams,
        arrived_at: float,
        *,
        priority: int = 0,
        tenant: str = "",
        cache_key: CacheKey = NO_CACHE_KEY,
        max_queue_s: float | None = None,
        traceparent: str = "",
        predicted_token_ids: Sequence[int] = (),
        pooling: PoolingParams | None = None,
    ) -> None:
        self.request_id = request_id
        # The request's id on the wire.
        self.wire_id = request_id
        # A list of as many numbers would take nine times the memory.
        self.prompt_token_ids: Sequence[int] = array("i", prompt_token_ids)
        self.sampling = sampling
        self.arrived_at = arrived_at
        self.priority = priority
        self.tenant = tenant
        self.cache_key = cache_key
        self.max_queue_s = max_queue_s
        self.traceparent = traceparent
        self.predicted_token_ids: Sequence[int] = array("i", predicted_token_ids)
        # What output of the model is asked for in place of tokens; and that output, None before it came.
        self.pooling = pooling
        self.pooled: bytes | None = None
        # The attempt number of the latest submission; 0 before the first.
        self.attempt = 0
        self.sequences = [SequenceJournal(sampling) for _ in range(sampling.num_sequences)]
        # One entry per prompt token but the first, if asked for; None before they came.
        self.prompt_logprobs: LogprobTable | None = None
        # Deltas bring more than tokens; most requests want nothing else.
        self._wants_more = (sampling.beam, sampling.logprobs, sampling.prompt_logprobs) != (None, None, None)
        self.preemptions = 0
        self.swaps = 0
        self.cached_prompt_tokens = 0
        self.first_token_at: float | None = None
        self.last_token_at: float | None = None
        self._preemptions_before_attempt = 0
        self._swaps_before_attempt = 0
        self._submitted = False

    @property
    def complete(self) -> bool:
        """Tells whether no token is to come of any sequence."""
        return all(sequence.complete for sequence in self.sequences)

    @property
    def begun(self) -> bool:
        """Tells whether the client can be sent `Started`: a token is there, and the prompt's logprobs if asked for."""
        has_prompt_logprobs = self.sampling.prompt_logprobs is None or self.prompt_logprobs is not None
        return has_prompt_logprobs and any(sequence.token_ids or sequence.ended for sequence in self.sequences)

    @property
    def work_tokens(self) -> int:
        """Returns the tokens still to be computed: those of the prompt, until that is over, and the expected ones."""
        if self.complete:
            return 0
        beam, prompt = self.sampling.beam, len(self.prompt_token_ids) if self.first_token_at is None else 0
        if beam is not None:
            return prompt + beam.width * answer_work(self.sampling.max_tokens, 0)
        running = (sequence for sequence in self.sequences if not sequence.complete)
        return prompt + sum(answer_work(self.sampling.max_tokens, len(sequence.token_ids)) for sequence in running)

    @property
    def draft_use(self) -> DraftUse:
        """Returns what became of guesses of all sequences' tokens."""
        return sum((sequence.draft_use for sequence in self.sequences), NO_DRAFTS)

    def accept(self, delta: Delta, now: float) -> DeltaVerdict:
        """Takes over a `delta` that continues the journal, and no other.

        Within an attempt every token of a sequence comes once and in order. After `BROKEN` the request must be
        submitted again.
        """
        index = delta.sequence_index
        if delta.attempt != self.attempt or index >= len(self.sequences) or self.sequences[index].complete:
            return DeltaVerdict.STALE
        sequence = self.sequences[index]
        if not sequence.continues(delta):
            return DeltaVerdict.BROKEN
        if self._wants_more:
            if not self._is_whole(delta):
                return DeltaVerdict.FAULTY
            if self._brings_prompt(delta):
                self.prompt_logprobs = LogprobTable(delta.prompt_logprobs)
        self._note(delta, now)
        sequence.extend(delta)
        return DeltaVerdict.ACCEPTED

    def end_sequence(self, index: int) -> bool:
        """Ends a sequence for a reason that only the frontend sees; returns whether other sequences still run.

        If no other sequence runs, nothing changes: the request ends with its last sequence.
        """
        sequence = self.sequences[index]
        others_run = any(not other.complete for other in self.sequences if other is not sequence)
        if sequence.complete or not others_run:
            return False
        sequence.ended = True
        return True

    def start_attempt(self, attempt: int) -> None:
        """Begins an attempt; from now on only answers to `attempt` count.

        The number must be above every earlier attempt of this process.
        """
        self.attempt = attempt
        if self._submitted:
            # The earlier copy has lost its KV blocks, if it had any yet.
            self.preemptions += 1
        self._preemptions_before_attempt, self._swaps_before_attempt = self.preemptions, self.swaps
        for sequence in self.sequences:
            sequence.start_attempt()

    def submit(self, model_fingerprint: str, now: float) -> Request:
        """Returns the message that runs the request from where it stands, and notes that the message is sent."""
        resubmitted, self._submitted = self._submitted, True
        return Request(
            request_id=self.wire_id,
            attempt=self.attempt,
            resubmitted=resubmitted,
            model_fingerprint=model_fingerprint,
            prompt_token_ids=list(self.prompt_token_ids),
            generated=self._generated(),
            sampling=self.sampling,
            priority=self.priority,
            tenant=self.tenant,
            cache_key=self.cache_key,
            age_ms=max(0, round((now - self.arrived_at) * 1000)),
            max_queue_ms=None if self.max_queue_s is None else round(self.max_queue_s * 1000),
            traceparent=self.traceparent,
            predicted_token_ids=list(self.predicted_token_ids),
            pooling=self.pooling,
        )

    def turned_away(self) -> None:
        """Notes that the scheduler did not take the request: the next submission is no resubmission."""
        self._submitted = False

    def lease(self) -> Lease:
        """Returns the request's entry in a renewal."""
        return Lease(request_id=self.wire_id, attempt=self.attempt)

    def _is_whole(self, delta: Delta) -> bool:
        """Tells whether `delta` brings all logprobs that were asked for with its tokens; or the output of the model."""
        sampling = self.sampling
        if self.pooling is not None and not delta.pooled:
            return False
        if sampling.beam is not None and delta.cumulative_logprob is None:
            return False
        if sampling.logprobs is not None and len(delta.logprobs) != len(delta.token_ids):
            return False
        return not self._brings_prompt(delta) or len(delta.prompt_logprobs) == len(self.prompt_token_ids) - 1

    def _brings_prompt(self, delta: Delta) -> bool:
        wanted = self.sampling.prompt_logprobs is not None and self.prompt_logprobs is None
        return wanted and delta.sequence_index == 0

    def _note(self, delta: Delta, now: float) -> None:
        """Takes over what `delta` reports of the whole request."""
        if self.first_token_at is None:
            self.cached_prompt_tokens = delta.cached_prompt_tokens
        if self.pooling is not None:
            self.pooled = delta.pooled
        if delta.token_ids or delta.pooled:
            self.first_token_at = now if self.first_token_at is None else self.first_token_at
            self.last_token_at = now
        self.preemptions = self._preemptions_before_attempt + delta.preemptions
        self.swaps = self._swaps_before_attempt + delta.swaps

    def _generated(self) -> list[GeneratedSequence]:
        # A beam search starts over, for its beams are known to the scheduler only.
        if self.first_token_at is None or self.sampling.beam is not None:
            return []
        return [sequence.snapshot() for sequence in self.sequences]
