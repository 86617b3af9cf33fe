"""NVIDIA Dynamo, unmodified, before two cells of Octavo: its frontend with the KV router, and beside each cell an
`octavo dynamo-worker`, which has the KV events of the cell's scheduler. All of it on loopback, found through files."""

import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from octavo.runtime.models.directory import model_name
from octavo.testbed.tiny_model import write_byte_model

from .checks import Service, run_checks
from .service import TcpStack, free_port

_ROOT = Path(__file__).parents[2]
_START_S = 180.0
_LOOPBACK = ("DYN_TCP_RPC_HOST", "DYN_TCP_RESPONSE_STREAM_HOST", "DYN_EVENT_PLANE_HOST", "DYN_SYSTEM_HOST")
_BLOCK = 16
# Of prompts that are token ids of the byte model.
_PROMPT_TOKENS = 200
_TURN_TOKENS = 40


@dataclass
class Cell(TcpStack):
    """A frontend, a scheduler that publishes KV events, and a worker."""

    events_port: int = field(default_factory=free_port)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.environment["OCTAVO_KV_EVENTS_ENDPOINT"] = self.events

    @property
    def events(self) -> str:
        return f"tcp://127.0.0.1:{self.events_port}"

    def start_up(self) -> None:
        self.start_all()

    def kill_all(self) -> None:
        """All that the cell is of dies at once."""
        members = [self.processes[name] for name in ("frontend", "scheduler", "worker-0")]
        for process in members:
            process.kill()
        for process in members:
            process.wait()

    @property
    def running(self) -> int:
        load = self.load()
        return load.running + load.waiting


@dataclass
class Cluster:
    """Two cells of one model, their workers in Dynamo, and Dynamo's frontends. `bin` is of Dynamo's environment."""

    bin: Path
    directory: Path
    model: Path
    cells: tuple[Cell, Cell]
    urls: dict[str, str] = field(default_factory=dict)

    @property
    def url(self) -> str:
        return self.urls["kv"]

    def run(self, cell: Cell, name: str, *arguments: str) -> "subprocess.Popen[bytes]":
        """Starts a program of Dynamo's environment; it ends with `cell`."""
        settings = {
            **os.environ,
            **dict.fromkeys(_LOOPBACK, "127.0.0.1"),
            "DYN_FILE_KV": str(self.directory / "discovery"),
            "HF_HUB_OFFLINE": "1",
            "PYTHONPATH": os.pathsep.join(str(_ROOT / each) for each in ("proto", "frontend")),
        }
        with (cell.directory / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                [str(self.bin / "python"), "-m", *arguments], env=settings, stdout=log, stderr=log, cwd=self.directory
            )
        cell.processes[name] = process
        return process

    def serve(self, mode: str) -> None:
        """Starts a frontend of Dynamo that chooses among workers by `mode`."""
        port = free_port()
        self.urls[mode] = f"http://127.0.0.1:{port}"
        where = ("--discovery-backend", "file", "--http-host", "127.0.0.1", "--http-port", str(port))
        self.run(
            self.cells[0], f"{mode}-router", "dynamo.frontend", *where, "--router-mode", mode, "--migration-limit", "3"
        )

    def join(self, cell: Cell) -> None:
        """Starts the worker that stands for a cell."""
        octavo = ("--server", cell.address, "--model", str(self.model), "--kv-events", cell.events)
        self.run(cell, "dynamo-worker", "octavo.cli.main", "dynamo-worker", *octavo, "--discovery-backend", "file")

    def num_workers(self, mode: str = "kv") -> int:
        """How many workers a frontend knows of that answer requests."""
        try:
            known = httpx.get(f"{self.urls[mode]}/health", timeout=10).json()
        except (httpx.HTTPError, ValueError):
            return 0
        return sum(each["endpoint"] == "generate" for each in known.get("instances", []))

    def wait_workers(self, count: int) -> float:
        """Waits until each frontend knows so many workers, and answers if there are any; returns after how many
        seconds."""
        began = time.monotonic()
        for mode in self.urls:
            self.cells[0].wait_for(lambda mode=mode: self.num_workers(mode) == count, _START_S)  # type: ignore[misc]
            if count:
                self.cells[0].wait_for(lambda mode=mode: self.answers(mode), _START_S)  # type: ignore[misc]
        return time.monotonic() - began

    def answers(self, mode: str) -> bool:
        try:
            return "choices" in self.post("/completions", {"prompt": "a", "max_tokens": 1}, mode)
        except AssertionError:
            return False

    @property
    def name(self) -> str:
        return model_name(self.model)

    def post(self, path: str, body: dict[str, Any], mode: str = "kv") -> dict[str, Any]:
        response = httpx.post(f"{self.urls[mode]}/v1{path}", json={"model": self.name, **body}, timeout=120)
        assert response.status_code == 200, f"{path}: {response.status_code} {response.text[:500]}"
        answer: dict[str, Any] = response.json()
        return answer

    def cached_tokens(self, token_ids: Sequence[int]) -> int:
        """How much of a prompt was found computed where it went."""
        answer = self.post("/completions", {"prompt": list(token_ids), "max_tokens": 2, "temperature": 0})
        return prompt_of(answer["usage"])[1]


