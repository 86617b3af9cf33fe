"""What the house is measured by: each figure with its goal and the places that it is made of."""

import ast
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from .docstrings import read_docstrings
from .imports import floors, import_graph, reachable
from .tree import ROOTS, Module, read_modules

# Whose files are counted as those which a new one of its kind would touch too.
SAMPLING_FIELD = "repetition_penalty"
OPTION = "swap_memory"
# What tests.option_pages writes: rows of docs/deployment.md, variables of compose.yaml, and modules that say so.
_WRITTEN = re.compile(
    r"^\| `OCTAVO_\w+` \|.*$|^ +OCTAVO_\w+:$|\A.*`python -m tests\.option_pages` writes this file(?s:.*)\Z",
    re.MULTILINE,
)
# Modules of the scheduler that load all of its core, and nothing else.
_CORE = [f"octavo.scheduler.{name}" for name in ("scheduler", "explain")]
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True)
class Figure:
    """A number of the house. `goal` is an upper bound; `places` are what was counted, if that helps."""

    name: str
    value: float
    goal: float | None = None
    note: str = ""
    places: Sequence[str] = ()


def measure(checkout: Path) -> list[Figure]:
    """Measures all figures of a checkout."""
    modules = read_modules(checkout)
    return [
        *size(modules),
        *loose_files(modules),
        *import_floors(modules),
        *(state(modules, name, goal) for name, goal in (("Sequence", 12), ("Replica", 14))),
        sampling_field(checkout, modules),
        option(checkout, modules),
        contract(checkout, modules),
        core(modules),
        *docstrings(modules),
        undocumented(checkout, modules),
        shared_names(modules),
        *lines_of(checkout),
        *lengths(modules),
    ]


def size(modules: Sequence[Module]) -> Iterator[Figure]:
    """Yields the production files and their lines, and both per import root."""
    per_root = [(root, [module for module in modules if module.root == root]) for root in ROOTS]
    note = ", ".join(f"{root} {len(some)}" for root, some in per_root)
    yield Figure("production files", len(modules), 310, note, [str(module.path) for module in modules])
    note = ", ".join(f"{root} {sum(module.num_lines for module in some):,}" for root, some in per_root)
    yield Figure("production lines", sum(module.num_lines for module in modules), None, note)


def loose_files(modules: Sequence[Module]) -> Iterator[Figure]:
    """Yields the most files that lie side by side in one folder."""
    folders = Counter(str(module.path.parent) for module in modules if module.path.stem != "__init__")
    ranked = folders.most_common()
    yield Figure("loose files in any folder", ranked[0][1], 20, ranked[0][0], [f"{path}: {n}" for path, n in ranked])


def import_floors(modules: Sequence[Module]) -> Iterator[Figure]:
    """Yields the height of each service's longest chain of imports."""
    for service, goal in (("scheduler", 12), ("frontend", 10), ("worker", None)):
        chain = [" = ".join(names) for names in floors(modules, f"octavo.{service}")]
        yield Figure(f"import floors: {service}", len(chain), goal, places=chain)


def state(modules: Sequence[Module], name: str, goal: int) -> Figure:
    """Counts the declared fields of a class of the scheduler, and notes the attributes that only its methods make."""
    classes = [
        node
        for module in modules
        if module.is_in("octavo.scheduler")
        for node in module.tree.body
        if isinstance(node, ast.ClassDef) and node.name == name
    ]
    if len(classes) != 1:
        raise LookupError(f"the scheduler has {len(classes)} classes {name}, where one is measured")
    declared = list(_declared(classes[0]))
    made = sorted(set(_made(classes[0])) - set(declared))
    return Figure(f"fields: {name}", len(declared), goal, f"{len(made)} more made by methods", [*declared, *made])


def _declared(node: ast.ClassDef) -> Iterator[str]:
    for statement in node.body:
        if isinstance(statement, ast.AnnAssign) and not ast.unparse(statement.annotation).startswith("ClassVar"):
            yield ast.unparse(statement.target)


def _made(node: ast.ClassDef) -> Iterator[str]:
    for inner in ast.walk(node):
        if isinstance(inner, ast.Attribute) and isinstance(inner.ctx, ast.Store) and ast.unparse(inner.value) == "self":
            yield inner.attr


def sampling_field(checkout: Path, modules: Sequence[Module]) -> Figure:
    """Counts the production files, the public contract's included, that name one sampling field."""
    protos = {path.relative_to(checkout): path.read_text(encoding="utf-8") for path in _protos(checkout)}
    sources = protos | {module.path: module.source for module in modules}
    places = [str(path) for path, source in sources.items() if re.search(rf"\b{SAMPLING_FIELD}\b", source)]
    return Figure("files for a new sampling field", len(places), 7, f"those that name {SAMPLING_FIELD}", places)


def option(checkout: Path, modules: Sequence[Module]) -> Figure:
    """Counts the files in which one option is named by hand: as attribute, flag or variable, in code, pages or
    compose.yaml. Files that name it only where `tests.option_pages` writes are noted, and not counted."""
    # docs/house.md names the option because it is counted.
    documents = (page for page in sorted((checkout / "docs").glob("*.md")) if page.name != "house.md")
    pages = [checkout / "compose.yaml", *documents]
    sources = {page.relative_to(checkout): page.read_text(encoding="utf-8") for page in pages}
    sources |= {module.path: module.source for module in modules}
    spelled = re.compile(OPTION.replace("_", "[_-]"), re.IGNORECASE)
    naming = {str(path): source for path, source in sources.items() if spelled.search(source)}
    places = [path for path, source in naming.items() if spelled.search(_WRITTEN.sub("", source))]
    written = [f"{path} (written by a command)" for path in naming if path not in places]
    note = f"those that name {OPTION} by hand; a command writes it into {len(written)} more"
    return Figure("files for a new option", len(places), 3, note, [*places, *written])


