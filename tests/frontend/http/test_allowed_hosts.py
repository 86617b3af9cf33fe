"""The names under which the HTTP port may be called."""

import socket

import pytest

from octavo.frontend.http.guards import AllowedHosts

LOCAL = "127.0.0.1:8000"


@pytest.mark.parametrize(
    "host",
    [
        "localhost",
        "LocalHost:8000",
        "localhost.",
        "octavo.localhost:1",
        "127.0.0.1:8000",
        "10.1.2.3",
        "[::1]:8000",
        "[fe80::1]",
    ],
)
def test_loopback_and_addresses_are_always_allowed(host: str) -> None:
    assert AllowedHosts(LOCAL).allows(host)


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "evil.example:8000",
        "localhost.evil.example",
        "127.0.0.1.evil.example",
        "evillocalhost",
        "x",
        "1.2.3",
        "[evil]",
        ":8000",
    ],
)
def test_other_names_are_refused(host: str) -> None:
    assert not AllowedHosts(LOCAL).allows(host)


def test_the_name_that_it_listens_on_is_allowed() -> None:
    assert AllowedHosts("octavo.example:8000").allows("Octavo.Example")
    assert not AllowedHosts("octavo.example:8000").allows("other.example")


@pytest.mark.parametrize("listen", ["0.0.0.0:8000", "[::]:8000", ":8000"])
def test_all_addresses_are_those_of_the_machine_s_name(listen: str) -> None:
    assert AllowedHosts(listen).allows(f"{socket.gethostname()}:8000")
    assert not AllowedHosts(listen).allows("evil.example:8000")


def test_further_names_are_allowed() -> None:
    hosts = AllowedHosts(LOCAL, ("api.example", "*.Svc"))
    assert hosts.allows("api.example:443")
    assert hosts.allows("octavo.ns.svc")
    assert not hosts.allows("x.api.example")
    assert not hosts.allows("svc")
    assert not hosts.allows("octavo.svc.evil.example")


def test_a_star_allows_any_name() -> None:
    assert AllowedHosts(LOCAL, ("*",)).allows("evil.example")


def test_behind_a_unix_socket_names_are_the_proxy_s_concern() -> None:
    assert AllowedHosts("unix:/run/http.sock").allows("whatever")
