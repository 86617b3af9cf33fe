"""Constraints become grammars that let through what they say, and are refused with a reason where they cannot."""

import contextlib
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLParserLimits, LLTokenizer

from octavo.frontend.errors import InvalidRequest, Reason
from octavo.frontend.request.request import MAX_CHOICES, MAX_CONSTRAINT_BYTES, Constraint, ConstraintKind
from octavo.frontend.text import grammars
from octavo.frontend.text.grammars import grammar_of, load_vocabulary
from octavo.runtime.models import grammar as grammar_module
from octavo.runtime.models.grammar import compile_grammar
from octavo.testbed.tiny_model import write_byte_model
from octavo.testing.small.constraints import schema_constraint
from octavo.testing.small.tokenizers import byte_fallback_tokenizer

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory: pytest.TempPathFactory) -> LLTokenizer:
    directory = tmp_path_factory.mktemp("model")
    write_byte_model(directory)
    return load_vocabulary(directory)


def regex(text: str) -> Constraint:
    return Constraint(ConstraintKind.REGEX, text)


def schema_text(text: str) -> Constraint:
    return Constraint(ConstraintKind.JSON_SCHEMA, text)


def lark(text: str) -> Constraint:
    return Constraint(ConstraintKind.GRAMMAR, text)


def choice(*texts: str) -> Constraint:
    return Constraint(ConstraintKind.CHOICE, choices=texts)


def lets_through(constraint: Constraint, text: str, vocabulary: LLTokenizer) -> bool:
    """Whether `text` may be a whole answer."""
    matcher = compile_grammar(grammar_of(constraint, vocabulary), vocabulary)
    return matcher.consume_tokens(vocabulary.tokenize_str(text)) and matcher.is_accepting()


ANY_OBJECT = Constraint(ConstraintKind.JSON_OBJECT)
GBNF = 'root ::= "a" [0-9]+ tail?  # llama.cpp\'s form\ntail ::= ("x" | "y"){2}'
LETTERS = 'start: WORD ("," WORD)*\nWORD: /[a-z]+/'


@pytest.mark.parametrize(
    ("constraint", "good", "bad"),
    [
        (ANY_OBJECT, ["{}", '{"a": [1, {"b": null}]}', '{ "é": "\\n" }'], ["[]", "1", "", '{"a"}', " {}", "{\n}"]),
        (
            schema_constraint(PERSON),
            ['{"name": "Ann", "age": 3}', '{"name":"","age":-1}', '{ "name": "a\\"b", "age": 0 }'],
            [
                '{\n    "name": "",\n    "age": 0\n}',
                "{}",
                '{"name": "Ann"}',
                '{"name": 1, "age": 3}',
                '{"age": 3, "name": "Ann"}',
                '{"name":"","age":1,"x":1}',
            ],
        ),
        (schema_constraint({"enum": ["a", 1, None]}), ['"a"', "1", "null"], ['"b"', "a", "true"]),
        (schema_constraint({"type": "string", "format": "date"}), ['"2024-02-29"'], ['"2024-2-9"']),
        (schema_text("true"), ["1", "[{}]", '"a"'], ["", "tru"]),
        (regex(r"\d{2}/(a|é)+"), ["12/aé"], ["1/a", "12/", "x12/a"]),
        (regex("a\nb|/"), ["a\nb", "/"], ["ab", "//"]),
        (regex("^abc$"), ["abc"], ["abcd", "xabc"]),
        (
            choice("yes", 'say "no"\\', "\n\x01🙂", "/x/"),
            ["yes", 'say "no"\\', "\n\x01🙂", "/x/"],
            ["", "ye", "yesyes"],
        ),
        (lark(LETTERS), ["a", "ab,c"], ["", "a,", "A"]),
        (lark(GBNF), ["a1", "a12xy"], ["a", "a1x", "b1"]),
    ],
)
def test_whole_texts_are_let_through_or_not(
    constraint: Constraint, good: list[str], bad: list[str], vocabulary: LLTokenizer
) -> None:
    for text in good:
        assert lets_through(constraint, text, vocabulary), text
    for text in bad:
        assert not lets_through(constraint, text, vocabulary), text


def test_between_the_tokens_of_json_there_is_one_space_at_most(vocabulary: LLTokenizer) -> None:
    for constraint in (ANY_OBJECT, schema_constraint(PERSON)):
        assert not lets_through(constraint, '{"name":  "", "age": 1}', vocabulary)
        assert lets_through(constraint, '{"name": "","age":1}', vocabulary)


