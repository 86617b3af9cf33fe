"""Talks with one cell: waits for it, asks it, cancels what is not wanted any more, and notices that it is away."""

import asyncio
import contextlib
import logging
import secrets
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any, Final

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from octavo.client.errors import DeadlineError, UnavailableError, make_error, to_error
from octavo.client.events import read_event
from octavo.client.requests import cut_short, read_models
from octavo.client.results import Model
from octavo.client.retries import LOST
from octavo.dynamo.chunks import CANCELLED, Chunk, Chunks
from octavo.dynamo.requests import read_request
from octavo.v1 import generation_pb2 as pb
from octavo.v1 import generation_pb2_grpc as services

_log = logging.getLogger(__name__)
_SERVICE: Final = "octavo.v1.GenerationService"
_PAUSE_S: Final = 1.0
_ANSWER_S: Final = 5.0
# How long Dynamo may take to hear of the requests that are cut off.
_TOLD_S: Final = 2.0
# Of Dynamo's ids, which clients may choose, as much as is sure to fit.
_ID_CHARACTERS: Final = 100


class Cell:
    """Is a frontend, seen through `channel`; `metadata` goes with each call. Belongs to one event loop."""

    def __init__(self, channel: grpc.aio.Channel, metadata: Sequence[tuple[str, str]] = ()) -> None:
        # The type stubs of grpc want an argument of `close` that grpc does not.
        self._channel: Any = channel
        self._metadata = metadata
        self._stub: Any = services.GenerationServiceStub(channel)
        self._health: Any = health_pb2_grpc.HealthStub(channel)
        # The calls that run, by the id of Dynamo's request; two requests may have one id.
        self._calls: dict[Any, str] = {}
        self._closing = False

    async def ready(self) -> list[Model]:
        """Waits until the cell takes requests; returns its models, which are one model by all its names.

        Raises `OctavoError`, above all where the cell wants another API key.
        """
        said = None
        while isinstance(found := await self._models(), str):
            if found != said:
                _log.info("waiting for the cell: %s", found)
            said = found
            await asyncio.sleep(_PAUSE_S)
        return found

    async def left(self) -> str:
        """Returns, as soon as the cell takes no more requests, why."""
        try:
            async for answer in self._health.Watch(self._asked(), metadata=self._metadata):
                if answer.status != health_pb2.HealthCheckResponse.SERVING:
                    return "its frontend is ending, or has no scheduler or no worker"
        except grpc.RpcError as error:
            return f"its frontend is away: {to_error(error)}"
        return "its frontend ended"

    async def generate(self, request: Mapping[str, Any], dynamo_id: str) -> AsyncGenerator[Chunk]:
        """Answers a request of Dynamo's. Raises `RequestRefused` and `OctavoError`."""
        message = read_request(request, f"{dynamo_id[:_ID_CHARACTERS]}-{secrets.token_hex(4)}")
        chunks, ended = Chunks(), False
        call = self._stub.Generate(message, metadata=self._metadata)
        self._calls[call] = dynamo_id
        try:
            async for answer in call:
                for chunk in chunks.of(read_event(answer)):
                    ended = "finish_reason" in chunk
                    yield chunk
        except grpc.RpcError as error:
            raise to_error(error) from error
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                # The reader was cancelled, and not the call.
                raise
            if self._closing:
                raise make_error(grpc.StatusCode.UNAVAILABLE, "the worker ends; its requests go elsewhere") from None
            yield CANCELLED
            ended = True
        finally:
            del self._calls[call]
            call.cancel()
        if not ended:
            raise cut_short()

    def abort(self, dynamo_id: str) -> None:
        """Ends the requests of an id; the cell frees what they hold."""
        for call in [call for call, of_id in self._calls.items() if of_id == dynamo_id]:
            call.cancel()

    async def close(self, drain_s: float) -> None:
        """Lets what runs end for `drain_s` seconds, ends the rest with an `UnavailableError`, and hangs up."""
        await self._idle(drain_s)
        if self._calls:
            _log.warning("%d requests go elsewhere: they outlast the %g s of draining", len(self._calls), drain_s)
        self._closing = True
        for call in list(self._calls):
            call.cancel()
        await self._idle(_TOLD_S)
        await self._channel.close()

    async def _idle(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while self._calls:
                    await asyncio.sleep(0.05)

    async def _models(self) -> list[Model] | str:
        """Returns the models of the cell, or why it takes no requests. Raises `OctavoError` for what waiting does not
        mend."""
        away = "its frontend has no scheduler or no worker yet"
        try:
            health = await self._health.Check(self._asked(), timeout=_ANSWER_S, metadata=self._metadata)
            if health.status != health_pb2.HealthCheckResponse.SERVING:
                return away
            listed = await self._stub.ListModels(pb.ListModelsRequest(), timeout=_ANSWER_S, metadata=self._metadata)
        except grpc.RpcError as failure:
            error = to_error(failure)
            is_lost = error.code in LOST and not error.reason
            if is_lost or isinstance(error, UnavailableError | DeadlineError):
                return str(error)
            raise error from failure
        models = read_models(listed)
        # The last worker may have gone since.
        return models if all(model.ready for model in models) else away

    def _asked(self) -> health_pb2.HealthCheckRequest:
        return health_pb2.HealthCheckRequest(service=_SERVICE)
