"""Every kernel compiles for a Hopper GPU in every configuration, and takes no more than one has."""

import os
import subprocess
import sys
from dataclasses import replace

import pytest

from octavo.kernels.triton.ahead import SHARED_LIMIT, Compiled, Variant, faults

FINE = Compiled("x", shared=1024, registers=64, spilled=0, matrix="mma")
ANY = Variant("x", None, {}, {})


# Two minutes of work, shared by the cores there are.
@pytest.mark.timeout(900)
def test_everything_compiles() -> None:
    # Kernels that were made for the interpreter cannot be compiled.
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "octavo.kernels.triton.ahead"],
        env=environment | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert "variants, 0 with a fault" in done.stdout


def test_more_shared_memory_than_there_is_is_a_fault() -> None:
    assert faults(ANY, FINE) == []
    [fault] = faults(ANY, replace(FINE, shared=SHARED_LIMIT + 1))
    assert "shared memory" in fault


def test_what_promises_the_bits_of_wgmma_must_use_it() -> None:
    promising = replace(ANY, requires_wgmma=True)
    [fault] = faults(promising, FINE)
    assert "wgmma" in fault
    assert faults(promising, replace(FINE, matrix="wgmma")) == []
