"""Drives Octavo with an unmodified gateway: smg, in front of vllm.grpc.engine.VllmEngine.

    python tests/clients/smg.py /path/to/smg

Prints a line for every check, and exits with 1 if one has failed. Takes the bundled model where it is prepared.
"""

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import openai

from octavo.testing.stack import Stack
from octavo.testing.tiny_model import write_byte_model
from octavo.wire.model_directory import BUNDLED_MODEL, ModelDirectoryError, model_name, resolve_model

_START_S = 120.0
_SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}},
    "required": ["ok"],
    "additionalProperties": False,
}


@dataclass
class TcpStack(Stack):
    """A stack whose frontend listens where a gateway can reach it."""

    port: int = field(default_factory=lambda: free_port())

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"


@dataclass(frozen=True)
class Gateway:
    """A running smg, and how it is talked to."""

    url: str
    model: str
    stack: Stack

    @property
    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=120)

    def post(self, path: str, body: dict[str, Any]) -> Any:
        response = httpx.post(f"{self.url}{path}", json=body, timeout=120)
        assert response.status_code == 200, f"{path}: {response.status_code} {response.text[:500]}"
        return response.json()


Check = Callable[[Gateway], str]


def chat(gateway: Gateway) -> str:
    answer = gateway.client.chat.completions.create(
        model=gateway.model, messages=[{"role": "user", "content": "Say hello."}], max_tokens=8, temperature=0
    )
    assert answer.usage is not None
    assert answer.usage.completion_tokens <= 8
    assert answer.choices[0].finish_reason in ("stop", "length")
    return repr(answer.choices[0].message.content)


def chat_stream(gateway: Gateway) -> str:
    def ask(**options: Any) -> Any:
        return gateway.client.chat.completions.create(
            model=gateway.model,
            messages=[{"role": "user", "content": "Count to five."}],
            max_tokens=12,
            temperature=0,
            **options,
        )

    chunks = list(ask(stream=True, stream_options={"include_usage": True}))
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    reasons = [choice.finish_reason for chunk in chunks for choice in chunk.choices if choice.finish_reason]
    assert text == ask().choices[0].message.content
    assert len(reasons) == 1
    assert chunks[-1].usage.completion_tokens <= 12
    return f"{len(chunks)} chunks"


def two_choices(gateway: Gateway) -> str:
    answer = gateway.client.chat.completions.create(
        model=gateway.model,
        messages=[{"role": "user", "content": "A word?"}],
        max_tokens=8,
        temperature=1.0,
        seed=3,
        n=2,
    )
    assert [choice.index for choice in answer.choices] == [0, 1]
    return repr([choice.message.content for choice in answer.choices])


def completions(gateway: Gateway) -> str:
    answer = gateway.client.completions.create(
        model=gateway.model, prompt="The capital of France is", max_tokens=8, temperature=0
    )
    chunks = gateway.client.completions.create(
        model=gateway.model, prompt="The capital of France is", max_tokens=8, temperature=0, stream=True
    )
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == answer.choices[0].text
    return repr(answer.choices[0].text)


def logprobs(gateway: Gateway) -> str:
    answer = gateway.client.chat.completions.create(
        model=gateway.model,
        messages=[{"role": "user", "content": "Hi"}],
        max_tokens=4,
        temperature=0,
        logprobs=True,
        top_logprobs=2,
    )
    content = answer.choices[0].logprobs and answer.choices[0].logprobs.content
    assert content
    assert all(token.logprob <= 0 and len(token.top_logprobs) == 2 for token in content)
    return f"{len(content)} tokens"


def responses(gateway: Gateway) -> str:
    answer = gateway.client.responses.create(model=gateway.model, input="Say hello.", max_output_tokens=16)
    assert answer.status in ("completed", "incomplete")
    kinds = [
        event.type
        for event in gateway.client.responses.create(
            model=gateway.model, input="Say hello.", max_output_tokens=16, stream=True
        )
    ]
    assert kinds[0] == "response.created"
    assert kinds[-1] in ("response.completed", "response.incomplete")
    return repr(answer.output_text)


def anthropic_messages(gateway: Gateway) -> str:
    body = {"model": gateway.model, "max_tokens": 8, "messages": [{"role": "user", "content": "Say hello."}]}
    answer = gateway.post("/v1/messages", body)
    assert (answer["type"], answer["role"]) == ("message", "assistant")
    assert answer["usage"]["output_tokens"] <= 8
    return repr(answer["content"])


def tokenize(gateway: Gateway) -> str:
    answer = gateway.post("/v1/tokenize", {"model": gateway.model, "prompt": "hello world"})
    tokens = answer["tokens"]
    text = gateway.post("/v1/detokenize", {"model": gateway.model, "tokens": tokens})["text"]
    assert text == "hello world"
    return f"{len(tokens)} tokens"


def json_schema(gateway: Gateway) -> str:
    answer = gateway.client.chat.completions.create(
        model=gateway.model,
        messages=[{"role": "user", "content": "Is it so? Answer in JSON."}],
        max_tokens=64,
        temperature=0,
        response_format={"type": "json_schema", "json_schema": {"name": "answer", "schema": _SCHEMA, "strict": True}},
    )
    content = json.loads(answer.choices[0].message.content or "")
    assert isinstance(content["ok"], bool)
    assert content.keys() == {"ok"}
    return json.dumps(content)


