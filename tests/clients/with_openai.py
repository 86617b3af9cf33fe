"""The Python package openai: chats, completions, responses, streams, tools, formats, errors."""

import asyncio
import json
import math
import time
from collections.abc import Callable
from typing import Any

import openai
from openai import OpenAI

from .checks import Service, main

_QUESTION: Any = [{"role": "user", "content": "What is the capital of France?"}]
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
_SCHEMA: Any = {
    "type": "object",
    "properties": {"capital": {"type": "string", "maxLength": 20}, "large": {"type": "boolean"}},
    "required": ["capital", "large"],
    "additionalProperties": False,
}


def client_of(service: Service, **options: Any) -> OpenAI:
    return OpenAI(**{"base_url": service.base_url, "api_key": service.key, "max_retries": 0, "timeout": 120, **options})


def models(service: Service) -> str:
    client = client_of(service)
    assert service.model in [model.id for model in client.models.list()]
    return client.models.retrieve(service.model).id


def chat(service: Service) -> str:
    answer = client_of(service).chat.completions.create(
        model=service.model, messages=_QUESTION, max_completion_tokens=16, temperature=0
    )
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.choices[0].finish_reason in ("stop", "length")
    assert answer.choices[0].message.content
    return repr(answer.choices[0].message.content)


def chat_stream(service: Service) -> str:
    client = client_of(service)
    asked: Any = {"model": service.model, "messages": _QUESTION, "max_tokens": 16, "temperature": 0}
    whole = client.chat.completions.create(**asked)
    chunks = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    reasons = [choice.finish_reason for chunk in chunks for choice in chunk.choices if choice.finish_reason]
    assert text == whole.choices[0].message.content
    assert reasons == [whole.choices[0].finish_reason]
    assert not chunks[-1].choices
    assert chunks[-1].usage.total_tokens == whole.usage.total_tokens
    return f"{len(chunks)} chunks"


def chat_stream_helper(service: Service) -> str:
    # Greedy, for the helper raises an error of its own where max_tokens ends an answer.
    asked: Any = {"model": service.model, "messages": _QUESTION, "max_tokens": 16, "temperature": 0}
    with client_of(service).chat.completions.stream(**asked) as stream:
        kinds = [event.type for event in stream]
        whole = stream.get_final_completion()
    assert "content.delta" in kinds
    assert whole.choices[0].message.content
    return f"{len(kinds)} events"


def two_choices(service: Service) -> str:
    client = client_of(service)
    asked: Any = {"model": service.model, "messages": _QUESTION, "max_tokens": 8, "seed": 5, "n": 2, "temperature": 1}
    whole = [choice.message.content for choice in client.chat.completions.create(**asked).choices]
    streamed = ["", ""]
    for chunk in client.chat.completions.create(**asked, stream=True):
        for choice in chunk.choices:
            streamed[choice.index] += choice.delta.content or ""
    assert streamed == whole
    assert whole[0] != whole[1]
    return repr(whole)


def chat_logprobs(service: Service) -> str:
    answer = client_of(service).chat.completions.create(
        model=service.model, messages=_QUESTION, max_tokens=8, temperature=0, logprobs=True, top_logprobs=3
    )
    content = answer.choices[0].logprobs and answer.choices[0].logprobs.content
    assert content
    assert answer.usage
    assert len(content) == answer.usage.completion_tokens
    for token in content:
        assert len(token.top_logprobs) == 3
        assert token.logprob == max(top.logprob for top in token.top_logprobs), "greedy, and yet not the likeliest"
    said = b"".join(bytes(token.bytes or ()) for token in content).decode()
    assert said.startswith(answer.choices[0].message.content or "?")
    return f"{len(content)} tokens, {math.exp(sum(token.logprob for token in content)):.2g} likely"


def completions(service: Service) -> str:
    client = client_of(service)
    asked: Any = {"model": service.model, "prompt": "The capital of France is", "max_tokens": 8, "temperature": 0}
    whole = client.completions.create(**asked)
    chunks = list(client.completions.create(**asked, stream=True))
    assert "".join(choice.text for chunk in chunks for choice in chunk.choices) == whole.choices[0].text
    return repr(whole.choices[0].text)


