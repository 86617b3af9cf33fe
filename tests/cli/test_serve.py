"""What `octavo serve` tells the processes it starts."""

from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from octavo.cli import serve as module


def test_the_processes_find_the_pinned_prefixes_from_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: dict[str, str] = {}

    async def take(*arguments: Any) -> None:
        told.update(arguments[-1])

    monkeypatch.setattr(module, "_serve", take)
    monkeypatch.setenv("OCTAVO_RUNTIME_DIR", str(tmp_path / "run"))
    monkeypatch.chdir(tmp_path)
    Path("prefixes.json").write_text("{}")
    assert CliRunner().invoke(module.serve, ["--pinned-prefixes", "prefixes.json"]).exit_code == 0
    assert told["OCTAVO_PINNED_PREFIXES"] == str(tmp_path / "prefixes.json")
    told.clear()
    assert CliRunner().invoke(module.serve, []).exit_code == 0
    assert "OCTAVO_PINNED_PREFIXES" not in told