def prompt_of(usage: dict[str, Any]) -> tuple[int, int]:
    """The tokens of the prompt, and how many of them were found computed."""
    return usage["prompt_tokens"], (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0


@dataclass
class Streamed:
    """A streamed completion: its text, the prompt as the last worker counted it, what of that it found computed, why it
    ended, and the seconds to its first text."""

    text: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    finish_reason: str = ""
    first_s: float = 0.0


def stream(
    cluster: Cluster, path: str, body: dict[str, Any], mode: str = "kv", begun: Callable[[], object] = lambda: None
) -> Streamed:
    """Reads a stream to its end; `begun` is called when its first text has come."""
    answer, began = Streamed(), time.monotonic()
    asked = {"model": cluster.name, **body, "stream": True, "stream_options": {"include_usage": True}}
    with httpx.stream("POST", f"{cluster.urls[mode]}/v1{path}", json=asked, timeout=120) as response:
        assert response.status_code == 200, f"{response.status_code} {response.read()[:500]!r}"
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                assert not line.startswith("event: error"), line
                continue
            chunk = json.loads(line[6:])
            assert "choices" in chunk, line
            if chunk.get("usage"):
                answer.prompt_tokens, answer.cached_tokens = prompt_of(chunk["usage"])
            for choice in chunk["choices"]:
                text = choice["text"] if "text" in choice else choice["delta"].get("content")
                if text and not answer.text:
                    answer.first_s = time.monotonic() - began
                    begun()
                answer.text += text or ""
                answer.finish_reason = choice.get("finish_reason") or answer.finish_reason
    return answer


# -- a real model -----------------------------------------------------------------------------------------------------


def chat(cluster: Cluster) -> str:
    body = {"messages": [{"role": "user", "content": "Say hello."}], "max_tokens": 12, "temperature": 0}
    answer = cluster.post("/chat/completions", body)
    assert answer["choices"][0]["finish_reason"] in ("stop", "length")
    assert answer["usage"]["completion_tokens"] <= 12
    text = answer["choices"][0]["message"]["content"]
    assert stream(cluster, "/chat/completions", body).text == text
    return repr(text)


def stop_strings_end_answers(cluster: Cluster) -> str:
    body = {"prompt": "The capital of France is", "max_tokens": 40, "temperature": 0}
    whole = cluster.post("/completions", body)["choices"][0]["text"]
    choice = cluster.post("/completions", {**body, "stop": ["answer"]})["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == (whole.partition("answer")[0], "stop")
    for cell in cluster.cells:
        cell.wait_idle()
    return repr(choice["text"])


def logprobs(cluster: Cluster) -> str:
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4, "temperature": 0}
    answer = cluster.post("/chat/completions", {**body, "logprobs": True, "top_logprobs": 2})
    tokens = answer["choices"][0]["logprobs"]["content"]
    assert "".join(token["token"] for token in tokens) == answer["choices"][0]["message"]["content"]
    for token in tokens:
        assert token["logprob"] == token["top_logprobs"][0]["logprob"], "greedy takes the likeliest"
        assert len(token["top_logprobs"]) == 2
    return f"{len(tokens)} tokens"


def seeds_decide(cluster: Cluster) -> str:
    body = {"prompt": "A word:", "max_tokens": 8, "temperature": 1.0}
    first, again, other = (
        cluster.post("/completions", {**body, "seed": seed})["choices"][0]["text"] for seed in (-3, -3, 4)
    )
    assert first == again != other
    return repr(first)


def json_schema(cluster: Cluster) -> str:
    schema = {
        "type": "object",
        "properties": {"ok": {"type": "boolean"}},
        "required": ["ok"],
        "additionalProperties": False,
    }
    body = {"messages": [{"role": "user", "content": "Is it so? Answer in JSON."}], "max_tokens": 40, "temperature": 0}
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}
    text = cluster.post("/chat/completions", {**body, "response_format": form})["choices"][0]["message"]["content"]
    assert isinstance(json.loads(text)["ok"], bool)
    return str(text)


