"""Writes events as Dynamo's chunks, and errors as its exceptions."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from octavo.client.errors import (
    AbortedError,
    NotFoundError,
    OctavoError,
    OverloadedError,
    RequestError,
    UnavailableError,
)
from octavo.client.events import Candidate, Delta, Event, Finished, Started, TokenLogprobs, Usage
from octavo.client.retries import LOST

Chunk = dict[str, Any]


@dataclass
class Chunks:
    """Writes the chunks of one request, which has one sequence. Dynamo reads no further than a chunk that ends one."""

    _prompt_logprobs: Sequence[TokenLogprobs] = field(default=(), init=False)
    _reason: str = field(default="", init=False)

    def of(self, event: Event | None) -> Iterator[Chunk]:
        """Yields the chunk that an event brings, if any. The last comes with the usage."""
        match event:
            case Started():
                self._prompt_logprobs = event.prompt_logprobs
            case Delta(token_ids=token_ids) if token_ids:
                yield {"index": event.index, "token_ids": list(token_ids), **_logprobs(event.logprobs)}
            case Finished():
                # What a newer server calls otherwise is an end too.
                self._reason = "length" if event.reason == "length" else "stop"
            case Usage():
                chunk = {"index": 0, "token_ids": [], "finish_reason": self._reason, "completion_usage": _usage(event)}
                if self._prompt_logprobs:
                    chunk["engine_data"] = {"prompt_logprobs": _of_prompt(self._prompt_logprobs)}
                yield chunk


CANCELLED: Chunk = {"index": 0, "token_ids": [], "finish_reason": "cancelled"}


def exception_name(error: OctavoError) -> str:
    """Returns the name of the exception in `dynamo.llm.exceptions` for an error of a cell.

    Dynamo moves a request on to another worker after CannotConnect and EngineShutdown, up to its `--migration-limit`,
    and sends nothing to a worker for a while after EngineShutdown. A request over which a cell failed is not moved on,
    or it would go through all cells.
    """
    match error:
        case UnavailableError():
            return "EngineShutdown"
        case _ if error.code in LOST and not error.reason:
            return "EngineShutdown"
        case OverloadedError() if error.retry_after_s is not None:
            return "CannotConnect"
        case OverloadedError() | RequestError() | NotFoundError():
            return "InvalidArgument"
        case AbortedError():
            return "Cancelled"
    return "Unknown"


def _usage(usage: Usage) -> Chunk:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_prompt_tokens},
    }


def _logprobs(tokens: Sequence[TokenLogprobs]) -> Chunk:
    if not tokens:
        return {}
    return {"log_probs": [token.logprob for token in tokens], "top_logprobs": [_ranked(token) for token in tokens]}


def _ranked(token: TokenLogprobs) -> list[Chunk]:
    """Returns the likeliest tokens, and the token itself after them where it is none of them."""
    return [
        {
            "rank": rank,
            "token_id": candidate.token_id,
            "token": _text(candidate.piece),
            "logprob": candidate.logprob,
            "bytes": list(candidate.piece),
        }
        for rank, candidate in _candidates(token)
    ]


def _of_prompt(tokens: Sequence[TokenLogprobs]) -> list[Any]:
    """Returns an entry for each token of the prompt; the first has none."""
    return [None, *({str(c.token_id): _entry(rank, c) for rank, c in _candidates(token)} for token in tokens)]


def _entry(rank: int, candidate: Candidate) -> Chunk:
    return {"logprob": candidate.logprob, "rank": rank, "decoded_token": _text(candidate.piece)}


def _candidates(token: TokenLogprobs) -> list[tuple[int, Candidate]]:
    found = [*enumerate(token.top, 1)]
    if token.token_id not in {candidate.token_id for candidate in token.top}:
        found.append((token.rank, Candidate(token.token_id, token.logprob, token.piece)))
    return found


def _text(piece: bytes) -> str:
    return piece.decode(errors="replace")
