"""The command `octavo worker`: flags to configuration, configuration to a running worker, errors to one line."""

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import click
import zmq

from octavo.telemetry import tracing
from octavo.telemetry.metrics import MetricsError, expose
from octavo.telemetry.metrics import serve as serve_metrics
from octavo.wire.codec import WireError
from octavo.wire.costs import StepCosts
from octavo.wire.curve_keys import read_client_keys
from octavo.wire.endpoints import EndpointError, default_endpoint, runtime_directory
from octavo.wire.model_directory import BUNDLED_MODEL, LOAD_FORMATS, ModelDirectoryError, resolve_model
from octavo.wire.steps import MAX_BLOCK_SIZE
from octavo.worker.config import (
    DEFAULT_BLOCK_SIZE,
    DEFAULT_FAKE_BLOCKS,
    MAX_RANKS,
    MODEL_IMPLS,
    NUMERICS,
    ConfigError,
    WorkerConfig,
    default_worker_id,
    parse_memory,
    parse_windows,
)
from octavo.worker.context_room import ContextRoomError, check_context_room
from octavo.worker.cores import available_cores
from octavo.worker.fake_faults import parse_faults
from octavo.worker.gpu.options import GpuOptions
from octavo.worker.health import health_server
from octavo.worker.liveness import Liveness
from octavo.worker.loop import DRAIN_TIMEOUT_S, serve
from octavo.worker.metrics import WorkerMetrics
from octavo.worker.protocol import RefusedError
from octavo.worker.runner import DeviceLostError, Runner

logger = logging.getLogger(__name__)

# What a full machine or a broken library raises while the model is made.
_START_ERRORS = (MemoryError, OSError, RuntimeError, ValueError)


class UnusableError(click.ClickException):
    """A model or a setting that will not do however often it is tried: like wrong usage to whoever restarts us."""

    exit_code = 2


def _parsed(parse: Callable[[str], object]) -> Callable[[click.Context, click.Parameter, str | None], object]:
    """An option's callback that reads its text with `parse`; no text stays None."""

    def callback(context: click.Context, parameter: click.Parameter, text: str | None) -> object:
        try:
            return None if text is None else parse(text)
        except ValueError as error:
            raise click.BadParameter(str(error), context, parameter) from error

    return callback


