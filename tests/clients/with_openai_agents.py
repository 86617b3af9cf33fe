"""openai-agents: the SDK's loop over chats and over Responses: text, streams, tools, hand-overs, outputs of a type."""

import asyncio
import functools
from collections.abc import Awaitable, Callable
from typing import Any, Literal

from agents import (  # type: ignore[import-not-found]
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIConversationsSession,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from pydantic import BaseModel, Field

from .checks import Service, main

_QUESTION = "What is the capital of France?"
_WEATHER = "What is the weather in Rome?"
_KINDS = (OpenAIChatCompletionsModel, OpenAIResponsesModel)


class Capital(BaseModel):
    """The capital of a country."""

    name: str = Field(max_length=20)
    large: bool


@function_tool  # type: ignore[untyped-decorator]
def weather(city: Literal["Paris", "Rome"]) -> str:
    """Tells the weather of a city."""
    return f"sunny in {city}"


class Maker:
    """Makes agents that share a connection, in one event loop."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self.client = AsyncOpenAI(base_url=service.base_url, api_key=service.key, max_retries=0)

    def __call__(self, kind: Any, *, choice: str | None = None, **options: Any) -> Any:
        one_call = False if options.get("tools") or options.get("handoffs") else None
        settings = ModelSettings(temperature=0, max_tokens=100, tool_choice=choice, parallel_tool_calls=one_call)
        model = kind(model=self._service.model, openai_client=self.client)
        plain = {"name": "clerk", "instructions": "Be brief.", "model": model, "model_settings": settings}
        return Agent(**{**plain, **options})


def in_a_loop(check: Callable[[Maker], Awaitable[str]]) -> Callable[[Service], str]:
    """Turns a check of asyncio into one as the others are."""

    @functools.wraps(check)
    def run(service: Service) -> str:
        async def closed_at_the_end() -> str:
            make = Maker(service)
            async with make.client:
                return await check(make)

        return asyncio.run(closed_at_the_end())

    return run


@in_a_loop
async def text(make: Maker) -> str:
    said = []
    for kind in _KINDS:
        result = await Runner.run(make(kind), _QUESTION)
        usage = result.context_wrapper.usage
        assert result.final_output
        assert usage.total_tokens == usage.input_tokens + usage.output_tokens > 0
        said.append(result.final_output)
    # They say the same to the model.
    assert said[0] == said[1]
    return repr(said[0])


@in_a_loop
async def stream(make: Maker) -> str:
    counts = []
    for kind in _KINDS:
        result = Runner.run_streamed(make(kind), _QUESTION)
        raw = [event.data async for event in result.stream_events() if event.type == "raw_response_event"]
        pieces = [event.delta for event in raw if event.type == "response.output_text.delta"]
        assert len(pieces) > 2
        assert "".join(pieces) == result.final_output
        counts.append(len(pieces))
    return f"{counts} pieces"


@in_a_loop
async def tool(make: Maker) -> str:
    """The loop: a call that is forced, what came of it, and what the model says then."""
    said = []
    for kind in _KINDS:
        agent = make(kind, choice="required", tools=[weather])
        result = await Runner.run(agent, _WEATHER, max_turns=8)
        outputs = [item.output for item in result.new_items if item.type == "tool_call_output_item"]
        assert outputs
        assert set(outputs) <= {"sunny in Paris", "sunny in Rome"}
        assert result.final_output
        said.append(f"{outputs[0]!r}, then {result.final_output[:40]!r}")
    return "; ".join(said)


@in_a_loop
async def tool_streamed(make: Maker) -> str:
    found = set()
    for kind in _KINDS:
        agent = make(kind, choice="weather", tools=[weather], tool_use_behavior="stop_on_first_tool")
        result = Runner.run_streamed(agent, _WEATHER)
        names = [event.name async for event in result.stream_events() if event.type == "run_item_stream_event"]
        assert result.final_output in ("sunny in Paris", "sunny in Rome")
        assert names == ["tool_called", "tool_output"]
        found.add(result.final_output)
    return ", ".join(found)


@in_a_loop
async def hand_over(make: Maker) -> str:
    """From one agent to another, which is a call too."""
    for kind in _KINDS:
        expert = make(kind, name="expert", handoff_description="Knows the weather.")
        clerk = make(kind, choice="transfer_to_expert", handoffs=[expert])
        result = await Runner.run(clerk, _WEATHER)
        assert result.last_agent.name == "expert"
        assert result.final_output
    return repr(result.final_output)


@in_a_loop
async def output_type(make: Maker) -> str:
    found = [(await Runner.run(make(kind, output_type=Capital), _QUESTION)).final_output for kind in _KINDS]
    assert all(isinstance(capital, Capital) for capital in found)
    return repr(found)


@in_a_loop
async def second_turn(make: Maker) -> str:
    """What was said and called goes back as the SDK writes it."""
    for kind in _KINDS:
        first = await Runner.run(make(kind, choice="required", tools=[weather]), _WEATHER, max_turns=8)
        again = [*first.to_input_list(), {"role": "user", "content": _QUESTION}]
        second, fresh = await Runner.run(make(kind), again), await Runner.run(make(kind), _QUESTION)
        assert second.final_output
        usages = [result.context_wrapper.usage.input_tokens for result in (second, fresh)]
        assert usages[0] > usages[1] + 10, usages
    return repr(second.final_output)


@in_a_loop
async def stored_turns(make: Maker) -> str:
    """The server keeps what was said: by the id of the turn before, and as a conversation."""
    agent = make(OpenAIResponsesModel, choice="required", tools=[weather])
    first = await Runner.run(agent, _WEATHER, max_turns=8, auto_previous_response_id=True)
    plain = make(OpenAIResponsesModel)
    again = await Runner.run(plain, _QUESTION, previous_response_id=first.last_response_id)
    fresh = await Runner.run(plain, _QUESTION)
    conversation = await make.client.conversations.create()
    for _ in range(2):
        last = await Runner.run(plain, _QUESTION, conversation_id=conversation.id)
    usages = [result.context_wrapper.usage.input_tokens for result in (again, last, fresh)]
    assert min(usages[:2]) > usages[2] + 10, usages
    return f"{usages} tokens"


@in_a_loop
async def stored_items(make: Maker) -> str:
    """A session of the SDK's whose items the server keeps, and items that are named by their ids."""
    plain = make(OpenAIResponsesModel)
    session = OpenAIConversationsSession(openai_client=make.client)
    first = await Runner.run(plain, _QUESTION, session=session)
    second = await Runner.run(plain, _QUESTION, session=session)
    assert len(await session.get_items()) == 4
    [answer] = first.raw_responses[-1].output
    named = [{"type": "item_reference", "id": answer.id}, {"role": "user", "content": _QUESTION}]
    third, fresh = await Runner.run(plain, named), await Runner.run(plain, _QUESTION)
    usages = [result.context_wrapper.usage.input_tokens for result in (second, third, fresh)]
    assert usages[0] > usages[1] > usages[2], usages
    return f"{usages} tokens"


if __name__ == "__main__":
    set_tracing_disabled(True)
    main(text, stream, tool, tool_streamed, hand_over, output_type, second_turn, stored_turns, stored_items)
