"""The writer of quantised model directories, in the layout that compressed-tensors calls pack-quantized.

It is a layout that others read too, but for the embedding. What it holds is what `--quantization` makes at every start:
a scale in fp16 for 32 inputs.
"""

import json
import re
from collections.abc import Collection, Iterator
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from octavo.kernels.quantized import GROUP, Quantized
from octavo.runtime.models.publish import copy_description, is_published, publish
from octavo.worker.loading.load_format import open_weights
from octavo.worker.loading.quantization_config import read_scheme
from octavo.worker.loading.quantized_on_load import format_of, quantized
from octavo.worker.loading.weights import WeightSource

# The formats that the layout has room for: those without mins.
TARGETS = MappingProxyType({"q8_0": 8, "q4_0": 4})
_FILE_BYTES = 2 << 30
_INDEX = "model.safetensors.index.json"


class QuantizeError(Exception):
    """Raised for a model that is not quantised into a directory, with the reason."""


def quantize_model(source: Path, directory: Path, to: str, linears: Collection[str], ends: Collection[str]) -> None:
    """Writes the model in `source` to `directory` with its weights in the format `to`, all or nothing.

    `linears` are the stored names of the weights of linear layers, `ends` those of the embedding and the LM head, of
    which only those that are to be quantised are named. One file is in memory at a time. Raises `QuantizeError`,
    `WeightsError`, or `PublishError` if `directory` cannot be written.
    """
    if directory.exists():
        raise QuantizeError(f"{directory} exists, and nothing is overwritten; name another directory, or remove it")
    publish(directory, lambda partial: _write(source, partial, to, linears, ends))
    if not is_published(directory):
        raise QuantizeError(f"{directory} was removed while it was written")


def _write(source: Path, directory: Path, to: str, linears: Collection[str], ends: Collection[str]) -> None:
    checkpoint = open_weights(source, "safetensors")
    if read_scheme(source):
        raise QuantizeError(f"{source} is quantised already; name the model that it was made of")
    file_of: dict[str, str] = {}
    plain: list[str] = []
    files = _files(checkpoint, to, linears, ends, plain)
    for number, tensors in enumerate(files, 1):
        name = f"model-{number:05}.safetensors"
        save_file(tensors, directory / name, metadata={"format": "pt"})
        file_of |= dict.fromkeys(tensors, name)
    copy_description(source, directory, but=_INDEX)
    total = sum((directory / name).stat().st_size for name in set(file_of.values()))
    index = {"metadata": {"total_size": total}, "weight_map": file_of}
    (directory / _INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    config["quantization_config"] = _quantization_config(to, linears, ends, plain)
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _files(
    checkpoint: WeightSource, to: str, linears: Collection[str], ends: Collection[str], plain: list[str]
) -> Iterator[dict[str, Tensor]]:
    """Yields the tensors of one file after the other; adds to `plain` the linear layers that stay as they are."""
    tensors: dict[str, Tensor] = {}
    for name, shape in checkpoint.shapes().items():
        tensor = checkpoint.take(name, shape)
        chosen = name in linears or name in ends
        weight = quantized(name, tensor, format_of(name, to, ends.__contains__)) if chosen else tensor
        if isinstance(weight, Quantized):
            tensors |= {f"{name.removesuffix('weight')}{part}": each for part, each in packed(weight).items()}
        else:
            tensors[name] = weight
            plain += [name.removesuffix(".weight")] if name in linears else []
        if sum(each.nbytes for each in tensors.values()) >= _FILE_BYTES:
            yield tensors
            tensors = {}
    checkpoint.finish()
    yield tensors


def packed(weight: Quantized) -> dict[str, Tensor]:
    """Returns the tensors of a layer whose weight is q4_0 or q8_0: their codes are the layout's, from 0 up."""
    codes = weight.codes
    if weight.format.bits == 4:
        codes = codes[:, ::2] | codes[:, 1::2] << 4
    return {
        "weight_packed": codes.contiguous().view(torch.int32),
        "weight_scale": weight.scales,
        "weight_shape": torch.tensor(weight.shape),
    }


def _quantization_config(to: str, linears: Collection[str], ends: Collection[str], plain: list[str]) -> dict[str, Any]:
    groups = {"group_0": _group(["Linear"], TARGETS[to])}
    wide = TARGETS[format_of("", to, lambda _: True)]
    if ends and wide != TARGETS[to]:
        groups["group_1"] = _group([f"re:{re.escape(name.removesuffix('.weight'))}$" for name in sorted(ends)], wide)
    return {
        # Others do not read embeddings that are quantised, and shall say so.
        "quant_method": "octavo" if set(ends) - set(linears) else "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": plain,
    }


def _group(targets: list[str], bits: int) -> dict[str, Any]:
    weights = {"num_bits": bits, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP}
    return {"targets": targets, "weights": {**weights, "dynamic": False}}
