"""What the messages of Anthropic's API become in a prompt, and calls of tools in an answer."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from octavo.frontend.server import FrontendServer
from octavo.frontend.text.grammars import load_vocabulary
from octavo.runtime.models.grammar import compile_grammar
from octavo.testing.fakes.fake_scheduler import FakeScheduler

AnswerWith = Callable[[str], None]
WEATHER: dict[str, Any] = {
    "name": "weather",
    "description": "of a city",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
CLOCK: dict[str, Any] = {"name": "clock", "input_schema": {"type": "object", "properties": {}}}
CALL = 'Well. <tool_call>\n{"name": "weather", "arguments": {"city": "Bern"}}\n</tool_call>'
USE = {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"city": "Bern"}}


def turns(*said: tuple[str, str]) -> str:
    return "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in said)


def text(*texts: str) -> list[dict[str, Any]]:
    return [{"type": "text", "text": each} for each in texts]


def accepts(frontend: FrontendServer, grammar: str, answer: str) -> bool:
    """Whether a grammar lets a text through as a whole answer."""
    vocabulary = load_vocabulary(Path(frontend.generation.tokenizer.files.directory))
    matcher = compile_grammar(grammar, vocabulary)
    return matcher.consume_tokens(vocabulary.tokenize_str(answer)) and matcher.is_accepting()


async def test_messages_become_the_chat(post: Any, prompt: Callable[[], str]) -> None:
    messages = [
        {"role": "user", "content": text("a", "b")},
        {"role": "user", "content": "c"},
        {"role": "assistant", "content": text("d")},
        {"role": "system", "content": "now briefly"},
        {"role": "user", "content": [{"type": "document", "source": {"type": "text", "data": "e"}}]},
    ]
    await post(messages=messages, system=text("be kind", "and true"))
    said = [
        ("system", "be kind\nand true"),
        ("user", "a\nb\nc"),
        ("assistant", "d"),
        ("system", "now briefly"),
        ("user", "e"),
    ]
    assert prompt() == f"{turns(*said)}<|im_start|>assistant\n"


async def test_neighbours_are_put_together_however_many_there_are(post: Any, prompt: Callable[[], str]) -> None:
    asked = [{"role": "user", "content": "x"}] * 100
    answered = [{"role": "assistant", "content": each} for each in ("y", "", "z")]
    assert (await post(messages=[*asked, *answered, asked[0]])).status_code == 200
    said = [("user", "\n".join("x" * 100)), ("assistant", "y\nz"), ("user", "x")]
    assert prompt() == f"{turns(*said)}<|im_start|>assistant\n"


async def test_what_a_client_writes_for_its_accounts_is_no_part_of_the_prompt(
    post: Any, prompt: Callable[[], str]
) -> None:
    answer = await post(system=text("x-anthropic-billing-header: cc_version=1; cch=5f;", "be kind"))
    assert prompt() == turns(("system", "be kind"), ("user", "hello")) + "<|im_start|>assistant\n"
    assert answer.headers["x-octavo-unknown-fields"] == "system[0]"


async def test_an_assistants_message_at_the_end_is_gone_on_with(post: Any, prompt: Callable[[], str]) -> None:
    messages = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "The answer is ("}]
    await post(messages=messages)
    assert prompt() == turns(("user", "hello")) + "<|im_start|>assistant\nThe answer is ("


@pytest.fixture
def with_tools(config: Any, roomy_model_directory: Path) -> None:
    # Before the frontend is made from it.
    object.__setattr__(config, "model_directory", roomy_model_directory)
    object.__setattr__(config, "tool_parser", "hermes")


@pytest.mark.usefixtures("with_tools")
class TestTools:
    async def test_a_call_is_a_block_of_its_own(self, answer_with: AnswerWith, post: Any) -> None:
        answer_with(CALL)
        told = (await post(tools=[WEATHER], max_tokens=200)).json()
        said, call = told["content"]
        assert (said, told["stop_reason"]) == ({"type": "text", "text": "Well."}, "tool_use")
        assert call.pop("id").startswith("toolu_")
        assert call == {"type": "tool_use", "name": "weather", "input": {"city": "Bern"}}

    async def test_a_stream_brings_a_calls_input_as_it_comes(self, answer_with: AnswerWith, events_of: Any) -> None:
        answer_with(CALL + CALL.removeprefix("Well. "))
        events = await events_of(tools=[WEATHER], max_tokens=300)
        kinds = [event["type"] for event in events]
        blocks = [event["content_block"] for event in events if event["type"] == "content_block_start"]
        assert [block["type"] for block in blocks] == ["text", "tool_use", "tool_use"]
        assert [block["input"] for block in blocks[1:]] == [{}, {}]
        assert len({block["id"] for block in blocks[1:]}) == 2
        for index in (1, 2):
            deltas = [e["delta"] for e in events if e["type"] == "content_block_delta" and e["index"] == index]
            assert {delta["type"] for delta in deltas} == {"input_json_delta"}
            assert len(deltas) > 1
            assert json.loads("".join(delta["partial_json"] for delta in deltas)) == {"city": "Bern"}
        # A block is closed before the next is opened.
        assert [kind for kind in kinds if kind in ("content_block_start", "content_block_stop")] == [
            *("content_block_start", "content_block_stop") * 3
        ]
        assert events[-2]["delta"]["stop_reason"] == "tool_use"

    async def test_a_call_that_is_cut_off_is_told_as_it_is(self, answer_with: AnswerWith, post: Any) -> None:
        answer_with(CALL.removeprefix("Well. "))
        told = (await post(tools=[WEATHER], tool_choice={"type": "any"}, max_tokens=60)).json()
        [call] = told["content"]
        assert told["stop_reason"] == "max_tokens"
        assert '{"city": "Bern"}'.startswith(call["input"]["INVALID_JSON"])

    async def test_calls_and_their_results_are_sent_back(self, post: Any, prompt: Callable[[], str]) -> None:
        result = {"type": "tool_result", "tool_use_id": "toolu_1"}
        messages = [
            {"role": "user", "content": "?"},
            {"role": "assistant", "content": [*text("Well."), USE]},
            {"role": "user", "content": [{**result, "content": text("sun", "ny")}, *text("and?")]},
            {"role": "assistant", "content": [USE]},
            {"role": "user", "content": [{**result, "content": "no line", "is_error": True}]},
            {"role": "assistant", "content": [USE]},
            {"role": "user", "content": [result]},
        ]
        assert (await post(messages=messages, tools=[WEATHER])).status_code == 200
        called = '<tool_call>\n{"name": "weather", "arguments": {"city":"Bern"}}\n</tool_call>'
        said = prompt().replace('{"city": "Bern"}', '{"city":"Bern"}')
        assert said.endswith(
            turns(
                ("user", "?"),
                ("assistant", f"Well.\n{called}"),
                ("user", "<tool_response>\nsun\nny\n</tool_response>"),
                ("user", "and?"),
                ("assistant", called),
                ("user", "<tool_response>\nError: no line\n</tool_response>"),
                ("assistant", called),
                ("user", "<tool_response>\n\n</tool_response>"),
            )
            + "<|im_start|>assistant\n"
        )

    async def test_a_call_without_its_result_is_refused(self, post: Any) -> None:
        messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": [USE]}]
        answer = await post(messages=messages, tools=[WEATHER])
        assert "tool_result" in answer.json()["error"]["message"]

    @pytest.mark.parametrize(
        ("block", "words"),
        [
            ({"type": "tool_result", "content": "x"}, "tool_use_id is missing"),
            ({"type": "tool_result", "tool_use_id": "t", "content": [{"type": "image"}]}, "images cannot be looked at"),
            ({"type": "tool_use", "id": "t", "name": "f", "input": {}}, "of type 'tool_use' is not supported"),
        ],
    )
    async def test_results_that_cannot_be_read_are_refused(self, post: Any, block: Any, words: str) -> None:
        answer = await post(messages=[{"role": "user", "content": [block]}])
        assert answer.status_code == 400
        assert words in answer.json()["error"]["message"]

    async def test_a_choice_is_a_grammar(self, scheduler: FakeScheduler, frontend: FrontendServer, post: Any) -> None:
        def grammar() -> str:
            return scheduler.submitted[-1].sampling.grammar

        clock = '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'
        weather = '<tool_call>\n{"name": "weather", "arguments": {"city":"Bern"}}\n</tool_call>'
        tools = {"tools": [WEATHER, CLOCK]}
        await post(**tools)
        assert not grammar()
        await post(**tools, tool_choice={"type": "any"})
        assert accepts(frontend, grammar(), weather)
        assert accepts(frontend, grammar(), f"{weather}\n{clock}")
        assert not accepts(frontend, grammar(), "Well.")
        await post(**tools, tool_choice={"type": "any", "disable_parallel_tool_use": True})
        assert accepts(frontend, grammar(), clock)
        assert not accepts(frontend, grammar(), f"{weather}\n{clock}")
        await post(**tools, tool_choice={"type": "tool", "name": "clock"})
        assert accepts(frontend, grammar(), clock)
        assert not accepts(frontend, grammar(), weather)
        answer = await post(**tools, tool_choice={"type": "tool", "name": "other"})
        assert "tool_choice.name is 'other'" in answer.json()["error"]["message"]

    async def test_no_choice_leaves_the_tools_out(
        self, answer_with: AnswerWith, post: Any, prompt: Callable[[], str]
    ) -> None:
        answer_with(CALL)
        told = (await post(tools=[WEATHER], tool_choice={"type": "none"}, max_tokens=200)).json()
        assert told["content"] == text(CALL)
        assert "weather" not in prompt()

    async def test_one_call_at_most_where_parallel_ones_are_not_wanted(
        self, answer_with: AnswerWith, post: Any, events_of: Any
    ) -> None:
        answer_with(CALL + CALL)
        choice = {"type": "auto", "disable_parallel_tool_use": True}
        fields = {"tools": [WEATHER], "tool_choice": choice, "max_tokens": 300}
        kinds = [block["type"] for block in (await post(**fields)).json()["content"]]
        assert kinds.count("tool_use") == 1
        begun = [event for event in await events_of(**fields) if event["type"] == "content_block_start"]
        assert [event["content_block"]["type"] for event in begun].count("tool_use") == 1

    async def test_tools_of_anthropics_own_are_left_out_and_named(self, post: Any, prompt: Callable[[], str]) -> None:
        tools = [
            {"type": "web_search_20250305", "name": "web_search"},
            {**WEATHER, "type": "custom", "cache_control": {"type": "ephemeral"}, "input_examples": [{}]},
        ]
        answer = await post(tools=tools)
        named = answer.headers["x-octavo-unknown-fields"].split(", ")
        assert named == ["tools[0].web_search_20250305", "tools[1].input_examples"]
        assert "weather" in prompt()
        assert "web_search" not in prompt()

    async def test_tools_are_counted_too(self, post: Any) -> None:
        async def count(**fields: Any) -> int:
            counted = await post("/v1/messages/count_tokens", max_tokens=None, **fields)
            return int(counted.json()["input_tokens"])

        plain, shown = await count(), await count(tools=[WEATHER])
        assert shown > plain
        assert await count(tools=[WEATHER], tool_choice={"type": "none"}) == plain
        assert (await post(tools=[WEATHER])).json()["usage"]["input_tokens"] == shown
