"""Both clients over encrypted connections, with certificates on both sides."""

from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from octavo.client import AsyncClient, Client, RetryPolicy, Tls, UnavailableError
from octavo.testbed.credentials import Pair, make_authority, make_certificate
from octavo.testing.fakes.fake_frontend import FakeFrontend, script, serving

ONCE = RetryPolicy(max_retries=0)


@pytest.fixture(scope="module")
def own(authority: Pair) -> Pair:
    return make_certificate(authority, "client")


@pytest.fixture(scope="module")
def address(authority: Pair) -> Iterator[str]:
    """Of a server that asks for a certificate."""
    server = make_certificate(authority, "server")
    pair = (server.key.read_bytes(), server.certificate.read_bytes())
    credentials = grpc.ssl_server_credentials([pair], authority.certificate.read_bytes(), require_client_auth=True)
    fake = FakeFrontend()
    fake.script = script("fine")
    with serving(fake, credentials) as address:
        yield address


async def test_certificates_on_both_sides(address: str, authority: Pair, own: Pair) -> None:
    tls = Tls(authority.certificate, own.certificate, own.key)
    with Client(address, tls=tls) as client:
        assert client.generate("hi").text == "fine"
    async with AsyncClient(address, tls=tls) as other:
        assert (await other.generate("hi")).text == "fine"


def test_a_server_that_wants_a_certificate_lets_nobody_in_without(address: str, authority: Pair) -> None:
    with Client(address, tls=Tls(authority.certificate), retries=ONCE) as client, pytest.raises(UnavailableError):
        client.generate("hi")


def test_another_authority_is_not_trusted(address: str, tmp_path: Path, own: Pair) -> None:
    stranger = make_authority(tmp_path, "stranger")
    tls = Tls(stranger.certificate, own.certificate, own.key)
    with Client(address, tls=tls, retries=ONCE) as client, pytest.raises(UnavailableError):
        client.generate("hi")


def test_a_certificate_without_its_key_is_refused(authority: Pair) -> None:
    with pytest.raises(ValueError, match="belong together"):
        Client("127.0.0.1:1", tls=Tls(authority.certificate, client_certificate=authority.certificate))
