"""Describes the simulated cluster as flags of a command: a model on a GPU by arithmetic, or a worker that was
measured; and routes requests to its cells as frontends do."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import reduce
from pathlib import Path
from typing import Any, Final, TypeVar

import click

from octavo.frontend.scheduler.prefix_router import CellLoad, PrefixRouter
from octavo.runtime.models.step_times import Calibration, CalibrationError, read_calibration
from octavo.simulator import hardware
from octavo.simulator.device import DiskSpec, PeerLink, ReplicaSpec
from octavo.simulator.engine import Standing
from octavo.simulator.hardware import GPUS, MODELS, Overhead
from octavo.wire.requests import Request, answer_work

_Command = TypeVar("_Command", bound=Callable[..., Any])
_SECONDS: Final = click.FloatRange(min=0.0, max=3600.0)
# A flag that is not given is None, so that it is known which of them a calibration contradicts.
_COMPUTED: Final[dict[str, Callable[[_Command], _Command]]] = {
    "model": click.option("--model", type=click.Choice(list(MODELS)), help="By its published sizes."),
    "gpu": click.option("--gpu", type=click.Choice(list(GPUS)), help="By its data sheet."),
    "tp": click.option("--tp", type=click.IntRange(min=1), show_default="1", help="GPUs of one replica."),
    "block_size": click.option("--block-size", type=click.IntRange(1, 256), show_default="16", help="Tokens."),
    "step_overhead": click.option(
        "--step-overhead",
        type=_SECONDS,
        show_default=f"{Overhead().step_s:g}",
        help="Seconds of each step that the GPU does not explain.",
    ),
    "sequence_overhead": click.option(
        "--sequence-overhead",
        type=_SECONDS,
        show_default=f"{Overhead().sequence_s:g}",
        help="The same for each sequence in it.",
    ),
}
_OPTIONS: Final = [
    *_COMPUTED.values(),
    click.option(
        "--calibration",
        type=click.Path(exists=True, dir_okay=False, path_type=Path),
        help="A worker as `octavo calibrate` has measured it, instead of all these.",
    ),
    click.option(
        "--num-blocks", type=click.IntRange(min=1), show_default="what fits", help="KV blocks of each replica."
    ),
    click.option(
        "--num-cpu-blocks",
        type=click.IntRange(min=0),
        show_default="as many",
        help="Of each, in CPU memory; 0: nothing is swapped.",
    ),
    click.option(
        "--kv-disk-blocks",
        type=click.IntRange(min=0),
        default=0,
        show_default=True,
        help="KV blocks on the disk of each, which outlives its worker; 0: there is none.",
    ),
    click.option(
        "--kv-disk-read",
        type=_SECONDS,
        default=0.0,
        show_default=True,
        help="Seconds in which such a disk reads a block.",
    ),
    click.option("--kv-mirror", is_flag=True, help="Write what running requests fill to the disk as well."),
    click.option(
        "--peer-bandwidth",
        type=click.FloatRange(min=0.0),
        default=0.0,
        show_default=True,
        help="GB/s at which a replica copies KV blocks of another one; 0: nothing moves.",
    ),
    click.option(
        "--peer-latency",
        type=_SECONDS,
        default=0.0,
        show_default=True,
        help="Seconds that each such copy takes besides.",
    ),
]


def cluster_options(command: _Command) -> _Command:
    """Adds the flags of a replica; the command gives what it gets of them to `read_replica`."""
    return reduce(lambda wrapped, option: option(wrapped), reversed(_OPTIONS), command)


def read_replica(settings: Mapping[str, Any]) -> ReplicaSpec:
    """Returns the replica that the flags describe. Raises `click.UsageError`."""
    return _with_link(_with_disk(_alone(settings), settings), settings)


def _with_link(replica: ReplicaSpec, settings: Mapping[str, Any]) -> ReplicaSpec:
    if not (bandwidth := settings["peer_bandwidth"]):
        if settings["peer_latency"]:
            raise click.UsageError("--peer-latency is of copies: say with --peer-bandwidth how fast blocks move")
        return replica
    if not replica.num_cpu_blocks:
        raise click.UsageError(
            "blocks come from another replica by way of CPU memory: give more than 0 --num-cpu-blocks"
        )
    if not replica.block_bytes:
        raise click.UsageError(
            "--peer-bandwidth needs the size of a block, which this calibration does not have: calibrate anew"
        )
    return replace(replica, peer_link=PeerLink(replica.block_bytes / (bandwidth * 1e9), settings["peer_latency"]))


def _with_disk(replica: ReplicaSpec, settings: Mapping[str, Any]) -> ReplicaSpec:
    num_blocks = settings["kv_disk_blocks"]
    if not num_blocks:
        if settings["kv_disk_read"] or settings["kv_mirror"]:
            raise click.UsageError("--kv-disk-read and --kv-mirror are of a disk: give it --kv-disk-blocks")
        return replica
    if not replica.num_cpu_blocks:
        raise click.UsageError("blocks come from a disk by way of CPU memory: give more than 0 --num-cpu-blocks")
    return replace(replica, disk=DiskSpec(num_blocks, settings["kv_disk_read"], settings["kv_mirror"]))


def _alone(settings: Mapping[str, Any]) -> ReplicaSpec:
    given = {name: settings[name] for name in _COMPUTED if settings[name] is not None}
    num_blocks, num_cpu_blocks = settings["num_blocks"], settings["num_cpu_blocks"]
    if settings["calibration"] is None:
        return _computed(given, num_blocks, num_cpu_blocks)
    if given:
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        raise click.UsageError(f"--calibration says all of a worker, so it does not go with {flags}")
    try:
        measured = calibrated(read_calibration(settings["calibration"]))
    except CalibrationError as error:
        raise click.UsageError(str(error)) from error
    return replace(
        measured,
        num_blocks=measured.num_blocks if num_blocks is None else num_blocks,
        num_cpu_blocks=measured.num_cpu_blocks if num_cpu_blocks is None else num_cpu_blocks,
    )


def calibrated(calibration: Calibration) -> ReplicaSpec:
    """Returns a replica that was measured."""
    return ReplicaSpec(
        num_blocks=calibration.num_blocks,
        block_size=calibration.block_size,
        latency=calibration.times,
        num_cpu_blocks=calibration.num_cpu_blocks,
        max_model_len=calibration.max_model_len,
        vocab_size=calibration.vocab_size,
        device=calibration.device,
        costs=calibration.costs,
        name=calibration.model,
        kv_bytes_per_token=calibration.kv_bytes_per_token,
    )


def _computed(given: Mapping[str, Any], num_blocks: int | None, num_cpu_blocks: int | None) -> ReplicaSpec:
    if "model" not in given or "gpu" not in given:
        raise click.UsageError(
            f"say what is simulated: --model and --gpu, or --calibration; there are {', '.join(MODELS)} on"
            f" {', '.join(GPUS)}"
        )
    default = Overhead()
    overhead = replace(
        default,
        step_s=given.get("step_overhead", default.step_s),
        sequence_s=given.get("sequence_overhead", default.sequence_s),
    )
    model, gpu, tp = MODELS[given["model"]], GPUS[given["gpu"]], given.get("tp", 1)
    try:
        return hardware.replica(
            model,
            gpu,
            tp,
            block_size=given.get("block_size", 16),
            num_blocks=num_blocks,
            num_cpu_blocks=num_cpu_blocks,
            overhead=overhead,
        )
    except ValueError as error:
        raise click.UsageError(str(error)) from error


# -- routes -----------------------------------------------------------------------------------------------------------


# How often a scheduler tells what it has to do.
_REPORTED_EVERY_S: Final = 1.0


class CellRoute:
    """Routes as a frontend before `num_cells` cells would: it knows the work that they reported in this second and what
    it has sent to them since, and nothing of what has ended since."""

    def __init__(self, num_cells: int) -> None:
        self._router = PrefixRouter(num_cells)
        self._work = [0] * num_cells
        self._reported_in = -1.0

    def __call__(self, request: Request, now: float, cells: Sequence[Standing]) -> int:
        if (second := now // _REPORTED_EVERY_S) != self._reported_in:
            self._reported_in = second
            self._work = [cell.work_tokens for cell in cells]
        loads = [CellLoad(cell.num_replicas, work) for cell, work in zip(cells, self._work, strict=True)]
        chosen = self._router.choose(request.prompt_token_ids, request.cache_key, loads)
        assert chosen is not None, "every cell has replicas"
        sampling = request.sampling
        self._work[chosen] += len(request.prompt_token_ids) + sampling.parallel * answer_work(sampling.max_tokens, 0)
        return chosen
