"""What is to have the same bits on every instruction set, on all of them that this CPU runs."""

from collections.abc import Iterator
from ctypes import byref
from typing import Any

import pytest
import torch
from tests.kernels.test_native_attention import MIXED, attend, random_batch
from torch import Tensor

from octavo.kernels.native.library import NativeLibrary
from octavo.kernels.native.norm import norm_op, rms_norm
from octavo.testing.native import VARIANTS, loaded

BATCHES: dict[str, dict[str, Any]] = {
    "mixed": {"lengths": MIXED},
    "all at once": {
        "lengths": MIXED,
        "softcap": 2.0,
        "sinks": True,
        "window": 19,
        "group": 5,
        "head_dim": 48,
        "block_size": 32,
    },
    "many heads": {"lengths": MIXED[:4], "group": 13, "head_dim": 128},
}
F32, BF16 = torch.float32, torch.bfloat16


@pytest.fixture(scope="module")
def libraries() -> Iterator[list[NativeLibrary]]:
    """All variants that this CPU runs; each must be chosen before it is used."""
    best = loaded()
    names = [name for name in VARIANTS if best.functions.octavo_choose(name.encode())]
    best.functions.octavo_choose(best.variant.encode())
    yield [NativeLibrary(name, best.functions) for name in names]
    best.functions.octavo_choose(best.variant.encode())


def chosen(libraries: list[NativeLibrary]) -> Iterator[NativeLibrary]:
    for library in libraries:
        assert library.functions.octavo_choose(library.variant.encode())
        yield library


def assert_all_alike(results: list[Tensor]) -> None:
    """To the last bit, the sign of zeros included."""
    first, *others = [result.contiguous().view(torch.uint8) for result in results]
    assert others, "one instruction set has nothing to be like"
    assert all(torch.equal(other, first) for other in others)


@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize(
    ("dtype", "kept", "exact"),
    [(F32, torch.int8, False), (BF16, torch.int8, False), (F32, BF16, True), (F32, F32, True)],
    ids=["float32 over int8", "bfloat16 over int8", "float32 over bfloat16, exact", "float32, exact"],
)
def test_attention(libraries: list[NativeLibrary], name: str, dtype: Any, kept: torch.dtype, exact: bool) -> None:
    batch = random_batch(dtype=dtype, **BATCHES[name])
    assert_all_alike([attend(library, batch, kept, exact=exact) for library in chosen(libraries)])


@pytest.mark.parametrize("size", [16, 100, 576])
def test_norms(libraries: list[NativeLibrary], size: int) -> None:
    generator = torch.Generator().manual_seed(0)
    inputs, weight = torch.randn(9, size, generator=generator) * 3, torch.rand(size, generator=generator)
    assert_all_alike([rms_norm(library, inputs, weight, 1e-6, exact=True) for library in chosen(libraries)])


def test_norms_that_are_added(libraries: list[NativeLibrary]) -> None:
    generator = torch.Generator().manual_seed(0)
    inputs, weight, hidden = (torch.randn(*shape, generator=generator) for shape in ((7, 90), (90,), (7, 90)))
    op, results = norm_op(weight, 1e-5, x_stride=90, y_stride=90, added=0.7, exact=True), []
    for library in chosen(libraries):
        results.append(hidden.clone())
        library.functions.octavo_norm(byref(op), inputs.data_ptr(), results[-1].data_ptr(), 7, 0, 1)
    assert_all_alike(results)


def test_it_would_be_noticed(libraries: list[NativeLibrary]) -> None:
    """Where nothing asks for it, instruction sets differ."""
    batch = random_batch(dtype=F32, lengths=MIXED)
    results = [attend(library, batch, F32) for library in chosen(libraries)]
    assert not all(torch.equal(result, results[0]) for result in results)
