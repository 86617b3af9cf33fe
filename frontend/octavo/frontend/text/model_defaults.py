"""Reads what a model directory says about generation: EOS ids, context length, and recommended sampling."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from octavo.frontend.request.request import FIELDS, GenerationRequest, bounds_of
from octavo.runtime.models.directory import CONTEXT_KEYS, ModelDirectoryError
from octavo.wire.sampling import DRAWING, NEUTRAL

# The sampling fields that generation_config.json may hold.
_RECOMMENDED: Final = [name for name, field in FIELDS.items() if field.recommended]


@dataclass(frozen=True)
class ModelDefaults:
    """Holds the values for parameters that a request leaves out, and the model's limits in tokens.

    `sampling` has a value for each field of `NEUTRAL`.
    """

    eos_token_ids: frozenset[int]
    max_model_len: int
    vocab_size: int
    sampling: Mapping[str, float]
    # The directory says how to sample, or not to sample.
    recommends_sampling: bool = False
    # None: as many tokens as there is room for.
    max_new_tokens: int | None = None

    @property
    def recommended(self) -> dict[str, float]:
        """Returns the values that the directory may recommend."""
        return {name: self.sampling[name] for name in _RECOMMENDED}

    def in_force(self, request: GenerationRequest) -> dict[str, Any]:
        """Returns the request's sampling fields, with these defaults for those left out; a beam search draws none."""
        defaults = {**self.sampling, **({name: NEUTRAL[name] for name in DRAWING} if request.beam else {})}
        asked = {name: getattr(request, name) for name in defaults}
        return defaults | {name: value for name, value in asked.items() if value is not None}


def read_model_defaults(directory: Path, generation_config: str = "auto") -> ModelDefaults:
    """Reads config.json and generation_config.json (optional); with `generation_config` "none" only its EOS ids.

    Tokens are sampled if the file says `do_sample`, or does not say but recommends a way to sample; else they are
    chosen greedily. Values that the files leave out are neutral (temperature 1 where tokens are sampled). Raises
    `ModelDirectoryError` for files with values that cannot be used.
    """
    config = read_json(directory / "config.json")
    generation = read_json(directory / "generation_config.json", missing={})
    text_config = _text_config(directory, config)
    vocab_size = _size(directory, text_config, ("vocab_size",))
    recommended = generation if generation_config == "auto" else {}
    defaults = ModelDefaults(
        eos_token_ids=_eos_token_ids(directory, generation, text_config, vocab_size),
        max_model_len=_size(directory, text_config, CONTEXT_KEYS),
        vocab_size=vocab_size,
        sampling=_sampling(recommended),
        recommends_sampling=any(recommended.get(name) is not None for name in (*DRAWING, "do_sample")),
        max_new_tokens=_present(recommended, "max_new_tokens", None),
    )
    _check_ranges(directory, defaults)
    return defaults


def read_json(path: Path, missing: dict[str, Any] | None = None) -> dict[str, Any]:
    """Reads the JSON object in `path`; returns `missing`, if that is given, where there is no file.

    Raises `ModelDirectoryError`.
    """
    if missing is not None and not path.is_file():
        return missing
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ModelDirectoryError(f"cannot read {path}: {error}") from error
    if not isinstance(content, dict):
        raise ModelDirectoryError(f"{path} holds no JSON object")
    return content


def _text_config(directory: Path, config: dict[str, Any]) -> dict[str, Any]:
    """Returns the part of `config` about text, for a model may also read or write something else."""
    part = config.get("text_config") or config
    if not isinstance(part, dict):
        raise ModelDirectoryError(f"{directory / 'config.json'} has a text_config that is no JSON object: {part!r}")
    return part


def _check_ranges(directory: Path, defaults: ModelDefaults) -> None:
    """Raises `ModelDirectoryError` for a default out of its range, which no client could mend."""
    path = directory / "generation_config.json"
    for name, value in {**defaults.recommended, "max_new_tokens": defaults.max_new_tokens}.items():
        bounds = bounds_of(name)
        whole = isinstance(value, int) or not bounds.whole
        if value is not None and not (_is_number(value) and whole and bounds.holds(value)):
            raise ModelDirectoryError(f"{path} has a {name} of {value!r}, but it must be {bounds.rule}")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _sampling(recommended: dict[str, Any]) -> dict[str, Any]:
    found = {name: _present(recommended, name, NEUTRAL[name]) for name in _RECOMMENDED}
    temperature = _present(recommended, "temperature", 1.0) if _samples(recommended) else NEUTRAL["temperature"]
    return {**NEUTRAL, **found, "temperature": temperature}


def _samples(recommended: dict[str, Any]) -> bool:
    """Tells whether tokens are drawn for a request that sets no temperature."""
    names_a_way = any(recommended.get(name) is not None for name in DRAWING)
    return bool(_present(recommended, "do_sample", names_a_way))


def _size(directory: Path, config: dict[str, Any], names: Sequence[str]) -> int:
    """Returns the size under the first of `names` in config.json, else the default of transformers for the family."""
    found = next((config[name] for name in names if name in config), None) or _usual_size(directory, names)
    if not isinstance(found, int) or found < 1:
        raise ModelDirectoryError(f"{directory / 'config.json'} has no usable {' or '.join(names)}: {found!r}")
    return found


def _usual_size(directory: Path, names: Sequence[str]) -> Any:
    # Few models need transformers here, and its import is large.
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(str(directory), local_files_only=True, trust_remote_code=False)
        text_config = config.get_text_config(decoder=True)
    except Exception as error:  # A configuration is free text to many classes, which raise as they like.
        raise ModelDirectoryError(f"cannot read {directory / 'config.json'}: {' '.join(str(error).split())}") from error
    return next((found for name in names if (found := getattr(text_config, name, None))), None)


def _eos_token_ids(
    directory: Path, generation: dict[str, Any], config: dict[str, Any], vocab_size: int
) -> frozenset[int]:
    found = _present(generation, "eos_token_id", _present(config, "eos_token_id", []))
    ids = found if isinstance(found, list) else [found]
    if not all(isinstance(token_id, int) and 0 <= token_id < vocab_size for token_id in ids):
        raise ModelDirectoryError(
            f"{directory} has an eos_token_id of {found!r}, but its vocabulary ends at {vocab_size - 1}: correct"
            " generation_config.json or config.json"
        )
    return frozenset(ids)


def _present(values: dict[str, Any], key: str, default: Any) -> Any:
    value = values.get(key)
    return default if value is None else value
