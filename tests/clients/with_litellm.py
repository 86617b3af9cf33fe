"""litellm: completion and acompletion, streams, tools, formats, errors, in the way its users name such a server."""

import asyncio
import json
from typing import Any

import litellm  # type: ignore[import-not-found]

from .checks import Service, main

_MESSAGES = [{"role": "user", "content": "What is the capital of France?"}]
_WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"]},
    },
}
_SCHEMA = {
    "type": "object",
    "properties": {"large": {"type": "boolean"}},
    "required": ["large"],
    "additionalProperties": False,
}


def asked(service: Service, **options: Any) -> dict[str, Any]:
    place = {"api_base": service.base_url, "api_key": service.key, "max_retries": 0}
    return {"model": f"openai/{service.model}", "messages": _MESSAGES, "max_tokens": 16, **place, **options}


def completion(service: Service) -> str:
    answer = litellm.completion(**asked(service, temperature=0))
    assert answer.choices[0].finish_reason in ("stop", "length")
    assert answer.usage.completion_tokens <= 16
    return repr(answer.choices[0].message.content)


def hosted_vllm(service: Service) -> str:
    """Its provider for vLLM's servers, with a parameter of theirs."""
    answer = litellm.completion(**asked(service, model=f"hosted_vllm/{service.model}", top_k=1, min_tokens=2))
    return repr(answer.choices[0].message.content)


def stream(service: Service) -> str:
    options = {"temperature": 0, "stream": True, "stream_options": {"include_usage": True}}
    chunks = list(litellm.completion(**asked(service, **options)))
    whole = litellm.completion(**asked(service, temperature=0))
    built = litellm.stream_chunk_builder(chunks, messages=_MESSAGES)
    assert built.choices[0].message.content == whole.choices[0].message.content
    assert built.choices[0].finish_reason == whole.choices[0].finish_reason
    assert built.usage.completion_tokens == whole.usage.completion_tokens
    return f"{len(chunks)} chunks"


def acompletion(service: Service) -> str:
    async def both() -> tuple[Any, str]:
        whole = await litellm.acompletion(**asked(service, temperature=0))
        text = ""
        async for chunk in await litellm.acompletion(**asked(service, temperature=0, stream=True)):
            text += chunk.choices[0].delta.content or ""
        return whole.choices[0].message.content, text

    whole, text = asyncio.run(both())
    assert whole == text
    return repr(text)


def tools(service: Service) -> str:
    options: dict[str, Any] = {"tools": [_WEATHER], "max_tokens": 60, "parallel_tool_calls": False}
    choice = litellm.completion(**asked(service, tool_choice="required", **options)).choices[0]
    assert choice.finish_reason == "tool_calls"
    (call,) = choice.message.tool_calls
    assert json.loads(call.function.arguments)["city"] in ("Paris", "Rome")
    result = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
    messages = [*_MESSAGES, choice.message, result]
    answer = litellm.completion(**asked(service, messages=messages, tool_choice="none", **options))
    assert answer.choices[0].message.content
    return f"{call.function.arguments}, then {answer.choices[0].message.content[:40]!r}"


def json_schema(service: Service) -> str:
    response_format = {"type": "json_schema", "json_schema": {"name": "a", "schema": _SCHEMA, "strict": True}}
    answer = litellm.completion(**asked(service, response_format=response_format, max_tokens=40))
    content: str = answer.choices[0].message.content
    assert isinstance(json.loads(content)["large"], bool)
    return content


def text_completion(service: Service) -> str:
    options = asked(service, model=f"text-completion-openai/{service.model}", prompt="One, two,", temperature=0)
    del options["messages"]
    answer = litellm.text_completion(**options)
    return repr(answer.choices[0].text)


def responses(service: Service) -> str:
    options = asked(service, input="Say hello.", max_output_tokens=12)
    del options["messages"], options["max_tokens"]
    answer = litellm.responses(**options)
    return repr(answer.output[0].content[0].text)


def errors(service: Service) -> str:
    mistakes: list[tuple[type[Exception], dict[str, Any]]] = [
        (litellm.AuthenticationError, {"api_key": "sk-not-one-of-them-00"}),
        (litellm.NotFoundError, {"model": "openai/no-such-model"}),
        (litellm.BadRequestError, {"temperature": -1}),
    ]
    for kind, options in mistakes:
        try:
            litellm.completion(**asked(service, **options))
        except kind:
            continue
        raise AssertionError(f"no {kind.__name__}")
    return f"{len(mistakes)} classes"


if __name__ == "__main__":
    litellm.suppress_debug_info = True
    main(completion, hosted_vllm, stream, acompletion, tools, json_schema, text_completion, responses, errors)
