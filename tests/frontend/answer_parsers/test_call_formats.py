"""Calls in every family's format are found however the text is cut, and a forced answer is calls in that format."""

import json
import random
from collections.abc import Sequence
from pathlib import Path

import pytest
from tests.frontend.answer_parsers.shapes import SHAPES, TOOLS, Shape

from octavo.frontend.answer_parsers.call_formats import CALL_FORMATS, detect_format
from octavo.frontend.answer_parsers.call_grammars import types_of
from octavo.frontend.answer_parsers.parts import AnswerPart, ContentText, ToolCallDelta, joined, text_of
from octavo.frontend.api.body import Reading
from octavo.frontend.api.tool_calls import ToolChoice, ToolChoiceMode, constraint_for, make_reader
from octavo.frontend.errors import InvalidRequest
from octavo.frontend.request.chat import Tool
from octavo.frontend.text.grammars import grammar_of, load_vocabulary
from octavo.frontend.text.tokenizer import ModelTokenizer
from octavo.runtime.models.grammar import compile_grammar
from octavo.runtime.options.common import TOOL_CALL_PARSER
from octavo.runtime.options.option import OneOf
from octavo.testbed.tiny_model import write_byte_model

NUM_CUTS = 60
REQUIRED = ToolChoice(ToolChoiceMode.REQUIRED)


def parse(kind: str, pieces: Sequence[str]) -> list[AnswerPart]:
    reader = make_reader(kind, TOOLS)
    return joined([part for piece in pieces for part in reader.take("", piece)] + reader.finish())


def without_ids(parts: Sequence[AnswerPart]) -> list[object]:
    return [(p.index, p.name, p.arguments) if isinstance(p, ToolCallDelta) else p for p in parts]


def random_cut(text: str, seed: int) -> list[str]:
    chance = random.Random(seed)
    ends = sorted(chance.randrange(len(text) + 1) for _ in range(chance.randrange(1, 12)))
    return [text[start:end] for start, end in zip([0, *ends], [*ends, len(text)], strict=True)]


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"{shape.kind}-{len(shape.text)}")
def test_calls_are_found_however_the_text_is_cut(shape: Shape) -> None:
    whole = parse(shape.kind, [shape.text])
    calls = [(part.name, json.loads(part.arguments)) for part in whole if isinstance(part, ToolCallDelta)]
    assert calls == shape.calls
    assert text_of(whole, ContentText) == shape.content
    for pieces in [list(shape.text), *(random_cut(shape.text, seed) for seed in range(NUM_CUTS))]:
        assert without_ids(parse(shape.kind, pieces)) == without_ids(whole)


@pytest.mark.parametrize("kind", CALL_FORMATS)
def test_broken_text_gives_the_same_however_it_is_cut(kind: str) -> None:
    own = [shape.text for shape in SHAPES if shape.kind == kind]
    for seed in range(NUM_CUTS):
        chance = random.Random(seed)
        text = "".join(
            part[(start := chance.randrange(len(part))) : chance.randrange(start, len(part) + 1)]
            for part in (chance.choice(own) for _ in range(3))
        )
        whole = without_ids(parse(kind, [text]))
        assert without_ids(parse(kind, list(text))) == whole
        assert without_ids(parse(kind, random_cut(text, seed))) == whole


@pytest.mark.parametrize("kind", CALL_FORMATS)
def test_text_without_calls_is_content(kind: str) -> None:
    text = "Nothing [here] is {a: call} (f(x)), and a < b | c > d. "
    assert parse(kind, list(text)) == [ContentText(text)]


@pytest.mark.parametrize("kind", CALL_FORMATS)
def test_a_marker_alone_becomes_content(kind: str) -> None:
    text = f"{CALL_FORMATS[kind].markers[0]} and more"
    assert text_of(parse(kind, list(text)), ContentText).replace(" ", "") == text.replace(" ", "")


def test_ids_are_those_that_the_model_gives_or_takes() -> None:
    kimi = next(shape for shape in SHAPES if shape.kind == "kimi_k2")
    ids = [part.id for part in parse("kimi_k2", [kimi.text]) if isinstance(part, ToolCallDelta)]
    assert ids == ["functions.get_weather:0", "functions.now:1"]
    mistral = next(shape for shape in SHAPES if shape.kind == "mistral")
    ids = [part.id for part in parse("mistral", [mistral.text]) if isinstance(part, ToolCallDelta)]
    assert [len(call_id) for call_id in ids] == [9, 9]
    assert all(call_id.isalnum() for call_id in ids)


