"""Generate as our client library calls it: a stream whose connection was lost is gone on with."""

import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Self

import grpc

from octavo.client.async_client import AsyncStream
from octavo.client.channels import open_async_channel
from octavo.client.errors import OctavoError
from octavo.client.events import Event
from octavo.client.jobs import Job
from octavo.client.retries import Recovery, RetryPolicy
from octavo.v1 import generation_pb2 as pb
from octavo.v1 import generation_pb2_grpc as services

_DETACH_GRACE_S = 30


@dataclass
class _Remembered(Job):
    """Keeps the message of the last event."""

    message: pb.GenerateResponse = field(default_factory=pb.GenerateResponse, init=False)

    def accept(self, message: pb.GenerateResponse | pb.AttachResponse) -> Event | None:
        event = super().accept(message)
        if event is not None:
            self.message = message.event if isinstance(message, pb.AttachResponse) else message
        return event


class LastingCall(AsyncIterator[pb.GenerateResponse]):
    """What a call of the generated stub looks like."""

    def __init__(self, stub: services.GenerationServiceStub, request: pb.GenerateRequest, timeout: float) -> None:
        recovery = Recovery(RetryPolicy(), time.monotonic, time.monotonic() + timeout, attachable=True)
        self._job = _Remembered(request, recovery, own_id=False)
        self._stream = AsyncStream(stub, self._job, ())

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> pb.GenerateResponse:
        """Raises what the generated stub raises."""
        try:
            await anext(self._stream)
        except OctavoError as error:
            nothing = grpc.aio.Metadata()
            raise grpc.aio.AioRpcError(error.code, nothing, nothing, str(error), None) from error
        return self._job.message

    def cancel(self) -> None:
        """The request ends with its detach grace, as after a lost connection."""
        self._stream._call.cancel()


class LastingStub:
    """As much of the generated stub as the clients of campaigns use."""

    def __init__(self, address: str) -> None:
        self._channel = open_async_channel(address)
        self._stub = services.GenerationServiceStub(self._channel)

    def Generate(self, request: pb.GenerateRequest, timeout: float) -> LastingCall:
        lasting = pb.GenerateRequest()
        lasting.CopyFrom(request)
        lasting.scheduling.detach_grace.FromSeconds(_DETACH_GRACE_S)
        return LastingCall(self._stub, lasting, timeout)

    async def close(self) -> None:
        await self._channel.close(None)