@click.command()
@click.option(
    "--model",
    envvar="OCTAVO_MODEL",
    default=BUNDLED_MODEL,
    show_default=True,
    help="Model directory, the bundled model's name, or a model of the Hugging Face hub as org/name[@revision].",
)
@click.option(
    "--load-format",
    envvar="OCTAVO_LOAD_FORMAT",
    type=click.Choice(LOAD_FORMATS),
    default="auto",
    show_default=True,
    help="Where weights come from: safetensors (auto), or dummy: random numbers, no weight file needed.",
)
@click.option(
    "--model-impl",
    envvar="OCTAVO_MODEL_IMPL",
    type=click.Choice(MODEL_IMPLS),
    default="auto",
    show_default=True,
    help="Who computes the model: Octavo itself (native), transformers, or the first of them that can (auto).",
)
@click.option(
    "--worker-endpoint",
    "endpoint",
    envvar="OCTAVO_WORKER_ENDPOINT",
    show_default="ipc://<runtime directory>/workers.sock",
    help="The scheduler's address for workers.",
)
@click.option(
    "--worker-id",
    envvar="OCTAVO_WORKER_ID",
    show_default="<host>-<pid>",
    help="Name of this worker's place; it may outlive the process.",
)
@click.option(
    "--device",
    envvar="OCTAVO_DEVICE",
    type=click.Choice(["cpu", "cuda", "fake"]),
    default="cpu",
    show_default=True,
    help="Where to compute. `fake` computes no model: it hashes tokens, to test everything around one.",
)
@click.option(
    "--dtype",
    envvar="OCTAVO_DTYPE",
    type=click.Choice(["auto", "float32", "bfloat16", "float16"]),
    default="auto",
    show_default=True,
    help="Type of the computation, and of the KV cache.",
)
@click.option(
    "--kv-cache-dtype",
    envvar="OCTAVO_KV_CACHE_DTYPE",
    type=click.Choice(["auto", "fp8"]),
    default="auto",
    show_default=True,
    help="Another type for the KV cache: fp8 (e4m3) holds twice as many tokens as bfloat16, on a GPU.",
)
@click.option(
    "--numerics",
    envvar="OCTAVO_NUMERICS",
    type=click.Choice(NUMERICS),
    default="default",
    show_default=True,
    help="exact: a request's tokens and logprobs never depend on what runs beside it (float32 on a CPU); refused where"
    " that cannot be kept.",
)
@click.option(
    "--block-size",
    envvar="OCTAVO_BLOCK_SIZE",
    type=click.IntRange(1, MAX_BLOCK_SIZE),
    default=DEFAULT_BLOCK_SIZE,
    show_default=True,
    help="Tokens in a KV block.",
)
@click.option(
    "--kv-cache-memory",
    envvar="OCTAVO_KV_CACHE_MEMORY",
    metavar="SIZE",
    callback=_parsed(parse_memory),
    help="Memory for KV blocks: bytes, or with KiB, MiB or GiB. [default: the device decides]",
)
@click.option(
    "--num-blocks",
    envvar="OCTAVO_NUM_BLOCKS",
    type=click.IntRange(1, 2**31 - 1),
    help=f"Exact number of KV blocks; wins over --kv-cache-memory. [default: {DEFAULT_FAKE_BLOCKS} on fake]",
)
@click.option(
    "--swap-memory",
    envvar="OCTAVO_SWAP_MEMORY",
    metavar="SIZE",
    callback=_parsed(parse_memory),
    help="CPU memory for swapped-out KV blocks, like --kv-cache-memory; 0: none. [default: a quarter as many blocks]",
)
@click.option(
    "--num-cpu-blocks",
    envvar="OCTAVO_NUM_CPU_BLOCKS",
    type=click.IntRange(0, 2**31 - 1),
    help="Exact number of blocks in CPU memory, at most as many as KV blocks; wins over --swap-memory.",
)
@click.option(
    "--max-model-len",
    envvar="OCTAVO_MAX_MODEL_LEN",
    type=click.IntRange(1),
    help="Longest sequence, in tokens, where less than the model's.",
)
@click.option(
    "--threads", envvar="OCTAVO_THREADS", type=click.IntRange(1), help="CPU threads. [default: the device decides]"
)
@click.option(
    "--tp",
    envvar="OCTAVO_TP",
    type=click.IntRange(1, MAX_RANKS),
    default=1,
    show_default=True,
    help="Ranks that share the model (tensor parallel): processes on this machine, one GPU each if on GPUs. Memory is"
    " that of all together, --threads those of each.",
)
@click.option(
    "--tp-rank",
    envvar="OCTAVO_TP_RANK",
    type=click.IntRange(0, MAX_RANKS - 1),
    help="Which of the ranks this one is, where they run on several machines. [default: 0, which starts the others]",
)
@click.option(
    "--tp-rendezvous",
    envvar="OCTAVO_TP_RENDEZVOUS",
    metavar="HOST:PORT",
    help="Where ranks on several machines meet: a free port at rank 0's address. What they send each other is not"
    " encrypted: only they may reach it.",
)
@click.option(
    "--gpu-memory-utilization",
    envvar="OCTAVO_GPU_MEMORY_UTILIZATION",
    type=click.FloatRange(0, 1, min_open=True),
    default=0.9,
    show_default=True,
    help="Share of a GPU's memory that may be used, by all processes on it together; what weights and steps leave of it"
    " is for KV blocks.",
)
@click.option(
    "--max-num-batched-tokens",
    envvar="OCTAVO_MAX_NUM_BATCHED_TOKENS",
    type=click.IntRange(1),
    default=8192,
    show_default=True,
    help="Tokens of the largest step that room is left for on a GPU; give it as the scheduler's.",
)
@click.option(
    "--cuda-graphs/--no-cuda-graphs",
    envvar="OCTAVO_CUDA_GRAPHS",
    default=True,
    show_default=True,
    help="Capture decode steps on a GPU: a start some seconds longer, and steps without launches.",
)
@click.option(
    "--calibrate/--no-calibrate",
    envvar="OCTAVO_CALIBRATE",
    default=True,
    show_default=True,
    help="Measure at start what computing prompts and moving blocks cost, for the scheduler's --preemption measured.",
)
@click.option(
    "--health-address",
    envvar="OCTAVO_HEALTH_ADDRESS",
    show_default="unix:<runtime directory>/<worker id>-health.sock",
    help="Where to serve gRPC health: host:port or unix:/path.",
)
@click.option(
    "--drain-timeout",
    "drain_timeout_s",
    envvar="OCTAVO_DRAIN_TIMEOUT",
    type=click.FloatRange(min=0),
    default=DRAIN_TIMEOUT_S,
    show_default=True,
    help="Seconds after Ctrl-C or SIGTERM in which the scheduler may let requests end here, or move them.",
)
@click.option(
    "--curve-keys",
    envvar="OCTAVO_CURVE_KEYS",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Directory with worker.secret and scheduler.public, from `octavo keys`: for a scheduler that has keys.",
)
@click.option(
    "--insecure-tcp",
    envvar="OCTAVO_INSECURE_TCP",
    is_flag=True,
    help="Allow an unencrypted scheduler address beyond this machine.",
)
@click.option(
    "--fake-step-ms",
    envvar="OCTAVO_FAKE_STEP_MS",
    type=click.FloatRange(0, 60_000),
    default=0.0,
    help="How long each step of the fake device takes, at least.",
)
@click.option(
    "--fake-eos-probability",
    envvar="OCTAVO_FAKE_EOS_PROBABILITY",
    type=click.FloatRange(0, 1),
    default=0.0,
    help="How often the fake device chooses EOS.",
)
@click.option(
    "--fake-windows",
    envvar="OCTAVO_FAKE_WINDOWS",
    metavar="TOKENS,...",
    callback=_parsed(parse_windows),
    default="0",
    show_default=True,
    help="The windows of the fake device's KV groups; 0 sees all tokens.",
)
@click.option(
    "--fake-fault",
    "fake_faults",
    envvar="OCTAVO_FAKE_FAULT",
    metavar="KIND=TOKENS,...",
    callback=_parsed(parse_faults),
    default="",
    hidden=True,
    help="What prompts bring about on the fake device (octavo.worker.fake_faults).",
)
@click.option(
    "--metrics-listen",
    envvar="OCTAVO_METRICS_LISTEN",
    default="",
    help="Where to serve Prometheus metrics, as host:port; never public. Default: nowhere.",
)
@click.option(
    "--otlp-endpoint",
    envvar="OCTAVO_OTLP_ENDPOINT",
    default="",
    help="OTLP collector (gRPC) to send traces to, as http://host:port. Default: no traces.",
)
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
        if config.tp == 1:
            _serve(config, liveness, metrics, _make_runner(config))
        else:
            _share(config, liveness, metrics)


