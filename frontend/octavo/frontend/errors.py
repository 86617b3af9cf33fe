"""Declares the errors that a client can get, and `TABLE`: what each reason is in the terms of every interface.

ServiceError
├── InvalidRequest       the request is wrong and stays wrong
├── Unauthenticated      the call's credentials are missing or wrong
├── Forbidden            the call comes from a host or a web page that is not allowed
├── NotFound             the request names something that is not served here
├── AlreadyExists        the request's id is taken
├── Unsupported          the request uses a field that is unknown, or not to be had together with another
├── OutOfRange           the request asks for events that are not kept, or have not come yet
├── Overloaded           the server has no room for the request now
├── Unavailable          the scheduler or the workers are away; trying again may help
├── DeadlineExceeded     the client's time is up
├── Aborted              somebody aborted the request by its id, or took over its stream
└── Broken               Octavo failed
"""

import enum
import logging
import sys
from dataclasses import dataclass
from typing import Final

from octavo.wire.requests import RejectReason

DOMAIN = "octavo"


class Reason(enum.StrEnum):
    """Names an error for programs, the same in every version: `google.rpc.ErrorInfo.reason`."""

    BAD_PARAMETER = "BAD_PARAMETER"
    BAD_CONSTRAINT = "BAD_CONSTRAINT"
    BAD_JSON = "BAD_JSON"
    BAD_MESSAGE = "BAD_MESSAGE"
    PROMPT_TOO_LONG = "PROMPT_TOO_LONG"
    NEVER_FITS_KV = "NEVER_FITS_KV"
    TOO_LARGE = "TOO_LARGE"
    UNAUTHENTICATED = "UNAUTHENTICATED"
    HOST_NOT_ALLOWED = "HOST_NOT_ALLOWED"
    CROSS_SITE = "CROSS_SITE"
    MODEL_NOT_FOUND = "MODEL_NOT_FOUND"
    PREFIX_NOT_FOUND = "PREFIX_NOT_FOUND"
    REQUEST_NOT_FOUND = "REQUEST_NOT_FOUND"
    ROUTE_NOT_FOUND = "ROUTE_NOT_FOUND"
    NOT_STORED = "NOT_STORED"
    PREVIOUS_RESPONSE_NOT_FOUND = "PREVIOUS_RESPONSE_NOT_FOUND"
    FILE_NOT_FOUND = "FILE_NOT_FOUND"
    BATCH_NOT_FOUND = "BATCH_NOT_FOUND"
    DUPLICATE_ID = "DUPLICATE_ID"
    UNSUPPORTED_FIELD = "UNSUPPORTED_FIELD"
    ATTACH_OFFSET_GONE = "ATTACH_OFFSET_GONE"
    KV_EVENTS_GONE = "KV_EVENTS_GONE"
    KV_EVENTS_LOST = "KV_EVENTS_LOST"
    TOO_MANY_REQUESTS = "TOO_MANY_REQUESTS"
    TOO_MUCH_WORK = "TOO_MUCH_WORK"
    TENANT_QUOTA = "TENANT_QUOTA"
    STORE_FULL = "STORE_FULL"
    STORE_FAILED = "STORE_FAILED"
    QUEUE_FULL = "QUEUE_FULL"
    NO_WORKER = "NO_WORKER"
    MODEL_MISMATCH = "MODEL_MISMATCH"
    SCHEDULER_UNREACHABLE = "SCHEDULER_UNREACHABLE"
    DRAINING = "DRAINING"
    STORAGE_FAILED = "STORAGE_FAILED"
    DEADLINE = "DEADLINE"
    QUEUE_TIMEOUT = "QUEUE_TIMEOUT"
    TEXT_TIMEOUT = "TEXT_TIMEOUT"
    SLOW_READER = "SLOW_READER"
    ABORTED = "ABORTED"
    SUPERSEDED = "SUPERSEDED"
    STEP_FAILED = "STEP_FAILED"
    LOGITS_NOT_FINITE = "LOGITS_NOT_FINITE"
    NO_TOKEN_LEFT = "NO_TOKEN_LEFT"
    OUT_OF_MEMORY = "OUT_OF_MEMORY"
    QUARANTINED = "QUARANTINED"
    WRONG_TASK = "WRONG_TASK"
    STREAM_BROKEN = "STREAM_BROKEN"
    INTERNAL = "INTERNAL"


