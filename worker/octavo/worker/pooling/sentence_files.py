"""Reads how a model directory says that vectors are made of hidden states: the files of sentence-transformers."""

from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import msgspec

from octavo.worker.models.config_file import ModelConfigError, UnsupportedSetting

T = TypeVar("T")

MODES = ("cls", "max", "mean", "mean_sqrt_len", "weightedmean", "lasttoken")
# Keys of a pooling's config.json by the modes that they switch on, in the order in which vectors are joined.
_SWITCHES = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
_ACTIVATIONS = ("Identity", "Tanh")
# The words of `octavo.worker.model_settings.POOLINGS` that name a mode.
NAMED_MODES = MappingProxyType({"last": "lasttoken", "mean": "mean", "cls": "cls"})


@dataclass(frozen=True, slots=True)
class DenseFile:
    """A linear layer behind the pooling, in a directory of its own, and its activation, one of Identity and Tanh."""

    directory: Path
    num_inputs: int
    num_outputs: int
    has_bias: bool
    activation: str


@dataclass(frozen=True, slots=True)
class SentencePooling:
    """Says how a text's hidden states become its vector: each of `modes` makes one, side by side; then come the `dense`
    layers, and with `normalizes` the division by its length. Texts have `max_tokens` at most (None: as the model
    has)."""

    modes: tuple[str, ...]
    dense: tuple[DenseFile, ...] = ()
    normalizes: bool = False
    max_tokens: int | None = None


def has_sentence_files(directory: Path) -> bool:
    """Tells whether the directory is laid out as sentence-transformers lays out its models."""
    return (directory / "modules.json").is_file()


def read_pooling(directory: Path, asked: str = "auto") -> SentencePooling:
    """Reads the files; the pooling that is `asked` for by one of `NAMED_MODES` takes the place of theirs. A directory
    without any has the mean. Raises `ModelConfigError`."""
    named = NAMED_MODES.get(asked)
    if not has_sentence_files(directory):
        return SentencePooling((named or "mean",))
    found = _read_modules(directory)
    return found if named is None else replace(found, modes=(named,))


def _read_modules(directory: Path) -> SentencePooling:
    modules = _read(directory / "modules.json", list[dict[str, Any]])
    modes: tuple[str, ...] = ()
    dense: list[DenseFile] = []
    normalizes = False
    for module in modules:
        kind, place = str(module.get("type", "")).rpartition(".")[2], directory / str(module.get("path", ""))
        if kind == "Pooling" and not modes:
            modes = _modes(_read(place / "config.json", dict[str, Any]))
        elif kind == "Dense" and modes and not normalizes:
            dense.append(_dense(place))
        elif kind == "Normalize" and modes:
            normalizes = True
        elif kind != "Transformer" or modes:
            raise UnsupportedSetting(
                f"{directory / 'modules.json'} has a module {kind!r} that is not implemented there"
            )
    if not modes:
        raise UnsupportedSetting(f"{directory / 'modules.json'} names no pooling")
    return SentencePooling(modes, tuple(dense), normalizes, _max_tokens(directory))


def _modes(content: dict[str, Any]) -> tuple[str, ...]:
    if content.get("include_prompt") is False:
        raise UnsupportedSetting("include_prompt = false is not implemented: tokens of prompts count like others")
    named = content.get("pooling_mode")
    names = [named] if isinstance(named, str) else list(named or ())
    modes = tuple(names or [mode for switch, mode in _SWITCHES.items() if content.get(switch)])
    if not modes or any(mode not in MODES for mode in modes):
        raise UnsupportedSetting(
            f"a pooling by {list(modes)} is not implemented; those are that are: {', '.join(MODES)}"
        )
    return modes


def _dense(directory: Path) -> DenseFile:
    content = _read(directory / "config.json", dict[str, Any])
    activation = str(content.get("activation_function", "")).rpartition(".")[2]
    if activation not in _ACTIVATIONS:
        raise UnsupportedSetting(f"the activation {activation!r} of {directory} is not implemented")
    try:
        sizes = int(content["in_features"]), int(content["out_features"])
    except (KeyError, TypeError, ValueError) as error:
        raise ModelConfigError(f"{directory / 'config.json'} does not give the sizes of its layer") from error
    return DenseFile(directory, *sizes, bool(content.get("bias", True)), activation)


def _max_tokens(directory: Path) -> int | None:
    path = directory / "sentence_bert_config.json"
    limit = _read(path, dict[str, Any]).get("max_seq_length") if path.is_file() else None
    return limit if isinstance(limit, int) and limit > 0 else None


def _read(path: Path, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (OSError, msgspec.DecodeError) as error:
        raise ModelConfigError(f"{path} cannot be read: {error}") from error
