"""Reads the address of a server as its user writes it, and holds the secrets that its connections need."""

from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, Self
from urllib.parse import urlsplit

Protocol = Literal["http", "grpc"]
_FORMS: Final = (
    "write http://HOST:PORT or https://HOST for a server of OpenAI's API, grpc://HOST:PORT, grpcs://HOST:PORT or"
    " HOST:PORT for Octavo's gRPC, and http+unix:PATH or unix:PATH for their unix sockets"
)


@dataclass(frozen=True)
class Target:
    """Names a server. `address` is a base URL of HTTP without its /v1, or an address of gRPC. `socket` is the path of
    the unix socket that HTTP goes over."""

    protocol: Protocol
    address: str
    tls: bool = False
    socket: str | None = None

    @classmethod
    def parse(cls, text: str) -> Self:
        """Raises `ValueError` for what is no address."""
        scheme, separator, rest = text.strip().partition(":")
        if scheme in ("http", "https"):
            return cls("http", _base_url(text.strip()), scheme == "https")
        if scheme == "http+unix" and rest:
            return cls("http", "http://localhost", socket=rest.removeprefix("//"))
        if scheme in ("grpc", "grpcs") and rest.startswith("//") and (address := rest[2:].rstrip("/")):
            return cls("grpc", address, scheme == "grpcs")
        if separator and rest and "//" not in text:
            return cls("grpc", text.strip())
        raise ValueError(f"{text!r} is no address of a server; {_FORMS}")

    def __str__(self) -> str:
        if self.socket is not None:
            return f"http+unix:{self.socket}"
        return self.address if self.protocol == "http" else f"{'grpcs' if self.tls else 'grpc'}://{self.address}"


def _base_url(text: str) -> str:
    parts = urlsplit(text)
    if not parts.hostname:
        raise ValueError(f"{text!r} names no host; {_FORMS}")
    if parts.port == 0:
        raise ValueError(f"{text!r}: port 0 is none; {_FORMS}")
    if parts.username or parts.query or parts.fragment:
        # They would be shown in reports.
        raise ValueError("the address must hold no user, query or fragment; give a key by OCTAVO_API_KEY")
    path = parts.path.rstrip("/").removesuffix("/chat/completions").removesuffix("/completions").removesuffix("/v1")
    return f"{parts.scheme}://{parts.netloc}{path}"


@dataclass(frozen=True, repr=False)
class Secrets:
    """Holds the secrets of a connection. `api_key` is shown nowhere, which is why there is no repr of it; it is from
    the environment's `variable`. `ca_certificate` is a PEM file. Raises `ValueError` for a key that cannot be sent."""

    api_key: str | None = None
    ca_certificate: Path | None = None
    variable: str = "OCTAVO_API_KEY"

    def __post_init__(self) -> None:
        if self.api_key and not (self.api_key.isascii() and self.api_key.isprintable()):
            raise ValueError(f"the key of {self.variable} has characters that no header can hold, such as a line's end")

    @property
    def advice(self) -> str:
        """Says what a server does that does not let in, and what to do."""
        if self.api_key:
            return f"does not take this API key; check {self.variable}"
        return f"asks for an API key; set {self.variable}"
