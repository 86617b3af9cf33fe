"""Turns the tokens of a request's sequences into pieces of text for the client, and finds where each sequence ends."""

from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, field, replace

from msgspec import structs

from octavo.frontend.errors import Broken, Reason
from octavo.frontend.request.events import Finished, FinishReason, Match, MatchKind, TextDelta, Usage, chosen
from octavo.frontend.scheduler.journal import Journal
from octavo.frontend.text.detokenizer import Detokenizer, StopStrings
from octavo.wire.base import MAX_TOKENS
from octavo.wire.sampling import Logprobs


@dataclass(frozen=True)
class EndRules:
    """Tells when a completion ends besides its stop strings. `eos_token_ids` is part of `stop_token_ids`.

    Nothing ends a completion before `min_tokens`: until then the workers choose no stop token, and stop strings are
    not looked for.
    """

    max_tokens: int
    min_tokens: int
    stop_token_ids: Set[int]
    eos_token_ids: Set[int]
    include_stop: bool


class Completion:
    """Turns one sequence into text. `finished` is set with the token that ends the sequence; later ones are ignored."""

    def __init__(self, rules: EndRules, detokenizer: Detokenizer, stop_strings: StopStrings) -> None:
        self._rules = rules
        self._detokenizer = detokenizer
        self._stop_strings = stop_strings
        self.num_tokens = 0
        # The sum over the tokens counted, where they came with logprobs.
        self.cumulative_logprob = 0.0
        self.finished: Finished | None = None

    def feed(self, token_ids: Sequence[int], logprobs: Sequence[Logprobs] = ()) -> TextDelta:
        """Takes tokens up to the one that ends the completion; returns those with the text that is certain.

        `logprobs` has one entry per token, or none at all.
        """
        before, text = self.num_tokens, []
        for token_id in token_ids:
            if self.finished:
                break
            self.num_tokens += 1
            text.append(self._feed_one(token_id))
        taken = self.num_tokens - before
        if logprobs:
            logprobs = logprobs[:taken]
            for logprob in chosen(logprobs):
                # One by one, so that the sum does not depend on how the tokens were cut into pieces.
                self.cumulative_logprob += logprob
        return TextDelta("".join(text), list(token_ids[:taken]), logprobs)

    def _feed_one(self, token_id: int) -> str:
        if token_id in self._rules.stop_token_ids:
            return self._end_with_token(token_id)
        text = self._scan(self._detokenizer.feed((token_id,)))
        if self.num_tokens < self._rules.max_tokens or self.finished:
            return text
        text += self._flush()
        self.finished = self.finished or Finished(FinishReason.LENGTH, None)
        return text

    def _end_with_token(self, token_id: int) -> str:
        text = self._detokenizer.feed((token_id,)) if self._rules.include_stop else ""
        kind = MatchKind.EOS_TOKEN if token_id in self._rules.eos_token_ids else MatchKind.STOP_TOKEN
        text = self._scan(text) + self._flush()
        self.finished = self.finished or Finished(FinishReason.STOP, Match(kind, token_id))
        return text

    def _flush(self) -> str:
        if self.finished:
            return ""
        text = self._scan(self._detokenizer.finish())
        return text if self.finished else text + self._stop_strings.flush()

    def _scan(self, text: str) -> str:
        if not self._stop_strings:
            return text
        scanned = self._stop_strings.feed(text, searching=self.num_tokens >= self._rules.min_tokens)
        if scanned.matched is not None:
            self.finished = Finished(FinishReason.STOP, Match(MatchKind.STOP_STRING, scanned.matched))
        return scanned.text


# The most tokens of a sequence in one turn, so that one message to a slow reader, and one turn of the event loop, stay
# small; and the most logprobs in any event.
MAX_PIECE_TOKENS = 512
MAX_PIECE_NUMBERS = 2048


@dataclass(slots=True)
class _Held:
    """Holds the text of a sequence's tokens that were not sent yet, in parts, with the number of tokens of each."""

    num_tokens: list[int] = field(default_factory=list)
    texts: list[list[str]] = field(default_factory=list)

    def add(self, piece: TextDelta, most_tokens: int) -> None:
        """Appends `piece` to the last part, or begins a part if the last would hold more than `most_tokens`."""
        if self.num_tokens and self.num_tokens[-1] + len(piece.token_ids) <= most_tokens:
            self.num_tokens[-1] += len(piece.token_ids)
            self.texts[-1].append(piece.text)
        else:
            self.num_tokens.append(len(piece.token_ids))
            self.texts.append([piece.text])


class Answer:
    """Decides which sequences of one request the client gets, under which index, and when.

    Sequences are sent as they grow, or each whole where `incremental` is off. Where `num_results` are chosen among
    more, or found by a beam search, they are sent whole once all have ended, best first.
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
        # The most tokens of an event; with few logprobs any number, once a sequence has ended.
        self._most_tokens = max(1, MAX_PIECE_NUMBERS // (1 + top)) if top else MAX_TOKENS
        # Pieces that were not sent yet, by sequence: the latest where each is sent at once, or all since the start.
        self._sends_at_once = incremental and not self._is_ranked
        self._latest: dict[int, TextDelta] = {}
        self._held = [_Held() for _ in self._completions]
        self._num_sent = [0] * len(self._completions)
        self._end_sent: set[int] = set()
        # The latest `advance` has left some tokens.
        self.behind = False
        # Tokens taken, of all sequences together.
        self.num_tokens = 0
        self._num_running = len(self._completions)

    @property
    def finished(self) -> bool:
        """Tells whether all sequences have ended."""
        return not self._num_running

    def advance(self) -> list[TextDelta | Finished]:
        """Takes the journal's new tokens, as many as one turn may, and returns the events that are due.

        All tokens since the last call come in one piece, so a slow reader gets fewer, larger pieces.
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
        """Returns the index in the journal of the sequence that has the index `place` in the answer."""
        return self._best()[place] if self._is_ranked else place

    def ended_here(self) -> list[int]:
        """Returns the sequences that have ended by a stop string, which the scheduler does not see and runs on."""
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
        """Returns what the request has taken so far."""
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
        """Returns (index in the answer, index in the journal) of the sequences that may be sent now."""
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
        if finished and index not in self._end_sent:
            self._end_sent.add(index)
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
