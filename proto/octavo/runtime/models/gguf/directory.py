"""The model directory that stands for a GGUF file: configuration and tokenizer, and links to the file for the weights.

It is made once, in the user's cache, by whichever process of a service comes first (`cache_entries.py`).
"""

import json
import logging
import re
from pathlib import Path

from octavo.runtime.models.gguf.cache_entries import entry_of, remove_unused, using
from octavo.runtime.models.gguf.families import config_of
from octavo.runtime.models.gguf.file import GGUFError, GGUFFile, read_gguf
from octavo.runtime.models.gguf.metadata import Metadata
from octavo.runtime.models.gguf.tokenizer import GGUFTokenizer
from octavo.runtime.models.publish import publish

logger = logging.getLogger(__name__)

# What a file of several parts has behind its name.
_PART = re.compile(r"-\d{5}-of-\d{5}$")


def model_directory(path: Path, cache: Path) -> Path:
    """Returns the directory in `cache` for the GGUF file at `path`, and makes it if it does not exist.

    Its last component is the file's name. Directories that are of no more use are removed. Raises `GGUFError`, or
    `PublishError` where it cannot be written.
    """
    try:
        entry = entry_of(path, cache)
    except OSError as error:
        raise GGUFError(f"cannot read {path}: {error.strerror or error}") from error
    if not path.is_file():
        raise GGUFError(f"{path} is no file but a directory, a pipe, a socket or a device; name a GGUF file")
    directory = entry / _PART.sub("", path.stem)
    with using(entry):
        publish(directory, lambda partial: _write(path, partial))
    remove_unused(cache)
    return directory


def weight_files(directory: Path) -> list[Path]:
    """Returns the GGUF files of a model directory, the first part first; none if its weights are of another kind."""
    return sorted(directory.glob("*.gguf"))


def write_description(file: GGUFFile, directory: Path, *, quantized: bool) -> None:
    """Writes configuration and tokenizer of the model in `file` to `directory`; with `quantized`, for its own weights.

    Raises `GGUFError`, as `UnsupportedGGUF` before it writes anything.
    """
    tokenizer = GGUFTokenizer(Metadata(file.path, file.metadata))
    generation = tokenizer.generation_config()
    files = {
        "config.json": {**config_of(file, quantized=quantized), **generation},
        "generation_config.json": generation,
        "tokenizer.json": tokenizer.tokenizer_json(),
        "tokenizer_config.json": tokenizer.tokenizer_config(),
    }
    for name, content in files.items():
        (directory / name).write_text(json.dumps(content, ensure_ascii=False) + "\n", encoding="utf-8")


def _write(path: Path, directory: Path) -> None:
    file = read_gguf(path)
    write_description(file, directory, quantized=True)
    for each in file.paths:
        (directory / each.name).symlink_to(each)
    logger.info("read %s: its description is in %s", path, directory)
