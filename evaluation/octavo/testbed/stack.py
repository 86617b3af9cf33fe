"""Runs Octavo as its users run it: real processes, on unix sockets in a directory of their own."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from random import SystemRandom
from types import TracebackType
from typing import Any, BinaryIO, Protocol, Self, cast

import grpc
import httpx
from grpc_health.v1 import health_pb2, health_pb2_grpc

from octavo.v1 import admin_pb2, admin_pb2_grpc, generation_pb2, generation_pb2_grpc

# Below what systems hand out by themselves, or another test's connection might have it before the process does.
_PORTS = range(20_000, 32_000)


def free_address() -> str:
    """Finds an address of this machine's loopback, host:port, that nobody listens on now, and that is found by no other
    call, in this process or another, as long as this process lives: whoever is to listen may begin much later."""
    while True:
        port = SystemRandom().choice(_PORTS)
        claim = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        try:
            # UDP's port of that number: nobody here wants it, and the system gives it to one alone.
            claim.bind(("127.0.0.1", port))
            socket.create_server(("127.0.0.1", port)).close()
        except OSError:
            claim.close()
            continue
        claim.detach()
        return f"127.0.0.1:{port}"


GENERATION_SERVICE = "octavo.v1.GenerationService"
_START_S = 240.0
_STOP_S = 180.0
# Else a channel that has found nobody for a while waits up to two minutes before it looks again.
_CHANNEL_OPTIONS = [("grpc.max_reconnect_backoff_ms", 500)]


class Process(Protocol):
    """Describes a started process, as `subprocess.Popen` does."""

    @property
    def pid(self) -> int: ...
    @property
    def returncode(self) -> Any: ...
    def poll(self) -> int | None: ...
    def wait(self, timeout: float | None = None) -> int: ...
    def send_signal(self, number: int, /) -> None: ...
    def terminate(self) -> None: ...
    def kill(self) -> None: ...


class GenerateStream(Protocol):
    """Describes a running Generate call, as grpc gives it."""

    def __iter__(self) -> Iterator[generation_pb2.GenerateResponse]: ...
    def __next__(self) -> generation_pb2.GenerateResponse: ...
    def cancel(self) -> bool: ...


@dataclass
class FinishedStream:
    """Holds one finished Generate stream."""

    started: generation_pb2.Started
    text: str
    token_ids: list[int]
    num_deltas: int
    finished: generation_pb2.Finished
    usage: generation_pb2.Usage


def collect(stream: Iterable[generation_pb2.GenerateResponse]) -> FinishedStream:
    """Reads a stream to its end, checking the order of its events but for notices."""
    events = without_notices(stream)
    kinds = [event.WhichOneof("event") for event in events]
    deltas = [event.delta for event in events if event.HasField("delta")]
    assert kinds == ["started", *["delta"] * len(deltas), "finished", "usage"], kinds
    return FinishedStream(
        started=events[0].started,
        text="".join(delta.text for delta in deltas),
        token_ids=[token_id for delta in deltas for token_id in delta.token_ids],
        num_deltas=len(deltas),
        finished=events[-2].finished,
        usage=events[-1].usage,
    )


def without_notices(stream: Iterable[generation_pb2.GenerateResponse]) -> list[generation_pb2.GenerateResponse]:
    """Returns the events that every answer has, whatever else went on."""
    return [event for event in stream if not event.HasField("notice")]


@dataclass
class FinishedGroup:
    """Holds one finished Generate stream of several sequences, each list in order of their index."""

    started: generation_pb2.Started
    token_ids: list[list[int]]
    finished: list[generation_pb2.Finished]
    usage: generation_pb2.Usage


def collect_choices(stream: Iterable[generation_pb2.GenerateResponse]) -> FinishedGroup:
    """Reads a stream to its end, checking that each sequence's deltas come before its end, and its end once."""
    token_ids: dict[int, list[int]] = {}
    finished: dict[int, generation_pb2.Finished] = {}
    started, *events, last = without_notices(stream)
    assert started.HasField("started")
    assert last.HasField("usage")
    for event in events:
        if event.HasField("delta"):
            assert event.delta.index not in finished, "a delta after the end"
            token_ids.setdefault(event.delta.index, []).extend(event.delta.token_ids)
        else:
            assert event.WhichOneof("event") == "finished"
            assert event.finished.index not in finished, "two ends"
            finished[event.finished.index] = event.finished
    assert sorted(finished) == list(range(len(finished))) == sorted(token_ids)
    return FinishedGroup(
        started.started,
        [token_ids[index] for index in sorted(token_ids)],
        [finished[index] for index in sorted(finished)],
        last.usage,
    )


