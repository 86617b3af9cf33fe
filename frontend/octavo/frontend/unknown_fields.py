"""Refuses requests with fields this server does not know: to ignore one is to answer another question."""

from collections.abc import Iterator
from typing import Final

from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet

from octavo.frontend.errors import Reason, Unsupported

# Looking for the name of a field costs a walk, which is for mistakes, not for megabytes.
_MAX_NAMED_BYTES: Final = 4096


def refuse_unknown_fields(message: Message) -> None:
    """Raises `Unsupported`, naming the first unknown field of `message` or of a message in it."""
    known = type(message)()
    known.CopyFrom(message)
    known.DiscardUnknownFields()
    unknown_bytes = message.ByteSize() - known.ByteSize()
    if unknown_bytes > _MAX_NAMED_BYTES:
        raise Unsupported(
            Reason.UNSUPPORTED_FIELD, f"{unknown_bytes} bytes of fields are not known to this server; leave them out"
        )
    if unknown_bytes:
        raise _first_unknown(message)


def _first_unknown(message: Message) -> Unsupported:
    part, unknown = next((part, unknown) for part in _parts(message) if len(unknown := UnknownFieldSet(part)))
    number, name = unknown[0].field_number, part.DESCRIPTOR.full_name
    return Unsupported(
        Reason.UNSUPPORTED_FIELD,
        f"field {number} of {name} is not known to this server; leave it out",
        field_number=number,
        message_type=name,
    )


def _parts(message: Message) -> Iterator[Message]:
    """The message and all messages in it."""
    yield message
    for descriptor, value in message.ListFields():
        inner = descriptor.message_type
        # A map's entry with an unknown field is unknown itself, and octavo.v1 has no maps to messages.
        if inner is not None and not inner.GetOptions().map_entry:
            for part in value if descriptor.is_repeated else (value,):
                yield from _parts(part)
