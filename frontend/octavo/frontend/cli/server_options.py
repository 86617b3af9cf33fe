"""Declares the flags of every command that calls a server: how the connection is encrypted, and the API key."""

import functools
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import click
import grpc

from octavo.client import Client, Tls
from octavo.client.channels import metadata_of, open_async_channel, open_channel
from octavo.runtime.transport.endpoints import EndpointError, require_address

_FILE: Final = click.Path(exists=True, dir_okay=False, path_type=Path)
_FIELDS: Final = ("ca_certificate", "client_certificate", "client_key", "server_name", "api_key")
_FLAGS: Final = (
    click.option(
        "--ca-certificate",
        envvar="OCTAVO_CA_CERTIFICATE",
        type=_FILE,
        help="PEM file of the authority that the server's certificate is of. Default: the connection is not encrypted.",
    ),
    click.option(
        "--client-certificate",
        envvar="OCTAVO_CLIENT_CERTIFICATE",
        type=_FILE,
        help="PEM file, where the server asks for a certificate.",
    ),
    click.option("--client-key", envvar="OCTAVO_CLIENT_KEY", type=_FILE, help="PEM file of that certificate's key."),
    click.option(
        "--server-name",
        envvar="OCTAVO_SERVER_NAME",
        help="Name in the server's certificate. Default: that of the address.",
    ),
    click.option("--api-key", envvar="OCTAVO_API_KEY", help="Where the server asks for one; better not on the line."),
)


@dataclass(frozen=True)
class Connection:
    """Holds the values of the flags."""

    ca_certificate: Path | None = None
    client_certificate: Path | None = None
    client_key: Path | None = None
    server_name: str | None = None
    api_key: str | None = None

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Returns the metadata that every call carries."""
        return metadata_of(self.api_key)

    def open(self, address: str) -> grpc.Channel:
        """Opens a channel to a server. Raises `click.UsageError` for flags that do not go together."""
        _silence_grpc()
        return open_channel(address, self._tls())

    def open_async(self, address: str) -> grpc.aio.Channel:
        """Opens a channel for asyncio, as `open` does."""
        _silence_grpc()
        return open_async_channel(address, self._tls())

    def client(self, address: str) -> Client:
        """Makes a client of a server. Raises `click.UsageError` for flags that do not go together."""
        _silence_grpc()
        # No grace: a command that was killed does not come back for its answer.
        return Client(address, api_key=self.api_key, tls=self._tls(), detach_grace=0)

    def _tls(self) -> Tls | None:
        own = (self.client_certificate, self.client_key)
        if self.ca_certificate is None:
            if any((*own, self.server_name)):
                raise click.UsageError("these are flags of an encrypted connection; give --ca-certificate too")
            return None
        if (self.client_certificate is None) != (self.client_key is None):
            raise click.UsageError("--client-certificate and --client-key belong together; give both or neither")
        return Tls(self.ca_certificate, *own, self.server_name)


def read_address(context: click.Context, parameter: click.Parameter, address: str) -> str:
    """Reads an option or argument that is the address of a server. Raises `click.ClickException` for an empty one."""
    try:
        return require_address(address, _name(parameter))
    except EndpointError as error:
        raise click.ClickException(str(error)) from error


def _name(parameter: click.Parameter) -> str:
    return parameter.opts[0] if isinstance(parameter, click.Option) else parameter.human_readable_name


def _silence_grpc() -> None:
    """Silences the library's own lines about a refused connection, which the error says already."""
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")


def connection_options(command: Callable[..., None]) -> Callable[..., None]:
    """Gives a command the flags, and their values as its argument `connection`."""

    @functools.wraps(command)
    def connecting(*arguments: Any, **settings: Any) -> None:
        connection = Connection(*(settings.pop(name) for name in _FIELDS))
        command(*arguments, connection=connection, **settings)

    for flag in reversed(_FLAGS):
        connecting = flag(connecting)
    return connecting
