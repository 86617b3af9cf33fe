"""`octavo dynamo-worker` where Dynamo is not installed, and what it is told wrongly."""

import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from octavo.cli.main import main
from octavo.dynamo.cli import model_for_dynamo
from octavo.testbed.tiny_model import write_byte_model


@pytest.fixture(autouse=True)
def no_dynamo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "dynamo", None)


def test_without_dynamo_it_says_what_to_install(tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["dynamo-worker", "--model", str(tmp_path)])
    assert result.exit_code == 1
    assert "needs dynamo" in result.output
    assert "pip install '.[dynamo]', and ai-dynamo" in result.output
    assert "Traceback" not in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--kv-events", "127.0.0.1:5557"], "write tcp://host:port"),
        (["--kv-events", "tcp://*:5557"], "name the scheduler's host"),
        (["--drain-timeout", "-1"], "--drain-timeout"),
        (["--drain-timeout", "inf"], "is not a finite number"),
        (["--server", ""], "--server"),
    ],
)
def test_wrong_settings_are_refused_in_one_clear_line(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(main, ["dynamo-worker", *arguments])
    assert result.exit_code in (1, 2)
    assert message in result.output
    assert "Traceback" not in result.output


def test_its_help_needs_no_dynamo() -> None:
    result = CliRunner().invoke(main, ["dynamo-worker", "--help"])
    assert result.exit_code == 0
    assert "--kv-events ENDPOINT" in result.output


def test_the_model_is_told_by_a_path_that_holds_everywhere_or_by_its_name_on_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_byte_model(tmp_path / "org" / "model")
    monkeypatch.chdir(tmp_path)
    assert model_for_dynamo("org/model") == str(tmp_path / "org" / "model")
    assert model_for_dynamo("other/model") == "other/model"
