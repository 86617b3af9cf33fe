"""Which library is loaded, and what is said where none can be."""

import mmap
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from octavo.kernels.attention import TorchAttention
from octavo.kernels.backend import CacheShape
from octavo.kernels.choice import choose_attention
from octavo.kernels.native import library
from octavo.kernels.native.attention import NativeAttention
from octavo.kernels.native.build import LIBRARY
from octavo.kernels.native.library import VARIANT_VARIABLE, NativeUnavailable, find, load
from octavo.testing.native import VARIANTS, kernels, loaded

__all__ = ["kernels"]

CPU = torch.device("cpu")
SHAPE = CacheShape(16, 2, 64, torch.bfloat16)


@pytest.fixture
def fresh() -> Iterator[None]:
    """What was loaded is forgotten, before and after, and nothing is asked for."""
    find.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv(VARIANT_VARIABLE, raising=False)
        yield
    find.cache_clear()
    # Loading anew brings the best variant back.
    with suppress(NativeUnavailable):
        load()


@pytest.fixture
def compiled(fresh: None) -> None:
    """Only where there is a library."""
    loaded()
    find.cache_clear()


@pytest.mark.usefixtures("compiled")
def test_the_best_variant_that_this_cpu_runs_is_taken() -> None:
    functions = load().functions
    runs = [name for name in VARIANTS if functions.octavo_choose(name.encode())]
    assert load().variant == runs[0]
    assert runs[-1] == "portable"


@pytest.mark.usefixtures("compiled")
def test_a_variant_can_be_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIANT_VARIABLE, "portable")
    assert load().variant == "portable"
    assert choose_attention(SHAPE, CPU).attention.name == "native portable"


@pytest.mark.usefixtures("compiled")
def test_an_empty_variable_asks_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIANT_VARIABLE, "")
    assert load().variant


def refusal() -> str:
    with pytest.raises(NativeUnavailable) as caught:
        load()
    return str(caught.value)


@pytest.mark.usefixtures("compiled")
def test_a_variant_that_is_none_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIANT_VARIABLE, "sse9")
    assert refusal() == "OCTAVO_CPU_KERNELS=sse9 is no variant that this CPU runs"


@pytest.mark.usefixtures("compiled")
def test_a_library_of_other_sources_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "source_hash", lambda: "0123456789abcdef")
    assert refusal().startswith("they were compiled from other sources than these; run `python -m octavo.kernels.")


@pytest.mark.usefixtures("fresh")
def test_they_can_be_turned_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIANT_VARIABLE, "none")
    assert refusal() == "OCTAVO_CPU_KERNELS=none turns them off"


@pytest.mark.usefixtures("fresh")
def test_a_missing_library_is_said_to_be_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(library, "LIBRARY", tmp_path / "none.so")
    assert refusal().startswith("they were not compiled when Octavo was installed; run `python -m octavo.kernels.")


@pytest.mark.usefixtures("fresh")
def test_a_file_that_is_no_library_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = tmp_path / "broken.so"
    broken.write_text("not an object")
    monkeypatch.setattr(library, "LIBRARY", broken)
    assert refusal().startswith(f"{broken} cannot be loaded (")
    assert "with a C++ compiler installed" in refusal()


@pytest.mark.parametrize(
    ("name", "is_runtime"),
    [
        ("libgomp.so.1", True),
        ("libgomp-a34b3233.so.1", True),
        ("libiomp5.so", True),
        ("libgomp_notes.txt", False),
        ("libtorch_cpu.so", False),
        ("(deleted)", False),
    ],
)
def test_the_openmp_runtime_is_the_one_in_this_process(name: str, is_runtime: bool) -> None:
    path = f"/a folder/torch/lib/{name}"
    places = ("00:1b 42    /usr/lib/libc.so.6", "00:00 0", f"00:1b 43    {path}")
    maps = "".join(f"7f00-7f01 r-xp 00000000 {place}\n" for place in places)
    assert library.openmp_runtime(maps) == (path if is_runtime else "libgomp.so.1")


@pytest.mark.usefixtures("compiled")
def test_a_mapped_file_may_have_any_name(tmp_path: Path) -> None:
    path = tmp_path / os.fsdecode(b"weights-\xff")
    path.write_bytes(b"x")
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ):
        assert load().variant in VARIANTS


@pytest.mark.usefixtures("compiled")
def test_the_library_serves_attention_where_it_can() -> None:
    choice = choose_attention(SHAPE, CPU)
    assert isinstance(choice.attention, NativeAttention)
    assert choice.reason is None


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize(
    ("shape", "reason"),
    [
        (CacheShape(8, 2, 64, torch.bfloat16), "they want blocks of a multiple of 16 tokens, not 8"),
        (CacheShape(24, 2, 64, torch.bfloat16), "they want blocks of a multiple of 16 tokens, not 24"),
        (CacheShape(16, 2, 24, torch.float32), "they want heads of a multiple of 16 elements, not 24"),
        (CacheShape(16, 2, 64, torch.float16), "they compute in float32 and bfloat16, not float16"),
    ],
)
def test_torch_serves_what_the_kernels_do_not(shape: CacheShape, reason: str) -> None:
    choice = choose_attention(shape, CPU)
    assert isinstance(choice.attention, TorchAttention)
    assert choice.reason == reason
    with pytest.raises(ValueError, match=reason):
        NativeAttention(load(), shape)


def test_torch_serves_where_there_are_no_kernels(kernels: str) -> None:
    choice = choose_attention(SHAPE, CPU)
    if kernels == "torch":
        assert isinstance(choice.attention, TorchAttention)
        assert choice.reason == "OCTAVO_CPU_KERNELS=none turns them off"


@pytest.mark.usefixtures("compiled")
def test_a_gpu_is_no_matter_of_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    choice = choose_attention(SHAPE, torch.device("cuda"))
    assert (choice.attention.name, choice.reason) == (
        "torch",
        "there is no Triton; install it with pip install '.[gpu]' in Octavo's source tree",
    )


def test_the_library_shares_torchs_openmp() -> None:
    """Two runtimes would keep two teams of threads, which wait for each other's cores."""
    loaded()
    if b"libomp" in LIBRARY.read_bytes():
        pytest.skip("its compiler has an OpenMP runtime of its own")
    script = (
        "from octavo.kernels.native.library import load; load()\n"
        "lines = open('/proc/self/maps').read().splitlines()\n"
        "print(len({line.split()[-1] for line in lines if 'gomp' in line or 'libomp' in line or 'iomp' in line}))"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True)
    assert result.stdout.strip() == "1"


@pytest.mark.usefixtures("compiled")
def test_where_the_system_refuses_tile_registers_the_next_variant_is_taken() -> None:
    """It refuses a process with a stack for signals that could not hold them."""
    functions = load().functions
    runs = [name for name in VARIANTS if functions.octavo_choose(name.encode())]
    if runs[0] != "amx":
        pytest.skip("this CPU or system does not run amx")
    script = (
        "import ctypes\n"
        "class Stack(ctypes.Structure):\n"
        "    _fields_ = [('at', ctypes.c_void_p), ('flags', ctypes.c_int), ('size', ctypes.c_size_t)]\n"
        "room = ctypes.create_string_buffer(8192)\n"
        "assert ctypes.CDLL(None).sigaltstack(ctypes.byref(Stack(ctypes.addressof(room), 0, 8192)), None) == 0\n"
        "from octavo.kernels.native.library import load\n"
        "print(load().variant)"
    )
    environment = {name: value for name, value in os.environ.items() if name != VARIANT_VARIABLE}
    result = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=120, check=True
    )
    assert result.stdout.strip() == runs[1]
