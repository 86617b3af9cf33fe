"""`octavo top` shows queues, blocks and token rates of a running scheduler, again and again."""

import textwrap
import time
from collections.abc import Iterator
from contextlib import suppress

import click

from octavo.scheduler.cli.admin_client import TIMEOUT_S, admin_address_option, admin_stub
from octavo.scheduler.cli.operate import state_name
from octavo.scheduler.cli.tables import terminal_width, text_table
from octavo.v1 import admin_pb2 as pb

_WORKER_HEAD = (
    "WORKER STATE RUNNING SWAPPED IN-FLIGHT BLOCKS FREE CACHED PARKED PINNED USED CPU CPU-USED"
    " DRAFTED ACCEPTED TOKENS/DRAFT TOKENS/S OUT/S"
)
_TENANT_HEAD = "TENANT WEIGHT HELD WAITING SERVED"
# Columns that a narrow terminal leaves out, from the first on.
_DISPENSABLE = (
    "DRAFTED ACCEPTED PARKED PINNED IN-FLIGHT CPU CPU-USED CACHED FREE SWAPPED TOKENS/DRAFT BLOCKS TOKENS/S"
    " SERVED WEIGHT"
)


@click.command()
@click.option("--interval", type=click.FloatRange(min=0.1), default=1.0, help="Seconds between frames.")
@click.option("--once", is_flag=True, help="Print one frame and end.")
@admin_address_option
def top(interval: float, once: bool, admin_address: str) -> None:
    """Watch queues, blocks and token rates. Ctrl-C ends it.

    TOKENS/S is what a worker computes in a second of work, OUT/S what it has generated per second since the last frame.
    DRAFTED are guesses of next tokens that it has checked, ACCEPTED those that were right; a step with a draft has
    given TOKENS/DRAFT tokens of a sequence on average.
    A terminal shows the columns that it has room for; a pipe gets all of them.
    """
    with admin_stub(admin_address) as stub, suppress(KeyboardInterrupt):
        previous, at = None, 0.0
        while True:
            load, now = stub.GetLoad(pb.GetLoadRequest(), timeout=TIMEOUT_S), time.monotonic()
            if not once:
                # Does nothing where the output is no terminal: frames follow each other then.
                click.clear()
            click.echo(frame(load, previous, now - at, terminal_width()))
            if once:
                return
            previous, at = load, now
            time.sleep(interval)


def frame(
    load: pb.GetLoadResponse, previous: pb.GetLoadResponse | None, seconds: float, width: int | None = None
) -> str:
    """Draws one picture of the load, no wider than `width`; rates are against the `previous` one, `seconds` ago."""
    return "\n".join(_lines(load, previous, seconds, width))


def _lines(
    load: pb.GetLoadResponse, previous: pb.GetLoadResponse | None, seconds: float, width: int | None
) -> Iterator[str]:
    counts = (
        f"waiting {load.waiting}, running {load.running}, swapped {load.swapped}; preemptions {load.preemptions},"
        f" swaps {load.swaps}; frontends {load.frontends}, pinned prefixes {load.pinned_prefixes},"
        f" dropped messages {load.dropped_messages}"
    )
    yield counts if width is None else textwrap.fill(counts, max(width, 1))
    before = {worker.id: worker for worker in previous.workers} if previous else {}
    yield ""
    rows = [_worker_row(worker, before.get(worker.id), seconds) for worker in load.workers]
    yield text_table(_WORKER_HEAD, rows, width=width, dispensable=_DISPENSABLE)
    if load.tenants:
        yield ""
        tenants = [_tenant_row(tenant) for tenant in load.tenants]
        yield text_table(_TENANT_HEAD, tenants, width=width, dispensable=_DISPENSABLE)


def _worker_row(worker: pb.Worker, before: pb.Worker | None, seconds: float) -> list[object]:
    accepted = sum(worker.accepted_tokens)
    return [
        worker.id,
        state_name(worker),
        worker.running,
        worker.swapped,
        worker.steps_in_flight,
        worker.blocks_total,
        worker.blocks_free - worker.blocks_cached_free,
        worker.blocks_cached_free,
        worker.blocks_parked,
        worker.blocks_pinned,
        worker.blocks_referenced,
        worker.cpu_blocks_total,
        worker.cpu_blocks_referenced,
        sum(worker.drafted_tokens),
        accepted,
        f"{1 + accepted / worker.drafted_tokens[0]:.2f}" if worker.drafted_tokens else "-",
        worker.token_rate,
        "-" if before is None else max(0.0, (worker.tokens_sampled - before.tokens_sampled) / seconds),
    ]


def _tenant_row(tenant: pb.TenantLoad) -> list[object]:
    return [tenant.tenant or "-", tenant.weight, tenant.held, tenant.waiting, tenant.virtual_time]
