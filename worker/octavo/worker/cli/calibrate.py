"""`octavo calibrate`: times a worker's steps, and writes the file that a simulation needs."""

import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from octavo.runtime.models.step_times import Calibration
from octavo.runtime.options.flags import options_of
from octavo.runtime.transport.endpoints import EndpointError, default_endpoint
from octavo.worker.config import WorkerConfig, default_worker_id
from octavo.worker.health import Liveness
from octavo.worker.make_runner import describe, with_runner
from octavo.worker.model_settings import ConfigError, ModelSettings
from octavo.worker.runner import Runner


@click.command()
@click.option(
    "--out",
    type=click.Path(dir_okay=False, writable=True, path_type=Path),
    required=True,
    help="JSON file to write, for `octavo simulate`.",
)
@click.option(
    "--temperature",
    type=click.FloatRange(0, 100),
    default=1.0,
    show_default=True,
    help="What sequences are sampled with; 0: greedy, which takes less time.",
)
@options_of(ModelSettings)
def calibrate(out: Path, temperature: float, **options: Any) -> None:
    """Measure how long a worker's steps take, for `octavo simulate`.

    The model is loaded as `octavo worker` does it, by the same options, and computes decodes, chunks of prompts and
    moves of blocks for less than a minute; nothing else should run on the machine. How far the times that the file
    tells are from those measured is shown.
    """
    if not out.absolute().parent.is_dir():
        raise click.BadParameter(f"there is no directory {out.absolute().parent}; make it first", param_hint="'--out'")
    try:
        config = WorkerConfig(
            worker_id=default_worker_id(),
            endpoint=default_endpoint("workers"),
            health_address="",
            **options,
        )
    except ConfigError as error:
        raise click.UsageError(str(error)) from error
    except EndpointError as error:
        raise click.ClickException(str(error)) from error

    def use(runner: Runner, on_beat: Callable[[], None]) -> None:
        _write(measure(runner, config.max_num_seqs, config.max_num_batched_tokens, temperature, on_beat), out)

    with_runner(config, Liveness(), use)


def measure(
    runner: Runner,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    temperature: float,
    on_beat: Callable[[], None] = lambda: None,
) -> Calibration:
    """Times a runner that has not served yet, and reports progress on stderr; `on_beat` is called now and then.

    Raises whatever the runner raises.
    """
    # They take numpy.
    from octavo.worker.calibrate.calibrate import calibrate as costs_of
    from octavo.worker.calibrate.fit import errors, fitted, typical_error
    from octavo.worker.calibrate.timed_steps import Largest, TimedStep, measured

    def tell(family: str, samples: list[TimedStep]) -> None:
        on_beat()
        if samples:
            milliseconds = [1000 * sample.seconds for sample in samples]
            span = f"{min(milliseconds):.3g} to {max(milliseconds):.3g} ms"
            click.echo(f"{family}: {len(samples)} steps of {span}", err=True)

    click.echo(describe(runner), err=True)
    costs = costs_of(runner)
    families = measured(runner, Largest(max_num_seqs, max_num_batched_tokens, temperature), tell)
    times = fitted([sample for samples in families.values() for sample in samples])
    off = errors(times, families)
    for family, differences in off.items():
        typical, worst = statistics.median(map(abs, differences)), max(differences, key=abs)
        click.echo(f"{family}: the model is off by {typical:.1%} (median), {worst:+.1%} at worst", err=True)
    return Calibration(
        model=runner.model.name,
        device=runner.device,
        dtype=runner.model.dtype,
        max_model_len=runner.model.max_model_len,
        vocab_size=runner.model.vocab_size,
        block_size=runner.block_size,
        num_blocks=runner.num_blocks,
        num_cpu_blocks=runner.num_cpu_blocks,
        times=times,
        error=typical_error(off),
        costs=costs,
        kv_bytes_per_token=runner.kv_bytes_per_token,
    )


def _write(calibration: Calibration, out: Path) -> None:
    try:
        calibration.write(out)
    except OSError as error:
        raise click.ClickException(f"cannot write {out}: {error.strerror or error}") from error
    click.echo(f"{out}: {calibration.model} on {calibration.device}, off by {calibration.error:.1%} (median)")
