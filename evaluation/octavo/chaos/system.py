"""Starts real processes under load, wrongs them and starts them again, with a judge who sees what every client sees."""

import asyncio
import contextlib
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from itertools import islice
from random import Random
from typing import Any, Final

import grpc
from grpc_health.v1 import health_pb2

from octavo.chaos.client import PREFIX, PREFIX_NAME, TURNED_AWAY, JudgedClient, Question, questions, record
from octavo.runtime.process.ends import ENDS_VARIABLE, End, write_ends
from octavo.testbed.history import Answer, Event, HeldLoad, Struck
from octavo.testbed.judge import Judge
from octavo.testbed.stack import Stack
from octavo.v1 import admin_pb2, generation_pb2
from octavo.v1 import generation_pb2_grpc as services

_CHANNEL: Final = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_reconnect_backoff_ms", 200)]
_AT_ONCE: Final = 16
_RETRY_S: Final = 0.05
# Counted from the client's own leaving, on a machine that may be busy; streams that are left would go on for longer.
_ZOMBIE_S: Final = 2.0
# What a process logs once it is of use.
_BEGINNINGS: Final = {"scheduler": "frontends at", "frontend": "ready", "worker": "registered as incarnation"}


@dataclass(frozen=True)
class Known:
    """Holds a question and its answer in an undisturbed run."""

    question: Question
    answer: Answer

    def named(self, name: str) -> generation_pb2.GenerateRequest:
        """Copies the request, with `name` as its id."""
        request = generation_pb2.GenerateRequest()
        request.CopyFrom(self.question.request)
        request.request_id = name
        return request


@dataclass
class SystemUnderLoad:
    """Holds a stack that runs, its clients and their judge. `known` is what they ask."""

    stack: Stack
    random: Random
    stubs: list[Any]
    judge: Judge = field(default_factory=lambda: Judge(zombie_s=_ZOMBIE_S))
    known: list[Known] = field(default_factory=list)
    num_asked: int = 0
    turned_away: int = 0
    kinds: dict[str, int] = field(default_factory=dict)

    # -- clients ----------------------------------------------------------------------------------------------------

    async def learn(self, num_questions: int, num_tokens: int, *, pinned: bool = True) -> None:
        """Asks every question once, while nothing goes wrong."""
        if pinned:
            pin = admin_pb2.PinPrefixRequest(name=PREFIX_NAME, token_ids=PREFIX)
            await asyncio.to_thread(self.stack.admin.PinPrefix, pin, timeout=10)
        turn = asyncio.Semaphore(_AT_ONCE)

        async def learn(question: Question) -> Known:
            async with turn:
                return Known(question, await record(self.stubs[0], question.request))

        drawn = islice(questions(self.random, num_tokens, pinned=pinned), num_questions)
        self.known = await asyncio.gather(*map(learn, drawn))

    def witness(self, event: Event) -> None:
        self.judge.take(event)

    def name(self) -> str:
        """Makes a name that no other request has."""
        self.num_asked += 1
        return f"r{self.num_asked}"

    async def ask(self, known: Known) -> str:
        """Asks until a frontend takes the question; gives the reason of the error, if that is all that came."""
        while True:
            stub = self.stubs[self.num_asked % len(self.stubs)]
            client = JudgedClient(stub, self.witness, known.named(self.name()), is_patient=len(self.stubs) > 1)
            reason = await client.ask(known.answer)
            if reason == TURNED_AWAY:
                self.turned_away += 1
                await asyncio.sleep(_RETRY_S)
            else:
                self.kinds[known.question.kind] = self.kinds.get(known.question.kind, 0) + 1
                return reason

    @contextlib.asynccontextmanager
    async def crowd(self, num_clients: int) -> AsyncIterator[None]:
        """Keeps `num_clients` clients asking one thing after the other, inside the block; all get their answers before
        its end."""
        is_open = True

        async def ask_on(client: int) -> None:
            place = client
            while is_open:
                await self.ask(self.known[place % len(self.known)])
                place += num_clients + 1

        async with asyncio.TaskGroup() as group:
            for client in range(num_clients):
                group.create_task(ask_on(client))
            try:
                yield
            finally:
                is_open = False

    # -- processes --------------------------------------------------------------------------------------------------

    def strike(self, name: str, number: signal.Signals) -> None:
        """Sends a process a signal, and tells the judge."""
        self.judge.take(Struck(time.monotonic(), name))
        self.stack.processes[name].send_signal(number)

    async def kill(self, name: str) -> None:
        """Kills a process (-9) and starts it again at once, as its supervisor would."""
        self.strike(name, signal.SIGKILL)
        end = End(self.stack.processes[name].pid, -signal.SIGKILL)
        await self.start_again(name, **{ENDS_VARIABLE: write_ends([end])})

    async def start_again(self, name: str, **environment: str) -> None:
        """Waits for the end of a process, starts it anew, and waits until the books have it and not the one before."""
        workers = sum(process.startswith("worker") for process in self.stack.processes)
        await asyncio.to_thread(self.stack.processes[name].wait)
        begun = self._count_beginnings(name)
        self.stack.start_named(name, **environment)
        await self.until(lambda: self._count_beginnings(name) > begun and len(self.stack.load().workers) == workers)

    def _count_beginnings(self, name: str) -> int:
        return self.stack.log(name).count(_BEGINNINGS[name.partition("-")[0]])

    async def until(self, condition: Callable[[], bool], seconds: float = 60.0) -> None:
        """Waits for a condition that is looked at in another thread."""
        await asyncio.to_thread(self.stack.wait_for, condition, seconds)

    async def until_busy(self, workers: int, each: int = 4) -> None:
        """Waits until so many workers are there, and each runs so many requests."""

        def busy() -> bool:
            running = [worker.running for worker in self.stack.load().workers]
            return len(running) == workers and min(running) >= each

        await self.until(busy)

    async def rest(self) -> None:
        """Ends the run: what is held now is held for nobody."""
        with contextlib.suppress(AssertionError):
            await asyncio.to_thread(self.stack.wait_idle)
        load = await asyncio.to_thread(self.stack.load)
        requests = load.waiting + load.running + load.swapped
        blocks = sum(held_blocks(worker) for worker in load.workers)
        self.judge.take(HeldLoad(time.monotonic(), requests, blocks))
        self.judge.end(time.monotonic())


