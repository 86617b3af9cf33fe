"""Every setting of a process that has a variable stands in docs/deployment.md, and reaches its container."""

import re
import shutil
import subprocess
from pathlib import Path

import click
import pytest

from octavo.frontend.cli.frontend import frontend
from octavo.scheduler.cli.serve import scheduler
from octavo.worker.cli.worker import worker

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


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs the openssl command")
def test_certificates_made_as_the_page_says_pass_strict_verification(tmp_path: Path) -> None:
    commands = PAGE.split("\n### TLS\n")[1].split("```sh\n")[1].split("```")[0]
    subprocess.run(["bash", "-ec", commands], cwd=tmp_path, check=True, capture_output=True)
    verify = ["openssl", "verify", "-x509_strict", "-purpose", "sslserver", "-verify_hostname", "llm.example"]
    result = subprocess.run(
        [*verify, "-CAfile", "authority.pem", "server.pem"], cwd=tmp_path, capture_output=True, text=True
    )
    assert (result.returncode, result.stdout) == (0, "server.pem: OK\n"), result.stderr
