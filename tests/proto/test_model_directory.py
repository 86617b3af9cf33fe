import json
from pathlib import Path

import pytest

from octavo.runtime.models.directory import (
    BUNDLED_MODEL,
    ModelDirectoryError,
    fingerprint,
    model_name,
    prepared_directory,
    resolve_model,
)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = tmp_path / "some-model"
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    (directory / "tokenizer.json").write_text("{}")
    header = json.dumps({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    (directory / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"\0\0\0\0")
    return directory


def test_a_path_is_its_own_directory(model: Path) -> None:
    assert resolve_model(str(model)) == model
    assert model_name(model) == "some-model"


def test_the_bundled_model_lives_in_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path))
    with pytest.raises(ModelDirectoryError, match="run `octavo prepare-model`"):
        resolve_model(BUNDLED_MODEL)
    directory = prepared_directory(BUNDLED_MODEL)
    directory.mkdir(parents=True)
    (directory / "config.json").write_text("{}")
    assert resolve_model(BUNDLED_MODEL) == directory
    assert tmp_path in directory.parents
    assert model_name(directory) == BUNDLED_MODEL


def test_a_directory_without_configuration_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelDirectoryError, match=r"holds config\.json, or a model of the hub as org/name"):
        resolve_model(str(tmp_path))


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"])
def test_the_fingerprint_covers_configuration_and_tokenizer(model: Path, name: str) -> None:
    before = fingerprint(model)
    assert fingerprint(model) == before
    (model / name).write_text('{"changed": 1}')
    assert fingerprint(model) != before


def test_random_weights_have_a_fingerprint_of_their_own_that_needs_no_file(model: Path) -> None:
    read, random = fingerprint(model), fingerprint(model, "dummy")
    assert read == fingerprint(model, "safetensors") != random
    (model / "model.safetensors").unlink()
    assert fingerprint(model, "dummy") == random
    (model / "config.json").write_text('{"changed": 1}')
    assert fingerprint(model, "dummy") != random


def test_the_fingerprint_covers_the_shape_of_the_weights(model: Path) -> None:
    before = fingerprint(model)
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes().replace(b"F32", b"F16"))
    assert fingerprint(model) != before
