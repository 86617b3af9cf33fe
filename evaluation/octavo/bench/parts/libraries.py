"""Measures what Octavo does itself beside libraries that could do it: `python -m octavo.bench.parts.libraries`.

docs/libraries.md says what follows. What pebble and scipy take is measured where they are installed; Octavo needs
neither. Times are seconds of CPU of this process, the least of rounds, but for round trips, which are on the clock.
"""

import asyncio
import importlib.util
import os
import signal
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack
from functools import cache, partial
from multiprocessing import get_context
from multiprocessing.resource_tracker import ensure_running
from pathlib import Path
from queue import Queue
from socket import create_connection, create_server, socket
from statistics import median
from typing import Any

import anyio.to_process
import numpy as np
import torch
import uvicorn
from prometheus_client import CollectorRegistry, Counter, start_http_server
from prometheus_client import Histogram as TheirHistogram
from safetensors import safe_open
from safetensors.torch import save_file
from starlette.types import Receive, Scope, Send

from octavo.bench.measurement import children
from octavo.frontend.config import FrontendConfig
from octavo.frontend.http.server import HttpServer
from octavo.frontend.text.pool import TextPool
from octavo.frontend.text.tokenizer import ModelTokenizer
from octavo.runtime.telemetry.metrics import serve
from octavo.runtime.telemetry.numbers import WAIT_S, Histogram, Tally
from octavo.testbed.tiny_model import write_byte_model
from octavo.worker.calibrate.fit import least_costs
from octavo.worker.loading.tensor_file import stored_tensors

Line = tuple[str, str, str]
_ROUNDS = 5
_TEXT = "hello world " * 400
_PROCESSES, _KILLS, _SILENT = 2, 30, 50
_NONE = "not installed"


def metrics() -> Iterator[Line]:
    """Observes and counts a value as every token does."""
    registry = CollectorRegistry()
    ours, theirs = Histogram(WAIT_S), TheirHistogram("a", "a", buckets=WAIT_S, registry=registry)
    yield "observe a value", _ns(lambda: ours.observe(1.0)), _ns(lambda: theirs.observe(1.0))
    tally, counter = Tally("a"), Counter("b", "b", ["l"], registry=registry)
    yield "count an event by its name", _ns(lambda: tally.add("a")), _ns(lambda: counter.labels("a").inc())
    with serve("127.0.0.1:0") as port:
        server, thread = start_http_server(0, "127.0.0.1", registry)
        left_open = _left_open(port, server.server_port, 7.0)
        server.shutdown()
        server.server_close()
        thread.join()
    yield f"of {_SILENT} silent scrapers held after 7 s", *left_open


def connections() -> Iterator[Line]:
    """Begins requests over HTTP that never end; uvicorn has its own limits of connections and of headers."""
    frontend = FrontendConfig(Path(), "model", "127.0.0.1:0", (), http_listen="127.0.0.1:0")
    settings = uvicorn.Config(_no_app, limit_concurrency=1000, h11_max_incomplete_event_size=1 << 16, log_config=None)
    ports: Queue[int] = Queue()

    async def serve_both() -> None:
        ours, theirs = HttpServer(_no_app, frontend), create_server(("127.0.0.1", 0))
        await ours.start()
        ports.put(ours.port)
        ports.put(theirs.getsockname()[1])
        await uvicorn.Server(settings).serve([theirs])

    threading.Thread(target=lambda: asyncio.run(serve_both()), daemon=True).start()
    yield f"of {_SILENT} endless requests held after 12 s", *_left_open(ports.get(), ports.get(), 12.0)


