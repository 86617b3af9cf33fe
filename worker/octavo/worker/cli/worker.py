"""Runs `octavo worker`: makes a configuration of its options, runs the worker, and reports errors on one line."""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import click
import zmq

from octavo.runtime.options.flags import config_of, options_of
from octavo.runtime.telemetry import tracing
from octavo.runtime.telemetry.logs import say
from octavo.runtime.telemetry.metrics import MetricsError, expose
from octavo.runtime.telemetry.metrics import serve as serve_metrics
from octavo.runtime.transport.curve_keys import read_client_keys
from octavo.runtime.transport.endpoints import EndpointError, default_endpoint, runtime_directory
from octavo.wire.codec import WireError
from octavo.wire.costs import StepCosts
from octavo.worker.block_disk import BlockDisk, opened_disk
from octavo.worker.block_exchange import chosen_endpoint, opened_exchange
from octavo.worker.block_pulls import BlockPulls
from octavo.worker.config import NO_PEERS, WorkerConfig, default_worker_id
from octavo.worker.health import Liveness, health_server
from octavo.worker.kv_store.loan import Payload
from octavo.worker.kv_store.room import KVStoreError
from octavo.worker.loop import serve
from octavo.worker.make_runner import UnusableError, describe, one_line, with_runner
from octavo.worker.metrics import WorkerMetrics
from octavo.worker.model_settings import ConfigError
from octavo.worker.process import LastWords
from octavo.worker.protocol import RefusedError
from octavo.worker.runner import Runner

logger = logging.getLogger(__name__)


@click.command()
@options_of(WorkerConfig)
def worker(**options: Any) -> None:
    """Run one worker: it loads the model, joins the scheduler and computes its plans until SIGTERM."""
    try:
        config = _configure(**options)
    except ConfigError as error:
        raise click.UsageError(str(error)) from error
    except EndpointError as error:
        raise click.ClickException(str(error)) from error
    run(config)


def run(config: WorkerConfig) -> None:
    """Runs a worker to its end. Raises `click.ClickException` with one line if it cannot start or is refused."""
    liveness, metrics = Liveness(), WorkerMetrics()
    with _explained(config), _observed(config, liveness, metrics):
        with_runner(config, liveness, partial(_serve, config, liveness, metrics))


def _serve(
    config: WorkerConfig,
    liveness: Liveness,
    metrics: WorkerMetrics,
    runner: Runner,
    on_beat: Callable[[], None],
) -> None:
    say(describe(runner, exact=config.exact))
    costs = _measured_costs(runner, config)
    with _disk(runner, config) as disk, _pulls(runner, config) as pulls:
        metrics.loaded(config.worker_id, runner, disk)
        serve(
            runner,
            worker_id=config.worker_id,
            endpoint=config.endpoint,
            liveness=liveness,
            keys=config.curve_keys,
            costs=costs,
            metrics=metrics,
            on_beat=on_beat,
            drain_timeout_s=config.drain_timeout_s,
            words=LastWords(runtime_directory() / f"{config.worker_id}-last-words"),
            disk=disk,
            pulls=pulls,
            role=config.role,
        )


def _disk(runner: Runner, config: WorkerConfig) -> AbstractContextManager[BlockDisk | None]:
    """Returns the disk that the settings name, to be opened; one of None if they name none."""
    if config.kv_disk is None:
        return nullcontext()
    if not runner.num_cpu_blocks:
        raise UnusableError(
            "KV blocks come from a disk by way of blocks in CPU memory, and there is no room for one: give more with"
            " --swap-memory, or drop --kv-disk"
        )
    return opened_disk(
        *(config.kv_disk, config.kv_disk_memory, runner.kv_identity, runner.fill_cpu_block),
        mirror=config.kv_mirror,
        measures=config.calibrate,
    )


