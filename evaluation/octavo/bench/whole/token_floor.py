"""Passes the messages of a step on and does nothing else, as a process: `python -m octavo.bench.whole.token_floor ROLE
SETUP`.

A scheduler's, a frontend's and a worker's place are taken by the fewest calls of the same libraries: messages of the
same sizes pass the same sockets and the same gRPC, but nothing is read, decided, counted or written anew. What these
processes take for a token is what no code of ours can save. A frontend's prints its port, and a worker that it is
there.
"""

import asyncio
import contextlib
import json
import math
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final

import grpc
import uvloop
import zmq

from octavo.runtime.process.gc_tuning import collect_seldom
from octavo.runtime.process.huge_pages import use_huge_pages
from octavo.runtime.process.orphans import end_with_parent
from octavo.runtime.transport.arrivals import Arrivals
from octavo.runtime.transport.messages import receive, send, send_to
from octavo.runtime.transport.sockets import bind_router, connect_dealer
from octavo.v1 import generation_pb2 as pb

# About what a plan, its result and its tokens' message have: with each sequence, and besides.
_PLAN_BYTES, _RESULT_BYTES, _DELTAS_BYTES = (10, 40), (4, 40), (66, 20)
# A message in the midst of an answer.
_EVENT: Final = pb.GenerateResponse(
    event_offset=1000, delta=pb.TokenDelta(text=" word", token_ids=[1000])
).SerializeToString()
_HELLO: Final = b"hello"


@dataclass(frozen=True)
class FloorSetup:
    """Says where frontends and workers connect, how many streams there are at a time, and how long a step lasts."""

    frontends: str
    workers: str
    streams: int
    step_ms: float

    def message(self, sizes: tuple[int, int]) -> bytes:
        """Makes a message of a step of all streams."""
        each, besides = sizes
        return bytes(each * self.streams + besides)


def _arrived(socket: "zmq.Socket[bytes]") -> Iterator[list[bytes]]:
    """Yields the messages of `socket` that are there."""
    with contextlib.suppress(zmq.Again):
        while True:
            yield receive(socket)


@dataclass
class _Scheduler:
    """Answers each result with a plan, and tells the frontend of it."""

    setup: FloorSetup
    context: "zmq.Context[zmq.Socket[bytes]]"
    # How many tokens each stream that has begun is to have.
    lengths: list[int] = field(default_factory=list)
    steps_left: int = 0
    worker: bytes = b""
    frontend: bytes = b""

    async def run(self) -> None:
        self.to_frontends = bind_router(self.context, self.setup.frontends)
        self.to_workers = bind_router(self.context, self.setup.workers)
        self.plan, self.deltas = self.setup.message(_PLAN_BYTES), self.setup.message(_DELTAS_BYTES)
        use_huge_pages()
        await Arrivals(self._turn, [self.to_workers, self.to_frontends]).run()

    def _turn(self) -> float:
        for frames in _arrived(self.to_workers):
            self._go_on(frames)
        for frames in _arrived(self.to_frontends):
            self._begin(frames)
        return math.inf

    def _begin(self, frames: list[bytes]) -> None:
        self.frontend, length = frames
        self.lengths.append(int(length))
        self._start()

    def _start(self) -> None:
        """Sends the first plan, once all streams and the worker are there."""
        if self.worker and len(self.lengths) == self.setup.streams:
            self.steps_left = self.lengths[0]
            self.lengths.clear()
            send_to(self.to_workers, self.worker, self.plan)

    def _go_on(self, frames: list[bytes]) -> None:
        self.worker, result = frames
        if result == _HELLO:
            self._start()
            return
        self.steps_left -= 1
        if self.steps_left:
            send_to(self.to_workers, self.worker, self.plan)
        send_to(self.to_frontends, self.frontend, self.deltas)


@dataclass(eq=False)
class _Stream:
    """Counts what a stream has not written yet, and holds what it waits for."""

    due: int = 0
    waiting: "asyncio.Future[None] | None" = None

    def ring(self) -> None:
        self.due += 1
        if self.waiting and not self.waiting.done():
            self.waiting.set_result(None)


@dataclass
class _Frontend:
    """Writes a message to each stream for every message of the scheduler."""

    setup: FloorSetup
    context: "zmq.Context[zmq.Socket[bytes]]"
    streams: list[_Stream] = field(default_factory=list)

    async def run(self) -> None:
        self.socket = connect_dealer(self.context, self.setup.frontends)
        # Who calls before the scheduler is there would be turned away.
        self.socket.poll(flags=zmq.POLLOUT)
        self.arrivals = Arrivals(self._turn, [self.socket])
        server = grpc.aio.server()
        method = grpc.unary_stream_rpc_method_handler(self._generate)
        name = pb.DESCRIPTOR.services_by_name["GenerationService"].full_name
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(name, {"Generate": method}),))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        use_huge_pages()
        print(port, flush=True)
        await self.arrivals.run()

    def _turn(self) -> float:
        for _ in _arrived(self.socket):
            for stream in self.streams:
                stream.ring()
        return math.inf

    async def _generate(self, request: bytes, context: "grpc.aio.ServicerContext[Any, Any]") -> None:
        tokens = pb.GenerateRequest.FromString(request).stopping.max_new_tokens
        stream, loop = _Stream(), asyncio.get_running_loop()
        self.streams.append(stream)
        send(self.socket, str(tokens).encode())
        self.arrivals.look()
        for _ in range(tokens):
            if not stream.due:
                stream.waiting = loop.create_future()
                await stream.waiting
            stream.due -= 1
            await context.write(_EVENT)
        self.streams.remove(stream)


def _work(setup: FloorSetup) -> None:
    """Answers each plan after the time of a step."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket, result = connect_dealer(context, setup.workers), setup.message(_RESULT_BYTES)
    socket.poll(flags=zmq.POLLOUT)
    send(socket, _HELLO)
    print("there", flush=True)
    while True:
        socket.recv()
        time.sleep(setup.step_ms / 1000)
        send(socket, result)


def main() -> None:
    role, setup = sys.argv[1], FloorSetup(**json.loads(sys.argv[2]))
    end_with_parent(os.getppid())
    collect_seldom()
    if role == "worker":
        _work(setup)
    # They end with the process.
    place = {"scheduler": _Scheduler, "frontend": _Frontend}[role](setup, zmq.Context())
    uvloop.run(place.run())


if __name__ == "__main__":
    main()
