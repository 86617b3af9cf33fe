"""No way of writing content makes a control token that the template did not write."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.frontend.control_tokens import ControlTokens, ReservedText

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


@settings(max_examples=300, deadline=None, derandomize=True)
@given(text=content, left=st.sampled_from(["<", "<|", "<|e", "[INS"]), right=st.sampled_from(["|>", ">", "nd|>", "]"]))
def test_a_template_that_writes_the_other_part(text: str, left: str, right: str) -> None:
    if text:
        assert control_tokens_in(left + CONTROL.guard(text) + right) == []


def test_innocent_content_is_left_alone() -> None:
    assert CONTROL.guard("if a < b: print('[ok]')") == "if a < b: print('[ok]')"


def test_a_control_token_of_one_character_is_refused() -> None:
    with pytest.raises(ReservedText, match="control token"):
        ControlTokens(["§"]).guard("see § 4")
