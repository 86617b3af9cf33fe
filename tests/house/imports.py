"""Import floors: how high the modules of a package are stacked on each other by what they import when loaded."""

import ast
from collections.abc import Iterable, Iterator, Mapping, Sequence

from .tree import Module

Graph = Mapping[str, set[str]]


def floors(modules: Sequence[Module], package: str) -> list[list[str]]:
    """Returns the longest chain of imports inside `package`, from the top down, as one list of modules per floor.

    Modules that import each other in a circle share a floor.
    """
    graph = import_graph(modules, package)
    circles = _circles(graph)
    circle_of = {name: circle for circle in circles for name in circle}
    longest: dict[frozenset[str], list[frozenset[str]]] = {}
    for circle in circles:
        # Circles come after all that they import, so these chains are known.
        below = {circle_of[target] for name in circle for target in graph[name]} - {circle}
        longest[circle] = [circle, *max((longest[other] for other in below), key=len, default=[])]
    return [sorted(circle) for circle in max(longest.values(), key=len, default=[])]


def import_graph(modules: Sequence[Module], package: str) -> dict[str, set[str]]:
    """Returns for each module of `package` the others of `package` that it imports when it is loaded."""
    inside = {module.name: module for module in modules if module.is_in(package)}
    return {name: _imported(module, inside.keys()) - {name} for name, module in inside.items()}


def reachable(graph: Graph, starts: Iterable[str]) -> set[str]:
    """Returns the modules of `starts` that there are, and all that they import, directly or not."""
    found: set[str] = set()
    waiting = [name for name in starts if name in graph]
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            waiting += graph[name]
    return found


def _imported(module: Module, known: Iterable[str]) -> set[str]:
    names = set(known)
    found = set()
    for statement in _loaded(module.tree.body):
        if isinstance(statement, ast.Import):
            found |= {alias.name for alias in statement.names}
        elif isinstance(statement, ast.ImportFrom) and statement.module and not statement.level:
            # `from package import module` loads a module, `from module import name` the one that has the name.
            whole = {f"{statement.module}.{alias.name}" for alias in statement.names}
            found |= {name if name in names else statement.module for name in whole}
    return found & names


def _loaded(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """Yields the statements that run when a module is loaded: none of functions, none for type checkers alone."""
    for statement in body:
        yield statement
        if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        if isinstance(statement, ast.If) and ast.unparse(statement.test).endswith("TYPE_CHECKING"):
            yield from _loaded(statement.orelse)
            continue
        for field in ("body", "orelse", "finalbody"):
            yield from _loaded(getattr(statement, field, []))
        for handler in getattr(statement, "handlers", []):
            yield from _loaded(handler.body)


def _circles(graph: Graph) -> list[frozenset[str]]:
    """Returns the strongly connected components, each after those that it reaches (Tarjan)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    circles: list[frozenset[str]] = []

    def visit(name: str) -> None:
        index[name] = low[name] = len(index)
        stack.append(name)
        for target in sorted(graph[name]):
            if target not in index:
                visit(target)
                low[name] = min(low[name], low[target])
            elif target in stack:
                low[name] = min(low[name], index[target])
        if low[name] == index[name]:
            start = stack.index(name)
            circles.append(frozenset(stack[start:]))
            del stack[start:]

    for name in sorted(graph):
        if name not in index:
            visit(name)
    return circles
