from pathlib import Path

import pytest
import zmq

from octavo.runtime.transport.curve_keys import (
    ROLES,
    CurveKeysError,
    Role,
    _remedy,
    files_of,
    key_files,
    public_file,
    read_client_keys,
    read_server_keys,
    secret_file,
    write_keys,
)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    path = tmp_path / "keys"
    write_keys(path)
    return path


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


def test_secrets_are_private_and_public_keys_are_not(directory: Path) -> None:
    assert mode(directory) == 0o700
    assert {mode(directory / secret_file(role)) for role in ROLES} == {0o600}
    assert {mode(directory / public_file(role)) for role in ROLES} == {0o644}
    assert {path.name for path in directory.iterdir()} == {path.name for path in key_files(directory)}


def test_each_file_is_one_line_of_z85(directory: Path) -> None:
    for path in key_files(directory):
        assert len(path.read_bytes()) == 41
        assert path.read_bytes().endswith(b"\n")


def test_every_pair_is_another_and_the_ends_agree(directory: Path) -> None:
    frontend, worker = read_client_keys(directory, "frontend"), read_client_keys(directory, "worker")
    for peer, keys in (("frontend", frontend), ("worker", worker)):
        server = read_server_keys(directory, "frontend" if peer == "frontend" else "worker")
        assert (server.admits, server.admitted) == (peer, keys.public)
        assert zmq.curve_public(server.secret) == keys.scheduler
    assert len({frontend.public, worker.public, frontend.scheduler}) == 3


@pytest.mark.parametrize("role", ROLES)
def test_a_process_needs_no_more_files_than_it_is_told(directory: Path, tmp_path: Path, role: Role) -> None:
    host = tmp_path / role
    host.mkdir()
    for name in files_of(role):
        (directory / name).rename(host / name)
    if role == "scheduler":
        read_server_keys(host, "frontend")
        read_server_keys(host, "worker")
    else:
        read_client_keys(host, role)
    assert sum(name.endswith(".secret") for name in files_of(role)) == 1


def test_new_keys_replace_the_old_ones(directory: Path) -> None:
    old = {path: path.read_bytes() for path in key_files(directory)}
    write_keys(directory)
    assert all(path.read_bytes() != key for path, key in old.items())


def test_a_directory_open_to_others_gets_no_keys(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    with pytest.raises(CurveKeysError, match=f"run `chmod 700 {tmp_path}`"):
        write_keys(tmp_path)
    assert not list(tmp_path.iterdir())


def test_somebody_elses_directory_gets_no_keys(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.getuid", lambda: directory.stat().st_uid + 1)
    with pytest.raises(CurveKeysError, match="belongs to another user"):
        write_keys(directory)


def test_a_place_that_cannot_be_written_to_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CurveKeysError, match=f"cannot write keys to {tmp_path}/file/keys"):
        write_keys(tmp_path / "file" / "keys")


@pytest.mark.parametrize("excess", [0o640, 0o604, 0o660])
def test_a_secret_open_to_others_is_refused_with_the_command_that_mends_it(directory: Path, excess: int) -> None:
    path = directory / "worker.secret"
    path.chmod(excess)
    with pytest.raises(CurveKeysError, match=f"run `chmod 600 {path}`"):
        read_client_keys(directory, "worker")
    path.chmod(0o400)
    read_client_keys(directory, "worker")


@pytest.mark.parametrize(
    ("mode", "owner", "remedy"),
    [
        (0o600, 1000, None),
        (0o440, 1000, "chmod 600"),
        (0o440, 0, None),
        (0o640, 0, None),
        (0o660, 0, "chmod 640"),
        (0o444, 0, "chmod 640"),
        (0o600, 2000, "chown 1000"),
    ],
)
def test_a_secret_is_its_readers_or_roots_and_its_groups(mode: int, owner: int, remedy: str | None) -> None:
    assert _remedy(mode, owner, reader=1000) == remedy


def test_a_public_key_that_others_may_write_is_refused(directory: Path) -> None:
    (directory / "frontend.public").chmod(0o664)
    with pytest.raises(CurveKeysError, match=r"run `chmod 644 .*frontend\.public`"):
        read_server_keys(directory, "frontend")


def test_a_missing_key_is_named_with_how_to_make_it(directory: Path) -> None:
    (directory / "scheduler.public").unlink()
    with pytest.raises(CurveKeysError, match=r"no key at .*scheduler\.public: No such file.*`octavo keys DIR`"):
        read_client_keys(directory, "frontend")


@pytest.mark.parametrize("text", [b"", b"x" * 39, b'"' * 40, b"\xff" * 40, b"x" * 80, "ä".encode() * 20])
def test_what_is_no_key_is_refused_without_being_shown(directory: Path, text: bytes) -> None:
    (directory / "worker.secret").write_bytes(text)
    with pytest.raises(CurveKeysError, match=r"worker\.secret: its text is no key in Z85") as error:
        read_client_keys(directory, "worker")
    assert not text or text.decode(errors="replace") not in str(error.value)


def test_no_secret_is_shown_with_what_holds_it(directory: Path) -> None:
    client, server = read_client_keys(directory, "worker"), read_server_keys(directory, "worker")
    assert client.secret.decode() not in repr(client)
    assert server.secret.decode() not in repr(server)


def test_a_libzmq_without_curve_is_named(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zmq, "has", lambda capability: capability != "curve")
    for use in (lambda: write_keys(directory), lambda: read_client_keys(directory, "worker")):
        with pytest.raises(CurveKeysError, match="libzmq has no CURVE"):
            use()
