"""Refuses gRPC calls before their methods see them: calls without credentials, and calls that find no room."""

from collections.abc import Awaitable, Callable, Collection, Sequence
from contextvars import ContextVar
from typing import Any, Final, TypeAlias

import grpc

from octavo.frontend.access.access import Access, authorization_of
from octavo.frontend.errors import InvalidRequest, Overloaded, Reason, ServiceError, Unauthenticated
from octavo.frontend.grpc.errors import abort_with
from octavo.frontend.request.request import ANYBODY, Caller
from octavo.runtime.transport.grpc_reading import ReadingInterceptor
from octavo.runtime.transport.reading_room import ReadingRoom

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
    """Returns the interceptors of a server, outermost first; `further` ones come after the check of the key."""
    return (*([AccessInterceptor(access)] if access.asks_for_keys else ()), *further, reading())


async def _refuse_unreadable(context: Context, why: str) -> None:
    await abort_with(context, InvalidRequest(Reason.BAD_MESSAGE, why))


async def _refuse_late(context: Context, why: str) -> None:
    await abort_with(context, Overloaded(Reason.TOO_MUCH_WORK, why))


def reading(room: ReadingRoom | None = None) -> ReadingInterceptor:
    """Makes the innermost interceptor of a server, which reads the messages, in a `room` of its own unless given."""
    return ReadingInterceptor(_refuse_unreadable, _refuse_late, room)


def caller_of(context: Context) -> Caller:
    """Returns the caller that the credentials of the current call name.

    Works only in the call's own task and in tasks that the call has started.
    """
    return _CALLER.get()


class AccessInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Refuses calls without valid credentials, whether the method exists or not; methods in `EXEMPT` need none."""

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
    """Refuses calls of `methods` before their messages are read, where `check_room` raises `Overloaded`. Calls
    `call_came` for every call of any method."""

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
    """Returns a handler that answers with `error` and reads no message of the client's."""

    async def refuse(requests: object, context: Context) -> None:
        await abort_with(context, error)

    return grpc.stream_stream_rpc_method_handler(refuse)
