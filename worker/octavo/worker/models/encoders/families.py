"""Tells which model directories hold encoders, without loading anything that computes them."""

from pathlib import Path
from types import MappingProxyType

import msgspec

# The families of encoders by the model types in config.json.
FAMILIES = MappingProxyType(
    {"bert": "bert", "roberta": "roberta", "xlm-roberta": "roberta", "modernbert": "modernbert"}
)


class _File(msgspec.Struct):
    model_type: str = ""
    is_decoder: bool = False
    architectures: list[str] | None = None


def is_encoder(directory: Path) -> bool:
    """Tells whether the model in `directory` is an encoder of a family that Octavo computes."""
    file = _read(directory)
    return file.model_type in FAMILIES and not file.is_decoder


def classifies(directory: Path) -> bool:
    """Tells whether the model in `directory` has a head for classes."""
    return has_classes(_read(directory).architectures or [])


def has_classes(architectures: list[str]) -> bool:
    """Tells whether the name of any of these classes of transformers is that of a classifier."""
    return any(name.endswith("ForSequenceClassification") for name in architectures)


def _read(directory: Path) -> _File:
    try:
        return msgspec.json.decode((directory / "config.json").read_bytes(), type=_File)
    except (OSError, msgspec.DecodeError):
        # Whatever loads the model says what is wrong.
        return _File()
