"""Shapes every message: frozen, tagged, an array on the wire, refusing fields that it does not know."""

from typing import Annotated

import msgspec
from msgspec import Meta

# Grows with every release that changes a message. A new field goes to the end of its struct, with a default and its
# `since`: then schedulers still serve peers of the schema before.
SCHEMA_VERSION = 9
# What differs in more than that raises this one too: all processes must then be replaced together.
OLDEST_SCHEMA_VERSION = 8

MAX_MESSAGE_BYTES = 32 << 20
MAX_TOKENS = 1 << 20
MAX_SEQUENCES = 1 << 14
MAX_BLOCKS_PER_SEQUENCE = MAX_TOKENS

TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]
# A block, or `NULL_BLOCK`: no block, in the table of a sliding-window KV group where one has left the window.
BlockId = Annotated[int, Meta(ge=-1, le=2**31 - 1)]
NULL_BLOCK = -1
Count = Annotated[int, Meta(ge=0, le=2**53)]
# One that clients are told, in 32 bits.
ToldCount = Annotated[int, Meta(ge=0, le=2**32 - 1)]
# A random 64-bit identity. msgpack bounds it from above.
Identity = Annotated[int, Meta(ge=0)]
Name = Annotated[str, Meta(min_length=1, max_length=256)]
Text = Annotated[str, Meta(max_length=4096)]
# W3C trace context of the span that a message belongs to; empty where nothing is traced.
TraceParent = Annotated[str, Meta(max_length=64)]
TokenIds = Annotated[list[TokenId], Meta(max_length=MAX_TOKENS)]


class Value(msgspec.Struct, frozen=True, array_like=True, gc=False, forbid_unknown_fields=True):
    """Is the base of all parts of messages: immutable, encoded as an array of its fields in order."""


class Message(Value, frozen=True, tag=True):
    """Is a whole message: a `Value` whose first array element is its class name."""


class Fenced(Message, frozen=True):
    """Belongs to one start of the scheduler, its `epoch`, and is acted on in that one alone."""

    epoch: Identity


class FencedWork(Fenced, frozen=True):
    """Belongs to one life of a worker's blocks too, its `incarnation`."""

    incarnation: Identity


def since(version: int) -> Meta:
    """Marks a field that came with a version: `Annotated[bool, since(9)] = False` (`octavo.wire.versions`)."""
    return Meta(extra={"since": version})
