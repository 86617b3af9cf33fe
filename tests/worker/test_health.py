"""The health service tells what the main loop does, through real gRPC on a real socket."""

import socket
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from octavo.runtime.transport.endpoints import EndpointError
from octavo.testbed.stack import free_address
from octavo.worker.health import DEADLINE_S, READY_SERVICE, STEP_DEADLINE_S, Liveness, health_server

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def directory() -> Iterator[Path]:
    # Not tmp_path: its name may be longer than a unix socket's may.
    with tempfile.TemporaryDirectory(prefix="octavo-") as name:
        yield Path(name)


def check(address: str, service: str) -> int:
    with grpc.insecure_channel(address) as channel:
        request = health_pb2.HealthCheckRequest(service=service)
        return int(health_pb2_grpc.HealthStub(channel).Check(request, timeout=60, wait_for_ready=True).status)


def settles(address: str, alive: int, ready: int) -> bool:
    """Whether both services come to say so within a minute."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if (check(address, ""), check(address, READY_SERVICE)) == (alive, ready):
            return True
        time.sleep(0.02)
    return False


def test_a_loop_that_does_not_turn_is_dead_unless_it_works() -> None:
    clock = Clock()
    liveness = Liveness(clock)
    clock.now += 100 * DEADLINE_S
    assert liveness.alive, "loading has no deadline"
    liveness.turn()
    clock.now += DEADLINE_S
    assert liveness.alive
    clock.now += 0.1
    assert not liveness.alive
    liveness.work()
    assert liveness.alive
    assert not liveness.ready
    liveness.welcomed = True
    assert liveness.ready


def test_a_step_has_a_deadline_of_its_own() -> None:
    clock = Clock()
    liveness = Liveness(clock)
    liveness.turn(idle=True)
    liveness.work()
    liveness.owe()
    clock.now += STEP_DEADLINE_S
    assert liveness.alive
    clock.now += 0.1
    assert not liveness.alive, "however long the loop may work"
    liveness.done()
    liveness.turn(idle=False)
    assert liveness.alive
    for _ in range(100):
        clock.now += STEP_DEADLINE_S / 99
        liveness.turn(idle=False)
    assert not liveness.alive, "a loop that turns while its device hangs"
    liveness.turn(idle=True)
    assert liveness.alive


def test_steps_that_are_done_in_time_add_up_to_no_delay() -> None:
    clock = Clock()
    liveness = Liveness(clock)
    for _ in range(10):
        liveness.owe()
        clock.now += STEP_DEADLINE_S * 0.9
        liveness.turn(idle=False)
        liveness.done()
        assert liveness.alive


def test_health_follows_the_loop_from_loading_to_hanging_and_back(directory: Path) -> None:
    clock = Clock()
    liveness = Liveness(clock)
    address = f"unix:{directory}/health.sock"
    with health_server(address, liveness):
        assert settles(address, SERVING, NOT_SERVING)
        liveness.turn()
        liveness.welcomed = True
        assert settles(address, SERVING, SERVING)
        clock.now += DEADLINE_S + 1
        assert settles(address, NOT_SERVING, NOT_SERVING)
        liveness.turn()
        assert settles(address, SERVING, SERVING)
    assert not (directory / "health.sock").exists()


def test_an_unknown_service_is_not_found(directory: Path) -> None:
    address = f"unix:{directory}/health.sock"
    with health_server(address, Liveness()), pytest.raises(grpc.RpcError) as raised:
        check(address, "octavo.Nobody")
    assert raised.value.code() is grpc.StatusCode.NOT_FOUND


def test_a_socket_left_by_a_dead_process_is_replaced(directory: Path) -> None:
    path = directory / "health.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    with health_server(f"unix:{path}", Liveness()):
        assert check(f"unix:{path}", "") == SERVING


def test_a_missing_directory_is_made_private(directory: Path) -> None:
    with health_server(f"unix:{directory}/new/health.sock", Liveness()):
        assert (directory / "new").stat().st_mode & 0o777 == 0o700


def test_a_socket_in_use_is_left_alone(directory: Path) -> None:
    address = f"unix:{directory}/health.sock"
    with health_server(address, Liveness()):
        with pytest.raises(EndpointError, match="another process"), health_server(address, Liveness()):
            pass
        assert check(address, "") == SERVING


def test_a_tcp_port_in_use_is_refused() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(EndpointError, match="cannot serve health"), health_server(address, Liveness()):
            pass


def test_two_workers_cannot_share_a_tcp_port() -> None:
    address = free_address()
    with health_server(address, Liveness()):
        assert check(address, "") == SERVING
        with pytest.raises(EndpointError, match="cannot serve health"), health_server(address, Liveness()):
            pass


@pytest.mark.parametrize(
    ("name", "why"),
    [("file", "is not a socket"), ("x" * 120, "too long"), ("file/health.sock", "cannot make a socket")],
)
def test_a_path_that_cannot_be_a_socket_is_refused(directory: Path, name: str, why: str) -> None:
    (directory / "file").write_text("mine")
    with pytest.raises(EndpointError, match=why), health_server(f"unix:{directory}/{name}", Liveness()):
        pass
    assert (directory / "file").read_text() == "mine"


def test_a_directory_that_others_may_write_to_is_refused(directory: Path) -> None:
    directory.chmod(0o777)
    with pytest.raises(EndpointError, match="writable by others"), health_server(f"unix:{directory}/h", Liveness()):
        pass