@contextmanager
def _pulls(runner: Runner, config: WorkerConfig) -> Iterator[BlockPulls | None]:
    """Lets other workers copy blocks from here, and this one from them, within the block. Not where there are no CPU
    blocks to copy to, nor with ranks, each of which has a share of a block."""
    if config.peer_endpoint == NO_PEERS or runner.world_size > 1 or not runner.num_cpu_blocks:
        yield None
        return
    try:
        endpoint = chosen_endpoint(config.peer_endpoint, config.endpoint, config.worker_id)
    except OSError as error:
        logger.warning("requests do not move between workers: no address of this machine is known: %s", error)
        yield None
        return
    identity, has_device = runner.kv_identity, runner.peek_blocks([0], in_cpu=False) is not None
    peek = partial(_peek, runner)
    with opened_exchange(endpoint, peek, config.curve_keys) as exchange:
        yield BlockPulls(
            *(exchange, identity.directory_name, identity.block_bytes, runner.fill_cpu_block, time.monotonic),
            has_device=has_device,
        )


def _peek(runner: Runner, block_ids: Sequence[int], in_cpu: bool) -> Sequence[Payload] | None:
    return runner.peek_blocks(block_ids, in_cpu=in_cpu)


@contextmanager
def _explained(config: WorkerConfig) -> Iterator[None]:
    """Says what has ended the worker on one line."""
    try:
        yield
    except KVStoreError as error:
        raise UnusableError(one_line(error)) from error
    except (EndpointError, MetricsError) as error:
        raise click.ClickException(str(error)) from error
    except WireError as error:
        raise click.ClickException(f"this worker cannot be offered to a scheduler: {error}") from error
    except RefusedError as error:
        raise click.ClickException(f"the scheduler refused this worker: {error}") from error
    except zmq.ZMQError as error:
        raise click.ClickException(f"cannot use {config.endpoint}: {error}; check --worker-endpoint") from error


@contextmanager
def _observed(config: WorkerConfig, liveness: Liveness, metrics: WorkerMetrics) -> Iterator[None]:
    """Serves health, which on one machine the first of several ranks does for all, and what `_told` does."""
    if config.is_local_follower:
        yield
        return
    with health_server(config.health_address, liveness), _told(config, metrics):
        yield


@contextmanager
def _told(config: WorkerConfig, metrics: WorkerMetrics) -> Iterator[None]:
    """Serves metrics and sends traces, where these are asked for."""
    with ExitStack() as held:
        held.enter_context(tracing.exported(config.otlp_endpoint, "octavo-worker"))
        if config.metrics_listen:
            expose("worker", metrics)
            held.enter_context(serve_metrics(config.metrics_listen))
        yield


def _configure(**options: Any) -> WorkerConfig:
    worker_id = options["worker_id"] or default_worker_id()
    keys = options["curve_keys"]
    return config_of(
        WorkerConfig,
        options,
        worker_id=worker_id,
        endpoint=options["endpoint"] or default_endpoint("workers"),
        health_address=options["health_address"] or f"unix:{runtime_directory()}/{worker_id}-health.sock",
        curve_keys=read_client_keys(keys, "worker") if keys else None,
    )


def _measured_costs(runner: Runner, config: WorkerConfig) -> StepCosts | None:
    """Measures what the scheduler's `--preemption measured` and `--speculation auto` weigh; None where nothing was
    measured."""
    if not config.calibrate:
        return None
    if config.device == "fake":
        from octavo.worker.fake.runner import FAKE_COSTS

        return FAKE_COSTS
    if not runner.kv_groups:
        return None
    from octavo.worker.calibrate.calibrate import calibrate

    try:
        costs = calibrate(runner)
    except Exception as error:
        logger.warning("what steps cost could not be measured: %s", one_line(error))
        return None
    logger.info("a token of a prompt takes %.3g s, a block %.3g s out and %.3g s in", *_main_costs(costs))
    if costs.rows:
        steps = ", ".join(f"{cost.rows}: {1000 * cost.seconds:.3g} ms" for cost in costs.rows)
        logger.info("steps by the rows that choose take %s", steps)
    else:
        logger.info("drafts are not checked here, and none will be asked for")
    return costs


def _main_costs(costs: StepCosts) -> tuple[float, float, float]:
    return costs.prefill.token_s, costs.swap.block_out_s, costs.swap.block_in_s