def _serve(
    config: WorkerConfig,
    liveness: Liveness,
    metrics: WorkerMetrics,
    runner: Runner,
    on_beat: Callable[[], None] = lambda: None,
) -> None:
    click.echo(describe(runner, exact=config.numerics == "exact"))
    metrics.loaded(config.worker_id, runner)
    serve(
        runner,
        worker_id=config.worker_id,
        endpoint=config.endpoint,
        liveness=liveness,
        keys=config.curve_keys,
        costs=_measured_costs(runner, config),
        metrics=metrics,
        on_beat=on_beat,
        drain_timeout_s=config.drain_timeout_s,
    )


def _share(config: WorkerConfig, liveness: Liveness, metrics: WorkerMetrics) -> None:
    """Serves as the first of several ranks, or does what that one says."""
    # It takes torch.
    from octavo.worker.tensor_parallel.ranks import joined

    with joined(config) as ranks:
        runner = _make_runner(config, group=ranks.group, followers=ranks.followers)
        ranks.loaded()
        if ranks.group.rank:
            # No scheduler knows of it: it is as ready as it gets.
            liveness.welcomed = True
            ranks.follow(runner, liveness)
        else:
            _serve(config, liveness, metrics, runner, ranks.beat)


@contextmanager
def _explained(config: WorkerConfig) -> Iterator[None]:
    """Says what has ended the worker on one line."""
    try:
        yield
    except (EndpointError, MetricsError) as error:
        raise click.ClickException(str(error)) from error
    except WireError as error:
        raise click.ClickException(f"this worker cannot be offered to a scheduler: {error}") from error
    except DeviceLostError as error:
        # Its scheduler recomputes what ran here; a new process gets a new context on the device.
        lost = config.device if config.tp == 1 else f"rank {config.tp_rank or 0} of {config.tp}"
        raise click.ClickException(f"{lost} has failed and must be started anew: {_one_line(error)}") from error
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


