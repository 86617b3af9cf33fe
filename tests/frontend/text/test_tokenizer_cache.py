"""A model directory's tokenizer is read once: from then on, its content says what was read."""

import shutil
import subprocess
from pathlib import Path

import pytest

from octavo.frontend.text import tokenizer_cache
from octavo.frontend.text.tokenizer_files import TokenizerFiles, read_tokenizer_files_apart
from octavo.runtime.models.directory import ModelDirectoryError
from octavo.testbed.tiny_model import write_byte_model
from octavo.testing.depth import deep


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "tokenizers"


@pytest.fixture(scope="module")
def read_before(tmp_path_factory: pytest.TempPathFactory) -> tuple[TokenizerFiles, Path]:
    """What is read of a model that `directory` copies, and the cache since then."""
    directory, cache = tmp_path_factory.mktemp("model"), tmp_path_factory.mktemp("cache")
    write_byte_model(directory)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OCTAVO_CACHE", str(cache))
        return read_tokenizer_files_apart(directory), cache


@pytest.fixture
def first(read_before: tuple[TokenizerFiles, Path], cache: Path) -> TokenizerFiles:
    """What has been read: it is in the cache."""
    shutil.copytree(read_before[1], cache.parent)
    return read_before[0]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    write_byte_model(tmp_path / "model")
    return tmp_path / "model"


def forbid_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*_: object, **__: object) -> None:
        raise AssertionError("it was read once more")

    monkeypatch.setattr(subprocess, "run", run)


def test_what_was_read_is_not_read_again_wherever_it_lies(
    first: TokenizerFiles, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert first.directory != str(directory)
    forbid_reading(monkeypatch)
    again = read_tokenizer_files_apart(directory)
    assert (again.tokenizer, again.chat_template) == (first.tokenizer, first.chat_template)
    assert again.directory == str(directory)


@pytest.mark.parametrize("name", ["chat_template.jinja", *deep("tokenizer_config.json", "additional/template.jinja")])
@pytest.mark.usefixtures("first")
def test_what_has_changed_is_read_again(directory: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    forbid_reading(monkeypatch)
    read_tokenizer_files_apart(directory)
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
@pytest.mark.usefixtures("first")
def test_what_others_can_write_to_is_not_believed(directory: Path, mode: int) -> None:
    place = tokenizer_cache.place_of(directory)
    assert place is not None
    assert tokenizer_cache.read(place) is not None
    place.chmod(mode)
    assert tokenizer_cache.read(place) is None


def test_a_broken_entry_is_read_anew_and_mended(first: TokenizerFiles, directory: Path) -> None:
    place = tokenizer_cache.place_of(directory)
    assert place is not None
    place.write_bytes(b"rubbish")
    assert read_tokenizer_files_apart(directory).tokenizer == first.tokenizer
    assert place.read_bytes() != b"rubbish"


def test_a_cache_that_cannot_be_written_to_is_none(directory: Path, cache: Path) -> None:
    cache.parent.mkdir()
    cache.write_text("a file where the directory would be", encoding="utf-8")
    assert read_tokenizer_files_apart(directory).tokenizer
