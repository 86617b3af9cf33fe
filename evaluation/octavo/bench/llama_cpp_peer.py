"""Runs llama.cpp on the same weights, as a child (`octavo.bench.child`): `PYTHON llama_cpp_peer.py MODEL TYPE THREADS`
in the environment that `make bench-peers` makes. TYPE is llama-quantize's name of a format.

The GGUF file is made once by llama.cpp's own programs, and kept in that environment. One stream and prompts are
measured by its llama-bench, which computes and nothing else: tokens are neither sampled nor sent. Requests that run
side by side are sent to its llama-server, which answers each in one piece when it is done.
"""

import ctypes
import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

# The environment of `make bench-peers` has no Octavo.
sys.path.insert(0, str(Path(__file__).parents[2]))

from octavo.bench.child import Answer, serve
from octavo.bench.measurement import (
    OTHERS,
    CpuMeter,
    Measurement,
    TokenTimes,
    machine_cpu_s,
    measured,
    peak_memory,
)
from octavo.bench.peer_models import kept
from octavo.bench.workloads import Case, CaseRequest

# Where `make bench-peers` has built it.
_BUILT = Path(sys.prefix) / "llama.cpp"
_SOURCE, _PROGRAMS = _BUILT / "source" / "vendor" / "llama.cpp", _BUILT / "native" / "bin"
# The most requests side by side, and the longest of them.
_SLOTS, _SLOT_TOKENS = 64, 1024
_START_S = 120.0
# prctl(2)'s PR_SET_PDEATHSIG.
_SET_PARENT_DEATH_SIGNAL = 1
_ABOUT = (
    "llama-bench (a, c) and llama-server -np 64 (b), version {version}, -fa on, the programs' defaults else: weights"
    " repacked where there is a layout for them, keys and values f16, -b 2048 -ub 512"
)


def gguf_file(model: Path, kind: str) -> Path:
    """Returns `model` as a GGUF file whose weights are of `kind`."""

    def convert(to: Path) -> None:
        _run(sys.executable, _SOURCE / "convert_hf_to_gguf.py", model, "--outtype", kind.lower(), "--outfile", to)

    def quantize(to: Path) -> None:
        _run(_PROGRAMS / "llama-quantize", gguf_file(model, "BF16"), to, kind)

    return kept(model, f"{kind}.gguf", convert if kind in ("BF16", "F32") else quantize)


def _run(*command: str | Path) -> str:
    """Returns what a program prints. Raises `RuntimeError` with its last words where it fails."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{Path(command[0]).name} ended with status {done.returncode}: {done.stderr[-2000:]}")
    return done.stdout


class LlamaCppPeer:
    """Runs llama.cpp's programs on the GGUF file `path`. The server starts with the first case that it is asked;
    `kv_bytes` are those of its keys and values."""

    def __init__(self, path: Path, kv_bytes: int, threads: int) -> None:
        self._path = path
        self._kv_bytes = kv_bytes
        self._threads = threads
        self.server: LlamaServer | None = None

    def run(self, case: Case) -> Measurement:
        """Measures a case. Raises `ValueError` for one that llama.cpp is not asked for here."""
        match case.name:
            case "a":
                return self._stream(case)
            case "c":
                return self._prompts(case)
            case "b":
                self.server = self.server or LlamaServer(self._path, self._threads)
                return self.server.run(case)
        raise ValueError(f"case {case.name} is not measured on llama.cpp; a, b and c are")

    def memory(self) -> dict[str, int]:
        """Returns the peak of the server, or of llama-bench where there is none."""
        if self.server is not None:
            return {"peak": peak_memory(self.server.pid), "kv": self._kv_bytes}
        return {"peak": 1024 * resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss}

    def about(self) -> str:
        """Says which version this is, and how it is set."""
        said = subprocess.run([_PROGRAMS / "llama-server", "--version"], capture_output=True, text=True, check=False)
        found = re.search(r"version: (\S+)", said.stdout + said.stderr)
        return _ABOUT.format(version=found[1] if found else "unknown")

    def _stream(self, case: Case) -> Measurement:
        (job,) = case.jobs
        length, new, meter = len(job.prompt_token_ids), job.num_tokens, _BenchMeter()
        (first_s,) = self._bench("-p", length, "-n", 0, "-r", 1)
        (rest_s,) = self._bench("-p", 0, "-n", new, "-d", length, "-r", 1)
        stream = TokenTimes()
        stream.arrived(1, first_s)
        # It times as many tokens as are asked for, where the first of a stream is the prompt's.
        stream.arrived(new - 1, first_s + rest_s * (new - 1) / new)
        return measured(case, stream.last, [stream], new, cpu_s=meter.cpu_s(stream.last))

    def _prompts(self, case: Case) -> Measurement:
        (length,) = {len(job.prompt_token_ids) for job in case.jobs}
        meter, streams, at = _BenchMeter(), [TokenTimes() for _ in case.jobs], 0.0
        for stream, seconds in zip(streams, self._bench("-p", length, "-n", 0, "-r", len(case.jobs)), strict=True):
            at += seconds
            stream.arrived(1, at)
        return measured(case, at, streams, len(case.jobs), cpu_s=meter.cpu_s(at))

    def _bench(self, *arguments: str | int) -> list[float]:
        """Returns the seconds of each repetition of llama-bench's one test."""
        threads = ("-t", str(self._threads))
        said = _run(
            _PROGRAMS / "llama-bench", "-m", self._path, *threads, "-fa", "on", "-o", "json", *map(str, arguments)
        )
        (test,) = json.loads(said)
        return [nanoseconds / 1e9 for nanoseconds in test["samples_ns"]]


