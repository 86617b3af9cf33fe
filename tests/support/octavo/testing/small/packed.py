"""Writes tiny checkpoints as compressed-tensors, GPTQ and AWQ lay them out, packed one number at a time."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclass(frozen=True)
class Codes:
    """A weight: codes [outputs, inputs] of 0 to 2**bits - 1, scales and zero points [outputs, groups]."""

    bits: int
    codes: Tensor
    scales: Tensor
    zeros: Tensor

    @property
    def values(self) -> Tensor:
        times = self.codes.shape[1] // self.scales.shape[1]
        zeros, scales = (each.float().repeat_interleave(times, dim=1) for each in (self.zeros, self.scales))
        return (self.codes - zeros) * scales


def words(codes: Tensor, bits: int, order: Sequence[int] | None = None) -> Tensor:
    """Packs each row of `codes` into int32; `order` lists which of a word's codes comes first, from the lowest bits."""
    each = 32 // bits
    rows = []
    for row in codes.tolist():
        padded = row + [0] * (-len(row) % each)
        packed = []
        for first in range(0, len(padded), each):
            word = sum(padded[first + place] << bits * i for i, place in enumerate(order or range(each)))
            packed.append(word - (1 << 32) if word >= 1 << 31 else word)
        rows.append(packed)
    return torch.tensor(rows, dtype=torch.int32)


def as_int8(weight: Codes) -> dict[str, Tensor]:
    return {
        "weight": (weight.codes - (1 << weight.bits - 1)).to(torch.int8),
        "weight_scale": weight.scales.clone(),
        "input_scale": torch.ones(1),
    }


def as_packed(weight: Codes) -> dict[str, Tensor]:
    return {
        "weight_packed": words(weight.codes, weight.bits),
        "weight_scale": weight.scales.clone(),
        "weight_zero_point": words(weight.zeros.t(), weight.bits).t().contiguous(),
        "weight_shape": torch.tensor(weight.codes.shape),
    }


def as_packed_symmetric(weight: Codes) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in as_packed(weight).items() if name != "weight_zero_point"}


def as_gptq(weight: Codes, zero_step: int = 1) -> dict[str, Tensor]:
    inputs = weight.codes.shape[1]
    return {
        "qweight": words(weight.codes, weight.bits).t().contiguous(),
        "qzeros": words(weight.zeros.t() - zero_step, weight.bits),
        "scales": weight.scales.t().contiguous(),
        "g_idx": (torch.arange(inputs) // (inputs // weight.scales.shape[1])).int(),
    }


def as_gptq_v2(weight: Codes) -> dict[str, Tensor]:
    return as_gptq(weight, zero_step=0)


def as_awq(weight: Codes) -> dict[str, Tensor]:
    return {
        "qweight": words(weight.codes.t(), 4, AWQ_ORDER),
        "qzeros": words(weight.zeros.t(), 4, AWQ_ORDER),
        "scales": weight.scales.t().contiguous(),
    }


Pack = Callable[[Codes], dict[str, Tensor]]


def compressed(layout: str, bits: int, group: int | None = None, **weights: Any) -> dict[str, Any]:
    """A quantization_config of compressed-tensors."""
    size = {"strategy": "channel"} if group is None else {"strategy": "group", "group_size": group}
    scheme = {"targets": ["Linear"], "weights": {"num_bits": bits, "type": "int", **size, **weights}}
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "config_groups": {"group_0": scheme},
        "ignore": ["lm_head"],
    }


@dataclass(frozen=True)
class Kind:
    """A kind of checkpoint: its quantization_config, and how it packs a weight of `bits` with `group` inputs to a scale
    (None: all)."""

    config: dict[str, Any]
    pack: Pack
    bits: int = 4
    group: int | None = 32
    symmetric: bool = False
    scales: torch.dtype = torch.float16
    ignored: tuple[str, ...] = field(default=("lm_head",))


_GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False}
_INT8 = compressed("int-quantized", 8)
_INT8["config_groups"]["group_0"]["input_activations"] = {
    **{"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True, "symmetric": True}
}
KINDS = {
    "w8a8": Kind(_INT8, as_int8, 8, None, symmetric=True, scales=torch.bfloat16),
    "w8a8 fp32": Kind(_INT8, as_int8, 8, None, symmetric=True, scales=torch.float32),
    "w4a16": Kind(compressed("pack-quantized", 4, 32), as_packed_symmetric, symmetric=True),
    "w4a16 bf16": Kind(
        compressed("pack-quantized", 4, 64), as_packed_symmetric, group=64, symmetric=True, scales=torch.bfloat16
    ),
    "w4a16 zeros": Kind(compressed("pack-quantized", 4, 32, symmetric=False), as_packed),
    "w4a16 channel": Kind(compressed("pack-quantized", 4), as_packed_symmetric, group=None, symmetric=True),
    "w8a16": Kind(compressed("pack-quantized", 8, 32), as_packed_symmetric, 8, symmetric=True),
    "gptq": Kind({**_GPTQ, "sym": False}, as_gptq),
    "gptq symmetric": Kind({**_GPTQ, "sym": True}, as_gptq, symmetric=True),
    "gptq v2": Kind({**_GPTQ, "sym": False, "checkpoint_format": "gptq_v2"}, as_gptq_v2),
    "gptq 8 bits": Kind({**_GPTQ, "bits": 8, "group_size": -1}, as_gptq, 8, None, symmetric=True),
    "awq": Kind(
        {"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True, "version": "gemm"}, as_awq, group=64
    ),
}


def quantized(weight: Tensor, kind: Kind, generator: torch.Generator) -> Codes:
    """Random codes and zero points of `kind` with scales such that the values are about as large as those of
    `weight`."""
    outputs, inputs = weight.shape
    groups = 1 if kind.group is None else inputs // kind.group
    top = 1 << kind.bits
    codes = torch.randint(0, top, (outputs, inputs), generator=generator)
    scales = torch.rand(outputs, groups, generator=generator) + 0.5
    zeros = torch.full((outputs, groups), top // 2)
    if not kind.symmetric:
        zeros = torch.randint(1, top, (outputs, groups), generator=generator)
    return Codes(kind.bits, codes, (scales * weight.std() * 4 / top).to(kind.scales), zeros)


def quantize_checkpoint(directory: Path, model: nn.Module, kind: Kind) -> None:
    """Makes the linear layers of `model`, whose checkpoint `directory` holds, random ones of `kind`, in both."""
    path = directory / "model.safetensors"
    stored = load_file(path)
    generator = torch.Generator().manual_seed(0)
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and name not in kind.ignored:
            weight = quantized(module.weight.detach(), kind, generator)
            module.weight.data = weight.values
            del stored[f"{name}.weight"]
            stored |= {f"{name}.{part}": tensor for part, tensor in kind.pack(weight).items()}
    save_file(stored, path, metadata={"format": "pt"})
    configure(directory, quantization_config=kind.config)


def configure(directory: Path, **keys: Any) -> None:
    """Changes keys of a config.json."""
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **keys}))


def float8_compressed(strategy: str) -> dict[str, Any]:
    """A quantization_config of compressed-tensors for 8-bit floats with a scale for each tensor, channel or block of
    128 x 128."""
    weights = {"num_bits": 8, "type": "float", "strategy": strategy}
    if strategy == "block":
        weights["block_structure"] = [128, 128]
    inputs = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}
    scheme = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"group_0": scheme},
        "ignore": ["lm_head"],
    }


def quantize_to_float8(directory: Path, model: nn.Module, *, blocks: bool = False) -> None:
    """Makes the linear layers of `model`, whose checkpoint `directory` holds, of 8-bit floats in both: with a scale for
    each output as compressed-tensors stores them, or for `blocks` as transformers does."""
    path = directory / "model.safetensors"
    stored = load_file(path)
    for name, module in model.named_modules():
        if not isinstance(module, nn.Linear) or name == "lm_head":
            continue
        weight = module.weight.detach()
        rows, columns = weight.shape
        size = (128, 128) if blocks else (1, columns)
        padded = nn.functional.pad(weight, (0, -columns % size[1], 0, -rows % size[0]))
        tiles = padded.view(len(padded) // size[0], size[0], -1, size[1])
        scales = tiles.abs().amax(dim=(1, 3)) / 448
        wide = scales.repeat_interleave(size[0], dim=0)[:rows].repeat_interleave(size[1], dim=1)[:, :columns]
        values = (weight / wide).to(torch.float8_e4m3fn)
        module.weight.data = values.float() * wide
        stored[f"{name}.weight"] = values
        stored[f"{name}.{'weight_scale_inv' if blocks else 'weight_scale'}"] = scales
    save_file(stored, path, metadata={"format": "pt"})
    config = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    configure(directory, quantization_config=config if blocks else float8_compressed("channel"))
