"""Likelihoods of tokens and bounded logits, by every instruction set that this CPU runs, to the same bits."""

import functools
import hashlib

import pytest
import torch
from torch import Tensor

from octavo.kernels.native.library import NativeLibrary
from octavo.kernels.native.sampling import SPAN, softcap, weigh
from octavo.testing.native import library, loaded, threads

__all__ = ["library"]
SIZES = [1, 15, 16, 17, 255, 256, 257, 5000]


def logits_of(size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Logits, the largest of each row, and divisors; some logits are minus infinity."""
    generator = torch.Generator().manual_seed(size)
    logits = torch.randn((7, size), generator=generator) * 20
    logits[:, 1::11] = -torch.inf
    divisors = torch.rand(7, generator=generator) + 0.1
    return logits, logits.amax(dim=1), divisors


@pytest.mark.parametrize("size", SIZES)
def test_weights_are_exponentials_and_are_added_up_by_spans(library: NativeLibrary, size: int) -> None:
    logits, largest, divisors = logits_of(size)
    weights, sums = weigh(library, logits, largest, divisors)
    expected = ((logits.double() - largest.double()[:, None]) / divisors.double()[:, None]).exp()
    # An exponent of 100 is rounded by 4e-6 before it becomes a power.
    torch.testing.assert_close(weights.double(), expected, rtol=5e-5, atol=1e-37)
    torch.testing.assert_close(weights.amax(dim=1), torch.ones(7), rtol=0, atol=0)
    assert not weights[logits == -torch.inf].any()
    spans = [weights[:, first : first + SPAN].double().sum(dim=1) for first in range(0, size, SPAN)]
    torch.testing.assert_close(sums, torch.stack(spans, dim=1), rtol=1e-6, atol=0)


@pytest.mark.parametrize("size", SIZES)
def test_logits_are_bounded(library: NativeLibrary, size: int) -> None:
    logits = torch.randn((3, size), generator=torch.Generator().manual_seed(size)) * 60
    expected = (logits.double() / 30).tanh() * 30
    found = softcap(library, logits, 30.0)
    assert found is logits
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=1e-5)


@functools.cache
def bits_of_the_best() -> str:
    return bits(loaded())


def bits(library: NativeLibrary) -> str:
    digest = hashlib.sha256()
    for size in SIZES:
        logits, largest, divisors = logits_of(size)
        for found in (*weigh(library, logits, largest, divisors), softcap(library, largest.clone(), 30.0)):
            digest.update(found.numpy().tobytes())
    return digest.hexdigest()


@pytest.mark.parametrize("count", [1, 3])
def test_all_instruction_sets_and_numbers_of_threads_give_the_same_bits(library: NativeLibrary, count: int) -> None:
    with threads(count):
        found = bits(library)
    best = loaded()
    best.functions.octavo_choose(best.variant.encode())
    expected = bits_of_the_best()
    best.functions.octavo_choose(library.variant.encode())
    assert found == expected


def test_a_rows_weights_do_not_depend_on_the_rows_beside_it(library: NativeLibrary) -> None:
    logits, largest, divisors = logits_of(5000)
    together = weigh(library, logits, largest, divisors)
    for row in range(len(logits)):
        alone = weigh(library, logits[row : row + 1], largest[row : row + 1], divisors[row : row + 1])
        assert all(torch.equal(one[0], all_[row]) for one, all_ in zip(alone, together, strict=True))


def test_what_is_not_rows_of_fp32_is_refused(library: NativeLibrary) -> None:
    ones = torch.ones(2)
    for logits in (torch.zeros(2, 8)[:, :4], torch.zeros(2, 4, dtype=torch.float64), torch.zeros(2, 0)):
        with pytest.raises(ValueError, match="not rows of fp32"):
            weigh(library, logits, ones, ones)
    with pytest.raises(ValueError, match="\\[3\\] largest and \\[2\\] divisors for 2 rows"):
        weigh(library, torch.zeros(2, 4), torch.ones(3), ones)
    with pytest.raises(ValueError, match="not fp32"):
        softcap(library, torch.zeros(4, 2).T, 30.0)
