"""Decodes server-sent events of OpenAI's API, from bytes to chunks. Knows no socket."""

from collections.abc import Iterator
from typing import Any, Final

import msgspec

from octavo.loadgen.failures import Failure
from octavo.loadgen.records import Answer

_DATA: Final = b"data:"
_DONE: Final = b"[DONE]"


class Text(msgspec.Struct, gc=False):
    """Holds what a chunk of a chat adds, or a whole message."""

    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None

    def __bool__(self) -> bool:
        return bool(self.content or self.reasoning or self.reasoning_content)


class Choice(msgspec.Struct, gc=False):
    """Holds one sequence's part of a chunk."""

    index: int = 0
    text: str | None = None
    delta: Text | None = None
    message: Text | None = None
    token_ids: list[int] | None = None
    finish_reason: str | None = None

    @property
    def num_tokens(self) -> int:
        """Returns the exact number of tokens where the server shows their ids; else 1 where there is text, and 0 where
        there is none."""
        if self.token_ids is not None:
            return len(self.token_ids)
        return 1 if self.text or self.delta or self.message else 0


class Details(msgspec.Struct, gc=False):
    """Holds the counts of a prompt's tokens."""

    cached_tokens: int | None = None


class Counts(msgspec.Struct, gc=False):
    """Holds numbers of tokens as the server counts them."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: Details | None = None

    @property
    def cached_tokens(self) -> int:
        """Returns the number of cached tokens, 0 also where the server does not say."""
        return (self.prompt_tokens_details and self.prompt_tokens_details.cached_tokens) or 0


class Chunk(msgspec.Struct, gc=False):
    """Holds an event, or a whole answer that is no stream."""

    choices: list[Choice] = []
    usage: Counts | None = None
    error: Any = None
    # Of an error that is not wrapped.
    object: str | None = None
    message: str | None = None


_decode_chunk = msgspec.json.Decoder(Chunk).decode


def decode_chunk(payload: bytes) -> Chunk:
    """Raises `Failure` for what is no chunk, or tells of an error."""
    try:
        chunk = _decode_chunk(payload)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Failure("unreadable answer", f"{error}: {payload[:100]!r}") from error
    if chunk.error is not None or chunk.object == "error":
        raise Failure(*error_of(payload, "error in the stream"))
    return chunk


def error_of(body: bytes, kind: str) -> tuple[str, str]:
    """Returns kind and detail of an error's body in any of the forms that servers give it."""
    try:
        found = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return kind, body[:300].decode(errors="replace")
    error = found.get("error", found) if isinstance(found, dict) else found
    if not isinstance(error, dict):
        return kind, str(error)
    code = error.get("code")
    # A number repeats the status.
    named = f"{kind} {code}" if isinstance(code, str) and not code.isdigit() else kind
    return named, str(error.get("message") or error.get("detail") or error)


class Lines:
    """Takes bytes and yields the payloads of events."""

    __slots__ = ("_rest", "done")

    def __init__(self) -> None:
        self._rest = b""
        # Whether the server said that the stream is complete.
        self.done = False

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Returns the payloads that are complete now. Comments and other fields are skipped."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            if line.startswith(_DATA):
                payload = line[len(_DATA) :].strip()
                if payload == _DONE:
                    self.done = True
                else:
                    yield payload


class ChunkReader:
    """Tells an `Answer` what is in its chunks."""

    __slots__ = ("_answer", "_open", "_usage")

    def __init__(self, answer: Answer, sequences: int) -> None:
        self._answer = answer
        self._open = sequences
        self._usage: Counts | None = None

    @property
    def complete(self) -> bool:
        """Returns whether every sequence has said why it ended."""
        return self._open <= 0

    def read(self, chunk: Chunk) -> None:
        for choice in chunk.choices:
            if count := choice.num_tokens:
                self._answer.tokens(choice.index, count)
            self._open -= choice.finish_reason is not None
        if chunk.usage is not None:
            self._usage = chunk.usage

    def end(self) -> None:
        """Ends the stream; called once, at the end: what the server counted is what counts."""
        usage = self._usage
        if usage is not None and usage.completion_tokens:
            self._answer.usage(usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens)
        self._answer.end()