class ServiceError(Exception):
    """An error that a client gets as its answer. `str()` of the error says what is wrong, why, and what to do.

    `metadata` holds the figures of the message for programs. `retry_after_s` (seconds) is set where the same request
    may succeed later; the reason's `Terms` say after how many where the caller does not.
    """

    def __init__(self, reason: Reason, message: str, *, retry_after_s: float | None = None, **metadata: object) -> None:
        super().__init__(message)
        self.reason = reason
        self.terms = TERMS[reason]
        self.retry_after_s = self.terms.retry_after_s if retry_after_s is None else retry_after_s
        self.metadata = {key: str(value) for key, value in metadata.items()}


class InvalidRequest(ServiceError):
    """The request is wrong and stays wrong."""


class Unauthenticated(ServiceError):
    """The call's credentials are missing or wrong."""


class Forbidden(ServiceError):
    """The call comes from a host or a web page that is not allowed to call."""


class NotFound(ServiceError):
    """The request names something that is not served here."""


class AlreadyExists(ServiceError):
    """The request's id belongs to one that is running."""


class Unsupported(ServiceError):
    """The request uses a field that this server does not know, or does not have together with another that is used.

    Ignoring the field would answer another question.
    """


class OutOfRange(ServiceError):
    """The request asks for events that are not kept any more, or have not come yet."""


class Overloaded(ServiceError):
    """The server has no room for the request now."""

    retry_after_s: float


class Unavailable(ServiceError):
    """The scheduler or the workers are away."""


class DeadlineExceeded(ServiceError):
    """The client's time is up."""


class Aborted(ServiceError):
    """The request was aborted by its id, or another reader has taken over its stream."""


class Broken(ServiceError):
    """Octavo failed; the request may have been fine."""


@dataclass(frozen=True)
class Terms:
    """Says an error in the terms of every interface.

    `kind` is the class that is raised, `code` the name of the gRPC status, `status` that of HTTP, `openai_type` the
    `type` of OpenAI's error object, whose `code` is the reason in small letters, and `anthropic_type` that of
    Anthropic's, whose API has `anthropic_status` where that is another. `retry_after_s` (seconds) is None where trying
    again does not help.
    """

    kind: type[ServiceError]
    code: str
    status: int
    openai_type: str = "invalid_request_error"
    retry_after_s: float | None = None
    anthropic_type: str = "invalid_request_error"
    anthropic_status: int | None = None


