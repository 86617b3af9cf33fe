"""Reads a form with one file, whose content is handed on as it comes: it may be larger than memory."""

from collections.abc import Awaitable, Callable, Mapping
from typing import Final

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.requests import Request

from octavo.frontend.errors import InvalidRequest, Reason, bad_parameter
from octavo.frontend.http.connection import ClientGone

_FILE: Final = "file"
# The form's other fields are words and numbers.
_MAX_FIELDS: Final = 16
_MAX_VALUE: Final = 4096
_MAX_NAME: Final = 256
_ADVICE: Final = "send multipart/form-data with the parts file and purpose, as OpenAI's clients do"
# Takes a piece of the file's content.
Take = Callable[[bytes], Awaitable[None]]


class Form:
    """Parses a form as its bytes come. `content` is what has come of the file and is not handed on yet."""

    def __init__(self, content_type: str) -> None:
        """Raises `InvalidRequest` for what is no form with a file."""
        kind, options = parse_options_header(content_type)
        if kind != b"multipart/form-data" or b"boundary" not in options:
            raise InvalidRequest(Reason.BAD_MESSAGE, f"the body is no form; {_ADVICE}")
        self.values: dict[str, str] = {}
        self.filename: str | None = None
        self.content: list[bytes] = []
        self._name = ""
        self._header = b""
        self._headers: dict[bytes, bytes] = {}
        self._header_value = b""
        self._value = bytearray()
        self._is_whole = False
        self._parser = MultipartParser(
            options[b"boundary"],
            {
                "on_part_begin": self._begin,
                "on_header_field": self._on_header,
                "on_header_value": self._on_header_value,
                "on_header_end": self._on_header_end,
                "on_headers_finished": self._on_headers,
                "on_part_data": self._on_data,
                "on_part_end": self._on_end,
                "on_end": self._on_last,
            },
        )

    def feed(self, chunk: bytes) -> None:
        """Takes in the next bytes of the body. Raises `InvalidRequest`."""
        try:
            self._parser.write(chunk)
        except FormParserError as error:
            raise InvalidRequest(Reason.BAD_MESSAGE, f"the body is no form that can be read; {_ADVICE}") from error

    def finish(self) -> None:
        """Raises `InvalidRequest` where the form is not whole, or has no file."""
        if not self._is_whole:
            raise InvalidRequest(Reason.BAD_MESSAGE, f"the form breaks off; {_ADVICE}")
        if self.filename is None:
            raise bad_parameter(_FILE, "missing", "the form must have a file")

    def _begin(self) -> None:
        self._headers, self._header, self._header_value, self._value = {}, b"", b"", bytearray()

    def _on_header(self, data: bytes, start: int, end: int) -> None:
        self._header += data[start:end]

    def _on_header_value(self, data: bytes, start: int, end: int) -> None:
        self._header_value += data[start:end]

    def _on_header_end(self) -> None:
        self._headers[self._header.lower()] = self._header_value
        self._header = self._header_value = b""

    def _on_headers(self) -> None:
        _, options = parse_options_header(self._headers.get(b"content-disposition", b""))
        self._name = options.get(b"name", b"").decode(errors="replace")[:_MAX_NAME]
        if self._name == _FILE:
            if self.filename is not None:
                raise bad_parameter(_FILE, "there twice", "a form has one file; send the others in forms of their own")
            self.filename = options.get(b"filename", b"").decode(errors="replace")[:_MAX_NAME] or _FILE
        elif len(self.values) >= _MAX_FIELDS:
            raise bad_parameter(self._name[:64], "one field too many", f"a form has {_MAX_FIELDS} at most")

    def _on_data(self, data: bytes, start: int, end: int) -> None:
        if self._name == _FILE:
            self.content.append(data[start:end])
            return
        self._value += data[start:end]
        if len(self._value) > _MAX_VALUE:
            raise bad_parameter(self._name[:64], "too long", f"it may have {_MAX_VALUE} bytes")

    def _on_end(self) -> None:
        if self._name != _FILE:
            self.values[self._name] = self._value.decode(errors="replace")

    def _on_last(self) -> None:
        self._is_whole = True


async def read_form(request: Request, take: Take) -> tuple[str, Mapping[str, str]]:
    """Returns the name of the form's file and the form's other fields, once `take` has all of the file.

    Raises `InvalidRequest`, and `ClientGone` where the client leaves.
    """
    form = Form(request.headers.get("content-type", ""))
    more = True
    while more:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        form.feed(message.get("body", b""))
        for content in form.content:
            await take(content)
        form.content.clear()
        more = message.get("more_body", False)
    form.finish()
    return form.filename or "", form.values
