"""POST /v1/chat/completions, through the official client."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import openai
import pytest

from octavo.frontend.server import FrontendServer
from octavo.testing.fakes.fake_scheduler import FakeScheduler
from octavo.wire.requests import Delta

AnswerWith = Callable[..., None]
HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture
def ask(client: openai.AsyncOpenAI) -> Callable[..., Any]:
    async def ask(messages: Any = None, **fields: Any) -> Any:
        fields = {"model": "byte-model", "messages": messages or HELLO, "seed": 7, "max_tokens": 16, **fields}
        return await client.chat.completions.create(**fields)

    return ask


def prompt_of(scheduler: FakeScheduler, frontend: FrontendServer) -> str:
    return frontend.generation.tokenizer.decode(scheduler.submitted[-1].prompt_token_ids, skip_special_tokens=False)


async def test_an_answer_has_message_reason_and_usage(scheduler: FakeScheduler, ask: Any) -> None:
    answer = await ask()
    assert (answer.object, answer.id[:9]) == ("chat.completion", "chatcmpl-")
    [choice] = answer.choices
    assert (choice.message.role, choice.finish_reason, choice.logprobs) == ("assistant", "length", None)
    assert len(choice.message.content) == 16
    assert choice.message.tool_calls is None
    assert answer.usage.completion_tokens == 16
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 16


async def test_a_stream_is_role_then_content_then_reason(scheduler: FakeScheduler, ask: Any) -> None:
    whole = await ask(n=2)
    chunks = [chunk async for chunk in await ask(n=2, stream=True)]
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    for index in (0, 1):
        mine = [chunk.choices[0] for chunk in chunks if chunk.choices[0].index == index]
        assert (mine[0].delta.role, mine[0].delta.content) == ("assistant", "")
        assert "".join(choice.delta.content or "" for choice in mine) == whole.choices[index].message.content
        assert [choice.finish_reason for choice in mine] == [None] * (len(mine) - 1) + ["length"]


async def test_what_fits_is_answered_where_no_limit_is_set(scheduler: FakeScheduler, ask: Any) -> None:
    await ask(max_tokens=None)
    [request] = scheduler.submitted
    assert request.sampling.max_tokens == 512 - len(request.prompt_token_ids)


async def test_a_prediction_reaches_the_scheduler_as_tokens(
    scheduler: FakeScheduler, frontend: FrontendServer, ask: Any
) -> None:
    plain = await ask()
    parts = [{"type": "text", "text": "two"}, {"type": "text", "text": " parts"}]
    for content in ("two parts", parts):
        answer = await ask(prediction={"type": "content", "content": content})
        predicted = scheduler.submitted[-1].predicted_token_ids
        assert frontend.generation.tokenizer.decode(predicted, skip_special_tokens=False) == "two parts"
        assert answer.choices[0].message == plain.choices[0].message
    await ask(prediction=None)
    assert scheduler.submitted[0].predicted_token_ids == scheduler.submitted[-1].predicted_token_ids == []


async def test_the_longest_prediction_is_as_long_as_the_context(scheduler: FakeScheduler, ask: Any) -> None:
    await ask(prediction={"type": "content", "content": "x" * 512})
    assert len(scheduler.submitted[-1].predicted_token_ids) == 512


async def test_usage_counts_right_and_wrong_predictions(scheduler: FakeScheduler, ask: Any) -> None:
    def drafted(delta: Delta) -> list[Delta]:
        counts = {"drafted": 9, "accepted": 7, "accepted_predictions": 4, "rejected_predictions": 1}
        return [msgspec.structs.replace(delta, **counts)]

    def details(usage: Any) -> tuple[int, int]:
        found = usage.completion_tokens_details
        return found.accepted_prediction_tokens, found.rejected_prediction_tokens

    assert details((await ask()).usage) == (0, 0)
    scheduler.tamper = drafted
    assert details((await ask(n=2)).usage) == (8, 2)
    chunks = [chunk async for chunk in await ask(n=2, stream=True, stream_options={"include_usage": True})]
    assert details(chunks[-1].usage) == (8, 2)


async def test_the_newer_name_of_the_limit_wins(scheduler: FakeScheduler, ask: Any) -> None:
    await ask(max_tokens=9, max_completion_tokens=3)
    assert scheduler.submitted[0].sampling.max_tokens == 3


async def test_parts_and_all_roles_go_through_the_template(
    scheduler: FakeScheduler, frontend: FrontendServer, ask: Any
) -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    await ask([{"role": "developer", "content": "be brief"}, {"role": "user", "content": parts}])
    assert prompt_of(scheduler, frontend) == (
        "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\none\ntwo<|im_end|>\n<|im_start|>assistant\n"
    )


async def test_calls_and_their_results_may_be_in_the_messages(scheduler: FakeScheduler, ask: Any) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    messages = [
        *HELLO,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "2"},
    ]
    assert (await ask(messages)).choices[0].message.content


async def test_control_tokens_in_content_are_text(scheduler: FakeScheduler, ask: Any) -> None:
    await ask([{"role": "user", "content": "<|im_end|>"}])
    assert scheduler.submitted[0].prompt_token_ids.count(257) == 1


async def test_a_final_message_can_be_continued(scheduler: FakeScheduler, frontend: FrontendServer, ask: Any) -> None:
    messages = [*HELLO, {"role": "assistant", "content": "I am"}]
    await ask(messages, extra_body={"continue_final_message": True})
    assert prompt_of(scheduler, frontend).endswith("<|im_start|>assistant\nI am")


async def test_the_turn_may_be_left_open(scheduler: FakeScheduler, frontend: FrontendServer, ask: Any) -> None:
    await ask(extra_body={"add_generation_prompt": False})
    assert prompt_of(scheduler, frontend).endswith("hello<|im_end|>\n")


async def test_logprobs_have_bytes(scheduler: FakeScheduler, answer_with: AnswerWith, ask: Any) -> None:
    answer_with("aé")
    content = (await ask(logprobs=True, top_logprobs=2, max_tokens=3)).choices[0].logprobs.content
    assert [entry.token for entry in content] == ["a", "bytes:\\xc3", "bytes:\\xa9"]
    assert bytes(byte for entry in content for byte in entry.bytes).decode() == "aé"
    assert all(entry.logprob < 0 and len(entry.top_logprobs) == 2 for entry in content)


async def test_streamed_logprobs_are_those_of_the_whole(scheduler: FakeScheduler, ask: Any) -> None:
    whole = (await ask(logprobs=True)).choices[0].logprobs.content
    streamed: list[Any] = []
    async for chunk in await ask(logprobs=True, stream=True):
        streamed += chunk.choices[0].logprobs.content if chunk.choices[0].logprobs else []
    assert streamed == whole
    assert all(entry.top_logprobs == [] for entry in whole)


async def test_the_usage_comes_last_and_without_choices(scheduler: FakeScheduler, ask: Any) -> None:
    chunks = [chunk async for chunk in await ask(stream=True, stream_options={"include_usage": True})]
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 16
    assert all(chunk.usage is None for chunk in chunks[:-1])


async def test_the_usage_can_be_told_all_along(scheduler: FakeScheduler, ask: Any) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    counts = [chunk.usage.completion_tokens async for chunk in await ask(stream=True, stream_options=options)]
    assert counts[0] == 0
    assert counts == sorted(counts)
    assert counts[-1] == 16


async def test_token_ids_are_returned_where_they_are_asked_for(scheduler: FakeScheduler, ask: Any) -> None:
    answer = await ask(extra_body={"return_token_ids": True})
    assert answer.prompt_token_ids == scheduler.submitted[0].prompt_token_ids
    assert len(answer.choices[0].token_ids) == 16
    chunks = [chunk async for chunk in await ask(extra_body={"return_token_ids": True}, stream=True)]
    assert chunks[0].prompt_token_ids == answer.prompt_token_ids
    assert [i for c in chunks[1:-1] for i in c.choices[0].token_ids] == answer.choices[0].token_ids


WEATHER = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}
CALL = 'Well. <tool_call>\n{"name": "weather", "arguments": {"city": "Bern"}}\n</tool_call>'


@pytest.fixture
def with_tools(config: Any, roomy_model_directory: Path) -> None:
    """Answers are searched for calls, whatever the model's template says."""
    object.__setattr__(config, "model_directory", roomy_model_directory)
    object.__setattr__(config, "tool_call_parser", "hermes")


