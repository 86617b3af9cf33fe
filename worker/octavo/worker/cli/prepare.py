"""`octavo prepare-model`, `octavo convert-weights` and `octavo quantize`: make directories that can be served."""

from pathlib import Path

import click

from octavo.runtime.models.directory import BUNDLED_MODEL, BUNDLED_MODELS, ModelDirectoryError, resolve_model
from octavo.runtime.models.gguf.file import GGUFError
from octavo.runtime.models.hub import HubError, fetch, is_hub_id
from octavo.runtime.models.publish import PublishError
from octavo.worker.loading.convert_weights import ConvertError, convert_weights
from octavo.worker.loading.prepare import PrepareError, prepare_bundled_model, prepare_directory
from octavo.worker.loading.quantize_model import TARGETS, QuantizeError, quantize_model
from octavo.worker.loading.weights import WeightsError


@click.command("prepare-model")
@click.argument("name", type=click.Choice(BUNDLED_MODELS), default=BUNDLED_MODEL)
@click.option(
    "--gguf",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help=f"GGUF file to convert, with --output.  [default: the bundled {BUNDLED_MODEL}]",
)
@click.option(
    "--output",
    type=click.Path(path_type=Path),
    help="Directory to write, with --gguf.  [default: the bundled model's place in the cache]",
)
def prepare_model(name: str, gguf: Path | None, output: Path | None) -> None:
    """Make the directory of the bundled model NAME, or of a GGUF file.

    Dequantizes to bfloat16 and writes config, tokenizer and weights as transformers lays them out, all or nothing; the
    bundled model's name with -q4_1 keeps its weights quantized. Prints the directory; does nothing if it is there
    already. A GGUF file can be served as it is too.
    """
    if (gguf is None) != (output is None):
        raise click.UsageError("--gguf and --output go together: another model has no place of its own in the cache")
    try:
        if gguf is None or output is None:
            directory = prepare_bundled_model(name)
        else:
            directory = output.absolute()
            prepare_directory(gguf, directory)
    except (PrepareError, PublishError, GGUFError, OSError) as error:
        raise click.ClickException(str(error)) from error
    click.echo(directory)


@click.command("convert-weights")
@click.argument("source")
@click.option("--output", type=click.Path(path_type=Path), required=True, help="Directory to write.")
def convert(source: str, output: Path) -> None:
    """Turn a model with pytorch_model.bin into one with safetensors.

    SOURCE is a directory, or a model of the Hugging Face hub as org/name. Nothing that a weight file names is run: what
    holds more than tensors is refused. Configuration and tokenizer are copied. Prints the new directory; does nothing
    if it is there already.
    """
    directory = output.absolute()
    try:
        is_remote = is_hub_id(source) and not Path(source).exists()
        convert_weights(fetch(source, "*.bin") if is_remote else Path(source).absolute(), directory)
    except (ConvertError, HubError, ModelDirectoryError, PublishError, WeightsError, OSError) as error:
        raise click.ClickException(str(error)) from error
    click.echo(directory)


@click.command("quantize")
@click.argument("source")
@click.option("--to", type=click.Choice(list(TARGETS)), required=True, help="Format of the linear layers.")
@click.option("--output", type=click.Path(path_type=Path), required=True, help="Directory to write.")
def quantize(source: str, to: str, output: Path) -> None:
    """Quantise a model once, into a directory that starts faster and takes less room.

    SOURCE is a directory, or a model of the Hugging Face hub as org/name. The LM head is q8_0 at least, and so is the
    embedding where Octavo itself computes the model. What is written is compressed-tensors' pack-quantized layout.
    Configuration and tokenizer are copied. Prints the new directory, which must not be there yet.
    """
    from octavo.worker.models.config import ModelConfigError
    from octavo.worker.models.registry import quantizable

    directory = output.absolute()
    try:
        model = resolve_model(source)
        quantize_model(model, directory, to, *quantizable(model))
    except (ModelDirectoryError, ModelConfigError, PublishError, QuantizeError, WeightsError, OSError) as error:
        raise click.ClickException(str(error)) from error
    click.echo(directory)
