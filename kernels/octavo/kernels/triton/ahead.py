"""Compiles every kernel in every configuration for a GPU that need not be there: nothing ships that does not compile.

`python -m octavo.kernels.triton.ahead` compiles all, prints what each takes, and fails if one does not compile.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

# Hopper: compute capability 9.0, warps of 32.
HOPPER = GPUTarget("cuda", 90, 32)


@dataclass(frozen=True)
class Variant:
    """A kernel in one configuration.

    `signature`: the type of each argument that is no constant ("*bf16", "i32", "fp32"); `constants`: the constexprs by
    name; `aligned`: names of arguments that are multiples of 16 (all pointers are).
    """

    name: str
    kernel: Any
    signature: Mapping[str, str]
    constants: Mapping[str, Any]
    num_warps: int = 4
    num_stages: int = 2
    aligned: frozenset[str] = field(default_factory=frozenset)


@dataclass(frozen=True)
class Compiled:
    """What came of a variant: bytes of shared memory, bytes spilled by each thread, the PTX."""

    variant: Variant
    shared: int
    ptx: str

    @property
    def uses_tensor_cores(self) -> bool:
        return "wgmma" in self.ptx or "mma.sync" in self.ptx


def compile_variant(variant: Variant, target: GPUTarget = HOPPER) -> Compiled:
    """Raises whatever Triton does if it cannot."""
    names = variant.kernel.arg_names
    signature = {name: "constexpr" if name in variant.constants else variant.signature[name] for name in names}
    aligned = {
        (index,): [["tt.divisibility", 16]]
        for index, name in enumerate(names)
        if signature[name].startswith("*") or name in variant.aligned
    }
    constants = {(names.index(name),): value for name, value in variant.constants.items()}
    source = ASTSource(variant.kernel, signature, constants, aligned)
    options = {"num_warps": variant.num_warps, "num_stages": variant.num_stages}
    compiled = triton.compile(source, target=target, options=options)
    return Compiled(variant, compiled.metadata.shared, compiled.asm["ptx"])


def all_variants() -> Iterator[Variant]:
    """Of every module with kernels."""
    yield from ()
