"""The weights of GGUF files as models take them: by transformers' names, in transformers' order of rows, one at a
time."""

from pathlib import Path
from types import MappingProxyType

import msgspec
import torch
from torch import Tensor

from octavo.kernels.quantized import Quantized
from octavo.runtime.models.gguf.families import family_of, head_dim, tensors_of
from octavo.runtime.models.gguf.file import GGUFError, GGUFTensor, read_gguf
from octavo.runtime.models.gguf.metadata import Metadata
from octavo.worker.loading.gguf_blocks import unpack
from octavo.worker.loading.tensor_file import StoredTensor, TensorFileError, TensorPart
from octavo.worker.loading.weights import WeightsError

_PLAIN = MappingProxyType({"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16})


class _Config(msgspec.Struct):
    """Holds what config.json says of the file that it was made from."""

    gguf_header: str | None = None


class GGUFWeights:
    """A `WeightSource` of the GGUF file at `path`, or of all its parts, of `num_bytes` in all.

    Raises `WeightsError` if it cannot be read, or holds a model that is not served.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            file = read_gguf(path)
            family = family_of(file)
            self._stored = dict(tensors_of(file, family))
            metadata = Metadata(path, file.metadata)
            self._head_dim = head_dim(metadata)
        except GGUFError as error:
            raise WeightsError(str(error)) from error
        self._family = family
        self._left = set(self._stored)
        self.digest = file.digest
        self.num_bytes = file.num_bytes

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Returns every stored tensor's name and shape, in the order of the file."""
        return {name: tensor.shape for name, tensor in self._stored.items()}

    def take(self, name: str, shape: tuple[int, ...], part: TensorPart | None = None) -> Tensor:
        """Reads the tensor called `name`, or `part` of it: in its stored dtype, or in fp32 if it is quantised.

        Raises `WeightsError` if it is absent or of another shape than `shape`, or if `part` cuts its blocks.
        """
        found = self.take_weight(name, shape, part)
        return found.dequantize() if isinstance(found, Quantized) else found

    def take_weight(self, name: str, shape: tuple[int, ...], part: TensorPart | None = None) -> Tensor | Quantized:
        """Reads the tensor called `name`, or `part` of it, quantised as it lies in the file. Raises as `take` does."""
        tensor = self._stored.get(name)
        if tensor is None:
            raise WeightsError(f"{self._path} has no tensor for {name!r}, without which its model cannot be computed")
        if tensor.shape != shape:
            raise WeightsError(
                f"{self._path} holds {name!r} as {list(tensor.shape)}, and its metadata makes it {list(shape)}; convert"
                " the model again, or take another file of it"
            )
        self._left.discard(name)
        values = self._read(name, tensor, part)
        if self._family.permuted and name.rpartition(".")[0].endswith(("q_proj", "k_proj")):
            values = values[_halves_first(len(values), self._head_dim)]
        if tensor.type.name not in _PLAIN:
            return unpack(tensor.type.name, values)
        if self._family.norm_offset and name.endswith("norm.weight"):
            # Exact, so that adding it again gives what the file holds.
            return values.double() - self._family.norm_offset
        return values

    def drop(self, name: str) -> None:
        """Declares that `name`, if present, is rightly not used."""
        self._left.discard(name)

    def finish(self) -> None:
        """Raises `WeightsError` if a tensor was never taken: it would be part of a model that is not the one loaded."""
        if self._left:
            names = ", ".join(sorted(self._left)[:5])
            raise WeightsError(f"{self._path} has {len(self._left)} tensors that its model has no place for: {names}")

    def _read(self, name: str, tensor: GGUFTensor, part: TensorPart | None) -> Tensor:
        """Reads the elements of a plain tensor, or the bytes of the blocks of a quantised one, row by row."""
        dtype = _PLAIN.get(tensor.type.name)
        if dtype is None:
            *rows, columns = tensor.shape
            row_bytes = columns // tensor.type.block * tensor.type.block_bytes
            stored = StoredTensor(tensor.path, tensor.offset, torch.uint8, (*rows, row_bytes))
            part = None if part is None else self._in_bytes(name, tensor, part)
        else:
            stored = StoredTensor(tensor.path, tensor.offset, dtype, tensor.shape)
        try:
            return stored.read(part)
        except (OSError, TensorFileError) as error:
            raise WeightsError(str(error)) from error

    def _in_bytes(self, name: str, tensor: GGUFTensor, part: TensorPart) -> TensorPart:
        """Returns `part` of a quantised tensor in bytes. Raises `WeightsError` where it begins or ends in a block."""
        if part.dim != len(tensor.shape) - 1:
            return part
        block, size = tensor.type.block, tensor.type.block_bytes
        if any(each.start % block or each.stop % block for each in part.ranges):
            raise WeightsError(
                f"the ranks would cut the blocks of {block} inputs of {name!r}, which is {tensor.type.name} in"
                f" {self._path}; give another --tp, or serve another quantization (Q8_0 has blocks of 32)"
            )
        return TensorPart(
            part.dim, tuple(range(each.start // block * size, each.stop // block * size) for each in part.ranges)
        )


def open_gguf(directory: Path, path: Path) -> GGUFWeights:
    """Opens the weights at `path` of the model directory that was made for them.

    Raises `WeightsError` if they have changed since.
    """
    weights = GGUFWeights(path)
    try:
        described = msgspec.json.decode((directory / "config.json").read_bytes(), type=_Config).gguf_header
    except (OSError, msgspec.MsgspecError) as error:
        raise WeightsError(f"cannot read {directory / 'config.json'}: {error}") from error
    if described is not None and described != weights.digest:
        raise WeightsError(
            f"{path.resolve()} has changed since {directory} was made of it; start all processes anew with the file"
            " itself as --model"
        )
    return weights


def _halves_first(rows: int, head_dim: int) -> Tensor:
    """Returns the order of rows that puts the two halves of each head's rotary pairs one after the other."""
    pairs = torch.arange(rows).view(-1, head_dim // 2, 2)
    return pairs.transpose(1, 2).reshape(rows)