def weights(num_bytes: int = 256 << 20) -> Iterator[Line]:
    """Reads a file of weights, each into memory of its own."""
    with tempfile.TemporaryDirectory() as directory:
        path, count = Path(directory) / "file", 64
        save_file({str(number): torch.ones(num_bytes // count // 4) for number in range(count)}, path)

        def ours() -> int:
            tensors = [tensor.read() for tensor in stored_tensors(path).values()]
            return _resident() if tensors else 0

        def theirs() -> int:
            with safe_open(path, "pt") as file:
                tensors = [file.get_tensor(name).clone() for name in file.keys()]  # noqa: SIM118 (no mapping)
                return _resident() if tensors else 0

        yield f"read {num_bytes >> 20} MiB", _ms(ours), _ms(theirs)
        own, other = (f"{(read() - _resident()) >> 20} MiB" for read in (ours, theirs))
        yield "memory while they are read", own, other


def least_squares() -> Iterator[Line]:
    """Fits costs of the size of a calibration's."""
    random = np.random.default_rng(0)
    rows = random.uniform(size=(400, 16))
    seconds = rows @ random.uniform(size=16)
    theirs: Any = importlib.import_module("scipy.optimize").nnls if importlib.util.find_spec("scipy") else None
    found = _ms(lambda: theirs(rows, seconds)) if theirs else _NONE
    yield "fit 16 costs to 400 steps (scipy)", _ms(lambda: least_costs(rows, seconds)), found


async def text_processes() -> list[Line]:
    """Sends texts of 5 KB to processes and back, and kills processes of pools under them."""
    with tempfile.TemporaryDirectory() as directory:
        write_byte_model(Path(directory))
        limiter = anyio.CapacityLimiter(_PROCESSES)
        in_anyio = partial(anyio.to_process.run_sync, _encode, directory, limiter=limiter, cancellable=True)
        anyios = await _measured(in_anyio, lambda: children(os.getpid()))
        pool = TextPool(ModelTokenizer(Path(directory)), _PROCESSES, timeout_s=60.0)
        try:
            ours = await _measured(partial(pool.encode, _TEXT), lambda: pool.pids)
        finally:
            pool.close()
        pebbles = await _of_pebble(directory) if importlib.util.find_spec("pebble") else (_NONE,) * len(ours)
    names = ("a text to a process and back", "CPU in a second without texts", "kills until texts hang or fail")
    return [
        (f"{name} ({library})", own, other)
        for library, theirs in (("anyio", anyios), ("pebble", pebbles))
        for name, own, other in zip(names, ours, theirs, strict=True)
    ]


async def _of_pebble(directory: str) -> tuple[str, ...]:
    pool = importlib.import_module("pebble").ProcessPool(_PROCESSES, context=get_context("spawn"))
    # A process that every start needs.
    ensure_running()
    before = set(children(os.getpid()))

    async def send() -> object:
        return await asyncio.wrap_future(pool.schedule(_encode, args=(directory,), timeout=60))

    found = await _measured(send, lambda: [pid for pid in children(os.getpid()) if pid not in before])
    pool.stop()
    return found


async def _measured(send: Callable[[], Awaitable[object]], pids: Callable[[], list[int]]) -> tuple[str, ...]:
    return await _round_trip(send), await _idle(), await _kills(send, pids)


async def _idle(seconds: float = 3.0) -> str:
    began = time.process_time()
    await asyncio.sleep(seconds)
    return f"{1e3 * (time.process_time() - began) / seconds:.2f} ms"


def _encode(directory: str) -> list[int]:
    return _tokenizer(directory).encode(_TEXT)


@cache
def _tokenizer(directory: str) -> ModelTokenizer:
    return ModelTokenizer(Path(directory))


async def _round_trip(send: Callable[[], Awaitable[object]]) -> str:
    await send()
    times = []
    for _ in range(300):
        began = time.perf_counter()
        await send()
        times.append(time.perf_counter() - began)
    return f"{1e3 * median(times):.2f} ms"


async def _kills(send: Callable[[], Awaitable[object]], pids: Callable[[], list[int]]) -> str:
    """Kills a process under texts, again and again; a text may be lost with it, but none may wait for ever, and no
    later one be lost."""
    for kill in range(_KILLS):
        texts = [asyncio.ensure_future(send()) for _ in range(4)]
        await asyncio.sleep(0.002)
        for pid in pids()[:1]:
            os.kill(pid, signal.SIGKILL)
        try:
            await asyncio.wait_for(asyncio.gather(*texts, return_exceptions=True), 30)
            await asyncio.wait_for(send(), 30)
        except Exception:
            return str(kill + 1)
    return f"none of {_KILLS}"


async def _no_app(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers nothing: no request comes so far."""


def _left_open(ours: int, theirs: int, seconds: float) -> tuple[str, str]:
    """Begins requests at both ports, and returns how many connections to each are still open after some seconds."""
    with ExitStack() as stack:

        def begun(port: int) -> socket:
            connection = stack.enter_context(create_connection(("127.0.0.1", port)))
            connection.sendall(b"GET /metrics")
            connection.setblocking(False)
            return connection

        of_ours, of_theirs = ([begun(port) for _ in range(_SILENT)] for port in (ours, theirs))
        time.sleep(seconds)
        return str(sum(map(_is_open, of_ours))), str(sum(map(_is_open, of_theirs)))


def _is_open(connection: socket) -> bool:
    try:
        return connection.recv(1) != b""
    except BlockingIOError:
        return True
    except ConnectionError:
        return False


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _least_s(call: Callable[[], object], times: int) -> float:
    """Returns the least seconds of CPU that a call took in a round of so many."""
    found = []
    for _ in range(_ROUNDS):
        began = time.process_time()
        for _ in range(times):
            call()
        found.append((time.process_time() - began) / times)
    return min(found)


def _ns(call: Callable[[], object]) -> str:
    return f"{1e9 * _least_s(call, 100_000):.0f} ns"


def _ms(call: Callable[[], object]) -> str:
    return f"{1e3 * _least_s(call, 1):.2f} ms"


def main() -> None:
    """Prints a line for each measurement."""
    # The processes first: what the others have allocated would be in the way.
    lines = [*asyncio.run(text_processes()), *metrics(), *weights(), *connections(), *least_squares()]
    print(f"{'':50}{'ours':>14}{'theirs':>14}")
    for name, ours, theirs in lines:
        print(f"{name:50}{ours:>14}{theirs:>14}")


if __name__ == "__main__":
    main()
