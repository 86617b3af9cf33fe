"""Where the kernels run: on a GPU if there is one, else in Triton's interpreter."""

import pytest
import torch

from octavo.testing.interpreter import order_dots


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(scope="session")
def gpu(device: torch.device) -> torch.device:
    """For tests too large for the interpreter."""
    if device.type != "cuda":
        pytest.skip("no CUDA device: Triton's interpreter is too slow for this")
    return device


@pytest.fixture(autouse=True)
def _ordered_dots(monkeypatch: pytest.MonkeyPatch) -> None:
    order_dots(monkeypatch)
