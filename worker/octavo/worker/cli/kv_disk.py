"""`octavo kv-disk`: lists, verifies and clears the KV blocks in a directory, with or without workers that use it."""

from collections import Counter
from pathlib import Path

import click

from octavo.worker.kv_store.identity import StoreIdentity
from octavo.worker.kv_store.upkeep import clear, inspect

_directory = click.argument("directory", type=click.Path(exists=True, file_okay=False, path_type=Path))


@click.group("kv-disk")
def kv_disk() -> None:
    """List, verify and clear the KV blocks on a disk."""


@kv_disk.command("list")
@_directory
def list_blocks(directory: Path) -> None:
    """Say whose blocks lie in DIRECTORY, and how much room they take."""
    _report(directory, reads_blocks=False)


@kv_disk.command()
@_directory
def verify(directory: Path) -> None:
    """Read all blocks in DIRECTORY and say which are damaged.

    Exit status 1 if any is. Workers notice by themselves, and compute again what is damaged.
    """
    if damaged := _report(directory, reads_blocks=True):
        raise click.ClickException(f"{damaged} blocks or files are damaged; `octavo kv-disk clear` removes all")


@kv_disk.command("clear")
@_directory
def clear_blocks(directory: Path) -> None:
    """Remove all blocks in DIRECTORY. Workers that use it go on, and compute again what they miss."""
    try:
        files = clear(directory)
    except OSError as error:
        raise click.ClickException(f"cannot clear {directory}: {error}") from error
    click.echo(f"removed {len(files)} files of {sum(file.num_bytes for file in files):,} bytes")


def _report(directory: Path, *, reads_blocks: bool) -> int:
    """Prints a line for each identity and for each file with damage; returns how much is damaged."""
    blocks, sizes, damaged = Counter[StoreIdentity](), Counter[StoreIdentity](), 0
    try:
        for report in inspect(directory, reads_blocks=reads_blocks):
            if report.fault or report.damaged:
                damaged += max(1, report.damaged)
                click.echo(f"{report.file.path}: {report.fault or f'{report.damaged} damaged blocks'}")
            if report.identity:
                blocks[report.identity] += report.blocks
                sizes[report.identity] += report.file.num_bytes
    except OSError as error:
        raise click.ClickException(f"cannot read {directory}: {error}") from error
    for identity, count in blocks.items():
        click.echo(f"{count:,} blocks in {sizes[identity]:,} bytes of {identity.encoded}")
    if not blocks:
        click.echo(f"no KV blocks in {directory}")
    return damaged