def test_a_schema_may_ask_for_other_white_space(vocabulary: LLTokenizer) -> None:
    indented = schema_constraint({**PERSON, "x-guidance": {"whitespace_pattern": r"[ \n]*"}})
    assert lets_through(indented, '{\n  "name": "",\n  "age": 1\n}', vocabulary)


OPEN = json.dumps({key: value for key, value in PERSON.items() if key != "additionalProperties"})
MORE = '{"name":"","age":1,"x":1}'


def test_a_schema_that_is_closed_has_no_other_properties(vocabulary: LLTokenizer) -> None:
    assert lets_through(Constraint(ConstraintKind.JSON_SCHEMA, OPEN), MORE, vocabulary)
    assert not lets_through(Constraint(ConstraintKind.JSON_SCHEMA, OPEN, closes=True), MORE, vocabulary)


def test_a_lenient_schema_is_held_to_as_far_as_it_can_be(vocabulary: LLTokenizer) -> None:
    unique = json.dumps({"type": "array", "items": {"type": "integer"}, "uniqueItems": True, "maxItems": 2})
    lenient = Constraint(ConstraintKind.JSON_SCHEMA, unique, lenient=True)
    assert lets_through(lenient, "[1, 1]", vocabulary)
    assert not lets_through(lenient, "[1, 1, 1]", vocabulary)
    assert not lets_through(lenient, '["a"]', vocabulary)
    with pytest.raises(InvalidRequest, match="uniqueItems"):
        grammar_of(Constraint(ConstraintKind.JSON_SCHEMA, unique), vocabulary)


BAD = [
    (schema_text("{"), "it is not JSON"),
    (schema_text("[1]"), "a schema is a JSON object"),
    (schema_text("false"), "a schema is a JSON object"),
    (schema_text('{"minimum": NaN}'), "NaN is no number of JSON"),
    (schema_text('{"type": "objekt"}'), "Invalid type: objekt"),
    (schema_text('{"type": "array", "uniqueItems": true}'), "Unimplemented keys"),
    (schema_text('{"enum": []}'), "Unsatisfiable schema"),
    (schema_text('{"type": "integer", "minimum": 5, "maximum": 3}'), "Unsatisfiable schema"),
    (schema_text('{"type": "string", "pattern": "("}'), "unclosed group"),
    (schema_text('{"$ref": "#/$defs/missing"}'), "missing"),
    (schema_text('{"$ref": "http://127.0.0.1/schema"}'), "does not fetch"),
    (schema_text('{"$ref": "file:///etc/passwd"}'), "does not fetch"),
    (schema_text('{"enum": ["\\ud800"]}'), "."),
    (schema_text('{"items": ' * 130 + "{}" + "}" * 130), "nested too deeply"),
    (schema_text('{"items": ' * 700 + "{}" + "}" * 700), "nested too deeply"),
    (schema_text('{"items": ' * 5000 + "{}" + "}" * 5000), "nested too deeply"),
    (schema_text(""), "it is empty"),
    (regex("a(b"), "unclosed group"),
    (regex(r"(a)\1"), "backreferences are not supported"),
    (regex("(?=a)a"), "look-around"),
    (regex("(" * 9000 + "a" + ")" * 9000), "."),
    (regex("a\ud800"), "surrogate"),
    (regex(""), "it is empty"),
    (choice(), "it has 0 texts"),
    (choice("a", ""), "it is empty"),
    (choice("\udc00"), "surrogate"),
    (lark("garbage"), "Expected ::="),
    (lark("start: missing"), "unknown name"),
    (lark('root ::= "a" | missing'), "'missing' not found"),
    (lark("start: " + "(" * 9000 + '"a"' + ")" * 9000), "too deeply nested"),
    (lark("root ::= " + "(" * 9000 + '"a"' + ")" * 9000), "recursion|deeply"),
    (lark(""), "it is empty"),
]


@pytest.mark.parametrize(("constraint", "reason"), BAD)
def test_what_cannot_be_met_is_refused_with_the_reason(
    constraint: Constraint, reason: str, vocabulary: LLTokenizer
) -> None:
    with pytest.raises(InvalidRequest, match=reason) as refused:
        grammar_of(constraint, vocabulary)
    assert refused.value.reason is Reason.BAD_CONSTRAINT
    assert refused.value.metadata == {"field": "constraint", "kind": constraint.kind.value}
    assert len(str(refused.value)) < 600


