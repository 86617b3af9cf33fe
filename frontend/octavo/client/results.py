"""Declares whole answers, and puts them together from events."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from octavo.client.events import Delta, Event, Finished, FinishReason, Started, TokenLogprobs, Usage
from octavo.client.prompts import Prompt

T = TypeVar("T")


@dataclass(frozen=True)
class Completion:
    """Holds one sequence of an answer.

    `stop_reason` is the stop string or stop token that ended the sequence; None at EOS and at the limit. `logprobs` is
    None where none were asked for. `reasoning` is what the model has thought before and between its text.
    """

    index: int
    text: str
    token_ids: Sequence[int]
    finish_reason: FinishReason
    stop_reason: str | int | None = None
    logprobs: Sequence[TokenLogprobs] | None = None
    cumulative_logprob: float | None = None
    reasoning: str = ""


@dataclass(frozen=True)
class Result:
    """Holds a whole answer, with its sequences in order of their index.

    `seed` is the seed in force: with it, and the same parameters, the answer can be had again. `prompt_logprobs` is
    None where none were asked for.
    """

    prompt: Prompt
    request_id: str
    model: str
    seed: int
    completions: Sequence[Completion]
    usage: Usage
    prompt_logprobs: Sequence[TokenLogprobs] | None = None

    @property
    def text(self) -> str:
        """Returns the text of the first sequence."""
        return self.completions[0].text


@dataclass(frozen=True)
class Model:
    """A model that is served. `max_model_len` is in tokens, and 0 while no worker has said which model it serves.

    All its workers together have `kv_blocks` blocks of KV cache, of `block_size` tokens each; 0 while there are none.
    """

    id: str
    max_model_len: int
    ready: bool
    block_size: int = 0
    kv_blocks: int = 0


@dataclass(frozen=True)
class Embedding:
    """What the model gives of a text: a vector, or of a classifier the score of each class, before anything makes
    probabilities of them. The text had `prompt_tokens` tokens."""

    values: list[float]
    prompt_tokens: int


@dataclass
class Collector:
    """Collects events into a `Result`. A second `Started` begins anew, for the answer is computed once more."""

    prompt: Prompt
    logprobs: bool = False
    prompt_logprobs: bool = False
    _started: Started | None = None
    _deltas: dict[int, list[Delta]] = field(default_factory=dict)
    _finished: dict[int, Finished] = field(default_factory=dict)
    _usage: Usage | None = None

    def add(self, event: Event) -> None:
        """Takes the next event of the stream."""
        match event:
            case Started():
                self._started = event
                self._deltas.clear()
                self._finished.clear()
            case Delta():
                self._deltas.setdefault(event.index, []).append(event)
            case Finished():
                self._finished[event.index] = event
            case Usage():
                self._usage = event

    def result(self) -> Result:
        """Returns the answer, once the last event is in."""
        assert self._started is not None
        assert self._usage is not None
        return Result(
            prompt=self.prompt,
            request_id=self._started.request_id,
            model=self._started.model,
            seed=self._started.seed,
            completions=tuple(self._completion(self._finished[index]) for index in sorted(self._finished)),
            usage=self._usage,
            prompt_logprobs=tuple(self._started.prompt_logprobs) if self.prompt_logprobs else None,
        )

    def _completion(self, finished: Finished) -> Completion:
        deltas = self._deltas.get(finished.index, [])
        return Completion(
            index=finished.index,
            text="".join(delta.text for delta in deltas),
            token_ids=_joined(delta.token_ids for delta in deltas),
            finish_reason=finished.reason,
            stop_reason=finished.stop_reason,
            logprobs=_joined(delta.logprobs for delta in deltas) if self.logprobs else None,
            cumulative_logprob=finished.cumulative_logprob,
            reasoning="".join(delta.reasoning for delta in deltas),
        )


def _joined(parts: Iterable[Sequence[T]]) -> tuple[T, ...]:
    return tuple(item for part in parts for item in part)
