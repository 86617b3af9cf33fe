"""Writes the options of the processes into docs/deployment.md, compose.yaml and the options of `octavo.llm`; `--check`
only says whether they are current.

The first two stay pages for people: the rows' order and sentences are kept. An option without a row gets one of its
default and its help, after the option that comes before it; rows and variables of options that are gone are dropped.
"""

import re
import sys
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import click

from octavo.cli.main import main as dispatcher
from octavo.frontend.cli.frontend import frontend
from octavo.runtime.options.flags import fields_of
from octavo.runtime.options.option import Parsed
from octavo.scheduler.cli.serve import scheduler
from octavo.worker.cli.worker import worker
from octavo.worker.model_settings import ModelSettings

ROOT: Final = Path(__file__).parents[1]
PAGE: Final = ROOT / "docs" / "deployment.md"
COMPOSE: Final = ROOT / "compose.yaml"
ENGINE: Final = ROOT / "frontend" / "octavo" / "llm" / "worker_options.py"
# In the order of the table.
COMMANDS: Final[Mapping[str, click.Command]] = {"frontend": frontend, "scheduler": scheduler, "worker": worker}
_HEADER: Final = "| variable | process | default | meaning |\n|---|---|---|---|\n"
_ROW: Final = re.compile(r"\| `(\w+)` \| ([^|]+) \|")
# Where compose.yaml says what a process gets; of workers, what all kinds of them share.
_HEADINGS: Final = {"frontend": "\n  frontend:\n", "scheduler": "\n  scheduler:\n", "worker": "\nx-worker: &worker\n"}
_SHARED: Final = "\nx-environment: &environment\n"
_PASSED_ON: Final = re.compile(r"^ +(OCTAVO_\w+):\n", flags=re.MULTILINE)


def main(arguments: Sequence[str]) -> int:
    """Returns the exit status: 0, or 1 if `--check` found a difference."""
    wanted = {
        PAGE: page(_read(PAGE), COMMANDS),
        COMPOSE: compose(_read(COMPOSE), _read(PAGE), COMMANDS),
        ENGINE: engine_options(ModelSettings),
    }
    stale = [path for path, text in wanted.items() if text != _read(path)]
    if "--check" in arguments:
        for path in stale:
            print(f"{path.relative_to(ROOT)} is not current; run python -m tests.option_pages", file=sys.stderr)
        return 1 if stale else 0
    for path in stale:
        path.write_text(wanted[path], encoding="utf-8")
    return 0


def page(text: str, commands: Mapping[str, click.Command]) -> str:
    """Returns docs/deployment.md with a row for each option that reaches a container from outside."""
    before, rest = text.split(_HEADER, 1)
    end = rest.index("\n\n") + 1
    rows = {_variable(line): line for line in rest[:end].splitlines()}
    processes = {variable: names for variable, names in _processes(commands).items() if variable not in _set(text)}
    # The options of all commands, and what Compose itself reads.
    others = {_variable_of(option) for option in dispatcher.params} | {
        variable for variable, row in rows.items() if _process(row) == "Compose"
    }
    described = {_variable_of(option): option for option in _options(commands)}
    order = merged([*rows], [variable for variable in described if variable in processes], keep=others)
    lines = [
        _with_process(rows.get(variable) or _new_row(described[variable]), processes.get(variable))
        for variable in order
    ]
    return before + _HEADER + "".join(f"{line}\n" for line in lines) + rest[end:]


def compose(text: str, page_text: str, commands: Mapping[str, click.Command]) -> str:
    """Returns compose.yaml with each option passed on to its containers, but for those that the page says are set."""
    shared = set(_PASSED_ON.findall(_block(text, _SHARED)))
    for name, command in commands.items():
        block = _block(text, _HEADINGS[name])
        wanted = [_variable_of(option) for option in _options({name: command})]
        order = merged(_PASSED_ON.findall(block), [v for v in wanted if v not in shared | _set(page_text)])
        first = _PASSED_ON.search(block)
        assert first, f"compose.yaml passes nothing on to {name}"
        indent = first[0].partition("OCTAVO_")[0]
        lines = "".join(f"{indent}{variable}:\n" for variable in order)
        text = text.replace(block, block[: first.start()] + lines + _PASSED_ON.sub("", block[first.start() :]))
    return text