# Shapes as the grammars write them, one of each format at least.
FORCED = ["hermes", "granite", "phi4_mini_json", "deepseek_v3", "deepseek_v31", "deepseek_v32", "kimi_k2", "glm45"]
FORCED += ["functiongemma", "gemma4", "minimax_m2"]


@pytest.mark.parametrize("kind", FORCED)
@pytest.mark.parametrize("has_tokens", [False, True])
def test_a_forced_answer_is_calls_as_the_family_writes_them(kind: str, has_tokens: bool, tmp_path: Path) -> None:
    form = CALL_FORMATS[kind]
    write_byte_model(tmp_path, markers=[m for m in dict.fromkeys(form.markers) if m != "```"] if has_tokens else ())
    tokenizer, vocabulary = ModelTokenizer(tmp_path), load_vocabulary(tmp_path)
    token_id = tokenizer.added_token_id
    reading = Reading(closes=False)
    constraint = constraint_for(TOOLS, REQUIRED, parallel=True, kind=kind, reading=reading, token_id=token_id)
    assert constraint
    start = compile_grammar(grammar_of(constraint, vocabulary), vocabulary)
    shape = next(shape for shape in SHAPES if shape.kind == kind)
    ids = tokenizer.encode(shape.text[len(shape.content) :].lstrip(), continues=True)
    matcher = start.deep_copy()
    # Each token is allowed and taken, so markers that are tokens come as such.
    for token_id_ in ids:
        assert matcher.compute_bitmask()[token_id_ // 8] >> token_id_ % 8 & 1
        assert matcher.consume_token(token_id_)
    assert matcher.is_accepting()
    assert not start.deep_copy().try_consume_tokens(tokenizer.encode("Sorry, no.", continues=True))


@pytest.mark.parametrize("kind", CALL_FORMATS)
def test_every_format_can_be_forced(kind: str, tmp_path: Path) -> None:
    write_byte_model(tmp_path)
    vocabulary = load_vocabulary(tmp_path)
    constraint = constraint_for(
        TOOLS, REQUIRED, parallel=False, kind=kind, reading=Reading(), token_id=lambda text: None
    )
    assert constraint
    assert grammar_of(constraint, vocabulary)


def test_a_schema_that_only_refers_to_itself_is_refused() -> None:
    tool = Tool("f", "", json.dumps({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}))
    with pytest.raises(InvalidRequest, match="references only lead to each other"):
        constraint_for([tool], REQUIRED, parallel=True, kind="hermes", reading=Reading(), token_id=lambda text: None)
    assert types_of([tool]) == {"f": {}}


TREE = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "children": {"type": "array", "items": {"$ref": "#"}}},
    "required": ["name", "children"],
    "additionalProperties": False,
}
NODE = {"type": "object", "additionalProperties": False}
MUTUAL = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "children": {"type": "array", "items": {"$ref": "#/$defs/even"}}},
    "required": ["name", "children"],
    "additionalProperties": False,
    "$defs": {
        "even": {
            **NODE,
            "properties": {"odd": {"anyOf": [{"$ref": "#/$defs/odd"}, {"type": "null"}]}},
            "required": ["odd"],
        },
        "odd": {**NODE, "properties": {"even": {"$ref": "#/$defs/even"}, "root": {"$ref": "#"}}, "required": ["even"]},
    },
}
# A call whose name is "x", before and behind its children.
CALLS_OF_A_TREE = {
    "hermes": ('<tool_call>\n{"name": "f", "arguments": {"name": "x", "children": ', "}}\n</tool_call>"),
    "glm45": (
        "<tool_call>f\n<arg_key>name</arg_key>\n<arg_value>x</arg_value>\n<arg_key>children</arg_key>\n<arg_value>",
        "</arg_value>\n</tool_call>",
    ),
    "pythonic": ('[f(name="x", children=', ")]"),
}