def completions_of_a_list(service: Service) -> str:
    """Prompts of a list, with echo and logprobs, two choices each."""
    answer = client_of(service).completions.create(
        model=service.model, prompt=["One, two,", "Red, green,"], max_tokens=4, echo=True, logprobs=2, n=2, seed=1
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert all(choice.text.startswith("One, two,") for choice in answer.choices[:2])
    assert all(choice.text.startswith("Red, green,") for choice in answer.choices[2:])
    for choice in answer.choices:
        found = choice.logprobs
        assert found
        assert found.token_logprobs
        assert found.tokens
        assert found.token_logprobs[0] is None
        assert "".join(found.tokens) == choice.text
    return f"{len(answer.choices)} choices"


def responses(service: Service) -> str:
    client = client_of(service)
    asked: Any = {"model": service.model, "input": "Say hello.", "max_output_tokens": 12, "temperature": 0}
    whole = client.responses.create(**asked)
    assert whole.output_text
    assert whole.usage
    assert whole.usage.output_tokens <= 12
    events = list(client.responses.create(**asked, stream=True))
    said = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert said == whole.output_text
    assert events[0].type == "response.created"
    assert events[-1].type in ("response.completed", "response.incomplete")
    assert [event.sequence_number for event in events] == list(range(len(events)))
    return f"{whole.status}, {len(events)} events"


def responses_stream_helper(service: Service) -> str:
    # Greedy: the helper raises where `max_output_tokens` ends an answer.
    asked: Any = {"model": service.model, "input": "Say hello.", "max_output_tokens": 200, "temperature": 0}
    with client_of(service).responses.stream(**asked) as stream:
        for _ in stream:
            pass
        return repr(stream.get_final_response().output_text[:60])


def responses_parsed(service: Service) -> str:
    text: Any = {"format": {"type": "json_schema", "name": "capital", "schema": _SCHEMA, "strict": True}}
    answer = client_of(service).responses.create(
        model=service.model, input="The capital of France?", text=text, max_output_tokens=60
    )
    assert json.loads(answer.output_text).keys() == {"capital", "large"}
    return answer.output_text


def responses_tools(service: Service) -> str:
    tool: Any = {"type": "function", **_WEATHER["function"], "strict": True}
    client = client_of(service)
    asked: Any = {"model": service.model, "tools": [tool], "max_output_tokens": 60}
    question: Any = [{"role": "user", "content": "Weather in Rome?"}]
    first = client.responses.create(**asked, input=question, tool_choice={"type": "function", "name": "weather"})
    (call,) = [item for item in first.output if item.type == "function_call"]
    assert json.loads(call.arguments)["city"] in ("Paris", "Rome")
    said: Any = [call.model_dump(exclude_none=True)]
    result: Any = [{"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}]
    second = client.responses.create(**asked, input=question + said + result, tool_choice="none")
    assert second.output_text
    return f"{call.arguments}, then {second.output_text[:40]!r}"


def responses_stored(service: Service) -> str:
    """One is read again, gone on from, listed, and deleted."""
    client = client_of(service)
    asked: Any = {"model": service.model, "max_output_tokens": 12, "temperature": 0}
    first = client.responses.create(**asked, input="My name is Ada.", instructions="Be kind.")
    assert client.responses.retrieve(first.id).to_dict() == first.to_dict()
    second = client.responses.create(**asked, input="What is my name?", previous_response_id=first.id)
    alone = client.responses.create(**asked, input="What is my name?")
    assert first.usage
    assert second.usage
    assert alone.usage
    assert second.usage.input_tokens > alone.usage.input_tokens + first.usage.output_tokens
    (item,) = list(client.responses.input_items.list(second.id))
    listed: Any = item.to_dict()
    assert listed["content"][0]["text"] == "What is my name?"
    client.responses.delete(first.id)
    for gone, kind in (
        (lambda: client.responses.retrieve(first.id), openai.NotFoundError),
        (lambda: client.responses.create(**asked, input="?", previous_response_id=second.id), openai.BadRequestError),
    ):
        raised(kind, gone)
    return f"{second.usage.input_tokens} tokens, of {alone.usage.input_tokens} said anew"


def responses_by_reference(service: Service) -> str:
    """Items that are stored are named by their ids in place of being sent again."""
    client = client_of(service)
    asked: Any = {"model": service.model, "max_output_tokens": 12, "temperature": 0}
    question: Any = {"type": "message", "role": "user", "content": "What is my name?"}
    first = client.responses.create(**asked, input="My name is Ada.")
    said: Any = [*first.output, question]
    named: Any = [{"type": "item_reference", "id": item.id} for item in first.output] + [question]
    whole, short = (client.responses.create(**asked, input=each) for each in (said, named))
    assert short.output_text == whole.output_text
    # The second finds more of its prompt computed, and may be guessed otherwise.
    counted = [(each.usage.input_tokens, each.usage.output_tokens) for each in (whole, short) if each.usage]
    assert counted[0] == counted[1]
    missing: Any = [{"type": "item_reference", "id": "msg_none"}]
    told = raised(openai.NotFoundError, lambda: client.responses.create(**asked, input=missing))
    return f"{len(first.output)} item, and {told}"


def responses_in_the_background(service: Service) -> str:
    """One is waited for, one followed from where its stream was left, one cancelled."""
    client = client_of(service)
    asked: Any = {"model": service.model, "input": "Count to ten.", "temperature": 0, "background": True}
    begun = client.responses.create(**asked, max_output_tokens=12)
    assert begun.status in ("queued", "in_progress")
    whole = begun
    while whole.status in ("queued", "in_progress"):
        time.sleep(0.05)
        whole = client.responses.retrieve(begun.id)
    seen = []
    with client.responses.create(**asked, max_output_tokens=12, stream=True) as stream:
        for event in stream:
            seen.append(event)
            if event.type == "response.output_text.delta":
                break
    rest = client.responses.retrieve(seen[0].response.id, stream=True, starting_after=seen[-1].sequence_number)
    seen += rest
    assert [event.sequence_number for event in seen] == list(range(len(seen)))
    assert "".join(event.delta for event in seen if event.type == "response.output_text.delta") == whole.output_text
    long: Any = {**asked, "max_output_tokens": 400, "extra_body": {"ignore_eos": True}}
    cancelled = client.responses.cancel(client.responses.create(**long).id)
    assert cancelled.status == "cancelled"
    return f"{whole.status}, {len(seen)} events"


def conversations(service: Service) -> str:
    client = client_of(service)
    made = client.conversations.create(metadata={"a": "b"}, items=[{"role": "user", "content": "I am Ada."}])
    asked: Any = {"model": service.model, "max_output_tokens": 8, "temperature": 0, "conversation": made.id}
    answers = [client.responses.create(**asked, input=text) for text in ("Hello.", "Who am I?")]
    roles = [getattr(item, "role", "?") for item in client.conversations.items.list(made.id, order="asc", limit=2)]
    assert roles == ["user", "user", "assistant", "user", "assistant"]
    assert answers[0].usage
    assert answers[1].usage
    assert answers[1].usage.input_tokens > answers[0].usage.input_tokens + answers[0].usage.output_tokens
    assert client.conversations.update(made.id, metadata={}).metadata == {}
    assert client.conversations.delete(made.id).deleted
    return f"{len(roles)} items"


def tools_round_trip(service: Service) -> str:
    client = client_of(service)
    asked: Any = {"model": service.model, "tools": [_WEATHER], "max_tokens": 60, "parallel_tool_calls": False}
    question: Any = [{"role": "user", "content": "What is the weather in Rome?"}]
    first = client.chat.completions.create(**asked, messages=question, tool_choice="required").choices[0]
    assert first.finish_reason == "tool_calls"
    assert first.message.tool_calls
    calls: Any = first.message.tool_calls
    assert json.loads(calls[0].function.arguments)["city"] in ("Paris", "Rome")
    results: Any = [{"role": "tool", "tool_call_id": call.id, "content": "sunny"} for call in calls]
    said: Any = [first.message.model_dump(exclude_none=True)]
    second = client.chat.completions.create(**asked, messages=question + said + results, tool_choice="none").choices[0]
    assert second.message.content
    return f"{calls[0].function.arguments}, then {second.message.content[:40]!r}"


def tools_streamed(service: Service) -> str:
    forced: Any = {"type": "function", "function": {"name": "weather"}}
    chunks = client_of(service).chat.completions.create(
        model=service.model, messages=_QUESTION, tools=[_WEATHER], tool_choice=forced, max_tokens=60, stream=True
    )
    deltas = [choice for chunk in chunks for choice in chunk.choices]
    calls = [call for choice in deltas for call in choice.delta.tool_calls or ()]
    assert [call.function.name for call in calls if call.function and call.function.name] == ["weather"]
    arguments = "".join(call.function.arguments or "" for call in calls if call.function)
    assert json.loads(arguments)["city"] in ("Paris", "Rome")
    assert deltas[-1].finish_reason == "tool_calls"
    return f"{len(calls)} parts: {arguments}"


def json_schema(service: Service) -> str:
    response_format: Any = {"type": "json_schema", "json_schema": {"name": "c", "schema": _SCHEMA, "strict": True}}
    answer = client_of(service).chat.completions.create(
        model=service.model, messages=_QUESTION, response_format=response_format, max_tokens=60
    )
    content = answer.choices[0].message.content or ""
    assert json.loads(content).keys() == {"capital", "large"}
    return content


def json_object(service: Service) -> str:
    asked: Any = [{"role": "user", "content": 'Write {"ok": true}'}]
    answer = client_of(service).chat.completions.create(
        model=service.model, messages=asked, response_format={"type": "json_object"}, max_tokens=200, temperature=0
    )
    return answer.choices[0].finish_reason + repr((answer.choices[0].message.content or "")[:60])


def errors(service: Service) -> str:
    """Each mistake is raised as the class that programs catch."""
    client = client_of(service)
    ask, model = client.chat.completions.create, service.model
    wrong: Any = "two"
    mistakes: list[tuple[type[openai.APIStatusError], Any]] = [
        (openai.AuthenticationError, lambda: client_of(service, api_key="sk-not-one-of-them-00").models.list()),
        (openai.NotFoundError, lambda: ask(model="no-such-model", messages=_QUESTION)),
        (openai.NotFoundError, lambda: client.models.retrieve("no-such-model")),
        (openai.BadRequestError, lambda: ask(model=model, messages=_QUESTION, temperature=-1)),
        (openai.BadRequestError, lambda: ask(model=model, messages=_QUESTION, max_tokens=10_000_000)),
        (openai.BadRequestError, lambda: ask(model=model, messages=_QUESTION, n=wrong)),
        (openai.BadRequestError, lambda: ask(model=model, messages=_QUESTION, stream=True, top_p=2)),
        (openai.BadRequestError, lambda: client.completions.create(model=model, prompt="a", suffix="b")),
        (openai.BadRequestError, lambda: client.responses.create(model=model, input="a", previous_response_id="r")),
    ]
    for place, (kind, mistake) in enumerate(mistakes):
        error = raised(kind, mistake)
        assert all((error.message, error.request_id, error.code, error.type)), f"mistake {place}: {error.body}"
    return f"{len(mistakes)} mistakes"


def raised(kind: type[openai.APIStatusError], mistake: Callable[[], object]) -> openai.APIStatusError:
    try:
        mistake()
    except kind as error:
        return error
    raise AssertionError(f"no {kind.__name__}")


def time_out(service: Service) -> str:
    """The client gives up by its own clock, in the middle of an answer, and the service goes on."""
    client = client_of(service, timeout=0.3)
    try:
        client.chat.completions.create(
            model=service.model, messages=_QUESTION, max_tokens=512, extra_body={"ignore_eos": True}
        )
    except openai.APITimeoutError:
        return chat(service)
    raise AssertionError("no time-out")


def many_at_once(service: Service) -> str:
    """The asyncio client: a dozen streams together; one is left in the middle."""

    async def one(client: openai.AsyncOpenAI, number: int) -> int:
        stream = await client.chat.completions.create(
            model=service.model,
            messages=[{"role": "user", "content": f"Count to {number}."}],
            max_tokens=16,
            stream=True,
        )
        count = 0
        async with stream:
            async for chunk in stream:
                count += bool(chunk.choices)
                if number == 3 and count == 2:
                    break
        return count

    async def all_of_them() -> list[int]:
        async with openai.AsyncOpenAI(base_url=service.base_url, api_key=service.key, max_retries=0) as client:
            return await asyncio.gather(*(one(client, number) for number in range(12)))

    counts = asyncio.run(all_of_them())
    assert all(count >= 2 for count in counts)
    return f"{sum(counts)} chunks of {len(counts)} streams"


if __name__ == "__main__":
    main(
        models,
        chat,
        chat_stream,
        chat_stream_helper,
        two_choices,
        chat_logprobs,
        completions,
        completions_of_a_list,
        responses,
        responses_stream_helper,
        responses_parsed,
        responses_tools,
        responses_stored,
        responses_by_reference,
        responses_in_the_background,
        conversations,
        tools_round_trip,
        tools_streamed,
        json_schema,
        json_object,
        errors,
        time_out,
        many_at_once,
    )
