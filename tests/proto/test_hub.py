"""Models of the hub, without one: its library's download is replaced, or finds all it needs in its cache."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import errors
from huggingface_hub.utils._paths import filter_repo_objects

from octavo.runtime.models.directory import ModelDirectoryError, model_name, resolve_model
from octavo.runtime.models.hub import HubError, fetch, fetch_gguf, hub_name, is_hub_id, split_tag
from octavo.testing.small.tiny_gguf import write_gguf

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def write_cached(cache: Path, model: str, *files: str) -> Path:
    """A model in a cache as the hub's library lays it out: a snapshot of links into blobs, and what `main` is."""
    root = cache / f"models--{model.replace('/', '--')}"
    snapshot = root / "snapshots" / COMMIT
    for directory in (snapshot, root / "blobs", root / "refs"):
        directory.mkdir(parents=True)
    (root / "refs" / "main").write_text(COMMIT)
    for number, name in enumerate(files):
        (root / "blobs" / str(number)).write_text("{}")
        (snapshot / name).symlink_to(root / "blobs" / str(number))
    return snapshot


class Download:
    """In place of `snapshot_download`: writes `files` and records what it was asked for, or fails with `error`."""

    def __init__(self, directory: Path, *files: str, error: Exception | None = None) -> None:
        self.directory = directory
        self.files = files
        self.error = error
        self.asked: list[tuple[str, dict[str, Any]]] = []

    def __call__(self, name: str, **options: Any) -> str:
        self.asked.append((name, options))
        if self.error:
            raise self.error
        patterns = {name: options[name] for name in ("allow_patterns", "ignore_patterns")}
        for file in filter_repo_objects(self.files, **patterns):
            (self.directory / file).write_text("{}")
        return str(self.directory)


@pytest.fixture
def download(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Download:
    files = (
        *("config.json", "tokenizer.json", "merges.txt", "tokenizer.model", "chat_template.jinja", "README.md"),
        *("model.safetensors", "pytorch_model.bin", "consolidated.safetensors", "onnx/model.json", "model.py"),
    )
    download = Download(tmp_path, *files)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    return download


def answered(kind: type[errors.HfHubHTTPError]) -> Exception:
    """An error that the hub itself gave."""
    response: Any = SimpleNamespace(headers={}, request=None)
    return kind("the hub says no", response=response)


@pytest.mark.parametrize("text", ["org/name", "Org-1/name_2.5", "org/name@main", "org/name@refs/pr/1"])
def test_what_is_an_id_of_the_hub(text: str) -> None:
    assert is_hub_id(text)


@pytest.mark.parametrize("text", ["name", "/org/name", "./name", "../name", "a/b/c", "org/", "/name", "org/name@", ""])
def test_what_is_none(text: str) -> None:
    assert not is_hub_id(text)


def test_what_serving_needs_is_fetched_and_nothing_that_holds_code(download: Download) -> None:
    assert fetch("org/name") == download.directory
    assert sorted(path.name for path in download.directory.iterdir()) == [
        *("chat_template.jinja", "config.json", "merges.txt", "model.safetensors", "tokenizer.json", "tokenizer.model"),
    ]
    [(name, options)] = download.asked
    assert (name, options["revision"]) == ("org/name", None)


def test_a_revision_may_be_named(download: Download) -> None:
    fetch("org/name@v1.0")
    assert (download.asked[0][0], download.asked[0][1]["revision"]) == ("org/name", "v1.0")


def test_weights_are_left_out_where_they_are_random(download: Download) -> None:
    assert resolve_model("org/name", "dummy") == download.directory
    assert not list(download.directory.glob("*.safetensors"))


def test_a_model_with_pickled_weights_alone_is_refused_with_the_command(download: Download) -> None:
    download.files = ("config.json", "pytorch_model.bin")
    with pytest.raises(HubError, match=r"no \*\.safetensors .*`octavo convert-weights org/name --output name`"):
        fetch("org/name")


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (answered(errors.RepositoryNotFoundError), "the hub has no model org/name"),
        (answered(errors.GatedRepoError), "accepted its terms"),
        (answered(errors.RevisionNotFoundError), "no such revision"),
        (errors.LocalEntryNotFoundError("no connection"), "cannot be reached"),
        (errors.OfflineModeIsEnabled("offline"), "HF_HUB_OFFLINE is set"),
        (ConnectionError("Connection\nrefused"), "fetching org/name from the hub failed: Connection refused"),
        (OSError(28, "No space left on device"), "No space left"),
    ],
)
def test_what_keeps_a_model_away_is_one_line(download: Download, error: Exception, why: str) -> None:
    download.error = error
    with pytest.raises(ModelDirectoryError, match=why) as caught:
        resolve_model("org/name")
    assert "no directory org/name is here" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_directory_of_that_name_wins(download: Download, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = download.directory / "org" / "name"
    directory.mkdir(parents=True)
    (directory / "config.json").write_text("{}")
    monkeypatch.chdir(download.directory)
    assert resolve_model("org/name") == directory
    assert download.asked == []


def test_a_snapshot_is_called_by_its_models_name(tmp_path: Path) -> None:
    snapshot = write_cached(tmp_path, "org/name--with-dashes", "config.json")
    assert model_name(snapshot) == hub_name(snapshot) == "org/name--with-dashes"
    assert hub_name(tmp_path) is None


@pytest.mark.parametrize(
    ("model", "lines"),
    [
        ("org/kept", "{cache}/models--org--kept/snapshots/" + COMMIT),
        ("org/other", "no directory org/other is here, and the hub cannot be reached (or HF_HUB_OFFLINE is set)"),
        ("org/pickled", "org/pickled has no *.safetensors on the hub"),
    ],
)
def test_offline_the_cache_is_all_there_is(tmp_path: Path, model: str, lines: str) -> None:
    write_cached(tmp_path, "org/kept", "config.json", "tokenizer.json", "model.safetensors")
    write_cached(tmp_path, "org/pickled", "config.json", "pytorch_model.bin")
    assert offline(tmp_path, model).startswith(lines.format(cache=tmp_path))


def offline(cache: Path, model: str) -> str:
    """The one line that a process without a network, but with the hub's `cache`, says of `model`."""
    script = (
        "import sys; from octavo.runtime.models.directory import ModelDirectoryError, resolve_model\n"
        "try: print(resolve_model(sys.argv[1]))\n"
        "except ModelDirectoryError as error: print(error)\n"
    )
    environment = {**os.environ, "HF_HUB_CACHE": str(cache), "OCTAVO_CACHE": str(cache), "HF_HUB_OFFLINE": "1"}
    result = subprocess.run(
        [sys.executable, "-c", script, model], env=environment, cwd=cache, capture_output=True, text=True, timeout=60
    )
    assert result.stdout.count("\n") == 1, result.stderr
    return result.stdout.strip()


# -- GGUF files --------------------------------------------------------------------------------------------------------

QUANTIZED = ["mmproj-model-Q4_K_M.gguf", "model-Q8_0.gguf", "model-q4_k_m.gguf", "model.Q6_K.gguf", "README.md"]
SPLIT = ["BF16/model-BF16-00001-of-00002.gguf", "BF16/model-BF16-00002-of-00002.gguf"]


class Repository:
    """In place of the hub: lists `files`, and writes those that are asked for."""

    def __init__(self, directory: Path, files: list[str], content: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
        self.directory = directory
        self.files = files
        self.content = content
        self.fetched: list[str] = []
        monkeypatch.setattr(huggingface_hub, "list_repo_files", lambda *_, **__: self.files)
        monkeypatch.setattr(huggingface_hub, "snapshot_download", self.download)

    def download(self, _: str, *, allow_patterns: list[str], ignore_patterns: Any = None, **__: Any) -> str:
        for file in filter_repo_objects(self.files, allow_patterns=allow_patterns, ignore_patterns=ignore_patterns):
            self.fetched.append(file)
            (self.directory / file).parent.mkdir(parents=True, exist_ok=True)
            (self.directory / file).write_bytes(self.content)
        return str(self.directory)


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Repository:
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "cache"))
    content = write_gguf(tmp_path / "tiny.gguf").read_bytes()
    return Repository(tmp_path / "snapshot", [*QUANTIZED, *SPLIT], content, monkeypatch)