def contract(checkout: Path, modules: Sequence[Module]) -> Figure:
    """Counts the hand-written lines of the public API and of the messages between the processes."""
    lines = {str(module.path): module.num_lines for module in modules if _is_contract(module)}
    lines |= {str(path.relative_to(checkout)): _num_lines(path) for path in _protos(checkout)}
    note = f"of them {sum(n for path, n in lines.items() if path.endswith('.proto')):,} of .proto"
    return Figure("contract lines", sum(lines.values()), 1000, note, [f"{path}: {n}" for path, n in lines.items()])


def _is_contract(module: Module) -> bool:
    return module.is_in("octavo.v1") or module.is_in("octavo.wire")


def _protos(checkout: Path) -> list[Path]:
    return sorted((checkout / "proto").rglob("*.proto"))


def core(modules: Sequence[Module]) -> Figure:
    """Counts the lines of the scheduler's core: core/ and kv/, or, while files lie loose, all that its modules load."""
    rooms = [m for m in modules if m.is_in("octavo.scheduler.core") or m.is_in("octavo.scheduler.kv")]
    if rooms:
        return _core(rooms, "core/ and kv/")
    names = reachable(import_graph(modules, "octavo.scheduler"), _CORE)
    return _core([module for module in modules if module.name in names], "what scheduler.py and explain.py load")


def _core(modules: Sequence[Module], note: str) -> Figure:
    places = [f"{module.path}: {module.num_lines}" for module in modules]
    return Figure("core and kv lines", sum(module.num_lines for module in modules), 4000, note, places)


def docstrings(modules: Sequence[Module]) -> Iterator[Figure]:
    """Yields the share of docstrings with a dangling opening, and the share of first sentences without a verb."""
    found = [docstring for module in modules for docstring in read_docstrings(module)]
    for name, goal, some in (
        ("docstrings with a dangling opening, %", 5, [each for each in found if each.dangles]),
        ("docstrings without a verb, %", None, [each for each in found if not each.has_verb]),
    ):
        places = [f"{each.place}: {' '.join(each.sentence.split())}" for each in some]
        yield Figure(name, round(100 * len(some) / max(1, len(found)), 1), goal, f"{len(some)} of {len(found)}", places)


def undocumented(checkout: Path, modules: Sequence[Module]) -> Figure:
    """Counts the modules whose file no README.md of their import root names."""
    readmes: dict[str, str] = defaultdict(str)
    for root in ROOTS:
        for path in sorted((checkout / root).rglob("README.md")):
            readmes[root] += path.read_text(encoding="utf-8")
    places = [
        str(module.path)
        for module in modules
        if module.path.stem not in ("__init__", "__main__")
        and not re.search(rf"(?<![\w.-]){re.escape(module.path.name)}(?!\w)", readmes[module.root])
    ]
    note = ", ".join(f"{root} {n}" for root, n in Counter(Path(place).parts[0] for place in places).items())
    return Figure("modules in no README", len(places), 0, note, places)


def shared_names(modules: Sequence[Module]) -> Figure:
    """Counts the names of public classes that two or more production modules define."""
    homes: dict[str, list[str]] = defaultdict(list)
    for module in modules:
        for node in module.tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes[node.name].append(module.name)
    places = [f"{name}: {', '.join(some)}" for name, some in sorted(homes.items()) if len(set(some)) > 1]
    return Figure("public class names used twice", len(places), 10, places=places)


def lines_of(checkout: Path) -> Iterator[Figure]:
    """Yields the lines of the README and of the Python files under tests/."""
    yield Figure("README lines", _num_lines(checkout / "README.md"), 150)
    tests = {path: _num_lines(path) for path in sorted((checkout / "tests").rglob("*.py"))}
    folders: Counter[str] = Counter()
    for path, n in tests.items():
        folders["/".join(path.relative_to(checkout).parts[:-1][:2])] += n
    places = [f"{folder}: {n}" for folder, n in folders.most_common()]
    yield Figure("tests/ lines", sum(tests.values()), 58_000, f"{len(tests)} files", places)


def _num_lines(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def lengths(modules: Sequence[Module]) -> Iterator[Figure]:
    """Yields how long files and functions are, functions without their decorators."""
    functions = {
        f"{module.path}:{node.lineno} {node.name}": (node.end_lineno or node.lineno) - node.lineno + 1
        for module in modules
        for node in module.definitions
        if isinstance(node, _FUNCTIONS)
    }
    ranked = sorted(functions, key=lambda place: functions[place], reverse=True)
    places = [f"{place}: {functions[place]}" for place in ranked]
    yield Figure("file median", _median([module.num_lines for module in modules]), 140)
    yield Figure("function median", _median(list(functions.values())), None)
    yield Figure("function p95", percentile(list(functions.values()), 95), 30)
    yield Figure("longest function", functions[ranked[0]] if ranked else 0, None, ranked[0] if ranked else "", places)


def _median(values: Sequence[int]) -> float:
    return median(values) if values else 0


def percentile(values: Sequence[int], percent: int) -> int:
    """Returns the least of `values` that at least `percent` of a hundred do not exceed; 0 of none."""
    ordered = sorted(values)
    return ordered[max(0, -(-len(ordered) * percent // 100) - 1)] if ordered else 0
