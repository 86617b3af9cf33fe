"""inspect-ai: evaluations over chats and over Responses: samples scored, choices, tools, schemas, logprobs, usage."""

import asyncio
import json
import tempfile
from typing import Any

from inspect_ai import Task  # type: ignore[import-not-found]
from inspect_ai import eval as evaluate
from inspect_ai.dataset import MemoryDataset, Sample  # type: ignore[import-not-found]
from inspect_ai.model import (  # type: ignore[import-not-found]
    ChatMessageTool,
    ChatMessageUser,
    GenerateConfig,
    ResponseSchema,
    get_model,
)
from inspect_ai.scorer import choice, includes  # type: ignore[import-not-found]
from inspect_ai.solver import generate, multiple_choice  # type: ignore[import-not-found]
from inspect_ai.tool import ToolFunction, ToolInfo, ToolParams  # type: ignore[import-not-found]
from inspect_ai.util import JSONSchema  # type: ignore[import-not-found]

from .checks import Service, main

_QUESTION = "What is the capital of France?"
_WEATHER = ToolInfo(
    name="weather",
    description="Tells the weather of a city.",
    parameters=ToolParams(properties={"city": JSONSchema(type="string", enum=["Paris", "Rome"])}, required=["city"]),
)
_CAPITAL = JSONSchema(
    type="object",
    properties={"name": JSONSchema(type="string", enum=["Paris", "Rome"]), "large": JSONSchema(type="boolean")},
    required=["name", "large"],
    additionalProperties=False,
)


def model_of(service: Service, **options: Any) -> Any:
    return get_model(
        f"openai-api/octavo/{service.model}",
        base_url=service.base_url,
        api_key=service.key,
        config=GenerateConfig(temperature=0, max_tokens=60, max_retries=0),
        memoize=False,
        **options,
    )


def evaluated(service: Service, task: Task, **options: Any) -> tuple[Any, list[Any]]:
    """The log of an evaluation and its samples, which are read when they are asked for."""
    with tempfile.TemporaryDirectory() as directory:
        [log] = evaluate(task, model=model_of(service), log_dir=directory, display="none", **options)
        assert log.status == "success", log.error
        return log, list(log.samples)


def samples_scored(service: Service) -> str:
    """Two rounds, which are greedy and so the same."""
    cities = {"France": "Paris", "Italy": "Rome", "Spain": "Madrid", "Austria": "Vienna"}
    dataset = MemoryDataset([Sample(input=f"What is the capital of {c}?", target=cities[c]) for c in cities])
    log, samples = evaluated(service, Task(dataset=dataset, solver=generate(), scorer=includes()), epochs=2)
    assert log.results.completed_samples == 8
    said: dict[Any, set[str]] = {}
    for sample in samples:
        assert sample.output.completion
        said.setdefault(sample.id, set()).add(sample.output.completion)
    assert len(said) == 4
    assert all(len(completions) == 1 for completions in said.values()), said
    [usage] = log.stats.model_usage.values()
    # What was found in the cache is counted apart.
    cached = usage.input_tokens_cache_read or 0
    assert usage.total_tokens == usage.input_tokens + cached + usage.output_tokens > 0
    accuracy = log.results.scores[0].metrics["accuracy"].value
    return f"8 samples, accuracy {accuracy}, {usage.total_tokens} tokens"


def choices(service: Service) -> str:
    dataset = MemoryDataset(
        [Sample(input=_QUESTION, choices=["Paris", "Rome"], target="A"), Sample("1 + 1?", ["3", "2"], target="B")]
    )
    log, _ = evaluated(service, Task(dataset=dataset, solver=multiple_choice(), scorer=choice()))
    assert log.results.completed_samples == 2
    return f"accuracy {log.results.scores[0].metrics['accuracy'].value}"


def tool(service: Service) -> str:
    """A call that is forced, and what the model says to what came of it; over chats and over Responses."""

    async def both(model: Any) -> str:
        question = ChatMessageUser(content=_QUESTION)
        first = await model.generate([question], tools=[_WEATHER], tool_choice=ToolFunction("weather"))
        assert first.stop_reason == "tool_calls"
        [call] = first.message.tool_calls
        assert call.arguments["city"] in ("Paris", "Rome")
        result = ChatMessageTool(content="sunny", tool_call_id=call.id, function="weather")
        second = await model.generate([question, first.message, result], tools=[_WEATHER], tool_choice="none")
        assert second.completion
        return f"{call.arguments}, then {second.completion[:30]!r}"

    return "; ".join(asyncio.run(both(model_of(service, responses_api=over))) for over in (False, True))


def response_schema(service: Service) -> str:
    config = GenerateConfig(response_schema=ResponseSchema(name="capital", json_schema=_CAPITAL, strict=True))
    output = asyncio.run(model_of(service).generate(_QUESTION, config=config))
    found = json.loads(output.completion)
    assert found.keys() == {"name", "large"}
    return str(output.completion)


def logprobs(service: Service) -> str:
    config = GenerateConfig(logprobs=True, top_logprobs=3)
    output = asyncio.run(model_of(service).generate(_QUESTION, config=config))
    found = output.choices[0].logprobs.content
    assert len(found) == output.usage.output_tokens
    assert all(token.logprob == max(top.logprob for top in token.top_logprobs) for token in found)
    return f"{len(found)} tokens"


if __name__ == "__main__":
    main(samples_scored, choices, tool, response_schema, logprobs)
