"""Tools and the choice among them, out of the JSON of a request; the chat and the responses API write them alike but
for one level of nesting."""

import enum
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from octavo.frontend.chat import Tool
from octavo.frontend.errors import Reason, Unsupported, bad_parameter

MAX_TOOLS = 128
_NAME: Final = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_NAME_RULE = "a name has 1 to 64 letters, digits, underscores, dots and dashes"
_KNOWN: Final = {"name", "description", "parameters", "strict"}


class ToolChoiceMode(enum.StrEnum):
    """Whether there are to be calls: none; if the model likes; some; one of a certain function."""

    NONE = "none"
    AUTO = "auto"
    REQUIRED = "required"
    FUNCTION = "function"


@dataclass(frozen=True)
class ToolChoice:
    """`name` is of `FUNCTION` only."""

    mode: ToolChoiceMode
    name: str = ""


def read_tools(value: object) -> tuple[Tool, ...]:
    """The field `tools`, already decoded from JSON; None for left out. Raises `InvalidRequest`, and `Unsupported` for
    tools that are no functions."""
    if value is None:
        return ()
    if not isinstance(value, list) or len(value) > MAX_TOOLS:
        raise bad_parameter("tools", "not a list that fits", f"it must be a list of at most {MAX_TOOLS} functions")
    tools = tuple(_tool(f"tools[{place}]", item) for place, item in enumerate(value))
    if len({tool.name for tool in tools}) < len(tools):
        raise bad_parameter("tools", "naming a function twice", "each must have its own name")
    return tools


def read_tool_choice(value: object, tools: Sequence[Tool]) -> ToolChoice:
    """The field `tool_choice`; left out it is `auto`. Raises `InvalidRequest` for one that the tools do not allow."""
    choice = _choice(value, has_tools=bool(tools))
    if choice.mode in (ToolChoiceMode.REQUIRED, ToolChoiceMode.FUNCTION) and not tools:
        raise bad_parameter("tool_choice", choice.mode.value, "there are no tools to choose from; send some")
    if choice.mode is ToolChoiceMode.FUNCTION and choice.name not in {tool.name for tool in tools}:
        raise bad_parameter("tool_choice", repr(choice.name[:64]), "it must name one of the tools")
    return choice


def _tool(field: str, item: object) -> Tool:
    if not isinstance(item, dict):
        raise bad_parameter(field, "not an object", 'it must be {"type": "function", ...}')
    if item.get("type") != "function":
        kind = repr(item.get("type"))[:64]
        raise Unsupported(
            Reason.UNSUPPORTED_FIELD, f"{field} is of type {kind}; only functions are known here", field=field
        )
    nested = item.get("function")
    function = nested if isinstance(nested, dict) else {key: item[key] for key in item if key != "type"}
    return _function(field, function)


def _function(field: str, function: dict[str, Any]) -> Tool:
    if unknown := sorted(set(function) - _KNOWN):
        raise bad_parameter(field, f"with {unknown[0][:64]!r}", f"a function has {', '.join(sorted(_KNOWN))} only")
    name, description, parameters = (function.get(key) for key in ("name", "description", "parameters"))
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise bad_parameter(f"{field}.name", repr(name)[:80], _NAME_RULE)
    if not isinstance(description, str | None):
        raise bad_parameter(f"{field}.description", "not a text", "it must be one")
    if not isinstance(parameters, dict | None):
        raise bad_parameter(f"{field}.parameters", "not an object", "it must be a JSON schema")
    schema = "" if parameters is None else msgspec.json.encode(parameters).decode()
    return Tool(name, description or "", schema)


def _choice(value: object, *, has_tools: bool) -> ToolChoice:
    match value:
        case None:
            return ToolChoice(ToolChoiceMode.AUTO if has_tools else ToolChoiceMode.NONE)
        case "none" | "auto" | "required":
            return ToolChoice(ToolChoiceMode(value))
        case {"type": "function", "function": {"name": str(name)}} | {"type": "function", "name": str(name)}:
            return ToolChoice(ToolChoiceMode.FUNCTION, name)
    rule = 'it must be "none", "auto", "required" or a function that is named'
    raise bad_parameter("tool_choice", repr(value)[:64], rule)
