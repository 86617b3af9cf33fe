import asyncio
import ssl

import grpc
import pytest

from octavo.loadgen.grpc_transport import GrpcTransport
from octavo.loadgen.http_transport import HttpTransport
from octavo.loadgen.servers import Asking, Secrets, ServerAddress, TargetError
from octavo.testbed.credentials import Pair, make_certificate
from octavo.testing.fakes.fake_frontend import FakeFrontend, serving

from .conftest import ScriptedServer


@pytest.fixture(scope="module")
def server(authority: Pair) -> Pair:
    return make_certificate(authority, "server")


async def test_https_is_for_those_that_know_the_authority(authority: Pair, server: Pair) -> None:
    scripted = ScriptedServer()
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(server.certificate, server.key)
    async with await asyncio.start_server(scripted.serve_one, "127.0.0.1", 0, ssl=context) as listener:
        target = ServerAddress.parse(f"https://127.0.0.1:{listener.sockets[0].getsockname()[1]}")
        assert await opened(HttpTransport(target, Asking(), Secrets(ca_certificate=authority.certificate))) == "m"
        with pytest.raises(TargetError, match="CERTIFICATE_VERIFY_FAILED"):
            await opened(HttpTransport(target, Asking(), Secrets()))


async def test_grpcs_is_for_those_that_know_the_authority(authority: Pair, server: Pair) -> None:
    files = server.key.read_bytes(), server.certificate.read_bytes()
    with serving(FakeFrontend(), grpc.ssl_server_credentials([files])) as address:
        target = ServerAddress.parse(f"grpcs://{address}")
        assert await opened(GrpcTransport(target, Asking(), Secrets(ca_certificate=authority.certificate))) == "m"
        with pytest.raises(TargetError, match="cannot ask grpcs://"):
            await opened(GrpcTransport(target, Asking(), Secrets()))


async def opened(transport: HttpTransport | GrpcTransport) -> str:
    try:
        return await transport.open()
    finally:
        await transport.aclose()
