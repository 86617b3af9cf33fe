"""What is made of a client's JSON schema before it becomes a grammar: objects closed, keywords without effect named."""

import json
from collections.abc import Iterator
from typing import Any, Final

# Between the tokens of JSON there may be one space: models that may indent, or go on with spaces for ever, at times do.
JSON_SPACE: Final = "[ ]?"
# Keywords that grammars cannot hold an answer to. (`oneOf` becomes `anyOf`.)
UNENFORCED: Final = frozenset(
    {
        *("$dynamicRef", "contains", "dependencies", "dependentRequired", "dependentSchemas", "else", "if"),
        *("maxContains", "minContains", "not", "oneOf", "propertyNames", "then", "unevaluatedItems"),
        *("unevaluatedProperties", "uniqueItems"),
    }
)
# Formats of strings that they can.
FORMATS: Final = frozenset(
    {"date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "unknown", "uri", "uuid"}
)
# Where one schema holds others: one, a list of them, or one under each name.
_ONE: Final = ("additionalProperties", "items", "additionalItems", "contains", "not", "if", "then", "else")
_LISTS: Final = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_NAMED: Final = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
# A schema with one of these beside its properties says elsewhere which others there may be.
_OPENING: Final = frozenset(
    {
        *("additionalProperties", "unevaluatedProperties", "patternProperties", "$ref", "$dynamicRef"),
        *("allOf", "anyOf", "oneOf", "if", "not", "dependentSchemas"),
    }
)
_ADDED: Final = frozenset({"allOf", "if", "then", "else", "not", "dependentSchemas"})


def closed(schema: Any) -> Any:
    """Returns the schema with objects that list their properties limited to these, wherever it does not say whether
    others are allowed. Schemas that only add to another (`allOf`, `if`, ...) stay open, or nothing would fit both.

    Raises `RecursionError` for one that is nested too deeply.
    """
    return _Closing(_added_references(schema)).of(schema, closes=True)


def embedded(text: str, *, closes: bool, lenient: bool) -> str:
    """Returns a schema's text as it stands in a grammar, with what holds for it there. Raises `ValueError` for text
    that is no JSON object, `RecursionError` for one that is nested too deeply."""
    schema = json.loads(text)
    if not isinstance(schema, dict):
        raise ValueError("a schema is a JSON object")
    own = schema.get("x-guidance")
    form = {"whitespace_pattern": JSON_SPACE, "lenient": lenient, **(own if isinstance(own, dict) else {})}
    return json.dumps({**(closed(schema) if closes else schema), "x-guidance": form}, ensure_ascii=False)


def unenforced(schema: Any) -> set[str]:
    """Returns the keywords, wherever they are in a schema, that no grammar holds an answer to.

    Raises `RecursionError` for one that is nested too deeply.
    """
    found: set[str] = set()
    for part in _parts(schema):
        found |= {key for key in UNENFORCED & part.keys() if not (key == "uniqueItems" and part[key] is False)}
        if isinstance(form := part.get("format"), str) and form not in FORMATS:
            found.add("format")
    return found


class _Closing:
    def __init__(self, open_references: set[str]) -> None:
        self._open = open_references

    def of(self, schema: Any, *, closes: bool, place: str = "#") -> Any:
        if not isinstance(schema, dict):
            return schema
        adding = _adding(schema)
        made = {
            key: self._inside(key, value, closes=key not in adding, place=f"{place}/{key}")
            for key, value in schema.items()
        }
        if closes and _lists_properties(schema) and place not in self._open and not _OPENING & schema.keys():
            made["additionalProperties"] = False
        return made

    def _inside(self, key: str, value: Any, *, closes: bool, place: str) -> Any:
        if key in _NAMED and isinstance(value, dict):
            return {name: self.of(each, closes=closes, place=f"{place}/{name}") for name, each in value.items()}
        if key in _LISTS and isinstance(value, list):
            return [self.of(each, closes=closes, place=place) for each in value]
        return self.of(value, closes=closes, place=place) if key in _ONE else value


def _lists_properties(schema: dict[str, Any]) -> bool:
    return isinstance(schema.get("properties"), dict) and bool(schema["properties"])


def _adding(schema: dict[str, Any]) -> set[str]:
    """Returns the keywords of a schema whose own schemas say only some of what its objects must be."""
    found = set(_ADDED & schema.keys())
    parts = len(schema["allOf"]) if isinstance(schema.get("allOf"), list) else 0
    if parts == 1 and not _lists_properties(schema):
        found -= {"allOf"}
    if parts or _lists_properties(schema) or "$ref" in schema:
        found |= {"anyOf", "oneOf"} & schema.keys()
    return found


def _added_references(schema: Any) -> set[str]:
    """Returns the references to schemas that say only some of what objects must be."""
    found: set[str] = set()
    for part in _parts(schema):
        adding = [part] if _lists_properties(part) else []
        for key in _adding(part):
            value = part[key]
            if key == "dependentSchemas" and isinstance(value, dict):
                adding += value.values()
            else:
                adding += value if isinstance(value, list) else [value]
        found.update(each["$ref"] for each in adding if isinstance(each, dict) and isinstance(each.get("$ref"), str))
    return found


def _parts(schema: Any) -> Iterator[dict[str, Any]]:
    """Yields the schema and all that it holds, and never what is data in it (`enum`, `const`, `default`)."""
    if not isinstance(schema, dict):
        return
    yield schema
    for key, value in schema.items():
        if key in _NAMED and isinstance(value, dict):
            for each in value.values():
                yield from _parts(each)
        elif key in _LISTS and isinstance(value, list):
            for each in value:
                yield from _parts(each)
        elif key in _ONE:
            yield from _parts(value)
