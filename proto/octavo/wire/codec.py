"""Encodes messages as bytes and decodes them: one encoder, one typed decoder per direction."""

from collections.abc import Callable
from typing import Any, Final

import msgspec

from octavo.wire.base import Message
from octavo.wire.peers import BlocksRead, ReadBlocks
from octavo.wire.requests import FromFrontend, ToFrontend
from octavo.wire.steps import FromWorker, ToWorker


class WireError(Exception):
    """Says that bytes are no message of the direction they came from."""


encode: Final[Callable[[Message], bytes]] = msgspec.msgpack.Encoder().encode


def _decoder(union: Any) -> Callable[[bytes], Any]:
    decode = msgspec.msgpack.Decoder(union).decode

    def checked(frame: bytes) -> Any:
        # Not only msgspec.DecodeError: invalid UTF-8 and deep nesting raise their own kinds.
        try:
            return decode(frame)
        except Exception as error:
            raise WireError(f"{type(error).__name__}: {error}"[:500]) from error

    return checked


decode_from_frontend: Final[Callable[[bytes], FromFrontend]] = _decoder(FromFrontend)
decode_to_frontend: Final[Callable[[bytes], ToFrontend]] = _decoder(ToFrontend)
decode_from_worker: Final[Callable[[bytes], FromWorker]] = _decoder(FromWorker)
decode_to_worker: Final[Callable[[bytes], ToWorker]] = _decoder(ToWorker)
decode_to_peer: Final[Callable[[bytes], ReadBlocks]] = _decoder(ReadBlocks)
decode_from_peer: Final[Callable[[bytes], BlocksRead]] = _decoder(BlocksRead)
