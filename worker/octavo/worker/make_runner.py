"""The making of the runner that a worker's settings describe, and the check that its KV cache holds the context."""

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import click

from octavo.runtime.models.directory import ModelDirectoryError, model_name, resolve_model
from octavo.worker.config import WorkerConfig
from octavo.worker.health import Liveness
from octavo.worker.model_settings import DEFAULT_FAKE_BLOCKS, ModelSettings
from octavo.worker.models.encoders.families import is_encoder
from octavo.worker.process import available_cores
from octavo.worker.runner import DeviceLostError, Runner

logger = logging.getLogger(__name__)
# The errors that a full machine or a broken library raises while the model is made.
_START_ERRORS = (MemoryError, OSError, RuntimeError, ValueError)


class ContextRoomError(Exception):
    """Raised if the KV cache cannot hold one sequence of the longest length offered; the text gives remedies."""


def check_context_room(runner: Runner) -> None:
    """Checks that a sequence of `max_model_len` tokens fits into the KV cache of `runner`.

    It does where no KV is kept. Raises `ContextRoomError`, with both remedies in figures, if it does not.
    """
    if not runner.kv_groups:
        return
    length, groups, block_size = runner.model.max_model_len, len(runner.kv_groups), runner.block_size
    needed = -(-length // block_size) * groups
    if runner.num_blocks >= needed:
        return
    # A block holds the keys and values of one KV group.
    block_bytes = block_size * runner.kv_bytes_per_token // groups
    held = runner.num_blocks // groups * block_size
    shorter = f"--max-model-len {held}" if held else "--max-model-len with a smaller --block-size"
    raise ContextRoomError(
        f"the KV cache of {runner.num_blocks} blocks ({runner.num_blocks * block_bytes} bytes) holds {held} tokens of a"
        f" sequence and the context has {length}, which takes {needed} blocks: give --kv-cache-memory"
        f" {needed * block_bytes}, or shorten the context with {shorter}"
    )


class UnusableError(click.ClickException):
    """Raised for a model or a setting that fails on every attempt; the exit code tells a supervisor not to restart."""

    exit_code = 2


def with_runner(config: WorkerConfig, liveness: Liveness, use: Callable[[Runner, Callable[[], None]], object]) -> None:
    """Makes the runner that `config` describes and calls `use` with it and with a function to call at every heartbeat.

    A rank that is not the first of its replica follows the first rank instead. Raises `click.ClickException`.
    """
    try:
        if config.tp == 1:
            use(_make_runner(config), lambda: None)
        else:
            _share(config, liveness, use)
    except DeviceLostError as error:
        # Its scheduler recomputes what ran here; a new process gets a new context on the device.
        lost = config.device if config.tp == 1 else f"rank {config.tp_rank or 0} of {config.tp}"
        raise click.ClickException(f"{lost} has failed and must be started anew: {one_line(error)}") from error


def _share(config: WorkerConfig, liveness: Liveness, use: Callable[[Runner, Callable[[], None]], object]) -> None:
    # The imports take torch.
    from octavo.worker.step.model_runner import ModelRunner
    from octavo.worker.tensor_parallel.ranks import joined

    with joined(config) as ranks:
        runner = _make_runner(config, group=ranks.group, followers=ranks.followers)
        ranks.loaded()
        if ranks.group.rank:
            # No scheduler knows of this rank: it is as ready as it gets.
            liveness.welcomed = True
            assert isinstance(runner, ModelRunner), "only models are shared"
            ranks.follow(runner.paged_model, liveness)
        else:
            use(runner, ranks.beat)


def describe(runner: Runner, *, exact: bool = False) -> str:
    """Describes the loaded model and the capacity of its KV cache in one line."""
    model = runner.model
    numerics = model.dtype if model.quantization == "none" else f"{model.quantization}, {model.dtype}"
    if exact:
        numerics += ", exact"
    device = runner.device if runner.world_size == 1 else f"{runner.world_size} ranks of {runner.device}"
    if model.pooling is not None and not runner.kv_groups:
        return (
            f"model {model.name} ({numerics}, {model.max_model_len} positions) on {device}:"
            f" {model.pooling.num_outputs} numbers for each text ({model.pooling.task.value}), no KV blocks;"
            f" kernels: {runner.kernels}"
        )
    # A block holds the keys and values of one KV group.
    block_gib = runner.block_size * runner.kv_bytes_per_token / len(runner.kv_groups) / (1 << 30)
    return (
        f"model {model.name} ({numerics}, {model.max_model_len} positions) on {device}:"
        f" {runner.num_blocks} blocks ({runner.num_blocks * block_gib:.2f} GiB) and"
        f" {runner.num_cpu_blocks} CPU blocks ({runner.num_cpu_blocks * block_gib:.2f} GiB)"
        f" of {runner.block_size} tokens, {runner.kv_bytes_per_token} KV bytes per token ({runner.kv_cache_dtype});"
        f" kernels: {runner.kernels}"
    ) + _besides(runner)


def _besides(runner: Runner) -> str:
    if runner.draft_model:
        return f"; draft model: {runner.draft_model}"
    pooling = runner.model.pooling
    return f"; {pooling.num_outputs} numbers for each text ({pooling.task.value})" if pooling else ""


def _make_runner(config: WorkerConfig, **shared: Any) -> Runner:
    """Makes the runner of `config`; `shared` holds the group and the followers of a rank."""
    make: Callable[[WorkerConfig, Path, Path | None], Runner] = _make_fake_runner
    if config.device != "fake":
        make = partial(_make_model_runner, **shared)
    try:
        draft = resolve_model(config.draft_model, config.load_format) if config.draft_model else None
        directory = resolve_model(config.model, config.load_format)
        if is_encoder(directory):
            make = _make_fake_encoder if config.device == "fake" else _make_encoder_runner
        runner = make(config, directory, draft)
        _check_context_room(runner, config)
    except (ModelDirectoryError, ContextRoomError) as error:
        raise UnusableError(one_line(error)) from error
    except _START_ERRORS as error:
        logger.debug("the model could not be made ready", exc_info=True)
        raise click.ClickException(one_line(error)) from error
    return runner


def _check_context_room(runner: Runner, config: WorkerConfig) -> None:
    """Checks the context as `check_context_room` does, but only warns if `config` gives an exact number of blocks."""
    try:
        check_context_room(runner)
    except ContextRoomError as error:
        if config.device != "fake" and config.num_blocks is None:
            raise
        logger.warning("requests as long as the context will be refused: %s", error)


def _make_fake_runner(config: WorkerConfig, directory: Path, draft: Path | None) -> Runner:
    from octavo.worker.fake.runner import FakeRunner

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
        draft_model=model_name(draft) if draft else None,
        draft_hit_rate=config.fake_draft_hit_rate,
        pooling=config.pooling,
    )
    runner.grammars.load()
    return runner


