"""`octavo cache measure`, `verify` and `clear`: the KV blocks in a directory, with or without workers that use it."""

import json
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from octavo.worker.kv_store.identity import StoreIdentity
from octavo.worker.kv_store.upkeep import SegmentReport, clear, inspect

_directory = click.option(
    "--disk",
    "directory",
    metavar="DIR",
    required=True,
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="The directory of --kv-disk.",
)
_json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")


@click.command()
@_directory
@_json_option
def measure(directory: Path, as_json: bool) -> None:
    """Say whose blocks lie in a directory, and how much room they take."""
    _report(directory, as_json, reads_blocks=False)


@click.command()
@_directory
@_json_option
def verify(directory: Path, as_json: bool) -> None:
    """Read all blocks in a directory and say which are damaged.

    Exit status 1 if any is. Workers notice by themselves, and compute again what is damaged.
    """
    if damaged := _report(directory, as_json, reads_blocks=True):
        raise click.ClickException(
            f"{damaged} blocks or files are damaged; `octavo cache clear --disk {directory}` removes all"
        )


@click.command("clear")
@_directory
@_json_option
def clear_blocks(directory: Path, as_json: bool) -> None:
    """Remove all blocks in a directory, whosever they are.

    Workers that use it go on, and compute again what they miss. `octavo cache reset` clears the disks of all workers.
    """
    try:
        files = clear(directory)
    except OSError as error:
        raise click.ClickException(f"cannot clear {directory}: {error}") from error
    num_bytes = sum(file.num_bytes for file in files)
    if as_json:
        click.echo(json.dumps({"directory": str(directory), "files": len(files), "bytes": num_bytes}, indent=2))
    else:
        click.echo(f"removed {len(files)} files of {num_bytes:,} bytes")


def _report(directory: Path, as_json: bool, *, reads_blocks: bool) -> int:
    """Prints what lies in the directory, by identity, and each file with damage; returns how much is damaged."""
    blocks, sizes, damaged = Counter[StoreIdentity](), Counter[StoreIdentity](), list[SegmentReport]()
    try:
        for report in inspect(directory, reads_blocks=reads_blocks):
            if report.fault or report.damaged:
                damaged.append(report)
            if report.identity:
                blocks[report.identity] += report.blocks
                sizes[report.identity] += report.file.num_bytes
    except OSError as error:
        raise click.ClickException(f"cannot read {directory}: {error}") from error
    if as_json:
        click.echo(json.dumps(_document(directory, blocks, sizes, damaged), indent=2))
    else:
        for report in damaged:
            click.echo(f"{report.file.path}: {report.fault or f'{report.damaged} damaged blocks'}")
        for identity, count in blocks.items():
            click.echo(f"{count:,} blocks in {sizes[identity]:,} bytes of {identity.encoded}")
        if not blocks:
            click.echo(f"no KV blocks in {directory}")
    return sum(max(1, report.damaged) for report in damaged)


def _document(
    directory: Path, blocks: Counter[StoreIdentity], sizes: Counter[StoreIdentity], damaged: list[SegmentReport]
) -> dict[str, Any]:
    return {
        "directory": str(directory),
        "identities": [
            {"identity": asdict(identity), "blocks": count, "bytes": sizes[identity]}
            for identity, count in blocks.items()
        ],
        "damaged": [
            {"file": str(report.file.path), "blocks": report.damaged, "fault": report.fault} for report in damaged
        ],
    }