_ENGINE_HEAD: Final = '''"""Options of workers for engines: `python -m tests.option_pages` writes this file."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class WorkerOptions:
    """Holds the options of workers; None leaves a choice to them. `octavo worker --help` says more.

    A field sets the variable of its name: `block_size` sets OCTAVO_BLOCK_SIZE.
    """

'''
# An engine has a field of its own for the model; of its workers none is a rank, and none is fake.
_NOT_AN_ENGINES: Final = re.compile(r"OCTAVO_(MODEL|TP.*|FAKE_.*)")


def engine_options(config: type) -> str:
    """Returns the module with the options of `config`, each a field of its type."""
    lines = [
        f"    {str(option.envvar).removeprefix('OCTAVO_').lower()}: {' | '.join(_types(kind, option.values))} = None\n"
        for kind, option in fields_of(config).values()
        if not _NOT_AN_ENGINES.fullmatch(str(option.envvar))
    ]
    return _ENGINE_HEAD + "".join(lines)


def _types(kind: Any, values: object) -> list[str]:
    """Returns the types that a field takes: of a text that a command reads, also the text."""
    several = typing.get_args(kind) if isinstance(kind, types.UnionType) else (kind,)
    plain = {one.__name__ if isinstance(one, type) else "str" for one in several if one is not types.NoneType}
    return [*sorted(plain | ({"str"} if isinstance(values, Parsed) else set())), "None"]


def merged(there: Sequence[str], wanted: Sequence[str], keep: Iterable[str] = ()) -> list[str]:
    """Returns what is there of `wanted` and `keep` in its order, and each other of `wanted` after its predecessor."""
    found = [name for name in there if name in wanted or name in keep]
    for index, name in enumerate(wanted):
        if name not in found:
            found.insert(found.index(wanted[index - 1]) + 1 if index else len(found), name)
    return found


def shown(option: click.Option) -> str:
    """Returns an option's default as a table shows it; "none" where it is no plain value."""
    default = option.default
    if isinstance(default, bool):
        return f"`{default}`".lower() if option.secondary_opts else "off"
    return f"`{str(default).removesuffix('.0')}`" if default and isinstance(default, int | float | str) else "none"


def _options(commands: Mapping[str, click.Command]) -> list[click.Option]:
    """Returns the options that have a variable, but for those of the fake device, which computes no model."""
    options = [option for command in commands.values() for option in command.params if isinstance(option, click.Option)]
    return [option for option in options if option.envvar and not _variable_of(option).startswith("OCTAVO_FAKE_")]


def _processes(commands: Mapping[str, click.Command]) -> dict[str, list[str]]:
    """Returns the names of the processes that have a variable, by the variable."""
    found: dict[str, list[str]] = {}
    for name, command in commands.items():
        for option in _options({name: command}):
            found.setdefault(_variable_of(option), []).append(name)
    return found


def _variable_of(option: click.Parameter) -> str:
    return str(option.envvar)


def _set(text: str) -> set[str]:
    """Returns the variables of the page's second table: compose.yaml sets them, or leaves them out."""
    return set(re.findall(r"^\| `(OCTAVO_\w+)` \|", text.split("\nOutside Compose the processes")[1], re.MULTILINE))


def _variable(row: str) -> str:
    match = _ROW.match(row)
    assert match, f"docs/deployment.md has a row without a variable: {row}"
    return match[1]


def _process(row: str) -> str:
    return row.split(" | ")[1]


def _with_process(row: str, names: Sequence[str] | None) -> str:
    if names is None:
        return row
    cells = row.split(" | ")
    cells[1] = "all" if len(names) == len(COMMANDS) else ", ".join(names)
    return " | ".join(cells)


def _new_row(option: click.Option) -> str:
    meaning = (option.help or "").removesuffix(".").replace("|", "\\|")
    if not meaning[1:2].isupper():
        meaning = meaning[0].lower() + meaning[1:]
    return f"| `{_variable_of(option)}` | - | {shown(option)} | {meaning} |"


def _block(text: str, heading: str) -> str:
    """Returns what stands below a heading of compose.yaml, down to the next of its depth."""
    indent = re.match(r"\n( *)", heading)
    assert indent
    return re.split(rf"^{indent[1]}[\w#]", text.split(heading)[1], flags=re.MULTILINE)[0]


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8")


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
