"""Calls are found whatever the pieces, nothing of their markup becomes content, and nothing else is lost."""

import json
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.frontend.answer_parsers.call_formats import HERMES, NONE
from octavo.frontend.answer_parsers.parts import ContentText, ToolCallDelta, joined, text_of
from octavo.frontend.api.tool_calls import make_reader

LLAMA = "llama3_json"
CALL = '{"name": "add", "arguments": {"a": 1, "b": "}<tool_call>\\""}}'
ARGUMENTS = '{"a": 1, "b": "}<tool_call>\\""}'
SHORT = '{"name": "now", "parameters": {}}'
quickly = settings(max_examples=300, deadline=None, derandomize=True)
# What an answer is made of: whole calls, their parts, and innocent text.
parts = st.lists(
    st.sampled_from(
        [
            *("<tool_call>", "</tool_call>", "<|python_tag|>", CALL, SHORT, '{"a": {', "}", '"', "\\", ";", "; "),
            *("<", "<tool", " ", "\n", "text", '{"name": 1}', '{"name": "f", "arguments": []}', "日本 {"),
        ]
    ),
    max_size=10,
)


def parse(kind: str, pieces: Sequence[str]) -> tuple[str, list[tuple[int, str, str]], bool]:
    reader = make_reader(kind)
    parts = joined([part for piece in pieces for part in reader.take("", piece)] + reader.finish())
    calls = [(part.index, part.name, part.arguments) for part in parts if isinstance(part, ToolCallDelta)]
    return text_of(parts, ContentText), calls, reader.any_calls


def cut(data: st.DataObject, text: str) -> list[str]:
    ends = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    return [text[start:end] for start, end in zip([0, *ends], [*ends, len(text)], strict=True)]


@pytest.mark.parametrize("kind", [HERMES, LLAMA, NONE])
@quickly
@given(parts=parts, data=st.data())
def test_any_cut_gives_the_same(kind: str, parts: list[str], data: st.DataObject) -> None:
    text = "".join(parts)
    whole = parse(kind, [text])
    assert parse(kind, cut(data, text)) == whole
    assert parse(kind, list(text)) == whole
    assert whole[2] == bool(whole[1])


@pytest.mark.parametrize("kind", [HERMES, LLAMA])
@quickly
@given(parts=parts)
def test_without_calls_every_character_is_content(kind: str, parts: list[str]) -> None:
    text = "".join(parts)
    content, calls, _ = parse(kind, list(text))
    assert calls or content == text


@pytest.mark.parametrize("kind", [HERMES, LLAMA])
@quickly
@given(parts=parts)
def test_arguments_are_json_objects(kind: str, parts: list[str]) -> None:
    _, calls, _ = parse(kind, ["".join(parts)])
    # All but one that the answer's end has cut off.
    assert all(isinstance(json.loads(arguments), dict) for _, _, arguments in calls[:-1])
    assert all(arguments.startswith("{") for _, _, arguments in calls)
    assert [index for index, _, _ in calls] == list(range(len(calls)))


def test_hermes_calls_amid_text() -> None:
    text = f"Let me see.\n<tool_call>\n{CALL}\n</tool_call>\n<tool_call>{SHORT}</tool_call>\n"
    assert parse(HERMES, list(text)) == ("Let me see.", [(0, "add", ARGUMENTS), (1, "now", "{}")], True)


def test_text_behind_a_call_is_content() -> None:
    assert parse(HERMES, [f"<tool_call>{SHORT}</tool_call>\nDone. "])[0] == "\nDone. "


def test_arguments_come_as_they_are_written() -> None:
    reader = make_reader(HERMES)
    pieces = [
        "<tool_call>\n{",
        '"name": "add", "argum',
        'ents": ',
        '{"a": ',
        "1",
        ', "b": "',
        "}",
        '"}',
        "}\n</tool",
        "_call>",
    ]
    parts = [
        [(part.name, part.arguments) for part in reader.take("", piece) if isinstance(part, ToolCallDelta)]
        for piece in pieces
    ]
    assert parts == [
        [],
        [],
        [],
        [("add", '{"a": ')],
        [("", "1")],
        [("", ', "b": "')],
        [("", "}")],
        [("", '"}')],
        [],
        [],
    ]
    assert reader.finish() == []