@pytest.mark.parametrize(
    ("tag", "file"),
    [
        ("Q4_K_M", "model-q4_k_m.gguf"),
        ("q8_0", "model-Q8_0.gguf"),
        ("Q6_K", "model.Q6_K.gguf"),
        (None, "model-q4_k_m.gguf"),
        ("BF16", SPLIT[0]),
    ],
)
def test_a_quantization_is_the_first_file_of_that_name(repository: Repository, tag: str | None, file: str) -> None:
    assert fetch_gguf("org/name", tag) == repository.directory / file
    assert repository.fetched == (SPLIT if tag == "BF16" else [file])


@pytest.mark.parametrize(
    ("files", "file"), [(["a-Q8_0.gguf", "a-F16.gguf"], "a-Q8_0.gguf"), (["b-Q5_0.gguf", "a-F16.gguf"], "a-F16.gguf")]
)
def test_without_a_usual_quantization_another_is_taken(repository: Repository, files: list[str], file: str) -> None:
    repository.files = files
    assert fetch_gguf("org/name", None).name == file


def test_a_quantization_that_is_not_there_names_those_that_are(repository: Repository) -> None:
    with pytest.raises(ModelDirectoryError, match=r"org/name has no GGUF file of Q5_K_M .*; it has .*model-Q8_0\.gguf"):
        resolve_model("org/name:Q5_K_M")
    assert repository.fetched == []


def test_a_quantization_of_the_hub_is_served(repository: Repository) -> None:
    assert resolve_model("org/name:Q6_K").name == "model.Q6_K"


def test_a_model_with_gguf_files_alone_needs_no_quantization(repository: Repository) -> None:
    assert resolve_model("org/name").name == "model-q4_k_m"
    assert repository.fetched == ["model-q4_k_m.gguf"]


def test_a_quantization_is_found_in_the_cache_without_a_network(tmp_path: Path) -> None:
    snapshot = write_cached(tmp_path, "org/name", "config.json", "model-Q4_0.gguf")
    write_gguf(snapshot / "model-Q4_0.gguf")
    found = offline(tmp_path, "org/name:Q4_0")
    assert Path(found).parts[-3:] == ("gguf", Path(found).parts[-2], "model-Q4_0")
    assert "has no GGUF file of Q8_0" in offline(tmp_path, "org/name:Q8_0")


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("org/name:Q4_0", ("org/name", "Q4_0")),
        ("org/name@main:Q4_0", ("org/name@main", "Q4_0")),
        ("org/name", ("org/name", None)),
        ("/a/b:c", ("/a/b:c", None)),
        ("org/name:", ("org/name:", None)),
    ],
)
def test_what_names_a_quantization(text: str, parts: tuple[str, str | None]) -> None:
    assert split_tag(text) == parts
