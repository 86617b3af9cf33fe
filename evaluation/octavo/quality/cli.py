"""Runs `octavo evaluate`: says how well a model predicts a text, and how far it is from what it was made of."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from octavo.runtime.models.directory import ModelDirectoryError, resolve_model
from octavo.runtime.options.flags import options_of
from octavo.runtime.transport.endpoints import EndpointError, default_endpoint
from octavo.worker.config import WorkerConfig, default_worker_id
from octavo.worker.model_settings import ConfigError, ModelSettings

if TYPE_CHECKING:
    from octavo.quality.forced import ForcedModel

# Of keys and values, where nothing else is asked for; a model that takes more for a window says how much.
_KV_CACHE_MEMORY = 256 << 20
_FILE = click.Path(dir_okay=False, path_type=Path)


@click.command(context_settings={"show_default": True})
@click.option("--text", type=_FILE, help="UTF-8 text to predict.  [default: the beginning of a novel of 1865]")
@click.option("--window", type=click.IntRange(min=4), default=512, help="Tokens that are predicted in one go.")
@click.option("--windows", type=click.IntRange(min=1), help="How many of the text's windows.  [default: all]")
@click.option("--original", help="What --model was made from, to compare with: a model, named like --model.")
@click.option("--json", "file", type=_FILE, help="Write the figures here too.")
@options_of(ModelSettings)
def evaluate(
    text: Path | None, window: int, windows: int | None, original: str | None, file: Path | None, **options: Any
) -> None:
    """Say how well a model predicts a text, and how far its predictions are from those of what it was made of.

    The model is loaded as `octavo worker` does it, by the same options, and computes the text in windows over blocks of
    its KV cache. In the second half of each window every token is predicted from all that come before it in the window.
    The references are computed in fp32, with keys and values in fp32: from the same weights, and from --original's.
    """
    # They take torch.
    from octavo.quality.comparison import compare
    from octavo.quality.forced import with_models
    from octavo.quality.report import as_text
    from octavo.quality.text import ALICE, TextError
    from octavo.quality.text import windows as windows_of

    config, text = _config(window, options), text or ALICE
    references = _references(config, original)
    try:
        parts = windows_of(text, resolve_model(config.model, config.load_format), window, windows)
    except (ModelDirectoryError, TextError) as error:
        raise click.ClickException(str(error)) from error

    def use(models: "list[ForcedModel]") -> None:
        names = [_name(config, models[0]), *references]
        qualities = dict(zip(names, compare(models, parts, _tell), strict=True))
        click.echo(f"{text}: {len(parts)} windows of {window} tokens, the second half of each predicted")
        click.echo(as_text(qualities))
        if file:
            _write(file, {name: asdict(quality) for name, quality in qualities.items()})

    with_models([config, *references.values()], use)


def _config(window: int, options: dict[str, Any]) -> WorkerConfig:
    """Returns the configuration of a worker with room for one window. Raises `click.ClickException`."""
    if options["device"] != "cpu" or options["tp"] != 1:
        raise click.UsageError("evaluate computes on a CPU, in one process: leave --device and --tp out")
    room = {"max_model_len": options["max_model_len"] or window}
    if options["num_blocks"] is None and options["kv_cache_memory"] is None:
        room["kv_cache_memory"] = _KV_CACHE_MEMORY
    if room["max_model_len"] < window:
        raise click.UsageError(f"a --window of {window} tokens is longer than --max-model-len allows")
    try:
        return WorkerConfig(
            worker_id=default_worker_id(),
            endpoint=default_endpoint("workers"),
            health_address="",
            **{**options, "num_cpu_blocks": 0, **room},
        )
    except ConfigError as error:
        raise click.UsageError(str(error)) from error
    except EndpointError as error:
        raise click.ClickException(str(error)) from error


def _references(config: WorkerConfig, original: str | None) -> dict[str, WorkerConfig]:
    """Returns what the model is compared with, by name: its own weights as numbers, and what they were made of."""
    plain = replace(config, dtype="float32", kv_cache_dtype="auto", numerics="default", dequantized=True)
    references = {"its own weights, fp32": plain}
    if original:
        references[f"{original}, fp32"] = replace(plain, model=original, quantization="none")
    elif config.quantization != "none":
        references["the weights before, fp32"] = replace(plain, quantization="none")
    return references


def _name(config: WorkerConfig, model: "ForcedModel") -> str:
    weights = "" if config.quantization == "none" else f"{config.quantization}, "
    return f"{model.name} ({weights}{model.dtype}, {model.kv_dtype} KV)"


def _tell(done: int, windows: int) -> None:
    click.echo(f"window {done} of {windows}", err=True)


def _write(file: Path, figures: dict[str, object]) -> None:
    try:
        file.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise click.ClickException(f"cannot write {file}: {error.strerror or error}") from error
