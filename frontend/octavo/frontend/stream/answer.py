"""Makes the numbered events of one request from its journal, and makes those that were sent before again."""

from array import array
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import replace
from itertools import islice
from typing import Final

from octavo.frontend.answer_parsers.reasoning import Reasoning
from octavo.frontend.errors import Broken, Reason
from octavo.frontend.request.events import (
    Emitted,
    Event,
    OutputReady,
    RequestNotice,
    RequestStarted,
    RequestUsage,
    SequenceFinished,
    TextDelta,
)
from octavo.frontend.request.request import GenerationRequest
from octavo.frontend.scheduler.journal import Journal, SequenceJournal
from octavo.frontend.stream.completion import SequenceText
from octavo.frontend.text.detokenizer import DetokenizerSource
from octavo.wire.base import MAX_TOKENS
from octavo.wire.sampling import MAX_PARALLEL

# The most tokens of a sequence in one turn, so that one message to a slow reader, and one turn of the event loop, stay
# small; and the most logprobs in any event.
MAX_PIECE_TOKENS: Final = 512
MAX_PIECE_NUMBERS: Final = 2048
# Events that are made again at once; others get their turn in between.
_REPLAYED_AT_ONCE: Final = 256


class Answer:
    """Makes the events of one request from its journal, whoever reads them.

    Sequences are sent as they grow, or each whole where the request is not `incremental`. Where the request's
    `num_sequences` are chosen among more, or found by a beam search, they are sent whole once all have ended, best
    first. An event that was sent once is the same whenever it is sent again, for it is made from the same tokens.
    """

    def __init__(
        self,
        journal: Journal,
        request: GenerationRequest,
        model: str,
        detokenizers: DetokenizerSource,
        eos_token_ids: Set[int],
        reasoning: Reasoning | None = None,
    ) -> None:
        """`reasoning` says how what the model thinks is set apart, None where nothing is."""
        self.journal = journal
        self._request = request
        self._model = model
        self._detokenizers = detokenizers
        self._eos_token_ids = eos_token_ids
        self._reasoning = reasoning
        self._completions = self._fresh_completions()
        sampling = journal.sampling
        self._is_ranked = sampling.beam is not None or request.num_sequences < len(self._completions)
        # The most tokens of an event; with few logprobs any number, once a sequence has ended.
        self._most_tokens = max(1, MAX_PIECE_NUMBERS // (1 + sampling.logprobs)) if sampling.logprobs else MAX_TOKENS
        self._num_running = len(self._completions)
        # All events were made, `RequestUsage` last.
        self.finished = False
        self._has_begun = False
        # Tokens taken, of all sequences together.
        self.num_tokens = 0
        # More events are due after the latest `advance`.
        self.behind = False
        # Sequences that the latest `advance` has found ended by a stop string, which the scheduler does not see.
        self.ended_here: list[int] = []
        # The fault that no more events can follow.
        self.fault: Broken | None = None
        # Of each event that was made: of a `TextDelta` its number of tokens and its index in one number, else 0; and
        # all other events themselves.
        self._marks = array("I")
        self._others: list[RequestStarted | SequenceFinished | RequestUsage | RequestNotice] = []

    @property
    def num_events(self) -> int:
        """Returns how many events were made."""
        return len(self._marks)

    @property
    def has_begun(self) -> bool:
        """Tells whether `RequestStarted` was made."""
        return self._has_begun

    def advance(self, notices: Iterable[RequestNotice] = ()) -> list[Emitted]:
        """Takes the journal's new tokens, as many as one turn may, and returns `notices` and the events that are
        due.

        All tokens of a sequence since the last call come in one piece, so a slow reader gets fewer, larger pieces.
        """
        events: list[Event] = [*notices]
        self.behind, self.ended_here = False, []
        if self._has_begun:
            self._take_news(events)
            if self.finished:
                events.append(self.usage())
        elif self.journal.begun:
            # Alone, so that all tokens that come until the client takes it come in one piece.
            self._has_begun = self.behind = True
            events.append(self._start())
        return [self._record(event) for event in events]

    def sent_after(self, offset: int) -> Iterator[list[Emitted]]:
        """Yields the events after `offset` that were made already, some at a time (maybe none)."""
        sent = self._sent()
        while batch := list(islice(sent, _REPLAYED_AT_ONCE)):
            yield [emitted for emitted in batch if emitted.offset > offset]

    def usage(self) -> RequestUsage:
        """Returns what the request has taken so far."""
        journal = self.journal
        first = journal.arrived_at if journal.first_token_at is None else journal.first_token_at
        last = first if journal.last_token_at is None else journal.last_token_at
        drafts = journal.draft_use
        return RequestUsage(
            prompt_tokens=len(journal.prompt_token_ids),
            completion_tokens=self.num_tokens,
            preemptions=journal.preemptions,
            swaps=journal.swaps,
            cached_prompt_tokens=journal.cached_prompt_tokens,
            time_to_first_token_s=first - journal.arrived_at,
            decode_time_s=last - first,
            drafted_tokens=drafts.drafted,
            accepted_tokens=drafts.accepted,
            accepted_predictions=drafts.accepted_predictions,
            rejected_predictions=drafts.rejected_predictions,
            reasoning_tokens=sum(completion.num_reasoning_tokens for completion in self._completions)
            if self._reasoning
            else 0,
        )

    def _start(self) -> RequestStarted:
        journal = self.journal
        return RequestStarted(
            request_id=journal.request_id,
            model=self._model,
            prompt_token_ids=journal.prompt_token_ids,
            seed=journal.sampling.seed,
            prompt_logprobs=journal.prompt_logprobs or [],
            cached_prompt_tokens=journal.cached_prompt_tokens,
        )

    def _take_news(self, events: list[Event]) -> None:
        """Takes the new tokens of all sequences, and adds what is due to `events`."""
        for index, (sequence, completion) in enumerate(zip(self.journal.sequences, self._completions, strict=True)):
            if not completion.finished:
                self._take_tokens(index, sequence, completion, events)
        if self._is_ranked and self.finished:
            for place, index in enumerate(self._best()):
                events += self._whole(place, index)

    def _take_tokens(
        self, index: int, sequence: SequenceJournal, completion: SequenceText, events: list[Event]
    ) -> None:
        """Takes one sequence's new tokens; adds what is due of a sequence that is not ranked to `events`."""
        start, there = completion.num_tokens, len(sequence.token_ids)
        if there > start:
            part = slice(start, start + min(MAX_PIECE_TOKENS, self._most_tokens))
            piece = completion.feed(sequence.token_ids[part], sequence.logprobs[part], index)
            self.num_tokens += completion.num_tokens - start
            if self._request.incremental and not self._is_ranked:
                events.append(piece)
            else:
                completion.keep(piece, self._most_tokens)
        if completion.finished:
            self._num_running -= 1
            self.finished = not self._num_running
            if not sequence.complete:
                self.ended_here.append(index)
            if not self._is_ranked:
                events += self._whole(index, index)
        elif completion.num_tokens < there:
            self.behind = True
        elif sequence.ended:
            self.fault = Broken(
                Reason.STREAM_BROKEN,
                f"the scheduler ended the request after {there} tokens without a reason that its tokens show; this is a"
                " fault of the server",
            )

    def _whole(self, place: int, index: int) -> Iterator[Event]:
        """Yields what was kept of a sequence that has ended, and its end."""
        sequence, completion, start = self.journal.sequences[index], self._completions[index], 0
        for num_tokens, reasoning, text in completion.kept():
            part = slice(start, start + num_tokens)
            start += num_tokens
            yield TextDelta(text, sequence.token_ids[part], sequence.logprobs[part], place, reasoning)
        assert completion.finished
        scored = self.journal.sampling.logprobs is not None
        total = completion.cumulative_logprob if scored else sequence.cumulative_logprob
        yield replace(completion.finished, index=place, cumulative_logprob=total)

    def _best(self) -> list[int]:
        """Returns the indices in the journal of the sequences that a ranked answer has, best first."""
        # A beam search has ranked its results itself, by more than their logprobs.
        order = list(range(len(self._completions)))
        if self.journal.sampling.beam is None:
            order.sort(key=lambda index: -self._completions[index].cumulative_logprob)
        return order[: self._request.num_sequences]

    def _record(self, event: Event) -> Emitted:
        if isinstance(event, TextDelta):
            self._marks.append(len(event.token_ids) * MAX_PARALLEL + event.index)
        else:
            assert not isinstance(event, OutputReady), "an answer is of tokens"
            self._marks.append(0)
            self._others.append(event)
        return Emitted(len(self._marks), event)

    def _sent(self) -> Iterator[Emitted]:
        completions, others = self._fresh_completions(), iter(self._others)
        for offset, mark in enumerate(self._marks, 1):
            yield Emitted(offset, self._piece(*divmod(mark, MAX_PARALLEL), completions) if mark else next(others))

    def _piece(self, num_tokens: int, place: int, completions: Sequence[SequenceText]) -> TextDelta:
        index = self._sequence_at(place)
        sequence, completion = self.journal.sequences[index], completions[index]
        part = slice(completion.num_tokens, completion.num_tokens + num_tokens)
        return completion.feed(sequence.token_ids[part], sequence.logprobs[part], place)

    def _sequence_at(self, place: int) -> int:
        """Returns the index in the journal of the sequence that has the index `place` in the answer."""
        return self._best()[place] if self._is_ranked else place

    def _fresh_completions(self) -> list[SequenceText]:
        request, sampling, reasoning = self._request, self.journal.sampling, self._reasoning
        detokenizer = self._detokenizers.detokenizer(
            skip_special_tokens=request.skip_special_tokens,
            kept=(*request.kept_special_tokens, *(reasoning.format.markers if reasoning else ())),
        )
        return [
            SequenceText(request, sampling, self._eos_token_ids, detokenizer, reasoning.parser() if reasoning else None)
            for _ in self.journal.sequences
        ]
