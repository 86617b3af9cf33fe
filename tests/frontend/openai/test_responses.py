"""POST /v1/responses, through the official client."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from octavo.frontend.server import FrontendServer
from octavo.frontend.text.grammars import load_vocabulary
from octavo.runtime.models.grammar import compile_grammar
from octavo.testing.fakes.fake_scheduler import FakeScheduler

AnswerWith = Callable[..., None]
WEATHER: dict[str, Any] = {
    "type": "function",
    "name": "weather",
    "description": "of a city",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    "strict": True,
}
CALL = 'Well. <tool_call>\n{"name": "weather", "arguments": {"city": "Bern"}}\n</tool_call>'
# The events of an answer that is one message.
MESSAGE_BEGINS = ["created", "in_progress", "output_item.added", "content_part.added"]
MESSAGE_ENDS = ["output_text.done", "content_part.done", "output_item.done"]


@pytest.fixture
def ask(client: openai.AsyncOpenAI) -> Callable[..., Any]:
    async def ask(said: Any = "hello", **fields: Any) -> Any:
        fields = {"model": "byte-model", "input": said, "max_output_tokens": 16, **fields}
        return await client.responses.create(**fields)

    return ask


@pytest.fixture
def with_tools(config: Any, roomy_model_directory: Path) -> None:
    # Before the frontend is made from it.
    object.__setattr__(config, "model_directory", roomy_model_directory)
    object.__setattr__(config, "tool_call_parser", "hermes")


def prompt_of(scheduler: FakeScheduler, frontend: FrontendServer) -> str:
    return frontend.generation.tokenizer.decode(scheduler.submitted[-1].prompt_token_ids, skip_special_tokens=False)


async def events_of(stream: Any) -> list[Any]:
    events = [event async for event in stream]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    return events


def accepts(frontend: FrontendServer, grammar: str, text: str) -> bool:
    """Whether a grammar lets a text through as a whole answer."""
    vocabulary = load_vocabulary(Path(frontend.generation.tokenizer.files.directory))
    matcher = compile_grammar(grammar, vocabulary)
    return matcher.consume_tokens(vocabulary.tokenize_str(text)) and matcher.is_accepting()


def names(events: list[Any]) -> list[str]:
    return [event.type.removeprefix("response.") for event in events]


async def test_an_answer_is_a_message_with_usage(answer_with: AnswerWith, ask: Any) -> None:
    answer_with("good day")
    answer = await ask(temperature=0.5, metadata={"a": "b"})
    assert (answer.object, answer.status, answer.output_text) == ("response", "completed", "good day")
    [message] = answer.output
    assert (message.type, message.role, message.status) == ("message", "assistant", "completed")
    assert (answer.temperature, answer.metadata, answer.error) == (0.5, {"a": "b"}, None)
    assert answer.usage.total_tokens == answer.usage.input_tokens + answer.usage.output_tokens
    assert answer.usage.output_tokens == len("good day") + 1
    assert not answer.model_extra["store"]


async def test_an_answer_that_runs_into_its_limit_is_incomplete(scheduler: FakeScheduler, ask: Any) -> None:
    answer = await ask(max_output_tokens=3)
    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert answer.output[0].status == "incomplete"


async def test_an_answer_without_text_has_an_empty_message(answer_with: AnswerWith, ask: Any) -> None:
    answer_with("")
    answer = await ask()
    assert (answer.output_text, len(answer.output)) == ("", 1)


async def test_a_stream_tells_every_change_in_the_documented_order(answer_with: AnswerWith, ask: Any) -> None:
    answer_with("good day")
    events = await events_of(await ask(stream=True))
    kinds = names(events)
    assert kinds[:4] == MESSAGE_BEGINS
    assert kinds[-4:] == [*MESSAGE_ENDS, "completed"]
    assert set(kinds[4:-4]) == {"output_text.delta"}
    assert "".join(event.delta for event in events[4:-4]) == "good day" == events[-4].text
    assert events[-1].response.output_text == "good day"
    assert events[0].response.output == []
    assert {event.item_id for event in events[3:-2]} == {events[-1].response.output[0].id}


async def test_the_clients_own_stream_helper_follows(answer_with: AnswerWith, client: openai.AsyncOpenAI) -> None:
    answer_with("good day")
    async with client.responses.stream(model="byte-model", input="hello") as stream:
        final = await stream.get_final_response()
    assert (final.status, final.output_text) == ("completed", "good day")


async def test_a_stream_that_runs_into_its_limit_says_so(scheduler: FakeScheduler, ask: Any) -> None:
    assert names(await events_of(await ask(stream=True, max_output_tokens=3)))[-1] == "incomplete"


async def test_a_stream_that_breaks_ends_with_failed(scheduler: FakeScheduler, http: httpx.AsyncClient) -> None:
    scheduler.hold_after = 2
    body = {"input": "hello", "stream": True, "timeout": 0.5}
    lines = [line async for line in _lines(http, body)]
    last = json.loads(lines[-1].removeprefix("data: "))
    assert lines[-2] == "event: response.failed"
    assert (last["type"], last["response"]["status"]) == ("response.failed", "failed")
    assert last["response"]["error"]["code"] == "server_error"
    assert "deadline" in last["response"]["error"]["message"]


async def _lines(http: httpx.AsyncClient, body: dict[str, Any]) -> Any:
    async with http.stream("POST", "/v1/responses", json=body) as response:
        assert response.status_code == 200
        async for line in response.aiter_lines():
            if line and not line.startswith(":"):
                yield line


async def test_items_become_the_chat(scheduler: FakeScheduler, frontend: FrontendServer, ask: Any) -> None:
    parts = [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]
    answered = {"type": "message", "role": "assistant", "id": "m", "status": "completed"}
    items = [
        {"role": "developer", "content": "short"},
        {"role": "user", "content": parts},
        {**answered, "content": [{"type": "output_text", "text": "c", "annotations": []}]},
        {"role": "user", "content": "d"},
    ]
    await ask(items, instructions="be kind")
    said = [("system", "be kind"), ("system", "short"), ("user", "a\nb"), ("assistant", "c"), ("user", "d")]
    expected = "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in said)
    assert prompt_of(scheduler, frontend) == f"{expected}<|im_start|>assistant\n"


async def test_an_answers_items_may_be_sent_back(answer_with: AnswerWith, ask: Any) -> None:
    answer_with("good day")
    first = await ask()
    again = await ask([{"role": "user", "content": "hello"}, *first.output, {"role": "user", "content": "more"}])
    assert again.usage.input_tokens > first.usage.input_tokens


@pytest.mark.usefixtures("with_tools")
class TestTools:
    async def test_a_call_is_an_item_of_its_own(self, answer_with: AnswerWith, ask: Any) -> None:
        answer_with(CALL)
        message, call = (await ask(tools=[WEATHER], max_output_tokens=200)).output
        assert message.content[0].text == "Well."
        assert (call.type, call.name, json.loads(call.arguments)) == ("function_call", "weather", {"city": "Bern"})
        assert call.call_id.startswith("call_")

    async def test_a_stream_tells_of_the_call(
        self, scheduler: FakeScheduler, answer_with: AnswerWith, ask: Any
    ) -> None:
        answer_with(CALL)
        scheduler.hold_after = CALL.index(' "Bern"')
        events = []
        async for event in await ask(tools=[WEATHER], max_output_tokens=200, stream=True):
            events.append(event)
            if event.type == "response.function_call_arguments.delta" and event.delta.startswith("{"):
                # Not before there was something of them.
                scheduler.hold_after = 1 << 30
        begun = names(events).index("function_call_arguments.delta")
        deltas = [event.delta for event in events[begun:-3]]
        assert names(events)[begun - 1] == "output_item.added"
        assert names(events)[begun:] == [
            *["function_call_arguments.delta"] * len(deltas),
            "function_call_arguments.done",
            "output_item.done",
            "completed",
        ]
        assert len(deltas) > 1
        assert "".join(deltas) == events[-3].arguments
        assert [event.output_index for event in events[begun - 1 : -1]] == [1] * (len(deltas) + 3)
        assert json.loads(events[-3].arguments) == {"city": "Bern"}

    async def test_a_call_that_is_cut_off_is_an_incomplete_item(self, answer_with: AnswerWith, ask: Any) -> None:
        answer_with(CALL.removeprefix("Well. "))
        answer = await ask(tools=[WEATHER], tool_choice="required", max_output_tokens=60)
        [call] = answer.output
        assert (answer.status, call.status, call.name) == ("incomplete", "incomplete", "weather")
        assert '{"city": "Bern"}'.startswith(call.arguments)

    async def test_calls_and_their_outputs_are_sent_back(
        self, scheduler: FakeScheduler, frontend: FrontendServer, ask: Any
    ) -> None:
        call = {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": '{"city": "Bern"}'}
        output = {"type": "function_call_output", "call_id": "c1", "output": "sunny"}
        await ask([{"role": "user", "content": "?"}, call, output], tools=[WEATHER])
        prompt = prompt_of(scheduler, frontend)
        assert '<tool_call>\n{"name": "weather", "arguments": {"city": "Bern"}}\n</tool_call>' in prompt
        assert "<|im_start|>user\n<tool_response>\nsunny\n</tool_response><|im_end|>" in prompt

    async def test_functions_in_a_namespace_are_called_by_their_names(self, answer_with: AnswerWith, ask: Any) -> None:
        answer_with(CALL)
        tools = [{"type": "namespace", "name": "outside", "description": "d", "tools": [WEATHER]}]
        [_, call] = (await ask(tools=[*tools, {"type": "web_search"}], max_output_tokens=200)).output
        assert (call.name, call.namespace) == ("weather", "outside")

    async def test_with_a_format_the_answer_may_be_a_call_as_well(
        self, scheduler: FakeScheduler, frontend: FrontendServer, ask: Any
    ) -> None:
        form = {"type": "json_schema", "name": "x", "schema": {"type": "object", "properties": {"a": {}}}}
        await ask(tools=[WEATHER], text={"format": form})
        grammar = scheduler.submitted[-1].sampling.grammar
        assert accepts(frontend, grammar, '{"a":1}')
        assert accepts(
            frontend, grammar, '<tool_call>\n{"name": "weather", "arguments": {"city":"Bern"}}\n</tool_call>'
        )
        assert not accepts(frontend, grammar, "Well.")

    async def test_a_forced_call_comes_before_a_format(
        self, scheduler: FakeScheduler, frontend: FrontendServer, ask: Any
    ) -> None:
        await ask(tools=[WEATHER], tool_choice="required", text={"format": {"type": "json_object"}})
        assert not accepts(frontend, scheduler.submitted[-1].sampling.grammar, '{"a":1}')

    async def test_one_call_at_most_where_parallel_ones_are_not_wanted(self, answer_with: AnswerWith, ask: Any) -> None:
        answer_with(CALL + CALL)
        kinds = [
            item.type for item in (await ask(tools=[WEATHER], max_output_tokens=300, parallel_tool_calls=False)).output
        ]
        assert kinds.count("function_call") == 1

    async def test_a_forced_call_is_a_grammar(self, scheduler: FakeScheduler, ask: Any) -> None:
        await ask(tools=[WEATHER], tool_choice={"type": "function", "name": "weather"})
        assert "weather" in scheduler.submitted[-1].sampling.grammar


async def test_a_format_is_a_grammar(scheduler: FakeScheduler, ask: Any) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    form = {"type": "json_schema", "name": "x", "schema": schema, "strict": True}
    answer = await ask(text={"format": form})
    assert scheduler.submitted[-1].sampling.grammar
    assert answer.text.format.type == "json_schema"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"input": []}, "input"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0] of type 'item_reference'"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, None),
        ({"input": [{"role": "nobody", "content": "x"}]}, "messages.role"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
        ({"text": {"format": {"type": "poem"}}}, "text.format of type 'poem'"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_tokens": 3}, "max_tokens"),
    ],
)
async def test_what_cannot_be_had_is_refused(
    scheduler: FakeScheduler, http: httpx.AsyncClient, fields: dict[str, Any], param: str | None
) -> None:
    answer = await http.post("/v1/responses", json={"input": "hello", **fields})
    assert answer.status_code == 400, answer.text
    if param:
        assert answer.json()["error"]["param"] == param
    assert not scheduler.submitted


async def test_unknown_fields_are_named(scheduler: FakeScheduler, http: httpx.AsyncClient) -> None:
    answer = await http.post("/v1/responses", json={"input": "hello", "max_output_tokens": 1, "wishes": 3})
    assert answer.headers["x-octavo-unknown-fields"] == "wishes"
