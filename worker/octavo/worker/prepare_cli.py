"""`octavo prepare-model`: makes the model directory that `octavo serve` reads."""

from pathlib import Path

import click

from octavo.wire.model_directory import BUNDLED_MODEL
from octavo.worker.gguf_model import GGUFError
from octavo.worker.prepare import PrepareError, prepare_bundled_model, prepare_directory
from octavo.worker.publish import PublishError


@click.command("prepare-model")
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
def prepare_model(gguf: Path | None, output: Path | None) -> None:
    """Turn a GGUF file into a model directory.

    Dequantizes to bfloat16 and writes config, tokenizer and weights as transformers lays them out, all or nothing.
    Prints the directory; does nothing if it is there already.
    """
    if (gguf is None) != (output is None):
        raise click.UsageError("--gguf and --output go together: another model has no place of its own in the cache")
    try:
        if gguf is None or output is None:
            directory = prepare_bundled_model()
        else:
            directory = output.absolute()
            prepare_directory(gguf, directory)
    except (PrepareError, PublishError, GGUFError, OSError) as error:
        raise click.ClickException(str(error)) from error
    click.echo(directory)
