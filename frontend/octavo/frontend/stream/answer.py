"""Turns the tokens of a request's sequences into pieces of text for the client."""

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
    """When a completion ends besides its stop strings. `eos_token_ids` is part of `stop_token_ids`.

    Nothing ends it before `min_tokens`: the workers choose no stop token until then, and stop strings are not found.
    """

    max_tokens: int
    min_tokens: int
    stop_token_ids: Set[int]
    eos_token_ids: Set[int]
    include_stop: bool


class Completion:
    """One sequence on its way to the client. `finished` is set with the token that ends it; later ones are ignored."""

    def __init__(self, rules: EndRules, detokenizer: Detokenizer, stop_strings: StopStrings) -> None:
        self._rules = rules
        self._detokenizer = detokenizer
        self._stop_strings = stop_strings
        self.num_tokens = 0
        # Of the tokens counted, where they came with logprobs.
        self.cumulative_logprob = 0.0
        self.finished: Finished | None = None

    def feed(self, token_ids: Sequence[int], logprobs: Sequence[Logprobs] = ()) -> TextDelta:
        """Takes tokens up to the one that ends the completion, and gives the text that is certain.

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


# From a journal to the events of its request: which sequences the client gets, under which index, and when.


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
