"""Reads values as models write them, as JSON or as literals of Python, and writes them as JSON."""

import ast
import json
from typing import Final

_WORDS: Final[dict[str, object]] = {"true": True, "false": False, "null": None, "none": None}


def json_of(text: str) -> str:
    """Returns a value as JSON. What is no JSON, and no literal of Python, is a text."""
    text = text.strip()
    try:
        return json.dumps(json.loads(text), ensure_ascii=False, allow_nan=False)
    except (ValueError, RecursionError):
        pass
    try:
        return json.dumps(_value(ast.parse(text, mode="eval").body), ensure_ascii=False, allow_nan=False)
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return json.dumps(text, ensure_ascii=False)


def _value(node: ast.expr) -> object:
    """Returns what a literal stands for, with the words of JSON among those of Python. Raises `ValueError`."""
    match node:
        case ast.Constant(value=str() | int() | float() | None as value):
            return value
        case ast.Name(id=word) if word.lower() in _WORDS:
            return _WORDS[word.lower()]
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)):
            return -value
        case ast.List(elts=items) | ast.Tuple(elts=items) | ast.Set(elts=items):
            return [_value(item) for item in items]
        case ast.Dict(keys=keys, values=values):
            return {str(_value(key)): _value(value) for key, value in zip(keys, values, strict=True) if key}
    raise ValueError("no literal")
