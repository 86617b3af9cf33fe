"""The reader of `quantization_config`, by which a checkpoint's config.json says how its weights are quantised; what
cannot be served is refused."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal

import msgspec

from octavo.kernels.quantized import GROUP
from octavo.worker.loading.weights import WeightsError

Layout = Literal["int-quantized", "pack-quantized", "float-quantized", "fp8", "gptq", "awq"]


@dataclass(frozen=True, slots=True)
class Packing:
    """Describes how a checkpoint stores the weight of a linear layer: codes of `bits` in `layout`, a scale for every
    `group` inputs (None: for all) and `outputs` of them together, and zero points unless it is `symmetric`. What is
    stored of these is less by `zero_step`."""

    layout: Layout
    bits: int
    group: int | None
    symmetric: bool
    zero_step: int = 0
    outputs: int = 1

    @property
    def floats(self) -> bool:
        """Returns whether codes are numbers of e4m3."""
        return self.layout in ("float-quantized", "fp8")


@dataclass(frozen=True, slots=True)
class Scheme:
    """Tells the packing of each quantised linear layer, by what the layer is called; patterns begin with `re:`."""

    groups: tuple[tuple[tuple[str, ...], Packing], ...]

    def packing(self, module: str) -> Packing:
        """Returns the packing of the layer called `module`. Raises `WeightsError` if none is meant for it."""
        for fits in (_is_named, _is_linear):
            for targets, packing in self.groups:
                if any(fits(target, module) for target in targets):
                    return packing
        raise WeightsError(f"{module} is quantised, and no group of quantization_config in config.json is for it")


def _is_named(target: str, module: str) -> bool:
    if target.startswith("re:"):
        return re.match(target.removeprefix("re:"), module) is not None
    return target == module


def _is_linear(target: str, _: str) -> bool:
    # The class of torch's linear layers, which stands for all of them.
    return target == "Linear"


_WAY_OUT = (
    "serve a checkpoint that is quantised by compressed-tensors (W8A8, W4A16, FP8), GPTQ or AWQ, a GGUF file, or the"
    " unquantised model with --quantization"
)
_TABLES = "looks codes up in tables that Octavo's kernels do not have"
_REASONS = MappingProxyType(
    {
        "aqlm": _TABLES,
        "bitsandbytes": "is bitsandbytes', whose layout is its GPU kernels' own",
        "fbgemm_fp8": "bounds the scales of inputs (activation_scale_ub)",
        "higgs": _TABLES,
        "hqq": "has zero points that are no integers",
        "mxfp4": "has 4-bit floats",
        "quip": _TABLES,
        "spqr": "keeps single weights apart",
        "vptq": _TABLES,
    }
)


_LAYOUTS = MappingProxyType[str, Layout]({"int-quantized": "int-quantized", "pack-quantized": "pack-quantized"})
# How weights of 8-bit floats are stored. Some of compressed-tensors' versions call their layout naive.
_FLOAT_LAYOUTS = frozenset({"float-quantized", "naive-quantized"})


class _Refused(Exception):
    """Says why a quantisation is not served."""


_Size = Annotated[int, msgspec.Meta(ge=1)]
# Outputs and inputs of a block.
_Pair = tuple[_Size, _Size]


class _Weights(msgspec.Struct):
    num_bits: int = 8
    type: str = "int"
    symmetric: bool = True
    strategy: str | None = None
    group_size: int | None = None
    block_structure: _Pair | None = None
    actorder: str | bool | None = None


class _Activations(msgspec.Struct):
    num_bits: int = 8
    type: str = "int"


class _Group(msgspec.Struct):
    targets: list[str]
    weights: _Weights | None = None
    input_activations: _Activations | None = None
    output_activations: dict[str, Any] | None = None
    format: str | None = None


class _CompressedTensors(msgspec.Struct):
    config_groups: dict[str, _Group]
    format: str | None = None
    sparsity_config: dict[str, Any] | None = None
    transform_config: dict[str, Any] | None = None


class _Gptq(msgspec.Struct):
    bits: int
    group_size: Annotated[int, msgspec.Meta(ge=-1)]
    sym: bool = True
    checkpoint_format: str | None = None
    format: str | None = None
    is_marlin_format: bool = False
    dynamic: dict[str, Any] | None = None


class _Float8(msgspec.Struct):
    fmt: str = "e4m3"
    weight_block_size: _Pair | None = None


class _Awq(msgspec.Struct):
    bits: int | None = None
    w_bit: int | None = None
    group_size: int | None = None
    q_group_size: int | None = None
    zero_point: bool = True
    version: str = "gemm"


def read_scheme(directory: Path) -> Scheme | None:
    """Returns how the weights in `directory` are quantised; None: they are not.

    Raises `WeightsError` on what is not served, with the reason and the way out.
    """
    path = directory / "config.json"
    if not path.is_file():
        return None
    try:
        keys = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
        config = keys.get("quantization_config")
        return None if not config else _scheme(msgspec.convert(config, dict[str, Any]))
    except _Refused as refused:
        raise WeightsError(f"the quantisation that {path} describes {refused}; {_WAY_OUT}") from refused
    except (OSError, msgspec.MsgspecError, re.error) as error:
        raise WeightsError(f"cannot read quantization_config in {path}: {error}") from error


def _scheme(config: Mapping[str, Any]) -> Scheme | None:
    method = config.get("quant_method")
    match method:
        case "gguf":
            # A GGUF file says it of each tensor.
            return None
        case "compressed-tensors" | "octavo":
            return _compressed_tensors(msgspec.convert(config, _CompressedTensors))
        case "gptq":
            packing = _gptq(msgspec.convert(config, _Gptq))
        case "awq":
            packing = _awq(msgspec.convert(config, _Awq))
        case "fp8" | "finegrained_fp8":
            packing = _float8(msgspec.convert(config, _Float8))
        case _:
            unknown = f"is of a kind that is not known here (quant_method {method!r})"
            raise _Refused(_REASONS.get(str(method), unknown))
    return Scheme(((("Linear",), packing),))


def _compressed_tensors(config: _CompressedTensors) -> Scheme:
    if (config.sparsity_config or {}).get("format", "dense") != "dense":
        raise _Refused("leaves out zeros (sparsity_config)")
    if any((config.transform_config or {}).values()):
        raise _Refused("turns the inputs of layers at run time (transform_config)")
    groups = [
        (tuple(group.targets), _group_packing(group, group.format or config.format))
        for group in config.config_groups.values()
    ]
    if not groups:
        raise _Refused("has no config_groups")
    for targets, _ in groups:
        for target in targets:
            if target.startswith("re:"):
                re.compile(target.removeprefix("re:"))
    return Scheme(tuple(groups))


def _group_packing(group: _Group, layout: str | None) -> Packing:
    weights, inputs = group.weights, group.input_activations
    if weights is None or group.output_activations:
        raise _Refused("quantises the outputs of layers, or no weights")
    if weights.type == "float" and weights.num_bits == 8:
        return _float_group_packing(weights, inputs, layout)
    if weights.type != "int" or (inputs and inputs.type != "int"):
        raise _Refused(f"has floats of {min(weights.num_bits, inputs.num_bits if inputs else 16)} bits")
    if inputs and inputs.num_bits != 8:
        raise _Refused(f"computes with inputs of {inputs.num_bits} bits; Octavo's are of 8")
    read = _LAYOUTS.get(layout or "")
    if read is None:
        raise _Refused(f"is stored as {layout!r}; int-quantized and pack-quantized are read")
    if weights.actorder in (True, "group", "dynamic"):
        raise _Refused(_REORDERED)
    strategy = weights.strategy or _strategy(weights.group_size)
    if strategy not in ("tensor", "channel", "group"):
        raise _Refused(f"has a scale for each {strategy}; for each tensor, channel or group is served")
    size = (weights.group_size or 0) if strategy == "group" else None
    return _checked(Packing(read, weights.num_bits, size, weights.symmetric))


def _float_group_packing(weights: _Weights, inputs: _Activations | None, layout: str | None) -> Packing:
    if inputs and (inputs.type, inputs.num_bits) != ("float", 8):
        raise _Refused(f"has 8-bit floats beside inputs of {inputs.num_bits} bits ({inputs.type})")
    if layout not in _FLOAT_LAYOUTS:
        raise _Refused(f"is stored as {layout!r}; of 8-bit floats, float-quantized is read")
    if not weights.symmetric:
        raise _Refused("has 8-bit floats with zero points")
    match weights.strategy or _strategy(weights.group_size):
        case "tensor" | "channel":
            return Packing("float-quantized", 8, None, symmetric=True)
        case "block" if weights.block_structure is not None:
            outputs, inputs_each = weights.block_structure
            return _checked(Packing("float-quantized", 8, inputs_each, symmetric=True, outputs=outputs))
        case other:
            raise _Refused(f"has a scale for each {other}; for each tensor, channel or block of 8-bit floats is served")


def _float8(config: _Float8) -> Packing:
    if config.fmt != "e4m3":
        raise _Refused(f"has 8-bit floats of {config.fmt}; e4m3 is served")
    if config.weight_block_size is None:
        return Packing("float-quantized", 8, None, symmetric=True)
    outputs, inputs = config.weight_block_size
    return _checked(Packing("fp8", 8, inputs, symmetric=True, outputs=outputs))


def _strategy(group_size: int | None) -> str:
    if group_size is None:
        return "tensor"
    return "group" if group_size > 0 else "channel"


_REORDERED = "has groups whose inputs are not neighbours (activation order); take one without it (desc_act false)"


def _gptq(config: _Gptq) -> Packing:
    stored = config.checkpoint_format or config.format or "gptq"
    if config.is_marlin_format or stored not in ("gptq", "gptq_v2"):
        raise _Refused(f"is stored as {'marlin' if config.is_marlin_format else stored!r}, the layout of GPU kernels")
    if any(not pattern.startswith("-:") for pattern in config.dynamic or {}):
        raise _Refused("differs from layer to layer (dynamic)")
    group = None if config.group_size == -1 else config.group_size
    return _checked(Packing("gptq", config.bits, group, config.sym, zero_step=int(stored == "gptq")))


def _awq(config: _Awq) -> Packing:
    bits, group = config.bits or config.w_bit, config.group_size or config.q_group_size
    if config.version.lower() != "gemm":
        raise _Refused(f"is AWQ's version {config.version!r}, the layout of a GPU kernel; gemm is read")
    if not config.zero_point or bits != 4:
        raise _Refused(f"is AWQ of {bits} bits {'with' if config.zero_point else 'without'} zero points")
    if group is None:
        raise _Refused("does not say how many inputs share a scale (group_size)")
    return _checked(Packing("awq", bits, None if group == -1 else group, symmetric=False))


def _checked(packing: Packing) -> Packing:
    if packing.bits not in (4, 8):
        raise _Refused(f"has weights of {packing.bits} bits; 4 and 8 are served")
    if packing.bits == 8 and not packing.symmetric:
        raise _Refused("has weights of 8 bits with zero points; 8 bits are served without them")
    if packing.group is not None and (packing.group < 1 or packing.group % GROUP):
        raise _Refused(f"has a scale for each {packing.group} inputs; multiples of {GROUP} are served")
    return packing
