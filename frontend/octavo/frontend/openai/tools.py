"""Tools and the choice among them, out of the JSON of a request; the chat and the responses API write them alike but
for one level of nesting."""

import enum
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from octavo.frontend.chat import Tool
from octavo.frontend.errors import bad_parameter

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


@dataclass(frozen=True)
class Tools:
    """The functions that the model may call; and, of those that came in a namespace, its name by theirs."""

    functions: tuple[Tool, ...] = ()
    namespaces: Mapping[str, str] = field(default_factory=dict)


def read_tools(value: object, ignored: list[str]) -> Tools:
    """Reads the field `tools`, already decoded from JSON; None for left out.

    Tools that are no functions of the client's (searching the web, say) cannot be called here: they are left out, and
    named in `ignored`, as are fields of functions that nobody knows. Raises `InvalidRequest`.
    """
    if value is None:
        return Tools()
    if not isinstance(value, list) or len(value) > MAX_TOOLS:
        raise bad_parameter("tools", "not a list that fits", f"it must be a list of at most {MAX_TOOLS} functions")
    found: list[Tool] = []
    namespaces: dict[str, str] = {}
    for place, item in enumerate(value):
        name = f"tools[{place}]"
        match item:
            case {"type": "namespace", "name": str(namespace), "tools": list(inner)}:
                named = [_tool(f"{name}.tools[{n}]", each, ignored) for n, each in enumerate(inner[: MAX_TOOLS + 1])]
                found += filter(None, named)
                namespaces |= {tool.name: namespace for tool in named if tool}
            case _:
                found += filter(None, [_tool(name, item, ignored)])
    if len(found) > MAX_TOOLS:
        raise bad_parameter("tools", f"{len(found)} functions", f"at most {MAX_TOOLS} may be")
    if len({tool.name for tool in found}) < len(found):
        raise bad_parameter("tools", "naming a function twice", "each must have its own name")
    return Tools(tuple(found), namespaces)


def read_tool_choice(value: object, tools: Sequence[Tool]) -> ToolChoice:
    """The field `tool_choice`; left out it is `auto`. Raises `InvalidRequest` for one that the tools do not allow."""
    choice = _choice(value, has_tools=bool(tools))
    if choice.mode in (ToolChoiceMode.REQUIRED, ToolChoiceMode.FUNCTION) and not tools:
        raise bad_parameter("tool_choice", choice.mode.value, "there are no tools to choose from; send some")
    if choice.mode is ToolChoiceMode.FUNCTION and choice.name not in {tool.name for tool in tools}:
        raise bad_parameter("tool_choice", repr(choice.name[:64]), "it must name one of the tools")
    return choice


def _tool(place: str, item: object, ignored: list[str]) -> Tool | None:
    if not isinstance(item, dict) or not isinstance(item.get("type"), str):
        raise bad_parameter(place, "not an object with a type", 'it must be {"type": "function", ...}')
    if item["type"] != "function":
        ignored.append(f"{place}.{item['type'][:64]}")
        return None
    nested = item.get("function")
    function = nested if isinstance(nested, dict) else {key: item[key] for key in item if key != "type"}
    ignored += [f"{place}.{key}" for key in sorted(function.keys() - _KNOWN)]
    return _function(place, function)


def _function(place: str, function: dict[str, Any]) -> Tool:
    name, description, parameters = (function.get(key) for key in ("name", "description", "parameters"))
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise bad_parameter(f"{place}.name", repr(name)[:80], _NAME_RULE)
    if not isinstance(description, str | None):
        raise bad_parameter(f"{place}.description", "not a text", "it must be one")
    if not isinstance(parameters, dict | None):
        raise bad_parameter(f"{place}.parameters", "not an object", "it must be a JSON schema")
    schema = "" if parameters is None else msgspec.json.encode(parameters).decode()
    return Tool(name, description or "", schema, strict=function.get("strict") is True)


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
