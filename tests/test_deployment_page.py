"""Every setting of a process that has a variable stands in docs/deployment.md, and reaches its container."""

import difflib
import re
import shutil
import subprocess
from dataclasses import fields, make_dataclass
from pathlib import Path
from typing import Annotated, Any

import click
import pytest
from tests import option_pages

from octavo.frontend.cli.frontend import frontend
from octavo.llm.worker_options import WorkerOptions
from octavo.runtime.options.flags import fields_of, options_of
from octavo.runtime.options.option import OneOf, Option, Parsed, Whole
from octavo.scheduler.cli.serve import scheduler
from octavo.worker.cli.worker import worker
from octavo.worker.config import WorkerConfig
from octavo.worker.model_settings import ModelSettings

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "deployment.md").read_text(encoding="utf-8")
COMPOSE = (ROOT / "compose.yaml").read_text(encoding="utf-8")
# Which processes have a variable: one that is passed on to them, and one that compose.yaml sets or leaves out.
PASSED_ON, SET = (
    dict(re.findall(r"^\| `(OCTAVO_\w+)` \| ([^|]+) \|", table, flags=re.MULTILINE))
    for table in PAGE.split("\nOutside Compose the processes")
)
OF_THE_BUILD = {"OCTAVO_PORT", "OCTAVO_HTTP_PORT", "OCTAVO_BUILD_NETWORK"}


def service(name: str) -> str:
    """What compose.yaml says of a service; of workers, what all kinds of them share."""
    indent, heading = ("", "x-worker: &worker") if name == "worker" else ("  ", f"{name}:")
    return re.split(rf"^{indent}\w", COMPOSE.split(f"\n{indent}{heading}\n")[1], flags=re.MULTILINE)[0]


@pytest.mark.parametrize("command", [frontend, scheduler, worker], ids=lambda command: command.name)
def test_every_variable_of_a_process_is_documented(command: click.Command) -> None:
    variables = {str(option.envvar) for option in command.params if option.envvar}
    fake = {name for name in variables if name.startswith("OCTAVO_FAKE_")}
    assert variables - fake <= PASSED_ON.keys() | SET.keys()


@pytest.mark.parametrize("name", ["frontend", "scheduler", "worker"])
def test_every_documented_variable_reaches_its_container(name: str) -> None:
    wanted = {variable for variable, processes in PASSED_ON.items() if name in processes} - OF_THE_BUILD
    assert wanted
    assert wanted <= set(re.findall(r"(OCTAVO_\w+):\n", service(name)))


def with_option(mark: Option, kind: Any = int, default: object = 3) -> dict[str, click.Command]:
    """The commands, where the worker's configuration has one more field."""
    config = make_dataclass(
        "Grown", [("added", Annotated[kind, mark], default)], bases=(WorkerConfig,), kw_only=True, frozen=True
    )
    grown = options_of(config)(click.command("worker")(lambda **parsed: None))
    return {**option_pages.COMMANDS, "worker": grown}


def test_the_page_and_compose_are_what_the_options_generate(capsys: pytest.CaptureFixture[str]) -> None:
    assert option_pages.main(["--check"]) == 0, capsys.readouterr().err


def test_a_new_field_gets_a_row_and_reaches_its_container() -> None:
    commands = with_option(Option("--added", "Tokens that a worker adds.", Whole(1, 9)))
    row = "| `OCTAVO_ADDED` | worker | `3` | tokens that a worker adds |"
    assert lines_added(PAGE, option_pages.page(PAGE, commands)) == [row]
    assert lines_added(COMPOSE, option_pages.compose(COMPOSE, PAGE, commands)) == ["    OCTAVO_ADDED:"]
    # Of the service's own environment.
    assert "OCTAVO_ADDED:" in option_pages.compose(COMPOSE, PAGE, commands).split("\nservices:\n")[0]


@pytest.mark.parametrize(
    ("mark", "kind", "default", "shown"),
    [
        (Option("--added/--no-added", "CPU | GPU."), bool, True, "`true` | CPU \\| GPU |"),
        (Option("--added", "Quiet."), bool, False, "off | quiet |"),
        (Option("--added", "Seconds."), float, 1.0, "`1` | seconds |"),
        (Option("--added", "A file."), str | None, None, "none | a file |"),
    ],
)
def test_a_row_shows_the_default_of_its_field(mark: Option, kind: Any, default: object, shown: str) -> None:
    page = option_pages.page(PAGE, with_option(mark, kind, default))
    assert lines_added(PAGE, page) == [f"| `OCTAVO_ADDED` | worker | {shown}"]


