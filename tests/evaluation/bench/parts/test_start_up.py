from pathlib import Path

import pytest

from octavo.bench.parts import start_up
from octavo.testbed.tiny_model import write_byte_model


def test_what_is_imported_already_costs_nothing() -> None:
    fresh = start_up.measure_import("decimal", ["json"])
    assert fresh.modules >= 1
    assert fresh.cpu_s > 0
    assert start_up.measure_import("decimal", ["decimal"]).modules == 0


def test_the_command_prints_one_line_for_each_import(capsys: pytest.CaptureFixture[str]) -> None:
    start_up.main(["--import", "decimal", "json.tool", "--rounds", "1"])
    _, decimal, tool = capsys.readouterr().out.splitlines()
    assert decimal.startswith("decimal ")
    assert tool.startswith("json.tool ")


@pytest.mark.deep
@pytest.mark.system
def test_every_kind_of_process_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_LOAD_FORMAT", "dummy")
    write_byte_model(tmp_path)
    found = start_up.start_processes(tmp_path)
    assert found.keys() == {"scheduler", "worker", "frontend", "text process"}
    for started in found.values():
        assert 0 < started.private_bytes < started.resident_bytes
        assert started.cpu_s > 0
