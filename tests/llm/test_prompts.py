"""The forms that prompts come in."""

from typing import Any

import pytest

from octavo.client import Tool
from octavo.llm.llm import read_conversations, read_prompts, read_tools

HELLO = {"role": "user", "content": "hello"}


@pytest.mark.parametrize(
    ("given", "read"),
    [
        ("one", ["one"]),
        (["one", "two"], ["one", "two"]),
        ([1, 2, 3], [[1, 2, 3]]),
        ([[1, 2], [3]], [[1, 2], [3]]),
        ({"prompt": "one"}, ["one"]),
        ({"prompt_token_ids": [1, 2]}, [[1, 2]]),
        ([{"prompt_token_ids": [1, 2]}, "two", {"prompt": "x", "prompt_token_ids": [3]}], [[1, 2], "two", [3]]),
        ([], []),
    ],
)
def test_prompts_come_alone_and_in_lists(given: Any, read: list[Any]) -> None:
    assert read_prompts(given) == read


@pytest.mark.parametrize("given", [[1.5], [None], {"text": "x"}, [["a"]], {}])
def test_what_is_no_prompt_is_refused(given: Any) -> None:
    with pytest.raises(ValueError, match="a prompt"):
        read_prompts(given)


def test_conversations_come_alone_and_in_lists() -> None:
    assert read_conversations([HELLO]) == [[HELLO]]
    assert read_conversations([[HELLO], [HELLO, HELLO]]) == [[HELLO], [HELLO, HELLO]]


def test_tools_are_functions() -> None:
    schema = {"type": "object"}
    read = read_tools([{"type": "function", "function": {"name": "f", "parameters": schema}}])
    assert read == [Tool("f", "", schema)]
    with pytest.raises(ValueError, match="every tool"):
        read_tools([{"name": "f"}])
