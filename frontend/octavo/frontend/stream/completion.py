"""Turns the tokens of one sequence into text for the client, and finds where the sequence ends."""

from collections.abc import Iterator, Sequence, Set
from typing import Any

from octavo.frontend.answer_parsers.reasoning import ReasoningParser, Split
from octavo.frontend.request.events import Match, MatchKind, SequenceFinished, TextDelta, chosen
from octavo.frontend.request.request import GenerationRequest
from octavo.frontend.text.detokenizer import Detokenizer, scan
from octavo.wire.requests import FinishReason
from octavo.wire.sampling import Logprobs, SamplingParams


class SequenceText:
    """Turns one sequence into text. `finished` is set with the token that ends the sequence; later ones are ignored.

    Nothing ends a sequence before `min_tokens`: until then the workers choose no stop token, and stop strings are not
    looked for.
    """

    def __init__(
        self,
        request: GenerationRequest,
        sampling: SamplingParams,
        eos_token_ids: Set[int],
        detokenizer: Detokenizer[Any],
        reasoning: ReasoningParser | None = None,
    ) -> None:
        """`reasoning` sets apart what the model thinks, None for a model that thinks nothing."""
        self._request = request
        self._sampling = sampling
        self._stop_token_ids = frozenset(sampling.stop_token_ids)
        self._eos_token_ids = eos_token_ids
        self._detokenizer = detokenizer
        self._reasoning = reasoning
        # What has no text yet, and text that a stop string may begin with.
        self._undecoded = detokenizer.start
        self._held = ""
        self.num_tokens = 0
        # The sum over the tokens counted, where they came with logprobs.
        self.cumulative_logprob = 0.0
        self.finished: SequenceFinished | None = None
        # What waits for the end, in parts: of each its number of tokens, its reasoning and its text.
        self._waiting: list[tuple[int, list[str], list[str]]] = []

    @property
    def num_reasoning_tokens(self) -> int:
        """Returns how many of the tokens counted the model has thought with."""
        return self._reasoning.num_tokens if self._reasoning else 0

    def feed(self, token_ids: Sequence[int], logprobs: Sequence[Logprobs] = (), index: int = 0) -> TextDelta:
        """Takes tokens up to the one that ends the sequence; returns those with the text that is certain.

        Where the model may begin to think after text, the tokens taken end there. `logprobs` has one entry per token,
        or none at all. `index` is the index of the sequence in the answer.
        """
        before, text, reasoning = self.num_tokens, list[str](), list[str]()
        for token_id in token_ids:
            if self.finished:
                break
            self.num_tokens += 1
            found = self._feed_one(token_id)
            if self._reasoning is None:
                text.append(found)
                continue
            for split in self._split(self._reasoning, found):
                reasoning.append(split.reasoning)
                text.append(split.text)
            if self._reasoning.is_between and any(text):
                break
        taken = self.num_tokens - before
        if logprobs:
            logprobs = logprobs[:taken]
            for logprob in chosen(logprobs):
                # One by one, so that the sum does not depend on how the tokens were cut into pieces.
                self.cumulative_logprob += logprob
        return TextDelta("".join(text), list(token_ids[:taken]), logprobs, index, "".join(reasoning))

    def keep(self, piece: TextDelta, most_tokens: int) -> None:
        """Keeps the text of a piece until the end, in parts of at most `most_tokens` tokens."""
        num_tokens, reasoning, text = self._waiting[-1] if self._waiting else (most_tokens, [], [])
        is_behind = bool(piece.reasoning) and any(text)
        if num_tokens + len(piece.token_ids) > most_tokens or is_behind:
            self._waiting.append((len(piece.token_ids), [piece.reasoning], [piece.text]))
        else:
            reasoning.append(piece.reasoning)
            text.append(piece.text)
            self._waiting[-1] = num_tokens + len(piece.token_ids), reasoning, text

    def kept(self) -> Iterator[tuple[int, str, str]]:
        """Yields the parts that were kept, each as a number of tokens, their reasoning and their text."""
        waiting, self._waiting = self._waiting, []
        return ((num_tokens, "".join(reasoning), "".join(text)) for num_tokens, reasoning, text in waiting)

    def _split(self, reasoning: ReasoningParser, text: str) -> Iterator[Split]:
        """Yields what a token's text is, and with the last token the rest."""
        yield reasoning.feed(text)
        if self.finished:
            yield reasoning.finish()

    def _feed_one(self, token_id: int) -> str:
        if token_id in self._stop_token_ids:
            return self._end_with_token(token_id)
        text = self._scan(self._decode(token_id))
        if self.num_tokens < self._sampling.max_tokens or self.finished:
            return text
        text += self._flush()
        self.finished = self.finished or SequenceFinished(FinishReason.LENGTH, None)
        return text

    def _decode(self, token_id: int) -> str:
        text, self._undecoded = self._detokenizer.feed(self._undecoded, (token_id,))
        return text

    def _end_with_token(self, token_id: int) -> str:
        request = self._request
        text = self._decode(token_id) if request.include_stop else ""
        is_eos = token_id in self._eos_token_ids and token_id not in request.stop_token_ids
        text = self._scan(text) + self._flush()
        match = Match(MatchKind.EOS_TOKEN if is_eos else MatchKind.STOP_TOKEN, token_id)
        self.finished = self.finished or SequenceFinished(FinishReason.STOP, match)
        return text

    def _flush(self) -> str:
        if self.finished:
            return ""
        text = self._scan(self._detokenizer.finish(self._undecoded))
        if self.finished:
            return text
        held, self._held = self._held, ""
        return text + held

    def _scan(self, text: str) -> str:
        request = self._request
        if not request.stop_strings:
            return text
        text, self._held, stop = scan(
            request.stop_strings,
            self._held,
            text,
            include_stop=request.include_stop,
            searching=self.num_tokens >= self._sampling.min_tokens,
        )
        if stop is not None:
            self.finished = SequenceFinished(FinishReason.STOP, Match(MatchKind.STOP_STRING, stop))
        return text
