"""Answers unreadable messages and missing methods for every gRPC server of Octavo, before a method is called. Left to
the library, each would be a fault of the server and logged whole."""

from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any, Final, TypeAlias, cast

import grpc
from google.protobuf.message import DecodeError

Context = grpc.aio.ServicerContext[Any, Any]
# Ends the call, saying why.
Refuse = Callable[[Context, str], Awaitable[object]]
_Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
_Details = grpc.HandlerCallDetails
_UNREADABLE: Final = object()


class ReadingInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Stands before all methods; these may be coroutines or asynchronous generators."""

    def __init__(self, refuse: Refuse) -> None:
        self._refuse = refuse

    async def intercept_service(
        self, continuation: Callable[[_Details], Awaitable[_Handler]], handler_call_details: _Details
    ) -> _Handler:
        handler: Any = await continuation(handler_call_details)
        if handler is None or handler.request_deserializer is None:
            return cast(_Handler, handler)
        request, response = ("stream" if is_so else "unary" for is_so in _streams(handler))
        make: Any = getattr(grpc, f"{request}_{response}_rpc_method_handler")
        answer = self._answering(getattr(handler, f"{request}_{response}"), handler.request_streaming)
        return cast(_Handler, make(answer, _lenient(handler.request_deserializer), handler.response_serializer))

    def _answering(self, behaviour: Callable[[Any, Context], Any], takes_stream: bool) -> Any:
        async def answer(request: Any, context: Context) -> Any:
            if takes_stream:
                request = self._readable(request, context)
            elif request is _UNREADABLE:
                await self._complain(context)
            return await _answer(behaviour, request, context)

        return answer

    async def _readable(self, requests: AsyncIterable[Any], context: Context) -> AsyncIterator[Any]:
        async for request in requests:
            if request is _UNREADABLE:
                await self._complain(context)
            yield request

    async def _complain(self, context: Context) -> None:
        await self._refuse(context, "the request is no message of this method; send what its .proto file says")


def _streams(handler: Any) -> tuple[bool, bool]:
    return handler.request_streaming, handler.response_streaming


def _lenient(deserialize: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    def read(data: bytes) -> Any:
        try:
            return deserialize(data)
        except DecodeError:
            return _UNREADABLE

    return read


async def _answer(behaviour: Callable[[Any, Context], Any], request: Any, context: Context) -> Any:
    try:
        answer = behaviour(request, context)
    except NotImplementedError:
        # How the generated classes say it.
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "this server does not have the method")
    if not isinstance(answer, AsyncIterable):
        return await answer
    async with aclosing(answer) as responses:  # type: ignore[type-var]
        async for response in responses:
            await context.write(response)
    return None
