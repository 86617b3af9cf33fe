"""Lists the formats of weights that are measured: what a worker, llama.cpp and OpenVINO call each."""

from dataclasses import dataclass, replace
from pathlib import Path

from octavo.bench.figures import LinearShapes
from octavo.runtime.models.gguf.file import read_gguf

_KV = "/"


@dataclass(frozen=True)
class Format:
    """Describes a format.

    `settings` make a worker serve a model in it; None: only a GGUF file can. `bits` and `head_bits` are those of a
    weight in the layers and in the LM head, scales included. `gguf` and `openvino` name what is nearest in llama.cpp
    and OpenVINO.
    """

    name: str
    settings: dict[str, str] | None
    bits: float
    head_bits: float
    gguf: str
    openvino: str

    @property
    def is_quantized(self) -> bool:
        return self.openvino.startswith("int")

    def weight_bytes(self, shapes: LinearShapes) -> int:
        """Counts the bytes that every step reads of a model of these shapes."""
        return round((shapes.num_layer_weights * self.bits + shapes.num_head_weights * self.head_bits) / 8)


def _quantized(name: str, bits: float, head_bits: float, openvino: str) -> Format:
    return Format(name, {"quantization": name}, bits, head_bits, name.upper(), openvino)


_FORMATS = {
    each.name: each
    for each in (
        Format("bf16", {"dtype": "bfloat16"}, 16, 16, "BF16", "bf16"),
        Format("fp32", {"dtype": "float32"}, 32, 32, "F32", "f32"),
        _quantized("q8_0", 8.5, 8.5, "int8"),
        _quantized("q4_0", 4.5, 8.5, "int4"),
        _quantized("q4_1", 5.0, 8.5, "int4"),
        # Mixed: no setting of a worker makes it.
        Format("q4_k_m", None, 4.5, 6.6, "Q4_K_M", "int4"),
    )
}
NAMES = tuple(_FORMATS)


def read_format(name: str) -> Format:
    """Reads a format's name; `q8_0/int8` is q8_0 with keys and values in int8. Raises `ValueError`."""
    weights, _, kv = name.partition(_KV)
    if weights not in _FORMATS:
        raise ValueError(f"there is no format {weights!r}; there are {', '.join(NAMES)}, each also as {weights}/int8")
    found = _FORMATS[weights]
    if not kv:
        return found
    return replace(found, name=name, settings={**(found.settings or {}), "kv_cache_dtype": kv})


def file_bytes(path: Path) -> int:
    """Counts the bytes that every step reads of a GGUF file: its matrices, but for an embedding that is not the LM
    head too."""
    matrices = {name: each.num_bytes for name, each in read_gguf(path).tensors.items() if len(each.shape) > 1}
    if "output.weight" in matrices:
        del matrices["token_embd.weight"]
    return sum(matrices.values())
