"""Two schedulers with a worker each behind one frontend: requests are spread, and outlive a cell."""

import re
from collections.abc import Sequence
from typing import Final

import pytest

from octavo.testbed.stack import FinishedStream, GenerateStream, Stack, collect, token_request
from octavo.v1 import generation_pb2
from octavo.wire.sampling import SamplingParams
from octavo.worker.fake.runner import FakeVocabulary, expected_tokens

from .conftest import StartStack

pytestmark = pytest.mark.system

_CELLS: Final = ("a", "b")
_NUM_TOKENS: Final = 40
_PROMPTS: Final = [[(31 * i + 7 * j) % 250 for j in range(40)] for i in range(6)]


def cells(new_stack: StartStack, **step_ms: int) -> Stack:
    """Cells a and b, with steps so slow that streams last for as long as they are looked at: 500 ms unless told."""
    stack = new_stack()
    for name in _CELLS:
        stack.start("scheduler", f"scheduler-{name}", **stack.cell(name))
        step = {"OCTAVO_FAKE_STEP_MS": str(step_ms.get(name, 500))}
        stack.start("worker", f"worker-{name}", **step, **stack.cell(name))
    endpoints = [f"ipc://{stack.directory}/{name}/frontends.sock" for name in _CELLS]
    stack.start("frontend", OCTAVO_FRONTEND_ENDPOINT=",".join(endpoints))
    stack.wait_ready()
    stack.wait_for(lambda: told(stack, "octavo_cell_ready") == {"a": 1, "b": 1})
    return stack


def told(stack: Stack, metric: str) -> dict[str, float]:
    """What the frontend tells of its cells, by their names."""
    with stack.http() as client:
        text = client.get("/metrics").text
    found = re.findall(rf'^{metric}\{{cell="[^"]*/(\w+)/frontends.sock"\}} (\S+)$', text, flags=re.MULTILINE)
    return {name: float(value) for name, value in found}


class Begun:
    """Streams of `_PROMPTS` that have told tokens; what they have told is kept."""

    def __init__(self, stack: Stack) -> None:
        self.streams = [stack.stream(token_request(prompt, _NUM_TOKENS)) for prompt in _PROMPTS]
        self._read = [_until_delta(stream) for stream in self.streams]

    def finish(self) -> list[FinishedStream]:
        return [collect([*read, *stream]) for read, stream in zip(self._read, self.streams, strict=True)]

    def cancel(self) -> None:
        for stream in self.streams:
            stream.cancel()


def _until_delta(stream: GenerateStream) -> list[generation_pb2.GenerateResponse]:
    read = [next(stream)]
    while not read[-1].HasField("delta"):
        read.append(next(stream))
    return read


def assert_undisturbed(stack: Stack, generations: Sequence[FinishedStream]) -> None:
    vocabulary, sampling = FakeVocabulary.read(stack.model), SamplingParams(max_tokens=_NUM_TOKENS)
    for prompt, generation in zip(_PROMPTS, generations, strict=True):
        assert generation.token_ids == expected_tokens(prompt, sampling, 0, _NUM_TOKENS, vocabulary)


def test_requests_spread_and_equal_prefixes_stick(new_stack: StartStack) -> None:
    stack = cells(new_stack)
    streams = Begun(stack)
    requests = told(stack, "octavo_cell_requests")
    assert sum(requests.values()) == len(_PROMPTS)
    assert min(requests.values()) >= 2
    streams.cancel()
    stack.wait_for(lambda: told(stack, "octavo_cell_requests") == {"a": 0, "b": 0})
    generations = [stack.generate(token_request(_PROMPTS[0] + [i] * 20, 1)) for i in range(4)]
    assert all(generation.usage.cached_prompt_tokens >= 32 for generation in generations)


def test_streams_outlive_a_cell_that_never_comes_back(new_stack: StartStack) -> None:
    stack = cells(new_stack, a=50)
    streams = Begun(stack)
    moved = told(stack, "octavo_cell_requests")["b"]
    assert moved >= 2
    stack.kill("scheduler-b")
    stack.kill("worker-b")
    generations = streams.finish()
    assert_undisturbed(stack, generations)
    assert sum(generation.usage.preemptions for generation in generations) == moved
    # And what comes later goes where somebody is, at once.
    assert stack.generate(token_request(_PROMPTS[0], 4), timeout=60).usage.preemptions == 0


def test_a_cell_that_comes_back_is_used_again(new_stack: StartStack) -> None:
    stack = cells(new_stack)
    stack.kill("scheduler-b")
    stack.wait_for(lambda: told(stack, "octavo_cell_ready") == {"a": 1, "b": 0})
    stack.start("scheduler", "scheduler-b", **stack.cell("b"))
    stack.wait_for(lambda: told(stack, "octavo_cell_ready") == {"a": 1, "b": 1})
    streams = Begun(stack)
    assert min(told(stack, "octavo_cell_requests").values()) >= 2
    streams.cancel()
