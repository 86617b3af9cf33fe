"""The Python package anthropic: messages, streams, tools and their results, schemas, counting, caching, errors."""

import asyncio
import json
from typing import Any, Literal

import anthropic  # type: ignore[import-not-found]

from .checks import Service, main

_QUESTION: Any = [{"role": "user", "content": "What is the capital of France?"}]
_WEATHER: Any = {
    "name": "weather",
    "description": "Tells the weather of a city.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"enum": ["Paris", "Rome"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
}
_SCHEMA: Any = {
    "type": "object",
    "properties": {"capital": {"type": "string", "maxLength": 20}, "large": {"type": "boolean"}},
    "required": ["capital", "large"],
    "additionalProperties": False,
}


def client_of(service: Service, **options: Any) -> Any:
    settings = {"base_url": f"http://{service.http}", "api_key": service.key, "max_retries": 0, "timeout": 120}
    return anthropic.Anthropic(**{**settings, **options})


def asked(service: Service, extra: Any = None, **fields: Any) -> Any:
    """The fields of a call. What `extra` holds the client has no names for, among them those of sampling."""
    more = {"temperature": 0, **(extra or {})}
    return {"model": service.model, "max_tokens": 16, "messages": _QUESTION, "extra_body": more, **fields}


def models(service: Service) -> str:
    client = client_of(service)
    assert service.model in [model.id for model in client.models.list()]
    found = client.models.retrieve(service.model)
    assert found.max_input_tokens > found.max_tokens > 0
    return f"{found.display_name}, made {found.created_at}"


def message(service: Service) -> str:
    answer = client_of(service).messages.create(**asked(service, system=[{"type": "text", "text": "Be brief."}]))
    assert (answer.type, answer.role, answer.model) == ("message", "assistant", service.model)
    assert answer.stop_reason in ("end_turn", "max_tokens")
    assert answer.usage.input_tokens + answer.usage.cache_read_input_tokens > 0 < answer.usage.output_tokens <= 16
    assert answer._request_id
    return repr(answer.content[0].text)


def stream(service: Service) -> str:
    client = client_of(service)
    whole = client.messages.create(**asked(service))
    events = list(client.messages.create(**asked(service), stream=True))
    kinds = [event.type for event in events]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    text = "".join(event.delta.text for event in events if event.type == "content_block_delta")
    assert text == whole.content[0].text
    assert events[-2].usage.output_tokens == whole.usage.output_tokens
    assert events[-2].delta.stop_reason == whole.stop_reason
    return f"{len(events)} events"


def stream_helper(service: Service) -> str:
    with client_of(service).messages.stream(**asked(service)) as stream:
        text = "".join(stream.text_stream)
        whole = stream.get_final_message()
    assert text == whole.content[0].text
    assert whole.usage.output_tokens > 0
    assert whole.stop_reason
    return repr(text)


def asynchronous(service: Service) -> str:
    async def ask() -> list[str]:
        options = {"base_url": f"http://{service.http}", "api_key": service.key, "max_retries": 0}
        async with anthropic.AsyncAnthropic(**options) as client:
            answers = await asyncio.gather(*(client.messages.create(**asked(service)) for _ in range(4)))
            return [answer.content[0].text for answer in answers]

    texts = asyncio.run(ask())
    assert len(set(texts)) == 1
    return f"{len(texts)} alike"


def prefill_and_stop(service: Service) -> str:
    begun = [*_QUESTION, {"role": "assistant", "content": "One, two, three,"}]
    fields: Any = {"messages": begun, "stop_sequences": [","], "max_tokens": 32}
    answer = client_of(service).messages.create(**asked(service, **fields))
    if answer.stop_reason == "stop_sequence":
        assert answer.stop_sequence == ","
        assert "," not in answer.content[0].text
    return f"{answer.content[0].text!r}, {answer.stop_reason}"