def test_a_call_that_is_cut_off_is_part_of_one() -> None:
    assert parse(HERMES, [f"<tool_call>{CALL[:-8]}"]) == ("", [(0, "add", ARGUMENTS[:-7])], True)


@pytest.mark.parametrize(
    "text", ["<tool_c", "<tool_call>", '<tool_call>\n{"name": "ad', '<tool_call>{"name": "add", "arguments": ']
)
def test_a_forced_call_that_is_cut_off_before_its_arguments_is_no_text(text: str) -> None:
    reader = make_reader(HERMES, is_forced=True)
    assert reader.take("", text) + reader.finish() == []


def test_a_missing_brace_swallows_nothing() -> None:
    text = '<tool_call>{"name": "add", "arguments": {"a": 1}</tool_call> Done.'
    assert parse(HERMES, list(text)) == (" Done.", [(0, "add", '{"a": 1}')], True)


@pytest.mark.parametrize(
    "call", ['{"arguments": {"a": 1}, "name": "add"}', '{"id": 7, "name": "add", "arguments": {"a": 1}}']
)
def test_calls_whose_fields_are_in_another_order_come_whole(call: str) -> None:
    assert parse(HERMES, list(f"<tool_call>{call}</tool_call>")) == ("", [(0, "add", '{"a": 1}')], True)


@pytest.mark.parametrize("end", ["", "\n", "\n</tool_ca"])
def test_a_call_that_is_not_closed_is_one(end: str) -> None:
    assert parse(HERMES, list(f"<tool_call>{SHORT}{end}")) == ("", [(0, "now", "{}")], True)


@pytest.mark.parametrize(
    "text", ["<tool_call>", '<tool_call>{"name": "add", "arguments": 1', "<tool_call>{'name': 'x'}</tool_call>", "<to"]
)
def test_what_is_no_call_is_content(text: str) -> None:
    assert parse(HERMES, list(text)) == (text, [], False)


def test_llama_calls_at_the_start() -> None:
    text = f'{SHORT}; {{"name": "f", "parameters": {{"x": [1]}}}}'
    assert parse(LLAMA, list(text)) == ("", [(0, "now", "{}"), (1, "f", '{"x": [1]}')], True)


def test_llama_calls_behind_the_marker() -> None:
    assert parse(LLAMA, list(f"Well.\n<|python_tag|>{SHORT}")) == ("Well.", [(0, "now", "{}")], True)


@pytest.mark.parametrize("text", ['{"answer": 42}', "print(1)", "<|python_tag|>print(1)", f"I say {SHORT}"])
def test_llama_text_that_is_no_call(text: str) -> None:
    assert parse(LLAMA, list(text)) == (text, [], False)


def test_content_is_let_out_as_soon_as_it_is_certain() -> None:
    reader = make_reader(HERMES)
    pieces = ("Hi", " there <", "b> ", "x")
    assert [text_of(reader.take("", piece), ContentText) for piece in pieces] == ["Hi", " there", " <b>", " x"]


def test_every_call_has_an_id_of_its_own() -> None:
    parts = make_reader(LLAMA).take("", f"{SHORT};{SHORT}")
    ids = [part.id for part in parts if isinstance(part, ToolCallDelta)]
    assert all(call_id.startswith("call_") for call_id in ids)
    assert len(set(ids)) == 2


@pytest.mark.parametrize("kind", [HERMES, LLAMA])
@pytest.mark.parametrize("unit", ["<tool_call>{", "<|python_tag|>{", '{"', "\\", " ", "<tool_call"])
def test_long_nonsense_takes_no_longer_per_character(kind: str, unit: str) -> None:
    # A search that began anew at every marker would take minutes.
    text = unit * (200_000 // len(unit))
    assert parse(kind, [text[at : at + 1000] for at in range(0, len(text), 1000)]) == (text, [], False)