def refusals_say_why(cluster: Cluster) -> str:
    url, said = f"{cluster.url}/v1/completions", []
    for asked, named in ({"n": 2, "temperature": 1.0}, "n is above 1"), ({"max_tokens": 100_000}, "lower it"):
        response = httpx.post(url, json={"model": cluster.name, "prompt": "a", "max_tokens": 2, **asked}, timeout=60)
        assert response.status_code == 400, response.text
        assert named in response.text
        said.append(response.json()["message"])
    return "; ".join(said)


# Documents of some 700 tokens, of which a cell holds six.
_TURNS = 4
_CONVERSATIONS = 7
_DOCUMENT_WORDS = 700
_BLOCKS = 304


def conversations(cluster: Cluster, mode: str) -> list[Streamed]:
    """Talks about documents, and returns the answers to follow-up turns, one after the other. The opening turns come at
    once, for routers spread what runs at the same time."""
    rng = random.Random(mode)
    words = ("river", "stone", "garden", "letter", "winter", "copper", "music", "window", "paper", "harbour", "silver")
    talks = [
        [{"role": "user", "content": " ".join(rng.choices(words, k=_DOCUMENT_WORDS)) + "\nName one thing."}]
        for _ in range(_CONVERSATIONS)
    ]

    def turn(talk: list[dict[str, str]]) -> Streamed:
        answer = stream(cluster, "/chat/completions", {"messages": talk, "max_tokens": 6, "temperature": 0}, mode)
        talk += [{"role": "assistant", "content": answer.text}, {"role": "user", "content": "And another?"}]
        return answer

    with ThreadPoolExecutor(_CONVERSATIONS) as pool:
        list(pool.map(turn, talks))
    return [turn(talk) for _ in range(_TURNS - 1) for talk in talks]


def measured_first_tokens(cluster: Cluster) -> str:
    """A measurement, and no test of a time: what the KV router is worth for follow-up turns, beside round robin."""
    told, medians = list[str](), dict[str, float]()
    for mode in cluster.urls:
        answers = conversations(cluster, mode)
        found = sum(answer.cached_tokens > answer.prompt_tokens / 2 for answer in answers)
        medians[mode] = statistics.median(answer.first_s for answer in answers)
        told.append(f"{mode}: p50 {medians[mode]:.2f} s, {found} of {len(answers)} turns found the one before")
    return f"{'; '.join(told)}; ratio {medians['kv'] / medians['round-robin']:.2f}"


def a_real_models_streams_move(cluster: Cluster) -> str:
    """Greedy ones go on with the same tokens. To the other cell what was generated is a part of the prompt, so that a
    seed's draws begin anew there."""
    questions = [f"Q: Why is {each}? A:" for each in ("grass green", "the sky blue", "snow white", "ice cold")]
    told, first = [], cluster.cells[0]
    for kind, fields in ("greedy", {"temperature": 0}), ("seeded", {"temperature": 1.0, "seed": 5}):
        streams = Streams.of(cluster, questions, **fields)
        answers = streams.read(first.kill_all)
        assert {answer.finish_reason for answer in answers} == {"length"}
        same = sum(answer.text == wanted.text for answer, wanted in zip(answers, streams.wanted, strict=True))
        assert kind == "seeded" or same == len(answers), f"{same} of {len(answers)} greedy streams are the same"
        moved = streams.moved(answers)
        assert moved, "no stream was on the cell"
        told.append(f"{moved} of {len(answers)} {kind} ones moved, {same} are as without the loss")
        first.start_up()
        cluster.wait_workers(2)
    return "; ".join(told)


# -- fake devices, whose tokens tell of any that is lost or twice ------------------------------------------------------


def prompts(number: int, count: int) -> list[list[int]]:
    rng = random.Random(number)
    return [[rng.randrange(250) for _ in range(_PROMPT_TOKENS)] for _ in range(count)]


