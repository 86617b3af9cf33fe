"""The production modules of a checkout, read once for every figure."""

import ast
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
# Nothing else contains a class or a function.
_HOLDS_STATEMENTS = (ast.stmt, ast.excepthandler, ast.match_case)
# Every top-level folder that holds a portion of the namespace package `octavo`.
ROOTS = ("proto", "kernels", "frontend", "scheduler", "worker", "evaluation")


@dataclass(frozen=True)
class Module:
    """One hand-written production file. `path` is relative to the checkout, `name` is what Python imports it as."""

    path: Path
    name: str
    source: str

    @property
    def root(self) -> str:
        return self.path.parts[0]

    @property
    def num_lines(self) -> int:
        return len(self.source.splitlines())

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.source, str(self.path))

    @cached_property
    def definitions(self) -> list[ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef]:
        """The classes and functions of the module, wherever they stand in it, outer ones before inner ones."""
        found, waiting = [], deque[ast.AST]([self.tree])
        while waiting:
            node = waiting.popleft()
            if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                found.append(node)
            waiting.extend(child for child in ast.iter_child_nodes(node) if isinstance(child, _HOLDS_STATEMENTS))
        return found

    def is_in(self, package: str) -> bool:
        """Returns whether the module is the package `package` or lies in it."""
        return self.name == package or self.name.startswith(f"{package}.")


def read_modules(checkout: Path) -> list[Module]:
    """Reads all production modules, generated ones left out, in the order of their paths."""
    return [_read(checkout, root, path) for root in ROOTS for path in sorted(_sources(checkout / root))]


def _sources(root: Path) -> Iterator[Path]:
    return (path for path in (root / "octavo").rglob("*.py") if not _is_generated(path))


def _is_generated(path: Path) -> bool:
    with path.open(encoding="utf-8") as file:
        return "_pb2" in path.name or file.readline().startswith("# Written by ")


def _read(checkout: Path, root: str, path: Path) -> Module:
    parts = path.relative_to(checkout / root).with_suffix("").parts
    name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
    return Module(path.relative_to(checkout), name, path.read_text(encoding="utf-8"))
