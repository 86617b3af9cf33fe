"""The terminal's commands against a real frontend, as processes and in place."""

import asyncio
import os
import pty
import socketserver
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from octavo.cli.main import main
from octavo.frontend.cli.client import chat, generate, health
from octavo.frontend.server import FrontendServer
from octavo.testing.fakes.fake_scheduler import FakeScheduler
from octavo.wire.sampling import BeamSearch, EarlyStopping


@pytest.fixture
def invoke(frontend: FrontendServer) -> Callable[..., Any]:
    """Runs a command in a thread, for the frontend lives in this one's event loop."""

    async def run(command: Any, *arguments: str, typed: str | None = None) -> Result:
        environment = {"OCTAVO_SERVER": f"127.0.0.1:{frontend.port}"}
        return await asyncio.to_thread(CliRunner().invoke, command, arguments, input=typed, env=environment)

    return run


@dataclass
class Terminal:
    """A command on a terminal of its own; `master` is the other side of it."""

    process: asyncio.subprocess.Process
    master: int
    shown: str = ""

    def type(self, keys: str) -> None:
        os.write(self.master, keys.encode())

    async def until(self, text: str) -> None:
        """Takes what is shown, up to the text."""
        while text not in self.shown:
            self.shown += await self._read()
        self.shown = self.shown.partition(text)[2]

    async def rest(self) -> str:
        """What is shown until the command ends."""
        # Linux says so where nobody holds the other side any longer.
        with suppress(OSError):
            while part := await self._read():
                self.shown += part
        return self.shown

    async def _read(self) -> str:
        return (await asyncio.wait_for(asyncio.to_thread(os.read, self.master, 4096), 60)).decode()


@asynccontextmanager
async def on_terminal(*arguments: str, **environment: str) -> AsyncIterator[Terminal]:
    master, slave = pty.openpty()
    try:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "octavo.cli.main", *arguments),
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env={**os.environ, "TERM": "xterm", **environment},
        )
    finally:
        os.close(slave)
    try:
        yield Terminal(process, master)
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()
        os.close(master)


async def test_generate_prints_the_text(scheduler: FakeScheduler, frontend: FrontendServer, invoke: Any) -> None:
    ids = frontend.generation.tokenizer.encode("an answer STOP")
    scheduler.answer = lambda request, index: ids
    result = await invoke(generate, "hi", "--max-new-tokens", "14", "--seed", "5", "--stop", "STOP", "--top-p", "0.5")
    assert (result.exit_code, result.stdout) == (0, "an answer \n")
    sampling = scheduler.submitted[0].sampling
    assert (sampling.seed, sampling.top_p, sampling.max_tokens) == (5, 0.5, 14)


