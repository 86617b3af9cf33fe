"""What `octavo bench serve` says before it has measured anything."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from octavo.loadgen.cli import bench
from octavo.loadgen.servers import Failure, Record
from octavo.loadgen.session import SessionProgress
from octavo.testbed.stack import free_address
from octavo.workload.job import Job

WORKLOAD = ["--arrivals", "at-once", "--requests", "2"]


def invoke(*arguments: str, environment: dict[str, str] | None = None) -> Any:
    return CliRunner().invoke(bench, ["serve", *arguments], env=environment, catch_exceptions=False)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["localhost", *WORKLOAD], "no address of a server; write http://HOST:PORT"),
        (["http://h:1", *WORKLOAD, "--compare", "elsewhere"], "no address of a server"),
        (["http://h:1", *WORKLOAD, "--goodput", "ttft=1s"], "is no target: write METRIC<TIME"),
        (["http://h:1"], "--rate"),
        (["http://h:1", *WORKLOAD, "--openai-only", "--beam-width", "2"], "leave out --openai-only or --beam-width"),
        (["http://h:1", *WORKLOAD, "--rounds", "0"], "--rounds"),
        (["http://h:1", *WORKLOAD, "--json", "/nowhere/report.json"], "cannot write /nowhere/report.json"),
        (WORKLOAD, "Missing argument 'SERVER'"),
    ],
)
def test_flags_that_make_no_sense_are_told(arguments: Sequence[str], message: str) -> None:
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert message in result.stderr


@pytest.mark.parametrize(("scheme", "told"), [("http", "is it running?"), ("grpc", "nothing listens there")])
def test_a_server_that_is_not_there_is_an_error_and_no_key_is_shown(scheme: str, told: str) -> None:
    keys = {"OCTAVO_API_KEY": "a-secret-key", "OCTAVO_SERVER": f"{scheme}://{free_address()}"}
    result = invoke(*WORKLOAD, environment=keys)
    assert result.exit_code == 1
    assert told in result.stderr
    assert "a-secret-key" not in result.output


def test_a_key_that_no_header_can_hold_is_told_but_not_shown() -> None:
    result = invoke("http://h:1", *WORKLOAD, environment={"OCTAVO_API_KEY": "a-secret-key\n"})
    assert result.exit_code == 2
    assert "OCTAVO_API_KEY has characters that no header can hold" in result.stderr
    assert "a-secret-key" not in result.output


def test_a_certificate_that_is_none_is_told(tmp_path: Path) -> None:
    file = tmp_path / "ca.pem"
    file.write_text("nothing")
    result = invoke("https://h:1", *WORKLOAD, "--ca-certificate", str(file))
    assert result.exit_code == 1
    assert f"{file} is no certificate" in result.stderr


def ended(failure: Failure | None = None) -> Record:
    return Record(Job(0.0, 1, 1), sent_s=0.0, finished_s=None if failure else 1.0, failure=failure)


def test_progress_is_a_line_where_nobody_watches(capsys: pytest.CaptureFixture[str]) -> None:
    with SessionProgress("a server", 3) as progress:
        for record in (Record(Job(0.0, 1, 1), sent_s=0.0),) * 3 + (ended(), ended(Failure("timeout"))):
            progress.changed(record)
    assert capsys.readouterr().err == "a server: 2 of 3 requests ended, 1 under way, 1 failed\n"


def test_progress_is_a_bar_on_a_terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with SessionProgress("a server", 2) as progress:
        for record in (Record(Job(0.0, 1, 1), sent_s=0.0), ended()):
            progress.changed(record)
    shown = capsys.readouterr().err
    assert "a server:" in shown
    assert "1/2" in shown
    assert "1 of 2" not in shown


def test_the_bar_moves_before_any_request_has_ended(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with SessionProgress("a server", 2) as progress:
        progress._shown_at -= 1.0
        progress.changed(Record(Job(0.0, 1, 1), sent_s=0.0))
        assert "1 under way" in capsys.readouterr().err
