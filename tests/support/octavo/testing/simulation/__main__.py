"""Runs a campaign from the command line: `python -m octavo.testing.simulation --first 0 --seeds 20000`."""

import time

import click

from octavo.testing.simulation.campaign import Campaign, outcomes, report

_MAX_REPORTS = 3


@click.command()
@click.option("--first", type=click.IntRange(min=0), default=0, show_default=True, help="The first seed.")
@click.option("--seeds", type=click.IntRange(min=1), default=2000, show_default=True, help="How many to run.")
def main(first: int, seeds: int) -> None:
    """Runs seeds and counts what happened; exits with 1 if one of them broke something."""
    campaign, began = Campaign(), time.monotonic()
    for outcome in outcomes(range(first, first + seeds)):
        campaign.add(outcome)
        if outcome.failure is not None:
            click.echo(report(outcome) if len(campaign.failed) <= _MAX_REPORTS else f"seed {outcome.seed} failed")
    for what, count in sorted(campaign.counts.items()):
        click.echo(f"{count:10d}  {what}")
    seconds = time.monotonic() - began
    click.echo(f"{seeds} runs, {campaign.virtual_s / 3600:.1f} h of virtual time in {seconds:.0f} s")
    click.echo(f"failed: {[outcome.seed for outcome in campaign.failed] or 'none'}")
    raise SystemExit(bool(campaign.failed))


if __name__ == "__main__":
    main()
