"""haystack: chats whole and streamed, tools and what came of them, an answer of a schema, a pipeline."""

import json
from typing import Any

from haystack import Pipeline  # type: ignore[import-not-found]
from haystack.components.builders import ChatPromptBuilder  # type: ignore[import-not-found]
from haystack.components.generators.chat import OpenAIChatGenerator  # type: ignore[import-not-found]
from haystack.dataclasses import ChatMessage  # type: ignore[import-not-found]
from haystack.tools import Tool  # type: ignore[import-not-found]
from haystack.utils import Secret  # type: ignore[import-not-found]

from ..checks import Service, main

_QUESTION = "What is the capital of France?"
_SCHEMA = {
    "type": "object",
    "properties": {"capital": {"type": "string", "maxLength": 20}},
    "required": ["capital"],
    "additionalProperties": False,
}
_CITY = {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"]}
_WEATHER = Tool("weather", "Tells the weather of a city.", _CITY, lambda city: f"sunny in {city}")


def generator_of(service: Service, streaming_callback: Any = None, **fields: Any) -> Any:
    return OpenAIChatGenerator(
        api_key=Secret.from_token(service.key),
        api_base_url=service.base_url,
        model=service.model,
        generation_kwargs={"max_tokens": 60, "temperature": 0, **fields},
        streaming_callback=streaming_callback,
        max_retries=0,
    )


def reply(generator: Any, messages: Any, **options: Any) -> Any:
    [found] = generator.run(messages, **options)["replies"]
    return found


def text_and_stream(service: Service) -> str:
    question: list[Any] = [ChatMessage.from_user(_QUESTION)]
    parts: list[Any] = []
    whole = reply(generator_of(service), question)
    streamed = reply(generator_of(service, parts.append), question)
    assert streamed.text == whole.text == "".join(part.content for part in parts)
    assert whole.meta["usage"]["completion_tokens"] > 0
    return f"{len(parts)} parts of {whole.text[:40]!r}"


def tool(service: Service) -> str:
    question = ChatMessage.from_user("What is the weather in Rome?")
    forced = {"type": "function", "function": {"name": "weather"}}
    first = reply(generator_of(service, tool_choice=forced), [question], tools=[_WEATHER])
    assert first.tool_call.arguments["city"] in ("Paris", "Rome")
    result = ChatMessage.from_tool(_WEATHER.invoke(**first.tool_call.arguments), origin=first.tool_call)
    second = reply(generator_of(service, tool_choice="none"), [question, first, result], tools=[_WEATHER])
    assert second.text
    return f"{first.tool_call.arguments}, then {second.text[:40]!r}"


def schema(service: Service) -> str:
    form = {"type": "json_schema", "json_schema": {"name": "c", "schema": _SCHEMA, "strict": True}}
    answer = reply(generator_of(service, response_format=form), [ChatMessage.from_user(_QUESTION)])
    assert json.loads(answer.text).keys() == {"capital"}
    return str(answer.text)


def pipeline(service: Service) -> str:
    template = [ChatMessage.from_user("What is the capital of {{ country }}?")]
    pipe = Pipeline()
    pipe.add_component("prompt", ChatPromptBuilder(template=template, required_variables="*"))
    pipe.add_component("model", generator_of(service))
    pipe.connect("prompt.prompt", "model.messages")
    [answer] = pipe.run({"prompt": {"country": "Italy"}})["model"]["replies"]
    assert answer.text
    return repr(answer.text[:60])


if __name__ == "__main__":
    main(text_and_stream, tool, schema, pipeline)
