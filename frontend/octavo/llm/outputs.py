"""Declares answers in the form that vLLM gives them, and makes them from the client's results."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from octavo.client import Completion, Result, TokenLogprobs

TokenDict = dict[int, "Logprob"]


@dataclass(frozen=True)
class Logprob:
    """Holds the logprob of one token at one position. The token with the highest has `rank` 1."""

    logprob: float
    rank: int | None
    decoded_token: str | None


@dataclass(frozen=True)
class CompletionOutput:
    """Holds one answer. `logprobs`, where asked for, has one dict per token: its own logprob and the top ones, by id.

    `stop_reason` is the stop string or stop token that ended the answer. `reasoning` is what the model has thought in
    the answer to a chat, which is no part of `text`.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None
    logprobs: list[TokenDict] | None
    finish_reason: str
    stop_reason: int | str | None
    reasoning: str = ""


@dataclass(frozen=True)
class RequestOutput:
    """Holds a prompt and its answers. `prompt` is None for a prompt that was token ids.

    The first entry of `prompt_logprobs` is None, for the first token has no logprob.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    num_cached_tokens: int
    seed: int
    prompt_logprobs: list[TokenDict | None] | None = None
    finished: bool = True


@dataclass(frozen=True)
class BeamSearchSequence:
    """One result of a search; `tokens` and `text` are those of the prompt and the answer together."""

    tokens: list[int]
    cum_logprob: float
    text: str
    finish_reason: str


@dataclass(frozen=True)
class BeamSearchOutput:
    """Holds the results of a search, best first."""

    sequences: list[BeamSearchSequence] = field(default_factory=list)


def request_output(result: Result, prompt: str | None, prompt_token_ids: list[int]) -> RequestOutput:
    """Makes vLLM's form of a result."""
    prompt_logprobs = result.prompt_logprobs
    return RequestOutput(
        request_id=result.request_id,
        prompt=prompt,
        prompt_token_ids=prompt_token_ids,
        outputs=[_completion(completion) for completion in result.completions],
        num_cached_tokens=result.usage.cached_prompt_tokens,
        seed=result.seed,
        prompt_logprobs=None if prompt_logprobs is None else [None, *_by_id(prompt_logprobs)],
    )


def _completion(completion: Completion) -> CompletionOutput:
    return CompletionOutput(
        index=completion.index,
        text=completion.text,
        token_ids=list(completion.token_ids),
        cumulative_logprob=completion.cumulative_logprob,
        logprobs=None if completion.logprobs is None else _by_id(completion.logprobs),
        finish_reason=completion.finish_reason,
        stop_reason=completion.stop_reason,
        reasoning=completion.reasoning,
    )


def _by_id(places: Sequence[TokenLogprobs]) -> list[TokenDict]:
    return [
        {
            place.token_id: Logprob(place.logprob, place.rank, _text(place.piece)),
            **{
                candidate.token_id: Logprob(candidate.logprob, rank, _text(candidate.piece))
                for rank, candidate in enumerate(place.top, 1)
            },
        }
        for place in places
    ]


def _text(piece: bytes) -> str:
    return piece.decode(errors="replace")
