"""Constraints for tests: random schemas, what conforms to them, and vocabularies to follow them with."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hypothesis import strategies as st
from llguidance import LLTokenizer
from transformers import LlamaConfig

from octavo.frontend.request.request import Constraint, ConstraintKind
from octavo.frontend.text.grammars import grammar_of
from octavo.testbed.tiny_model import END_TOKEN_ID, VOCAB_SIZE, write_byte_model

DIGITS = Constraint(ConstraintKind.REGEX, "[0-9]{1,6}")
WORDS = Constraint(ConstraintKind.CHOICE, choices=("yes", "no", "maybe so"))


def schema_constraint(schema: Any) -> Constraint:
    return Constraint(ConstraintKind.JSON_SCHEMA, json.dumps(schema))


def compiled(constraint: Constraint, vocabulary: LLTokenizer) -> str:
    return grammar_of(constraint, vocabulary)


def ids_of_mask(mask: bytes) -> set[int]:
    """The token ids whose bits are set."""
    return {8 * place + bit for place, byte in enumerate(mask) for bit in range(8) if byte >> bit & 1}


def text_of(vocabulary: LLTokenizer, token_ids: Sequence[int]) -> str:
    """Without the tokens that end a text."""
    return vocabulary.decode_bytes([each for each in token_ids if each not in vocabulary.eos_tokens]).decode()


def write_tiny_byte_model(directory: Path) -> Path:
    """A byte model with random weights, of a shape that exact numerics have kernels for."""
    from octavo.testbed.models import write_tiny_model

    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        pad_token_id=0,
        eos_token_id=END_TOKEN_ID,
    )
    write_byte_model(directory)
    (directory / "generation_config.json").unlink()
    write_tiny_model(directory, config)
    return directory


def conforms(value: Any, schema: dict[str, Any]) -> bool:
    """Tells whether `value` is one of `schema`, as far as `schemas` makes them."""
    if "enum" in schema:
        return value in schema["enum"]
    match schema["type"]:
        case "object":
            fields = schema["properties"]
            return (
                isinstance(value, dict)
                and set(schema["required"]) <= set(value) <= set(fields)
                and all(conforms(value[name], fields[name]) for name in value)
            )
        case "array":
            return (
                isinstance(value, list)
                and schema["minItems"] <= len(value) <= schema["maxItems"]
                and all(conforms(each, schema["items"]) for each in value)
            )
        case "string":
            return isinstance(value, str) and len(value) <= schema["maxLength"]
        case "integer":
            is_integer = isinstance(value, int) and not isinstance(value, bool)
            return is_integer and schema["minimum"] <= value <= schema["maximum"]
        case "boolean":
            return isinstance(value, bool)
        case kind:
            return kind == "null" and value is None


_SCALARS: st.SearchStrategy[dict[str, Any]] = st.one_of(
    st.just({"type": "boolean"}),
    st.just({"type": "null"}),
    st.integers(0, 9).map(lambda length: {"type": "string", "maxLength": length}),
    st.tuples(st.integers(-50, 0), st.integers(1, 2000)).map(
        lambda bounds: {"type": "integer", "minimum": bounds[0], "maximum": bounds[1]}
    ),
    st.lists(st.sampled_from(["a", "日本", 'q"', 7, None, True, "\\n"]), min_size=1, max_size=3).map(
        lambda values: {"enum": values}
    ),
)


def _objects(inner: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    fields = st.dictionaries(st.sampled_from(["a", "b c", "é", "d"]), inner, max_size=3)
    return st.tuples(fields, st.booleans()).map(
        lambda made: {
            "type": "object",
            "properties": made[0],
            "required": sorted(made[0]) if made[1] else [],
            "additionalProperties": False,
        }
    )


def _arrays(inner: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    return st.tuples(inner, st.integers(0, 2)).map(
        lambda made: {"type": "array", "items": made[0], "minItems": made[1], "maxItems": made[1] + 2}
    )


# Small ones: every value of them is soon at its end.
schemas = st.recursive(_SCALARS, lambda inner: st.one_of(_objects(inner), _arrays(inner)), max_leaves=4)
