from pathlib import Path

import pytest

from octavo.runtime.transport.endpoints import (
    EndpointError,
    check_endpoint,
    check_metrics,
    check_unguarded,
    claimed,
    default_endpoint,
    runtime_directory,
)


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "run"
    monkeypatch.setenv("OCTAVO_RUNTIME_DIR", str(path))
    return path


def test_the_runtime_directory_is_made_private_whatever_the_umask(directory: Path) -> None:
    assert runtime_directory() == directory
    assert directory.stat().st_mode & 0o777 == 0o700
    assert default_endpoint("workers") == f"ipc://{directory}/workers.sock"


def test_a_directory_open_to_others_is_refused(directory: Path) -> None:
    directory.mkdir()
    directory.chmod(0o755)
    with pytest.raises(EndpointError, match="chmod 700"):
        runtime_directory()


def test_a_directory_behind_a_link_is_refused(directory: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    directory.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(EndpointError, match="must be a directory"):
        runtime_directory()


def test_a_directory_that_cannot_be_made_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("OCTAVO_RUNTIME_DIR", str(tmp_path / "file" / "run"))
    with pytest.raises(EndpointError, match=r"cannot make .*set OCTAVO_RUNTIME_DIR to another place"):
        runtime_directory()


def test_a_path_too_long_for_a_unix_socket_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_RUNTIME_DIR", str(tmp_path / ("x" * 100)))
    with pytest.raises(EndpointError, match="too long for a unix socket"):
        runtime_directory()


@pytest.mark.parametrize(
    "endpoint", ["ipc:///tmp/x.sock", "tcp://127.0.0.1:5000", "tcp://localhost:1", "tcp://[::1]:1"]
)
def test_addresses_that_stay_on_this_machine_are_fine(endpoint: str) -> None:
    check_endpoint(endpoint, insecure_tcp=False, has_keys=False)


@pytest.mark.parametrize("endpoint", ["tcp://0.0.0.0:5000", "tcp://10.0.0.1:5000", "tcp://scheduler:5000"])
def test_addresses_beyond_it_need_keys_or_a_flag_with_a_warning(
    endpoint: str, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(EndpointError, match=r"--curve-keys DIR, which `octavo keys DIR` makes.* --insecure-tcp"):
        check_endpoint(endpoint, insecure_tcp=False, has_keys=False)
    check_endpoint(endpoint, insecure_tcp=False, has_keys=True)
    assert not caplog.records
    check_endpoint(endpoint, insecure_tcp=True, has_keys=False)
    assert f"messages at {endpoint} travel unencrypted" in caplog.text


@pytest.mark.parametrize(
    "address",
    ["unix:/run/x.sock", "unix-abstract:x", "127.0.0.1:1", "127.9.9.9:1", "localhost:1", "[::1]:1", "no address"],
)
def test_what_asks_for_no_key_may_be_bound_where_this_machine_alone_reaches_it(address: str) -> None:
    check_unguarded(address, "the Admin service", "--insecure-admin", allowed=False)


@pytest.mark.parametrize("address", ["0.0.0.0:1", "[::]:1", ":1", "10.0.0.1:1", "scheduler:1", "*:1", "dns:x:1"])
def test_elsewhere_it_needs_a_flag_with_a_warning(address: str, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(EndpointError, match=r"the Admin service at .* loopback address, or --insecure-admin on"):
        check_unguarded(address, "the Admin service", "--insecure-admin", allowed=False)
    with pytest.raises(EndpointError, match=r"metrics at .* --insecure-metrics on"):
        check_metrics(address, insecure=False)
    assert not caplog.records
    check_unguarded(address, "the Admin service", "--insecure-admin", allowed=True)
    assert caplog.messages == [f"--insecure-admin: the Admin service at {address} asks nobody for a key"]


@pytest.mark.parametrize(
    "endpoint",
    [
        "",
        "workers",
        "ipc://",
        "tcp://",
        "http://127.0.0.1:1",
        "udp://127.0.0.1:1",
        "tcp://127.0.0.1",
        "tcp://127.0.0.1:70000",
        "tcp://127.0.0.1:x",
        "tcp://[::1:5557",
    ],
)
@pytest.mark.parametrize("has_keys", [False, True])
def test_what_is_no_address_is_refused_even_with_flag_or_keys(endpoint: str, has_keys: bool) -> None:
    with pytest.raises(EndpointError, match="is no address"):
        check_endpoint(endpoint, insecure_tcp=True, has_keys=has_keys)


@pytest.mark.parametrize("scheme", ["ipc://", "unix:"])
def test_a_unix_socket_can_be_claimed_once_at_a_time(tmp_path: Path, scheme: str) -> None:
    endpoint = f"{scheme}{tmp_path}/s.sock"
    with claimed(endpoint), pytest.raises(EndpointError, match="another process is bound"), claimed(endpoint):
        pass
    with claimed(endpoint):
        pass


def test_a_directory_that_is_not_there_cannot_be_claimed(tmp_path: Path) -> None:
    with pytest.raises(EndpointError, match="cannot make a socket"), claimed(f"ipc://{tmp_path}/missing/s.sock"):
        pass


def test_tcp_addresses_need_no_claim() -> None:
    with claimed("tcp://127.0.0.1:5555"), claimed("tcp://127.0.0.1:5555"):
        pass
