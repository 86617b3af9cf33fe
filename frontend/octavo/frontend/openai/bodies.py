"""A call's body to typed fields, however large it is, while other calls go on."""

import asyncio
from typing import Final, TypeVar

import msgspec
from starlette.requests import Request

from octavo.frontend.errors import InvalidRequest, Reason
from octavo.frontend.openai.connection import read_body
from octavo.frontend.openai.fields import Neutral, read_fields

T = TypeVar("T", bound=msgspec.Struct)

# Decoding so many bytes takes about a millisecond at most.
SMALL_BODY: Final = 64 << 10
# Of names and texts in one body. Each costs memory and time of its own, and the decoder makes them all before anybody
# can count them.
MAX_TEXTS: Final = 1 << 16


async def read_call(request: Request, kind: type[T], unsupported: Neutral) -> tuple[T, list[str]]:
    """The body of the call: see `read_fields`. Raises `InvalidRequest`, `Unsupported`, `ClientGone`."""
    body = await read_body(request)
    if len(body) <= SMALL_BODY:
        return read_fields(body, kind, unsupported)
    check_texts(body)
    return await asyncio.to_thread(read_fields, body, kind, unsupported)


def check_texts(body: bytes) -> None:
    """Raises `InvalidRequest` for more names and texts than anybody means."""
    # Each begins with a quote that nothing escapes; most end with one, too.
    quotes = body.count(b'"') - body.count(b'\\"')
    if quotes > 2 * MAX_TEXTS:
        raise InvalidRequest(
            Reason.TOO_LARGE,
            f"the body has more than {MAX_TEXTS} names and texts; send fewer, or join them",
            max_texts=MAX_TEXTS,
        )