TABLE: Final[dict[Terms, tuple[Reason, ...]]] = {
    Terms(InvalidRequest, "INVALID_ARGUMENT", 400): (
        Reason.BAD_PARAMETER,
        Reason.BAD_CONSTRAINT,
        Reason.BAD_JSON,
        Reason.BAD_MESSAGE,
        Reason.PROMPT_TOO_LONG,
        Reason.NEVER_FITS_KV,
        Reason.NO_TOKEN_LEFT,
        Reason.TEXT_TIMEOUT,
        Reason.WRONG_TASK,
        # As OpenAI's API has it, though something is not found.
        Reason.PREVIOUS_RESPONSE_NOT_FOUND,
    ),
    # As gRPC itself answers a message that is too large.
    Terms(InvalidRequest, "RESOURCE_EXHAUSTED", 413, anthropic_type="request_too_large"): (Reason.TOO_LARGE,),
    Terms(Unsupported, "UNIMPLEMENTED", 400): (Reason.UNSUPPORTED_FIELD,),
    Terms(OutOfRange, "OUT_OF_RANGE", 400): (Reason.ATTACH_OFFSET_GONE, Reason.KV_EVENTS_GONE),
    Terms(Unauthenticated, "UNAUTHENTICATED", 401, "authentication_error", anthropic_type="authentication_error"): (
        Reason.UNAUTHENTICATED,
    ),
    Terms(Forbidden, "PERMISSION_DENIED", 403, anthropic_type="permission_error"): (
        Reason.CROSS_SITE,
        Reason.HOST_NOT_ALLOWED,
    ),
    Terms(NotFound, "NOT_FOUND", 404, anthropic_type="not_found_error"): (
        Reason.MODEL_NOT_FOUND,
        Reason.REQUEST_NOT_FOUND,
        Reason.PREFIX_NOT_FOUND,
        Reason.ROUTE_NOT_FOUND,
        Reason.NOT_STORED,
        Reason.FILE_NOT_FOUND,
        Reason.BATCH_NOT_FOUND,
    ),
    Terms(AlreadyExists, "ALREADY_EXISTS", 409, anthropic_type="conflict_error"): (Reason.DUPLICATE_ID,),
    Terms(Aborted, "CANCELLED", 409, anthropic_type="conflict_error"): (Reason.ABORTED,),
    # Nobody cancelled these requests: the server ended the reading of their events.
    Terms(Aborted, "ABORTED", 409, anthropic_type="conflict_error"): (Reason.SUPERSEDED, Reason.SLOW_READER),
    # Of Anthropic's clients those that have reached a limit of their own are told so; else the server is full.
    Terms(Overloaded, "RESOURCE_EXHAUSTED", 429, "rate_limit_error", 1.0, "rate_limit_error"): (
        Reason.TENANT_QUOTA,
        Reason.STORE_FULL,
    ),
    Terms(Overloaded, "RESOURCE_EXHAUSTED", 429, "rate_limit_error", 1.0, "overloaded_error", 529): (
        Reason.TOO_MANY_REQUESTS,
        Reason.TOO_MUCH_WORK,
        Reason.QUEUE_FULL,
        Reason.OUT_OF_MEMORY,
    ),
    Terms(Broken, "INTERNAL", 500, "server_error", anthropic_type="api_error"): (
        Reason.STEP_FAILED,
        Reason.LOGITS_NOT_FINITE,
        Reason.QUARANTINED,
        Reason.STREAM_BROKEN,
        Reason.INTERNAL,
    ),
    # As gateways tell an end of their stream from a beginning that cannot be.
    Terms(Broken, "DATA_LOSS", 500, "server_error", anthropic_type="api_error"): (Reason.KV_EVENTS_LOST,),
    Terms(Unavailable, "UNAVAILABLE", 503, "server_error", 1.0, "api_error"): (
        Reason.NO_WORKER,
        Reason.DRAINING,
        Reason.SCHEDULER_UNREACHABLE,
        Reason.MODEL_MISMATCH,
        Reason.STORE_FAILED,
        Reason.STORAGE_FAILED,
    ),
    Terms(DeadlineExceeded, "DEADLINE_EXCEEDED", 504, "timeout_error", anthropic_type="timeout_error"): (
        Reason.DEADLINE,
        Reason.QUEUE_TIMEOUT,
    ),
}
TERMS: Final = {reason: terms for terms, reasons in TABLE.items() for reason in reasons}
# The scheduler's reasons that have another name here; all others of its have the same.
REJECTIONS: Final[dict[RejectReason, Reason]] = {
    RejectReason.EMPTY_PROMPT: Reason.BAD_PARAMETER,
    RejectReason.TOO_MANY_SEQUENCES: Reason.BAD_PARAMETER,
    RejectReason.BAD_TOKEN_ID: Reason.BAD_PARAMETER,
    RejectReason.BAD_GRAMMAR: Reason.BAD_CONSTRAINT,
    RejectReason.NOT_FINITE: Reason.LOGITS_NOT_FINITE,
    RejectReason.ALREADY_COMPLETE: Reason.STREAM_BROKEN,
}


def internal_error() -> Broken:
    """Returns the error for a fault of the server, whose cause only the log says."""
    return Broken(Reason.INTERNAL, "the server failed on this request; its log says why")


def bad_parameter(field: str, value: object, rule: str) -> InvalidRequest:
    """Returns the error for a `field` with a `value` that is not allowed; `rule` says what is."""
    return InvalidRequest(Reason.BAD_PARAMETER, f"{field} is {value}, but {rule}", field=field, value=value)


# How the server's own faults are logged: a log must hold nothing of what clients send or get.


def log_failure(log: logging.Logger, message: str) -> None:
    """Logs the class and the traceback of the exception that is being handled.

    The exception's own message is left out, for the message may quote the request.
    """
    error = sys.exception()
    log.error(message, exc_info=without_message(error) if error else None)


def without_message(error: BaseException) -> BaseException:
    """Returns an exception with the class name, traceback and causes of `error`, and without its message."""
    kind = type(error)
    silent: BaseException = type(kind.__name__, (Exception,), {"__module__": kind.__module__})()
    silent.__traceback__ = error.__traceback__
    silent.__cause__ = without_message(error.__cause__) if error.__cause__ else None
    silent.__context__ = without_message(error.__context__) if error.__context__ else None
    # Last, for setting a cause sets this too.
    silent.__suppress_context__ = error.__suppress_context__
    return silent
