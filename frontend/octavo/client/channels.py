"""Opens connections to a frontend: by address, by TLS files, and with an API key."""

from dataclasses import dataclass
from pathlib import Path
from typing import Final

import grpc

DEFAULT_ADDRESS: Final = "127.0.0.1:50051"
OPTIONS: Final[tuple[tuple[str, int], ...]] = (
    # A prompt's logprobs can be this large.
    ("grpc.max_receive_message_length", 32 << 20),
    # The client looks for a lost server again at once, and finds a new one soon.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    # Despite its name, how long one attempt to connect may take, handshakes included.
    ("grpc.min_reconnect_backoff_ms", 5_000),
    # A server that vanished without a word, or no longer knows this connection, is found within 10 s: well before it
    # gives up a stream with a grace time.
    ("grpc.keepalive_time_ms", 5_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    # Other pings hold a keepalive up for a minute by default.
    ("grpc.http2.ping_timeout_ms", 5_000),
    # By default two pings go out while no data is sent, and then one a minute.
    ("grpc.http2.max_pings_without_data", 0),
    # By default clients of one address share a connection, and with it the server's limit of streams.
    ("grpc.use_local_subchannel_pool", 1),
)


@dataclass(frozen=True)
class Tls:
    """Names PEM files: the authority to trust, if it is none of the system's, and the client's own certificate and key.

    The latter are for servers that ask for a client's certificate.
    """

    ca_certificate: str | Path | None = None
    client_certificate: str | Path | None = None
    client_key: str | Path | None = None
    # The name in the server's certificate, where it is not that of the address.
    server_name: str | None = None

    def credentials(self) -> grpc.ChannelCredentials:
        """Returns the credentials of a channel.

        Raises `OSError` for a file that cannot be read, and `ValueError` where only one of the client's certificate
        and key is given.
        """
        if (self.client_certificate is None) != (self.client_key is None):
            raise ValueError("client_certificate and client_key belong together; give both or neither")
        return grpc.ssl_channel_credentials(
            _content(self.ca_certificate), _content(self.client_key), _content(self.client_certificate)
        )


def open_channel(address: str, tls: Tls | None = None) -> grpc.Channel:
    """Opens a channel that connects when it is first needed. Raises what `Tls.credentials` does."""
    if tls is None:
        return grpc.insecure_channel(address, OPTIONS)
    return grpc.secure_channel(address, tls.credentials(), _options(tls))


def open_async_channel(address: str, tls: Tls | None = None) -> grpc.aio.Channel:
    """Opens a channel for asyncio, as `open_channel` does."""
    if tls is None:
        return grpc.aio.insecure_channel(address, OPTIONS)
    return grpc.aio.secure_channel(address, tls.credentials(), _options(tls))


def metadata_of(api_key: str | None) -> tuple[tuple[str, str], ...]:
    """Returns the metadata that every call carries."""
    return (("authorization", f"Bearer {api_key}"),) if api_key else ()


def _options(tls: Tls) -> tuple[tuple[str, int | str], ...]:
    return (*OPTIONS, ("grpc.ssl_target_name_override", tls.server_name)) if tls.server_name else OPTIONS


def _content(path: str | Path | None) -> bytes | None:
    return None if path is None else Path(path).read_bytes()
