"""The operator's way to a scheduler: these functions read its address, open a channel, and put errors in one line."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import click
import grpc

from octavo.runtime.transport.endpoints import EndpointError, require_address, runtime_directory
from octavo.runtime.transport.no_server import explain_no_server
from octavo.v1 import admin_pb2_grpc as services

# The time limit of a call; the scheduler answers from memory.
TIMEOUT_S: Final = 10.0
_QUESTION_ERRORS: Final = (
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.FAILED_PRECONDITION,
)


def default_admin_address() -> str:
    """Returns the socket of a scheduler started without an address. Raises `click.UsageError` if there is no place for
    it."""
    try:
        return f"unix:{runtime_directory()}/admin.sock"
    except EndpointError as error:
        raise click.UsageError(str(error)) from error


def read_address(context: click.Context, parameter: click.Parameter, address: str) -> str:
    """Reads an option that is the address of a server. Raises `click.ClickException` for an empty one."""
    try:
        return require_address(address, parameter.opts[0])
    except EndpointError as error:
        raise click.ClickException(str(error)) from error


admin_address_option = click.option(
    "--admin-address",
    envvar="OCTAVO_ADMIN_ADDRESS",
    callback=read_address,
    default=default_admin_address,
    show_default="unix socket in the runtime directory",
    help="gRPC address of the scheduler's Admin service.",
)


@contextmanager
def connected(address: str, service: str = "octavo.v1.AdminService") -> Iterator[grpc.Channel]:
    """Opens a channel to the `service` at `address`; errors of calls on it become a `click.ClickException`."""
    # Silences the library's own lines about a refused connection; the error says it already.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    with grpc.insecure_channel(address) as channel:
        try:
            yield channel
        except grpc.RpcError as error:
            raise click.ClickException(_describe(address, service, error)) from error


def _describe(address: str, service: str, error: grpc.RpcError) -> str:
    assert isinstance(error, grpc.Call)
    code, details = error.code(), " ".join((error.details() or "no answer").split())
    if found := explain_no_server(code.name, details, service):
        return f"{address}: {found} [{code.name}]"
    # An error in the question does not depend on the server that was asked.
    where = "" if code in _QUESTION_ERRORS else f"{address}: "
    return f"{where}{details} [{code.name}]"


@contextmanager
def admin_stub(address: str) -> Iterator[Any]:
    """Connects to the Admin service at `address`."""
    with connected(address) as channel:
        yield services.AdminServiceStub(channel)
