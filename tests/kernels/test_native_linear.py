"""Every variant of the native product against torch, and rows that depend on nothing but themselves."""

from ctypes import byref

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.kernels.native.library import NativeLibrary
from octavo.kernels.native.linear import NativeLinear
from octavo.kernels.native.structs import DTYPES as NUMBERS
from octavo.kernels.native.structs import Activation
from octavo.testing.native import library, threads

__all__ = ["library"]

DTYPES = [torch.float32, torch.bfloat16]
# Sums of some hundred products around 1, rounded once at the end.
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2}
ACTIVATIONS = {
    Activation.SILU: F.silu,
    Activation.GELU_TANH: lambda inputs: F.gelu(inputs, approximate="tanh"),
}


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_close(actual: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    torch.testing.assert_close(actual.float(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("outputs", "inputs"), [(1, 2), (31, 48), (32, 64), (33, 50), (130, 130)])
@pytest.mark.parametrize("biased", [False, True])
def test_equals_torch_for_any_number_of_rows(
    library: NativeLibrary, outputs: int, inputs: int, biased: bool, dtype: torch.dtype
) -> None:
    weight, bias = random(outputs, inputs, dtype=dtype), random(outputs, dtype=dtype) if biased else None
    linear = NativeLinear(library, weight, bias)
    rows = random(40, inputs, dtype=dtype, seed=1)
    expected = F.linear(rows.float(), weight.float(), None if bias is None else bias.float())
    for count in range(41):
        products = linear(rows[:count])
        assert products.dtype == dtype
        assert_close(products, expected[:count], dtype)
    exact = linear.to_float(rows)
    assert exact.dtype == torch.float32
    assert_close(exact, expected, torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("outputs", [1, 16, 17, 40, 50])
def test_gated_products_equal_torch(
    library: NativeLibrary, outputs: int, activation: Activation, dtype: torch.dtype
) -> None:
    weight, bias = random(2 * outputs, 64, dtype=dtype) / 4, random(2 * outputs, dtype=dtype)
    rows = random(15, 64, dtype=dtype, seed=1)
    for given in (None, bias):
        gate, up = F.linear(rows.float(), weight.float(), None if given is None else given.float()).chunk(2, dim=1)
        products = NativeLinear(library, weight, given, activation)(rows)
        assert products.shape == (15, outputs)
        assert_close(products, ACTIVATIONS[activation](gate) * up, dtype)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations_hold_far_from_zero(library: NativeLibrary, activation: Activation) -> None:
    gates = torch.tensor([-1e30, -1e4, -100.0, -88.0, -10.0, -1e-6, 0.0, 1e-6, 10.0, 88.0, 100.0, 1e4, 1e30])
    # One input is the gate, the other is always 1.
    linear = NativeLinear(library, torch.eye(2), None, activation)
    rows = torch.stack((gates, torch.ones_like(gates)), dim=1)
    torch.testing.assert_close(linear(rows)[:, 0], ACTIVATIONS[activation](gates), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_products_are_added_once_to_what_each_row_holds(library: NativeLibrary, dtype: torch.dtype) -> None:
    weight, rows = random(50, 98, dtype=dtype) / 8, random(70, 98, dtype=dtype, seed=1)
    held = random(70, 64, dtype=dtype, seed=2)
    linear = NativeLinear(library, weight, None)
    op = linear.op(added=0.5, y_stride=64)
    for count in range(71):
        expected, outputs = held.float(), held.clone()
        expected[:count, :50] += 0.5 * F.linear(rows[:count].float(), weight.float())
        library.functions.octavo_linear(byref(op), rows.data_ptr(), outputs.data_ptr(), count, NUMBERS[dtype], 1)
        assert_close(outputs, expected, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", [None, Activation.SILU])
def test_a_row_is_the_same_whatever_is_beside_it(
    library: NativeLibrary, activation: Activation | None, dtype: torch.dtype
) -> None:
    linear = NativeLinear(library, random(200, 130, dtype=dtype), random(200, dtype=dtype), activation)
    rows = random(75, 130, dtype=dtype, seed=1)
    together = linear(rows)
    for count in range(1, 41):
        first = count % 30
        assert torch.equal(linear(rows[first : first + count]), together[first : first + count]), count
    assert torch.equal(linear(rows.flip(0)).flip(0), together)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_that_fill_a_cache_several_times_are_multiplied_once_each(
    library: NativeLibrary, dtype: torch.dtype
) -> None:
    # In bf16 two spans of rows, in fp32 three; the last ones are short.
    inputs, count = 6_000, 390
    linear = NativeLinear(library, random(70, inputs, dtype=dtype) / 64, None)
    rows, held = random(count, inputs, dtype=dtype, seed=1), random(count, 70, dtype=dtype, seed=2)
    op, outputs = linear.op(added=1.0, y_stride=70), held.clone()
    library.functions.octavo_linear(byref(op), rows.data_ptr(), outputs.data_ptr(), count, NUMBERS[dtype], 3)
    for first in (0, 150, 180, 380):
        some = slice(first, first + 10)
        alone = held[some].clone()
        library.functions.octavo_linear(byref(op), rows[some].data_ptr(), alone.data_ptr(), 10, NUMBERS[dtype], 1)
        assert torch.equal(outputs[some], alone), first
    expected = held.float() + F.linear(rows.float(), random(70, inputs, dtype=dtype).float() / 64)
    assert_close(outputs, expected, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_number_of_threads_does_not_show(library: NativeLibrary, dtype: torch.dtype) -> None:
    rows, results = random(20, 130, dtype=dtype, seed=1), []
    for count in (1, 2, 3, 9):
        with threads(count):
            linear = NativeLinear(library, random(200, 130, dtype=dtype), None)
            results.append((linear(rows), linear(rows[:1]), linear.to_float(rows)))
    for result in results[1:]:
        assert all(torch.equal(*pair) for pair in zip(result, results[0], strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_nan_shows_in_its_own_row_and_in_no_other(library: NativeLibrary, dtype: torch.dtype) -> None:
    linear = NativeLinear(library, random(50, 64, dtype=dtype), None)
    rows = random(14, 64, dtype=dtype, seed=1)
    expected = linear(rows)
    rows[5, 63] = torch.nan
    products = linear(rows)
    assert products[5].isnan().all()
    assert torch.equal(products.nan_to_num(0.0)[[*range(5), *range(6, 14)]], expected[[*range(5), *range(6, 14)]])


def test_inputs_and_weights_may_have_gaps(library: NativeLibrary) -> None:
    weight, rows = random(64, 40), random(48, 6, seed=1)
    expected = F.linear(rows.T[:, :40], weight)
    assert_close(NativeLinear(library, weight, None)(rows.T[:, :40]), expected, torch.float32)
    assert_close(NativeLinear(library, weight.T.contiguous().T, None)(rows.T[:, :40]), expected, torch.float32)


def test_many_weights_share_memory_without_overlap(library: NativeLibrary) -> None:
    weights = [random(size, 30, seed=size) for size in range(1, 60, 7)]
    linears = [NativeLinear(library, weight, None) for weight in weights]
    rows = random(3, 30)
    for weight, linear in zip(weights, linears, strict=True):
        assert_close(linear(rows), F.linear(rows, weight), torch.float32)


@pytest.mark.parametrize(
    ("weight", "bias", "activation", "message"),
    [
        (torch.zeros(4, 7), None, None, "cannot be packed"),
        (torch.zeros(4, 8, dtype=torch.float16), None, None, "cannot be packed"),
        (torch.zeros(4, 8, 2), None, None, "cannot be packed"),
        (torch.zeros(5, 8), None, Activation.SILU, "as many ups"),
        (torch.zeros(4, 8), torch.zeros(3), None, "a bias"),
        (torch.zeros(4, 8), torch.zeros(4, 1), None, "a bias"),
    ],
)
def test_a_weight_that_cannot_be_packed_is_refused(
    library: NativeLibrary, weight: Tensor, bias: Tensor | None, activation: Activation | None, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        NativeLinear(library, weight, bias, activation)


@pytest.mark.parametrize(
    "inputs", [torch.zeros(3, 9), torch.zeros(8), torch.zeros(1, 3, 8), torch.zeros(3, 8).bfloat16()]
)
def test_inputs_of_another_shape_or_type_are_refused(library: NativeLibrary, inputs: Tensor) -> None:
    linear = NativeLinear(library, torch.zeros(4, 8), None)
    for call in (linear, linear.to_float):
        with pytest.raises(ValueError, match="for a weight of 8 inputs"):
            call(inputs)


@pytest.mark.parametrize("dtype", DTYPES)
def test_fp32_products_can_be_put_where_they_belong(library: NativeLibrary, dtype: torch.dtype) -> None:
    linear = NativeLinear(library, random(33, 64, dtype=dtype), None)
    rows, room = random(5, 64, dtype=dtype, seed=1), torch.full((9, 33), torch.nan)
    assert linear.to_float(rows, out=room[2:7]).data_ptr() == room[2:7].data_ptr()
    assert torch.equal(room[2:7], linear.to_float(rows))
    assert room[[0, 1, 7, 8]].isnan().all()


@pytest.mark.parametrize(
    "out", [torch.zeros(2, 4), torch.zeros(3, 5), torch.zeros(3, 4).bfloat16(), torch.zeros(4, 3).T, torch.zeros(12)]
)
def test_room_that_does_not_fit_is_refused(library: NativeLibrary, out: Tensor) -> None:
    with pytest.raises(ValueError, match=r"for \[3, 4\] torch.float32 without gaps"):
        NativeLinear(library, torch.zeros(4, 8), None).to_float(torch.zeros(3, 8), out=out)


def test_a_gated_product_is_not_given_in_fp32(library: NativeLibrary) -> None:
    linear = NativeLinear(library, torch.zeros(4, 8), None, Activation.SILU)
    with pytest.raises(ValueError, match="not given in fp32"):
        linear.to_float(torch.zeros(1, 8))
