"""Declares the errors that a call can end with, and reads them from gRPC statuses.

OctavoError
├── RequestError          the request is wrong and stays wrong
├── AuthenticationError   the API key or the certificate is missing or wrong
├── NotFoundError         the request names a model, a prefix or a request that is not there
├── OverloadedError       the server has no room now; `retry_after_s` says when there may be
├── UnavailableError      the frontend, scheduler or workers are away, or a stream was lost for good
├── DeadlineError         the time allowed for the request has passed
├── AbortedError          somebody aborted the request by id, or took over its stream
└── ServerError           Octavo failed
"""

from collections import defaultdict
from collections.abc import Mapping
from typing import Any, Final

import grpc
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.duration_pb2 import Duration
from google.protobuf.empty_pb2 import Empty
from google.protobuf.message import DecodeError
from google.protobuf.unknown_fields import UnknownFieldSet

DOMAIN: Final = "octavo"
_DETAILS_KEY: Final = "grpc-status-details-bin"


class OctavoError(Exception):
    """Is the base class of errors. `str()` of an error says what is wrong, why, and what to do.

    `reason` is the server's stable name of the error, such as PROMPT_TOO_LONG, and empty where the error is not the
    server's own (a lost connection). `metadata` holds the figures of the message. `retry_after_s` (seconds) is set
    where the same request may succeed later.
    """

    def __init__(
        self,
        message: str,
        code: grpc.StatusCode,
        reason: str = "",
        *,
        retry_after_s: float | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.reason = reason
        self.retry_after_s = retry_after_s
        self.metadata = dict(metadata or {})


class RequestError(OctavoError):
    """The request is wrong and stays wrong."""


class AuthenticationError(OctavoError):
    """The API key or the certificate is missing or wrong."""


class NotFoundError(OctavoError):
    """The request names something that is not there."""


class OverloadedError(OctavoError):
    """The server has no room for the request now."""


class UnavailableError(OctavoError):
    """The frontend is away, or the scheduler or workers behind it."""


class DeadlineError(OctavoError):
    """The time allowed for the request has passed."""


class AbortedError(OctavoError):
    """The request was aborted by its id, or another reader took over its stream."""


class ServerError(OctavoError):
    """Octavo failed; the request may have been fine."""


_KINDS: Final[Mapping[grpc.StatusCode, type[OctavoError]]] = {
    grpc.StatusCode.INVALID_ARGUMENT: RequestError,
    grpc.StatusCode.OUT_OF_RANGE: RequestError,
    grpc.StatusCode.FAILED_PRECONDITION: RequestError,
    grpc.StatusCode.UNIMPLEMENTED: RequestError,
    grpc.StatusCode.ALREADY_EXISTS: RequestError,
    grpc.StatusCode.UNAUTHENTICATED: AuthenticationError,
    grpc.StatusCode.PERMISSION_DENIED: AuthenticationError,
    grpc.StatusCode.NOT_FOUND: NotFoundError,
    grpc.StatusCode.RESOURCE_EXHAUSTED: OverloadedError,
    grpc.StatusCode.UNAVAILABLE: UnavailableError,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineError,
    grpc.StatusCode.CANCELLED: AbortedError,
    grpc.StatusCode.ABORTED: AbortedError,
}


def make_error(
    code: grpc.StatusCode,
    message: str,
    reason: str = "",
    retry_after_s: float | None = None,
    metadata: Mapping[str, str] | None = None,
) -> OctavoError:
    """Makes an error of the class that goes with `code`."""
    kind = _KINDS.get(code, ServerError)
    return kind(message, code, reason, retry_after_s=retry_after_s, metadata=metadata)


def to_error(error: grpc.RpcError) -> OctavoError:
    """Turns the exception of a failed call into an `OctavoError`."""
    call: Any = error
    trailers = dict(tuple(call.trailing_metadata() or ()))
    reason, metadata, retry_after_s = _details(trailers.get(_DETAILS_KEY, b""))
    made = make_error(call.code(), call.details() or "", reason, retry_after_s, metadata)
    made.__cause__ = error
    return made


def _details(status: bytes) -> tuple[str, dict[str, str], float | None]:
    """Reads reason, metadata and retry delay (seconds) from a serialized google.rpc.Status.

    The Python classes of that message are in a package that this one does without.
    """
    reason, metadata, retry_after_s = "", dict[str, str](), None
    try:
        for packed in _fields(status)[3]:
            detail = AnyMessage.FromString(packed)
            fields = _fields(detail.value)
            if detail.type_url.endswith("/google.rpc.ErrorInfo") and _text(fields[2]) == DOMAIN:
                entries = [_fields(entry) for entry in fields[3]]
                reason, metadata = _text(fields[1]), {_text(entry[1]): _text(entry[2]) for entry in entries}
            elif detail.type_url.endswith("/google.rpc.RetryInfo"):
                retry_after_s = Duration.FromString(b"".join(fields[1])).ToNanoseconds() / 1e9
    except (DecodeError, TypeError, UnicodeDecodeError):
        # A proxy before the server wrote the details; the status itself says enough.
        return "", {}, None
    return reason, metadata, retry_after_s


def _fields(message: bytes) -> defaultdict[int, list[Any]]:
    """Returns the values of each field by its number; strings and messages are bytes."""
    found: defaultdict[int, list[Any]] = defaultdict(list)
    # UnknownFieldSet keeps no reference to what it reads.
    empty = Empty.FromString(message)
    unknown = UnknownFieldSet(empty)
    for field in map(unknown.__getitem__, range(len(unknown))):
        found[field.field_number].append(field.data)
    return found


def _text(values: list[bytes]) -> str:
    return values[-1].decode() if values else ""
