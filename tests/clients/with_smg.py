"""smg, an unmodified gateway, in front of vllm.grpc.engine.VllmEngine. It has services of its own, one of two workers
that are killed, for smg sends no key."""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai

from octavo.testbed.stack import Stack
from octavo.testbed.tiny_model import write_byte_model

from .checks import Service, run_checks
from .service import TcpStack, free_port

_START_S = 120.0
_SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}},
    "required": ["ok"],
    "additionalProperties": False,
}
_WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tells the weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Paris", "Rome"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


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


def required_call(gateway: Gateway) -> str:
    """The schema that smg makes of it allows for further fields and calls, which a small model likes to go on with: an
    answer of some seeds comes to its end."""
    for seed in range(8):
        message = message_forced_by(gateway, "required", seed)
        if message.tool_calls:
            return f"{checked_call(message)} of seed {seed}"
        assert re.match(r'\s*\[\s*\{\s*"name"\s*:\s*"weather"', message.content), message.content
    raise AssertionError("no answer came to its end")


def named_call(gateway: Gateway) -> str:
    return checked_call(message_forced_by(gateway, {"type": "function", "function": {"name": "weather"}}, seed=0))


def message_forced_by(gateway: Gateway, tool_choice: Any, seed: int) -> Any:
    answer = gateway.client.chat.completions.create(
        model=gateway.model,
        messages=[{"role": "user", "content": "What is the weather in Rome?"}],
        tools=[_WEATHER],
        tool_choice=tool_choice,
        max_tokens=120,
        temperature=1,
        seed=seed,
    )
    return answer.choices[0].message


def checked_call(message: Any) -> str:
    function = message.tool_calls[0].function
    assert function.name == "weather"
    assert json.loads(function.arguments)["city"] in ("Paris", "Rome")
    return str(function.arguments)


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
    required_call,
    named_call,
    bad_request,
)
FAKE_CHECKS: tuple[Check, ...] = (leaving_frees_blocks, killed_worker)


def model_of(url: str) -> str:
    """The one that the gateway lists."""
    return str(httpx.get(f"{url}/v1/models", timeout=10).json()["data"][0]["id"])


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
        # It lists the model before it has its tokenizer.
        try:
            asked = {"model": model_of(url), "prompt": "hello"}
            return httpx.post(f"{url}/v1/tokenize", json=asked, timeout=10).status_code == 200
        except (httpx.HTTPError, LookupError, ValueError):
            return False

    stack.wait_for(ready, _START_S)
    yield Gateway(url, model_of(url), stack)


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
            failures = run_checks(checks, gateway)
        if failures:
            for name in ("smg", "frontend"):
                print(f"--- {name}.log\n{stack.log(name)[-3000:]}")
        return failures


def main() -> int:
    """The exit status."""
    service = Service.of_environment()
    smg = Path(service.executable("smg"))
    cpu = {"OCTAVO_DEVICE": "cpu", "OCTAVO_THREADS": os.environ.get("OCTAVO_THREADS", "1"), "OCTAVO_NUM_BLOCKS": "512"}
    failures = with_stack(smg, Path(service.model_directory), MODEL_CHECKS, 1, cpu)
    with tempfile.TemporaryDirectory(prefix="octavo-") as directory:
        byte_model = Path(directory) / "byte-model"
        write_byte_model(byte_model)
        fake = {"OCTAVO_DEVICE": "fake", "OCTAVO_FAKE_STEP_MS": "50"}
        failures += with_stack(smg, byte_model, FAKE_CHECKS, 2, fake)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
