"""Every kernel compiles for a Hopper GPU in every configuration, and takes no more than one has; and for other GPUs."""

import os
import subprocess
import sys
from dataclasses import replace

import pytest

from octavo.kernels.triton.ahead import CAPABILITIES, Compiled, Variant, all_variants, faults
from octavo.kernels.triton.devices import HOPPER, shared_limit

FINE = Compiled("x", shared=1024, registers=64, spilled=0, matrix="mma")
ANY = Variant("x", None, {}, {})
OTHERS = [capability for capability in CAPABILITIES if capability != HOPPER]


def test_each_kernel_compiles() -> None:
    """In the configuration of the shortest name."""
    names: dict[str, list[str]] = {}
    for variant in all_variants():
        names.setdefault(variant.kernel.fn.__name__, []).append(variant.name)
    chosen = [min(names[kernel], key=len) for kernel in names]
    told = compiled_ahead("--only", *chosen)
    assert all(f"{name}: " in told for name in chosen)


# Two minutes of work, shared by the cores there are.
@pytest.mark.deep
@pytest.mark.timeout(900)
def test_everything_compiles() -> None:
    assert "variants, 0 with a fault" in compiled_ahead()


# Those that take most: heads of 256, and the largest product. All of them for all GPUs, `make test-long` compiles.
@pytest.mark.deep
@pytest.mark.timeout(900)
def test_the_largest_compile_for_other_gpus() -> None:
    largest = ("attend: exact fp16 from fp16, groups of 2, heads of 256", "linear 128x256 bf16 4096")
    told = compiled_ahead("--capabilities", *map(str, OTHERS), "--only", *largest)
    for capability in OTHERS:
        assert f"sm_{capability}: 2 variants, 0 with a fault" in told


def compiled_ahead(*arguments: str) -> str:
    """What it prints, having found no fault."""
    # Kernels that were made for the interpreter cannot be compiled.
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "octavo.kernels.triton.ahead", *arguments],
        env=environment | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_no_cache_of_fp8_is_launched_where_there_is_none(capability: int) -> None:
    kinds = {kind for variant in all_variants(capability) for kind in variant.signature.values()}
    assert ("*fp8e4nv" in kinds) == (capability >= 89)


def test_more_shared_memory_than_there_is_is_a_fault() -> None:
    assert faults(ANY, FINE) == []
    [fault] = faults(ANY, replace(FINE, shared=shared_limit(HOPPER) + 1))
    assert "shared memory" in fault


def test_what_promises_the_bits_of_wgmma_must_use_it() -> None:
    promising = replace(ANY, requires_wgmma=True)
    [fault] = faults(promising, FINE)
    assert "wgmma" in fault
    assert faults(promising, replace(FINE, matrix="wgmma")) == []
    # Other GPUs have another one.
    assert faults(promising, FINE, 86) == []
    [fault] = faults(promising, replace(FINE, matrix=""), 86)
    assert "does not use mma" in fault
    [fault] = faults(promising, FINE, 100)
    assert "does not use tcgen05" in fault
