"""Every kind of linear layer against `F.linear`, and rows that do not depend on how many there are."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.kernels.native.library import NativeLibrary
from octavo.testing.native import kernels, loaded
from octavo.worker.models import linear
from octavo.worker.models.linear import (
    ACTIVATIONS,
    GatedLinear,
    Linear,
    LinearKind,
    best_kind,
    prepacking_available,
)

__all__ = ["kernels"]

DTYPES = [torch.float32, torch.bfloat16]
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2}
# Of weights that are not quantised.
KINDS = [LinearKind.NATIVE, LinearKind.ONEDNN, LinearKind.PLAIN]
# Their rows do not depend on how many there are.
STEADY = [LinearKind.NATIVE, LinearKind.ONEDNN]


def needs(kind: LinearKind, dtype: torch.dtype) -> None:
    if kind is LinearKind.NATIVE:
        loaded()
    if kind is LinearKind.ONEDNN and not prepacking_available(dtype):
        pytest.skip(f"this torch or CPU does not prepack {dtype}")


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("biased", [False, True])
def test_every_kind_multiplies(kind: LinearKind, dtype: torch.dtype, biased: bool) -> None:
    needs(kind, dtype)
    weight, bias = random(96, 80, dtype=dtype), random(96, dtype=dtype) if biased else None
    layer = Linear(weight, bias, kind=kind)
    assert layer.kind is kind
    assert bool(layer.native) == (kind is LinearKind.NATIVE)
    for rows in (1, 2, 33):
        inputs = random(rows, 80, dtype=dtype, seed=1)
        expected = F.linear(inputs, weight, bias)
        torch.testing.assert_close(layer(inputs), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
        exact = layer.to_float(inputs)
        assert exact.dtype == torch.float32
        torch.testing.assert_close(exact, expected.float(), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
        room = torch.empty(rows, 96)
        assert layer.to_float(inputs, out=room) is room
        assert torch.equal(room, exact)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("biased", [False, True])
def test_every_kind_gates(kind: LinearKind, dtype: torch.dtype, activation: str, biased: bool) -> None:
    needs(kind, dtype)
    weight, bias = random(2 * 50, 64, dtype=dtype) / 4, random(2 * 50, dtype=dtype) if biased else None
    layer = GatedLinear(weight, bias, activation, kind=kind)
    for rows in (1, 7):
        inputs = random(rows, 64, dtype=dtype, seed=1)
        gate, up = F.linear(inputs.float(), weight.float(), None if bias is None else bias.float()).chunk(2, dim=1)
        outputs = layer(inputs)
        assert outputs.dtype == dtype
        torch.testing.assert_close(
            outputs.float(), ACTIVATIONS[activation](gate) * up, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype]
        )


@pytest.mark.parametrize("kind", STEADY)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_is_the_same_alone_as_among_others(kind: LinearKind, dtype: torch.dtype) -> None:
    needs(kind, dtype)
    # The widest input of the bundled model: there a single row takes another path than several.
    weight = random(576, 1536, dtype=dtype)
    inputs = random(64, 1536, dtype=dtype, seed=1)
    layers: list[Callable[[Tensor], Tensor]] = [Linear(weight, kind=kind)]
    if kind is LinearKind.NATIVE:
        # Torch's activations promise no such thing.
        layers.append(GatedLinear(weight, None, "silu", kind=kind))
    for layer in layers:
        together = layer(inputs)
        for rows in (1, 2, 7):
            assert torch.equal(layer(inputs[:rows]), together[:rows])


def test_logits_of_bfloat16_are_not_rounded_where_that_can_be_had() -> None:
    needs(LinearKind.NATIVE, torch.bfloat16)
    weight, inputs = random(300, 64, dtype=torch.bfloat16), random(3, 64, dtype=torch.bfloat16, seed=1)
    exact = F.linear(inputs.float(), weight.float())
    torch.testing.assert_close(Linear(weight, kind=LinearKind.NATIVE).to_float(inputs), exact, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_kernels_are_taken_where_there_are_any(
    dtype: torch.dtype, kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear, "_has_matrix_unit", lambda: False)
    weight = random(4, 8, dtype=dtype)
    if kernels == "compiled":
        loaded()
        assert best_kind(weight) is LinearKind.NATIVE
    else:
        assert best_kind(weight) is (LinearKind.ONEDNN if prepacking_available(dtype) else LinearKind.PLAIN)
        monkeypatch.setattr(linear, "prepacking_available", lambda _: False)
        assert best_kind(weight) is LinearKind.PLAIN
    assert Linear(weight).kind is best_kind(weight)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("variant", ["amx", "avx512_bf16"])
def test_a_matrix_unit_is_onednns_to_use_where_the_kernels_do_not(
    variant: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs(LinearKind.NATIVE, dtype)
    needs(LinearKind.ONEDNN, dtype)
    monkeypatch.setattr(linear, "_has_matrix_unit", lambda: True)
    library = NativeLibrary(variant, loaded().functions)
    monkeypatch.setattr(linear, "load", lambda: library)
    left = variant != "amx" and dtype == torch.bfloat16
    expected = LinearKind.ONEDNN if left else LinearKind.NATIVE
    assert best_kind(random(4, 8, dtype=dtype)) is expected


def test_what_the_kernels_cannot_multiply_others_do() -> None:
    odd = random(4, 7)
    assert best_kind(odd) is not LinearKind.NATIVE
    torch.testing.assert_close(Linear(odd)(random(3, 7)), F.linear(random(3, 7), odd))
    layer = Linear(torch.randn(4, 8, dtype=torch.float64))
    assert layer.kind is LinearKind.PLAIN
    assert layer(torch.randn(3, 8, dtype=torch.float64)).shape == (3, 4)
    assert best_kind(torch.empty(4, 8, device="meta")) is LinearKind.PLAIN


def test_a_gate_of_another_kind_than_theirs_is_left_to_torch() -> None:
    loaded()
    layer = GatedLinear(random(8, 8), None, "relu", kind=LinearKind.NATIVE)
    assert layer.kind is not LinearKind.NATIVE
    assert not layer.native
