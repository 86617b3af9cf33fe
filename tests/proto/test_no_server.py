"""What is said where no server of ours answers, from what the gRPC library tells."""

import pytest

from octavo.runtime.transport.no_server import explain_no_server

LAST = "failed to connect to all addresses; last error: UNKNOWN: ipv4:127.0.0.1:8000: "


@pytest.mark.parametrize(
    ("details", "words"),
    [
        (LAST + "Failed parsing HTTP/2 (Expected SETTINGS frame as the first frame, got frame type 80)", "in HTTP/1"),
        (LAST + "Failed parsing HTTP/2 (Expected SETTINGS frame as the first frame, got frame type 45)", "not in gRPC"),
        (LAST + "Tls handshake failed (TSI_PROTOCOL_FAILURE): WRONG_VERSION_NUMBER: Invalid", "without TLS"),
        (LAST + "Tls handshake failed: CERTIFICATE_VERIFY_FAILED: unable to get issuer", "--ca-certificate"),
        (LAST + "Cannot check peer: missing selected ALPN property.", "in TLS, but not in gRPC"),
        (LAST + "Socket closed", "give --ca-certificate"),
        (LAST + "Failed to connect to remote host: Connection refused", "nothing listens there"),
        (LAST + "connect failed: addr: unix:/x error: No such file or directory", "no such socket"),
        ("errors resolving foo: [field:hostname lookup error]", "host:port or unix:path"),
        ("Received http2 header with status: 502", "proxy would (HTTP 502)"),
    ],
)
def test_what_the_library_tells_is_said_in_plain_words(details: str, words: str) -> None:
    said = explain_no_server("UNAVAILABLE", details, "octavo.v1.GenerationService")
    assert said is not None
    assert words in said
    assert "frame" not in said


@pytest.mark.parametrize("details", ["Method not found!", "unknown service octavo.v1.AdminService"])
def test_another_grpc_server_is_told_by_what_it_lacks(details: str) -> None:
    said = explain_no_server("UNIMPLEMENTED", details, "octavo.v1.AdminService")
    assert said == (
        "a gRPC server answers, but it has no octavo.v1.AdminService: is this the address of another process?"
    )


@pytest.mark.parametrize(
    ("code", "details"),
    [
        ("UNAVAILABLE", "no worker has come; Connection refused by the scheduler"),
        ("UNIMPLEMENTED", "beam search is not served by this model"),
        ("UNAVAILABLE", LAST + "something new"),
        ("INVALID_ARGUMENT", "Socket closed"),
    ],
)
def test_what_a_server_of_ours_says_is_left_alone(code: str, details: str) -> None:
    assert explain_no_server(code, details, "octavo.v1.GenerationService") is None


def test_advice_about_tls_is_in_the_words_of_the_command_that_asks() -> None:
    advice = {"plain": "write grpc://", "encrypted": "write grpcs://"}
    for details, words in (
        ("WRONG_VERSION_NUMBER", "if that is meant, write grpc://"),
        ("Socket closed", "write grpcs"),
    ):
        said = explain_no_server("UNAVAILABLE", LAST + details, "octavo.v1.GenerationService", **advice)
        assert said is not None
        assert words in said
        assert "--ca-certificate" not in said
