"""Commands take the fields of a configuration as options of click, and make the configuration of what was parsed."""

import enum
import math
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import click
import msgspec

from octavo.runtime.options.option import (
    OF_FIELD,
    DirectoryPath,
    FilePath,
    OneOf,
    Option,
    Parsed,
    Real,
    Several,
    Values,
    Whole,
)

_Command = TypeVar("_Command", bound=Callable[..., Any])
_Config = TypeVar("_Config")


class _FiniteRange(click.FloatRange):
    """Accepts a number of a range that is neither infinite nor NaN."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number = float(super().convert(value, param, ctx))
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number", param, ctx)
        return number


class _CommaSeparated(click.types.StringParamType):
    """Accepts a text; a variable holds several of them, with spaces or commas between them."""

    def split_envvar_value(self, rv: str) -> list[str]:
        return rv.replace(",", " ").split()


def fields_of(config: type) -> dict[str, tuple[Any, Option]]:
    """Returns type and option by the name of each field of a dataclass or struct that is an option, in their order."""
    hints = typing.get_type_hints(config, include_extras=True)
    marked = {name: hint for name, hint in hints.items() if typing.get_origin(hint) is Annotated}
    found = {name: [mark for mark in hint.__metadata__ if isinstance(mark, Option)] for name, hint in marked.items()}
    return {name: (typing.get_args(hints[name])[0], marks[0]) for name, marks in found.items() if marks}


def options_of(config: type) -> Callable[[_Command], _Command]:
    """Gives a command an option for each such field, in their order; its parameter has the name of the field."""
    defaults = _defaults(config)
    made = [_made(name, kind, option, defaults.get(name)) for name, (kind, option) in fields_of(config).items()]

    def decorate(command: _Command) -> _Command:
        for option in reversed(made):
            command = option(command)
        return command

    return decorate


def config_of(config: type[_Config], parsed: Mapping[str, Any], **others: Any) -> _Config:
    """Makes a configuration of the values that a command has parsed; `others` are fields that are no options, or win
    over what was parsed. Raises what the configuration does."""
    return config(**{name: parsed[name] for name in fields_of(config)} | others)


def _defaults(config: type) -> dict[str, Any]:
    """Returns the defaults of the fields that have one."""
    absent: Any = MISSING if is_dataclass(config) else msgspec.NODEFAULT
    described: tuple[Any, ...] = fields(config) if is_dataclass(config) else msgspec.structs.fields(config)
    plain = {field.name: field.default for field in described if field.default is not absent}
    return plain | {field.name: field.default_factory() for field in described if field.default_factory is not absent}


def _made(name: str, kind: Any, option: Option, field_default: Any) -> Callable[[_Command], _Command]:
    attributes: dict[str, Any] = {"envvar": option.envvar, "help": option.help, "hidden": option.hidden}
    default = field_default if option.default is OF_FIELD else option.default
    attributes |= {"is_flag": True} if _plain(kind) is bool else _accepted(option.values or _by_type(kind))
    if isinstance(default, enum.Enum):
        default = default.value
    # Of several none is the default, and nothing that help could show.
    if default is not None and not (isinstance(option.values, Several) and not default):
        attributes["default"] = _made_late(default) if callable(default) else default
    if option.shown_default is not None:
        attributes["show_default"] = option.shown_default
    if _is_enum(_plain(kind)):
        attributes["callback"] = _reading(_plain(kind))
    return click.option(option.flag, name, **attributes)


def _made_late(make: Callable[[], object]) -> Callable[[], object]:
    def default() -> object:
        try:
            return make()
        except ValueError as error:
            raise click.UsageError(str(error)) from error

    return default


def _plain(kind: Any) -> Any:
    """Returns the type without its `None`."""
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        some = [one for one in typing.get_args(kind) if one is not types.NoneType]
        return some[0] if len(some) == 1 else kind
    return kind


def _is_enum(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, enum.Enum)


def _by_type(kind: Any) -> Values | None:
    """Returns what a type accepts without more words; None for any text. Raises `TypeError` where it says nothing."""
    kind = _plain(kind)
    if typing.get_origin(kind) is Literal:
        return OneOf(typing.get_args(kind))
    if _is_enum(kind):
        return OneOf(tuple(member.value for member in kind))
    by_type: dict[Any, Values | None] = {str: None, int: Whole(), float: Real()}
    if kind not in by_type:
        raise TypeError(f"{kind} does not say what its option accepts; give the option `values`")
    return by_type[kind]


def _accepted(values: Values | None) -> dict[str, Any]:
    """Returns click's words for what an option accepts."""
    match values:
        case None:
            return {}
        case Whole():
            return {"type": click.IntRange(values.at_least, values.at_most)}
        case Real():
            return {"type": _real(values)}
        case OneOf():
            return {"type": click.Choice(values.words)}
        case Parsed():
            return {"metavar": values.metavar, "callback": _reading(values.read)}
        case Several():
            text = {"type": _CommaSeparated()} if values.commas else {}
            read = {} if values.read is None else {"callback": _reading(values.read)}
            return {"multiple": True, "metavar": values.metavar, **text, **read}
        case FilePath():
            found = click.Path(exists=values.exists, dir_okay=False, resolve_path=values.absolute, path_type=Path)
            return {"type": found}
        case DirectoryPath():
            return {"type": click.Path(exists=True, file_okay=False, path_type=Path)}


def _real(values: Real) -> click.FloatRange:
    make = _FiniteRange if values.finite else click.FloatRange
    least = values.at_least if values.above is None else values.above
    most = values.at_most if values.below is None else values.below
    return make(least, most, min_open=values.above is not None, max_open=values.below is not None)


def _reading(read: Callable[[Any], object]) -> Callable[[click.Context, click.Parameter, Any], object]:
    """Returns a callback that reads what was given with `read`; where nothing was, None stays None."""

    def callback(context: click.Context, parameter: click.Parameter, given: Any) -> object:
        try:
            return None if given is None else read(given)
        except ValueError as error:
            raise click.BadParameter(str(error), context, parameter) from error

    return callback