@pytest.mark.parametrize("kind", [ConstraintKind.REGEX, ConstraintKind.JSON_SCHEMA, ConstraintKind.GRAMMAR])
def test_a_text_has_a_most_bytes(kind: ConstraintKind, vocabulary: LLTokenizer) -> None:
    begin, end = {"regex": ("[", "]"), "json_schema": ('{"title": "', '"}'), "grammar": ('start: "a" //', "")}[kind]
    room = MAX_CONSTRAINT_BYTES - len(begin) - len(end)
    grammar_of(Constraint(kind, f"{begin}{'é' * (room // 2)}{'a' * (room % 2)}{end}"), vocabulary)
    with pytest.raises(InvalidRequest, match=f"it has {MAX_CONSTRAINT_BYTES + 1} bytes"):
        grammar_of(Constraint(kind, f"{begin}{'é' * (room // 2)}{'a' * (room % 2 + 1)}{end}"), vocabulary)


def test_there_are_most_choices(vocabulary: LLTokenizer) -> None:
    texts = [f"choice {number}" for number in range(MAX_CHOICES + 1)]
    assert lets_through(choice(*texts[:-1]), texts[-2], vocabulary)
    with pytest.raises(InvalidRequest, match=f"it has {MAX_CHOICES + 1} texts"):
        grammar_of(choice(*texts), vocabulary)


def test_a_grammar_is_no_longer_than_a_request_may_carry(
    vocabulary: LLTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    grammar = grammar_of(choice("a"), vocabulary)
    monkeypatch.setattr(grammars, "MAX_GRAMMAR", len(grammar) - 1)
    with pytest.raises(InvalidRequest, match=f"a grammar of {len(grammar)} characters"):
        grammar_of(choice("a"), vocabulary)


def test_a_grammar_beyond_the_workers_limits_is_refused(
    vocabulary: LLTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_module, "_LIMITS", LLParserLimits(max_grammar_size=2, verbose_errors=False))
    with pytest.raises(InvalidRequest, match="too big"):
        grammar_of(choice("a"), vocabulary)


def test_what_no_token_can_begin_is_refused(tmp_path: Path) -> None:
    tokenizer = byte_fallback_tokenizer()
    without_bytes = json.loads(tokenizer.to_str())
    without_bytes["model"]["vocab"] = {
        piece: number for number, piece in enumerate(p for p in without_bytes["model"]["vocab"] if "<0x" not in p)
    }
    without_bytes["added_tokens"] = []
    (tmp_path / "tokenizer.json").write_text(json.dumps(without_bytes), encoding="utf-8")
    (tmp_path / "config.json").write_text('{"eos_token_id": 0}', encoding="utf-8")
    small = load_vocabulary(tmp_path)
    assert grammar_of(choice("a"), small)
    with pytest.raises(InvalidRequest, match="no token of the model's vocabulary can begin"):
        grammar_of(choice("Z"), small)


@settings(max_examples=60)
@given(
    st.sampled_from([ConstraintKind.REGEX, ConstraintKind.JSON_SCHEMA, ConstraintKind.GRAMMAR]),
    st.one_of(
        st.text(max_size=40),
        st.text(alphabet='()[]{}|*+?^$\\.,:"start19~&<>%=\n', max_size=30),
        st.recursive(
            st.sampled_from([None, True, 0, -1, "x", "string", "integer", "^a$", "#"]),
            lambda inner: st.one_of(
                st.lists(inner, max_size=2),
                st.dictionaries(
                    st.sampled_from(["type", "items", "enum", "anyOf", "$ref", "pattern", "properties", "minimum"]),
                    inner,
                ),
            ),
            max_leaves=6,
        ).map(json.dumps),
    ),
)
def test_garbage_is_refused_and_nothing_else_happens(vocabulary: LLTokenizer, kind: ConstraintKind, text: str) -> None:
    with contextlib.suppress(InvalidRequest):
        compile_grammar(grammar_of(Constraint(kind, text), vocabulary), vocabulary)


def test_a_chain_of_rules_as_long_as_may_be_sent_does_no_harm(vocabulary: LLTokenizer) -> None:
    chain = "\n".join(["start: a0", *(f"a{i}: a{i + 1}" for i in range(4000)), 'a4000: "x"'])
    assert len(chain) < MAX_CONSTRAINT_BYTES
    assert lets_through(lark(chain), "x", vocabulary)
