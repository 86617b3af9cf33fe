"""Pickled weights become safetensors; what a pickle would run is not run."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from safetensors.torch import load_file

from octavo.worker.cli import prepare as convert_cli
from octavo.worker.loading.convert_weights import ConvertError, convert_weights
from octavo.worker.loading.weights import Checkpoint, WeightsError


@pytest.fixture
def source(tmp_path: Path) -> Path:
    directory = tmp_path / "pickled"
    directory.mkdir()
    for name in ("config.json", "tokenizer.json", "generation_config.json", "vocab.txt", "chat_template.jinja"):
        (directory / name).write_text(f'{{"name": "{name}"}}')
    (directory / "README.md").write_text("not wanted")
    return directory


def save(path: Path, content: Any, **options: Any) -> None:
    torch.save(content, path, **options)


def tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {"a": torch.randn(3, 4), "b": torch.randn(4, 3).T.bfloat16(), "c": torch.arange(3)}


@pytest.mark.parametrize("zipped", [True, False], ids=["archive", "before 1.6"])
def test_a_single_file_is_converted_with_all_that_lies_beside_it(source: Path, tmp_path: Path, zipped: bool) -> None:
    save(source / "pytorch_model.bin", tensors(), _use_new_zipfile_serialization=zipped)
    convert_weights(source, tmp_path / "new")
    converted = load_file(tmp_path / "new" / "model.safetensors")
    assert converted.keys() == tensors().keys()
    assert all(torch.equal(converted[name], tensor) for name, tensor in tensors().items())
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == [
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "vocab.txt",
    ]
    assert (tmp_path / "new" / "tokenizer.json").read_text() == (source / "tokenizer.json").read_text()


def test_tied_tensors_and_views_get_memory_of_their_own(source: Path, tmp_path: Path) -> None:
    table = torch.arange(12.0).view(4, 3)
    save(source / "pytorch_model.bin", {"embed": table, "head": table, "first": table[0], "turned": table.T})
    convert_weights(source, tmp_path / "new")
    converted = load_file(tmp_path / "new" / "model.safetensors")
    assert torch.equal(converted["embed"], table)
    assert torch.equal(converted["head"], table)
    assert torch.equal(converted["first"], table[0])
    assert torch.equal(converted["turned"], table.T)


def test_a_directory_is_not_converted_in_its_place(source: Path) -> None:
    save(source / "pytorch_model.bin", tensors())
    with pytest.raises(ConvertError, match="cannot be converted in its place"):
        convert_weights(source, source.parent / "." / source.name)
    assert not (source / "model.safetensors").exists()


def test_shards_are_converted_one_by_one(source: Path, tmp_path: Path) -> None:
    save(source / "pytorch_model-1.bin", {"a": torch.ones(2)})
    save(source / "pytorch_model-2.bin", {"b": torch.zeros(3), "c": torch.ones(1)})
    weight_map = {"a": "pytorch_model-1.bin", "b": "pytorch_model-2.bin", "c": "pytorch_model-2.bin"}
    (source / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    convert_weights(source, tmp_path / "new")
    checkpoint = Checkpoint(tmp_path / "new")
    assert checkpoint.shapes() == {"a": (2,), "b": (3,), "c": (1,)}
    assert torch.equal(checkpoint.take("c", (1,)), torch.ones(1))
    index = json.loads((tmp_path / "new" / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": 24}
    assert not (tmp_path / "new" / "pytorch_model.bin.index.json").exists()


class Hostile:
    """Unpickled, it would make a file."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.target),)


def test_a_pickle_that_would_run_code_is_refused_and_runs_nothing(source: Path, tmp_path: Path) -> None:
    save(source / "pytorch_model.bin", {"a": torch.ones(2), "b": Hostile(tmp_path / "touched")})
    with pytest.raises(ConvertError, match=r"pytorch_model\.bin is refused; it does not hold plain tensors alone"):
        convert_weights(source, tmp_path / "new")
    assert not (tmp_path / "touched").exists()
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ({"a": torch.ones(1), "step": 3}, "'step' is a int"),
        ({"state_dict": {"a": torch.ones(1)}}, "'state_dict' is a dict"),
        ([torch.ones(1)], "holds no table of tensors"),
        ({}, "holds no table of tensors"),
    ],
)
def test_what_is_no_table_of_tensors_is_refused(source: Path, tmp_path: Path, content: Any, why: str) -> None:
    save(source / "pytorch_model.bin", content)
    with pytest.raises(ConvertError, match=why):
        convert_weights(source, tmp_path / "new")


def test_a_file_that_is_cut_short_is_refused(source: Path, tmp_path: Path) -> None:
    save(source / "pytorch_model.bin", tensors())
    whole = (source / "pytorch_model.bin").read_bytes()
    (source / "pytorch_model.bin").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ConvertError, match="is refused"):
        convert_weights(source, tmp_path / "new")


def test_a_directory_that_cannot_be_meant_is_refused(source: Path, tmp_path: Path) -> None:
    with pytest.raises(ConvertError, match=r"holds no config\.json"):
        convert_weights(tmp_path, tmp_path / "new")
    with pytest.raises(ConvertError, match="0 weight files of other names"):
        convert_weights(source, tmp_path / "new")
    for name in ("one.pt", "two.pt"):
        save(source / name, tensors())
    with pytest.raises(ConvertError, match="2 weight files of other names where one"):
        convert_weights(source, tmp_path / "new")
    (source / "model.safetensors").touch()
    with pytest.raises(ConvertError, match="serve it as it is"):
        convert_weights(source, tmp_path / "new")


def test_an_index_that_leads_elsewhere_is_refused(source: Path, tmp_path: Path) -> None:
    (source / "pytorch_model.bin.index.json").write_text('{"weight_map": {"a": "../a.bin"}}')
    with pytest.raises(WeightsError, match=r"names '\.\./a\.bin'"):
        convert_weights(source, tmp_path / "new")


def command(*arguments: str) -> Result:
    return CliRunner().invoke(convert_cli.convert, list(arguments))


def test_the_command_prints_the_new_directory(source: Path, tmp_path: Path) -> None:
    save(source / "model.pt", tensors())
    result = command(str(source), "--output", str(tmp_path / "new"))
    assert (result.exit_code, result.stdout) == (0, f"{tmp_path / 'new'}\n")
    assert Checkpoint(tmp_path / "new").shapes().keys() == tensors().keys()


def test_the_command_fetches_from_the_hub(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(source / "pytorch_model.bin", tensors())
    asked = []

    def fetch(model: str, weight_files: str) -> Path:
        asked.append((model, weight_files))
        return source

    monkeypatch.setattr(convert_cli, "fetch", fetch)
    assert command("org/name", "--output", str(tmp_path / "new")).exit_code == 0
    assert asked == [("org/name", "*.bin")]


def test_the_command_says_in_one_line_why_not(source: Path, tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    save(source / "pytorch_model.bin", tensors())
    for arguments in ([str(tmp_path / "nowhere"), "--output", "x"], [str(source), "--output", str(tmp_path / "taken")]):
        result = command(*arguments)
        assert result.exit_code == 1
        assert result.stderr.startswith("Error: ")
        assert result.stderr.count("\n") == 1
