"""Explains in plain words how a gRPC call ends where no server of Octavo answers. The library's own words are about
frames."""

from typing import Final

# What the library says -> what it means, and what to look at.
_MEANINGS: Final = (
    ("got frame type 80)", "it answers in HTTP/1, not in gRPC: Octavo serves the two on different ports"),
    ("http1.x server", "it answers in HTTP/1, not in gRPC: Octavo serves the two on different ports"),
    ("Failed parsing HTTP/2", "it answers, but not in gRPC: is this another program's address?"),
    ("WRONG_VERSION_NUMBER", "it answers without TLS: if that is meant, {plain}"),
    ("CERTIFICATE_VERIFY_FAILED", "its certificate is not of the authority in --ca-certificate, or of another name"),
    ("selected ALPN", "it answers in TLS, but not in gRPC: is this its HTTPS port, or another program's address?"),
    ("Connection refused", "nothing listens there: is the server started, and is this its address?"),
    ("No such file or directory", "there is no such socket: is the server started, and is this its address?"),
    ("errors resolving", "there is no such host; write host:port or unix:path"),
    ("Socket closed", "it hangs up before it says anything: if it asks for TLS, {encrypted}"),
    ("Connection reset", "it hangs up before it says anything: if it asks for TLS, {encrypted}"),
)
_UNKNOWN_METHOD: Final = ("method not found", "unknown service", "unknown method")
_WEB_STATUS: Final = "Received http2 header with status: "


def explain_no_server(
    code: str,
    details: str,
    service: str,
    *,
    plain: str = "leave out --ca-certificate",
    encrypted: str = "give --ca-certificate",
) -> str | None:
    """Returns the explanation, or None where it may have been a server of ours that ended the call: `details` are its
    own words then.

    `code` is a gRPC status by its name, and `service` what was called. `plain` and `encrypted` tell the user how to ask
    without TLS and with it.
    """
    if code == "UNIMPLEMENTED" and details.lower().startswith(_UNKNOWN_METHOD):
        return f"a gRPC server answers, but it has no {service}: is this the address of another process?"
    if details.startswith(_WEB_STATUS):
        status = details.removeprefix(_WEB_STATUS)
        return f"it answers as a web server or proxy would (HTTP {status}), not in gRPC: is this Octavo's gRPC address?"
    if not details.startswith(("failed to connect to all addresses", "errors resolving")):
        return None
    found = next((meaning for words, meaning in _MEANINGS if words in details), None)
    return found and found.format(plain=plain, encrypted=encrypted)
