"""The README's examples work as they stand there, against real processes."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from octavo.testbed.stack import Stack, free_address

from .conftest import StartStack

pytestmark = pytest.mark.system

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
CALLING = README.split("\n## Calling it\n")[1].split("\n## ")[0]
SHELL, OPENAI, GRPC = re.findall(r"^```(?:console|python)\n(.*?)^```$", CALLING, re.MULTILINE | re.DOTALL)


@pytest.fixture
def addresses() -> dict[str, str]:
    """The addresses of this test's processes, by those that the README gives."""
    return {"127.0.0.1:8000": free_address(), "127.0.0.1:50051": free_address()}


@pytest.fixture
def stack(new_stack: StartStack, addresses: dict[str, str]) -> Stack:
    http, grpc = addresses.values()
    stack = new_stack(OCTAVO_SERVED_MODEL_NAME="smollm2-135m-instruct")
    stack.start("scheduler")
    stack.start("frontend", OCTAVO_HTTP_LISTEN=http, OCTAVO_LISTEN=grpc)
    stack.start("worker")
    stack.wait_for(lambda: is_ready(http), 120)
    return stack


def is_ready(address: str) -> bool:
    """Returns whether the frontend there would serve a request; its gRPC port opens before its HTTP port."""
    try:
        return httpx.get(f"http://{address}/ready", trust_env=False).is_success
    except httpx.TransportError:
        return False


def run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def placed(example: str, addresses: dict[str, str]) -> str:
    """The example with the addresses of this test."""
    [address] = [address for address in addresses if address in example]
    return example.replace(address, addresses[address])


@pytest.mark.parametrize("example", [OPENAI, GRPC], ids=["openai", "grpc"])
def test_an_example_in_python_prints_an_answer(stack: Stack, addresses: dict[str, str], example: str) -> None:
    assert run([sys.executable, "-c", placed(example, addresses)])
    stack.assert_alive()


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs the curl command")
def test_the_command_for_curl_is_answered(stack: Stack, addresses: dict[str, str]) -> None:
    command = placed(SHELL, addresses).removeprefix("$ ").strip()
    assert '"finish_reason":' in run(["bash", "-ec", f"{command} --fail-with-body --silent"])
