from pathlib import Path

from click.testing import CliRunner, Result

from octavo.cli.main import main
from octavo.runtime.transport.curve_keys import key_files, read_client_keys, read_server_keys


def keys(*arguments: str | Path) -> Result:
    return CliRunner().invoke(main, ["keys", *map(str, arguments)])


def contents(directory: Path) -> list[bytes]:
    return [path.read_bytes() for path in key_files(directory)]


def test_keys_are_made_and_it_is_said_who_needs_which(tmp_path: Path) -> None:
    result = keys(tmp_path / "keys")
    assert result.exit_code == 0, result.output
    assert "\n  worker:    worker.secret scheduler.public\n" in result.output
    assert "\n  frontend:  frontend.secret scheduler.public\n" in result.output
    assert "\n  scheduler: scheduler.secret frontend.public worker.public\n" in result.output
    assert "--curve-keys" in result.output
    read_server_keys(tmp_path / "keys", "frontend")
    read_client_keys(tmp_path / "keys", "worker")


def test_keys_that_are_there_are_replaced_only_by_force(tmp_path: Path) -> None:
    keys(tmp_path / "keys")
    before = contents(tmp_path / "keys")
    result = keys(tmp_path / "keys")
    assert result.exit_code == 1
    assert "holds scheduler.secret, scheduler.public" in result.output
    assert "--force" in result.output
    assert contents(tmp_path / "keys") == before
    assert keys(tmp_path / "keys", "--force").exit_code == 0
    assert not set(contents(tmp_path / "keys")) & set(before)


def test_keys_that_are_there_can_be_kept(tmp_path: Path) -> None:
    assert keys(tmp_path / "keys", "--keep").exit_code == 0
    before = contents(tmp_path / "keys")
    assert keys(tmp_path / "keys", "--keep").exit_code == 0
    assert contents(tmp_path / "keys") == before


def test_a_part_of_the_keys_is_not_kept_as_if_it_were_all(tmp_path: Path) -> None:
    keys(tmp_path / "keys")
    (tmp_path / "keys" / "worker.secret").unlink()
    result = keys(tmp_path / "keys", "--keep")
    assert result.exit_code == 1
    assert "worker.public" in result.output


def test_force_and_keep_contradict_each_other(tmp_path: Path) -> None:
    assert keys(tmp_path / "keys", "--keep", "--force").exit_code == 2
    assert not (tmp_path / "keys").exists()


def test_no_secret_is_printed(tmp_path: Path) -> None:
    output = keys(tmp_path / "keys").output
    assert not any(key.decode().strip() in output for key in contents(tmp_path / "keys"))
