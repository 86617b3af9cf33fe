"""Models that would think for ever, through real processes: a budget ends it at the same token whoever dies in
mid-thought and whatever was guessed, and what must match a schema begins after it."""

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from octavo.testbed.stack import GenerateStream, Stack
from octavo.testbed.tiny_model import CHAT_TEMPLATE, write_byte_model
from octavo.testing.small.constraints import conforms
from octavo.v1 import generation_pb2 as pb

pytestmark = pytest.mark.system

SCHEMA = {
    "type": "object",
    "properties": {"sum": {"type": "integer", "minimum": 0, "maximum": 999}},
    "required": ["sum"],
    "additionalProperties": False,
}
BUDGET = 60


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    model = tmp_path_factory.mktemp("models") / "thinker"
    # The prompt begins the reasoning, so every answer thinks.
    template = CHAT_TEMPLATE.replace("assistant\n", "assistant\n<think>\n")
    write_byte_model(model, template=template, markers=["<think>", "</think>"])
    environment = {
        **{"OCTAVO_DEVICE": "fake", "OCTAVO_FAKE_STEP_MS": "4", "OCTAVO_REASONING_PARSER": "qwen3"},
        **{"OCTAVO_SPECULATION": "2", "OCTAVO_SCHEDULER_GRACE": "300", "OCTAVO_WORKER_GRACE": "300"},
    }
    with (
        tempfile.TemporaryDirectory(prefix="octavo-") as directory,
        Stack(model, Path(directory), environment) as stack,
    ):
        yield stack.start_all(workers=2)


def request(seed: int, **fields: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        chat=pb.ChatPrompt(messages=[pb.ChatMessage(role="user", content=f"What is {seed} and {seed}?")]),
        sampling=pb.SamplingParams(temperature=1.0, seed=seed),
        stopping=pb.StoppingCriteria(max_new_tokens=400, max_reasoning_tokens=BUDGET),
        constraint=pb.OutputConstraint(json_schema=json.dumps(SCHEMA)),
        **fields,
    )


def begin(stream: GenerateStream, num_tokens: int) -> list[pb.GenerateResponse]:
    """The events of so many tokens, however many come with each, or of a few more."""
    events = [next(stream)]
    while sum(len(event.delta.token_ids) for event in events) < num_tokens:
        events.append(next(stream))
    return events


def told(events: list[pb.GenerateResponse]) -> tuple[str, str, list[int], pb.Usage]:
    """What was thought, what was answered, all tokens, and the usage."""
    deltas = [event.delta for event in events if event.HasField("delta")]
    [usage] = [event.usage for event in events if event.HasField("usage")]
    tokens = [token for delta in deltas for token in delta.token_ids]
    return "".join(d.reasoning for d in deltas), "".join(d.text for d in deltas), tokens, usage


def check(events: list[pb.GenerateResponse]) -> None:
    reasoning, text, _, usage = told(events)
    assert reasoning
    assert conforms(json.loads(text), SCHEMA)
    # The marker at its end is counted, too.
    assert 1 < usage.reasoning_tokens <= BUDGET + 1


def test_a_thought_that_never_ends_is_ended(stack: Stack) -> None:
    found = [list(stack.stream(request(seed))) for seed in range(3)]
    for events in found:
        check(events)
    assert any(told(events)[3].reasoning_tokens == BUDGET + 1 for events in found), "none had to be ended"
    unlimited = request(1)
    unlimited.stopping.ClearField("max_reasoning_tokens")
    unlimited.stopping.max_new_tokens = 2 * BUDGET
    unlimited.ClearField("constraint")
    *_, usage = told(list(stack.stream(unlimited)))
    assert usage.reasoning_tokens > BUDGET + 1, "it ends by itself"


def test_whoever_dies_in_mid_thought_the_budget_ends_at_the_same_token(stack: Stack) -> None:
    requests = [request(seed) for seed in range(10, 16)]
    undisturbed = [told(list(stack.stream(each)))[:3] for each in requests]
    streams = [stack.stream(each) for each in requests]
    beginnings = [begin(stream, 10) for stream in streams]
    # All think still.
    assert all(not event.delta.text for events in beginnings for event in events if event.HasField("delta"))
    stack.kill("worker-0")
    found = [[*beginning, *stream] for beginning, stream in zip(beginnings, streams, strict=True)]
    assert [told(events)[:3] for events in found] == undisturbed
    for events in found:
        check(events)
    stack.start("worker", "worker-0")
    stack.wait_for(lambda: len(stack.load().workers) == 2)


def restart_scheduler(stack: Stack, **settings: str) -> None:
    stack.kill("scheduler")
    stack.start_named("scheduler", **settings)
    stack.wait_for(lambda: len(stack.load().workers) == 2)


def test_guesses_that_run_over_the_budget_change_nothing(stack: Stack) -> None:
    restart_scheduler(stack, OCTAVO_SPECULATION="off")
    plain = {seed: told(list(stack.stream(request(seed)))) for seed in range(20, 24)}
    assert not any(usage.drafted_tokens for *_, usage in plain.values())
    restart_scheduler(stack)
    accepted = 0
    for seed, expected in plain.items():
        tokens = expected[2]
        # Wrong now and then; and right up to the end of the thought, with which the guess goes on.
        spoiled = [token ^ (place % 11 == 10) for place, token in enumerate(tokens)]
        longer = [*tokens[: BUDGET - 2], *tokens[:40]]
        for guess in (tokens, spoiled, longer):
            events = list(stack.stream(request(seed, prediction=pb.Prediction(token_ids=pb.TokenIds(ids=guess)))))
            assert told(events)[:3] == expected[:3]
            check(events)
            accepted += told(events)[3].accepted_tokens
    assert accepted > BUDGET


def test_it_is_set_apart_over_http_too(stack: Stack) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "sum", "schema": SCHEMA}}
    body = {"messages": [{"role": "user", "content": "2+2?"}], "max_tokens": 400, "response_format": form}
    with stack.http() as http:
        answer = http.post("/v1/chat/completions", json={**body, "max_reasoning_tokens": 5, "seed": 3}).json()
        message = http.post(
            "/v1/messages",
            json={
                "messages": body["messages"],
                "max_tokens": 400,
                "seed": 3,
                "max_reasoning_tokens": 5,
                "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}},
            },
        ).json()
    choice = answer["choices"][0]["message"]
    assert conforms(json.loads(choice["content"]), SCHEMA)
    assert choice["reasoning"]
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] <= 6
    thinking, text = message["content"]
    assert (thinking["type"], thinking["thinking"]) == ("thinking", choice["reasoning"])
    assert text["text"] == choice["content"]
