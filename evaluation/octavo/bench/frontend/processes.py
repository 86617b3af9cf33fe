"""Starts the processes of a measurement: a scheduler that keeps time, frontends, and the loads on them."""

import contextlib
import json
import os
import queue
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from octavo.bench.frontend.load import TOKEN_CHARACTERS
from octavo.frontend.text.tokenizer import ModelTokenizer
from octavo.runtime.models.directory import fingerprint
from octavo.testbed.stack import GENERATION_SERVICE
from octavo.wire.steps import ModelInfo

_READY_S: Final = 60.0
_LOOK_S: Final = 0.5
_NUM_TOKENS: Final = 200


class Line:
    """Controls a process by lines on its stdin and stdout."""

    def __init__(self, command: Sequence[str], log: Path, **environment: str) -> None:
        # It sees the modules that this process sees, however it came to.
        paths = os.pathsep.join(filter(None, sys.path))
        with log.open("ab") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", *command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                text=True,
                env={**os.environ, "PYTHONPATH": paths, **environment},
            )
        self._log = log
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout
        with self.process.stdout as lines:
            for line in lines:
                self._lines.put(line)
        self._lines.put("")

    def tell(self, line: str) -> None:
        assert self.process.stdin
        print(line, file=self.process.stdin, flush=True)

    def line(self, needs: Sequence["Line"] = ()) -> str:
        """Reads the next line of the process's stdout. Raises `RuntimeError` with the log of a process that has ended
        before: of this one, or in failure of one that it `needs`, without which the line may never come."""
        while True:
            with contextlib.suppress(queue.Empty):
                if not (line := self._lines.get(timeout=_LOOK_S)):
                    raise RuntimeError(f"a process has ended: {self.log_tail()}")
                return line.strip()
            for other in needs:
                if other.process.poll():
                    raise RuntimeError(f"a process has failed: {other.log_tail()}")

    def log_tail(self) -> str:
        """Returns the end of the process's stderr, at most 2,000 characters."""
        return self._log.read_text(errors="replace")[-2000:]

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdin
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()


class Rig(contextlib.ExitStack):
    """Starts a scheduler and its frontends; all is stopped at the end of the `with` block."""

    def __init__(self, model: Path, directory: Path) -> None:
        super().__init__()
        directory.mkdir(mode=0o700, exist_ok=True)
        self._model, self._directory = model, directory
        self._endpoint = f"ipc://{directory}/frontends.sock"
        setup = {"endpoint": self._endpoint, "model": _model_info(model), "token_ids": plain_tokens(model)}
        self.scheduler = self.load("paced_scheduler", setup)
        self.scheduler.line()

    def load(self, module: str, setup: object) -> Line:
        """Starts `module` of this package as a process that applies the load."""
        process = Line([f"octavo.bench.frontend.{module}", json.dumps(setup)], self._directory / f"{module}.log")
        self.callback(process.close)
        return process

    def frontend(self, *flags: str, **environment: str) -> "Frontend":
        """Starts a frontend, and returns it once it is ready."""
        frontend = Frontend(self._model, self._endpoint, self._directory, flags, environment)
        self.callback(frontend.close)
        frontend.wait_ready()
        return frontend


class Frontend:
    """Runs a frontend as its users run it, on ports of its own."""

    def __init__(
        self, model: Path, endpoint: str, directory: Path, flags: Sequence[str], environment: dict[str, str]
    ) -> None:
        self.grpc_port, self.http_port = _free_ports(2)
        listens = ["--listen", f"127.0.0.1:{self.grpc_port}", "--http-listen", f"127.0.0.1:{self.http_port}"]
        command = ["octavo.cli.main", "frontend", "--model", str(model), "--frontend-endpoint", endpoint, *listens]
        self._line = Line(
            [*command, *flags], directory / "frontend.log", OCTAVO_RUNTIME_DIR=str(directory), **environment
        )
        self.close = self._line.close

    @property
    def pid(self) -> int:
        return self._line.process.pid

    @property
    def tree(self) -> list[int]:
        """Returns the ids of the frontend's process and of the processes that it has started."""
        children = Path(f"/proc/{self.pid}/task").glob("*/children")
        return [self.pid, *(int(pid) for child in children for pid in child.read_text().split())]

    def wait_ready(self) -> None:
        """Raises `RuntimeError` if that takes too long."""
        until = time.monotonic() + _READY_S
        while not self._is_ready():
            if time.monotonic() > until or self._line.process.poll() is not None:
                raise RuntimeError(f"a frontend did not become ready: {self._line.log_tail()}")
            time.sleep(0.1)

    def _is_ready(self) -> bool:
        with grpc.insecure_channel(f"127.0.0.1:{self.grpc_port}") as channel, contextlib.suppress(grpc.RpcError):
            request = health_pb2.HealthCheckRequest(service=GENERATION_SERVICE)
            return bool(health_pb2_grpc.HealthStub(channel).Check(request, timeout=5).status == 1)
        return False


def _model_info(model: Path) -> dict[str, Any]:
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    length, vocab_size = config["max_position_embeddings"], config["vocab_size"]
    info = ModelInfo("paced", fingerprint(model, "auto"), "bfloat16", vocab_size, length)
    return {name: getattr(info, name) for name in info.__struct_fields__}


def plain_tokens(model: Path) -> list[int]:
    """Finds up to `_NUM_TOKENS` tokens of `TOKEN_CHARACTERS` letters or blanks each."""
    tokenizer = ModelTokenizer(model)
    found = (i for i in sorted(tokenizer.ids(added=False).values()) if _is_plain(tokenizer.piece(i)))
    return [token_id for token_id, _ in zip(found, range(_NUM_TOKENS), strict=False)]


def _is_plain(piece: bytes) -> bool:
    return len(piece) == TOKEN_CHARACTERS and piece.isascii() and piece.lstrip().isalpha()


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        listeners = [stack.enter_context(socket.socket()) for _ in range(count)]
        for listener in listeners:
            listener.bind(("127.0.0.1", 0))
        return [int(listener.getsockname()[1]) for listener in listeners]
