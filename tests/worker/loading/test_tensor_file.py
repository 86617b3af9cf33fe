"""Safetensors files as the library writes them are read; files that are none, or lie, are refused."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from octavo.worker.loading.tensor_file import StoredTensor, TensorFileError, TensorPart, stored_tensors

STORED = {
    "matrix": torch.arange(6, dtype=torch.float32).view(2, 3),
    "rounded": torch.arange(6, dtype=torch.bfloat16),
    "half": torch.ones(3, dtype=torch.float16),
    "double": torch.ones(3, dtype=torch.float64),
    "small": torch.arange(4, dtype=torch.float32).to(torch.float8_e4m3fn),
    "smaller": torch.arange(4, dtype=torch.float32).to(torch.float8_e5m2),
    "ids": torch.arange(3),
    "int": torch.arange(3, dtype=torch.int32),
    "short": torch.arange(3, dtype=torch.int16),
    "signed": torch.arange(3, dtype=torch.int8),
    "bytes": torch.arange(3, dtype=torch.uint8),
    "mask": torch.tensor([True, False]),
    "scalar": torch.tensor(1.5),
    "nothing": torch.empty(0, 4),
}


def write(path: Path, header: Any, content: bytes = b"") -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + content)
    return path


def entry(**changes: Any) -> dict[str, Any]:
    return {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **changes}}


def test_every_tensor_is_read_as_it_was_written(tmp_path: Path) -> None:
    save_file(STORED, tmp_path / "file", metadata={"format": "pt"})
    found = stored_tensors(tmp_path / "file")
    assert found.keys() == STORED.keys()
    for name, tensor in STORED.items():
        read = found[name].read()
        assert (found[name].shape, read.dtype) == (tuple(tensor.shape), tensor.dtype), name
        assert torch.equal(read.view(torch.uint8), tensor.view(torch.uint8)) if tensor.dim() else read == tensor, name


def test_a_tensor_is_in_memory_of_its_own(tmp_path: Path) -> None:
    save_file({"a": torch.ones(5000)}, tmp_path / "file")
    tensor = stored_tensors(tmp_path / "file")["a"].read()
    assert str(tmp_path) not in Path("/proc/self/maps").read_text(encoding="utf-8")
    tensor.zero_()
    assert stored_tensors(tmp_path / "file")["a"].read().sum() == 5000


@pytest.fixture
def matrix(tmp_path: Path) -> StoredTensor:
    """[300, 200], each element its place."""
    save_file({"before": torch.ones(7), "matrix": torch.arange(60_000).view(300, 200)}, tmp_path / "file")
    return stored_tensors(tmp_path / "file")["matrix"]


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes that each read from a file has asked for, from now on."""
    sizes: list[int] = []
    preadv = os.preadv

    def counted(file: int, buffers: list[memoryview], offset: int) -> int:
        sizes.extend(map(len, buffers))
        return preadv(file, buffers, offset)

    monkeypatch.setattr(os, "preadv", counted)
    return sizes


@pytest.mark.parametrize(
    ("part", "sizes"),
    [
        (None, [480_000]),
        (TensorPart(0, (range(10, 40),)), [48_000]),
        (TensorPart(0, (range(10, 40), range(200, 201))), [48_000, 1600]),
        (TensorPart(1, (range(50, 60),)), [80] * 300),
        (TensorPart(1, (range(5), range(50, 60))), [40, 80] * 300),
        (TensorPart(1, (range(200),)), [480_000]),
        (TensorPart(0, (range(5, 5),)), []),
    ],
)
def test_of_a_part_no_other_byte_is_read(
    matrix: StoredTensor, reads: list[int], part: TensorPart | None, sizes: list[int]
) -> None:
    expected = torch.arange(60_000).view(300, 200)
    if part:
        places = torch.tensor([place for each in part.ranges for place in each], dtype=torch.int64)
        expected = expected.index_select(part.dim, places)
    assert torch.equal(matrix.read(part), expected)
    assert reads == sizes


def test_what_the_system_reads_in_pieces_is_read_to_its_end(
    matrix: StoredTensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    preadv = os.preadv
    monkeypatch.setattr(os, "preadv", lambda file, buffers, offset: preadv(file, [buffers[0][:1000]], offset))
    assert torch.equal(matrix.read(), torch.arange(60_000).view(300, 200))


def test_a_part_that_is_not_there_is_refused(matrix: StoredTensor) -> None:
    with pytest.raises(ValueError, match=r"of a tensor \[300, 200\]"):
        matrix.read(TensorPart(0, (range(299, 301),)))


@pytest.mark.parametrize(
    ("header", "why"),
    [
        (b"{", "truncated"),
        (b"[]", "Expected `object`"),
        ({"a": [1]}, "Expected `object`"),
        (entry(dtype="F3"), "dtype F3 is none of F64"),
        (entry(shape=[3]), r"8 bytes for \[3\] of F32"),
        (entry(shape=[-2]), "Expected `int` >= 0"),
        (entry(data_offsets=[8, 0]), r"-8 bytes for \[2\]"),
        (entry(data_offsets=[8, 16]), r"bytes of at least"),
        (entry(data_offsets=[1 << 70, (1 << 70) + 8]), "is no readable"),
    ],
)
def test_a_header_that_cannot_be_is_refused(tmp_path: Path, header: Any, why: str) -> None:
    with pytest.raises(TensorFileError, match=f"is no readable safetensors file: .*{why}|{why}"):
        stored_tensors(write(tmp_path / "file", header, bytes(8)))


@pytest.mark.parametrize("content", [b"", b"\0" * 64, b"\xff" * 64])
def test_a_file_of_another_kind_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(TensorFileError, match="is no readable safetensors file"):
        stored_tensors(tmp_path / "file")


def test_a_file_that_shrinks_is_not_read(tmp_path: Path) -> None:
    tensor = stored_tensors(write(tmp_path / "file", entry(), bytes(8)))["a"]
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(TensorFileError, match="has become shorter"):
        tensor.read()
    with pytest.raises(TensorFileError, match="has become shorter"):
        tensor.read(TensorPart(0, (range(1, 2),)))
