"""The largest of each row against sorting."""

from math import inf

import numpy as np
import numpy.typing as npt
import pytest
import torch

from octavo.worker.sampling.row_reductions import argmax, largest

# Few distinct values of every kind, so that equal ones straddle every cut.
KINDS = np.array([-inf, -3e38, -2.5, -1.0, -1e-45, -0.0, 0.0, 1e-45, 1.0, 3e38], dtype=np.float32)
SIZES = [1, 2, 60, 255, 256, 257, 5000]


def few_values(rows: int, size: int) -> npt.NDArray[np.float32]:
    return np.random.default_rng(size).choice(KINDS, size=(rows, size))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("count", [1, 3, 40, 200])
def test_the_largest_are_those_that_sorting_finds(size: int, count: int) -> None:
    values = few_values(6, size)
    # Of what is impossible it is open which.
    values[values == -inf] = -3.4e38
    found, tokens = largest(torch.from_numpy(values), count)
    # A stable sort of what falls: equal ones by rising id.
    order = np.argsort(-values, axis=-1, kind="stable")[:, :count]
    assert tokens.tolist() == order.tolist()
    assert torch.equal(found, torch.from_numpy(np.take_along_axis(values, order, axis=-1)))


@pytest.mark.parametrize("size", SIZES)
def test_the_likeliest_is_the_first_of_the_largest(size: int) -> None:
    values = few_values(20, size)
    found, tokens = argmax(torch.from_numpy(values))
    assert tokens.tolist() == values.argmax(axis=-1).tolist()
    assert found.tolist() == values.max(axis=-1).tolist()


@pytest.mark.parametrize("place", [0, 255, 256, 511, 599])
def test_what_is_not_finite_shows_as_the_largest(place: int) -> None:
    logits = torch.zeros(3, 600)
    logits[0, place], logits[1, place] = torch.nan, inf
    logits[2] = -inf
    found, _ = argmax(logits)
    assert not torch.isfinite(found).any()


def test_rows_that_are_not_next_to_each_other_in_memory_are_read_right() -> None:
    whole = torch.randn(4, 2000, generator=torch.Generator().manual_seed(0))
    part = whole[::2, 3:1500]
    assert all(torch.equal(*pair) for pair in zip(largest(part, 9), largest(part.clone(), 9), strict=True))
