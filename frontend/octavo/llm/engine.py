"""Runs Octavo's processes as a part of this one, and turns options into their environment variables and flags.

The processes start with an `Engine`, are reached by a unix socket, and end with the engine.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, fields
from typing import Any, Final, Literal

from octavo.cli.supervision import PARENT_VARIABLE
from octavo.client import Client, OctavoError, RetryPolicy
from octavo.llm.worker_options import WorkerOptions


@dataclass(frozen=True, kw_only=True)
class EngineOptions(WorkerOptions):
    """Holds the options of an engine: those of its workers, and names of vLLM. None leaves a choice to the process that
    the option is for.

    `octavo worker --help` and `octavo scheduler --help` say more. Names are vLLM's where they mean the same; an option
    that can have only one value is there for scripts that give it. `swap_space` is in GiB, memory of the workers in
    bytes or text such as "2GiB", `ready_timeout` in seconds. The seeds of requests without one are drawn from `seed`;
    with None they differ from run to run.
    """

    model: str
    num_workers: int = 1
    seed: int | None = 0
    num_gpu_blocks_override: int | None = None
    swap_space: float | None = None
    enable_prefix_caching: bool | None = None
    enforce_eager: bool = False
    generation_config: Literal["auto", "vllm"] = "auto"
    ready_timeout: float = 600.0
    tokenizer: str | None = None
    quantization: None = None
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        """Raises `ValueError` for what this engine does not have, and for one option under both its names."""
        for name, (only, why) in _ONLY.items():
            if getattr(self, name) != only and not (name == "tokenizer" and self.tokenizer == self.model):
                raise ValueError(f"{name} is {getattr(self, name)!r}, but it can only be {only!r}: {why}")
        for name, (own, _) in _IN_VLLM.items():
            both = own != name and getattr(self, own, None) is not None
            if both and getattr(self, name) is not getattr(EngineOptions, name):
                raise ValueError(f"{name} and {own} are names of one option; give one of them")

    def arguments(self) -> list[str]:
        """Returns the arguments of `octavo serve`."""
        return ["--workers", str(self.num_workers), "--ready-timeout", str(self.ready_timeout)]

    def environment(self) -> dict[str, str]:
        """Returns the environment variables of all processes."""
        given = {field.name: getattr(self, field.name) for field in fields(WorkerOptions)}
        for name, (own, read) in _IN_VLLM.items():
            if given.get(own) is None and (value := getattr(self, name)) is not None:
                given[own] = read(value)
        given |= {"model": self.model, "dtype": _DTYPES.get(self.dtype or "", self.dtype)}
        return {f"OCTAVO_{name.upper()}": _text(value) for name, value in given.items() if value is not None}


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def read_options(model: str, options: Mapping[str, Any]) -> EngineOptions:
    """Makes the options. Raises `TypeError` for an unknown option, and `ValueError` for a value that cannot be had."""
    known = {field.name for field in fields(EngineOptions)} - {"model"}
    if unknown := sorted(options.keys() - known):
        raise TypeError(f"LLM has no option {unknown[0]!r}; it has: {', '.join(sorted(known))}")
    return EngineOptions(model=model, **options)


_ONLY: Final[dict[str, tuple[object, str]]] = {
    "tokenizer": (None, "the model's directory has it"),
    "quantization": (None, "weights are computed with as they are"),
    "tensor_parallel_size": (1, "a model is on one device; num_workers runs several copies of it"),
    "pipeline_parallel_size": (1, "a model is on one device; num_workers runs several copies of it"),
    "trust_remote_code": (False, "code that comes with a model is never run"),
}
# Names of vLLM for options of Octavo, with what makes the one's value of the other's.
_IN_VLLM: Final[dict[str, tuple[str, Callable[[Any], object]]]] = {
    "num_gpu_blocks_override": ("num_blocks", int),
    "swap_space": ("swap_memory", lambda gib: round(gib * 2**30)),
    "enable_prefix_caching": ("prefix_cache", bool),
    "enforce_eager": ("cuda_graphs", lambda eager: not eager),
    "generation_config": ("generation_config", lambda source: {"vllm": "none"}.get(source, source)),
}
# Names of vLLM for dtypes.
_DTYPES: Final = {"half": "float16", "float": "float32"}


_SHOWN_LINES: Final = 30
_PROBE_INTERVAL_S: Final = 0.05
_PATIENCE_S: Final = 15.0
# Settings for another server, not for this engine: where it listens, who may call it, which files it writes.
_NOT_OURS: Final = ("_LISTEN", "_ENDPOINT", "_ADDRESS", "_API_KEYS", "_TLS_CERTIFICATE", "_TLS_KEY", "_TLS_CLIENT_CA")
_NOT_OURS_EITHER: Final = ("OCTAVO_RUNTIME_DIR", "OCTAVO_EVENT_LOG", "OCTAVO_SERVED_MODEL_NAME", "OCTAVO_API_KEY")


class EngineError(RuntimeError):
    """The processes cannot be started, or have ended. The message holds their last lines."""


class Engine:
    """Runs `octavo serve` with a runtime directory of its own. Raises `EngineError` if it cannot be started."""

    def __init__(self, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
        try:
            directory = tempfile.mkdtemp(prefix="octavo-")
        except OSError as error:
            what = f"no directory can be made for the engine's sockets: {error}; name another place in TMPDIR"
            raise EngineError(what) from error
        self.address = f"unix:{directory}/frontend.sock"
        self._lines: deque[str] = deque(maxlen=_SHOWN_LINES)
        flags = ("--listen", self.address, "--http-listen", "", "--drain-timeout", "0", *arguments)
        command = [sys.executable, "-m", "octavo.cli.main", "serve", *flags]
        spawned: Future[subprocess.Popen[str]] = Future()
        # The system ends the processes with the thread that started them, so the thread has to live as long.
        thread = threading.Thread(
            target=_run, args=(command, _environment(environment, directory), self._lines, spawned), daemon=True
        )
        thread.start()
        try:
            self._process = spawned.result()
        except BaseException:
            shutil.rmtree(directory, ignore_errors=True)
            raise
        self._thread = thread
        self._finalizer = weakref.finalize(self, _end, self._process, directory, os.getpid())

    def wait_ready(self, timeout_s: float) -> None:
        """Waits until prompts are answered.

        Raises `EngineError` if the processes end, or after `timeout_s` seconds.
        """
        until = time.monotonic() + timeout_s
        with Client(self.address, timeout=5.0, retries=RetryPolicy(max_retries=0)) as client:
            while not self._answers(client):
                self.check()
                if time.monotonic() > until:
                    raise EngineError(f"the engine was not ready within {timeout_s:g} s{self._last_words()}")
                time.sleep(_PROBE_INTERVAL_S)

    def check(self, ending_s: float = 0.0) -> None:
        """Raises `EngineError` if the processes have ended, or do so within `ending_s` seconds."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(ending_s)
        if (status := self._process.poll()) is not None:
            self._thread.join(_PATIENCE_S)
            raise EngineError(f"the engine has ended with exit status {status}{self._last_words()}")

    def close(self) -> None:
        """Ends all processes; what they compute is lost."""
        self._finalizer()

    def _answers(self, client: Client) -> bool:
        with contextlib.suppress(OctavoError):
            return any(model.ready for model in client.models())
        return False

    def _last_words(self) -> str:
        return ". Its last lines:\n" + "\n".join(self._lines) if self._lines else ""


