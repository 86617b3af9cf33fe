"""instructor: models of Pydantic by tools, by JSON schemas, over Responses, in parts, in a list, after a mistake."""

import asyncio
from typing import Any, Literal

import instructor  # type: ignore[import-not-found]
from instructor import Mode
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel, Field, field_validator

from .checks import Service, main

_QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


class Capital(BaseModel):
    """The capital of a country."""

    name: str = Field(max_length=20)
    large: bool
    rank: Literal["first", "second"]


def place_of(service: Service) -> dict[str, Any]:
    return {"base_url": service.base_url, "api_key": service.key, "max_retries": 0}


def client_of(service: Service, mode: Any = Mode.TOOLS) -> Any:
    return instructor.from_openai(OpenAI(**place_of(service)), mode=mode)


def asked(service: Service, **options: Any) -> dict[str, Any]:
    return {
        "model": service.model,
        "messages": _QUESTION,
        "max_tokens": 200,
        "max_retries": 0,
        "temperature": 0,
        "response_model": Capital,
        **options,
    }


def each_mode(service: Service) -> str:
    """What a field is may be told in many ways; all of them come to an object of the class."""
    modes = (Mode.TOOLS, Mode.TOOLS_STRICT, Mode.JSON_SCHEMA)
    found = [client_of(service, mode).chat.completions.create(**asked(service)) for mode in modes]
    assert all(isinstance(capital, Capital) for capital in found)
    return repr(found)


def responses(service: Service) -> str:
    client = client_of(service, Mode.RESPONSES_TOOLS)
    capital = client.responses.create(
        model=service.model,
        input=_QUESTION,
        max_output_tokens=200,
        max_retries=0,
        temperature=0,
        response_model=Capital,
    )
    assert isinstance(capital, Capital)
    return repr(capital)


def usage(service: Service) -> str:
    client = client_of(service)
    capital, answer = client.chat.completions.create_with_completion(**asked(service))
    assert isinstance(capital, Capital)
    assert answer.choices[0].finish_reason == "tool_calls"
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    return f"{answer.usage.total_tokens} tokens"


def in_parts(service: Service) -> str:
    """The object is there before it is whole, for the arguments of a call come as they are written."""
    parts = list(client_of(service).chat.completions.create_partial(**asked(service)))
    assert len(parts) > 2
    assert not all(part.rank for part in parts)
    assert Capital(**parts[-1].model_dump())
    return f"{len(parts)} parts of {parts[-1]!r}"


def several(service: Service) -> str:
    """A list of objects, each of which is there as soon as it is whole."""
    found = []
    # A model of this size might never find an end to it.
    for capital in client_of(service).chat.completions.create_iterable(**asked(service, max_tokens=400)):
        found.append(capital)
        if len(found) == 2:
            break
    assert all(isinstance(capital, Capital) for capital in found)
    assert found
    return f"{len(found)} objects"


def mending(service: Service) -> str:
    """What the client does not like is said to the model, which is asked again with its call in the conversation."""
    tries = []

    class Doubted(Capital):
        """The capital of a country, which is wrong at first."""

        @field_validator("name")
        @classmethod
        def second_thoughts(cls, name: str) -> str:
            tries.append(name)
            if len(tries) == 1:
                raise ValueError("think again")
            return name

    capital = client_of(service).chat.completions.create(**asked(service, response_model=Doubted, max_retries=2))
    assert isinstance(capital, Doubted)
    assert len(tries) == 2
    return f"{tries[0]!r}, then {tries[1]!r}"


def asyncio_too(service: Service) -> str:
    client = instructor.from_openai(AsyncOpenAI(**place_of(service)), mode=Mode.JSON_SCHEMA)

    async def four() -> list[Any]:
        return await asyncio.gather(*(client.chat.completions.create(**asked(service)) for _ in range(4)))

    found = asyncio.run(four())
    assert all(isinstance(capital, Capital) for capital in found)
    return f"{len(found)} objects"


if __name__ == "__main__":
    main(each_mode, responses, usage, in_parts, several, mending, asyncio_too)
