"""`octavo cache measure`, `verify` and `clear` say what a directory holds, find damage, and empty it."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from octavo.cli.main import main
from octavo.testing.small.kv_blocks import IDENTITY, payload_of, put
from octavo.worker.kv_store.store import KVStore


def run(command: str, directory: Path, *arguments: str) -> Result:
    return CliRunner().invoke(main, ["cache", command, "--disk", str(directory), *arguments])


@pytest.fixture
def segment(tmp_path: Path) -> Path:
    with KVStore(tmp_path / "kv", 1 << 20, IDENTITY) as store:
        put(store, 1, 2, 3)
    (path,) = tmp_path.rglob("*.kv")
    return path


def test_blocks_are_measured_and_verified(segment: Path) -> None:
    for command in ("measure", "verify"):
        result = run(command, segment.parents[1])
        assert result.exit_code == 0, result.output
        assert result.output == f"3 blocks in {segment.stat().st_size:,} bytes of {IDENTITY.encoded}\n"


def test_damage_is_found_and_ends_with_status_1(segment: Path) -> None:
    segment.write_bytes(segment.read_bytes().replace(payload_of(2), bytes(len(payload_of(2)))))
    assert run("measure", segment.parents[1]).exit_code == 0
    result = run("verify", segment.parents[1])
    assert result.exit_code == 1
    assert result.output.startswith(f"{segment}: 1 damaged blocks\n3 blocks in ")
    directory = segment.parents[1]
    hint = f"`octavo cache clear --disk {directory}` removes all"
    assert result.output.endswith(f"Error: 1 blocks or files are damaged; {hint}\n")
    segment.write_bytes(b"")
    result = run("verify", segment.parents[1])
    assert result.exit_code == 1
    assert f"{segment}: it is shorter than a header\nno KV blocks in" in result.output


def test_clearing_empties_the_directory(segment: Path) -> None:
    size = segment.stat().st_size
    assert run("clear", segment.parents[1]).output == f"removed 1 files of {size:,} bytes\n"
    assert not segment.exists()
    assert run("measure", segment.parents[1]).output == f"no KV blocks in {segment.parents[1]}\n"


def test_a_directory_that_is_not_there_is_a_usage_error(tmp_path: Path) -> None:
    result = run("measure", tmp_path / "none")
    assert result.exit_code == 2
    assert "does not exist" in result.output


def test_programs_get_json(segment: Path) -> None:
    directory, size = segment.parents[1], segment.stat().st_size
    held = [{"identity": asdict(IDENTITY), "blocks": 3, "bytes": size}]
    found = {"directory": str(directory), "identities": held, "damaged": []}
    assert json.loads(run("measure", directory, "--json").output) == found
    segment.write_bytes(segment.read_bytes().replace(payload_of(2), bytes(len(payload_of(2)))))
    result = run("verify", directory, "--json")
    assert result.exit_code == 1
    [damaged] = json.loads(result.stdout)["damaged"]
    assert damaged == {"file": str(segment), "blocks": 1, "fault": ""}
    assert json.loads(run("clear", directory, "--json").output) == {
        "directory": str(directory),
        "files": 1,
        "bytes": size,
    }
