"""From accepted tokens to what the client sees: text, the end, and the token that brought it."""

from collections.abc import Sequence, Set
from dataclasses import dataclass

from octavo.frontend.request.events import Finished, FinishReason, Match, MatchKind, TextDelta
from octavo.frontend.request.logprob_table import chosen
from octavo.frontend.text.detokenizer import Detokenizer
from octavo.frontend.text.stop_strings import StopStrings
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
