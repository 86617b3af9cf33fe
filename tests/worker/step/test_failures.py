"""Which errors mean that a step found no memory."""

import pytest
import torch

from octavo.worker.step.failures import is_out_of_memory, release_memory


def test_torch_that_cannot_allocate_is_out_of_memory() -> None:
    with pytest.raises(RuntimeError) as raised:
        torch.empty(1 << 56, dtype=torch.uint8)
    assert is_out_of_memory(raised.value)


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("std::bad_alloc"),
    ],
)
def test_errors_for_want_of_memory(error: Exception) -> None:
    assert is_out_of_memory(error)


@pytest.mark.parametrize(
    "error", [RuntimeError("shapes do not match"), ValueError("out of memory"), IndexError("index out of range")]
)
def test_other_errors(error: Exception) -> None:
    assert not is_out_of_memory(error)


class _Tensor:
    """Counts those that are alive."""

    alive = 0

    def __init__(self) -> None:
        _Tensor.alive += 1

    def __del__(self) -> None:
        _Tensor.alive -= 1


def _compute() -> None:
    activation = _Tensor()
    raise MemoryError(f"no room beside {_Tensor.alive} other ({activation})")


def test_what_the_failed_step_held_is_let_go_while_its_error_is_kept() -> None:
    with pytest.raises(MemoryError) as raised:
        _compute()
    assert _Tensor.alive == 1
    release_memory(raised.value)
    assert _Tensor.alive == 0
