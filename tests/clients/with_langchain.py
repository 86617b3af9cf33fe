"""langchain-openai: invoke, stream, batch, tools, structured output, and the same over asyncio."""

import asyncio
from typing import Any, Literal

from langchain_core.messages import HumanMessage, ToolMessage  # type: ignore[import-not-found]
from langchain_core.tools import tool  # type: ignore[import-not-found]
from langchain_openai import ChatOpenAI, OpenAI  # type: ignore[import-not-found]
from pydantic import BaseModel, Field

from .checks import Service, main

_QUESTION = "What is the capital of France?"


class Capital(BaseModel):
    """The capital of a country."""

    name: str = Field(max_length=20)
    large: bool


@tool  # type: ignore[untyped-decorator]
def weather(city: Literal["Paris", "Rome"]) -> str:
    """Tells the weather of a city."""
    return f"sunny in {city}"


def model_of(service: Service, **options: Any) -> Any:
    place = {"base_url": service.base_url, "api_key": service.key, "max_retries": 0}
    return ChatOpenAI(**{"model": service.model, "max_tokens": 60, "temperature": 0, **place, **options})


def invoke(service: Service) -> str:
    answer = model_of(service).invoke(_QUESTION)
    assert answer.content
    assert answer.usage_metadata["output_tokens"] <= 60
    assert answer.response_metadata["finish_reason"] in ("stop", "length")
    return repr(answer.content)


def stream(service: Service) -> str:
    model = model_of(service, stream_usage=True)
    chunks = list(model.stream(_QUESTION))
    assert "".join(chunk.content for chunk in chunks) == model.invoke(_QUESTION).content
    assert sum(chunk.usage_metadata["output_tokens"] for chunk in chunks if chunk.usage_metadata) > 0
    return f"{len(chunks)} chunks"


def batch(service: Service) -> str:
    model = model_of(service, max_tokens=8)
    questions = [f"Count from {number}." for number in range(6)]
    together = [answer.content for answer in model.batch(questions)]
    assert len(together) == 6
    assert all(together)
    return f"{len(together)} answers"


def asyncio_too(service: Service) -> str:
    async def both() -> tuple[str, str]:
        model = model_of(service)
        whole = (await model.ainvoke(_QUESTION)).content
        return whole, "".join([chunk.content async for chunk in model.astream(_QUESTION)])

    whole, streamed = asyncio.run(both())
    assert whole == streamed
    return repr(whole)


def bind_tools(service: Service) -> str:
    model = model_of(service)
    question = HumanMessage(_QUESTION)
    first = model.bind_tools([weather], tool_choice="any", parallel_tool_calls=False).invoke([question])
    (call,) = first.tool_calls
    assert call["args"]["city"] in ("Paris", "Rome")
    result = weather.invoke(call)
    assert isinstance(result, ToolMessage)
    second = model.bind_tools([weather], tool_choice="none").invoke([question, first, result])
    assert second.content
    return f"{call['args']}, then {second.content[:40]!r}"


def bind_tools_streamed(service: Service) -> str:
    chunks = list(model_of(service).bind_tools([weather], tool_choice="weather").stream(_QUESTION))
    whole = chunks[0]
    for chunk in chunks[1:]:
        whole += chunk
    assert [call["name"] for call in whole.tool_calls] == ["weather"]
    return str(whole.tool_calls[0]["args"])


def structured_output(service: Service) -> str:
    """By a schema, and by a call of a function."""
    found = [
        model_of(service).with_structured_output(Capital, method=method, strict=True).invoke(_QUESTION)
        for method in ("json_schema", "function_calling")
    ]
    assert all(isinstance(answer, Capital) for answer in found)
    return repr(found)


def structured_output_as_json(service: Service) -> str:
    question = 'Answer with JSON as {"name": "...", "large": true}, and nothing more. The capital of France?'
    model = model_of(service, max_tokens=200).with_structured_output(None, method="json_mode")
    return repr(model.invoke(question))


def responses(service: Service) -> str:
    model = model_of(service, use_responses_api=True)
    whole = model.invoke(_QUESTION).text
    streamed = "".join(chunk.text for chunk in model.stream(_QUESTION))
    assert whole == streamed
    return repr(whole)


def plain_completion(service: Service) -> str:
    model = OpenAI(
        model=service.model, base_url=service.base_url, api_key=service.key, max_tokens=8, temperature=0, max_retries=0
    )
    text: str = model.invoke("One, two, three,")
    assert "".join(model.stream("One, two, three,")) == text
    return repr(text)


if __name__ == "__main__":
    main(
        invoke,
        stream,
        batch,
        asyncio_too,
        bind_tools,
        bind_tools_streamed,
        structured_output,
        structured_output_as_json,
        responses,
        plain_completion,
    )
