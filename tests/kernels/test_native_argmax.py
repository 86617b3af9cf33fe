"""The largest logit of each row, by every instruction set that this CPU runs."""

import math

import pytest
import torch
from torch import Tensor

from octavo.kernels.native.argmax import argmax
from octavo.kernels.native.library import NativeLibrary
from octavo.testing.native import library, threads

__all__ = ["library"]
SIZES = [1, 15, 16, 17, 1023, 1024, 1025, 5000]


def plainly(row: Tensor) -> tuple[float, int]:
    values = row.tolist()
    broken = [place for place, value in enumerate(values) if math.isnan(value)]
    place = broken[0] if broken else values.index(max(values))
    return values[place], place


def assert_right(library: NativeLibrary, logits: Tensor) -> None:
    values, tokens = argmax(library, logits)
    expected = [plainly(row) for row in logits]
    assert tokens.tolist() == [place for _, place in expected]
    torch.testing.assert_close(values, torch.tensor([value for value, _ in expected]), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("size", SIZES)
def test_is_the_first_of_the_largest(library: NativeLibrary, size: int) -> None:
    generator = torch.Generator().manual_seed(size)
    # Few different values: most rows have several largest ones.
    assert_right(library, torch.randint(-3, 3, (40, size), generator=generator).float())
    assert_right(library, torch.randn((5, size), generator=generator))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("odd", [math.nan, -math.nan, math.inf, -math.inf])
def test_a_nan_is_the_largest_of_all_and_infinities_have_their_place(
    library: NativeLibrary, odd: float, size: int
) -> None:
    logits = torch.randn((size, size) if size < 100 else (6, size), generator=torch.Generator().manual_seed(0))
    for row, place in enumerate(torch.linspace(0, size - 1, len(logits)).long().tolist()):
        logits[row, place] = odd
    assert_right(library, logits)
    assert_right(library, torch.full((2, size), -math.inf))


def test_any_number_of_threads_finds_the_same(library: NativeLibrary) -> None:
    logits = torch.randn((7, 300), generator=torch.Generator().manual_seed(0))
    with threads(3):
        assert_right(library, logits)


def test_rows_with_gaps_or_of_another_dtype_are_refused(library: NativeLibrary) -> None:
    for logits in (torch.zeros(4, 8)[:, :4], torch.zeros(2, 4, dtype=torch.float64), torch.zeros(2, 0)):
        with pytest.raises(ValueError, match="not rows of fp32"):
            argmax(library, logits)
