"""Implements `octavo dynamo-worker`: reads the flags, and stands for one cell in a cluster of Dynamo."""

import os
import sys
from pathlib import Path
from typing import Any

import click
import uvloop

from octavo.client import DEFAULT_ADDRESS, OctavoError
from octavo.dynamo.config import DynamoWorkerConfig
from octavo.frontend.cli.server_options import Connection, connection_options, read_address
from octavo.runtime.models.directory import ModelDirectoryError, resolve_model
from octavo.runtime.models.hub import is_hub_id
from octavo.runtime.options.flags import config_of, options_of


@click.command(context_settings={"ignore_unknown_options": True})
@click.option(
    "--server",
    envvar="OCTAVO_SERVER",
    callback=read_address,
    default=DEFAULT_ADDRESS,
    help="gRPC address of the cell's frontend.",
)
@options_of(DynamoWorkerConfig)
@click.argument("dynamo_options", nargs=-1, type=click.UNPROCESSED, metavar="[DYNAMO'S OPTIONS]")
@connection_options
def dynamo_worker(connection: Connection, dynamo_options: tuple[str, ...], **parsed: Any) -> None:
    """Join the cell behind --server, a frontend with its scheduler and workers, to a cluster of NVIDIA Dynamo.

    Options that are not listed here go to Dynamo: --discovery-backend, --namespace and the like; `octavo dynamo-worker
    -- --help` lists them. The worker waits for its cell, leaves the cluster when the cell takes no more requests, and
    joins it again.
    """
    try:
        from octavo.dynamo.engine import serve
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] == "octavo":
            raise
        how = "pip install '.[dynamo]', and ai-dynamo of the same version with --no-deps"
        raise click.ClickException(
            f"`octavo dynamo-worker` needs {error.name}, which is not installed; in Octavo's source tree run: {how}"
        ) from error
    model = model_for_dynamo(parsed["model"])
    config = config_of(DynamoWorkerConfig, parsed, model=model, server=parsed["server"], connection=connection)
    try:
        joins_again = uvloop.run(serve(config, list(dynamo_options)))
    except (OctavoError, ValueError) as error:
        raise click.ClickException(f"cannot join the cluster: {error}") from error
    if joins_again:
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def model_for_dynamo(name: str) -> str:
    """Returns what Dynamo's frontend is to find the tokenizer by: an absolute path, or an id of the hub.

    Raises `click.UsageError`.
    """
    if is_hub_id(name) and not Path(name).exists():
        return name
    try:
        return str(resolve_model(name, "dummy"))
    except ModelDirectoryError as error:
        raise click.UsageError(f"--model: {error}") from error
