"""pydantic-ai: agents over chats and over Responses: text, streams, outputs by call and by schema, tools, turns."""

import asyncio
from typing import Any, Literal

from pydantic import BaseModel, Field
from pydantic_ai import Agent, NativeOutput, ToolOutput  # type: ignore[import-not-found]
from pydantic_ai.direct import model_request_sync  # type: ignore[import-not-found]
from pydantic_ai.messages import (  # type: ignore[import-not-found]
    ModelRequest,
    ToolCallPart,
    ToolReturnPart,
    UserPromptPart,
)
from pydantic_ai.models import ModelRequestParameters  # type: ignore[import-not-found]
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel  # type: ignore[import-not-found]
from pydantic_ai.providers.openai import OpenAIProvider  # type: ignore[import-not-found]
from pydantic_ai.tools import ToolDefinition  # type: ignore[import-not-found]

from .checks import Service, main

_QUESTION = "What is the capital of France?"
_KINDS = (OpenAIChatModel, OpenAIResponsesModel)
_SETTINGS: Any = {"max_tokens": 120, "temperature": 0.0}


class Capital(BaseModel):
    """The capital of a country."""

    name: str = Field(max_length=20)
    large: bool
    rank: Literal["first", "second"]


def model_of(service: Service, kind: Any) -> Any:
    return kind(service.model, provider=OpenAIProvider(base_url=service.base_url, api_key=service.key))


def agent_of(service: Service, kind: Any, **options: Any) -> Any:
    return Agent(model_of(service, kind), **{"model_settings": _SETTINGS, "retries": 0, **options})


def text(service: Service) -> str:
    found = []
    for kind in _KINDS:
        result = agent_of(service, kind, instructions="Be brief.").run_sync(_QUESTION)
        usage = result.usage
        assert result.output
        assert usage.input_tokens > 0
        assert 0 < usage.output_tokens <= 120
        found.append(result.output)
    # They say the same to the model.
    assert found[0] == found[1]
    return repr(found[0])


def stream(service: Service) -> str:
    async def both(kind: Any) -> tuple[list[str], str]:
        agent = agent_of(service, kind)
        async with agent.run_stream(_QUESTION) as result:
            pieces = [piece async for piece in result.stream_text(delta=True, debounce_by=None)]
        return pieces, (await agent.run(_QUESTION)).output

    async def all_of_them() -> list[tuple[list[str], str]]:
        return [await both(kind) for kind in _KINDS]

    found = asyncio.run(all_of_them())
    for pieces, whole in found:
        assert len(pieces) > 2
        assert "".join(pieces) == whole
    return f"{[len(pieces) for pieces, _ in found]} pieces"


def outputs(service: Service) -> str:
    """By the call of a function, which is forced, and by a schema."""
    found = [
        agent_of(service, kind, output_type=output(Capital)).run_sync(_QUESTION).output
        for kind in _KINDS
        for output in (ToolOutput, NativeOutput)
    ]
    assert all(isinstance(capital, Capital) for capital in found)
    return repr(found)


def output_streamed(service: Service) -> str:
    async def parts() -> list[Any]:
        agent = agent_of(service, OpenAIChatModel, output_type=NativeOutput(Capital))
        async with agent.run_stream(_QUESTION) as result:
            return [part async for part in result.stream_output(debounce_by=None)]

    found = asyncio.run(parts())
    assert isinstance(found[-1], Capital)
    return f"{len(found)} parts of {found[-1]!r}"


def tool(service: Service) -> str:
    """A call that is forced, and what the model says to what came of it."""
    weather = ToolDefinition(
        name="weather",
        description="Tells the weather of a city.",
        parameters_json_schema={
            "type": "object",
            "properties": {"city": {"enum": ["Paris", "Rome"]}},
            "required": ["city"],
        },
    )
    forced = ModelRequestParameters(function_tools=[weather], allow_text_output=False)
    said = []
    for kind in _KINDS:
        model, question = model_of(service, kind), ModelRequest(parts=[UserPromptPart(_QUESTION)])
        first = model_request_sync(model, [question], model_settings=_SETTINGS, model_request_parameters=forced)
        calls = [part for part in first.parts if isinstance(part, ToolCallPart)]
        assert calls
        assert all(call.args_as_dict()["city"] in ("Paris", "Rome") for call in calls)
        results = [ToolReturnPart(call.tool_name, "sunny", tool_call_id=call.tool_call_id) for call in calls]
        second = model_request_sync(model, [question, first, ModelRequest(parts=results)], model_settings=_SETTINGS)
        assert second.text
        said.append(f"{calls[0].args_as_dict()}, then {second.text[:40]!r}")
    return "; ".join(said)


def several_turns(service: Service) -> str:
    for kind in _KINDS:
        agent = agent_of(service, kind)
        first = agent.run_sync(_QUESTION)
        second = agent.run_sync("And of Italy?", message_history=first.all_messages())
        assert second.output
        assert second.usage.input_tokens > first.usage.input_tokens + first.usage.output_tokens
    return f"{second.usage.input_tokens} tokens asked in the second turn"


if __name__ == "__main__":
    main(text, stream, outputs, output_streamed, tool, several_turns)
