"""The loads of the frontend's benchmark send what a frontend takes."""

from email.parser import BytesHeaderParser

import pytest

from octavo.bench.frontend.load import StreamLoad
from octavo.bench.frontend.sse_load import call_bytes
from octavo.frontend.http.guards import AllowedHosts


@pytest.mark.parametrize("api", ["completions", "chat"])
def test_calls_name_a_host_that_the_frontend_allows(api: str) -> None:
    _, _, head = call_bytes(StreamLoad(port=8080, streams=1, tokens=1, prompt="x", api=api)).partition(b"\r\n")
    host = BytesHeaderParser().parsebytes(head)["host"]
    assert AllowedHosts("127.0.0.1:8080").allows(host)
