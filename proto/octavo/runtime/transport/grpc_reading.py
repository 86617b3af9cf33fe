"""Reads the messages of every gRPC server of Octavo, a bounded number at a time, and answers unreadable ones and
missing methods. Left to the library, each of these would be a fault of the server and logged whole."""

from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from functools import lru_cache
from typing import Any, Final, TypeAlias, cast

import grpc
from google.protobuf.message import DecodeError

from octavo.runtime.transport.clients import client_of, parse_peer
from octavo.runtime.transport.reading_room import ReadingRoom

Context = grpc.aio.ServicerContext[Any, Any]
# Ends the call, saying why.
Refuse = Callable[[Context, str], Awaitable[object]]
_Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
_Details = grpc.HandlerCallDetails
_UNREADABLE: Final = object()
_EOF: Final[object] = grpc.aio.EOF  # type: ignore[attr-defined]
# Of servers with this interceptor. Left to itself, gRPC widens the windows of all streams to megabytes, and clients may
# fill them with messages that nobody has asked for.
READING_OPTIONS: Final = [("grpc.http2.bdp_probe", 0)]


class ReadingInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Stands before all methods; these may be coroutines or asynchronous generators. Works for one server.

    `refuse` ends a call whose message cannot be read, `refuse_late` one whose message took too long while others
    waited.
    """

    def __init__(self, refuse: Refuse, refuse_late: Refuse, room: ReadingRoom | None = None) -> None:
        self._refuse = refuse
        self._refuse_late = refuse_late
        self._room = room or ReadingRoom()

    async def intercept_service(
        self, continuation: Callable[[_Details], Awaitable[_Handler]], handler_call_details: _Details
    ) -> _Handler:
        handler: Any = await continuation(handler_call_details)
        if handler is None or handler.request_deserializer is None:
            return cast(_Handler, handler)
        request, response = ("stream" if is_so else "unary" for is_so in _streams(handler))
        # All take streams, or the library would ask for the message by itself.
        make: Any = getattr(grpc, f"stream_{response}_rpc_method_handler")
        answer = self._answering(getattr(handler, f"{request}_{response}"), handler.request_streaming)
        return cast(_Handler, make(answer, _lenient(handler.request_deserializer), handler.response_serializer))

    def _answering(self, behaviour: Callable[[Any, Context], Any], takes_stream: bool) -> Any:
        # Messages are read by `_next`, and not through the iterator that the library hands over.
        async def answer(_: object, context: Context) -> Any:
            request = self._stream(context) if takes_stream else await self._only(context)
            try:
                answered = behaviour(request, context)
            except NotImplementedError:
                # How the generated classes say it.
                await context.abort(grpc.StatusCode.UNIMPLEMENTED, "this server does not have the method")
            return await (_written(answered, context) if isinstance(answered, AsyncIterable) else answered)

        return answer

    async def _stream(self, context: Context) -> AsyncIterator[Any]:
        while (request := await self._next(context)) is not _EOF:
            yield request

    async def _only(self, context: Context) -> Any:
        request = await self._next(context)
        if request is _EOF:
            await self._refuse(context, "the call has no message; send one")
        return request

    async def _next(self, context: Context) -> Any:
        """Returns the call's next message, or `EOF` after the last; waits for a place to read the message in."""
        try:
            async with self._room.place(_client_at(context.peer())):
                request = await context.read()
        except TimeoutError:
            late = "the message took too long while other calls waited to be read; send it again, and without a pause"
            await self._refuse_late(context, late)
        if request is _UNREADABLE:
            await self._refuse(context, "the request is no message of this method; send what its .proto file says")
        return request


@lru_cache(4096)
def _client_at(peer: str) -> str:
    return client_of(parse_peer(peer))


def _streams(handler: Any) -> tuple[bool, bool]:
    return handler.request_streaming, handler.response_streaming


def _lenient(deserialize: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    def read(data: bytes) -> Any:
        try:
            return deserialize(data)
        except DecodeError:
            return _UNREADABLE

    return read


async def _written(answer: AsyncIterable[Any], context: Context) -> None:
    """Writes what a method yields."""
    async with aclosing(answer) as responses:  # type: ignore[type-var]
        async for response in responses:
            await context.write(response)
