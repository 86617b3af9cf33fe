"""Runs a campaign from the command line: `python -m octavo.chaos kill-workers --count 500`."""

import signal
from pathlib import Path

import click

from octavo.chaos.campaigns import CAMPAIGNS, run


@click.command()
@click.argument("campaign", type=click.Choice(list(CAMPAIGNS)))
@click.option("--count", type=click.IntRange(1), default=5, show_default=True, help="How often it strikes.")
@click.option("--seed", type=int, default=0, show_default=True, help="What all of it is drawn from.")
@click.option("--json", "file", type=click.Path(dir_okay=False, path_type=Path), help="Keep the report in this file.")
@click.option(
    "--old",
    type=click.Path(file_okay=False, path_type=Path),
    help="For `upgrade`: where an older version is installed.",
)
def main(campaign: str, count: int, seed: int, file: Path | None, old: Path | None) -> None:
    """Wrongs real processes under load and judges what their clients saw; exits with 1 if something broke."""
    # As Ctrl-C does, so that no process of the campaign stays.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        report = run(campaign, count, seed, lambda text: click.echo(f"{campaign}: {text}", err=True), old)
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    click.echo(report.line())
    if file is not None:
        report.keep(file)
    raise SystemExit(bool(report.faults))


if __name__ == "__main__":
    main()
