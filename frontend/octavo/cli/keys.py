"""Implements `octavo keys`, which makes the keys by which the processes know each other between hosts."""

from pathlib import Path

import click

from octavo.runtime.transport.curve_keys import ROLES, CurveKeysError, files_of, key_files, write_keys


@click.command()
@click.argument("directory", type=click.Path(file_okay=False, path_type=Path))
@click.option("--force", is_flag=True, help="Replace keys that are there: processes with the old ones are kept out.")
@click.option("--keep", is_flag=True, help="Succeed without a change if there are keys already.")
def keys(directory: Path, force: bool, keep: bool) -> None:
    """Make a CURVE key pair for each kind of process, as files in DIRECTORY.

    Every frontend shares one pair and every worker another. Each file is one line, a key in Z85. Secrets have mode 600.
    """
    if force and keep:
        raise click.UsageError("--force replaces keys and --keep keeps them; give one of the two")
    try:
        if _kept(directory, force, keep):
            click.echo(f"{directory} has keys already; nothing was changed")
            return
        write_keys(directory)
    except CurveKeysError as error:
        raise click.ClickException(str(error)) from error
    click.echo(_what_to_copy(directory))


def _kept(directory: Path, force: bool, keep: bool) -> bool:
    """Tells whether existing keys are to stay. Raises `CurveKeysError` if there are some that must not be lost."""
    found = key_files(directory)
    if force or not found:
        return False
    if keep and len(found) == 2 * len(ROLES):
        return True
    names = ", ".join(path.name for path in found)
    raise CurveKeysError(f"{directory} holds {names}; name another directory, or replace them with --force")


def _what_to_copy(directory: Path) -> str:
    hosts = "".join(f"\n  {role + ':':<11}{' '.join(files_of(role))}" for role in ROLES)
    return (
        f"{directory} holds the keys. Copy to a directory on each host what its process needs, and no more:{hosts}\n"
        "Secrets keep mode 600 there. Start each process with --curve-keys DIRECTORY (or OCTAVO_CURVE_KEYS)."
    )