def follow_up_turns_reach_their_cell(cluster: Cluster) -> str:
    """Twelve conversations in any order: a turn goes where the one before was computed."""
    rng, talks = random.Random(0), prompts(1, 12)
    hits = turns = 0
    for turn in range(6):
        rng.shuffle(talks)
        for talk in talks:
            found = cluster.cached_tokens(talk)
            turns += turn > 0
            hits += turn > 0 and found >= (len(talk) - _TURN_TOKENS) // _BLOCK * _BLOCK
            talk += [rng.randrange(250) for _ in range(_TURN_TOKENS)]
    assert hits >= 0.95 * turns, f"{hits} of {turns}"
    return f"{hits} of {turns} follow-up turns"


def leaving_frees_blocks(cluster: Cluster) -> str:
    gone = False

    class Gone(Exception):
        pass

    def leave() -> None:
        assert sum(cell.running for cell in cluster.cells) == 1
        raise Gone

    began = time.monotonic()
    try:
        stream(
            cluster, "/completions", {"prompt": prompts(2, 1)[0], "max_tokens": 900, "ignore_eos": True}, begun=leave
        )
    except Gone:
        gone, began = True, time.monotonic()
    assert gone
    for cell in cluster.cells:
        cell.wait_idle()
    return f"after {time.monotonic() - began:.2f} s"


@dataclass
class Streams:
    """Streams that run at the same time, and what they are without any trouble."""

    cluster: Cluster
    bodies: list[dict[str, Any]]
    wanted: list[Streamed]

    @classmethod
    def of(cls, cluster: Cluster, asked: Sequence[object], **fields: Any) -> "Streams":
        fields = {"max_tokens": 60, "ignore_eos": True, "temperature": 0, **fields}
        streams = cls(cluster, [{"prompt": prompt, **fields} for prompt in asked], [])
        streams.wanted = streams.read(lambda: None)
        return streams

    def read(self, trouble: Callable[[], None]) -> list[Streamed]:
        """Reads all; as soon as all have begun there is trouble."""
        begun = threading.Barrier(len(self.bodies) + 1)
        with ThreadPoolExecutor(len(self.bodies)) as pool:
            reads = [
                pool.submit(stream, self.cluster, "/completions", body, begun=lambda: begun.wait(60))
                for body in self.bodies
            ]
            begun.wait(60)
            trouble()
            return [read.result() for read in reads]

    def check(self, answers: list[Streamed]) -> None:
        for answer, wanted in zip(answers, self.wanted, strict=True):
            assert answer.finish_reason == "length"
            assert answer.text == wanted.text, "the stream is another one than without trouble"

    def moved(self, answers: list[Streamed]) -> int:
        """How many have a prompt that has grown by what was generated elsewhere."""
        pairs = zip(answers, self.wanted, strict=True)
        return sum(answer.prompt_tokens > wanted.prompt_tokens for answer, wanted in pairs)


def streams_of_a_killed_cell_go_on_elsewhere(cluster: Cluster) -> str:
    """Frontend, scheduler and worker of a cell die at once: its streams go on where they were, the others notice
    nothing, and new requests go to the other cell."""
    first, second = cluster.cells
    streams, held = Streams.of(cluster, prompts(3, 6)), list[int]()

    def kill() -> None:
        held.extend((first.running, second.running))
        first.kill_all()

    answers = streams.read(kill)
    streams.check(answers)
    assert all(held), f"the router gave the cells {held} streams"
    assert streams.moved(answers) == held[0], f"{streams.moved(answers)} of {held[0]} have moved"
    left_after = cluster.wait_workers(1)
    streams.check(streams.read(lambda: None))
    first.start_up()
    back_after = cluster.wait_workers(2)
    told = f"the worker had left after {left_after:.1f} s, and was back {back_after:.1f} s after its cell"
    return f"{held[0]} moved, {held[1]} stayed; {told}"


def a_cell_mends_itself(cluster: Cluster) -> str:
    """The only worker of a cell dies, and another comes: its streams wait for that one, while new requests go to the
    other cell."""
    first, _ = cluster.cells
    streams, held = Streams.of(cluster, prompts(8, 6)), list[int]()

    def kill() -> None:
        held.append(first.running)
        first.kill("worker-0")
        cluster.wait_workers(1)
        cluster.cached_tokens(prompts(9, 1)[0])
        first.start_named("worker-0")

    answers = streams.read(kill)
    streams.check(answers)
    assert held[0], "the router gave the cell no stream"
    assert streams.moved(answers) == 0
    back_after = cluster.wait_workers(2)
    return f"{held[0]} streams waited; the worker in Dynamo was back {back_after:.1f} s after the last"


