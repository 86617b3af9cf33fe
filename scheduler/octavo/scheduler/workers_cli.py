"""`octavo workers`, `octavo cordon`, `octavo drain`, `octavo readmit`: the workers, and which of them get requests."""

import time
from typing import Any

import click
from google.protobuf.duration_pb2 import Duration

from octavo.scheduler.admin_client import TIMEOUT_S, admin_address_option, admin_stub
from octavo.scheduler.terminal import terminal_width
from octavo.scheduler.text_table import text_table
from octavo.v1 import admin_pb2 as pb

_HEAD = "ID STATE DEVICE RANKS RUNNING SWAPPED BLOCKS-FREE BLOCKS TOKENS/S"
# What a narrow terminal does without, from the first on.
_DISPENSABLE = "RANKS SWAPPED DEVICE TOKENS/S BLOCKS-FREE BLOCKS"
_STATE_NAMES = {
    pb.WORKER_STATE_READY: "ready",
    pb.WORKER_STATE_CORDONED: "cordoned",
    pb.WORKER_STATE_DRAINING: "draining",
}
_LOOK_INTERVAL_S = 0.1

_worker_argument = click.argument("worker_id", metavar="ID")


@click.command()
@admin_address_option
def workers(admin_address: str) -> None:
    """List the workers. TOKENS/S is what one computes in a second of work.

    A terminal shows the columns that it has room for; a pipe gets all of them.
    """
    with admin_stub(admin_address) as stub:
        load = stub.GetLoad(pb.GetLoadRequest(), timeout=TIMEOUT_S)
    rows = [_row(worker) for worker in load.workers]
    click.echo(text_table(_HEAD, rows, width=terminal_width(), dispensable=_DISPENSABLE))


def state_name(worker: pb.Worker) -> str:
    """Whether it gets work, in a word."""
    return _STATE_NAMES.get(worker.state, "unknown")


def _row(worker: pb.Worker) -> list[object]:
    return [
        worker.id,
        state_name(worker),
        worker.device,
        worker.world_size,
        worker.running,
        worker.swapped,
        worker.blocks_free,
        worker.blocks_total,
        worker.token_rate,
    ]


@click.command()
@_worker_argument
@admin_address_option
def cordon(worker_id: str, admin_address: str) -> None:
    """Give the worker ID no new requests until it is readmitted, even if it is started anew."""
    with admin_stub(admin_address) as stub:
        stub.CordonWorker(pb.CordonWorkerRequest(worker_id=worker_id), timeout=TIMEOUT_S)
    click.echo(f"cordoned {worker_id}")


@click.command()
@_worker_argument
@admin_address_option
def readmit(worker_id: str, admin_address: str) -> None:
    """Give the worker ID requests again: undoes a cordon, or a drain that is not over."""
    with admin_stub(admin_address) as stub:
        stub.ReadmitWorker(pb.ReadmitWorkerRequest(worker_id=worker_id), timeout=TIMEOUT_S)
    click.echo(f"readmitted {worker_id}")


@click.command()
@_worker_argument
@click.option(
    "--grace",
    type=click.FloatRange(min=0, max=86_400),
    show_default="the scheduler's --drain-grace",
    help="Seconds that requests may go on there before they are moved to other workers.",
)
@click.option("--wait", is_flag=True, help="Return only once the worker has been let go.")
@admin_address_option
def drain(worker_id: str, grace: float | None, wait: bool, admin_address: str) -> None:
    """Give the worker ID no new requests, move those that run on, and let its process end.

    A process of this name that is started later is a worker like any other.
    """
    request = pb.DrainWorkerRequest(worker_id=worker_id, grace=None if grace is None else _duration(grace))
    with admin_stub(admin_address) as stub:
        stub.DrainWorker(request, timeout=TIMEOUT_S)
        if wait:
            _wait(stub, worker_id)
    click.echo(f"drained {worker_id}" if wait else f"draining {worker_id}")


def _duration(seconds: float) -> Duration:
    duration = Duration()
    duration.FromNanoseconds(round(seconds * 1e9))
    return duration


def _wait(stub: Any, worker_id: str) -> None:
    """Until no worker of this name drains. Raises `click.ClickException` if it was readmitted, or is there anew."""
    while True:
        load = stub.GetLoad(pb.GetLoadRequest(), timeout=TIMEOUT_S)
        states = [worker.state for worker in load.workers if worker.id == worker_id]
        if not states:
            return
        if states != [pb.WORKER_STATE_DRAINING]:
            raise click.ClickException(f"{worker_id} drains no more: it was readmitted, or has already come back")
        time.sleep(_LOOK_INTERVAL_S)