def describe(runner: Runner, *, exact: bool = False) -> str:
    """What was loaded and how much it can hold, on one line."""
    model = runner.model
    numerics = f"{model.dtype}, exact" if exact else model.dtype
    device = runner.device if runner.world_size == 1 else f"{runner.world_size} ranks of {runner.device}"
    # A block holds the keys and values of one KV group.
    block_gib = runner.block_size * runner.kv_bytes_per_token / len(runner.kv_groups) / (1 << 30)
    return (
        f"model {model.name} ({numerics}, {model.max_model_len} positions) on {device}:"
        f" {runner.num_blocks} blocks ({runner.num_blocks * block_gib:.2f} GiB) and"
        f" {runner.num_cpu_blocks} CPU blocks ({runner.num_cpu_blocks * block_gib:.2f} GiB)"
        f" of {runner.block_size} tokens, {runner.kv_bytes_per_token} KV bytes per token; kernels: {runner.kernels}"
    )


def _configure(**options: Any) -> WorkerConfig:
    options["worker_id"] = options["worker_id"] or default_worker_id()
    options["endpoint"] = options["endpoint"] or default_endpoint("workers")
    if not options["health_address"]:
        options["health_address"] = f"unix:{runtime_directory()}/{options['worker_id']}-health.sock"
    if directory := options["curve_keys"]:
        options["curve_keys"] = read_client_keys(directory, "worker")
    return WorkerConfig(**options)


def _make_runner(config: WorkerConfig, **shared: Any) -> Runner:
    """`shared`: what tells a rank of the others."""
    make: Callable[[WorkerConfig, Path], Runner] = _make_fake_runner
    if config.device != "fake":
        make = partial(_make_model_runner, **shared)
    try:
        runner = make(config, resolve_model(config.model, config.load_format))
        _check_context_room(runner, config)
    except (ModelDirectoryError, ContextRoomError) as error:
        raise UnusableError(_one_line(error)) from error
    except _START_ERRORS as error:
        logger.debug("the model could not be made ready", exc_info=True)
        raise click.ClickException(_one_line(error)) from error
    return runner


def _check_context_room(runner: Runner, config: WorkerConfig) -> None:
    """An exact number of blocks is meant, even if the longest requests are then refused."""
    try:
        check_context_room(runner)
    except ContextRoomError as error:
        if config.device != "fake" and config.num_blocks is None:
            raise
        logger.warning("requests as long as the context will be refused: %s", error)


