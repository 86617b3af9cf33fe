"""Reads the header of a GGUF file: its metadata and where its tensors lie.

A file may come from anywhere. No number in it is believed before it is compared with the bytes that are there, and no
memory is taken for what cannot be there. The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import hashlib
import math
import re
import struct
from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO, Final

MAGIC: Final = b"GGUF"
_VERSIONS = (2, 3)
# A vocabulary of 262,144 tokens takes 7 MB, and with its merges 20.
_MOST_HEADER_BYTES = 128 << 20
# Strings become Python objects some ten times their size; the largest lists are those of merges, of half a million.
_MOST_STRINGS = 4 << 20
_MOST_TENSORS = 1 << 16
_MOST_KEYS = 1 << 16
_MOST_DIMENSIONS = 4
_READ_AHEAD = 1 << 20
_SPLIT = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")


class GGUFError(Exception):
    """Says why a file is no GGUF, not all of one, or no model that Octavo serves from it; with what to do about it."""


class UnsupportedGGUF(GGUFError):
    """Says why a sound file is not served: its model, tokenizer or quantization is none of those known here."""


@dataclass(frozen=True, slots=True)
class TensorType:
    """Describes how tensors of a type lie in a file: `block` values take `block_bytes`."""

    name: str
    block: int
    block_bytes: int


# The types that are served, by their numbers in a file.
TYPES: Final = MappingProxyType(
    {
        number: TensorType(*described)
        for number, described in {
            0: ("F32", 1, 4),
            1: ("F16", 1, 2),
            2: ("Q4_0", 32, 18),
            3: ("Q4_1", 32, 20),
            6: ("Q5_0", 32, 22),
            7: ("Q5_1", 32, 24),
            8: ("Q8_0", 32, 34),
            12: ("Q4_K", 256, 144),
            13: ("Q5_K", 256, 176),
            14: ("Q6_K", 256, 210),
            20: ("IQ4_NL", 32, 18),
            30: ("BF16", 1, 2),
        }.items()
    }
)
# Types that are in use and not served.
_OTHER_TYPES: Final = MappingProxyType(
    {
        9: "Q8_1",
        10: "Q2_K",
        11: "Q3_K",
        15: "Q8_K",
        16: "IQ2_XXS",
        17: "IQ2_XS",
        18: "IQ3_XXS",
        19: "IQ1_S",
        21: "IQ3_S",
        22: "IQ2_S",
        23: "IQ4_XS",
        24: "I8",
        25: "I16",
        26: "I32",
        27: "I64",
        28: "F64",
        29: "IQ1_M",
        34: "TQ1_0",
        35: "TQ2_0",
        39: "MXFP4",
        40: "NVFP4",
    }
)
_STRING, _ARRAY = 8, 9
# The formats of numbers in metadata; truth values in arrays are bytes.
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """Describes a tensor in a file: `offset` is that of its first byte, `shape` has the fastest dimension last."""

    path: Path
    offset: int
    type: TensorType
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) // self.type.block * self.type.block_bytes


@dataclass(frozen=True, slots=True)
class GGUFFile:
    """Holds the header of a GGUF file, or of all parts of a split one, which `paths` are.

    `metadata` values are numbers, booleans, texts, or arrays of one of them. `digest` is SHA-256 over the headers and
    the sizes of the files.
    """

    paths: tuple[Path, ...]
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GGUFTensor]
    digest: str
    num_bytes: int

    @property
    def path(self) -> Path:
        return self.paths[0]

    def floats(self, name: str) -> list[float] | None:
        """Reads the small F32 tensor called `name`; None if there is none. Raises `GGUFError`."""
        tensor = self.tensors.get(name)
        if tensor is None:
            return None
        if tensor.type.name != "F32" or len(tensor.shape) != 1:
            raise GGUFError(
                f"{self.path}: tensor {name!r} is {tensor.type.name} {list(tensor.shape)} and should be a row of F32;"
                " convert the model again"
            )
        with tensor.path.open("rb") as file:
            file.seek(tensor.offset)
            content = file.read(tensor.num_bytes)
        if len(content) != tensor.num_bytes:
            raise GGUFError(f"{tensor.path} has become shorter while it was read")
        return list(struct.unpack(f"<{tensor.shape[0]}f", content))


def read_gguf(path: Path) -> GGUFFile:
    """Reads the header of the file at `path`; of a split file, `path` is that of the first part.

    Raises `GGUFError`.
    """
    paths = _parts(path)
    parts = [_read_part(each) for each in paths]
    tensors: dict[str, GGUFTensor] = {}
    digest = hashlib.sha256()
    for part in parts:
        for name, tensor in part.tensors.items():
            if tensors.setdefault(name, tensor) is not tensor:
                raise _broken(tensor.path, f"tensor {name!r} is in {tensors[name].path.name} too")
        digest.update(bytes.fromhex(part.digest))
    metadata = parts[0].metadata
    if metadata.get("split.count", 1) not in (0, len(parts)):
        raise GGUFError(
            f"{path} says that it is one of {metadata['split.count']} parts; keep the names that they were published"
            " with (NAME-00001-of-0000N.gguf), side by side, and name the first"
        )
    return GGUFFile(tuple(paths), metadata, tensors, digest.hexdigest(), sum(part.num_bytes for part in parts))


def _parts(path: Path) -> list[Path]:
    match = _SPLIT.fullmatch(path.name)
    if match is None:
        return [path]
    name, number, count = match[1], int(match[2]), int(match[3])
    if number != 1:
        raise GGUFError(f"{path} is part {number} of {count}; name the first, {name}-00001-of-{count:05}.gguf")
    paths = [path.with_name(f"{name}-{each:05}-of-{count:05}.gguf") for each in range(1, count + 1)]
    missing = [each.name for each in paths if not each.is_file()]
    if missing:
        raise GGUFError(f"{path} is the first of {count} parts, and {', '.join(missing[:3])} is not beside it")
    return paths


def _read_part(path: Path) -> GGUFFile:
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(0)
            return _Reader(path, file, size).read()
    except OSError as error:
        raise GGUFError(f"cannot read {path}: {error.strerror or error}") from error


def _broken(path: Path, what: str) -> GGUFError:
    return GGUFError(f"{path} is no GGUF file that can be read: {what}; download it anew, or convert the model again")


class _Reader:
    """Reads one file from its beginning; keeps what of it was read."""

    def __init__(self, path: Path, file: BinaryIO, size: int) -> None:
        self._path = path
        self._file = file
        self._size = size
        self._limit = min(size, _MOST_HEADER_BYTES)
        self._content = bytearray()
        self._at = 0

    def read(self) -> GGUFFile:
        num_tensors, num_keys = self._head()
        metadata: dict[str, Any] = {}
        for _ in range(num_keys):
            key = self._text("a key")
            if key in metadata:
                raise self._error(f"it has the key {key!r} twice")
            metadata[key] = self._value(key)
        table = dict(self._entry() for _ in range(num_tensors))
        if len(table) != num_tensors:
            raise self._error("two tensors have one name")
        header = memoryview(self._content)[: self._at]
        tensors = self._placed(table, self._data_offset(metadata))
        digest = hashlib.sha256(header)
        digest.update(self._size.to_bytes(8, "little"))
        return GGUFFile((self._path,), metadata, tensors, digest.hexdigest(), self._size)

    def _head(self) -> tuple[int, int]:
        """Returns the numbers of tensors and of keys."""
        if self._size < 24:
            raise self._error(f"it has {self._size} bytes")
        magic, version = bytes(self._take(4)), self._number("I")
        if magic != MAGIC:
            raise self._error(f"it begins with {magic!r}, not {MAGIC!r}")
        if version not in _VERSIONS:
            raise self._error(_about_version(version))
        num_tensors, num_keys = self._number("Q"), self._number("Q")
        # A tensor's entry takes 24 bytes and more, a key's 13.
        for what, number, most, least in (
            ("tensors", num_tensors, _MOST_TENSORS, 24),
            ("keys", num_keys, _MOST_KEYS, 13),
        ):
            if number > min(most, self._limit // least):
                raise self._error(f"it announces {number} {what} in {self._size} bytes")
        return num_tensors, num_keys

    def _value(self, key: str) -> Any:
        kind = self._number("I")
        if kind == _STRING:
            return self._text(key)
        if kind == _ARRAY:
            return self._array(key)
        return self._number(self._format(key, kind))

    def _array(self, key: str) -> Any:
        kind, count = self._number("I"), self._number("Q")
        if kind == _ARRAY:
            raise self._error(f"{key!r} is an array of arrays, which no model has")
        if kind == _STRING:
            if count > min(_MOST_STRINGS, self._left // 8):
                raise self._error(f"{key!r} announces {count} texts where {self._left} bytes are left")
            return [self._text(key) for _ in range(count)]
        item = self._format(key, kind)
        if count > self._left // struct.calcsize(f"<{item}"):
            raise self._error(f"{key!r} announces {count} numbers where {self._left} bytes are left")
        content = self._take(count * struct.calcsize(f"<{item}"))
        found = array("B" if item == "?" else item)
        # Files are little-endian, and so are the machines that Octavo runs on.
        found.frombytes(content)
        return found

    def _format(self, key: str, kind: int) -> str:
        item = _NUMBERS.get(kind)
        if item is None:
            raise self._error(f"{key!r} has a value of unknown type {kind}")
        return item

    def _entry(self) -> tuple[str, tuple[int, int, tuple[int, ...]]]:
        """Returns a tensor's name, and its type, offset and shape."""
        name, dimensions = self._text("a tensor's name"), self._number("I")
        if not 1 <= dimensions <= _MOST_DIMENSIONS:
            raise self._error(f"tensor {name!r} has {dimensions} dimensions")
        shape = tuple(self._number("Q") for _ in range(dimensions))[::-1]
        return name, (self._number("I"), self._number("Q"), shape)

    def _data_offset(self, metadata: Mapping[str, Any]) -> int:
        """Returns where the tensors' data begins. Offsets in the table are multiples of the alignment."""
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1 or alignment > 1 << 20 or alignment & (alignment - 1):
            raise self._error(f"general.alignment is {alignment!r}, which is no power of two")
        self._alignment = alignment
        return -(-self._at // alignment) * alignment

    def _placed(self, table: Mapping[str, tuple[int, int, tuple[int, ...]]], begin: int) -> dict[str, GGUFTensor]:
        tensors, end = {}, begin
        for name, (number, offset, shape) in table.items():
            tensors[name] = self._tensor(name, number, begin + offset, shape)
            if offset % self._alignment:
                raise self._error(f"tensor {name!r} lies at {offset}, which is no multiple of {self._alignment}")
        for name, tensor in sorted(tensors.items(), key=lambda each: each[1].offset):
            if tensor.offset < end:
                raise self._error(f"tensor {name!r} lies over another")
            end = tensor.offset + tensor.num_bytes
            if end > self._size:
                raise self._error(f"tensor {name!r} ends at byte {end} of {self._size}")
        return tensors

    def _tensor(self, name: str, number: int, offset: int, shape: tuple[int, ...]) -> GGUFTensor:
        kind = TYPES.get(number)
        if kind is None:
            known = _OTHER_TYPES.get(number)
            if known is None:
                raise self._error(f"tensor {name!r} is of unknown type {number}")
            served = ", ".join(each.name for each in TYPES.values())
            raise UnsupportedGGUF(
                f"{self._path}: tensor {name!r} is {known}, which is not served; take a file of the same model in"
                f" another quantization ({served} are served; Q4_K_M and Q8_0 files have nothing else)"
            )
        if not all(shape) or shape[-1] % kind.block:
            raise self._error(f"tensor {name!r} of {kind.name} has rows of {shape[-1]} in {list(shape)}")
        return GGUFTensor(self._path, offset, kind, shape)

    @property
    def _left(self) -> int:
        """Counts the bytes that the header may still have."""
        return self._limit - self._at

    def _number(self, item: str) -> Any:
        (number,) = struct.unpack(f"<{item}", self._take(struct.calcsize(f"<{item}")))
        return number

    def _text(self, what: str) -> str:
        (length,) = struct.unpack("<Q", self._take(8))
        if length > self._left:
            raise self._error(f"{what!r} announces a text of {length} bytes where {self._left} are left")
        try:
            return str(self._take(length), "utf-8")
        except UnicodeDecodeError as error:
            raise self._error(f"{what!r} is a text that is no UTF-8") from error

    def _take(self, count: int) -> bytearray:
        end = self._at + count
        if end > self._limit:
            raise self._error(
                f"it ends inside of its header, at byte {self._size}"
                if self._limit == self._size
                else f"its header is longer than {_MOST_HEADER_BYTES} bytes"
            )
        if end > len(self._content):
            self._content += self._file.read(max(end - len(self._content), _READ_AHEAD))
            if end > len(self._content):
                raise self._error("it has become shorter while it was read")
        taken = self._content[self._at : end]
        self._at = end
        return taken

    def _error(self, what: str) -> GGUFError:
        return _broken(self._path, what)


def _about_version(version: int) -> str:
    if int.from_bytes(version.to_bytes(4, "little"), "big") in _VERSIONS:
        return "its numbers are big-endian, and Octavo reads little-endian files"
    return f"it is of version {version}, and versions {' and '.join(map(str, _VERSIONS))} are read"
