import subprocess
import sys

import pytest
from click.testing import CliRunner

from octavo.cli.main import main

COMMANDS = ["serve", "frontend", "scheduler", "worker", "generate", "chat", "health", "prepare-model"]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(command: str) -> None:
    result = CliRunner().invoke(main, [command, "--help"])
    assert result.exit_code == 0, result.output
    assert result.output.startswith(f"Usage: main {command}")


def test_help_lists_every_command_without_importing_any() -> None:
    script = (
        "import sys; from octavo.cli.main import main\n"
        "try: main(['--help'])\n"
        "except SystemExit as end: assert end.code == 0\n"
        "loaded = [name for name in sys.modules if name.startswith('octavo.') and not name.startswith('octavo.cli')]\n"
        "assert not loaded, loaded"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    assert all(f"\n  {command} " in result.stdout for command in COMMANDS)


def test_an_unknown_command_is_a_usage_error() -> None:
    result = CliRunner().invoke(main, ["divine"])
    assert result.exit_code == 2
    assert "No such command 'divine'" in result.output


def test_a_command_whose_extra_is_missing_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("octavo.worker.prepare")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "octavo.worker.prepare", None)
    monkeypatch.setitem(sys.modules, "gguf", None)
    monkeypatch.setitem(sys.modules, "torch", None)
    result = CliRunner().invoke(main, ["prepare-model"])
    assert result.exit_code == 1
    assert "prepare-model" in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["scheduler", "--max-num-seqs", "0"], "--max-num-seqs"),
        (["scheduler", "--max-steps-in-flight", "3"], "--max-steps-in-flight"),
        (["scheduler", "--worker-endpoint", "tcp://0.0.0.0:5555"], "--insecure-tcp"),
        (["scheduler", "--frontend-endpoint", "nonsense"], "is no address"),
        (["serve", "--workers", "0"], "--workers"),
        (["serve", "--model", "/nonexistent"], "no model directory at /nonexistent"),
    ],
)
def test_wrong_settings_are_refused_in_one_clear_line(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code in (1, 2)
    assert message in result.output
    assert "Traceback" not in result.output
