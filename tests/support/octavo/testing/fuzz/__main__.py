"""A campaign from the command line: `python -m octavo.testing.fuzz --surface http --messages 100000`."""

import tempfile
from pathlib import Path

import click

from octavo.testing.fuzz.surfaces import ENVIRONMENT, SURFACES
from octavo.testing.fuzz.target import run
from octavo.testing.stack import Stack
from octavo.testing.tiny_model import write_byte_model


@click.command()
@click.option(
    "--surface",
    "surfaces",
    type=click.Choice(list(SURFACES)),
    multiple=True,
    default=list(SURFACES),
    help="What is attacked; may be repeated. Default: everything.",
)
@click.option(
    "--messages", type=click.IntRange(20), default=10_000, show_default=True, help="How many to send to each."
)
@click.option("--seed", type=int, default=0, show_default=True, help="What all of it is drawn from.")
def main(surfaces: tuple[str, ...], messages: int, seed: int) -> None:
    """Sends bad input and tells what came of it; exits with 1 if something broke."""
    has_failed = False
    with tempfile.TemporaryDirectory(prefix="octavo-") as directory:
        write_byte_model(Path(directory) / "byte-model", max_model_len=512)
        with Stack(Path(directory) / "byte-model", Path(directory) / "run", ENVIRONMENT) as stack:
            stack.start_all()
            for name in surfaces:
                for what, attack in SURFACES[name].items():
                    report = run(stack, attack, messages // len(SURFACES[name]), seed)
                    click.echo(f"=== {name}: {what}\n{report}\n")
                    has_failed |= bool(report.faults)
    raise SystemExit(has_failed)


if __name__ == "__main__":
    main()
