"""Every variant of the quantised product against the same arithmetic in torch, to the bit; packing without a loss."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.kernels.native.library import NativeLibrary
from octavo.kernels.native.quantized_linear import TWICE_ABOVE, NativeQuantizedLinear
from octavo.kernels.native.structs import Activation
from octavo.kernels.quantized import BLOCK, FORMATS, GROUP, BlockFormat, Quantized
from octavo.testing.native import VARIANTS, library, loaded, threads

__all__ = ["library"]

ACTIVATIONS = {
    Activation.SILU: F.silu,
    Activation.GELU_TANH: lambda inputs: F.gelu(inputs, approximate="tanh"),
}
# By 8-bit floats no CPU multiplies.
INTEGERS = [form.name for form in FORMATS.values() if not form.floats]
# Rows in 8 bits against rows in fp32, of outputs of some hundred.
TOLERANCE = 2e-2


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def integers(low: int, high: int, shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def weight_of(name: str, outputs: int, inputs: int, *, group: int = 2 * GROUP, seed: int = 0) -> Quantized:
    """Any weight of a format; `group` where the format leaves it open."""
    form = FORMATS[name]
    groups = inputs // (form.group or group)
    codes = integers(0, 1 << form.bits, (outputs, inputs), torch.uint8, seed)
    if form.blocks:
        low, high, dtype = (-128, 128, torch.int8) if form.group < GROUP else (0, 64, torch.uint8)
        wide = [random(outputs, inputs // BLOCK, seed=seed + i).mul(0.002).half() for i in (1, 2)]
        small = [integers(low, high, (outputs, groups), dtype, seed + i) for i in (3, 4)]
        return Quantized(form, codes, small[0], *((small[1], *wide) if form.mins else (None, wide[0])))
    dtype = torch.float16 if form.group else torch.float32
    scales, mins = (random(outputs, groups, seed=seed + i).mul(0.02).to(dtype) for i in (1, 2))
    return Quantized(form, codes, scales, mins if form.mins else None)


def rounded(groups: Tensor) -> tuple[Tensor, Tensor]:
    """The integers, fp64 like `groups` ([tokens, groups, GROUP]), and the scales, [tokens, groups]."""
    peaks = groups.abs().amax(dim=2)
    zero = peaks < 1e-30
    factors = torch.where(zero, 0.0, torch.tensor(127.0) / peaks)
    return torch.round(groups * factors.unsqueeze(2)).double(), torch.where(zero, 0.0, peaks / torch.tensor(127.0))


def outweighing(scales: Tensor, twice_above: float) -> Tensor:
    """Which groups are rounded twice, [tokens, groups]."""
    total = torch.zeros(len(scales))
    for group in range(scales.shape[1]):
        total = total + scales[:, group]
    return scales > (twice_above * (total / scales.shape[1])).unsqueeze(1)


def expected(weight: Quantized, rows: Tensor, *, twice_above: float = TWICE_ABOVE) -> Tensor:
    """The products in the arithmetic that docs/quantization.md promises, [tokens, outputs] fp32."""
    groups = rows.float().view(len(rows), -1, GROUP)
    codes, scales = rounded(groups)
    rests = rounded(groups - codes.float() * scales.unsqueeze(2))
    everywhere, twice = torch.ones_like(scales, dtype=torch.bool), outweighing(scales, twice_above)
    sums = torch.zeros(len(rows), weight.shape[0])
    return added(added(sums, weight, codes, scales, everywhere), weight, *rests, twice)


def added(sums: Tensor, weight: Quantized, codes: Tensor, row_scales: Tensor, where: Tensor) -> Tensor:
    """The `sums`, group after group with the products of rows that were rounded, `where` that is wanted."""
    inputs = weight.shape[1]
    row_sums = row_scales * codes.sum(dim=2).float()
    numbers = weight.codes.double() - weight.format.offset
    if weight.format.values is not None:
        numbers = torch.tensor(weight.format.values, dtype=torch.float64)[weight.codes.int()]
    scales, mins = weight.scales.float(), None if weight.mins is None else weight.mins.float()
    if weight.block_scales is not None:
        scales = scales * repeated(weight.block_scales.float(), scales.shape[1])
    if mins is not None and weight.block_mins is not None:
        mins = -(mins * repeated(weight.block_mins.float(), mins.shape[1]))
    size = min(weight.format.group or GROUP, GROUP)
    scales = repeated(scales, inputs // size)
    for first in range(0, inputs, size):
        group, part = first // GROUP, slice(first, first + size)
        exact = codes.view(len(codes), -1)[:, part] @ numbers[:, part].T
        factor = scales[:, first // size] * row_scales[:, group, None]
        more = sums + factor * exact.float()
        if mins is not None:
            more = more + repeated(mins, inputs // GROUP)[:, group] * row_sums[:, group, None]
        sums = torch.where(where[:, group, None], more, sums)
    return sums


def repeated(few: Tensor, columns: int) -> Tensor:
    return few.repeat_interleave(columns // few.shape[1], dim=1)


def same(actual: Quantized, wanted: Quantized) -> bool:
    ours, theirs = actual.tensors(), wanted.tensors()
    return (
        actual.format is wanted.format
        and ours.keys() == theirs.keys()
        and all(torch.equal(ours[k], theirs[k]) for k in ours)
    )


@contextmanager
def variant(name: str) -> Iterator[NativeLibrary]:
    """The library with variant `name`; skips the test where this CPU does not run it."""
    best = loaded()
    if best.functions.octavo_choose(name.encode()) is None:
        pytest.skip(f"this CPU does not run {name}")
    try:
        yield NativeLibrary(name, best.functions)
    finally:
        best.functions.octavo_choose(best.variant.encode())


@pytest.mark.parametrize("name", INTEGERS)
@pytest.mark.parametrize("outputs", [1, 33, 70])
def test_products_are_those_of_plain_arithmetic_to_the_bit(library: NativeLibrary, name: str, outputs: int) -> None:
    weight, rows = weight_of(name, outputs, 512), random(23, 512, seed=9)
    linear = NativeQuantizedLinear(library, weight, None)
    wanted = expected(weight, rows)
    # Every way to share rows out among passes, and rows that each thread quantises for itself or not.
    for count in range(24):
        assert torch.equal(linear(rows[:count]), wanted[:count]), count
    torch.testing.assert_close(
        wanted, F.linear(rows, weight.dequantize()), atol=TOLERANCE * wanted.abs().max().item(), rtol=0.0
    )


# Rows whose outliers stand in the same groups, or elsewhere in each.
def outlying(tokens: int, inputs: int, seed: int = 9) -> Tensor:
    rows = random(tokens, inputs, seed=seed)
    rows[:, 3] *= 30
    places = integers(0, inputs, (tokens, 1), torch.int64, seed + 1)
    return rows.scatter_add(1, places, 40 * torch.where(places % 3 > 0, 1.0, 0.0))


@pytest.mark.parametrize("name", INTEGERS)
@pytest.mark.parametrize("twice_above", [math.inf, TWICE_ABOVE, 0.0])
def test_groups_that_outweigh_the_others_are_rounded_twice(
    library: NativeLibrary, name: str, twice_above: float
) -> None:
    weight, rows = weight_of(name, 40, 512), outlying(53, 512)
    linear = NativeQuantizedLinear(library, weight, None, twice_above=twice_above)
    wanted = expected(weight, rows, twice_above=twice_above)
    for count in [*range(1, 27), 53]:
        assert torch.equal(linear(rows[:count]), wanted[:count]), count
    exact = F.linear(rows, weight.dequantize())
    lost, with_8_bits = (
        (wanted - exact).square().mean(),
        (expected(weight, rows, twice_above=math.inf) - exact).square().mean(),
    )
    share = {math.inf: (1.0, 1.0), TWICE_ABOVE: (0.001, 0.3), 0.0: (0.0, 1e-4)}[twice_above]
    assert share[0] <= lost / with_8_bits <= share[1]


def test_no_group_of_even_rows_is_rounded_twice(library: NativeLibrary) -> None:
    weight, rows = weight_of("q8_0", 40, 512), torch.where(random(30, 512) > 0, 1.0, -1.0) * random(30, 1, seed=1)
    assert torch.equal(NativeQuantizedLinear(library, weight, None)(rows), expected(weight, rows, twice_above=math.inf))


@pytest.mark.parametrize("name", INTEGERS)
def test_extreme_codes_overflow_nothing(library: NativeLibrary, name: str) -> None:
    weight = weight_of(name, 32, 256)
    most = (1 << weight.format.bits) - 1
    signs = torch.where(random(20, 256) > 0, 3.0, -3.0)
    signs[0], signs[1] = 3.0, -3.0
    mixed = torch.where(signs[3] > 0, most, 0).to(torch.uint8).repeat(32, 1)
    for codes in (torch.zeros_like(weight.codes), torch.full_like(weight.codes, most), mixed):
        extreme = replace(weight, codes=codes)
        linear, wanted = NativeQuantizedLinear(library, extreme, None), expected(extreme, signs)
        # By few rows and by many.
        assert torch.equal(linear(signs[:9]), wanted[:9])
        assert torch.equal(linear(signs), wanted)


@pytest.mark.parametrize("name", ["q4_1", "q8_0", "q6_k", "q4_k", "int4"])
def test_many_rows_of_many_inputs_are_those_of_plain_arithmetic_to_the_bit(library: NativeLibrary, name: str) -> None:
    # More rows than are multiplied before the next outputs' turn, and more groups than are unpacked at a time.
    weight, rows, bias = weight_of(name, 40, 1280), random(203, 1280, seed=9), random(40)
    wanted, linear = expected(weight, rows) + bias, NativeQuantizedLinear(library, weight, bias)
    assert torch.equal(linear(rows), wanted)
    assert torch.equal(linear(rows[:193]), wanted[:193])
    residual = rows[:, :40].contiguous()
    assert torch.equal(linear._apply(linear.op(added=0.5), rows, residual.clone()), wanted * 0.5 + residual)


@pytest.mark.parametrize("group", [32, 128, 256])
@pytest.mark.parametrize("name", ["int8", "int4"])
def test_groups_may_be_of_any_width(library: NativeLibrary, name: str, group: int) -> None:
    weight, rows = weight_of(name, 40, 256, group=group), random(5, 256, seed=1)
    linear = NativeQuantizedLinear(library, weight, None)
    assert torch.equal(linear(rows), expected(weight, rows))
    assert same(linear.unpacked(torch.arange(40)), weight)


@pytest.mark.parametrize("name", INTEGERS)
@pytest.mark.parametrize("activation", [None, Activation.SILU])
def test_repacking_loses_nothing(name: str, activation: Activation | None) -> None:
    weight = weight_of(name, 100, 768)
    linear = NativeQuantizedLinear(loaded(), weight, None, activation)
    assert same(linear.unpacked(torch.arange(100)), weight)
    which = torch.tensor([99, 0, 17, 17, 50])
    assert same(linear.unpacked(which), weight.rows(which))
    assert torch.equal(linear.unpacked(which).dequantize(), weight.dequantize()[which])
    assert linear.unpacked(which[:0]).shape == (0, 768)


def test_a_packed_weight_is_as_small_as_in_a_file() -> None:
    for name, bits in {"q4_0": 4.5, "q4_1": 5.0, "q5_0": 5.5, "q8_0": 8.5, "q4_k": 4.625, "q6_k": 6.5625}.items():
        linear = NativeQuantizedLinear(loaded(), weight_of(name, 64, 512), None)
        assert linear.weight_bytes * 8 == bits * 64 * 512, name


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("outputs", [1, 16, 17, 50])
def test_gated_products_are_the_same_on_all_instruction_sets(activation: Activation, outputs: int) -> None:
    weight, bias, rows = weight_of("q4_1", 2 * outputs, 64), random(2 * outputs), random(15, 64, seed=1)
    gate, up = (expected(weight, rows) + bias).chunk(2, dim=1)
    results = []
    for name in VARIANTS:
        if loaded().functions.octavo_choose(name.encode()):
            with variant(name) as ours:
                results.append(NativeQuantizedLinear(ours, weight, bias, activation)(rows))
    torch.testing.assert_close(results[0], ACTIVATIONS[activation](gate) * up, atol=1e-5, rtol=1e-5)
    assert all(torch.equal(each, results[0]) for each in results)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_a_gate_of_its_own_gives_what_a_fused_one_does(library: NativeLibrary, activation: Activation) -> None:
    weight, bias, rows = weight_of("q4_0", 100, 64), random(100), random(15, 64, seed=1)
    fused = NativeQuantizedLinear(library, weight, bias, activation)
    gate = NativeQuantizedLinear(library, weight.rows(slice(50)), bias[:50])
    up = NativeQuantizedLinear(library, weight.rows(slice(50, None)), bias[50:])
    products = up(rows)
    assert gate.gate(rows, activation, products) is products
    assert torch.equal(products, fused(rows))


@pytest.mark.parametrize("activation", [None, Activation.SILU])
def test_a_row_is_the_same_whatever_is_beside_it(library: NativeLibrary, activation: Activation | None) -> None:
    linear = NativeQuantizedLinear(library, weight_of("q4_k", 200, 512), random(200), activation)
    rows = outlying(75, 512, seed=1)
    together = linear(rows)
    for count in range(1, 41):
        first = count % 30
        assert torch.equal(linear(rows[first : first + count]), together[first : first + count]), count
    assert torch.equal(linear(rows.flip(0)).flip(0), together)


def test_rows_that_fill_a_cache_twice_are_multiplied_once_each(library: NativeLibrary) -> None:
    # The second span has fewer rows than are widened for.
    linear = NativeQuantizedLinear(library, weight_of("q4_k", 40, 12_032), None)
    rows = outlying(393, 12_032, seed=1)
    with threads(3):
        together = linear(rows)
    for first in (0, 170, 380):
        assert torch.equal(linear(rows[first : first + 13]), together[first : first + 13]), first


def test_the_number_of_threads_does_not_show(library: NativeLibrary) -> None:
    rows, results = outlying(20, 512, seed=1), []
    linear = NativeQuantizedLinear(library, weight_of("q6_k", 200, 512), None)
    for count in (1, 2, 3, 9):
        with threads(count):
            results.append((linear(rows), linear(rows[:1]), linear.to_float(rows)))
    for result in results[1:]:
        assert all(torch.equal(*pair) for pair in zip(result, results[0], strict=True))


def test_rows_and_outputs_may_be_bfloat16(library: NativeLibrary) -> None:
    weight, bias, rows = weight_of("q8_0", 33, 64), random(33), random(11, 64, seed=1).bfloat16()
    linear = NativeQuantizedLinear(library, weight, bias)
    exact = expected(weight, rows) + bias
    assert torch.equal(linear.to_float(rows), exact)
    assert torch.equal(linear(rows), exact.bfloat16())


def test_products_are_added_to_what_there_is() -> None:
    weight, rows = weight_of("q5_1", 40, 64), random(3, 64, seed=1)
    linear = NativeQuantizedLinear(loaded(), weight, None)
    residual = random(3, 40, seed=2)
    assert torch.equal(
        linear._apply(linear.op(added=0.5), rows, residual.clone()), expected(weight, rows) * 0.5 + residual
    )


@pytest.mark.parametrize("broken", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("name", ["q8_0", "q4_1", "q6_k"])
@pytest.mark.parametrize(("count", "twice_above"), [(14, TWICE_ABOVE), (14, 0.0), (20, TWICE_ABOVE), (20, 0.0)])
def test_a_number_that_is_none_shows_in_its_own_row_and_in_no_other(
    library: NativeLibrary, name: str, broken: float, count: int, twice_above: float
) -> None:
    linear = NativeQuantizedLinear(library, weight_of(name, 50, 256), None, twice_above=twice_above)
    rows = random(count, 256, seed=1)
    wanted = linear(rows)
    rows[5, 63] = broken
    products, others = linear(rows), [*range(5), *range(6, count)]
    assert products[5].isnan().all()
    assert torch.equal(products[others], wanted[others])


def test_rows_of_zeros_and_of_next_to_nothing_give_zeros(library: NativeLibrary) -> None:
    linear = NativeQuantizedLinear(library, weight_of("q4_1", 50, 64), None)
    assert torch.equal(linear(torch.zeros(2, 64)), torch.zeros(2, 50))
    assert torch.equal(linear(torch.full((2, 64), 1e-38)), torch.zeros(2, 50))
    large = torch.full((1, 64), 1e36)
    assert torch.equal(linear(large), expected(weight_of("q4_1", 50, 64), large))


def test_inputs_and_weights_may_have_gaps(library: NativeLibrary) -> None:
    weight, rows = weight_of("q4_0", 64, 128), random(128, 6, seed=1)
    gaps = weight.columns(range(0, 64)).rows(slice(None, None, 2))
    assert torch.equal(NativeQuantizedLinear(library, gaps, None)(rows.T[:, :64]), expected(gaps, rows.T[:, :64]))


UNKNOWN = BlockFormat("q3_9", 3)


@pytest.mark.parametrize(
    ("changes", "rest", "message"),
    [
        ({}, {"bias": torch.zeros(3)}, "a bias"),
        ({}, {"bias": torch.zeros(5, 1)}, "a bias"),
        ({}, {"activation": Activation.SILU}, "as many ups"),
        ({"scales": torch.full((5, 2), torch.inf).half()}, {}, "scales of a weight in q4_0 are not all finite"),
        ({"codes": torch.full((5, 64), 16, dtype=torch.uint8)}, {}, "codes up to 16 for 4 bits"),
        ({"format": UNKNOWN, "codes": torch.zeros(5, 64, dtype=torch.uint8)}, {}, "no kernels for q3_9"),
        ({"codes": torch.zeros(5, 64, dtype=torch.uint8, device="meta")}, {}, "codes on meta"),
    ],
)
def test_a_weight_that_cannot_be_packed_is_refused(changes: dict[str, Any], rest: dict[str, Any], message: str) -> None:
    weight = replace(weight_of("q4_0", 5, 64), **changes)
    with pytest.raises(ValueError, match=message):
        NativeQuantizedLinear(loaded(), weight, **{"bias": None, **rest})


@pytest.mark.parametrize(
    "inputs", [torch.zeros(3, 65), torch.zeros(64), torch.zeros(1, 3, 64), torch.zeros(3, 64).half()]
)
def test_inputs_of_another_shape_or_type_are_refused(inputs: Tensor) -> None:
    linear = NativeQuantizedLinear(loaded(), weight_of("q4_0", 5, 64), None)
    for call in (linear, linear.to_float):
        with pytest.raises(ValueError, match="for a weight of 64 inputs"):
            call(inputs)


@pytest.mark.parametrize(
    "out", [torch.zeros(2, 5), torch.zeros(3, 6), torch.zeros(3, 5).bfloat16(), torch.zeros(5, 3).T, torch.zeros(15)]
)
def test_room_that_does_not_fit_is_refused(out: Tensor) -> None:
    linear = NativeQuantizedLinear(loaded(), weight_of("q4_0", 5, 64), None)
    with pytest.raises(ValueError, match=r"for \[3, 5\] torch.float32 without gaps"):
        linear.to_float(torch.zeros(3, 64), out=out)
    with pytest.raises(ValueError, match=r"for \[3, 5\] torch.float32 without gaps"):
        linear.gate(torch.zeros(3, 64), Activation.SILU, out)


def test_rows_that_there_are_not_are_refused() -> None:
    linear = NativeQuantizedLinear(loaded(), weight_of("q4_0", 5, 64), None)
    for which in ([5], [0, -1]):
        with pytest.raises(IndexError, match="of 5"):
            linear.unpacked(torch.tensor(which))


def test_what_is_gated_is_stored_as_it_is() -> None:
    linear = NativeQuantizedLinear(loaded(), weight_of("q4_0", 6, 64), None, Activation.SILU)
    with pytest.raises(ValueError, match="not given in fp32"):
        linear.to_float(torch.zeros(1, 64))
    with pytest.raises(ValueError, match="stored as it is"):
        linear.op(added=1.0)
