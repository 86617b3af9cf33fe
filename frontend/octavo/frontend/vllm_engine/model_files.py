"""Reads what gateways ask about the model: figures of its files, and its tokenizer as a zip archive."""

import hashlib
import io
import json
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from octavo.frontend.text.model_defaults import ModelDefaults, read_json, read_model_defaults

# Files that a tokenizer is loaded from; nothing else leaves the model's directory.
_TOKENIZER_FILES: Final = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
)
_CHUNK_BYTES: Final = 1 << 20
# One date for all, so that equal files make equal archives.
_EPOCH: Final = (1980, 1, 1, 0, 0, 0)


@dataclass(frozen=True)
class ModelFiles:
    """Holds what gateways ask about one model directory."""

    directory: Path
    config: dict[str, Any]
    defaults: ModelDefaults
    bos_token_id: int
    pad_token_id: int

    @property
    def architectures(self) -> list[str]:
        """Returns the names of transformers' classes."""
        return [str(name) for name in self.config.get("architectures") or ()]

    def default_sampling(self) -> str:
        """Returns the sampling values that replace fields left out of a request, as a JSON object."""
        return json.dumps(self.defaults.recommended)


def read_model_files(directory: Path, generation_config: str) -> ModelFiles:
    """Reads the config files of `directory`. Raises `ModelDirectoryError`."""
    config = read_json(directory / "config.json")
    generation = read_json(directory / "generation_config.json", missing={})
    return ModelFiles(
        directory,
        config,
        read_model_defaults(directory, generation_config),
        *(_token_id(name, generation, config) for name in ("bos_token_id", "pad_token_id")),
    )


def tokenizer_archive(directory: Path) -> bytes:
    """Returns a zip archive of the tokenizer's files: the same bytes for the same files."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in _TOKENIZER_FILES:
            if (directory / name).is_file():
                info = zipfile.ZipInfo(name, _EPOCH)
                info.compress_type = zipfile.ZIP_DEFLATED
                archive.writestr(info, (directory / name).read_bytes())
    return buffer.getvalue()


def chunks(archive: bytes) -> Iterator[tuple[bytes, str]]:
    """Yields the archive in parts of 1 MiB, the last with the SHA-256 of the whole, the others with an empty text."""
    digest = hashlib.sha256(archive).hexdigest()
    for start in range(0, len(archive), _CHUNK_BYTES):
        last = start + _CHUNK_BYTES >= len(archive)
        yield archive[start : start + _CHUNK_BYTES], digest if last else ""


def _token_id(name: str, generation: dict[str, Any], config: dict[str, Any]) -> int:
    """Returns a token id, 0 where there is none: the protocol has no other word for none."""
    found = generation.get(name, config.get(name))
    return found if isinstance(found, int) else 0
