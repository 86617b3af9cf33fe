"""Adapts messages for peers that still speak an older schema, so that processes can be replaced one at a time.

The scheduler speaks every schema from `OLDEST_SCHEMA_VERSION` on, each peer the one that its hello names; frontends and
workers speak their own alone. So an upgrade begins with the scheduler. It works because schemas only grow: a new field
goes to the end of its struct with a default, and says since when it is there. What older peers send then lacks fields
that have defaults, which decoders allow; what they are sent is cut here to what they know.
"""

import enum
from collections.abc import Callable
from functools import cache
from typing import Annotated, Any, Final, get_args, get_origin, get_type_hints

import msgspec

from octavo.wire.base import OLDEST_SCHEMA_VERSION, SCHEMA_VERSION, Message
from octavo.wire.codec import encode
from octavo.wire.requests import PrefixCacheReset, Refused, RejectReason, ResetPrefixCache
from octavo.wire.steps import BlocksFetched, BlocksPulled, PullBlocks, WorkerRefused

# Members of enums that came later: since when, and what peers are told that do not know them.
LATER_MEMBERS: Final[dict[enum.Enum, tuple[int, enum.Enum]]] = {
    RejectReason.WRONG_TASK: (9, RejectReason.MODEL_MISMATCH),
}
# Whole messages that came later: since when. Peers that do not know them get none.
LATER_MESSAGES: Final[dict[type[Message], int]] = {
    ResetPrefixCache: 9,
    PrefixCacheReset: 9,
    BlocksFetched: 9,
    PullBlocks: 9,
    BlocksPulled: 9,
}

_encode_plain: Final = msgspec.msgpack.Encoder().encode
Cut = Callable[[Any], Any]


def refusal(kind: str, version: int) -> str | None:
    """Says why a peer of this schema cannot be served, if it cannot."""
    if OLDEST_SCHEMA_VERSION <= version <= SCHEMA_VERSION:
        return None
    if version > SCHEMA_VERSION:
        advice = "upgrade the scheduler first: it serves older frontends and workers, not newer ones"
    else:
        advice = f"start a newer {kind}"
    spoken = f"{OLDEST_SCHEMA_VERSION} to {SCHEMA_VERSION}"
    return f"the {kind} speaks message schema {version}, this scheduler {spoken}; {advice}"


def refusal_of_newer(frame: bytes) -> Refused | WorkerRefused | None:
    """Returns the answer to a hello that names a newer schema than ours, whatever else is in it; None for all else."""
    try:
        message = msgspec.msgpack.decode(frame)
    except Exception:
        # Whoever could not read it says what is wrong.
        return None
    match message:
        case ["FrontendHello", int(version), *_] if version > SCHEMA_VERSION:
            return Refused(refusal("frontend", version) or "")
        case ["WorkerHello", int(version), *_] if version > SCHEMA_VERSION:
            return WorkerRefused(refusal("worker", version) or "")
    return None


def encode_for(message: Message, version: int) -> bytes | None:
    """Encodes a message as a peer of schema `version` reads it. Returns None where that peer has no such message."""
    if version >= SCHEMA_VERSION:
        return encode(message)
    if LATER_MESSAGES.get(type(message), 0) > version:
        return None
    return _encode_plain(_cut_of(type(message), version)(message))


def field_version(hint: Any) -> int:
    """Returns the schema that a field came with, by its type hint; 0 if it was always there."""
    if get_origin(hint) is Annotated:
        marks = [each.extra["since"] for each in get_args(hint)[1:] if isinstance(each, msgspec.Meta) and each.extra]
        return max(marks, default=0)
    return 0


@cache
def _cut_of(kind: type[msgspec.Struct], version: int) -> Cut:
    """Returns what turns a struct into the plain array that a peer of `version` knows."""
    hints = get_type_hints(kind, include_extras=True)
    names = [name for name in kind.__struct_fields__ if field_version(hints[name]) <= version]
    tag = [kind.__struct_config__.tag] if kind.__struct_config__.tag is not None else []

    def cut(struct: msgspec.Struct) -> list[Any]:
        return tag + [_cut_value(getattr(struct, name), version) for name in names]

    return cut


def _cut_value(value: Any, version: int) -> Any:
    if isinstance(value, msgspec.Struct):
        return _cut_of(type(value), version)(value)
    if isinstance(value, (list, tuple)):
        return [_cut_value(each, version) for each in value]
    if isinstance(value, enum.Enum):
        came, older = LATER_MEMBERS.get(value, (0, value))
        return _cut_value(older, version) if came > version else value
    return value
