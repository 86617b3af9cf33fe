"""Attacks gRPC services: any bytes, mutated messages and any fields in every method, calls that are given up, and
connections that hardly speak HTTP/2."""

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, Final, cast

import grpc
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from google.rpc.error_details_pb2 import ErrorInfo  # type: ignore[import-untyped]
from grpc_status import rpc_status

from octavo.chaos.fuzz.connections import Listening, http2_garbage, say
from octavo.chaos.fuzz.noise import fill, garbage, mutated
from octavo.chaos.fuzz.target import FAULT
from octavo.testbed.stack import Stack

_AT_ONCE: Final = 32
_LONGEST_S: Final = 1.0
_CONNECTIONS: Final = 1 / 8
# What grpc's own client says where it is the one that failed.
_OUR_OWN: Final = "Internal error from Core"
_Metadata = tuple[tuple[str, str | bytes], ...]
_METADATA: Final[_Metadata] = (
    ("x-tenant-id", "x" * 300),
    ("authorization", "Bearer x"),
    ("authorization", ""),
    ("traceparent", "00-" + "f" * 32 + "-" + "0" * 16 + "-zz"),
    ("x-data-bin", b"\0\xff"),
)


@dataclass(frozen=True)
class Services:
    """Names the gRPC services to call, and their socket in the stack's directory. `good` holds requests to mutate, by
    method."""

    socket: str
    services: Sequence[ServiceDescriptor]
    good: dict[str, Sequence[Message]]
    only: Callable[[str], bool] = lambda method: True

    @property
    def methods(self) -> list[MethodDescriptor]:
        """Lists all methods that are called."""
        return [m for service in self.services for m in service.methods if self.only(m.name)]

    def __call__(self, stack: Stack, rng: Random, messages: int) -> Counter[str]:
        """Sends so many; an attack."""
        path = stack.directory / self.socket
        return asyncio.run(_Caller(self, path, rng).send(messages))


class _Caller:
    def __init__(self, services: Services, path: Path, rng: Random) -> None:
        self._services, self._path, self._rng = services, path, rng
        self._methods = services.methods
        self._answers: Counter[str] = Counter()

    async def send(self, messages: int) -> Counter[str]:
        options = [("grpc.use_local_subchannel_pool", 1), ("grpc.enable_retries", 0)]
        async with grpc.aio.insecure_channel(f"unix:{self._path}", options) as channel:
            numbers = iter(range(messages))
            await asyncio.gather(*(self._send_some(channel, numbers) for _ in range(_AT_ONCE)))
        return self._answers

    async def _send_some(self, channel: grpc.aio.Channel, numbers: Any) -> None:
        for _ in numbers:
            if self._rng.random() < _CONNECTIONS:
                listening = self._rng.choices([Listening.NOT, Listening.AS_IF_LEAVING], [9, 1])[0]
                await asyncio.to_thread(say, self._path, http2_garbage(self._rng), listening)
                self._answers["connections"] += 1
            else:
                await self._call(channel, self._rng.choice(self._methods))

    async def _call(self, channel: grpc.aio.Channel, method: MethodDescriptor) -> None:
        frame, metadata = self._message(method), cast(_Metadata, ())
        if self._rng.random() < 0.05:
            metadata = (self._rng.choice(_METADATA),)
        path = f"/{method.containing_service.full_name}/{method.name}"
        kind = "stream" if method.client_streaming else "unary"
        call = getattr(channel, f"{kind}_stream")(path)
        request: Any = iter([frame] * self._rng.randrange(3)) if method.client_streaming else frame
        try:
            running = call(request, timeout=self._rng.uniform(0.01, _LONGEST_S), metadata=metadata)
            async for _ in running:
                if self._rng.random() < 0.05:
                    running.cancel()
            self._answers["OK"] += 1
        except asyncio.CancelledError:
            self._answers["cancelled"] += 1
        except grpc.aio.AioRpcError as error:
            self._answers[_described(method, error)] += 1

    def _message(self, method: MethodDescriptor) -> bytes:
        good = self._services.good.get(method.name) or [GetMessageClass(method.input_type)()]
        match self._rng.randrange(8):
            case 0:
                return garbage(self._rng)
            case 1 | 2:
                return mutated(self._rng, self._rng.choice(good).SerializeToString())
            case 3 | 4 | 5:
                message = GetMessageClass(method.input_type)()
                message.CopyFrom(self._rng.choice(good))
                fill(self._rng, message, share=self._rng.choice([0.03, 0.1]))
                return message.SerializeToString()
        message = GetMessageClass(method.input_type)()
        fill(self._rng, message)
        return message.SerializeToString()


def _described(method: MethodDescriptor, error: grpc.aio.AioRpcError) -> str:
    code, details = error.code(), error.details() or ""
    is_known = _OUR_OWN in details or code not in (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN)
    if is_known:
        return code.name
    return f"{FAULT}: {method.name} answers {code.name} {_reason(error)}: {details[:200]}"


def _reason(error: grpc.aio.AioRpcError) -> str:
    call: Any = error
    status = rpc_status.from_call(call)
    info = ErrorInfo()
    return next((str(info.reason) for each in status.details if each.Unpack(info)), "") if status else ""