def test_a_new_field_becomes_an_option_of_the_engine() -> None:
    kinds: list[tuple[Option, Any]] = [
        (Option("--added", "Tokens.", Whole(1, 9)), int),
        (Option("--added", "Where.", Parsed(str, "PLACE")), int | None),
        (Option("--added", "Which.", OneOf(("this", "that"))), str),
    ]
    found = []
    for mark, kind in kinds:
        grown = make_dataclass(
            "Grown", [("added", Annotated[kind, mark], None)], bases=(ModelSettings,), kw_only=True, frozen=True
        )
        found += lines_added(option_pages.engine_options(ModelSettings), option_pages.engine_options(grown))
    assert found == [
        "    added: int | None = None",
        "    added: int | str | None = None",
        "    added: str | None = None",
    ]


def test_an_engine_takes_every_option_of_a_worker_but_those_of_ranks_and_of_the_fake_device() -> None:
    names = set(fields_of(ModelSettings))
    engines = {field.name for field in fields(WorkerOptions)}
    assert names - engines == {"model"} | {name for name in names if name.startswith(("tp", "fake_"))}


def test_an_option_that_is_gone_leaves_the_page_and_compose() -> None:
    commands = with_option(Option("--added", "Tokens.", Whole(1, 9)))
    page, compose = option_pages.page(PAGE, commands), option_pages.compose(COMPOSE, PAGE, commands)
    assert option_pages.page(page, option_pages.COMMANDS) == PAGE
    assert option_pages.compose(compose, page, option_pages.COMMANDS) == COMPOSE


def test_a_sentence_that_was_written_by_hand_stays() -> None:
    page = PAGE.replace("tokens in a KV block, 1 to 256", "tokens of one KV block")
    assert option_pages.page(page, option_pages.COMMANDS) == page


def test_a_page_that_misses_an_option_is_not_current() -> None:
    row = next(line for line in PAGE.splitlines() if line.startswith("| `OCTAVO_SWAP_MEMORY` |"))
    assert option_pages.page(PAGE.replace(f"{row}\n", ""), option_pages.COMMANDS) != PAGE.replace(f"{row}\n", "")
    compose = COMPOSE.replace("    OCTAVO_SWAP_MEMORY:\n", "")
    assert option_pages.compose(compose, PAGE, option_pages.COMMANDS) == COMPOSE


def test_each_row_tells_the_default_of_its_option() -> None:
    rows = {line.split("`")[1]: line.split(" | ")[2] for line in PAGE.splitlines() if line.startswith("| `OCTAVO_")}
    told = {
        f"{name} {option.envvar}": (option_pages.shown(option), rows[str(option.envvar)])
        for name, command in option_pages.COMMANDS.items()
        for option in command.params
        if isinstance(option, click.Option) and option.envvar in PASSED_ON
    }
    assert {name: pair for name, pair in told.items() if pair[0] != "none" and pair[0] not in pair[1]} == {}


def lines_added(before: str, after: str) -> list[str]:
    found = list(difflib.ndiff(before.splitlines(), after.splitlines()))
    assert [line for line in found if line.startswith("- ")] == []
    return [line.removeprefix("+ ") for line in found if line.startswith("+ ")]


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs the openssl command")
def test_certificates_made_as_the_page_says_pass_strict_verification(tmp_path: Path) -> None:
    commands = PAGE.split("\n### TLS\n")[1].split("```sh\n")[1].split("```")[0]
    subprocess.run(["bash", "-ec", commands], cwd=tmp_path, check=True, capture_output=True)
    verify = ["openssl", "verify", "-x509_strict", "-purpose", "sslserver", "-verify_hostname", "llm.example"]
    result = subprocess.run(
        [*verify, "-CAfile", "authority.pem", "server.pem"], cwd=tmp_path, capture_output=True, text=True
    )
    assert (result.returncode, result.stdout) == (0, "server.pem: OK\n"), result.stderr
