"""Writes logprobs in the two forms that OpenAI's API has for them, and counts of tokens."""

from collections.abc import Iterator, Sequence
from itertools import accumulate, chain, islice
from typing import Any, Final

import msgspec

from octavo.frontend.api.usage import UsageSum
from octavo.frontend.text.tokenizer import ModelTokenizer
from octavo.wire.sampling import Logprobs

# The least logprob that clients are shown: JSON has no infinity.
_LEAST = -9999.0
# Tokens whose logprobs are written in one go, within a few milliseconds.
_AT_ONCE: Final = 128

_encode: Final = msgspec.json.Encoder().encode


def token_text(tokenizer: ModelTokenizer, token_id: int) -> str:
    """Returns the text of a token; a token that is no whole text is named by its bytes."""
    piece = tokenizer.piece(token_id)
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)


class CompletionLogprobs:
    """Writes the logprobs of one choice of a completion; text offsets go on from one call of `of` to the next."""

    def __init__(self, tokenizer: ModelTokenizer, top: int) -> None:
        self._tokenizer = tokenizer
        self._top = top
        self._offset = 0

    def of(self, token_ids: Sequence[int], logprobs: Sequence[Logprobs | None]) -> dict[str, Any]:
        """Returns the object of the next tokens. The first token of a prompt has no logprob."""
        tokens = [token_text(self._tokenizer, token_id) for token_id in token_ids]
        offsets = []
        for token in tokens:
            offsets.append(self._offset)
            self._offset += len(token)
        pairs = list(zip(tokens, logprobs, strict=True))
        return {
            "tokens": tokens,
            "token_logprobs": [None if found is None else max(found.logprob, _LEAST) for _, found in pairs],
            "top_logprobs": [None if found is None else self._alternatives(token, found) for token, found in pairs],
            "text_offset": offsets,
        }

    def whole(self, token_ids: Sequence[int], parts: Sequence[Sequence[Logprobs | None]]) -> Iterator[bytes]:
        """Yields, some at a time, the JSON text of the object of all tokens, whose logprobs `parts` hold together."""
        tokens = [token_text(self._tokenizer, token_id) for token_id in token_ids]
        offsets = [0, *accumulate(map(len, tokens))][: len(tokens)]
        yield b'{"tokens":' + _encode(tokens) + b',"text_offset":' + _encode(offsets)
        yield b',"token_logprobs":['
        yield from _items(None if found is None else max(found.logprob, _LEAST) for found in chain(*parts))
        yield b'],"top_logprobs":['
        pairs = zip(tokens, chain(*parts), strict=True)
        yield from _items(None if found is None else self._alternatives(token, found) for token, found in pairs)
        yield b"]}"

    def _alternatives(self, token: str, found: Logprobs) -> dict[str, float]:
        pairs = list(zip(found.top_token_ids, found.top_logprobs, strict=True))[: self._top]
        named = {token_text(self._tokenizer, token_id): max(logprob, _LEAST) for token_id, logprob in pairs}
        # The token itself is always among them, as clients that look for the most likely one expect.
        return {**named, token: max(found.logprob, _LEAST)}


class ChatLogprobs:
    """Writes the logprobs of one choice of a chat."""

    def __init__(self, tokenizer: ModelTokenizer, top: int) -> None:
        self._tokenizer = tokenizer
        self._top = top

    def of(self, token_ids: Sequence[int], logprobs: Sequence[Logprobs | None]) -> dict[str, Any]:
        """Returns the object of the next tokens."""
        pairs = zip(token_ids, logprobs, strict=True)
        return {"content": [self._token(token_id, found) for token_id, found in pairs if found], "refusal": None}

    def whole(self, token_ids: Sequence[int], parts: Sequence[Sequence[Logprobs]]) -> Iterator[bytes]:
        """Yields, some at a time, the JSON text of the object of all tokens, whose logprobs `parts` hold together."""
        yield b'{"content":['
        yield from _items(self._token(*pair) for pair in zip(token_ids, chain(*parts), strict=True))
        yield b'],"refusal":null}'

    def _token(self, token_id: int, found: Logprobs) -> dict[str, Any]:
        pairs = list(zip(found.top_token_ids, found.top_logprobs, strict=True))[: self._top]
        return {**self._entry(token_id, found.logprob), "top_logprobs": [self._entry(*pair) for pair in pairs]}

    def _entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        return {
            "token": token_text(self._tokenizer, token_id),
            "logprob": max(logprob, _LEAST),
            "bytes": list(self._tokenizer.piece(token_id)),
        }


def _items(values: Iterator[object]) -> Iterator[bytes]:
    """Yields the text of the items of a JSON array, some at a time."""
    between = b""
    while items := list(islice(values, _AT_ONCE)):
        yield between + _encode(items)[1:-1]
        between = b","


def prompt_logprobs_of(
    tokenizer: ModelTokenizer, token_ids: Sequence[int], logprobs: Sequence[Logprobs]
) -> list[msgspec.Raw | None]:
    """Returns vLLM's form for a prompt: for each token candidates by their ids, None for the first token.

    Each entry is JSON text already, because those of a long prompt would be a million objects.
    """
    pairs = zip(token_ids[1:], logprobs, strict=True)
    return [None, *(msgspec.Raw(_encode(_candidates(tokenizer, *pair))) for pair in pairs)]


def _candidates(tokenizer: ModelTokenizer, token_id: int, found: Logprobs) -> dict[str, Any]:
    ranked = [
        *((i, p, rank) for rank, (i, p) in enumerate(zip(found.top_token_ids, found.top_logprobs, strict=True), 1)),
        (token_id, found.logprob, found.rank),
    ]
    return {
        str(i): {"logprob": max(p, _LEAST), "rank": rank, "decoded_token": token_text(tokenizer, i)}
        for i, p, rank in ranked
    }


def usage_object(usage: UsageSum) -> dict[str, Any]:
    """Returns OpenAI's usage object."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": {
            "reasoning_tokens": usage.reasoning_tokens,
            "accepted_prediction_tokens": usage.accepted_predictions,
            "rejected_prediction_tokens": usage.rejected_predictions,
        },
    }