async def test_nothing_is_kept_for_a_command_that_is_killed(
    scheduler: FakeScheduler, frontend: FrontendServer, invoke: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler.answer = lambda request, index: [40, 41, 42]
    asked: list[float] = []
    generate_as_ever = frontend.generation.generate

    def note(request: Any, *rest: Any, **settings: Any) -> Any:
        asked.append(request.detach_grace_s)
        return generate_as_ever(request, *rest, **settings)

    monkeypatch.setattr(frontend.generation, "generate", note)
    for command in (generate, chat):
        result = await invoke(command, "hi", "--max-new-tokens", "3")
        assert result.exit_code == 0, result.output
    assert asked == [0, 0]


@pytest.mark.parametrize("arguments", [(), ("-",)])
async def test_generate_reads_the_prompt_from_stdin(
    scheduler: FakeScheduler, frontend: FrontendServer, invoke: Any, arguments: tuple[str, ...]
) -> None:
    scheduler.answer = lambda request, index: [40]
    result = await invoke(generate, *arguments, "--max-new-tokens", "1", typed="two\nlines\n\n")
    assert result.exit_code == 0, result.output
    decode = frontend.generation.tokenizer.decode
    assert decode(scheduler.submitted[0].prompt_token_ids, skip_special_tokens=True) == "two\nlines\n"


async def test_generate_expects_what_a_file_says(scheduler: FakeScheduler, invoke: Any, tmp_path: Path) -> None:
    scheduler.answer = lambda request, index: [40]
    (tmp_path / "expected").write_text("hi", encoding="utf-8")
    result = await invoke(generate, "x", "--max-new-tokens", "1", "--prediction", str(tmp_path / "expected"))
    assert result.exit_code == 0, result.output
    assert scheduler.submitted[0].predicted_token_ids == [71, 72]


def test_generate_says_what_is_wrong_with_a_prediction(tmp_path: Path) -> None:
    (tmp_path / "latin").write_bytes(b"\xff")
    result = CliRunner().invoke(generate, ["x", "--prediction", str(tmp_path / "latin")])
    assert result.exit_code == 2
    assert "latin cannot be read as UTF-8 text" in result.output


@pytest.mark.parametrize(
    ("typed", "fault"), [(b"", "stdin says nothing"), (b"\n", "stdin says nothing"), (b"\xff", "no UTF-8 text")]
)
def test_generate_says_what_is_wrong_with_stdin(typed: bytes, fault: str) -> None:
    result = CliRunner().invoke(generate, input=typed)
    assert result.exit_code == 2
    assert fault in result.stderr.splitlines()[-1]


async def test_generate_does_not_wait_for_what_nobody_was_asked_to_type() -> None:
    async with on_terminal("generate") as terminal:
        assert "give TEXT, or pipe it in" in await terminal.rest()
        assert await terminal.process.wait() == 2


async def test_generate_prints_ids(scheduler: FakeScheduler, invoke: Any) -> None:
    scheduler.answer = lambda request, index: [40, 41, 42]
    result = await invoke(generate, "hi", "--max-new-tokens", "3", "--ids")
    assert result.stdout.split() == ["40", "41", "42"]


async def test_generate_prints_sequences_one_after_another(
    scheduler: FakeScheduler, frontend: FrontendServer, invoke: Any
) -> None:
    answers = [frontend.generation.tokenizer.encode(text) for text in ("first", "other")]
    scheduler.answer = lambda request, index: answers[index]
    scheduler.tokens_per_delta = 2
    result = await invoke(generate, "hi", "--max-new-tokens", "5", "--n", "2")
    assert (result.exit_code, result.stdout) == (0, "--- sequence 1 ---\nfirst\n--- sequence 2 ---\nother\n")


async def test_generate_prints_the_best_with_their_logprobs(scheduler: FakeScheduler, invoke: Any) -> None:
    answers = [[40, 41], [9, 18], [40, 9]]
    scheduler.answer = lambda request, index: answers[index]
    arguments = ("--max-new-tokens", "2", "--n", "2", "--best-of", "3", "--ids", "--logprobs", "1")
    result = await invoke(generate, "hi", *arguments)
    assert result.stdout == (
        "--- sequence 1, logprob -0.2500 ---\n9 18 \n"
        "       9   -0.1250  rank 1      0 -0.1250\n      18   -0.1250  rank 1      0 -0.1250\n"
        "--- sequence 2, logprob -0.7500 ---\n40 9 \n"
        "      40   -0.6250  rank 2      0 -0.1250\n       9   -0.1250  rank 1      0 -0.1250\n"
    )


async def test_generate_prints_logprobs_after_what_it_streams(scheduler: FakeScheduler, invoke: Any) -> None:
    scheduler.answer = lambda request, index: [40]
    result = await invoke(generate, "hi", "--max-new-tokens", "1", "--ids", "--logprobs", "0")
    assert result.stdout == "40 \n      40   -0.6250  rank 2\n"


async def test_generate_passes_on_what_it_is_told(scheduler: FakeScheduler, invoke: Any) -> None:
    scheduler.pinned = {"story": [5]}
    arguments = ("--max-new-tokens", "2", "--priority", "-3", "--pinned-prefix", "story")
    result = await invoke(generate, "hi", *arguments, "--n", "2", "--beam-width", "3", "--length-penalty", "0.5")
    assert result.exit_code == 0, result.stderr
    request = scheduler.submitted[0]
    assert (request.priority, request.prompt_token_ids[0]) == (-3, 5)
    assert request.sampling.beam == BeamSearch(3, 0.5, EarlyStopping.OFF)
    assert result.stdout.count("--- sequence ") == 2


async def test_several_sequences_that_fail_are_one_line_too(scheduler: FakeScheduler, invoke: Any) -> None:
    result = await invoke(generate, "hi", "--n", "17")
    assert result.exit_code == 1
    assert result.stderr == ("Error: num_sequences is 17, but it must be between 1 and 16 [INVALID_ARGUMENT]\n")


def test_a_length_penalty_needs_a_beam_search() -> None:
    result = CliRunner().invoke(generate, ["hi", "--length-penalty", "2"])
    assert result.exit_code == 2
    assert "give --beam-width too" in result.stderr


async def test_an_error_is_one_line(scheduler: FakeScheduler, invoke: Any) -> None:
    result = await invoke(generate, "hi", "--temperature", "-1")
    assert result.exit_code == 1
    assert result.stderr == (
        "Error: temperature is -1.0, but it must be between 0 (greedy) and 100 [INVALID_ARGUMENT]\n"
    )


async def test_chat_keeps_the_conversation(scheduler: FakeScheduler, frontend: FrontendServer, invoke: Any) -> None:
    ids = frontend.generation.tokenizer.encode("fine<|im_end|>")
    scheduler.answer = lambda request, index: ids
    result = await invoke(chat, typed="how are you?\n\nreally?\n")
    assert result.exit_code == 0
    assert result.stdout.count("fine") == 2
    decode = frontend.generation.tokenizer.decode
    assert decode(scheduler.submitted[1].prompt_token_ids, skip_special_tokens=True) == (
        "user\nhow are you?\nassistant\nfine\nuser\nreally?\nassistant\n"
    )


async def test_chat_has_commands(scheduler: FakeScheduler, frontend: FrontendServer, invoke: Any) -> None:
    ids = frontend.generation.tokenizer.encode("fine<|im_end|>")
    scheduler.answer = lambda request, index: ids
    lines = ("a", "/system be brief", "b", "/reset", "c", "/system", "//d", "/help", "/resett")
    result = await invoke(chat, typed="".join(f"{line}\n" for line in lines))
    assert result.exit_code == 0, result.output
    decode = frontend.generation.tokenizer.decode
    told = [decode(request.prompt_token_ids, skip_special_tokens=True) for request in scheduler.submitted]
    assert [text.removesuffix("assistant\n") for text in told] == [
        "user\na\n",
        "system\nbe brief\nuser\na\nassistant\nfine\nuser\nb\n",
        "system\nbe brief\nuser\nc\n",
        "user\nc\nassistant\nfine\nuser\n/d\n",
    ]
    for shown in ("the conversation begins anew", "system prompt: be brief", "system prompt: none", "/reset  "):
        assert shown in result.stderr
    assert result.stderr.endswith("there is no command /resett; /help lists them, and // sends a slash\n")


async def test_chat_on_a_terminal_edits_lines_and_remembers_them(
    scheduler: FakeScheduler, frontend: FrontendServer, tmp_path: Path
) -> None:
    ids = frontend.generation.tokenizer.encode("fine<|im_end|>")
    scheduler.answer = lambda request, index: ids
    decode = frontend.generation.tokenizer.decode
    address, history = f"127.0.0.1:{frontend.port}", tmp_path / "cache" / "chat_history"
    # Left, then what was forgotten; in the next talk, up; and an error between that ends nothing.
    for keys in ("helo\x1b[Dl\n", "\x1b[A again\n"):
        async with on_terminal("chat", "--server", address, OCTAVO_CACHE=str(history.parent)) as terminal:
            await terminal.until("> ")
            terminal.type(keys)
            await terminal.until("fine")
            await terminal.until("> ")
            terminal.type("\x04")
            await terminal.rest()
            assert await terminal.process.wait() == 0
        assert history.stat().st_mode & 0o777 == 0o600
    told = [decode(request.prompt_token_ids, skip_special_tokens=True) for request in scheduler.submitted]
    assert [text.splitlines()[1] for text in told] == ["hello", "hello again"]


async def test_an_error_does_not_end_a_talk_on_a_terminal(tmp_path: Path) -> None:
    async with on_terminal("chat", "--server", f"unix:{tmp_path}/no.sock", OCTAVO_CACHE=str(tmp_path)) as terminal:
        for _ in range(2):
            await terminal.until("> ")
            terminal.type("hi\n")
            await terminal.until("[UNAVAILABLE]")
        await terminal.until("> ")
        terminal.type("\x04")
        await terminal.rest()
        assert await terminal.process.wait() == 0


async def test_chat_with_one_message(scheduler: FakeScheduler, frontend: FrontendServer, invoke: Any) -> None:
    ids = frontend.generation.tokenizer.encode("fine<|im_end|>")
    scheduler.answer = lambda request, index: ids
    assert (await invoke(chat, "hello", "--system", "be brief")).stdout == "fine\n"


async def test_health_says_what_it_finds(scheduler: FakeScheduler, frontend: FrontendServer, invoke: Any) -> None:
    address = f"127.0.0.1:{frontend.port}"
    result = await invoke(health)
    assert (result.exit_code, result.stdout) == (0, f"{address}: SERVING\n")
    scheduler.replicas = 0
    result = await invoke(health, address, "--service", "octavo.v1.Nothing")
    assert (result.exit_code, result.stderr) == (
        1,
        f"Error: {address}: it has no service 'octavo.v1.Nothing' [NOT_FOUND]\n",
    )


async def test_health_of_a_service_that_is_not_ready(frontend: FrontendServer, invoke: Any) -> None:
    result = await invoke(health, "--service", "octavo.v1.GenerationService")
    assert (result.exit_code, result.stdout) == (1, f"127.0.0.1:{frontend.port}: NOT_SERVING\n")


def test_health_of_nobody(tmp_path: Any) -> None:
    result = CliRunner().invoke(health, [f"unix:{tmp_path}/nobody.sock", "--timeout", "0.2"])
    assert result.exit_code == 1
    assert result.stderr.count("\n") == 1
    assert "nobody.sock" in result.stderr


@pytest.mark.parametrize("command", [["generate", "hi", "--server"], ["chat", "hi", "--server"], ["health"]])
def test_what_is_no_octavo_server_is_said_to_be_none(command: list[str]) -> None:
    class Other(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            # The client may be gone.
            with suppress(OSError):
                self.request.recv(1)
                self.request.sendall(b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\n\r\n")

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Other) as server:
        serving = threading.Thread(target=server.serve_forever)
        serving.start()
        address = f"127.0.0.1:{server.server_address[1]}"
        result = CliRunner().invoke(main, [*command, address])
        server.shutdown()
        serving.join()
    assert (result.exit_code, result.stdout) == (1, "")
    [line] = result.stderr.splitlines()
    assert line.startswith(f"Error: {address}: it answers in HTTP/1, not in gRPC: Octavo serves the two on different")


@pytest.mark.parametrize(
    ("command", "name"),
    [(["generate", "hi", "--server"], "--server"), (["chat", "--server"], "--server"), (["health"], "ADDRESS")],
)
@pytest.mark.parametrize("address", ["", " "])
def test_an_empty_address_is_refused_before_grpc_sees_it(command: list[str], name: str, address: str) -> None:
    # In a process, for the library's core writes past Python.
    code = "from octavo.cli.main import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code, *command, address], capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f"Error: {name} is empty; write host:port or unix:path\n"


def test_clients_start_without_a_tokenizer() -> None:
    loaded = "{'transformers', 'tokenizers', 'torch'} & set(sys.modules)"
    code = f"import sys, octavo.frontend.cli.client; sys.exit(bool({loaded}))"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