def _measured_costs(runner: Runner, config: WorkerConfig) -> StepCosts | None:
    """What the scheduler's `--preemption measured` weighs; it does without where nothing was measured."""
    if config.device == "fake":
        from octavo.worker.fake_runner import FAKE_COSTS

        return FAKE_COSTS
    if not config.calibrate:
        return None
    from octavo.worker.calibrate import calibrate

    try:
        costs = calibrate(runner)
    except Exception as error:
        logger.warning("what steps cost could not be measured: %s", _one_line(error))
        return None
    if costs:
        logger.info("a token of a prompt takes %.3g s, a block %.3g s out and %.3g s in", *_main_costs(costs))
    return costs


def _main_costs(costs: StepCosts) -> tuple[float, float, float]:
    return costs.prefill.token_s, costs.swap.block_out_s, costs.swap.block_in_s


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _make_fake_runner(config: WorkerConfig, directory: Path) -> Runner:
    from octavo.worker.fake_runner import FakeRunner

    runner = FakeRunner(
        directory,
        load_format=config.load_format,
        block_size=config.block_size,
        num_blocks=config.num_blocks or DEFAULT_FAKE_BLOCKS,
        num_cpu_blocks=config.num_cpu_blocks,
        windows=config.fake_windows,
        max_model_len=config.max_model_len,
        step_ms=config.fake_step_ms,
        eos_probability=config.fake_eos_probability,
        faults=config.fake_faults,
    )
    runner.grammars.load()
    return runner


def _make_model_runner(config: WorkerConfig, directory: Path, **shared: Any) -> Runner:
    # Importing torch takes seconds and a gigabyte: the fake device, and --help, must not need it.
    import torch

    from octavo.worker.kv_cache import KVCacheError
    from octavo.worker.model_runner import ModelRunner, ModelRunnerError
    from octavo.worker.models.config import ConfigError as ModelConfigError
    from octavo.worker.weights import WeightsError

    try:
        runner = ModelRunner(
            directory,
            load_format=config.load_format,
            model_impl=config.model_impl,
            dtype=config.dtype,
            exact=config.numerics == "exact",
            device=_own_device(config),
            block_size=config.block_size,
            kv_cache_memory=config.kv_cache_memory,
            num_blocks=config.num_blocks,
            num_cpu_blocks=config.num_cpu_blocks,
            swap_memory=config.swap_memory,
            max_model_len=config.max_model_len,
            threads=config.threads or _usual_threads(config.ranks_here),
            kv_cache_dtype=config.kv_cache_dtype,
            gpu=GpuOptions(
                memory_utilization=config.gpu_memory_utilization,
                max_num_batched_tokens=config.max_num_batched_tokens,
                cuda_graphs=config.cuda_graphs,
            ),
            **shared,
        )
    except (KVCacheError, ModelConfigError, ModelRunnerError, WeightsError) as error:
        raise UnusableError(_one_line(error)) from error
    except torch.OutOfMemoryError as error:
        # Another process may have it, and end.
        raise click.ClickException(
            f"{config.device} has too little memory for {config.model}: end what else runs there, lower"
            f" --max-num-batched-tokens, or serve a smaller model; torch says: {_one_line(error)}"
        ) from error
    if not config.tp_rank:
        # Only the first rank chooses tokens.
        runner.grammars.load()
    return runner


def _own_device(config: WorkerConfig) -> str:
    """Ranks on one machine take one GPU each."""
    apart = config.device == "cuda" and config.ranks_here > 1
    return f"cuda:{config.tp_rank or 0}" if apart else config.device


def _usual_threads(ranks: int) -> int:
    """As many as torch takes, which does not know of a cgroup's quota: more would only wait for each other. `ranks`
    processes share the cores."""
    import torch

    return max(1, min(torch.get_num_threads(), available_cores()) // ranks)
