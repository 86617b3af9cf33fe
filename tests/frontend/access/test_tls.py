"""TLS on both ports: who is let in, who is not, and what keeps the server from starting."""

import asyncio
import dataclasses
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from click.testing import CliRunner, Result
from grpc_health.v1 import health_pb2, health_pb2_grpc

from octavo.frontend.access.tls import TlsError, server_credentials, ssl_context_of
from octavo.frontend.cli.client import health
from octavo.frontend.config import FrontendConfig
from octavo.frontend.server import FrontendServer
from octavo.testbed.credentials import Pair, encrypt, make_authority, make_certificate
from octavo.testing.frontends import running_frontend

SERVING = health_pb2.HealthCheckResponse.SERVING


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory, authority: Pair) -> Pair:
    """An authority that nobody here trusts."""
    return make_authority(tmp_path_factory.mktemp("stranger"), "stranger")


@pytest.fixture(scope="module")
def server(authority: Pair) -> Pair:
    return make_certificate(authority, "server")


@pytest.fixture(scope="module")
def client(authority: Pair) -> Pair:
    return make_certificate(authority, "client")


@pytest.fixture
def tls(config: FrontendConfig, server: Pair) -> FrontendConfig:
    return dataclasses.replace(
        config, tls_certificate=server.certificate, tls_key=server.key, http_listen="127.0.0.1:0"
    )


@pytest.fixture
def mutual(tls: FrontendConfig, authority: Pair) -> FrontendConfig:
    return dataclasses.replace(tls, tls_client_ca=authority.certificate)


async def over_grpc(port: int, authority: Pair, client: Pair | None = None) -> int:
    """What the server says of its health."""
    pair = (client.key.read_bytes(), client.certificate.read_bytes()) if client else (None, None)
    credentials = grpc.ssl_channel_credentials(authority.certificate.read_bytes(), *pair)
    async with grpc.aio.secure_channel(f"127.0.0.1:{port}", credentials) as channel:
        answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=60)
        return int(answer.status)


def client_context(authority: Pair, client: Pair | None = None) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=authority.certificate)
    # As Python does of itself from 3.13 on.
    context.verify_flags |= ssl.VERIFY_X509_STRICT | ssl.VERIFY_X509_PARTIAL_CHAIN
    if client:
        context.load_cert_chain(client.certificate, client.key)
    return context


async def over_http(port: int, context: ssl.SSLContext | None) -> bytes:
    """The status line of the server's health; empty if it says nothing."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
    try:
        writer.write(b"GET /livez HTTP/1.1\r\nhost: octavo\r\nconnection: close\r\n\r\n")
        return await asyncio.wait_for(reader.readline(), 60)
    finally:
        writer.close()


async def test_those_who_trust_the_servers_authority_are_served(
    tls: FrontendConfig, authority: Pair, stranger: Pair
) -> None:
    async with running_frontend(tls) as (frontend, _):
        assert await over_grpc(frontend.port, authority) == SERVING
        assert (await over_http(frontend.http_port, client_context(authority))).startswith(b"HTTP/1.1 200")
        with pytest.raises(grpc.aio.AioRpcError, match="CERTIFICATE_VERIFY_FAILED"):
            await over_grpc(frontend.port, stranger)
        with pytest.raises(ssl.SSLCertVerificationError):
            await over_http(frontend.http_port, client_context(stranger))


async def test_nothing_is_said_in_the_clear(tls: FrontendConfig, authority: Pair) -> None:
    async with running_frontend(tls) as (frontend, _):
        async with grpc.aio.insecure_channel(f"127.0.0.1:{frontend.port}") as channel:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=60)
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert not (await over_http(frontend.http_port, None)).startswith(b"HTTP")


def test_old_versions_are_not_spoken(tls: FrontendConfig) -> None:
    context = ssl_context_of(tls)
    assert context is not None
    assert context.minimum_version is ssl.TLSVersion.TLSv1_2


async def test_clients_without_a_certificate_of_the_authority_are_refused(
    mutual: FrontendConfig, authority: Pair, client: Pair, stranger: Pair
) -> None:
    impostor = make_certificate(stranger, "client")
    async with running_frontend(mutual) as (frontend, _):
        assert await over_grpc(frontend.port, authority, client) == SERVING
        assert (await over_http(frontend.http_port, client_context(authority, client))).startswith(b"HTTP/1.1 200")
        for other in (None, impostor):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await over_grpc(frontend.port, authority, other)
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
            assert await refused_over_http(frontend.http_port, client_context(authority, other))


async def refused_over_http(port: int, context: ssl.SSLContext) -> bool:
    """Also where the server closes the connection without a word."""
    try:
        return await over_http(port, context) == b""
    except (ssl.SSLError, ConnectionError):
        return True


@pytest.fixture
async def probed(mutual: FrontendConfig) -> AsyncIterator[FrontendServer]:
    async with running_frontend(mutual) as (frontend, _):
        yield frontend


async def test_the_health_command_over_tls(probed: FrontendServer, authority: Pair, client: Pair) -> None:
    async def run(*arguments: Any) -> Result:
        address = f"127.0.0.1:{probed.port}"
        return await asyncio.to_thread(CliRunner().invoke, health, [address, "--timeout", "60", *map(str, arguments)])

    own = ("--client-certificate", client.certificate, "--client-key", client.key)
    result = await run("--ca-certificate", authority.certificate, *own)
    assert (result.exit_code, result.stdout) == (0, f"127.0.0.1:{probed.port}: SERVING\n")
    assert (await run("--ca-certificate", authority.certificate, *own, "--server-name", "server")).exit_code == 0
    assert (
        await run("--ca-certificate", authority.certificate, *own, "--server-name", "other", "--timeout", "0.3")
    ).exit_code == 1
    assert (await run("--ca-certificate", authority.certificate, "--timeout", "0.3")).exit_code == 1
    assert "give both" in (await run("--ca-certificate", authority.certificate, *own[:2])).stderr
    assert "give --ca-certificate too" in (await run(*own)).stderr


def test_without_files_nothing_is_encrypted(config: FrontendConfig) -> None:
    assert ssl_context_of(config) is None
    assert server_credentials(config) is None


def test_half_of_what_tls_needs_is_an_error(mutual: FrontendConfig) -> None:
    for missing, words in {
        "tls_certificate": "give --tls-certificate too",
        "tls_key": "give --tls-key too",
    }.items():
        with pytest.raises(TlsError, match=words):
            server_credentials(dataclasses.replace(mutual, **{missing: None}))  # type: ignore[arg-type]
    with pytest.raises(TlsError, match="--tls-client-ca asks clients for TLS"):
        ssl_context_of(dataclasses.replace(mutual, tls_certificate=None, tls_key=None))


def test_files_that_are_something_else_are_an_error(mutual: FrontendConfig, client: Pair, tmp_path: Path) -> None:
    (tmp_path / "empty.pem").touch()
    wrong: dict[str, Path] = {
        "tls_certificate": tmp_path / "empty.pem",
        "tls_key": client.key,
        "tls_client_ca": tmp_path / "empty.pem",
    }
    for field, path in wrong.items():
        with pytest.raises(TlsError, match=r"give PEM files that belong together|give a PEM file"):
            server_credentials(dataclasses.replace(mutual, **{field: path}))  # type: ignore[arg-type]
    with pytest.raises(TlsError, match="is encrypted"):
        server_credentials(dataclasses.replace(mutual, tls_key=encrypt(client.key)))
