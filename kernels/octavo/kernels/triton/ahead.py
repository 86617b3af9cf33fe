"""Compiles every kernel in every configuration for a GPU that need not be there: nothing ships that does not compile.

`python -m octavo.kernels.triton.ahead` compiles all, prints what each takes, and fails if one does not compile or takes
more than there is: for Hopper, or for other GPUs by their compute capabilities.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from octavo.kernels.triton.devices import HOPPER, shared_limit, takes_fp8

# Those that Octavo is made for: A100, RTX 30 and A10, RTX 40 and L4, H100 and H200, B200, RTX 50.
CAPABILITIES = (80, 86, 89, HOPPER, 100, 120)
_WARP = 32
# The matrix instructions, by what the PTX calls them, and those of data centres' GPUs; others have "mma".
_MATRIX = {"wgmma": "wgmma.mma", "tcgen05": "tcgen05.mma", "mma": "mma.sync"}
_LARGE_MATRIX = {HOPPER: "wgmma", 100: "tcgen05"}
_PACKAGE = "octavo.kernels.triton."
# Modules with kernels; each yields its variants, some by the compute capability.
MODULES = (
    "inputs",
    "layers.gate",
    "layers.norm",
    "layers.rope",
    "moves",
    "sampling.draw",
    "sampling.stats",
    "work_list",
    "write",
)
FITTED_MODULES = ("layers.float8", "layers.grouped", "layers.matmul", "layers.packed", "paged_variants")


@dataclass(frozen=True)
class Variant:
    """Describes a kernel in one configuration.

    `signature`: the type of each argument that is no constant ("*bf16", "i32", "fp32"); `constants`: the constexprs by
    name; `aligned`: names of arguments that are multiples of 16 (all pointers are).

    `fuses`: the compiler may make products and sums one operation, which rounds once.

    `requires_wgmma`: the results are promised to be those of Hopper's matrix instruction, which must be in the PTX; on
    other GPUs those of the matrix instruction that there is.
    """

    name: str
    kernel: Any
    signature: Mapping[str, str]
    constants: Mapping[str, Any]
    num_warps: int = 4
    num_stages: int = 2
    aligned: frozenset[str] = field(default_factory=frozenset)
    fuses: bool = True
    requires_wgmma: bool = False


@dataclass(frozen=True)
class Compiled:
    """Reports the compiled variant `name`: bytes of `shared` memory of a program, `registers` and bytes `spilled` of a
    thread, and the `matrix` instructions that it uses: "wgmma", "tcgen05", "mma" or none."""

    name: str
    shared: int
    registers: int
    spilled: int
    matrix: str


def compile_variant(variant: Variant, capability: int = HOPPER) -> Compiled:
    """Raises whatever Triton does if it cannot."""
    target = GPUTarget("cuda", capability, _WARP)
    names = variant.kernel.arg_names
    signature = {name: "constexpr" if name in variant.constants else variant.signature[name] for name in names}
    aligned = {
        (index,): [["tt.divisibility", 16]]
        for index, name in enumerate(names)
        if signature[name].startswith("*") or name in variant.aligned
    }
    constants = {(names.index(name),): value for name, value in variant.constants.items()}
    source = ASTSource(variant.kernel, signature, constants, aligned)
    options = {
        "num_warps": variant.num_warps,
        "num_stages": variant.num_stages,
        "enable_fp_fusion": variant.fuses,
    }
    compiled = triton.compile(source, target=target, options=options)
    registers, spilled = _resources(compiled.asm["cubin"])
    return Compiled(variant.name, compiled.metadata.shared, registers, spilled, _matrix(compiled.asm["ptx"]))


def all_variants(capability: int = HOPPER) -> Iterator[Variant]:
    """Yields the variants of every module with kernels that may be launched on a GPU of this compute capability."""
    for name in FITTED_MODULES:
        yield from filter(
            partial(_is_served, capability=capability), import_module(_PACKAGE + name).variants(capability)
        )
    for name in MODULES:
        yield from filter(partial(_is_served, capability=capability), import_module(_PACKAGE + name).variants())


def _is_served(variant: Variant, capability: int) -> bool:
    """Returns whether a GPU of this compute capability serves the variant: workers refuse a cache of fp8 where there is
    no fp8."""
    return takes_fp8(capability) or not any("fp8" in kind for kind in variant.signature.values())


def faults(variant: Variant, compiled: Compiled, capability: int = HOPPER) -> list[str]:
    """Returns what is wrong with a compiled variant, one line for each fault."""
    found = []
    if compiled.shared > (limit := shared_limit(capability)):
        found.append(f"takes {compiled.shared} bytes of shared memory; there are {limit}")
    wanted = _LARGE_MATRIX.get(capability, "mma")
    if variant.requires_wgmma and compiled.matrix != wanted:
        found.append(f"does not use {wanted}, on which the promise of its results rests")
    return found


def _matrix(ptx: str) -> str:
    return next((kind for kind, name in _MATRIX.items() if name in ptx), "")


def _resources(cubin: bytes) -> tuple[int, int]:
    """Registers and spilled bytes of a thread, as the disassembler that comes with Triton tells."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        printed = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True)
    usage = {key: int(value) for key, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", printed.stdout)}
    return usage["REG"], usage["STACK"] + usage["LOCAL"]


def _compile_share(
    share: int, num_shares: int, capability: int, only: Sequence[str]
) -> list[tuple[Variant, Compiled | Exception]]:
    """Compiles every `num_shares`-th variant from number `share` on. Kernels cannot be sent from process to process, so
    each process makes its own."""
    done: list[tuple[Variant, Compiled | Exception]] = []
    wanted = [each for each in all_variants(capability) if not only or any(text in each.name for text in only)]
    for variant in wanted[share::num_shares]:
        try:
            done.append((_described(variant), compile_variant(variant, capability)))
        except Exception as error:
            done.append((_described(variant), RuntimeError(f"{type(error).__name__}: {error}")))
    return done


def _described(variant: Variant) -> Variant:
    """Returns a copy of the variant without the kernel."""
    return Variant(variant.name, None, {}, {}, requires_wgmma=variant.requires_wgmma)


def main(arguments: Sequence[str] | None = None) -> int:
    """Compiles all variants, prints each fault, and returns the number of variants with a fault."""
    parser = argparse.ArgumentParser(prog="octavo.kernels.triton.ahead", description=__doc__)
    parser.add_argument(
        "--capabilities", type=int, nargs="+", choices=CAPABILITIES, default=[HOPPER], metavar="CAPABILITY",
        help=f"of {', '.join(map(str, CAPABILITIES))}",
    )  # fmt: skip
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="TEXT", help="variants with one of these in their name"
    )
    options = parser.parse_args(arguments)
    return sum(_compile_all(capability, options.only) for capability in options.capabilities)


def _compile_all(capability: int, only: Sequence[str]) -> int:
    """Returns the number of variants with a fault on such a GPU; 1 if there is no variant at all."""
    processes = len(os.sched_getaffinity(0))
    compile_share = partial(_compile_share, num_shares=processes, capability=capability, only=only)
    with ProcessPoolExecutor(processes) as pool:
        shares = pool.map(compile_share, range(processes))
        done = [each for share in shares for each in share]
    wrong = 0
    for variant, compiled in sorted(done, key=lambda each: each[0].name):
        if isinstance(compiled, Exception):
            wrong += 1
            print(f"{variant.name}: does not compile: {compiled}")
            continue
        found = faults(variant, compiled, capability)
        wrong += bool(found)
        spilled = f", {compiled.spilled} bytes spilled" if compiled.spilled else ""
        print(
            f"{variant.name}: {compiled.registers} registers, {compiled.shared} bytes shared{spilled}"
            f" {compiled.matrix} {'; '.join(found)}".rstrip()
        )
    print(f"sm_{capability}: {len(done)} variants, {wrong} with a fault")
    return wrong + (not done)


if __name__ == "__main__":
    sys.exit(bool(main()))
