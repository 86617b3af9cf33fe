"""llama-index: chats and completions, whole, streamed and over asyncio, outputs of a type, tools of an agent."""

import asyncio
from typing import Any, Literal

from llama_index.core.llms import ChatMessage  # type: ignore[import-not-found]
from llama_index.core.prompts import PromptTemplate  # type: ignore[import-not-found]
from llama_index.core.tools import FunctionTool  # type: ignore[import-not-found]
from llama_index.llms.openai_like import OpenAILike  # type: ignore[import-not-found]
from pydantic import BaseModel, Field

from ..checks import Service, main

_QUESTION = "What is the capital of France?"


class Capital(BaseModel):
    """The capital of a country."""

    name: str = Field(max_length=20)
    large: bool


def weather(city: Literal["Paris", "Rome"]) -> str:
    """Tells the weather of a city."""
    return f"sunny in {city}"


def model_of(service: Service, **options: Any) -> Any:
    place = {"api_base": service.base_url, "api_key": service.key, "max_retries": 0}
    kind = {"is_chat_model": True, "is_function_calling_model": True, "context_window": 8192}
    return OpenAILike(**{"model": service.model, "max_tokens": 60, "temperature": 0.0, **place, **kind, **options})


def chat_and_stream(service: Service) -> str:
    question = [ChatMessage(role="user", content=_QUESTION)]
    whole = model_of(service).chat(question).message.content
    parts = [part.delta or "" for part in model_of(service).stream_chat(question)]
    assert len(parts) > 2
    assert "".join(parts) == whole
    return f"{len(parts)} parts of {whole[:40]!r}"


def completion(service: Service) -> str:
    model = model_of(service, is_chat_model=False, max_tokens=8)
    text = model.complete("One, two, three,").text
    assert "".join(part.delta for part in model.stream_complete("One, two, three,")) == text
    return repr(text)


def asyncio_too(service: Service) -> str:
    async def both() -> tuple[str, str]:
        model, question = model_of(service), [ChatMessage(role="user", content=_QUESTION)]
        parts = [part.delta or "" async for part in await model.astream_chat(question)]
        return (await model.achat(question)).message.content, "".join(parts)

    whole, streamed = asyncio.run(both())
    assert whole == streamed
    return repr(whole[:60])


def output_of_a_type(service: Service) -> str:
    """By the call of a function, which is forced."""
    found = model_of(service).structured_predict(Capital, PromptTemplate(_QUESTION))
    assert isinstance(found, Capital)
    return repr(found)


def tool(service: Service) -> str:
    model, tools = model_of(service), [FunctionTool.from_defaults(weather)]
    question = ChatMessage(role="user", content="What is the weather in Rome?")
    first = model.chat_with_tools(tools, chat_history=[question], tool_required=True)
    [call, *_] = model.get_tool_calls_from_response(first)
    assert call.tool_kwargs["city"] in ("Paris", "Rome")
    output = str(tools[0](**call.tool_kwargs))
    result = ChatMessage(role="tool", content=output, additional_kwargs={"tool_call_id": call.tool_id})
    second = model.chat([question, first.message, result]).message.content
    assert second
    return f"{call.tool_kwargs}, then {second[:40]!r}"


if __name__ == "__main__":
    main(chat_and_stream, completion, asyncio_too, output_of_a_type, tool)
