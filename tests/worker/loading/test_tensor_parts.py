"""A part of a tensor is what indexing it gives."""

import math

import pytest
import torch

from octavo.worker.loading.tensor_file import TensorPart


def taken(whole: torch.Tensor, part: TensorPart) -> torch.Tensor:
    """The part by its pieces."""
    flat = whole.flatten()
    pieces = [flat[first : first + count] for first, count in part.pieces(tuple(whole.shape))]
    return torch.cat([*pieces, flat[:0]]).view(part.shape(tuple(whole.shape)))


@pytest.mark.parametrize("shape", [(6,), (6, 5), (6, 6, 2), (4, 3, 6)])
@pytest.mark.parametrize(
    "ranges",
    [(range(1, 3),), (range(2), range(4, 6)), (range(3, 6), range(3)), (range(6),), (range(2, 2),), (range(1),) * 2],
)
def test_pieces_are_the_elements_in_their_order(shape: tuple[int, ...], ranges: tuple[range, ...]) -> None:
    whole = torch.arange(math.prod(shape)).view(shape)
    places = [place for each in ranges for place in each]
    for dim in (dim for dim, size in enumerate(shape) if size == 6):
        expected = whole.index_select(dim, torch.tensor(places, dtype=torch.int64))
        assert torch.equal(taken(whole, TensorPart(dim, ranges)), expected)


def test_what_lies_side_by_side_is_one_piece() -> None:
    assert list(TensorPart(0, (range(2, 5),)).pieces((9, 4))) == [(8, 12)]
    assert list(TensorPart(1, (range(4),)).pieces((9, 4))) == [(0, 36)]
    assert list(TensorPart(1, (range(1), range(1, 4))).pieces((9, 4))) == [(0, 36)]
    assert list(TensorPart(1, (range(1, 3),)).pieces((2, 4))) == [(1, 2), (5, 2)]
    assert not list(TensorPart(1, (range(4),)).pieces((0, 4)))


@pytest.mark.parametrize(
    "part",
    [
        TensorPart(0, (range(3, 5),)),
        TensorPart(0, (range(-1, 2),)),
        TensorPart(0, (range(0, 4, 2),)),
        TensorPart(2, (range(1),)),
    ],
)
def test_a_part_that_a_tensor_does_not_have_is_refused(part: TensorPart) -> None:
    with pytest.raises(ValueError, match=r"Part\(.* of a tensor \[4, 4\]"):
        part.shape((4, 4))
