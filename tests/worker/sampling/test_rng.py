"""Philox against the vectors its authors publish, and the numbers drawn from it against chance."""

import numpy as np
import pytest

from octavo.worker.sampling.rng import philox4x32, uniforms

# Random123, tests/kat_vectors, philox4x32 10: counter, key, output.
VECTORS = [
    ([0, 0, 0, 0], [0, 0], [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        [0xA4093822, 0x299F31D0],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ),
]


def words(values: list[int]) -> list[np.ndarray[tuple[int, ...], np.dtype[np.uint64]]]:
    return [np.array([value], dtype=np.uint64) for value in values]


@pytest.mark.parametrize(("counter", "key", "expected"), VECTORS)
def test_philox_gives_the_published_vectors(counter: list[int], key: list[int], expected: list[int]) -> None:
    first, second, third, fourth = words(counter)
    key0, key1 = words(key)
    output = philox4x32((first, second, third, fourth), (key0, key1))
    assert [int(word[0]) for word in output] == expected


def chi_square(counts: np.ndarray[tuple[int, ...], np.dtype[np.int64]]) -> float:
    expected = counts.sum() / counts.size
    return float(((counts - expected) ** 2).sum() / expected)


def spread(numbers: np.ndarray[tuple[int, ...], np.dtype[np.float64]], bins: int) -> float:
    """Chi-square in standard deviations from its mean (bins - 1, with variance twice that)."""
    counts = np.bincount((numbers * bins).astype(np.int64), minlength=bins)
    return (chi_square(counts) - (bins - 1)) / float(np.sqrt(2 * (bins - 1)))


@pytest.mark.parametrize("moving", ["seed", "index", "position"])
def test_numbers_are_uniform_along_each_part_of_the_key(moving: str) -> None:
    count = 100_000
    steps, fixed = list(range(count)), [5] * count
    parts = {name: steps if name == moving else fixed for name in ("seed", "index", "position")}
    drawn = uniforms(parts["seed"], parts["index"], parts["position"])
    assert drawn.min() >= 0
    assert drawn.max() < 1
    assert abs(spread(drawn, 1000)) < 4


@pytest.mark.parametrize("moving", ["seed", "index", "position"])
def test_neighbouring_keys_draw_independent_numbers(moving: str) -> None:
    count = 100_000
    steps, fixed = list(range(count)), [5] * count
    parts = {name: steps if name == moving else fixed for name in ("seed", "index", "position")}
    drawn = uniforms(parts["seed"], parts["index"], parts["position"])
    pairs = np.floor(drawn[:-1:2] * 20) / 20 + drawn[1::2] / 20
    assert abs(spread(pairs, 400)) < 4
    assert abs(np.corrcoef(drawn[:-1], drawn[1:])[0, 1]) < 4 / np.sqrt(count)


def test_seeds_that_differ_in_either_half_differ() -> None:
    assert len(set(uniforms([1, 1 << 32, 1 << 63, 2**64 - 1], [0] * 4, [0] * 4))) == 4


def test_a_number_does_not_depend_on_its_row() -> None:
    together = uniforms([3, 9, 3], [0, 1, 0], [7, 2, 8])
    assert together[1] == uniforms([9], [1], [2])[0]
    assert together[0] != together[2]
