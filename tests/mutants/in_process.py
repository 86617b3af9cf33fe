"""Mutants planted in modules that are imported already: their functions run the changed code until the patch ends."""

import importlib
from collections.abc import Iterator
from types import CodeType, FunctionType, ModuleType

import pytest

from .catalogue import CatalogueError, Mutant
from .tree import REPOSITORY


def plant(mutant: Mutant, patch: pytest.MonkeyPatch) -> None:
    """Plants a mutant of a function or method until `patch` is undone.

    Raises `CatalogueError` if it does not fit the code, or changes none of the module's functions.
    """
    path, text = mutant.mutated(REPOSITORY)
    parts = path.with_suffix("").relative_to(REPOSITORY).parts
    module = importlib.import_module(".".join(parts[parts.index("octavo") :]))
    changed = dict(_codes(compile(text, str(module.__file__), "exec")))
    planted = False
    for function in _functions(module):
        code = changed.get(function.__qualname__)
        if code is not None and _differs(code, function.__code__):
            patch.setattr(function, "__code__", code)
            planted = True
    if not planted:
        raise CatalogueError(f"{mutant.name} changes no function of {module.__name__}")


def _functions(module: ModuleType) -> Iterator[FunctionType]:
    """Those of a module and of its classes."""
    for value in vars(module).values():
        if isinstance(value, FunctionType):
            yield value
        if isinstance(value, type) and value.__module__ == module.__name__:
            for member in vars(value).values():
                member = member.fget if isinstance(member, property) else member
                if isinstance(member, FunctionType):
                    yield member


def _codes(code: CodeType) -> Iterator[tuple[str, CodeType]]:
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield constant.co_qualname, constant
            yield from _codes(constant)


def _differs(one: CodeType, other: CodeType) -> bool:
    """Whether two versions of a function do something else, wherever they stand."""
    if (one.co_code, one.co_names, one.co_varnames) != (other.co_code, other.co_names, other.co_varnames):
        return True
    pairs = list(zip(one.co_consts, other.co_consts, strict=False))
    return len(one.co_consts) != len(other.co_consts) or any(
        _differs(a, b) if isinstance(a, CodeType) and isinstance(b, CodeType) else a != b for a, b in pairs
    )
