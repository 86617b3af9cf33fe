"""The terminal's commands against a real frontend, as processes and in place."""

import asyncio
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
from click.testing import CliRunner, Result

from octavo.frontend.client_cli import chat, generate, health
from octavo.frontend.server import FrontendServer
from octavo.testing.fake_scheduler import FakeScheduler


@pytest.fixture
def invoke(frontend: FrontendServer) -> Callable[..., Any]:
    """Runs a command in a thread, for the frontend lives in this one's event loop."""

    async def run(command: Any, *arguments: str, typed: str | None = None) -> Result:
        environment = {"OCTAVO_SERVER": f"127.0.0.1:{frontend.port}"}
        return await asyncio.to_thread(CliRunner().invoke, command, arguments, input=typed, env=environment)

    return run


async def test_generate_prints_the_text(scheduler: FakeScheduler, frontend: FrontendServer, invoke: Any) -> None:
    ids = frontend.generation.tokenizer.encode("an answer STOP")
    scheduler.answer = lambda request: ids
    result = await invoke(generate, "hi", "--max-new-tokens", "14", "--seed", "5", "--stop", "STOP", "--top-p", "0.5")
    assert (result.exit_code, result.stdout) == (0, "an answer \n")
    sampling = scheduler.submitted[0].sampling
    assert (sampling.seed, sampling.top_p, sampling.max_tokens) == (5, 0.5, 14)


async def test_generate_prints_ids(scheduler: FakeScheduler, invoke: Any) -> None:
    scheduler.answer = lambda request: [40, 41, 42]
    result = await invoke(generate, "hi", "--max-new-tokens", "3", "--ids")
    assert result.stdout.split() == ["40", "41", "42"]


async def test_an_error_is_one_line(scheduler: FakeScheduler, invoke: Any) -> None:
    result = await invoke(generate, "hi", "--temperature", "-1")
    assert result.exit_code == 1
    assert result.stderr == (
        "Error: temperature is -1.0, but it must be between 0 (greedy) and 100 [INVALID_ARGUMENT]\n"
    )


async def test_chat_keeps_the_conversation(scheduler: FakeScheduler, frontend: FrontendServer, invoke: Any) -> None:
    ids = frontend.generation.tokenizer.encode("fine<|im_end|>")
    scheduler.answer = lambda request: ids
    result = await invoke(chat, typed="how are you?\n\nreally?\n")
    assert result.exit_code == 0
    assert result.stdout.count("fine") == 2
    decode = frontend.generation.tokenizer.decode
    assert decode(scheduler.submitted[1].prompt_token_ids, skip_special_tokens=True) == (
        "user\nhow are you?\nassistant\nfine\nuser\nreally?\nassistant\n"
    )


async def test_chat_with_one_message(scheduler: FakeScheduler, frontend: FrontendServer, invoke: Any) -> None:
    ids = frontend.generation.tokenizer.encode("fine<|im_end|>")
    scheduler.answer = lambda request: ids
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


def test_clients_start_without_a_tokenizer() -> None:
    loaded = "{'transformers', 'tokenizers', 'torch'} & set(sys.modules)"
    code = f"import sys, octavo.frontend.client_cli; sys.exit(bool({loaded}))"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=20)
