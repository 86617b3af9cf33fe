"""Converts errors to what gRPC clients get: a status code, a sentence, and google.rpc details for programs."""

from typing import Final, NoReturn

import grpc
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.duration_pb2 import Duration
from google.rpc.error_details_pb2 import ErrorInfo, RetryInfo  # type: ignore[import-untyped]
from google.rpc.status_pb2 import Status  # type: ignore[import-untyped]

from octavo.frontend.errors import DOMAIN, ServiceError

_DETAILS_KEY: Final = "grpc-status-details-bin"


async def abort_with(context: "grpc.aio.ServicerContext[object, object]", error: ServiceError) -> NoReturn:
    """Ends the call with the error; without headers if nothing was sent yet, so that clients may retry."""
    status = to_status(error)
    await context.abort(code_of(error), status.message, ((_DETAILS_KEY, status.SerializeToString()),))
    raise AssertionError("abort returned")


def code_of(error: ServiceError) -> grpc.StatusCode:
    """Returns the gRPC status code of the error."""
    return grpc.StatusCode[error.terms.code]


def to_status(error: ServiceError) -> Status:
    """Returns the error as google.rpc.Status, with ErrorInfo and, where trying again may help, RetryInfo."""
    details = [_pack(ErrorInfo(reason=error.reason, domain=DOMAIN, metadata=error.metadata))]
    if error.retry_after_s is not None:
        delay = Duration()
        delay.FromNanoseconds(round(error.retry_after_s * 1e9))
        details.append(_pack(RetryInfo(retry_delay=delay)))
    number: int = code_of(error).value[0]
    return Status(code=number, message=str(error), details=details)


def _pack(detail: ErrorInfo | RetryInfo) -> AnyMessage:
    packed = AnyMessage()
    packed.Pack(detail)
    return packed