def tool(service: Service) -> str:
    """A call that is forced, and what the model says to what came of it."""
    client, forced = client_of(service), {"type": "tool", "name": "weather"}
    first = client.messages.create(**asked(service, tools=[_WEATHER], tool_choice=forced, max_tokens=60))
    [use] = first.content
    assert (use.type, first.stop_reason) == ("tool_use", "tool_use")
    assert use.input["city"] in ("Paris", "Rome")
    result = {"type": "tool_result", "tool_use_id": use.id, "content": [{"type": "text", "text": "sunny"}]}
    turns = [*_QUESTION, {"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
    second = client.messages.create(
        **asked(service, messages=turns, tools=[_WEATHER], tool_choice={"type": "none"}, max_tokens=40)
    )
    assert second.content[0].text
    return f"{use.input}, then {second.content[0].text[:40]!r}"


def tool_streamed(service: Service) -> str:
    fields: Any = {"tools": [_WEATHER], "tool_choice": {"type": "any", "disable_parallel_tool_use": True}}
    with client_of(service).messages.stream(**asked(service, **fields, max_tokens=60)) as stream:
        parts = [event.partial_json for event in stream if event.type == "input_json"]
        whole = stream.get_final_message()
    [use] = whole.content
    assert json.loads("".join(parts)) == use.input
    assert (use.name, whole.stop_reason) == ("weather", "tool_use")
    return f"{len(parts)} parts of {use.input}"


def tool_runner(service: Service) -> str:
    """The client's own loop: it calls the tool until the model has no more calls."""
    called = []

    @anthropic.beta_tool  # type: ignore[untyped-decorator]
    def weather(city: Literal["Paris", "Rome"]) -> str:
        """Tells the weather of a city."""
        called.append(city)
        return "sunny"

    forced = {"type": "any", "disable_parallel_tool_use": True}
    fields = asked(service, tools=[weather], tool_choice=forced, max_tokens=60)
    runner = client_of(service).beta.messages.tool_runner(**fields, max_iterations=2)
    answers = list(runner)
    assert called
    assert answers[0].content[0].type == "tool_use"
    return f"{called}, {len(answers)} answers"


def output_schema(service: Service) -> str:
    config = {"format": {"type": "json_schema", "schema": _SCHEMA}}
    answer = client_of(service).messages.create(**asked(service, output_config=config, max_tokens=60))
    found = json.loads(answer.content[0].text)
    assert found.keys() == {"capital", "large"}
    return str(found)


def count_tokens(service: Service) -> str:
    client, fields = client_of(service), {"system": "Be brief.", "tools": [_WEATHER]}
    counted = client.messages.count_tokens(model=service.model, messages=_QUESTION, **fields)
    usage = client.messages.create(**asked(service, **fields)).usage
    assert counted.input_tokens == usage.input_tokens + usage.cache_read_input_tokens
    return f"{counted.input_tokens} tokens"


def cached_prompt(service: Service) -> str:
    """A long beginning that was computed before is read from the cache, and is no input then."""
    long = "The quick brown fox jumps over the lazy dog. " * 20
    marked: Any = [{"type": "text", "text": long, "cache_control": {"type": "ephemeral"}}]
    client = client_of(service)
    first = client.messages.create(**asked(service, system=marked)).usage
    second = client.messages.create(**asked(service, system=marked)).usage
    counts = [u.input_tokens + u.cache_read_input_tokens + u.cache_creation_input_tokens for u in (first, second)]
    assert counts[0] == counts[1]
    assert second.cache_read_input_tokens >= 160
    return f"{first.cache_read_input_tokens}, then {second.cache_read_input_tokens} of {counts[0]} tokens were cached"


def errors(service: Service) -> str:
    client, stranger = client_of(service), client_of(service, api_key="sk-not-one-of-them-00")
    bearer = client_of(service, api_key=None, auth_token=service.key)
    assert bearer.messages.create(**asked(service)).content
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
    refused(anthropic.AuthenticationError, stranger, asked(service))
    refused(anthropic.NotFoundError, client, asked(service, model="no-such-model"))
    refused(anthropic.BadRequestError, client, asked(service, {"temperature": -1}))
    refused(anthropic.BadRequestError, client, asked(service, {"temperature": -1}, stream=True))
    refused(anthropic.BadRequestError, client, asked(service, messages=[{"role": "user", "content": [image]}]))
    refused(anthropic.BadRequestError, client, asked(service, max_tokens=0))
    return "6 mistakes"


def refused(kind: Any, client: Any, fields: Any) -> None:
    """A call that must fail with an error of this kind, told in the API's form."""
    error = None
    try:
        client.messages.create(**fields)
    except kind as raised:
        error = raised
    assert error is not None, f"{fields} was taken"
    assert error.body["type"] == "error"
    assert error.request_id == error.body["request_id"]


def leaving_in_the_middle(service: Service) -> str:
    client = client_of(service)
    with client.messages.create(
        **asked(service, max_tokens=400, extra_body={"ignore_eos": True}), stream=True
    ) as events:
        kinds = [event.type for event, _ in zip(events, range(4), strict=False)]
    assert len(kinds) == 4
    return f"after {kinds[-1]}"


if __name__ == "__main__":
    main(
        models,
        message,
        stream,
        stream_helper,
        asynchronous,
        prefill_and_stop,
        tool,
        tool_streamed,
        tool_runner,
        output_schema,
        count_tokens,
        cached_prompt,
        errors,
        leaving_in_the_middle,
    )
