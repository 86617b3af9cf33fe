"""Weight files that are wrong are refused by name."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from octavo.worker.loading.tensor_file import TensorPart
from octavo.worker.loading.weights import Checkpoint, WeightsError


def write(directory: Path, **tensors: torch.Tensor) -> Path:
    save_file(tensors, directory / "model.safetensors")
    return directory


def test_takes_each_tensor_as_stored(tmp_path: Path) -> None:
    stored = torch.randn(2, 3).bfloat16()
    checkpoint = Checkpoint(write(tmp_path, a=stored))
    assert torch.equal(checkpoint.take("a", (2, 3)), stored)
    checkpoint.finish()


def test_a_part_that_is_taken_is_all_that_this_process_needs(tmp_path: Path) -> None:
    stored = torch.randn(4, 6)
    checkpoint = Checkpoint(write(tmp_path, a=stored))
    assert torch.equal(checkpoint.take("a", (4, 6), TensorPart(1, (range(2, 5),))), stored[:, 2:5])
    checkpoint.finish()
    with pytest.raises(WeightsError, match=r"is \[4, 6\]; config\.json makes it \[4, 3\]"):
        checkpoint.take("a", (4, 3), TensorPart(1, (range(2, 3),)))


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=r"no tensor 'b', which its config\.json calls for"):
        Checkpoint(write(tmp_path, a=torch.zeros(1))).take("b", (1,))


def test_a_tensor_of_another_shape_is_named_with_both_shapes(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=r"'a' .* is \[2, 3\]; config\.json makes it \[3, 2\]"):
        Checkpoint(write(tmp_path, a=torch.zeros(2, 3))).take("a", (3, 2))


def test_a_tensor_without_a_place_is_named_unless_dropped(tmp_path: Path) -> None:
    checkpoint = Checkpoint(write(tmp_path, a=torch.zeros(1), extra=torch.zeros(1), table=torch.zeros(1)))
    checkpoint.take("a", (1,))
    checkpoint.drop("table")
    checkpoint.drop("not there")
    with pytest.raises(WeightsError, match=r"1 tensors that its config\.json has no place for: extra"):
        checkpoint.finish()


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth"])
def test_formats_that_can_run_code_are_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"")
    command = rf"octavo convert-weights {tmp_path} --output {tmp_path}-safetensors"
    with pytest.raises(WeightsError, match=rf"holds {name}, a format that can run code.*`{command}`"):
        Checkpoint(tmp_path)


def test_a_directory_without_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=r"holds neither .* is the download complete.*--load-format dummy"):
        Checkpoint(tmp_path)


def test_a_dtype_that_is_not_known_is_refused(tmp_path: Path) -> None:
    header = json.dumps({"a": {"dtype": "F3", "shape": [1], "data_offsets": [0, 4]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    with pytest.raises(WeightsError, match=r"no readable safetensors file.*F3"):
        Checkpoint(tmp_path)


def test_a_file_that_shrinks_under_its_reader_is_refused(tmp_path: Path) -> None:
    checkpoint = Checkpoint(write(tmp_path, a=torch.zeros(1000)))
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(WeightsError, match="has become shorter"):
        checkpoint.take("a", (1000,))


def test_shards_are_one_checkpoint(tmp_path: Path) -> None:
    first, second = torch.randn(2, 3), torch.randn(4)
    save_file({"a": first}, tmp_path / "model-1.safetensors")
    save_file({"b": second}, tmp_path / "model-2.safetensors")
    weight_map = {"a": "model-1.safetensors", "b": "model-2.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    checkpoint = Checkpoint(tmp_path)
    assert checkpoint.shapes() == {"a": (2, 3), "b": (4,)}
    assert checkpoint.num_bytes == sum(path.stat().st_size for path in tmp_path.glob("*.safetensors"))
    for name, shape in checkpoint.shapes().items():
        assert torch.equal(checkpoint.take(name, shape), {"a": first, "b": second}[name])
    checkpoint.finish()


def test_a_truncated_file_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, a=torch.zeros(1000)) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(WeightsError, match="no readable safetensors file"):
        Checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ("{", "is no index"),
        ("[]", "is no index"),
        (json.dumps({"weight_map": {"a": 1}}), "is no index"),
        (json.dumps({"weight_map": {"a": "absent.safetensors"}}), "names 'absent.safetensors'"),
        (json.dumps({"weight_map": {"a": "../model.safetensors"}}), "names '../model.safetensors'"),
    ],
)
def test_a_bad_index_is_refused(tmp_path: Path, index: str, message: str) -> None:
    write(tmp_path, a=torch.zeros(1))
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(WeightsError, match=message):
        Checkpoint(tmp_path)
