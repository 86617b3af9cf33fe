"""The truth about one running request: what was asked, what was generated so far, and what may continue it.

Everything the scheduler says about a request is checked here before a client sees it; everything needed to run the
request again from any point is here, so losing the scheduler or a worker loses nothing.
"""

import enum
from collections.abc import Sequence

from octavo.wire import history
from octavo.wire.requests import Delta, Lease, Request
from octavo.wire.sampling import SamplingParams


class Verdict(enum.Enum):
    """What a delta was: the next tokens; of no concern any more; or a sign that the two sides no longer agree."""

    ACCEPTED = enum.auto()
    STALE = enum.auto()
    BROKEN = enum.auto()


class Journal:
    """Times are seconds of one monotonic clock, given by the caller."""

    def __init__(
        self, request_id: str, prompt_token_ids: Sequence[int], sampling: SamplingParams, arrived_at: float
    ) -> None:
        self.request_id = request_id
        self.prompt_token_ids = list(prompt_token_ids)
        self.sampling = sampling
        self.arrived_at = arrived_at
        # That of the latest submission; 0 before the first.
        self.attempt = 0
        self.generated_token_ids: list[int] = []
        self.ended_by_scheduler = False
        self.preemptions = 0
        self.cached_prompt_tokens = 0
        self.first_token_at: float | None = None
        self.last_token_at: float | None = None
        # The rolling hash of the generated tokens.
        self._history_hash = history.EMPTY
        self._preemptions_before_attempt = 0
        self._submitted = False

    @property
    def complete(self) -> bool:
        """Whether nothing more is to come: the scheduler said so, or the tokens do.

        The tokens decide too, so that a lost last word costs nothing.
        """
        generated = self.generated_token_ids
        return self.ended_by_scheduler or (
            bool(generated)
            and (len(generated) >= self.sampling.max_tokens or generated[-1] in self.sampling.stop_token_ids)
        )

    def accept(self, delta: Delta, now: float) -> Verdict:
        """Takes over what continues the journal, and only that.

        Within an attempt every token comes once and in order. `BROKEN` means that these do not, or belong to another
        history: the request must be submitted again.
        """
        if delta.attempt != self.attempt or delta.sequence_index != 0 or self.complete:
            return Verdict.STALE
        if (delta.start_index, delta.previous_hash) != (len(self.generated_token_ids), self._history_hash):
            return Verdict.BROKEN
        if not self.generated_token_ids:
            self.cached_prompt_tokens = delta.cached_prompt_tokens
        self._append(delta.token_ids, now)
        self.preemptions = self._preemptions_before_attempt + delta.preemptions
        self.ended_by_scheduler = delta.finish_reason is not None
        return Verdict.ACCEPTED

    def start_attempt(self, attempt: int) -> None:
        """From here on only answers to `attempt` count, which must be above every earlier one of this process."""
        self.attempt = attempt
        if self._submitted:
            # The copy before this one has lost its blocks, if it had any yet.
            self.preemptions += 1
        self._preemptions_before_attempt = self.preemptions

    def submit(self, model_fingerprint: str, now: float) -> Request:
        """The request as it must be run now, from where it stands; it is about to be sent."""
        resubmitted, self._submitted = self._submitted, True
        return Request(
            request_id=self.request_id,
            attempt=self.attempt,
            resubmitted=resubmitted,
            model_fingerprint=model_fingerprint,
            prompt_token_ids=self.prompt_token_ids,
            generated_token_ids=list(self.generated_token_ids),
            sampling=self.sampling,
            age_ms=max(0, round((now - self.arrived_at) * 1000)),
        )

    def lease(self) -> Lease:
        """Its line in a renewal."""
        return Lease(request_id=self.request_id, attempt=self.attempt)

    def _append(self, token_ids: Sequence[int], now: float) -> None:
        if not token_ids:
            return
        if self.first_token_at is None:
            self.first_token_at = now
        self.last_token_at = now
        self.generated_token_ids.extend(token_ids)
        self._history_hash = history.extend(self._history_hash, token_ids)
