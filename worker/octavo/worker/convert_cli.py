"""`octavo convert-weights`: makes a directory that can be served of one whose weights are pickled."""

from pathlib import Path

import click

from octavo.wire.hub import HubError, fetch, is_hub_id
from octavo.wire.model_directory import ModelDirectoryError
from octavo.worker.convert_weights import ConvertError, convert_weights
from octavo.worker.publish import PublishError
from octavo.worker.weights import WeightsError


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
