"""The shape of every message, as plain data: what `schemas/N.json` keeps of the schemas that schedulers still serve.

`python -m tests.proto.schema_shapes` writes that of today, for a release that changes messages.
"""

import json
import types
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

import msgspec

from octavo.wire.base import SCHEMA_VERSION
from octavo.wire.requests import FromFrontend, ToFrontend
from octavo.wire.steps import FromWorker, ToWorker
from octavo.wire.versions import LATER_MEMBERS, LATER_MESSAGES, field_version

SCHEMAS = Path(__file__).parent / "schemas"
Shape = Any


def shapes(version: int = SCHEMA_VERSION) -> dict[str, Shape]:
    """Returns each message's fields in order, as peers of a schema see them: names, and the shapes of values."""
    kinds = [kind for union in (FromFrontend, ToFrontend, FromWorker, ToWorker) for kind in get_args(union)]
    return {kind.__name__: _of(kind, version) for kind in kinds if LATER_MESSAGES.get(kind, 0) <= version}


def without_names(shape: Shape) -> Shape:
    """Returns a shape as it is on the wire, where fields have places and no names."""
    match shape:
        case {"fields": fields}:
            return [without_names(each) for _, each in fields]
        case list():
            return [without_names(each) for each in shape]
    return shape


def _of(hint: Any, version: int) -> Shape:
    origin = get_origin(hint)
    if origin is Annotated:
        return _of(get_args(hint)[0], version)
    if origin in (Union, types.UnionType):
        return ["any of", *sorted((_of(each, version) for each in get_args(hint)), key=str)]
    if origin is not None:
        return [origin.__name__, *(_of(each, version) for each in get_args(hint) if each is not Ellipsis)]
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        hints = get_type_hints(hint, include_extras=True)
        known = [name for name in hint.__struct_fields__ if field_version(hints[name]) <= version]
        return {"fields": [[name, _of(hints[name], version)] for name in known]}
    if isinstance(hint, type) and issubclass(hint, Enum):
        return ["one of", *(each.value for each in hint if LATER_MEMBERS.get(each, (0,))[0] <= version)]
    return hint.__name__


def main() -> None:
    """Writes today's shapes."""
    SCHEMAS.mkdir(exist_ok=True)
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(shape)}" for name, shape in shapes().items())
    (SCHEMAS / f"{SCHEMA_VERSION}.json").write_text(f"{{\n{lines}\n}}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
