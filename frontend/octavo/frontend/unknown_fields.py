"""Refuses requests with fields this server does not know: to ignore one is to answer another question."""

from collections.abc import Iterator

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet

from octavo.frontend.errors import Reason, Unsupported


def refuse_unknown_fields(message: Message) -> None:
    """Raises `Unsupported` naming the first unknown field of `message` or of a message in it."""
    for part in _parts(message):
        unknown = UnknownFieldSet(part)
        if len(unknown):
            number, name = unknown[0].field_number, part.DESCRIPTOR.full_name
            raise Unsupported(
                Reason.UNSUPPORTED_FIELD,
                f"field {number} of {name} is not known to this server; leave it out",
                field_number=number,
                message_type=name,
            )


def _parts(message: Message) -> Iterator[Message]:
    """The message and all messages in it (octavo.v1 has no maps)."""
    yield message
    for descriptor, value in message.ListFields():
        if descriptor.type == FieldDescriptor.TYPE_MESSAGE:
            for part in value if descriptor.is_repeated else (value,):
                yield from _parts(part)
