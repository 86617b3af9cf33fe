"""Pinned memory, with a stand-in for CUDA's runtime."""

import gc
import logging
from dataclasses import dataclass, field

import pytest
import torch

from octavo.worker.gpu.swap import PinningError, pinned_zeros


@dataclass
class FakeCudart:
    """Registers memory, unless it fails with `code`."""

    code: int = 0
    registered: dict[int, int] = field(default_factory=dict)

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        assert flags == 1 | 2
        if not self.code:
            self.registered[address] = size
        return self.code

    def cudaHostUnregister(self, address: int) -> int:
        del self.registered[address]
        return 0


@pytest.fixture
def cudart(monkeypatch: pytest.MonkeyPatch) -> FakeCudart:
    fake = FakeCudart()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: fake)
    return fake


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_as_much_is_pinned_as_was_asked_for_and_for_as_long_as_it_is_held(
    cudart: FakeCudart, dtype: torch.dtype, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        tensor = pinned_zeros((3, 2, 1000), dtype)
    assert (tensor.shape, tensor.dtype) == ((3, 2, 1000), dtype)
    assert not tensor.view(torch.uint8).any()
    assert cudart.registered == {tensor.data_ptr(): 6000 * dtype.itemsize}
    assert [record.message.split()[0] for record in caplog.records] == ["pinning", "pinned"]
    del tensor
    gc.collect()
    assert not cudart.registered


def test_no_memory_is_pinned_for_no_blocks(cudart: FakeCudart) -> None:
    assert pinned_zeros((0, 2, 3), torch.float32).shape == (0, 2, 3)
    assert not cudart.registered


def test_what_cuda_does_not_pin_is_an_error(cudart: FakeCudart) -> None:
    cudart.code = 2
    with pytest.raises(PinningError, match=r"does not pin 48 bytes .* \(its error 2\)"):
        pinned_zeros((12,), torch.float32)
