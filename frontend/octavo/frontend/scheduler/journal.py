"""The truth about one running request: what was asked, what was generated so far, and what may continue it.

Everything the scheduler says about a request is checked here before a client sees it; everything needed to run the
request again from any point is here, so losing the scheduler or a worker loses nothing.
"""

import enum
from array import array
from collections.abc import Sequence

from octavo.frontend.request.events import LogprobTable
from octavo.wire import history
from octavo.wire.requests import NO_CACHE_KEY, CacheKey, Delta, GeneratedSequence, Lease, Request, answer_work
from octavo.wire.sampling import SamplingParams


class Verdict(enum.Enum):
    """What a delta was: the next tokens; of no concern any more; a sign that the two sides no longer agree; or short
    of what was asked for, which no other attempt would bring."""

    ACCEPTED = enum.auto()
    STALE = enum.auto()
    BROKEN = enum.auto()
    FAULTY = enum.auto()


class SequenceJournal:
    """What one sequence has generated. `ended` says that nothing follows, whatever its tokens say."""

    def __init__(self, sampling: SamplingParams) -> None:
        self.token_ids: list[int] = []
        # One per token, if asked for.
        self.logprobs = LogprobTable()
        # Said by the scheduler, of a beam search's result.
        self.cumulative_logprob: float | None = None
        self.ended = False
        self._sampling = sampling
        # The rolling hash of the tokens.
        self._hash = history.EMPTY

    @property
    def complete(self) -> bool:
        """Whether nothing more is to come: it was said so, or the tokens do.

        The tokens decide too, so that a lost last word costs nothing.
        """
        return self.ended or (
            bool(self.token_ids)
            and (
                len(self.token_ids) >= self._sampling.max_tokens or self.token_ids[-1] in self._sampling.stop_token_ids
            )
        )

    def continues(self, delta: Delta) -> bool:
        """Whether the delta begins where the sequence stands, with the same history."""
        return (delta.start_index, delta.previous_hash) == (len(self.token_ids), self._hash)

    def extend(self, delta: Delta) -> None:
        """Takes over a delta that continues the sequence."""
        self.token_ids.extend(delta.token_ids)
        if delta.logprobs:
            self.logprobs.extend(delta.logprobs)
        self.cumulative_logprob = delta.cumulative_logprob
        self.ended = delta.finish_reason is not None
        self._hash = history.extend(self._hash, delta.token_ids)

    def snapshot(self) -> GeneratedSequence:
        """Its part of a submission."""
        return GeneratedSequence(list(self.token_ids), finished=self.complete)


class Journal:
    """Times are seconds of one monotonic clock, given by the caller."""

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
    ) -> None:
        self.request_id = request_id
        # What the scheduler calls it.
        self.wire_id = request_id
        # A list of so many numbers would take nine times the memory.
        self.prompt_token_ids: Sequence[int] = array("i", prompt_token_ids)
        self.sampling = sampling
        self.arrived_at = arrived_at
        self.priority = priority
        self.tenant = tenant
        self.cache_key = cache_key
        self.max_queue_s = max_queue_s
        self.traceparent = traceparent
        # That of the latest submission; 0 before the first.
        self.attempt = 0
        self.sequences = [SequenceJournal(sampling) for _ in range(sampling.num_sequences)]
        # One per prompt token but the first, if asked for; None before they came.
        self.prompt_logprobs: LogprobTable | None = None
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
        """Whether nothing more is to come of any sequence."""
        return all(sequence.complete for sequence in self.sequences)

    @property
    def begun(self) -> bool:
        """Whether there is something to tell, and all that is told before it."""
        prompt_is_told = self.sampling.prompt_logprobs is None or self.prompt_logprobs is not None
        return prompt_is_told and any(sequence.token_ids or sequence.ended for sequence in self.sequences)

    @property
    def work_tokens(self) -> int:
        """Tokens still to be computed: of the prompt, unless that is over, and of what is reckoned to come."""
        if self.complete:
            return 0
        beam, prompt = self.sampling.beam, len(self.prompt_token_ids) if self.first_token_at is None else 0
        if beam is not None:
            return prompt + beam.width * answer_work(self.sampling.max_tokens, 0)
        running = (sequence for sequence in self.sequences if not sequence.complete)
        return prompt + sum(answer_work(self.sampling.max_tokens, len(sequence.token_ids)) for sequence in running)

    def accept(self, delta: Delta, now: float) -> Verdict:
        """Takes over what continues the journal, and only that.

        Within an attempt every token of a sequence comes once and in order. `BROKEN` means that these do not, or belong
        to another history: the request must be submitted again.
        """
        index = delta.sequence_index
        if delta.attempt != self.attempt or index >= len(self.sequences) or self.sequences[index].complete:
            return Verdict.STALE
        sequence = self.sequences[index]
        if not sequence.continues(delta):
            return Verdict.BROKEN
        if not self._is_whole(delta):
            return Verdict.FAULTY
        self._note(delta, now)
        sequence.extend(delta)
        return Verdict.ACCEPTED

    def end_sequence(self, index: int) -> bool:
        """Notes the end of a sequence that only the client's side can see; whether the others still need the scheduler.

        If not, nothing is noted: what ends with the last sequence is the request.
        """
        sequence = self.sequences[index]
        others_run = any(not other.complete for other in self.sequences if other is not sequence)
        if sequence.complete or not others_run:
            return False
        sequence.ended = True
        return True

    def start_attempt(self, attempt: int) -> None:
        """From here on only answers to `attempt` count, which must be above every earlier one of this process."""
        self.attempt = attempt
        if self._submitted:
            # The copy before this one has lost its blocks, if it had any yet.
            self.preemptions += 1
        self._preemptions_before_attempt, self._swaps_before_attempt = self.preemptions, self.swaps

    def submit(self, model_fingerprint: str, now: float) -> Request:
        """The request as it must be run now, from where it stands; it is about to be sent."""
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
        )

    def turned_away(self) -> None:
        """The scheduler never took it; who is asked next may not take it either."""
        self._submitted = False

    def lease(self) -> Lease:
        """Its line in a renewal."""
        return Lease(request_id=self.wire_id, attempt=self.attempt)

    def _is_whole(self, delta: Delta) -> bool:
        """Whether the delta brings all that was asked for with its tokens."""
        sampling = self.sampling
        if sampling.beam is not None and delta.cumulative_logprob is None:
            return False
        if sampling.logprobs is not None and len(delta.logprobs) != len(delta.token_ids):
            return False
        return not self._brings_prompt(delta) or len(delta.prompt_logprobs) == len(self.prompt_token_ids) - 1

    def _brings_prompt(self, delta: Delta) -> bool:
        wanted = self.sampling.prompt_logprobs is not None and self.prompt_logprobs is None
        return wanted and delta.sequence_index == 0

    def _note(self, delta: Delta, now: float) -> None:
        """Takes over what a delta says of the whole request."""
        if self.first_token_at is None:
            self.cached_prompt_tokens = delta.cached_prompt_tokens
        if delta.token_ids:
            self.first_token_at = now if self.first_token_at is None else self.first_token_at
            self.last_token_at = now
        if self._brings_prompt(delta):
            self.prompt_logprobs = LogprobTable(delta.prompt_logprobs)
        self.preemptions = self._preemptions_before_attempt + delta.preemptions
        self.swaps = self._swaps_before_attempt + delta.swaps

    def _generated(self) -> list[GeneratedSequence]:
        # A beam search starts over, for its beams are known to the scheduler only.
        if self.first_token_at is None or self.sampling.beam is not None:
            return []
        return [sequence.snapshot() for sequence in self.sequences]
