import os
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from octavo.cli.main import _explain, main
from octavo.cli.serve import serve
from octavo.scheduler.core.config import Policy, Preemption
from octavo.testbed.tiny_model import write_byte_model
from octavo.testing.depth import deep_rows

COMMANDS = [
    *("serve", "frontend", "scheduler", "replay", "explain", "requests", "top", "prefix"),
    *("worker", "generate", "chat", "health", "prepare-model", "convert-weights", "quantize", "keys"),
    *("bench", "evaluate", "cache"),
]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(command: str) -> None:
    result = CliRunner().invoke(main, [command, "--help"])
    assert result.exit_code == 0, result.output
    assert result.output.startswith(f"Usage: main {command}")


@pytest.mark.parametrize(
    ("command", "variable"),
    [
        (["scheduler"], "OCTAVO_POLICY"),
        (["frontend"], "OCTAVO_API_KEYS"),
        (["worker"], "OCTAVO_DTYPE"),
        (["generate"], "OCTAVO_API_KEY"),
        (["prefix", "pin"], "OCTAVO_ADMIN_ADDRESS"),
        (["cache", "list"], "OCTAVO_ADMIN_ADDRESS"),
        ([], "OCTAVO_LOG_LEVEL"),
    ],
)
def test_help_names_the_variable_of_a_flag(command: list[str], variable: str) -> None:
    result = CliRunner().invoke(main, [*command, "--help"])
    assert f"[env var: {variable}" in " ".join(result.output.split())


def test_help_lists_every_command_without_importing_any() -> None:
    script = (
        "import sys; from octavo.cli.main import main\n"
        "try: main(['--help'])\n"
        "except SystemExit as end: assert end.code == 0\n"
        "loaded = [name for name in sys.modules if name.startswith('octavo.') and not name.startswith('octavo.cli')]\n"
        "assert not loaded, loaded"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=240)
    assert result.returncode == 0, result.stderr
    assert all(f"\n  {command} " in result.stdout for command in COMMANDS)


def test_an_unknown_command_is_a_usage_error() -> None:
    result = CliRunner().invoke(main, ["divine"])
    assert result.exit_code == 2
    assert "No such command 'divine'" in result.output


@pytest.mark.parametrize(
    ("command", "absent", "extra"),
    [
        ("worker", "torch", "worker"),
        ("evaluate", "tokenizers", "worker"),
        ("frontend", "tokenizers", "frontend"),
        ("bench", "httpx", "bench"),
        ("cache verify --disk .", "xxhash", "worker"),
        *deep_rows(
            ("prepare-model", "torch", "worker"),
            ("evaluate", "torch", "worker"),
            ("frontend", "grpc_reflection", "frontend"),
            ("bench", "tqdm", "bench"),
        ),
    ],
)
def test_a_command_whose_extra_is_missing_says_how_to_install_it(
    tmp_path: Path, command: str, absent: str, extra: str
) -> None:
    # A child process, because this one may have imported anything; as if the package were not installed.
    script = (
        "import sys\n"
        "class Absent:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name.partition('.')[0] == {absent!r}: raise ModuleNotFoundError(name, name={absent!r})\n"
        "sys.meta_path.insert(0, Absent())\n"
        "from octavo.cli.main import main\n"
        f"main({command.split()!r})"
    )
    write_byte_model(tmp_path / "model")
    environment = {
        **os.environ,
        "OCTAVO_RUNTIME_DIR": str(tmp_path / "run"),
        "OCTAVO_CACHE": str(tmp_path / "cache"),
        "OCTAVO_MODEL": str(tmp_path / "model"),
        "OCTAVO_LISTEN": "127.0.0.1:0",
    }
    result = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=240
    )
    assert result.returncode == 1, result.stderr
    assert result.stderr.splitlines()[-1] == (
        f"Error: `octavo {command.partition(' --')[0]}` needs {absent}, which is not installed; in Octavo's source"
        f" tree run: pip install '.[{extra}]'"
    )
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(("command", "extra"), [("worker", "worker"), ("frontend", "frontend")])
def test_what_several_extras_install_is_asked_for_by_that_of_the_command(command: str, extra: str) -> None:
    with pytest.raises(click.ClickException, match=rf"`octavo {command}` needs llguidance.*'\.\[{extra}\]'"):
        _explain(
            command,
            ModuleNotFoundError("No module named 'llguidance'", name="llguidance"),
            f"octavo.{command}.cli.{command}:{command}",
        )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["scheduler", "--max-num-seqs", "0"], "--max-num-seqs"),
        (["scheduler", "--max-steps-in-flight", "3"], "--max-steps-in-flight"),
        (["scheduler", "--tenant-weight", "a=0"], "'a=0' is not NAME=WEIGHT"),
        (["scheduler", "--worker-endpoint", "tcp://0.0.0.0:5555"], "--insecure-tcp"),
        (["scheduler", "--worker-endpoint", "tcp://0.0.0.0:5555"], "--curve-keys DIR, which `octavo keys DIR` makes"),
        (["scheduler", "--admin-address", "0.0.0.0:50052"], "--insecure-admin on a network"),
        (["scheduler", "--metrics-listen", "0.0.0.0:9464"], "--insecure-metrics on a network"),
        (["worker", "--metrics-listen", "[::]:9464"], "--insecure-metrics on a network"),
        (["scheduler", "--curve-keys", "/nonexistent"], "'/nonexistent' does not exist"),
        (["scheduler", "--curve-keys", "/"], "no key at /scheduler.secret"),
        (["frontend", "--curve-keys", "/"], "no key at /frontend.secret"),
        (["worker", "--curve-keys", "/"], "no key at /worker.secret"),
        (["scheduler", "--frontend-endpoint", "nonsense"], "is no address"),
        (["serve", "--workers", "0"], "--workers"),
        (["serve", "--policy", "fifo"], "--policy"),
        (["serve", "--preemption", "abort"], "--preemption"),
        (["serve", "--model", "/nonexistent"], "no model directory at /nonexistent"),
    ],
)
def test_wrong_settings_are_refused_in_one_clear_line(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code in (1, 2)
    assert message in result.output
    assert "Traceback" not in result.output


@pytest.mark.parametrize("arguments", [["scheduler"], ["frontend", "--model", "/nonexistent"], ["requests"]])
def test_a_runtime_directory_that_is_open_to_others_is_refused_in_one_clear_line(
    arguments: list[str], tmp_path: Path
) -> None:
    tmp_path.chmod(0o755)
    result = CliRunner(env={"OCTAVO_RUNTIME_DIR": str(tmp_path)}).invoke(main, arguments)
    assert result.exit_code == 2
    assert f"run `chmod 700 {tmp_path}`" in result.output
    assert isinstance(result.exception, SystemExit)


@pytest.mark.parametrize(("flag", "values"), [("policy", list(Policy)), ("preemption", list(Preemption))])
def test_serve_offers_all_that_the_scheduler_can(flag: str, values: list[str]) -> None:
    [choice] = [option.type for option in serve.params if option.name == flag]
    assert isinstance(choice, click.Choice)
    assert list(choice.choices) == values
