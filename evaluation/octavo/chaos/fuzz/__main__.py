"""Runs a campaign from the command line: `python -m octavo.chaos.fuzz --surface http --messages 100000`."""

import tempfile
from pathlib import Path
from typing import Final

import click

from octavo.chaos.fuzz.hostile import INPUTS
from octavo.chaos.fuzz.neighbour import GENEROUS, STRICT
from octavo.chaos.fuzz.neighbours import campaign
from octavo.chaos.fuzz.surfaces import ENVIRONMENT, SURFACES
from octavo.chaos.fuzz.target import run
from octavo.testbed.stack import Stack
from octavo.testbed.tiny_model import write_byte_model

# Judged by what these see, not by what becomes of the processes.
_NEIGHBOURS: Final = "neighbours"


@click.command()
@click.option(
    "--surface",
    "surfaces",
    type=click.Choice([*SURFACES, _NEIGHBOURS]),
    multiple=True,
    default=[*SURFACES, _NEIGHBOURS],
    help="What is attacked; may be repeated. Default: everything.",
)
@click.option(
    "--messages", type=click.IntRange(20), default=10_000, show_default=True, help="How many to send to each."
)
@click.option("--seed", type=int, default=0, show_default=True, help="What all of it is drawn from.")
@click.option(
    "--input",
    "inputs",
    type=click.Choice(list(INPUTS)),
    multiple=True,
    default=list(INPUTS),
    help="Of neighbours: what goes on beside them; may be repeated. Default: everything.",
)
@click.option("--scale", type=float, default=1.0, show_default=True, help="Of neighbours: how large inputs are.")
@click.option("--strict", is_flag=True, help="Of neighbours: judge as on a machine that does nothing else.")
def main(
    surfaces: tuple[str, ...], messages: int, seed: int, inputs: tuple[str, ...], scale: float, strict: bool
) -> None:
    """Sends bad input and tells what came of it; exits with 1 if something broke."""
    has_failed = False
    if _NEIGHBOURS in surfaces:
        with tempfile.TemporaryDirectory(prefix="octavo-") as directory:
            model = Path(directory) / "byte-model"
            write_byte_model(model, max_model_len=16384)
            bounds = STRICT if strict else GENEROUS
            has_failed = not campaign(model, Path(directory) / "run", inputs, bounds, scale, click.echo)
    if surfaces := tuple(name for name in surfaces if name != _NEIGHBOURS):
        has_failed |= _has_broken(surfaces, messages, seed)
    raise SystemExit(has_failed)


def _has_broken(surfaces: tuple[str, ...], messages: int, seed: int) -> bool:
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
    return has_failed


if __name__ == "__main__":
    main()