@pytest.mark.usefixtures("with_tools")
class TestTools:
    async def test_a_call_is_found_in_an_answer(self, answer_with: AnswerWith, ask: Any) -> None:
        answer_with(CALL)
        [choice] = (await ask(tools=[WEATHER], max_tokens=200)).choices
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content.strip() == "Well."
        [call] = choice.message.tool_calls
        assert (call.type, call.function.name) == ("function", "weather")
        assert json.loads(call.function.arguments) == {"city": "Bern"}

    async def test_a_call_is_found_in_a_stream(self, answer_with: AnswerWith, ask: Any) -> None:
        answer_with(CALL)
        content, reasons = "", []
        calls: list[Any] = []
        async for chunk in await ask(tools=[WEATHER], max_tokens=200, stream=True):
            [choice] = chunk.choices
            content += choice.delta.content or ""
            calls += choice.delta.tool_calls or []
            reasons += [choice.finish_reason] if choice.finish_reason else []
        assert (content.strip(), reasons) == ("Well.", ["tool_calls"])
        assert [call.function.name for call in calls if call.id] == ["weather"]
        assert json.loads("".join(call.function.arguments for call in calls)) == {"city": "Bern"}

    async def test_arguments_are_streamed_as_they_come(
        self, scheduler: FakeScheduler, answer_with: AnswerWith, ask: Any
    ) -> None:
        answer_with(CALL)
        scheduler.hold_after = CALL.index(' "Bern"')
        arguments = ""
        async for chunk in await ask(tools=[WEATHER], max_tokens=200, stream=True):
            for part in chunk.choices[0].delta.tool_calls or []:
                arguments += part.function.arguments
            if arguments == '{"city":':
                # Not before there was something of them.
                scheduler.hold_after = 1 << 30
        assert json.loads(arguments) == {"city": "Bern"}

    async def test_a_call_that_is_cut_off_is_part_of_one_and_no_text(self, answer_with: AnswerWith, ask: Any) -> None:
        answer_with(CALL.removeprefix("Well. "))
        for stream in (False, True):
            found = await ask(tools=[WEATHER], tool_choice="required", max_tokens=60, stream=stream)
            if stream:
                chunks = [chunk.choices[0] async for chunk in found]
                content = "".join(choice.delta.content or "" for choice in chunks)
                calls = [call for choice in chunks for call in choice.delta.tool_calls or []]
                reason = chunks[-1].finish_reason
            else:
                content, calls = found.choices[0].message.content or "", found.choices[0].message.tool_calls
                reason = found.choices[0].finish_reason
            assert (content, reason, calls[0].function.name) == ("", "length", "weather")
            assert '{"city": "Bern"}'.startswith("".join(call.function.arguments for call in calls))

    async def test_without_tools_the_same_answer_is_content(self, answer_with: AnswerWith, ask: Any) -> None:
        answer_with(CALL)
        for fields in ({}, {"tools": [WEATHER], "tool_choice": "none"}):
            [choice] = (await ask(max_tokens=200, **fields)).choices
            assert (choice.message.content, choice.finish_reason) == (CALL, "stop")

    async def test_one_call_where_several_are_not_wanted(self, answer_with: AnswerWith, ask: Any) -> None:
        answer_with(CALL + CALL)
        both = (await ask(tools=[WEATHER], max_tokens=300)).choices[0].message.tool_calls
        one = (await ask(tools=[WEATHER], max_tokens=300, parallel_tool_calls=False)).choices[0].message.tool_calls
        assert (len(both), len(one)) == (2, 1)

    async def test_a_forced_call_comes_before_another_format(self, scheduler: FakeScheduler, ask: Any) -> None:
        await ask(tools=[WEATHER], tool_choice="required", response_format={"type": "json_object"})
        assert "weather" in scheduler.submitted[-1].sampling.grammar
        assert "answer" not in scheduler.submitted[-1].sampling.grammar

    async def test_functions_are_told_of_where_the_template_is_silent(
        self, scheduler: FakeScheduler, frontend: FrontendServer, ask: Any
    ) -> None:
        await ask(tools=[WEATHER])
        prompt = frontend.generation.tokenizer.decode(
            scheduler.submitted[-1].prompt_token_ids, skip_special_tokens=False
        )
        assert '{"name":"weather","parameters":{"type":"object","properties":{"city":{"type":"string"}}}}' in prompt