@dataclass
class Stack:
    """Starts scheduler, frontend and workers one by one; everything is stopped at the end of the `with` block.

    `directory` holds the sockets and one log per process, and must be short. `environment` goes to every process.
    """

    model: Path
    directory: Path
    environment: dict[str, str] = field(default_factory=dict)
    processes: dict[str, Process] = field(default_factory=dict)

    @property
    def address(self) -> str:
        return f"unix:{self.directory}/frontend.sock"

    @property
    def http_socket(self) -> Path:
        return self.directory / "http.sock"

    @property
    def admin_address(self) -> str:
        return f"unix:{self.directory}/admin.sock"

    def __enter__(self) -> Self:
        self.directory.mkdir(mode=0o700, exist_ok=True)
        self.channel = grpc.insecure_channel(self.address, _CHANNEL_OPTIONS)
        self.admin_channel = grpc.insecure_channel(self.admin_address, _CHANNEL_OPTIONS)
        self.generation = generation_pb2_grpc.GenerationServiceStub(self.channel)
        self.admin = admin_pb2_grpc.AdminServiceStub(self.admin_channel)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.channel.close()
        self.admin_channel.close()
        for process in self.processes.values():
            process.kill()
            process.wait()
        if error is not None:
            for log in sorted(self.directory.glob("*.log")):
                print(f"--- {log.name}\n{log.read_text(errors='replace')[-4000:]}")

    def start(
        self, command: str, name: str | None = None, *, arguments: Sequence[str] = (), **environment: str
    ) -> Process:
        """Starts `octavo <command>`; its output goes to `<name>.log`."""
        name = name or command
        settings = {
            **os.environ,
            "OCTAVO_RUNTIME_DIR": str(self.directory),
            "OCTAVO_MODEL": str(self.model),
            "OCTAVO_LISTEN": self.address,
            "OCTAVO_HTTP_LISTEN": f"unix:{self.http_socket}",
            "OCTAVO_SCHEDULER_ADMIN": self.admin_address,
            **self.environment,
            **environment,
        }
        with (self.directory / f"{name}.log").open("ab") as log:
            process = self.launch(name, [command, *arguments], settings, log)
        self.processes[name] = process
        return process

    def launch(self, name: str, arguments: Sequence[str], environment: Mapping[str, str], log: BinaryIO) -> Process:
        """Starts `octavo` with these arguments as the process called `name`."""
        command = [*self.on(name), sys.executable, "-m", "octavo.cli.main", *arguments]
        return subprocess.Popen(command, env=environment, stdout=log, stderr=log)

    def on(self, name: str) -> Sequence[str]:
        """Returns the beginning of the command of the process called `name`, if it does not run right here."""
        return ()

    def address_of(self, frontend: str) -> str:
        """Returns the address at which the frontend of a name listens; the first is called just so."""
        return f"unix:{self.directory}/{frontend}.sock"

    def start_named(self, name: str, **environment: str) -> Process:
        """Starts the process of a name such as scheduler, frontend-1 or worker-0, anew if it ran before: a worker under
        this id, a frontend at an address of its own."""
        command = name.partition("-")[0]
        if command == "worker":
            environment = {"OCTAVO_WORKER_ID": name, **environment}
        elif command == "frontend":
            http = f"unix:{self.directory}/http-{name}.sock"
            environment = {"OCTAVO_LISTEN": self.address_of(name), "OCTAVO_HTTP_LISTEN": http, **environment}
        return self.start(command, name, **environment)

    def cell(self, name: str) -> dict[str, str]:
        """Returns the environment that makes a scheduler and workers a cell of this name: sockets of its own."""
        directory = self.directory / name
        directory.mkdir(mode=0o700, exist_ok=True)
        return {"OCTAVO_RUNTIME_DIR": str(directory)}

    def start_all(self, workers: int = 1) -> Self:
        """Starts one of each kind (and more workers), and waits until the frontend says it is ready."""
        self.start("scheduler")
        self.start("frontend")
        for number in range(workers):
            self.start_named(f"worker-{number}")
        self.wait_ready()
        self.wait_for(lambda: len(self.load().workers) == workers)
        return self

    def http(self) -> httpx.Client:
        """Returns a client of the frontend's HTTP port; the caller closes it."""
        transport = httpx.HTTPTransport(uds=str(self.http_socket))
        return httpx.Client(transport=transport, base_url="http://octavo", timeout=60, trust_env=False)

    def log(self, name: str) -> str:
        return (self.directory / f"{name}.log").read_text(errors="replace")

    def kill(self, name: str, number: signal.Signals = signal.SIGKILL) -> int:
        """Sends a signal and returns the exit status."""
        self.processes[name].send_signal(number)
        return self.processes[name].wait(_STOP_S)

    def health(self, service: str = GENERATION_SERVICE) -> int:
        """Returns the status the frontend gives for `service`; UNKNOWN when it does not answer."""
        stub = health_pb2_grpc.HealthStub(self.channel)
        try:
            return int(stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=5).status)
        except grpc.RpcError:
            return int(health_pb2.HealthCheckResponse.UNKNOWN)

    def wait_ready(self) -> None:
        self.wait_for(lambda: self.health() == health_pb2.HealthCheckResponse.SERVING, _START_S)

    def wait_for(self, condition: Callable[[], bool], seconds: float = _STOP_S) -> None:
        """Polls until `condition` holds; fails after `seconds`."""
        deadline = time.monotonic() + seconds
        while True:
            with contextlib.suppress(grpc.RpcError):
                if condition():
                    return
            assert time.monotonic() < deadline, "the awaited state did not come"
            time.sleep(0.02)

    def load(self) -> admin_pb2.GetLoadResponse:
        load: admin_pb2.GetLoadResponse = self.admin.GetLoad(admin_pb2.GetLoadRequest(), timeout=10)
        return load

    def wait_idle(self) -> None:
        """Waits until no request and no block is held anywhere, on a device or in CPU memory: a copy between workers
        may outlive the request that it was for."""

        def idle() -> bool:
            load = self.load()
            return not (load.waiting or load.running or load.swapped) and all(
                w.blocks_free + w.blocks_pinned == w.blocks_total and w.cpu_blocks_free == w.cpu_blocks_total
                for w in load.workers
            )

        self.wait_for(idle)

    def assert_alive(self) -> None:
        assert {name: process.poll() for name, process in self.processes.items()} == dict.fromkeys(self.processes)

    def stream(self, request: generation_pb2.GenerateRequest, timeout: float = 120.0) -> GenerateStream:
        return cast(GenerateStream, self.generation.Generate(request, timeout=timeout))

    def choices(self, request: generation_pb2.GenerateRequest, timeout: float = 120.0) -> FinishedGroup:
        return collect_choices(self.stream(request, timeout))

    def generate(self, request: generation_pb2.GenerateRequest, timeout: float = 120.0) -> FinishedStream:
        return collect(self.stream(request, timeout))

    def generate_all(
        self, requests: Sequence[generation_pb2.GenerateRequest], timeout: float = 240.0
    ) -> list[FinishedStream]:
        """Generates all at once, each on a thread of its own."""
        with ThreadPoolExecutor(len(requests)) as pool:
            return list(pool.map(lambda request: self.generate(request, timeout), requests))


def token_request(token_ids: Sequence[int], max_new_tokens: int, **fields: object) -> generation_pb2.GenerateRequest:
    """Makes a greedy request for exactly `max_new_tokens` tokens after `token_ids`."""
    return generation_pb2.GenerateRequest(
        token_ids=generation_pb2.TokenIds(ids=token_ids),
        sampling=generation_pb2.SamplingParams(temperature=0),
        stopping=generation_pb2.StoppingCriteria(max_new_tokens=max_new_tokens, ignore_eos=True),
        **fields,  # type: ignore[arg-type]
    )
