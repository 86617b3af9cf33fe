"""Runs campaigns from the command line: `python -m octavo.chaos.network cuts frontend/scheduler:both:10`."""

import os
import sys
from pathlib import Path

import click

from octavo.chaos.network import cuts, noise
from octavo.chaos.report import CampaignReport
from octavo.testbed.netns import in_own_network, unavailable

_INSIDE = "OCTAVO_TESTING_OWN_NETWORK"
_SEED = click.option("--seed", type=int, default=0, show_default=True, help="What all of it is drawn from.")
_FILE = click.option(
    "--json", "file", type=click.Path(dir_okay=False, path_type=Path), help="Keep the report in this file."
)


@click.group()
def main() -> None:
    """Networks that fail, between real processes; exits with 1 if something broke."""


@main.command("cuts")
@click.argument("names", nargs=-1, metavar="[LINK:WAY:SECONDS]...")
@_SEED
@click.option("--patience", default=0.0, help="Seconds that streams may stand still longer than on a quiet machine.")
@_FILE
def cut(names: tuple[str, ...], seed: int, patience: float, file: Path | None) -> None:
    """Cuts links between processes on hosts of their own: every link in every way for 1 and 10 s by default."""
    if _INSIDE not in os.environ:
        if why := unavailable():
            raise click.ClickException(why)
        command = in_own_network("-m", "octavo.chaos.network", *sys.argv[1:])
        os.execvpe(command[0], command, {**os.environ, _INSIDE: "1"})
    try:
        chosen = [cuts.named(name) for name in names] or cuts.ALL
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    _end(cuts.run(chosen, seed, lambda line: click.echo(line, err=True), patience), file)


@main.command("noise")
@click.argument("names", nargs=-1, type=click.Choice(list(noise.WEATHERS)))
@_SEED
@_FILE
def disturb(names: tuple[str, ...], seed: int, file: Path | None) -> None:
    """Loses and delays messages, and ends connections: in every weather by default."""
    _end(noise.run({name: noise.WEATHERS[name] for name in names or noise.WEATHERS}, seed), file)


def _end(report: CampaignReport, file: Path | None) -> None:
    click.echo(report.line())
    if file is not None:
        report.keep(file)
    raise SystemExit(bool(report.faults))


if __name__ == "__main__":
    main()