def bad_request(gateway: Gateway) -> str:
    try:
        gateway.client.chat.completions.create(
            model=gateway.model, messages=[{"role": "user", "content": "x"}], max_tokens=10_000_000
        )
    except openai.BadRequestError as error:
        return f"{error.status_code}"
    raise AssertionError("10,000,000 tokens were not refused")


def leaving_frees_blocks(gateway: Gateway) -> str:
    stream = gateway.client.chat.completions.create(
        model=gateway.model,
        messages=[{"role": "user", "content": "Go on and on."}],
        max_tokens=900,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    next(iter(stream))
    assert gateway.stack.load().running == 1
    began = time.monotonic()
    stream.close()
    gateway.stack.wait_for(lambda: gateway.stack.load().running == 0, 5.0)
    gateway.stack.wait_idle()
    return f"after {time.monotonic() - began:.2f} s"


def killed_worker(gateway: Gateway) -> str:
    """With two workers, the one that computes the stream dies; the stream goes on, and is what it would have been."""

    def ask() -> Iterator[Any]:
        return iter(
            gateway.client.chat.completions.create(
                model=gateway.model,
                messages=[{"role": "user", "content": "Go on and on."}],
                max_tokens=60,
                stream=True,
                temperature=0,
                extra_body={"ignore_eos": True},
            )
        )

    whole = [text_of(chunk) for chunk in ask()]
    stream = ask()
    begun = [text_of(next(stream)) for _ in range(10)]
    busy = [worker for worker in gateway.stack.load().workers if worker.running]
    assert len(busy) == 1
    gateway.stack.kill(busy[0].id, signal.SIGKILL)
    rest = [text_of(chunk) for chunk in stream]
    assert "".join(begun + rest) == "".join(whole), "the stream is another one than without the loss"
    gateway.stack.wait_idle()
    return f"{busy[0].id} killed, {len(rest)} chunks after it"


def text_of(chunk: Any) -> str:
    return "".join(choice.delta.content or "" for choice in chunk.choices)


MODEL_CHECKS: tuple[Check, ...] = (
    chat,
    chat_stream,
    two_choices,
    completions,
    logprobs,
    responses,
    anthropic_messages,
    tokenize,
    json_schema,
    bad_request,
)
FAKE_CHECKS: tuple[Check, ...] = (leaving_frees_blocks, killed_worker)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def gateway_to(stack: TcpStack, smg: Path, model: Path) -> Iterator[Gateway]:
    port = free_port()
    command = [str(smg), "launch", "--worker-urls", f"grpc://{stack.address}", "--model-path", str(model)]
    command += ["--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(free_port())]
    with (stack.directory / "smg.log").open("wb") as log:
        process = subprocess.Popen([*command, "--disable-retries"], stdout=log, stderr=log, cwd=stack.directory)
    stack.processes["smg"] = process
    url = f"http://127.0.0.1:{port}"

    def ready() -> bool:
        try:
            return bool(httpx.get(f"{url}/v1/models", timeout=2).json()["data"])
        except (httpx.HTTPError, KeyError, ValueError):
            return False

    stack.wait_for(ready, _START_S)
    yield Gateway(url, httpx.get(f"{url}/v1/models").json()["data"][0]["id"], stack)


def run_checks(checks: tuple[Check, ...], gateway: Gateway) -> int:
    """How many have failed."""
    failures = 0
    for check in checks:
        try:
            print(f"PASS {check.__name__}: {check(gateway)}", flush=True)
        except Exception as error:
            failures += 1
            print(f"FAIL {check.__name__}: {type(error).__name__}: {str(error)[:600]}", flush=True)
    return failures


def with_stack(smg: Path, model: Path, checks: tuple[Check, ...], workers: int, environment: dict[str, str]) -> int:
    with (
        tempfile.TemporaryDirectory(prefix="octavo-") as directory,
        TcpStack(model, Path(directory), environment) as stack,
    ):
        stack.start("scheduler")
        stack.start("frontend")
        for number in range(workers):
            stack.start("worker", f"worker-{number}", OCTAVO_WORKER_ID=f"worker-{number}")
        stack.wait_ready()
        stack.wait_for(lambda: len(stack.load().workers) == workers)
        with gateway_to(stack, smg, model) as gateway:
            print(f"-- {model_name(model)} on {environment['OCTAVO_DEVICE']}", flush=True)
            failures = run_checks(checks, gateway)
        if failures:
            for name in ("smg", "frontend"):
                print(f"--- {name}.log\n{stack.log(name)[-3000:]}")
        return failures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("smg", type=Path, help="smg's executable")
    smg = parser.parse_args().smg.absolute()
    print(subprocess.run([smg, "--version"], capture_output=True, text=True, check=False).stdout.strip())
    failures = 0
    try:
        model = resolve_model(BUNDLED_MODEL)
    except ModelDirectoryError as error:
        sys.exit(f"the bundled model is not prepared: {error}")
    cpu = {"OCTAVO_DEVICE": "cpu", "OCTAVO_THREADS": os.environ.get("OCTAVO_THREADS", "1"), "OCTAVO_NUM_BLOCKS": "512"}
    failures += with_stack(smg, model, MODEL_CHECKS, 1, cpu)
    with tempfile.TemporaryDirectory(prefix="octavo-") as directory:
        byte_model = Path(directory) / "byte-model"
        write_byte_model(byte_model)
        fake = {"OCTAVO_DEVICE": "fake", "OCTAVO_FAKE_STEP_MS": "50"}
        failures += with_stack(smg, byte_model, FAKE_CHECKS, 2, fake)
    print("FAILED" if failures else "all checks passed", flush=True)
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
