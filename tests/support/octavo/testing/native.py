"""Octavo's own CPU kernels for tests: one instruction set after the other, any number of threads, or none at all."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from octavo.kernels.native.library import VARIANT_VARIABLE, NativeLibrary, NativeUnavailable, find, load

VARIANTS = ("amx", "avx512_bf16", "avx512_vnni", "avx512", "avx_vnni", "avx2", "portable")


def loaded() -> NativeLibrary:
    """The library with this CPU's best variant; skips the test where there is none."""
    try:
        return load()
    except NativeUnavailable as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module", params=VARIANTS)
def library(request: pytest.FixtureRequest) -> Iterator[NativeLibrary]:
    """The library, while all of the process uses one variant that this CPU runs."""
    best = loaded()
    if best.functions.octavo_choose(request.param.encode()) is None:
        pytest.skip(f"this CPU does not run {request.param}")
    yield NativeLibrary(request.param, best.functions)
    best.functions.octavo_choose(best.variant.encode())


@pytest.fixture(params=["compiled", "torch"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Once with Octavo's own kernels where they are compiled, once without; says which."""
    monkeypatch.delenv(VARIANT_VARIABLE, raising=False)
    if request.param == "torch":
        monkeypatch.setenv(VARIANT_VARIABLE, "none")
    find.cache_clear()
    yield request.param
    find.cache_clear()


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Lets torch, and so the kernels, use `count` threads inside the block."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
