"""Reads the lines of a batch's input, and writes those of its output: one JSON object each, in OpenAI's form."""

import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Final, Literal

import msgspec
from msgspec import Meta, Raw

from octavo.frontend.api.body import UNKNOWN_FIELDS_HEADER
from octavo.frontend.http.connection import MAX_BODY
from octavo.wire.requests import MAX_PRIORITY

# As many as OpenAI takes.
MAX_LINES: Final = 50_000
# What is around the body of a call is short.
MAX_LINE_BYTES: Final = MAX_BODY + (64 << 10)
ENDPOINTS: Final = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses")
# Errors that are told of one input.
_MOST_ERRORS: Final = 100
# Behind all that has a client who waits: in these APIs lower is earlier.
_PRIORITY: Final = Raw(str(MAX_PRIORITY).encode())
_FALSE: Final = (b"false", b"null")

_CustomId = Annotated[str, Meta(min_length=1, max_length=512)]
encode = msgspec.json.Encoder().encode


class Line(msgspec.Struct, frozen=True, gc=False):
    """Holds one call of a batch. `body` is JSON text."""

    custom_id: _CustomId
    method: Literal["POST"]
    url: str
    body: Raw


class BadLine(ValueError):
    """A line is no call of its batch. `code` and `param` say which part of it is wrong, `str()` how."""

    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.param = param


class LineError(msgspec.Struct, frozen=True):
    """Says what is wrong with a line, which is counted from 1 on; 0 stands for the input as a whole."""

    code: str
    message: str
    line: int = 0
    param: str | None = None


@dataclass(frozen=True)
class Checked:
    """Says how many calls an input has, and what is wrong with it. `truncated`: there are more errors than these."""

    num_lines: int
    errors: tuple[LineError, ...]


_decode_line = msgspec.json.Decoder(Line).decode
_decode_body = msgspec.json.Decoder(dict[str, Raw]).decode


def read_line(text: bytes, endpoint: str | None) -> Line:
    """Reads a line of calls of `endpoint`, or of any where that is None. Raises `BadLine`."""
    try:
        line = _decode_line(text)
        _decode_body(line.body)
    except msgspec.ValidationError as error:
        raise BadLine("invalid_request", f"this is no call of a batch: {error}") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadLine("invalid_json_line", "this line is no JSON object; write one call in a line") from error
    if endpoint is not None and line.url != endpoint:
        raise BadLine("invalid_url", f"url is {line.url[:128]!r}, but this batch is of calls of {endpoint}", "url")
    if line.url not in ENDPOINTS:
        raise BadLine("invalid_url", f"url is {line.url[:128]!r}, but it can be {', '.join(ENDPOINTS)}", "url")
    return line


def body_of(line: Line) -> bytes:
    """Returns the body that a line's call is sent with: it waits for all clients who wait. Raises `BadLine` for a call
    that wants a stream."""
    fields = _decode_body(line.body)
    if bytes(fields.get("stream", Raw(b"null"))) not in _FALSE:
        raise BadLine("unsupported_field", "stream is not for a batch, whose answers are whole; leave it out", "stream")
    return encode({**fields, "priority": _PRIORITY})


def numbered_lines(file: BinaryIO) -> Iterator[tuple[int, bytes | None]]:
    """Yields the lines of a file that are not empty, with their numbers; None for one of more than `MAX_LINE_BYTES`."""
    number = 0
    while text := file.readline(MAX_LINE_BYTES + 1):
        number += 1
        is_long = len(text) > MAX_LINE_BYTES and not text.endswith(b"\n")
        while len(text) > MAX_LINE_BYTES and not text.endswith(b"\n"):
            text = file.readline(MAX_LINE_BYTES + 1)
        if is_long:
            yield number, None
        elif text.strip():
            yield number, text


def check_input(path: Path, endpoint: str | None) -> Checked:
    """Reads all of an input. Raises `OSError`."""
    errors: list[LineError] = []
    seen: set[str] = set()
    number_of_calls = 0
    with path.open("rb") as file:
        for number, text in numbered_lines(file):
            number_of_calls += 1
            try:
                _check(text, endpoint, seen)
            except BadLine as error:
                errors.append(LineError(error.code, str(error), number, error.param))
            if number_of_calls > MAX_LINES:
                errors.append(LineError("too_many_calls", f"a batch has {MAX_LINES} calls at most; make several"))
            if len(errors) >= _MOST_ERRORS or number_of_calls > MAX_LINES:
                break
    if not number_of_calls:
        errors.append(LineError("empty_file", "the file has no line; write one call in a line"))
    return Checked(number_of_calls, tuple(errors))


def _check(text: bytes | None, endpoint: str | None, seen: set[str]) -> None:
    if text is None:
        raise BadLine("line_too_long", f"this line has more than {MAX_LINE_BYTES} bytes; send less")
    line = read_line(text, endpoint)
    if line.custom_id in seen:
        said = f"custom_id {line.custom_id[:128]!r} is that of an earlier line; give each call its own"
        raise BadLine("duplicate_custom_id", said, "custom_id")
    seen.add(line.custom_id)


def answered_line(custom_id: str, status: int, request_id: str, body: bytes, ignored: str = "") -> bytes:
    """Returns the line of a call that was answered with `body`, which is JSON text. Fields that were `ignored` are
    named as in the header of an answer over HTTP."""
    response = {"status_code": status, "request_id": request_id, "body": Raw(body)}
    headers = {"headers": {UNKNOWN_FIELDS_HEADER: ignored}} if ignored else {}
    return _line(custom_id, {**response, **headers}, None)


def unanswered_line(custom_id: str, code: str, message: str) -> bytes:
    """Returns the line of a call that no route has answered."""
    return _line(custom_id, None, {"code": code, "message": message})


def _line(custom_id: str, response: dict[str, Any] | None, error: dict[str, Any] | None) -> bytes:
    found = {"id": f"batch_req_{secrets.token_hex(12)}", "custom_id": custom_id, "response": response, "error": error}
    return encode(found) + b"\n"
