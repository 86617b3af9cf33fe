"""Fixtures of tests of a worker's step."""

from collections.abc import Iterator

import pytest

from octavo.testing.native import loaded


@pytest.fixture(scope="module")
def compiled_kernels() -> Iterator[None]:
    """Also in bfloat16 where the CPU has a matrix unit, which would else be left to oneDNN."""
    loaded()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("octavo.worker.models.linear._has_matrix_unit", lambda: False)
        yield
