"""From a journal to the events of its request: which sequences the client gets, under which index, and when."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from octavo.frontend.completion import Completion
from octavo.frontend.errors import Broken, Reason
from octavo.frontend.events import Finished, Piece, Usage, joined
from octavo.frontend.journal import Journal

# Of a sequence in one turn, so that one message to a slow reader, and one turn of the event loop, stay small.
MAX_PIECE_TOKENS = 512


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
        # What was not sent yet, by sequence.
        self._held: list[list[Piece]] = [[] for _ in self._completions]
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

    def advance(self) -> list[Piece | Finished]:
        """Takes what the journal has got since the last call, as far as one turn may, and gives what is due to be sent.

        All that came since then at once, so a slow reader gets fewer, larger pieces.
        """
        self.behind = False
        for sequence, completion, held in zip(self._journal.sequences, self._completions, self._held, strict=True):
            start = completion.num_tokens
            end = min(len(sequence.token_ids), start + MAX_PIECE_TOKENS)
            if completion.finished is None and end > start:
                held.append(completion.feed(sequence.token_ids[start:end], sequence.logprobs[start:end]))
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

    def _flush(self, place: int, index: int) -> Iterator[Piece | Finished]:
        pieces, self._held[index] = self._held[index], []
        if pieces:
            yield joined(pieces, place)
        finished = self._completions[index].finished
        if finished and index not in self._told_end:
            self._told_end.add(index)
            yield replace(finished, index=place, cumulative_logprob=self._cumulative_logprob(index))

    def _cumulative_logprob(self, index: int) -> float | None:
        if self._journal.sampling.logprobs is not None:
            return self._completions[index].cumulative_logprob
        return self._journal.sequences[index].cumulative_logprob
