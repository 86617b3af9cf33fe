"""What a process exposes, as text and over HTTP."""

import http.client
import socket
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from octavo.runtime.telemetry.metrics import MetricsError, expose, render, serve
from octavo.runtime.telemetry.numbers import gauge


class One(Collector):
    def __init__(self, value: float) -> None:
        self.value = value

    def collect(self) -> Iterator[Metric]:
        yield gauge("octavo_one", "A number.", self.value)


def rendered() -> dict[str, float]:
    text = render()[0].decode()
    return {sample.name: sample.value for family in text_string_to_metric_families(text) for sample in family.samples}


def get(port: int, path: str = "/metrics") -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=60) as response:
        assert response.headers["Content-Type"].startswith("text/plain")
        body: bytes = response.read()
    return body.decode()


def test_a_process_tells_its_own_numbers_and_what_every_process_tells() -> None:
    expose("worker", One(4))
    found = rendered()
    assert found["octavo_one"] == 4
    assert found["octavo_peak_memory_bytes"] >= found["process_resident_memory_bytes"] * 0.9 > 1e6
    assert b'octavo_build_info{process="worker",version="' in render()[0]


def test_what_is_exposed_last_is_told() -> None:
    expose("worker", One(1))
    expose("worker", One(2))
    assert rendered()["octavo_one"] == 2


def test_metrics_are_served_to_several_scrapers_at_once() -> None:
    expose("worker", One(5))
    with serve("127.0.0.1:0") as port, ThreadPoolExecutor(8) as pool:
        assert all("octavo_one 5.0\n" in text for text in pool.map(lambda _: get(port), range(16)))


def test_nothing_else_is_served() -> None:
    with serve("127.0.0.1:0") as port:
        for path in ("/", "/metricsx", "/../metrics"):
            with pytest.raises(urllib.error.HTTPError) as raised:
                get(port, path)
            assert raised.value.code == 404
            raised.value.close()


def test_a_scraper_that_says_nothing_holds_nobody_up() -> None:
    expose("worker", One(6))
    with serve("127.0.0.1:0") as port, socket.create_connection(("127.0.0.1", port)) as silent:
        silent.sendall(b"GET /met")
        assert "octavo_one 6.0\n" in get(port)


class Failing(Collector):
    def __init__(self, error: Exception) -> None:
        self.error = error

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        raise self.error


@pytest.mark.parametrize(
    ("error", "lines"),
    [(BrokenPipeError("the scraper has left"), []), (RuntimeError("a fault"), ["metrics could not be told"])],
)
def test_faults_are_logged_and_scrapers_that_leave_are_not(
    error: Exception, lines: list[str], caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    expose("worker", Failing(error))
    with serve("127.0.0.1:0") as port:
        caplog.clear()
        with pytest.raises(http.client.RemoteDisconnected):
            get(port)
    assert caplog.messages == lines
    assert capfd.readouterr().err == ""


def can_serve_again() -> bool:
    with serve("127.0.0.1:0") as port:
        pass
    try:
        with serve(f"127.0.0.1:{port}") as again:
            return again == port
    except MetricsError:
        return False


def test_the_port_is_free_again_afterwards() -> None:
    # Another process of this machine may have got it meanwhile, but not ten times.
    assert any(can_serve_again() for _ in range(10))


@pytest.mark.parametrize("listen", ["", "9464", "127.0.0.1:", "127.0.0.1:x", "127.0.0.1:65536", "127.0.0.1:-1"])
def test_what_is_no_address_is_refused(listen: str) -> None:
    with pytest.raises(MetricsError, match="no address for metrics; use host:port"), serve(listen):
        pass


def test_a_port_in_use_is_refused() -> None:
    with (
        serve("127.0.0.1:0") as port,
        pytest.raises(MetricsError, match="choose another --metrics-listen"),
        serve(f"127.0.0.1:{port}"),
    ):
        pass
