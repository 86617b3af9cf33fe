"""Schemas are closed where they list properties and say nothing of others; what has no effect is known by name."""

from typing import Any

import pytest
from llguidance import LLMatcher

from octavo.frontend.text.grammars import FORMATS, UNENFORCED, closed, unenforced

TEXT = {"type": "string"}


def person(**more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"name": TEXT}, **more}


CLOSED = person(additionalProperties=False)


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        (person(), CLOSED),
        ({"properties": {"a": person()}}, {"properties": {"a": CLOSED}, "additionalProperties": False}),
        ({"type": "array", "items": person()}, {"type": "array", "items": CLOSED}),
        ({"anyOf": [person(), {"type": "null"}]}, {"anyOf": [CLOSED, {"type": "null"}]}),
        ({"allOf": [{"$ref": "#/$defs/A"}], "$defs": {"A": person()}}, None),
        ({"$ref": "#/$defs/A", "$defs": {"A": person()}}, {"$ref": "#/$defs/A", "$defs": {"A": CLOSED}}),
        ({"type": "object", "additionalProperties": person()}, {"type": "object", "additionalProperties": CLOSED}),
    ],
)
def test_objects_that_list_their_properties_have_no_others(schema: Any, expected: Any) -> None:
    if expected is None:
        assert closed(schema)["$defs"]["A"] == CLOSED
    else:
        assert closed(schema) == expected


@pytest.mark.parametrize(
    "schema",
    [
        True,
        {"type": "object"},
        person(additionalProperties=True),
        person(additionalProperties=TEXT),
        person(patternProperties={"^x": TEXT}),
        person(unevaluatedProperties=False),
        {"allOf": [person(), {"properties": {"age": {"type": "integer"}}}]},
        person(anyOf=[{"required": ["name"]}, {"properties": {"age": {}}}]),
        {"allOf": [{"$ref": "#/$defs/A"}, {"$ref": "#/$defs/B"}], "$defs": {"A": person(), "B": person()}},
        {"const": person()},
        {"enum": [person()]},
        {"default": person()},
    ],
)
def test_others_stay_as_they_are(schema: Any) -> None:
    assert closed(schema) == schema


@pytest.mark.parametrize(
    "schema",
    [
        person(additionalProperties={"$ref": "#/$defs/A"}),
        {"allOf": [{"items": {"$ref": "#/$defs/A"}}, person()]},
        {"if": {"items": {"$ref": "#/$defs/A"}}},
    ],
)
def test_what_is_referred_to_from_inside_of_another_is_closed(schema: Any) -> None:
    assert closed({**schema, "$defs": {"A": person()}})["$defs"]["A"] == CLOSED


def test_what_a_schema_with_properties_of_its_own_refers_to_stays_open() -> None:
    schema = person(**{"$ref": "#/$defs/A", "$defs": {"A": person()}})
    assert closed(schema) == schema


def test_what_is_inside_of_what_adds_to_another_is_closed() -> None:
    inner = {"properties": {"a": person()}}
    assert closed({"allOf": [inner, inner]})["allOf"][0] == {"properties": {"a": CLOSED}}


def test_closing_leaves_the_clients_schema_alone() -> None:
    schema = {"items": person()}
    closed(schema)
    assert schema == {"items": person()}


# A schema that uses each.
USES: dict[str, Any] = {
    "$dynamicRef": {"$dynamicRef": "#a"},
    "contains": {"type": "array", "contains": TEXT},
    "dependencies": person(dependencies={"name": ["b"]}),
    "dependentRequired": person(dependentRequired={"name": ["b"]}),
    "dependentSchemas": person(dependentSchemas={"name": {}}),
    "else": {"else": {}},
    "if": {"if": TEXT},
    "maxContains": {"type": "array", "maxContains": 1},
    "minContains": {"type": "array", "minContains": 1},
    "not": {"not": TEXT},
    "oneOf": {"oneOf": [{"type": "integer"}, {"type": "number"}]},
    "propertyNames": {"type": "object", "propertyNames": {"pattern": "a"}},
    "then": {"then": {}},
    "unevaluatedItems": {"type": "array", "unevaluatedItems": False},
    "unevaluatedProperties": person(unevaluatedProperties=False),
    "uniqueItems": {"type": "array", "items": TEXT, "uniqueItems": True},
}


def is_refused(schema: Any) -> bool:
    refused, _ = LLMatcher.validate_grammar_with_warnings(LLMatcher.grammar_from_json_schema(schema))
    return bool(refused)


@pytest.mark.parametrize("keyword", sorted(UNENFORCED))
def test_keywords_without_effect_are_those_that_grammars_refuse(keyword: str) -> None:
    assert is_refused(USES[keyword])
    assert keyword in unenforced({"items": USES[keyword]})


@pytest.mark.parametrize(
    "schema",
    [
        person(required=["name"], minProperties=1, maxProperties=2),
        {"type": "string", "minLength": 1, "maxLength": 2, "title": "t", "description": "d", "examples": ["a"]},
        {"type": "string", "pattern": "^a+$"},
        {"type": "integer", "multipleOf": 3, "minimum": 0, "exclusiveMaximum": 9},
        {"type": "array", "prefixItems": [TEXT], "items": TEXT, "minItems": 1, "maxItems": 3},
        {"const": {"not": 1}},
        {"type": "object", "patternProperties": {"^a": TEXT}},
        *({"type": "string", "format": form} for form in sorted(FORMATS)),
    ],
)
def test_all_others_are_held_to(schema: Any) -> None:
    assert not is_refused(schema)
    assert unenforced(schema) == set()


def test_formats_that_grammars_do_not_know_are_named() -> None:
    schema = {"type": "string", "format": "iban"}
    assert is_refused(schema)
    assert unenforced(schema) == {"format"}


def test_data_and_names_are_no_keywords() -> None:
    assert unenforced({"properties": {"not": TEXT, "if": TEXT}, "default": {"uniqueItems": True}}) == set()
