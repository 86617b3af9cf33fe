"""No way of writing content makes a control token that the template did not write."""

import sys
from types import FrameType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.frontend.text.control_tokens import ControlTokens, ReservedText

TEXTS = ["<|end|>", "<|start|>", "[INST]"]
CONTROL = ControlTokens(TEXTS)
# Pieces that are control tokens, parts of them, and innocent text.
content = st.lists(st.sampled_from([*TEXTS, "<", "<|", "<|en", "d|>", "|>", ">", "[", "INST", "]", "x", " "])).map(
    "".join
)


def control_tokens_in(rendered: str) -> list[str]:
    return [text for text, is_control in CONTROL.split(rendered) if is_control]


@settings(max_examples=500, deadline=None, derandomize=True)
@given(first=content, second=content)
def test_contents_side_by_side(first: str, second: str) -> None:
    rendered = "<|start|>" + CONTROL.guard(first) + CONTROL.guard(second) + "<|end|>"
    assert control_tokens_in(rendered) == ["<|start|>", "<|end|>"]
    assert "".join(text for text, _ in CONTROL.split(rendered)) == f"<|start|>{first}{second}<|end|>"


@pytest.mark.parametrize("token", TEXTS)
def test_a_template_that_writes_the_other_part(token: str) -> None:
    for start in range(len(token)):
        for end in range(start + 1, len(token) + 1):
            before = [""] if start else ["", "x "]
            after = [""] if end < len(token) else ["", " x"]
            for content in (left + token[start:end] + right for left in before for right in after):
                rendered = token[:start] + CONTROL.guard(content) + token[end:]
                assert control_tokens_in(rendered) == [], (token[:start], content, token[end:])


def guarding(num_tokens: int) -> int:
    """How many instructions of Python it takes to guard a text from this many control tokens of one length."""
    control = ControlTokens(f"<|reserved_special_token_{number:03}|>" for number in range(num_tokens))
    instructions = 0

    def count(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal instructions
        frame.f_trace_opcodes = True
        instructions += event == "opcode"
        return count

    before = sys.gettrace()
    sys.settrace(count)
    try:
        guarded = control.guard("some words <")
    finally:
        sys.settrace(before)
    assert guarded != "some words <"
    return instructions


def test_a_text_is_guarded_from_many_control_tokens_as_fast_as_from_few() -> None:
    assert guarding(512) == guarding(2) > 0


def test_innocent_content_is_left_alone() -> None:
    assert CONTROL.guard("if a < b: print('[ok]')") == "if a < b: print('[ok]')"


def test_a_control_token_of_one_character_is_refused() -> None:
    with pytest.raises(ReservedText, match="control token"):
        ControlTokens(["§"]).guard("see § 4")