def a_cell_that_comes_back_is_known_to_be_empty(cluster: Cluster) -> str:
    """What its scheduler had published before it died is forgotten: prompts go where they were computed since."""
    first, _ = cluster.cells
    talks = prompts(4, 40)
    for talk in talks:
        cluster.cached_tokens(talk)
    assert sum(worker.tokens_computed for worker in first.load().workers), "the router gave the cell nothing"
    first.kill_all()
    cluster.wait_workers(1)
    for talk in talks:
        cluster.cached_tokens(talk)
    first.start_up()
    cluster.wait_workers(2)
    found = sum(cluster.cached_tokens(talk) >= _PROMPT_TOKENS // _BLOCK * _BLOCK - _BLOCK for talk in talks)
    assert found >= 0.95 * len(talks), f"{len(talks) - found} of {len(talks)} prompts were sent where they are no more"
    return f"{found} of {len(talks)} prompts found"


def a_worker_that_ends_finishes_what_it_has(cluster: Cluster) -> str:
    """The streams last longer than Dynamo's own time of grace, 5 s."""
    first, _ = cluster.cells
    streams = Streams.of(cluster, prompts(6, 6), max_tokens=200)

    def end() -> None:
        first.processes["dynamo-worker"].send_signal(signal.SIGTERM)
        cluster.wait_workers(1)

    answers = streams.read(end)
    streams.check(answers)
    assert streams.moved(answers) == 0
    assert first.processes.pop("dynamo-worker").wait(60) == 0
    streams.check(streams.read(lambda: None))
    cluster.join(first)
    return f"{len(answers)} streams whole; a new one joined after {cluster.wait_workers(2):.1f} s"


MODEL_CHECKS: tuple[Callable[[Cluster], str], ...] = (
    chat,
    stop_strings_end_answers,
    logprobs,
    seeds_decide,
    json_schema,
    refusals_say_why,
    measured_first_tokens,
    a_real_models_streams_move,
)
FAKE_CHECKS: tuple[Callable[[Cluster], str], ...] = (
    follow_up_turns_reach_their_cell,
    leaving_frees_blocks,
    a_cell_mends_itself,
    streams_of_a_killed_cell_go_on_elsewhere,
    a_cell_that_comes_back_is_known_to_be_empty,
    a_worker_that_ends_finishes_what_it_has,
)


@contextmanager
def cluster_of(
    bin_directory: Path, model: Path, environment: dict[str, str], modes: Sequence[str]
) -> Iterator[Cluster]:
    with tempfile.TemporaryDirectory(prefix="octavo-") as directory, ExitStack() as held:
        root = Path(directory)
        cells = [held.enter_context(Cell(model, root / name, dict(environment))) for name in ("a", "b")]
        cluster = Cluster(bin_directory, root, model, (cells[0], cells[1]))
        for mode in modes:
            cluster.serve(mode)
        for cell in cells:
            cell.start_up()
            cluster.join(cell)
        cluster.wait_workers(2)
        yield cluster


def tried(bin_directory: Path, model: Path, environment: dict[str, str], checks: Any, *modes: str) -> int:
    with cluster_of(bin_directory, model, environment, modes) as cluster:
        failures = run_checks(checks, cluster)
        for cell in cluster.cells if failures else ():
            for name in {"dynamo-worker", "kv-router", "scheduler"} & cell.processes.keys():
                print(f"--- {cell.directory.name}/{name}.log\n{cell.log(name)[-3000:]}")
        return failures


def main() -> int:
    """The exit status."""
    service = Service.of_environment()
    bin_directory, model = Path(service.bin), Path(service.model_directory)
    cpu = {"OCTAVO_DEVICE": "cpu", "OCTAVO_THREADS": "1", "OCTAVO_NUM_BLOCKS": str(_BLOCKS)}
    failures = tried(bin_directory, model, cpu, MODEL_CHECKS, "kv", "round-robin")
    with tempfile.TemporaryDirectory(prefix="octavo-") as directory:
        byte_model = Path(directory) / "byte-model"
        write_byte_model(byte_model)
        fake = {"OCTAVO_DEVICE": "fake", "OCTAVO_FAKE_STEP_MS": "50"}
        failures += tried(bin_directory, byte_model, fake, FAKE_CHECKS, "kv")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
