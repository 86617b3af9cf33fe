"""Whom a connection counts against."""

from typing import Any

import pytest

from octavo.runtime.transport.clients import client_of


@pytest.mark.parametrize(
    ("address", "client"),
    [
        (("10.0.0.7", 1234), "10.0.0.7"),
        (("::ffff:10.0.0.7", 1234, 0, 0), "10.0.0.7"),
        (("2001:db8:1:2:3:4:5:6", 1, 0, 0), "2001:db8:1:2::/64"),
        (("2001:db8:1:2:ffff::1", 2, 0, 0), "2001:db8:1:2::/64"),
        (("fe80::1%eth0", 2, 0, 2), "fe80::/64"),
        (("testclient", 1), "testclient"),
        ("", ""),
        (None, ""),
    ],
)
def test_a_client_is_a_host_or_a_network_of_one(address: Any, client: str) -> None:
    assert client_of(address) == client
