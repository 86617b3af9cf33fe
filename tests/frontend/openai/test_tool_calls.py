"""The format in which a model calls tools is found, and an answer that is forced to be calls is parsed as calls."""

import json
from typing import Any

import pytest
from llguidance import LLMatcher

from octavo.frontend.answer_parsers.call_formats import HERMES, NONE, detect_format
from octavo.frontend.answer_parsers.parts import ToolCallDelta, joined
from octavo.frontend.api.body import Reading
from octavo.frontend.api.tool_calls import (
    MAX_TOOLS,
    ToolChoice,
    ToolChoiceMode,
    Tools,
    constraint_for,
    make_reader,
    read_tool_choice,
    read_tools,
)
from octavo.frontend.errors import InvalidRequest, Unsupported
from octavo.frontend.request.chat import Tool
from octavo.frontend.text.grammars import grammar_of, load_vocabulary
from octavo.runtime.models.grammar import compile_grammar

LLAMA = "llama3_json"
SCHEMA = {
    "type": "object",
    "properties": {"point": {"$ref": "#/$defs/point"}},
    "required": ["point"],
    "additionalProperties": False,
    "$defs": {"point": {"type": "array", "items": {"type": "integer"}, "minItems": 1}},
}
TOOLS = (Tool("move", "", json.dumps(SCHEMA)), Tool("stop_now"))
MOVE = '{"point": [1, 2]}'
REQUIRED = ToolChoice(ToolChoiceMode.REQUIRED)


def no_token(text: str) -> None:
    """Tells that no text is a token of its own."""


def written(kind: str, name: str, arguments: str) -> str:
    if kind == HERMES:
        return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'
    return f'{{"name": "{name}", "parameters": {arguments}}}'


def accepts(model_directory: Any, grammar: str, text: str) -> bool:
    vocabulary = load_vocabulary(model_directory)
    matcher: LLMatcher = compile_grammar(grammar, vocabulary)
    ids = vocabulary.tokenize_str(text)
    return matcher.consume_tokens(ids) and matcher.is_accepting()


@pytest.mark.parametrize("kind", [HERMES, LLAMA])
@pytest.mark.parametrize(
    ("choice", "parallel", "calls", "accepted"),
    [
        (REQUIRED, True, [("move", MOVE)], True),
        (REQUIRED, True, [("move", MOVE), ("stop_now", "{}")], True),
        (REQUIRED, False, [("move", MOVE), ("stop_now", "{}")], False),
        (REQUIRED, True, [("move", '{"point": ["x"]}')], False),
        (REQUIRED, True, [("else", "{}")], False),
        (REQUIRED, True, [], False),
        (ToolChoice(ToolChoiceMode.FUNCTION, "stop_now"), True, [("stop_now", '{"x": 1}')], True),
        (ToolChoice(ToolChoiceMode.FUNCTION, "stop_now"), True, [("move", MOVE)], False),
    ],
)
def test_a_forced_answer_is_calls_that_the_parser_finds(
    model_directory: Any, kind: str, choice: ToolChoice, parallel: bool, calls: list[tuple[str, str]], accepted: bool
) -> None:
    constraint = constraint_for(
        TOOLS, choice, parallel=parallel, kind=kind, reading=Reading(closes=False), token_id=no_token
    )
    assert constraint
    text = ("\n" if kind == HERMES else "; ").join(written(kind, name, arguments) for name, arguments in calls)
    grammar = grammar_of(constraint, load_vocabulary(model_directory))
    assert accepts(model_directory, grammar, text) == accepted
    if accepted:
        reader = make_reader(kind)
        parts = joined(reader.take("", text) + reader.finish())
        assert [(part.name, part.arguments) for part in parts if isinstance(part, ToolCallDelta)] == calls
        assert len(parts) == len(calls)


@pytest.mark.parametrize("mode", [ToolChoiceMode.AUTO, ToolChoiceMode.NONE])
def test_an_answer_that_need_not_call_is_free(mode: ToolChoiceMode) -> None:
    assert (
        constraint_for(TOOLS, ToolChoice(mode), parallel=True, kind=NONE, reading=Reading(), token_id=no_token) is None
    )


def test_a_call_cannot_be_forced_where_no_format_is_known() -> None:
    with pytest.raises(Unsupported, match="--tool-call-parser"):
        constraint_for(TOOLS, REQUIRED, parallel=True, kind=NONE, reading=Reading(), token_id=no_token)


@pytest.mark.parametrize(
    ("template", "kind"),
    [
        ('For each call return a JSON object within <tool_call></tool_call> tags: {"name": <function-name>', HERMES),
        ("{{ '<|python_tag|>' + call.name }}", LLAMA),
        ('Respond in the format {"name": function name, "parameters": dictionary}', LLAMA),
        ("{{ messages[0].content }}", NONE),
        ("", NONE),
    ],
)
def test_the_format_is_what_the_template_says(template: str, kind: str) -> None:
    assert detect_format(template) == kind


def test_where_the_template_tells_nothing_of_tools_the_format_is_that_of_the_text_that_does() -> None:
    assert detect_format("{{ messages[0].content }}", tells_of_tools=False) == HERMES
    assert detect_format("", tells_of_tools=False) == NONE


FLAT = {"type": "function", "name": "f", "description": "d", "parameters": {"type": "object"}, "strict": True}
NESTED = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}