def _environment(settings: Mapping[str, str], directory: str) -> dict[str, str]:
    inherited = {
        name: value
        for name, value in os.environ.items()
        if not (name.startswith("OCTAVO_") and name.endswith(_NOT_OURS)) and name not in _NOT_OURS_EITHER
    }
    return {**inherited, **settings, "OCTAVO_RUNTIME_DIR": directory, PARENT_VARIABLE: str(os.getpid())}


def _run(
    command: Sequence[str],
    environment: dict[str, str],
    lines: deque[str],
    spawned: "Future[subprocess.Popen[str]]",
) -> None:
    """Starts the supervisor, and reads its output to the end."""
    try:
        process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            # Ctrl-C is for this process, which may go on with another batch.
            start_new_session=True,
        )
    except BaseException as error:
        spawned.set_exception(error)
        return
    spawned.set_result(process)
    assert process.stdout is not None
    with process.stdout:
        lines.extend(line.rstrip() for line in process.stdout)


def _end(process: "subprocess.Popen[str]", directory: str, owner: int) -> None:
    if os.getpid() != owner:
        # This process is a fork of the one that the engine belongs to.
        return
    process.terminate()
    try:
        process.wait(_PATIENCE_S)
    except subprocess.TimeoutExpired:
        # Its children die with it.
        process.send_signal(signal.SIGKILL)
        process.wait()
    shutil.rmtree(directory, ignore_errors=True)