def _make_fake_encoder(config: WorkerConfig, directory: Path, draft: Path | None) -> Runner:
    from octavo.worker.fake.encoder import FakeEncoderRunner

    return FakeEncoderRunner(
        directory,
        block_size=config.block_size,
        max_model_len=config.max_model_len,
        step_ms=config.fake_step_ms,
        load_format=config.load_format,
        faults=config.fake_faults,
    )


def _make_encoder_runner(config: WorkerConfig, directory: Path, draft: Path | None) -> Runner:
    # As below: torch takes seconds to import.
    from octavo.worker.loading.weights import WeightsError
    from octavo.worker.models.config_file import ModelConfigError
    from octavo.worker.pooling.runner import EncoderRunner

    try:
        return EncoderRunner(directory, replace(config, threads=config.threads or _usual_threads(config.ranks_here)))
    except (ModelConfigError, WeightsError) as error:
        raise UnusableError(one_line(error)) from error


def _make_model_runner(config: WorkerConfig, directory: Path, draft: Path | None, **shared: Any) -> Runner:
    # Importing torch takes seconds and a gigabyte: the fake device, and --help, must not need it.
    import torch

    from octavo.worker.loading.load_format import release_free_memory
    from octavo.worker.loading.weights import WeightsError
    from octavo.worker.models.config import ModelConfigError
    from octavo.worker.models.kernel_race import settle
    from octavo.worker.pooling.decoders import decoder_pooling, pooling_settings
    from octavo.worker.step.kv_cache import KVCacheError
    from octavo.worker.step.model_runner import ModelRunner, ModelRunnerError
    from octavo.worker.tensor_parallel.group import SINGLE

    settings: ModelSettings = replace(config, threads=config.threads or _usual_threads(config.ranks_here))
    try:
        pooling = decoder_pooling(directory, config.pooling)
        settings = pooling_settings(settings, pooling)
    except ModelConfigError as error:
        raise UnusableError(one_line(error)) from error
    if config.device == "cpu" and (chosen := settle(directory, settings, shared.get("group", SINGLE))):
        click.echo(chosen)
    try:
        runner = ModelRunner(
            directory, settings, device=config.own_device(config.tp_rank or 0), draft_directory=draft, **shared
        )
    except (KVCacheError, ModelConfigError, ModelRunnerError, WeightsError) as error:
        raise UnusableError(one_line(error)) from error
    except torch.OutOfMemoryError as error:
        # Another process may hold the memory, and end.
        raise click.ClickException(
            f"{config.device} has too little memory for {config.model}: end what else runs there, lower"
            f" --max-num-batched-tokens, or serve a smaller model; torch says: {one_line(error)}"
        ) from error
    if not config.tp_rank and pooling is None:
        # Only the first rank chooses tokens.
        runner.grammars.load()
        # The vocabulary is read from JSON that takes a multiple of its memory for a moment.
        release_free_memory()
    return runner


def _usual_threads(ranks: int) -> int:
    """Returns the number of threads for each of `ranks` processes that share this machine's cores.

    It is at most torch's own default, which ignores a cgroup's quota: more threads would only wait for each other.
    """
    import torch

    return max(1, min(torch.get_num_threads(), available_cores()) // ranks)


def one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
