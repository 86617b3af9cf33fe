"""Parts of tensors: which elements a process needs of one that is stored whole. Pure numbers."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import product


@dataclass(frozen=True, slots=True)
class Part:
    """The places of dimension `dim` that `ranges` name, range after range; of all other dimensions everything."""

    dim: int
    ranges: tuple[range, ...]

    def shape(self, whole: tuple[int, ...]) -> tuple[int, ...]:
        """The part's, of a tensor of shape `whole`. Raises `ValueError` if that does not have all of it."""
        if not 0 <= self.dim < len(whole) or not all(_within(each, whole[self.dim]) for each in self.ranges):
            raise ValueError(f"{self} of a tensor {list(whole)}")
        return (*whole[: self.dim], sum(map(len, self.ranges)), *whole[self.dim + 1 :])

    def pieces(self, whole: tuple[int, ...]) -> Iterator[tuple[int, int]]:
        """Where the part's elements lie in a tensor of shape `whole`, in their order in the part: pairs of a first
        element and a number of elements, neighbours joined."""
        before, size, after = math.prod(whole[: self.dim]), whole[self.dim], math.prod(whole[self.dim + 1 :])
        return _joined(
            ((row * size + each.start) * after, len(each) * after) for row, each in product(range(before), self.ranges)
        )


def _within(places: range, size: int) -> bool:
    return places.step == 1 and 0 <= places.start <= places.stop <= size


def _joined(pieces: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    start = end = 0
    for first, count in pieces:
        if first != end:
            if end > start:
                yield start, end - start
            start = first
        end = first + count
    if end > start:
        yield start, end - start