class _BenchMeter:
    """Measures the CPU time of llama-bench, and of all others while it ran, which is longer than what it reports."""

    def __init__(self) -> None:
        self._began, self._bench, self._machine = time.perf_counter(), _children_cpu_s(), machine_cpu_s()

    def cpu_s(self, reported_s: float) -> dict[str, float]:
        """Returns the CPU seconds, those of others as if they had come in the `reported_s` seconds alone."""
        bench = _children_cpu_s() - self._bench
        # The machine's count may be some ticks behind.
        share = max(0.0, machine_cpu_s() - self._machine - bench) / (time.perf_counter() - self._began)
        return {"llama-bench": bench, OTHERS: share * reported_s}


def _children_cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


class LlamaServer:
    """Runs llama-server and sends it requests. It ends with this process."""

    def __init__(self, path: Path, threads: int) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self._address = f"http://127.0.0.1:{port}"
        options: list[str | int] = ["-t", threads, "-tb", threads, "-np", _SLOTS, "-c", _SLOTS * _SLOT_TOKENS]
        # What it would keep of prompts, and show of itself, is of no use here.
        options += ["-fa", "on", "--cache-ram", 0, "--no-slots", "--no-ui", "--host", "127.0.0.1", "--port", port]
        command: list[str | Path] = [_PROGRAMS / "llama-server", "-m", path, *map(str, options)]
        self._process = subprocess.Popen(
            command, stdout=sys.stderr, stdin=subprocess.DEVNULL, preexec_fn=_end_with_parent
        )
        deadline = time.monotonic() + _START_S
        while not self._is_ready():
            if self._process.poll() is not None:
                raise RuntimeError(f"llama-server ended with status {self._process.returncode} while it started")
            if time.monotonic() > deadline:
                raise RuntimeError(f"llama-server was not ready within {_START_S:.0f} s")
            time.sleep(0.05)

    @property
    def pid(self) -> int:
        return self._process.pid

    def run(self, case: Case) -> Measurement:
        """Sends all of the case's requests at once."""
        meter = CpuMeter({"server": self.pid, "client": os.getpid()})
        began = time.perf_counter()
        with ThreadPoolExecutor(len(case.jobs)) as pool:
            streams = list(pool.map(lambda job: self._ask(job, began), case.jobs))
        return measured(case, time.perf_counter() - began, streams, case.num_output_tokens, cpu_s=meter.cpu_s())

    def _ask(self, job: CaseRequest, began: float) -> TokenTimes:
        body = {
            "prompt": job.prompt_token_ids,
            "n_predict": job.num_tokens,
            "ignore_eos": True,
            "cache_prompt": False,
            # The cheapest way to the likeliest token.
            "samplers": ["top_k"],
            "top_k": 1,
        }
        answer = self._post("/completion", body)
        stream = TokenTimes()
        stream.arrived(1, answer["timings"]["prompt_ms"] / 1000)
        stream.arrived(answer["tokens_predicted"] - 1, time.perf_counter() - began)
        return stream

    def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        request = urllib.request.Request(
            self._address + path, json.dumps(body).encode(), {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request) as response:
            answer: dict[str, Any] = json.load(response)
        return answer

    def _is_ready(self) -> bool:
        try:
            urllib.request.urlopen(f"{self._address}/health").close()
        except (urllib.error.URLError, ConnectionError):
            return False
        return True

    def close(self) -> None:
        """Ends the server."""
        with self._process:
            self._process.kill()


def _end_with_parent() -> None:
    """Asks the kernel to kill this process once its parent has ended, however it does."""
    ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)


def _kv_bytes(model: Path) -> int:
    """Counts the bytes of the server's keys and values, in 16 bits."""
    config = json.loads((model / "config.json").read_bytes())
    heads = config.get("num_key_value_heads") or config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return 2 * 2 * _SLOTS * _SLOT_TOKENS * int(config["num_hidden_layers"] * heads * head_dim)


def _answers(model: Path, kind: str, threads: int) -> dict[str, Answer]:
    path = gguf_file(model, kind)
    peer = LlamaCppPeer(path, _kv_bytes(model), threads)
    return {
        "file": lambda _: str(path),
        "about": lambda _: peer.about(),
        "run": lambda case: peer.run(Case.from_json(case)).to_json(),
        "memory": lambda _: peer.memory(),
        "profile": lambda _: {},
    }


if __name__ == "__main__":
    sys.exit(serve(lambda: _answers(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))))