@pytest.mark.parametrize("kind", CALLS_OF_A_TREE)
@pytest.mark.parametrize(
    ("schema", "fine", "wrong"),
    [
        (TREE, '[{"name": "y", "children": [{"name": "z", "children": []}]}]', ["[[]]", '[{"name": 1']),
        (
            MUTUAL,
            '[{"odd": {"even": {"odd": null}, "root": {"name": "z", "children": [{"odd": null}]}}}]',
            ['[{"even"', '[{"odd": {"even": {"odd": null}, "root": [', "[[]]"],
        ),
    ],
    ids=["itself", "each other"],
)
def test_arguments_whose_schema_recurs_are_held_to_it(
    kind: str, schema: object, fine: str, wrong: Sequence[str], tmp_path: Path
) -> None:
    write_byte_model(tmp_path)
    tokenizer, vocabulary = ModelTokenizer(tmp_path), load_vocabulary(tmp_path)
    tool = Tool("f", "", json.dumps(schema))
    constraint = constraint_for(
        [tool], REQUIRED, parallel=False, kind=kind, reading=Reading(), token_id=lambda text: None
    )
    assert constraint
    start = compile_grammar(grammar_of(constraint, vocabulary), vocabulary)
    before, behind = CALLS_OF_A_TREE[kind]
    matcher = start.deep_copy()
    ids = tokenizer.encode(before + fine + behind)
    assert matcher.try_consume_tokens(ids) == len(ids)
    assert matcher.is_accepting()
    for value in wrong:
        ids = tokenizer.encode(before + value)
        assert start.deep_copy().try_consume_tokens(ids) < len(ids), value


@pytest.mark.parametrize("kind", CALL_FORMATS)
def test_a_schema_that_recurs_can_be_forced_in_every_format(kind: str, tmp_path: Path) -> None:
    write_byte_model(tmp_path)
    vocabulary = load_vocabulary(tmp_path)
    tools = [Tool("f", "", json.dumps(TREE)), Tool("g", "", json.dumps(MUTUAL))]
    constraint = constraint_for(
        tools, REQUIRED, parallel=True, kind=kind, reading=Reading(), token_id=lambda text: None
    )
    assert constraint
    assert compile_grammar(grammar_of(constraint, vocabulary), vocabulary)


def test_what_a_strict_tool_asks_that_the_format_cannot_enforce_is_refused() -> None:
    schema = json.dumps({"type": "object", "properties": {"a": {"type": "string", "pattern": "x+"}}})
    reading = Reading()
    for strict in (False, True):
        tool = Tool("f", "", schema, strict=strict)
        if strict:
            with pytest.raises(InvalidRequest, match="cannot be held to it"):
                constraint_for([tool], REQUIRED, parallel=True, kind="glm45", reading=reading, token_id=lambda _: None)
        else:
            constraint_for([tool], REQUIRED, parallel=True, kind="glm45", reading=reading, token_id=lambda _: None)
            assert reading.ignored == ["tools.f.parameters.properties.a.pattern"]


@pytest.mark.parametrize(
    ("template", "kind"),
    [
        ("<|channel|>commentary to=functions.", "openai"),
        ("{{ '[TOOL_CALLS]' }}{{ name }}[ARGS]", "mistral_args"),
        ("{{ '[TOOL_CALLS] [' }}", "mistral"),
        ("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>x```json", "deepseek_v3"),
        ("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>x<｜tool▁sep｜>", "deepseek_v31"),
        ("<tool_call>{name}<arg_key>", "glm45"),
        ("<tool_call>\n<function=example>", "qwen3_coder"),
        ("{{ '<|tool_call|>' }}", "granite"),
        ("<|tool|>{{ tools }}<|/tool|>", "phi4_mini_json"),
        ("<|tool_call>call:{{ name }}<tool_call|>", "gemma4"),
        ("<start_function_call>", "functiongemma"),
        ("<|START_ACTION|>", "command_r"),
        ("[func_name1(params_name1=params_value1)]", "pythonic"),
    ],
)
def test_the_format_is_what_the_template_shows(template: str, kind: str) -> None:
    assert detect_format(template) == kind


def test_the_option_names_every_format() -> None:
    assert isinstance(TOOL_CALL_PARSER.values, OneOf)
    assert set(TOOL_CALL_PARSER.values.words) == {"auto", "none", *CALL_FORMATS}