@pytest.mark.parametrize("item", [FLAT, NESTED])
def test_tools_of_both_apis_are_the_same(item: dict[str, Any]) -> None:
    strict = "strict" in item
    assert read_tools([item], []).functions == (Tool("f", "d", '{"type":"object"}', strict=strict),)


def test_left_out_tools_are_none() -> None:
    assert read_tools(None, []) == read_tools([], []) == Tools()


def named(name: object, **fields: object) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **fields}}


MANY = [named(f"f{n}") for n in range(MAX_TOOLS + 1)]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({}, "list of at most 128"),
        (MANY, "list of at most 128"),
        (["f"], r"tools\[0\] is not an object"),
        ([named("f"), named("f")], "naming a function twice"),
        ([named("")], r"tools\[0\]\.name is ''"),
        ([named("a b")], "letters, digits"),
        ([named("a\n")], "letters, digits"),
        ([named("a" * 65)], "1 to 64 letters"),
        ([named(3)], r"tools\[0\]\.name is 3"),
        ([named("f", description=3)], "description is not a text"),
        ([named("f", parameters="{}")], "parameters is not an object"),
        ([{"type": "namespace", "name": "n", "tools": [named("f")]}, named("f")], "naming a function twice"),
        (
            [{"type": "namespace", "name": "n", "tools": MANY}],
            "129 functions",
        ),
    ],
)
def test_bad_tools_are_refused(value: object, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        read_tools(value, [])


def test_tools_that_are_no_functions_are_left_out_and_named() -> None:
    ignored: list[str] = []
    tools = [{"type": "web_search"}, named("f", colour="red"), {"type": "custom", "name": "patch"}]
    assert [tool.name for tool in read_tools(tools, ignored).functions] == ["f"]
    assert ignored == ["tools[0].web_search", "tools[1].colour", "tools[2].custom"]


def test_functions_of_a_namespace_are_the_clients() -> None:
    ignored: list[str] = []
    inner = [{"type": "function", "name": "f"}, {"type": "web_search"}]
    tools = read_tools([{"type": "namespace", "name": "n", "tools": inner}], ignored)
    assert (tools.functions, tools.namespaces) == ((Tool("f"),), {"f": "n"})
    assert ignored == ["tools[0].tools[1].web_search"]


OPEN = Tool("f", "", '{"type": "object", "properties": {"a": {"type": "integer"}}}')


@pytest.mark.parametrize("closes", [True, False])
def test_arguments_are_closed_unless_the_letter_of_json_schema_holds(model_directory: Any, closes: bool) -> None:
    constraint = constraint_for(
        [OPEN], REQUIRED, parallel=False, kind=HERMES, reading=Reading(closes), token_id=no_token
    )
    assert constraint
    grammar = grammar_of(constraint, load_vocabulary(model_directory))
    assert accepts(model_directory, grammar, written(HERMES, "f", '{"a": 1}'))
    assert accepts(model_directory, grammar, written(HERMES, "f", '{"a": 1, "b": 2}')) == (not closes)


UNIQUE = '{"type": "object", "properties": {"a": {"type": "array", "items": {}, "uniqueItems": true}}}'


def test_keywords_of_arguments_without_effect_are_named_unless_strict(model_directory: Any) -> None:
    reading = Reading()
    lenient = constraint_for(
        [Tool("f", "", UNIQUE)], REQUIRED, parallel=False, kind=HERMES, reading=reading, token_id=no_token
    )
    assert lenient
    assert reading.ignored == ["tools.f.parameters.uniqueItems"]
    grammar_of(lenient, load_vocabulary(model_directory))
    strict = constraint_for(
        [Tool("f", "", UNIQUE, strict=True)], REQUIRED, parallel=False, kind=HERMES, reading=reading, token_id=no_token
    )
    assert strict
    with pytest.raises(InvalidRequest, match="uniqueItems"):
        grammar_of(strict, load_vocabulary(model_directory))


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, ToolChoice(ToolChoiceMode.AUTO)),
        ("none", ToolChoice(ToolChoiceMode.NONE)),
        ("required", REQUIRED),
        ({"type": "function", "function": {"name": "move"}}, ToolChoice(ToolChoiceMode.FUNCTION, "move")),
        ({"type": "function", "name": "move"}, ToolChoice(ToolChoiceMode.FUNCTION, "move")),
    ],
)
def test_a_choice_in_either_form(value: object, expected: ToolChoice) -> None:
    assert read_tool_choice(value, TOOLS) == expected


def test_without_tools_there_is_nothing_to_choose() -> None:
    assert read_tool_choice(None, ()) == ToolChoice(ToolChoiceMode.NONE)


@pytest.mark.parametrize(
    ("value", "tools", "message"),
    [
        ("required", (), "no tools to choose from"),
        ({"type": "function", "name": "f"}, (), "no tools to choose from"),
        ({"type": "function", "name": "f"}, TOOLS, "'f', but it must name one of the tools"),
        ("sometimes", TOOLS, 'must be "none", "auto"'),
        ({"type": "allowed_tools"}, TOOLS, 'must be "none", "auto"'),
        (3, TOOLS, 'must be "none", "auto"'),
    ],
)
def test_bad_choices_are_refused(value: object, tools: tuple[Tool, ...], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        read_tool_choice(value, tools)
