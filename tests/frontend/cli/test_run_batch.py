"""`octavo run-batch` against a real frontend."""

import asyncio
import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from octavo.frontend.cli.run_batch import run_batch
from octavo.frontend.config import FrontendConfig
from octavo.frontend.server import FrontendServer
from octavo.testing.fakes.fake_scheduler import FakeScheduler
from octavo.wire.requests import RejectReason


@pytest.fixture
def config(config: FrontendConfig) -> FrontendConfig:
    return dataclasses.replace(config, http_listen="127.0.0.1:0")


@pytest.fixture
def run(frontend: FrontendServer) -> Callable[..., Any]:
    """Runs the command in a thread, for the frontend lives in this one's event loop."""

    async def run(*arguments: object) -> Result:
        texts = ["--url", f"http://127.0.0.1:{frontend.http_port}", *map(str, arguments)]
        return await asyncio.to_thread(CliRunner().invoke, run_batch, texts)

    return run


def write(path: Path, *lines: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def call(custom_id: str, url: str = "/v1/completions", **body: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": {"prompt": "hi", "max_tokens": 4, **body}}


async def test_calls_of_all_routes_are_answered(scheduler: FakeScheduler, run: Any, tmp_path: Path) -> None:
    chat = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 3}
    lines = [call(str(n), prompt=f"{n}") for n in range(5)]
    lines += [{"custom_id": "chat", "method": "POST", "url": "/v1/chat/completions", "body": chat}]
    lines += [call("bad", temperature=-1), call("stream", stream=True)]
    output = tmp_path / "out.jsonl"
    done = await run(write(tmp_path / "in.jsonl", *lines), "-o", output, "--concurrency", 3)
    assert done.exit_code == 0, done.output
    assert "8 calls: 0 were answered before, 8 are now, of which 2 failed" in done.output
    found = {line["custom_id"]: line for line in map(json.loads, output.read_text().splitlines())}
    assert found.keys() == {line["custom_id"] for line in lines}
    assert found["chat"]["response"]["body"]["object"] == "chat.completion"
    assert found["bad"]["response"]["body"]["error"]["param"] == "temperature"
    assert found["stream"]["error"]["code"] == "unsupported_field"
    assert {request.priority for request in scheduler.submitted} == {-100}


async def test_the_same_command_goes_on_where_it_was(scheduler: FakeScheduler, run: Any, tmp_path: Path) -> None:
    file, output = write(tmp_path / "in.jsonl", *(call(str(n)) for n in range(4))), tmp_path / "out.jsonl"
    await run(write(tmp_path / "first.jsonl", call("0"), call("1")), "-o", output)
    output.write_bytes(output.read_bytes() + b'{"custom_id": "2", "resp')
    done = await run(file, "-o", output)
    assert "4 calls: 2 were answered before, 2 are now" in done.output
    ids = [json.loads(line)["custom_id"] for line in output.read_text().splitlines()]
    assert sorted(ids) == ["0", "1", "2", "3"]
    assert len(scheduler.submitted) == 4


async def test_what_finds_no_room_is_sent_again(scheduler: FakeScheduler, run: Any, tmp_path: Path) -> None:
    scheduler.rejection = RejectReason.QUEUE_FULL
    running = asyncio.create_task(run(write(tmp_path / "in.jsonl", call("a")), "-o", tmp_path / "out.jsonl"))
    async with asyncio.timeout(60):
        while len(scheduler.submitted) < 2:
            await asyncio.sleep(0.01)
    scheduler.rejection = None
    assert "of which 0 failed" in (await running).output


async def test_bad_lines_are_named_and_nothing_is_sent(scheduler: FakeScheduler, run: Any, tmp_path: Path) -> None:
    file = write(tmp_path / "in.jsonl", call("a"), call("a"), call("b", url="/v1/messages"))
    refused = await run(file, "-o", tmp_path / "out.jsonl")
    assert refused.exit_code == 1
    assert "line 2: custom_id 'a' is that of an earlier line" in refused.output
    assert "line 3: url is '/v1/messages'" in refused.output
    assert (scheduler.submitted, (tmp_path / "out.jsonl").exists()) == ([], False)


def test_a_server_that_is_not_there_is_named(tmp_path: Path) -> None:
    file = write(tmp_path / "in.jsonl", call("a"))
    arguments = [str(file), "-o", str(tmp_path / "out.jsonl"), "--url", "http://127.0.0.1:1"]
    refused = CliRunner().invoke(run_batch, arguments)
    assert refused.exit_code == 1
    assert "http://127.0.0.1:1 does not answer" in refused.output


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--url", "localhost"], "write http://HOST:PORT"),
        (["--ca-certificate", __file__], "https://HOST:PORT"),
        (["--url", "https://localhost", "--ca-certificate", __file__], "no certificate"),
    ],
)
def test_what_does_not_go_together_is_refused(arguments: list[str], said: str, tmp_path: Path) -> None:
    file = write(tmp_path / "in.jsonl", call("a"))
    refused = CliRunner().invoke(run_batch, [str(file), "-o", str(tmp_path / "out.jsonl"), *arguments])
    assert (refused.exit_code, said in refused.output) == (2, True), refused.output


async def test_an_output_that_is_something_else_is_left_alone(run: Any, tmp_path: Path) -> None:
    output = tmp_path / "notes.txt"
    output.write_text("my notes\n")
    refused = await run(write(tmp_path / "in.jsonl", call("a")), "-o", output)
    assert (refused.exit_code, "something else" in refused.output) == (1, True)
    assert output.read_text() == "my notes\n"
