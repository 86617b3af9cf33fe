"""The numbers of a model directory that the fake model needs."""

import json
from pathlib import Path
from typing import Any

from octavo.runtime.models.directory import ModelDirectoryError


def read_positive(directory: Path, name: str) -> int:
    """Returns a positive number of config.json. Raises `ModelDirectoryError` if there is none."""
    value = _read_json(directory / "config.json").get(name)
    if not isinstance(value, int) or value < 1:
        raise ModelDirectoryError(f"{directory}/config.json has no positive {name}; the fake device needs it")
    return value


def read_eos_token_ids(directory: Path) -> set[int]:
    """Returns the EOS ids of config.json and of generation_config.json."""
    return {token for name in ("config.json", "generation_config.json") for token in _eos(directory / name)}


def _eos(path: Path) -> list[int]:
    value = _read_json(path).get("eos_token_id") if path.is_file() else None
    return [value] if isinstance(value, int) else list(value or [])


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ModelDirectoryError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(content, dict):
        raise ModelDirectoryError(f"{path} holds no JSON object")
    return content
