"""Beam search over candidates, free of blocks and queues: which beams go on, which hypotheses stand, when it ends.

The rules are those of `generate(num_beams=...)` in transformers 5, so that results can be compared token for token: of
the candidates of all beams the best `num_candidates` are looked at; those among the first `width` that end become
hypotheses, and the best `width` of the others are the next beams.
"""

from collections.abc import Sequence as Ordered
from dataclasses import dataclass, field

from octavo.wire import sampling as wire
from octavo.wire.requests import FinishReason
from octavo.wire.sampling import EarlyStopping
from octavo.wire.steps import Candidates


@dataclass(frozen=True, slots=True)
class Continuation:
    """A candidate is one token after a beam. `beam` is the beam's index in the list passed to `advance`."""

    beam: int
    token_id: int
    cumulative_logprob: float


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A finished sequence of generated tokens. `score`: its cumulative logprob / length ** length_penalty."""

    token_ids: list[int]
    cumulative_logprob: float
    score: float
    finish_reason: FinishReason


@dataclass(frozen=True, slots=True)
class Beam:
    """A live beam and the tokens that the model offers after it, most probable first."""

    generated: Ordered[int]
    cumulative_logprob: float
    token_ids: Ordered[int]
    logprobs: Ordered[float]


@dataclass(slots=True)
class BeamSearchState:
    """Runs one request's search. `hypotheses` holds at most `width`, best first.

    By index of a beam, `logprobs` holds the cumulative logprob of its tokens; `candidates` the tokens that it may go on
    with, kept until all beams have theirs.
    """

    params: wire.BeamSearch
    max_tokens: int
    stop_token_ids: frozenset[int]
    hypotheses: list[Hypothesis] = field(default_factory=list)
    logprobs: dict[int, float] = field(default_factory=lambda: {0: 0.0})
    candidates: dict[int, Candidates] = field(default_factory=dict)
    # Beams forked so far: indexes for new ones.
    num_forks: int = 0

    @property
    def num_candidates(self) -> int:
        """Returns how many candidates a step looks at, over all beams: enough that `width` of them do not end."""
        return max(2, 1 + len(self.stop_token_ids)) * self.params.width

    def beam(self, index: int, generated: Ordered[int]) -> Beam:
        """Returns the beam of this index, which has `generated` so far, with its candidates. Raises `KeyError` where it
        has none."""
        candidates = self.candidates[index]
        return Beam(generated, self.logprobs[index], candidates.token_ids, candidates.logprobs)

    def go_on(self, logprobs: dict[int, float]) -> None:
        """Goes on with the beams of these indexes and cumulative logprobs; all wait for candidates again."""
        self.logprobs, self.candidates = logprobs, {}

    def advance(self, beams: list[Beam]) -> list[Continuation]:
        """Returns the next beams, best first; none if the search has ended. All of `beams` have generated equally many
        tokens."""
        length = len(beams[0].generated) + 1
        running: list[Continuation] = []
        for rank, continuation in enumerate(self._best_candidates(beams)):
            reason = self._finish_reason(continuation, length)
            if reason is None:
                running.append(continuation)
            elif rank < self.params.width:
                self._add(beams[continuation.beam], continuation, length, reason)
        del running[self.params.width :]
        self.hypotheses.sort(key=lambda hypothesis: -hypothesis.score)
        del self.hypotheses[self.params.width :]
        return [] if self._has_ended(running, length) else running

    def _best_candidates(self, beams: list[Beam]) -> list[Continuation]:
        candidates = [
            Continuation(index, token_id, beam.cumulative_logprob + logprob)
            for index, beam in enumerate(beams)
            for token_id, logprob in zip(beam.token_ids, beam.logprobs, strict=True)
        ]
        candidates.sort(key=lambda continuation: -continuation.cumulative_logprob)
        return candidates[: self.num_candidates]

    def _finish_reason(self, continuation: Continuation, length: int) -> FinishReason | None:
        if continuation.token_id in self.stop_token_ids:
            return FinishReason.STOP
        return FinishReason.LENGTH if length >= self.max_tokens else None

    def _add(self, beam: Beam, continuation: Continuation, length: int, reason: FinishReason) -> None:
        logprob = continuation.cumulative_logprob
        token_ids = [*beam.generated, continuation.token_id]
        self.hypotheses.append(Hypothesis(token_ids, logprob, self._score(logprob, length), reason))

    def _score(self, logprob: float, length: int) -> float:
        return float(logprob / length**self.params.length_penalty)

    def _has_ended(self, running: list[Continuation], length: int) -> bool:
        if not running:
            return True
        if len(self.hypotheses) < self.params.width:
            return False
        if self.params.early_stopping is EarlyStopping.ON:
            return True
        # A score rises with length only under a positive penalty; then a beam may at best keep its logprob to the end.
        hopeful = self.params.early_stopping is EarlyStopping.NEVER and self.params.length_penalty > 0
        attainable = self._score(running[0].cumulative_logprob, self.max_tokens if hopeful else length)
        return attainable <= self.hypotheses[-1].score
