"""Nobody comes to a gRPC method, known or unknown, without credentials, where the server asks for them."""

from collections.abc import Awaitable, Callable, Collection, Sequence
from contextvars import ContextVar
from typing import Any, Final, TypeAlias

import grpc

from octavo.frontend.access.access import Access, authorization_of
from octavo.frontend.errors import InvalidRequest, Overloaded, Reason, ServiceError, Unauthenticated
from octavo.frontend.grpc.errors import abort_with
from octavo.frontend.request.request import ANYBODY, Caller
from octavo.runtime.transport.grpc_reading import ReadingInterceptor

Context = grpc.aio.ServicerContext[Any, Any]
_Details = grpc.HandlerCallDetails
_Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"

# Probes carry no key.
EXEMPT: Final = frozenset({"/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch"})
# Every call is a task of its own, from its interceptors on.
_CALLER: Final[ContextVar[Caller]] = ContextVar("caller", default=ANYBODY)


def interceptors(
    access: Access, *further: "grpc.aio.ServerInterceptor[Any, Any]"
) -> "Sequence[grpc.aio.ServerInterceptor[Any, Any]]":
    """What a server needs to have around its methods; `further` ones come behind the key."""
    return (*([AccessInterceptor(access)] if access.asks_for_keys else ()), *further, *READING)


async def _refuse_unreadable(context: Context, why: str) -> None:
    await abort_with(context, InvalidRequest(Reason.BAD_MESSAGE, why))


# What one needs that is for anybody.
READING: Final = (ReadingInterceptor(_refuse_unreadable),)


def caller_of(context: Context) -> Caller:
    """Who makes the call of the context; only inside the call's own task, or tasks that it has started."""
    return _CALLER.get()


class AccessInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Stands before all methods; those in `EXEMPT` alone are left to themselves."""

    def __init__(self, access: Access) -> None:
        self._access = access

    async def intercept_service(
        self, continuation: Callable[[_Details], Awaitable[_Handler]], handler_call_details: _Details
    ) -> _Handler:
        if handler_call_details.method not in EXEMPT:
            try:
                _CALLER.set(self._access.identify(_authorization(handler_call_details)))
            except Unauthenticated as error:
                return _refusing(error)
        return await continuation(handler_call_details)


class AdmissionInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Refuses calls of `methods` before anything of them is read, where `check_room` raises `Overloaded`; `call_came`
    is told of every call."""

    def __init__(self, methods: Collection[str], check_room: Callable[[], None], call_came: Callable[[], None]) -> None:
        self._methods = methods
        self._check_room = check_room
        self._call_came = call_came

    async def intercept_service(
        self, continuation: Callable[[_Details], Awaitable[_Handler]], handler_call_details: _Details
    ) -> _Handler:
        self._call_came()
        if handler_call_details.method in self._methods:
            try:
                self._check_room()
            except Overloaded as error:
                return _refusing(error)
        return await continuation(handler_call_details)


def _authorization(details: _Details) -> str | None:
    return authorization_of({key: value for key, value in details.invocation_metadata if isinstance(value, str)})


def _refusing(error: ServiceError) -> _Handler:
    """Answers without reading what the client sends, however many messages that are."""

    async def refuse(requests: object, context: Context) -> None:
        await abort_with(context, error)

    return grpc.stream_stream_rpc_method_handler(refuse)
