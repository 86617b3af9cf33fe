"""A model directory's tokenizer is read once: from then on, its content says what was read."""

import subprocess
from pathlib import Path

import pytest

from octavo.frontend.text import tokenizer_cache
from octavo.frontend.text.tokenizer_files import read_tokenizer_files_apart
from octavo.runtime.models.directory import ModelDirectoryError
from octavo.testbed.tiny_model import write_byte_model
from octavo.testing.depth import deep


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "tokenizers"


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    write_byte_model(tmp_path / "model")
    return tmp_path / "model"


def forbid_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*_: object, **__: object) -> None:
        raise AssertionError("it was read once more")

    monkeypatch.setattr(subprocess, "run", run)


def test_what_was_read_is_not_read_again_wherever_it_lies(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = read_tokenizer_files_apart(directory)
    moved = directory.rename(tmp_path / "moved")
    forbid_reading(monkeypatch)
    again = read_tokenizer_files_apart(moved)
    assert (again.tokenizer, again.chat_template) == (first.tokenizer, first.chat_template)
    assert (first.directory, again.directory) == (str(directory), str(moved))


@pytest.mark.parametrize("name", ["chat_template.jinja", *deep("tokenizer_config.json", "additional/template.jinja")])
def test_what_has_changed_is_read_again(directory: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    read_tokenizer_files_apart(directory)
    forbid_reading(monkeypatch)
    (directory / name).parent.mkdir(exist_ok=True)
    (directory / name).write_text('{"chat_template": "another"}', encoding="utf-8")
    with pytest.raises(AssertionError, match="once more"):
        read_tokenizer_files_apart(directory)


def test_weights_are_not_looked_at(directory: Path) -> None:
    place = tokenizer_cache.place_of(directory)
    (directory / "model.safetensors").write_bytes(b"new weights")
    assert place is not None
    assert tokenizer_cache.place_of(directory) == place


def test_what_is_no_tokenizer_is_not_kept(directory: Path, cache: Path) -> None:
    (directory / "tokenizer.json").write_text("{}", encoding="utf-8")
    with pytest.raises(ModelDirectoryError):
        read_tokenizer_files_apart(directory)
    assert not cache.exists()


@pytest.mark.parametrize("mode", [0o602, *deep(0o620)])
def test_what_others_can_write_to_is_not_believed(directory: Path, mode: int) -> None:
    read_tokenizer_files_apart(directory)
    place = tokenizer_cache.place_of(directory)
    assert place is not None
    assert tokenizer_cache.read(place) is not None
    place.chmod(mode)
    assert tokenizer_cache.read(place) is None


def test_a_broken_entry_is_read_anew_and_mended(directory: Path) -> None:
    first = read_tokenizer_files_apart(directory)
    place = tokenizer_cache.place_of(directory)
    assert place is not None
    place.write_bytes(b"rubbish")
    assert read_tokenizer_files_apart(directory) == first
    assert place.read_bytes() != b"rubbish"


def test_a_cache_that_cannot_be_written_to_is_none(directory: Path, cache: Path) -> None:
    cache.parent.mkdir()
    cache.write_text("a file where the directory would be", encoding="utf-8")
    assert read_tokenizer_files_apart(directory).tokenizer
    assert read_tokenizer_files_apart(directory).tokenizer
