"""From a journal to the events of its request: which sequences the client gets, under which index, and when."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from msgspec import structs

from octavo.frontend.errors import Broken, Reason
from octavo.frontend.request.events import Finished, TextDelta, Usage
from octavo.frontend.scheduler.journal import Journal
from octavo.frontend.stream.completion import Completion
from octavo.wire.base import MAX_TOKENS

# Of a sequence in one turn, so that one message to a slow reader, and one turn of the event loop, stay small; and of
# logprobs in any event.
MAX_PIECE_TOKENS = 512
MAX_PIECE_NUMBERS = 2048


@dataclass(slots=True)
class _Held:
    """Text of a sequence's tokens that were not sent yet, in parts of so many tokens."""

    num_tokens: list[int] = field(default_factory=list)
    texts: list[list[str]] = field(default_factory=list)

    def add(self, piece: TextDelta, most_tokens: int) -> None:
        """Takes in the next tokens, of which a part holds so many, or those of one piece."""
        if self.num_tokens and self.num_tokens[-1] + len(piece.token_ids) <= most_tokens:
            self.num_tokens[-1] += len(piece.token_ids)
            self.texts[-1].append(piece.text)
        else:
            self.num_tokens.append(len(piece.token_ids))
            self.texts.append([piece.text])


class Answer:
    """The sequences of one request on their way to the client.

    They are sent as they grow, or each whole where `incremental` is off. Where `num_results` are chosen among more, or
    searched for, they are sent whole once all have ended, best first.
    """

    def __init__(
        self, journal: Journal, completions: Sequence[Completion], *, num_results: int, incremental: bool
    ) -> None:
        self._journal = journal
        self._completions = list(completions)
        self._num_results = num_results
        self._incremental = incremental
        self._is_ranked = journal.sampling.beam is not None or num_results < len(self._completions)
        top = journal.sampling.logprobs
        self._is_scored = top is not None
        # What an event may hold; with few logprobs any number of tokens, once a sequence has ended.
        self._most_tokens = max(1, MAX_PIECE_NUMBERS // (1 + top)) if top else MAX_TOKENS
        # What was not sent yet, by sequence: the latest piece where each is sent at once, or all since the start.
        self._sends_at_once = incremental and not self._is_ranked
        self._latest: dict[int, TextDelta] = {}
        self._held = [_Held() for _ in self._completions]
        self._num_sent = [0] * len(self._completions)
        self._told_end: set[int] = set()
        # The latest `advance` has left some tokens.
        self.behind = False
        # Tokens taken, of all sequences together.
        self.num_tokens = 0
        self._num_running = len(self._completions)

    @property
    def finished(self) -> bool:
        """Whether all sequences have ended."""
        return not self._num_running

    def advance(self) -> list[TextDelta | Finished]:
        """Takes what the journal has got since the last call, as far as one turn may, and gives what is due to be sent.

        All that came since then at once, so a slow reader gets fewer, larger pieces.
        """
        self.behind = False
        for index, (sequence, completion) in enumerate(zip(self._journal.sequences, self._completions, strict=True)):
            start = completion.num_tokens
            end = min(len(sequence.token_ids), start + min(MAX_PIECE_TOKENS, self._most_tokens))
            if completion.finished is None and end > start:
                logprobs = sequence.logprobs[start:end] if self._is_scored else ()
                piece = completion.feed(sequence.token_ids[start:end], logprobs)
                if self._sends_at_once:
                    self._latest[index] = piece
                else:
                    self._held[index].add(piece, self._most_tokens)
                self.num_tokens += completion.num_tokens - start
                if completion.finished:
                    self._num_running -= 1
                elif end < len(sequence.token_ids):
                    self.behind = True
        return [event for place, index in self._due() for event in self._flush(place, index)]

    def sequence_of(self, place: int) -> int:
        """The sequence that was sent as the one of that index of the answer."""
        return self._best()[place] if self._is_ranked else place

    def ended_here(self) -> list[int]:
        """Sequences that have ended by what only the frontend sees, and still run for the scheduler."""
        pairs = zip(self._completions, self._journal.sequences, strict=True)
        return [index for index, (c, sequence) in enumerate(pairs) if c.finished and not sequence.complete]

    def check_ends(self) -> None:
        """Raises `Broken` for a sequence that the scheduler ended without a reason that its tokens show."""
        for sequence, completion in zip(self._journal.sequences, self._completions, strict=True):
            if sequence.ended and not completion.finished and completion.num_tokens == len(sequence.token_ids):
                raise Broken(
                    Reason.STREAM_BROKEN,
                    f"the scheduler ended the request after {completion.num_tokens} tokens without a reason that its"
                    " tokens show; this is a fault of the server",
                )

    def usage(self) -> Usage:
        """What the request has cost so far."""
        journal = self._journal
        first = journal.arrived_at if journal.first_token_at is None else journal.first_token_at
        last = first if journal.last_token_at is None else journal.last_token_at
        return Usage(
            prompt_tokens=len(journal.prompt_token_ids),
            completion_tokens=self.num_tokens,
            preemptions=journal.preemptions,
            swaps=journal.swaps,
            cached_prompt_tokens=journal.cached_prompt_tokens,
            time_to_first_token_s=first - journal.arrived_at,
            decode_time_s=last - first,
        )

    def _due(self) -> list[tuple[int, int]]:
        """(index in the answer, sequence) of those that may be sent now."""
        if self._is_ranked:
            return list(enumerate(self._best())) if self.finished else []
        return [(i, i) for i, completion in enumerate(self._completions) if self._incremental or completion.finished]

    def _best(self) -> list[int]:
        # A beam search has ranked its results itself, by more than their logprobs.
        order = list(range(len(self._completions)))
        if self._journal.sampling.beam is None:
            order.sort(key=lambda index: -self._completions[index].cumulative_logprob)
        return order[: self._num_results]

    def _flush(self, place: int, index: int) -> Iterator[TextDelta | Finished]:
        held = self._held[index]
        if (latest := self._latest.pop(index, None)) is not None:
            self._num_sent[index] += len(latest.token_ids)
            yield structs.replace(latest, index=place) if place else latest
        elif held.num_tokens:
            self._held[index] = _Held()
            yield from self._pieces(held, place, index)
        finished = self._completions[index].finished
        if finished and index not in self._told_end:
            self._told_end.add(index)
            yield replace(finished, index=place, cumulative_logprob=self._cumulative_logprob(index))

    def _pieces(self, held: _Held, place: int, index: int) -> Iterator[TextDelta]:
        sequence = self._journal.sequences[index]
        for num_tokens, texts in zip(held.num_tokens, held.texts, strict=True):
            start = self._num_sent[index]
            part = slice(start, start + num_tokens)
            self._num_sent[index] += num_tokens
            logprobs = sequence.logprobs[part] if sequence.logprobs else ()
            yield TextDelta("".join(texts), sequence.token_ids[part], logprobs, place)

    def _cumulative_logprob(self, index: int) -> float | None:
        if self._journal.sampling.logprobs is not None:
            return self._completions[index].cumulative_logprob
        return self._journal.sequences[index].cumulative_logprob
