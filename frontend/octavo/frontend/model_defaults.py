"""What a model directory says about generation: EOS ids, context length, and the sampling its makers recommend."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from octavo.frontend.validation import RANGES
from octavo.wire.model_directory import ModelDirectoryError

GREEDY = 0.0


@dataclass(frozen=True)
class ModelDefaults:
    """The values that stand in for what a request leaves out."""

    eos_token_ids: frozenset[int]
    max_model_len: int
    vocab_size: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float

    def without_sampling(self) -> "ModelDefaults":
        """The same where tokens are not drawn."""
        return replace(self, temperature=GREEDY, top_p=1.0, top_k=0, min_p=0.0)


def read_model_defaults(directory: Path) -> ModelDefaults:
    """Reads generation_config.json (optional) and config.json.

    Without `do_sample` a model is greedy, as in transformers; what is left out is neutral (temperature 1, top_p 1,
    top_k 0, min_p 0, repetition_penalty 1). Raises `ModelDirectoryError` for files that are not what they should be, or
    name code to be run.
    """
    config = read_json(directory / "config.json")
    generation = read_json(directory / "generation_config.json", missing={})
    for name in ("config.json", "tokenizer_config.json"):
        _refuse_code(directory / name)
    text_config = config.get("text_config", config)
    defaults = ModelDefaults(
        eos_token_ids=_eos_token_ids(generation, text_config),
        max_model_len=_size(directory, text_config, "max_position_embeddings", "n_positions"),
        vocab_size=_size(directory, text_config, "vocab_size"),
        temperature=float(_present(generation, "temperature", 1.0)) if generation.get("do_sample") else GREEDY,
        top_p=float(_present(generation, "top_p", 1.0)),
        top_k=int(_present(generation, "top_k", 0)),
        min_p=float(_present(generation, "min_p", 0.0)),
        repetition_penalty=float(_present(generation, "repetition_penalty", 1.0)),
    )
    _check_ranges(directory, defaults)
    return defaults


def read_json(path: Path, missing: dict[str, Any] | None = None) -> dict[str, Any]:
    """The JSON object in `path`, or `missing` where there is no file and that is given."""
    if missing is not None and not path.is_file():
        return missing
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ModelDirectoryError(f"cannot read {path}: {error}") from error
    if not isinstance(content, dict):
        raise ModelDirectoryError(f"{path} holds no JSON object")
    return content


def _check_ranges(directory: Path, defaults: ModelDefaults) -> None:
    """Nobody else would tell a client what is wrong with a value that he has left out."""
    for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty"):
        low, high, rule = RANGES[name]
        if not low <= getattr(defaults, name) <= high:
            path, value = directory / "generation_config.json", getattr(defaults, name)
            raise ModelDirectoryError(f"{path} has a {name} of {value}, but it must be {rule}")


def _size(directory: Path, config: dict[str, Any], *names: str) -> int:
    found = next((config[name] for name in names if name in config), None)
    if not isinstance(found, int) or found < 1:
        raise ModelDirectoryError(f"{directory / 'config.json'} has no usable {' or '.join(names)}: {found!r}")
    return found


def _refuse_code(path: Path) -> None:
    if "auto_map" in read_json(path, missing={}):
        raise ModelDirectoryError(
            f"{path} has an auto_map, which names Python code to run; Octavo runs none of a model's"
        )


def _eos_token_ids(generation: dict[str, Any], config: dict[str, Any]) -> frozenset[int]:
    ids = _present(generation, "eos_token_id", config.get("eos_token_id"))
    if ids is None:
        return frozenset()
    return frozenset(ids if isinstance(ids, list) else [ids])


def _present(values: dict[str, Any], key: str, default: Any) -> Any:
    value = values.get(key)
    return default if value is None else value
