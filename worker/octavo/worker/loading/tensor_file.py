"""The tensors of safetensors files: the parts of them that a process needs, read one by one.

Tensors are read one by one and not mapped. Mapped pages would count as this process's memory until the last tensor is
gone, beside the copies that are laid out for the machine; and a file that is truncated under a mapping ends the
process that reads it. The format: https://github.com/huggingface/safetensors#format
"""

import math
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from types import MappingProxyType
from typing import Annotated

import msgspec
import torch
from torch import Tensor

from octavo.kernels.native.memory import zeros
from octavo.runtime.models.directory import safetensors_header

_DTYPES = MappingProxyType(
    {
        "F64": torch.float64,
        "F32": torch.float32,
        "F16": torch.float16,
        "BF16": torch.bfloat16,
        "F8_E4M3": torch.float8_e4m3fn,
        "F8_E5M2": torch.float8_e5m2,
        "I64": torch.int64,
        "I32": torch.int32,
        "I16": torch.int16,
        "I8": torch.int8,
        "U8": torch.uint8,
        "BOOL": torch.bool,
    }
)
# The header's length, which comes before it.
_PREFIX_BYTES = 8
# The header's key for metadata, which is no tensor.
_METADATA = "__metadata__"
_Size = Annotated[int, msgspec.Meta(ge=0)]


@dataclass(frozen=True, slots=True)
class TensorPart:
    """Describes a part of a tensor: the places of dimension `dim` that `ranges` name, range after range, and all other
    dimensions."""

    dim: int
    ranges: tuple[range, ...]

    def shape(self, whole: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the part's shape in a tensor of shape `whole`. Raises `ValueError` if the ranges exceed it."""
        if not 0 <= self.dim < len(whole) or not all(_within(each, whole[self.dim]) for each in self.ranges):
            raise ValueError(f"{self} of a tensor {list(whole)}")
        return (*whole[: self.dim], sum(map(len, self.ranges)), *whole[self.dim + 1 :])

    def pieces(self, whole: tuple[int, ...]) -> Iterator[tuple[int, int]]:
        """Yields the places of the part's elements in a tensor of shape `whole`, in their order in the part.

        They are pairs of a first element and a number of elements; neighbours are joined.
        """
        before, size, after = math.prod(whole[: self.dim]), whole[self.dim], math.prod(whole[self.dim + 1 :])
        return _joined(
            ((row * size + each.start) * after, len(each) * after) for row, each in product(range(before), self.ranges)
        )


def _within(places: range, size: int) -> bool:
    return places.step == 1 and 0 <= places.start <= places.stop <= size


def _joined(pieces: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    start = end = 0
    for first, count in pieces:
        if first != end:
            if end > start:
                yield start, end - start
            start = first
        end = first + count
    if end > start:
        yield start, end - start


class TensorFileError(Exception):
    """Raised for a file that is no safetensors file, or not all of one."""


class _Entry(msgspec.Struct):
    dtype: str
    shape: tuple[_Size, ...]
    data_offsets: tuple[_Size, _Size]


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Describes a tensor in a file; `offset` is that of its first byte."""

    path: Path
    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def read(self, part: TensorPart | None = None) -> Tensor:
        """Reads the tensor, or `part` of it and no byte more, into memory of its own.

        Raises `TensorFileError` if the file has become shorter, `OSError`, or `ValueError` on a part that exceeds the
        tensor.
        """
        shape = self.shape if part is None else part.shape(self.shape)
        num_elements = math.prod(shape)
        if not num_elements:
            return torch.empty(shape, dtype=self.dtype)
        # The memory is not the allocator's, which keeps freed memory between blocks that stay.
        tensor = zeros(shape, self.dtype)
        memory = tensor.view(-1).view(torch.uint8).numpy().data
        self._fill(memory, [(0, num_elements)] if part is None else part.pieces(self.shape))
        return tensor

    def _fill(self, memory: memoryview, pieces: Iterable[tuple[int, int]]) -> None:
        """Reads `pieces` (first element, number of elements) one behind another."""
        itemsize, filled = self.dtype.itemsize, 0
        with self.path.open("rb", buffering=0) as file:
            for first, count in pieces:
                end = filled + count * itemsize
                self._read_at(file.fileno(), self.offset + first * itemsize, memory[filled:end])
                filled = end

    def _read_at(self, file: int, offset: int, room: memoryview) -> None:
        filled = 0
        while filled < len(room):
            # One read gives at most 2 GiB.
            count = os.preadv(file, [room[filled:]], offset + filled)
            if not count:
                raise TensorFileError(f"{self.path} has become shorter while it was read")
            filled += count


def stored_tensors(path: Path) -> dict[str, StoredTensor]:
    """Returns the tensors in the file at `path` by their names, in its order. Raises `TensorFileError`, or
    `OSError`."""
    header, size = safetensors_header(path), path.stat().st_size
    try:
        entries = msgspec.json.decode(header, type=dict[str, msgspec.Raw])
        entries.pop(_METADATA, None)
        found = {name: _stored(path, len(header), msgspec.json.decode(entries[name], type=_Entry)) for name in entries}
    except (msgspec.MsgspecError, ValueError) as error:
        raise TensorFileError(f"{path} is no readable safetensors file: {error}") from error
    end = max((each.offset + each.num_bytes for each in found.values()), default=0)
    if end > size:
        raise TensorFileError(f"{path} is no readable safetensors file: it has {size} bytes of at least {end}")
    return found


def _stored(path: Path, header_bytes: int, entry: _Entry) -> StoredTensor:
    """Returns the tensor of a header's `entry`. Raises `ValueError` on an entry that does not agree with itself."""
    if entry.dtype not in _DTYPES:
        raise ValueError(f"dtype {entry.dtype} is none of {', '.join(_DTYPES)}")
    begin, end = entry.data_offsets
    stored = StoredTensor(path, _PREFIX_BYTES + header_bytes + begin, _DTYPES[entry.dtype], entry.shape)
    if end - begin != stored.num_bytes:
        raise ValueError(f"{end - begin} bytes for {list(entry.shape)} of {entry.dtype}")
    return stored