def held_blocks(worker: admin_pb2.Worker) -> int:
    """Counts the blocks, on the device and in CPU memory, that are neither free nor pinned."""
    on_device: int = worker.blocks_total - worker.blocks_free - worker.blocks_pinned
    return on_device + int(worker.cpu_blocks_total - worker.cpu_blocks_free)


@contextlib.asynccontextmanager
async def system(stack: Stack, seed: int, *, workers: int = 2, frontends: int = 1) -> AsyncIterator[SystemUnderLoad]:
    """Starts all processes of a stack."""
    frontend_names = ["frontend", *(f"frontend-{i}" for i in range(1, frontends))]
    for name in ("scheduler", *frontend_names, *(f"worker-{i}" for i in range(workers))):
        stack.start_named(name)
    async with contextlib.AsyncExitStack() as held:
        channels = [
            await held.enter_async_context(grpc.aio.insecure_channel(stack.address_of(name), _CHANNEL))
            for name in frontend_names
        ]
        stubs: list[Any] = [services.GenerationServiceStub(channel) for channel in channels]
        found = SystemUnderLoad(stack, Random(seed), stubs)
        await found.until(lambda: _is_complete(stack, frontends, workers))
        yield found


def _is_complete(stack: Stack, frontends: int, workers: int) -> bool:
    """Tells whether all processes have registered. Raises `AssertionError` if one has ended instead."""
    stack.assert_alive()
    load = stack.load()
    is_registered = load.frontends == frontends and len(load.workers) == workers
    return is_registered and stack.health() == health_pb2.HealthCheckResponse.SERVING


Campaign = Callable[[SystemUnderLoad, int], Awaitable[dict[str, float]]]
