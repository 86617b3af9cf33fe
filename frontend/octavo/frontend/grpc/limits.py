"""What a gRPC message may hold: how often a field may be repeated, and no field that this server does not know."""

from collections.abc import Iterator
from typing import Final

from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet

from octavo.frontend.errors import Reason, Unsupported
from octavo.frontend.request.chat import MAX_MESSAGES, MAX_TOOL_CALLS, MAX_TOOLS
from octavo.frontend.request.validation import MAX_CHOICES, MAX_STOP_STRINGS, check_count, check_room
from octavo.v1 import generation_pb2 as pb
from octavo.wire.sampling import MAX_ALLOWED_TOKEN_IDS, MAX_LOGIT_BIAS, MAX_STOP_TOKEN_IDS

MAX_ABORTED_IDS: Final = 4096


def check_generate(message: pb.GenerateRequest, max_model_len: int) -> None:
    """Raises `InvalidRequest` for more token ids than leave room for an answer, or too much of anything else."""
    check_room(len(message.token_ids.ids), max_model_len)
    check_chat(message.chat)
    check_count("constraint.choice", message.constraint.choice.choices, MAX_CHOICES)
    check_count("logit_bias", message.sampling.logit_bias, MAX_LOGIT_BIAS)
    check_count("allowed_token_ids", message.sampling.allowed_token_ids, MAX_ALLOWED_TOKEN_IDS)
    check_count("banned_token_ids", message.sampling.banned_token_ids, MAX_ALLOWED_TOKEN_IDS)
    check_count("stop_strings", message.stopping.stop_strings, MAX_STOP_STRINGS)
    check_count("stop_token_ids", message.stopping.stop_token_ids, MAX_STOP_TOKEN_IDS)


def check_chat(chat: pb.ChatPrompt) -> None:
    """Raises `InvalidRequest` for too many messages, tools or calls of these."""
    check_count("chat.messages", chat.messages, MAX_MESSAGES)
    check_count("chat.tools", chat.tools, MAX_TOOLS)
    for message in chat.messages:
        check_count("chat.messages.tool_calls", message.tool_calls, MAX_TOOL_CALLS)


def check_detokenize(message: pb.DetokenizeRequest, max_model_len: int) -> None:
    """Raises `InvalidRequest` for more ids than a context holds."""
    check_count("ids", message.ids, max_model_len)


def check_abort(message: pb.AbortRequest) -> None:
    """Raises `InvalidRequest` for too many ids."""
    check_count("request_ids", message.request_ids, MAX_ABORTED_IDS)


# Refuses requests with fields this server does not know: to ignore one is to answer another question.


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
