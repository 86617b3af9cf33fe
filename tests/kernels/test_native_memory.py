"""Memory for large arrays."""

import pytest
import torch

from octavo.kernels.native.memory import Arena, zeros


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
@pytest.mark.parametrize("touched", [False, True])
@pytest.mark.parametrize("shape", [(3, 5, 7), (1,), (0, 4), (2, 1 << 20)])
def test_zeros_are_zeros_of_the_shape_asked_for(shape: tuple[int, ...], touched: bool, dtype: torch.dtype) -> None:
    tensor = zeros(shape, dtype, touched=touched)
    assert (tensor.shape, tensor.dtype) == (shape, dtype)
    assert tensor.is_contiguous()
    assert not tensor.any()
    tensor.fill_(1)
    assert tensor.all()


def test_zeros_start_at_a_page() -> None:
    assert zeros((5,), torch.float32).data_ptr() % 4096 == 0


def test_there_is_not_room_for_everything() -> None:
    with pytest.raises(OSError, match="memory"):
        zeros((1 << 50,), torch.float32)


def test_an_arenas_tensors_are_aligned_and_apart() -> None:
    arena = Arena()
    tensors = [arena.empty(count, dtype) for count in (1, 7, 33, 1000) for dtype in (torch.float32, torch.bfloat16)]
    for number, tensor in enumerate(tensors):
        assert tensor.data_ptr() % 64 == 0
        tensor.fill_(number)
    for number, tensor in enumerate(tensors):
        assert (tensor == number).all()


def test_an_arenas_tensors_share_a_piece_while_they_fit_into_it() -> None:
    arena = Arena()
    first, second = arena.empty(10, torch.float32), arena.empty(10, torch.float32)
    assert second.data_ptr() - first.data_ptr() == 64
    large = arena.empty(20 << 20, torch.float32)
    assert large.shape == (20 << 20,)
    before = {first.untyped_storage().data_ptr(), second.untyped_storage().data_ptr()}
    assert len(before) == 1
    assert large.untyped_storage().data_ptr() not in before


def test_an_empty_tensor_takes_nothing() -> None:
    assert Arena().empty(0, torch.bfloat16).shape == (0,)
