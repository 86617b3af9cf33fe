"""Drawing on the device against sampling as one would write it down, and the mass of a row against logsumexp."""

from collections import Counter
from math import inf, nan
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from octavo.kernels.triton.sampling import cuts, stats
from octavo.kernels.triton.sampling import draw as module
from octavo.kernels.triton.sampling.draw import Drawn, draw
from octavo.kernels.triton.sampling.stats import log_masses
from octavo.testing.depth import deep
from octavo.testing.oracles.choosers import assert_follows, choosing_sequence, softmax
from octavo.testing.oracles.plain_sampler import plain_masses

Floats = npt.NDArray[np.float32]
# The largest number below 1 that a row may get.
ALMOST_ONE = 1 - 2.0**-53

TEMPERATURES = (0.0, 0.3, 1.0, 2.5)
# No number of equal tokens has exactly such a share.
TOP_PS = (1.0, 1.0, 0.001, 0.333, 0.717, 0.997)
PARAMETERS = st.tuples(
    st.one_of(st.sampled_from((0.0, ALMOST_ONE)), st.floats(0, ALMOST_ONE)),
    st.sampled_from(TEMPERATURES),
    st.sampled_from((0, 0, 1, 2, 40, 100, 2**31 - 1)),
    st.sampled_from(TOP_PS),
    st.sampled_from((0.0, 0.0, 0.003, 0.4, 1.0)),
)
KINDS = ("normal", "few values", "mostly impossible", "flat", "peaked")


def random_row(kind: str, size: int, seed: int) -> Floats:
    generator = np.random.default_rng(seed)
    row = generator.standard_normal(size) * 2
    match kind:
        case "few values":
            row = generator.integers(-3, 4, size).astype(np.float64) * generator.choice([-0.0, 1.0])
        case "mostly impossible":
            row[generator.random(size) < 0.9] = -inf
            row[generator.integers(size)] = -5.0
        case "flat":
            row[:] = 7.25
        case "peaked":
            row[generator.integers(size)] = 60.0
    return row.astype(np.float32)


def drawn(logits: Tensor, parameters: Any) -> Drawn:
    return draw(logits, torch.tensor(parameters, dtype=torch.float64, device=logits.device))


def left(row: Floats, parameters: tuple[float, ...]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    _, temperature, top_k, top_p, min_p = parameters
    example = choosing_sequence(temperature=temperature, top_k=int(top_k), top_p=top_p, min_p=min_p)
    return plain_masses(row.astype(np.float64), example)


def assert_right(token: int, row: Floats, parameters: tuple[float, ...]) -> None:
    """That the row's number falls on the token, or so near to it that rounding may decide."""
    if parameters[1] == 0:
        assert token == row.argmax()
        return
    order, masses = left(row, parameters)
    [place] = (order == token).nonzero()[0]
    ends = masses.cumsum()
    assert masses[place] > 0
    assert ends[place] - masses[place] <= (parameters[0] + 1e-6) * ends[-1]
    assert ends[place] >= (parameters[0] - 1e-6) * ends[-1]


# In the interpreter shrinking takes minutes.
@settings(max_examples=10, phases=(Phase.explicit, Phase.generate))
@given(
    st.integers(1, 600),
    st.lists(st.tuples(st.sampled_from(KINDS), st.integers(0, 999), PARAMETERS), min_size=4, max_size=6),
)
def test_a_row_draws_what_its_number_falls_on(size: int, rows: list[tuple[str, int, tuple[float, ...]]]) -> None:
    logits = np.stack([random_row(kind, size, seed) for kind, seed, _ in rows])
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    found = drawn(torch.from_numpy(logits).to(device), [parameters for _, _, parameters in rows])
    assert found.largest.tolist() == logits.max(axis=1).tolist()
    for token, row, (_, _, parameters) in zip(found.tokens.tolist(), logits, rows, strict=True):
        assert_right(token, row, parameters)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are short, and the interpreter takes longer for each operation than for what is in it."""
    monkeypatch.setattr(stats, "_TILE", 256)
    monkeypatch.setattr(module, "SPANS", 16)
    monkeypatch.setattr(module, "_FEW", 64)
    monkeypatch.setattr(module, "_CHUNK", 64)
    monkeypatch.setattr(module, "_WAYS", 256)


@pytest.fixture(params=[pytest.param("long rows", marks=pytest.mark.deep), "small pieces"])
def rows(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> npt.NDArray[np.float32]:
    """Rows that take more than one of each piece that they are read in; in one case the pieces are small instead."""
    if request.param == "long rows":
        size = 9001
    else:
        size = 157
        monkeypatch.setattr(stats, "_LEAST_WIDTH", 16)
        monkeypatch.setattr(stats, "_TILE", 32)
        monkeypatch.setattr(module, "_FEW", 8)
        monkeypatch.setattr(module, "_CHUNK", 64)
        monkeypatch.setattr(module, "_WAYS", 16)
    return np.stack([random_row(kind, size, 3) for kind in KINDS])


@pytest.mark.parametrize(
    "cut",
    [
        (0.0, 0, 1.0, 0.0),
        (1.0, 0, 1.0, 0.0),
        (1.0, 5, 1.0, 0.0),
        (1.0, 100, 0.717, 0.0),
        (2.0, 0, 0.997, 0.0),
        (1.0, 0, 0.333, 0.003),
        (1.0, 0, 1.0, 0.003),
    ],
)
def test_rows_in_several_pieces_are_drawn_from_as_a_whole(
    rows: Floats, cut: tuple[float, ...], device: torch.device
) -> None:
    parameters = [(uniform, *cut) for uniform in (0.0, 0.13, 0.5, 0.86, ALMOST_ONE)]
    found = drawn(torch.from_numpy(rows).to(device), parameters)
    for token, row, each in zip(found.tokens.tolist(), rows, parameters, strict=True):
        assert_right(token, row, each)


@pytest.mark.usefixtures("quick")
def test_numbers_at_the_ends_fall_on_the_first_and_the_last(device: torch.device) -> None:
    logits = torch.tensor([-inf, 2.0, 3.0, -inf, 3.0, 1.0, -inf], device=device)
    for cut, first, last in (
        ((1.0, 0, 1.0, 0.0), 1, 5),
        ((1.0, 3, 1.0, 0.0), 2, 1),
        ((1.0, 0, 1e-9, 0.0), 2, 2),
        ((1.0, 0, 1.0, 1.0), 2, 4),
        ((1e-300, 0, 1.0, 0.0), 2, 4),
        ((1e-300, 5, 0.9, 0.5), 2, 4),
    ):
        found = drawn(logits.expand(2, -1), [(0.0, *cut), (ALMOST_ONE, *cut)])
        assert found.tokens.tolist() == [first, last]


@pytest.mark.usefixtures("quick")
def test_equals_that_straddle_a_cut_are_kept_by_rising_id(device: torch.device) -> None:
    logits = torch.tensor([1.0, 2.0, 2.0, 1.0, 1.0, 2.0, 0.0, 1.0, 0.0, 2.0], device=device)
    # Each token that is kept has more than such a part of the mass.
    uniforms = [*(index / 11 for index in range(11)), ALMOST_ONE]
    for cut, expected in (
        ((1.0, 3, 1.0, 0.0), {1, 2, 5}),
        ((1.0, 5, 1.0, 0.0), {1, 2, 5, 9, 0}),
        ((1.0, 4, 0.5, 0.0), {1, 2}),
        ((1.0, 0, 0.8, 0.0), {1, 2, 5, 9, 0, 3}),
    ):
        found = drawn(logits.expand(12, -1), [(uniform, *cut) for uniform in uniforms])
        assert set(found.tokens.tolist()) == expected


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("bad", [nan, inf, -inf])
@pytest.mark.parametrize("cut", [*deep((0.0, 0, 1.0, 0.0), (1.0, 0, 1.0, 0.0)), (0.7, 20, 0.717, 0.003)])
def test_a_broken_row_is_told_and_breaks_no_other(bad: float, cut: tuple[float, ...], device: torch.device) -> None:
    logits = torch.randn(3, 300, generator=torch.Generator().manual_seed(2)).to(device)
    parameters = [(0.4, *cut)] * 3
    healthy = drawn(logits, parameters)
    if bad == -inf:
        logits[1] = bad
    else:
        logits[1, 290] = bad
    found = drawn(logits, parameters)
    assert found.tokens.tolist() == [healthy.tokens[0], 0, healthy.tokens[2]]
    assert repr(found.largest[1].item()) == repr(bad)


def mixed(device: torch.device) -> tuple[Tensor, list[tuple[float, ...]]]:
    logits = 2 * torch.randn(6, 700, generator=torch.Generator().manual_seed(4))
    cuts_of_rows = [
        (0.0, 0, 1.0, 0.0),
        (1.0, 0, 1.0, 0.0),
        (0.7, 40, 1.0, 0.0),
        (1.0, 0, 0.9, 0.0),
        (1.0, 0, 1.0, 0.1),
        (2.0, 300, 0.8, 0.01),
    ]
    return logits.to(device), [(0.11 * row, *cut) for row, cut in enumerate(cuts_of_rows)]


@pytest.mark.usefixtures("quick")
def test_a_row_draws_the_same_alone_as_in_a_batch(device: torch.device) -> None:
    logits, parameters = mixed(device)
    together = drawn(logits, parameters).tokens.tolist()
    assert together == [drawn(logits[row : row + 1], parameters[row : row + 1]).tokens.item() for row in range(6)]


@pytest.mark.usefixtures("quick")
def test_rows_may_be_far_apart(device: torch.device) -> None:
    logits, parameters = mixed(device)
    part = logits[::2, 3:650]
    before = logits.clone()
    assert torch.equal(drawn(part, parameters[::2]).tokens, drawn(part.contiguous(), parameters[::2]).tokens)
    assert torch.equal(logits, before)


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("dtype", [torch.bfloat16, *deep(torch.float16)])
def test_half_precision_is_drawn_from_as_what_it_stands_for(dtype: torch.dtype, device: torch.device) -> None:
    logits, parameters = mixed(device)
    logits, parameters = logits[1:3].to(dtype), parameters[1:3]
    found, expected = drawn(logits, parameters), drawn(logits.float(), parameters)
    assert torch.equal(found.tokens, expected.tokens)
    assert torch.equal(found.largest, expected.largest)


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    ("count", "cut"), [pytest.param(200, (1.3, 0, 1.0, 0.0), marks=pytest.mark.deep), (60, (1.0, 6, 0.95, 0.02))]
)
def test_tokens_follow_the_distribution(count: int, cut: tuple[float, ...], device: torch.device) -> None:
    row = random_row("normal", 20, 9)
    numbers = np.random.default_rng(1).random(count)
    found = drawn(torch.from_numpy(row).to(device).expand(count, -1), [(number, *cut) for number in numbers])
    tokens, _ = left(row, (0.0, *cut))
    assert_follows(Counter(found.tokens.tolist()), softmax(torch.from_numpy(row), set(tokens.tolist()), cut[0]))


def test_no_rows_no_tokens(device: torch.device) -> None:
    found = drawn(torch.empty(0, 10, device=device), np.empty((0, 5)))
    assert found.tokens.shape == found.largest.shape == (0,)


def test_keys_order_floats_as_their_sizes_do() -> None:
    """What a key of -inf is must be known before there is one."""
    assert cuts.LEAST_KEY.value == int(np.float32(-inf).view(np.int32)) ^ 0x7FFFFFFF


@pytest.mark.parametrize(
    ("logits", "parameters", "message"),
    [
        (torch.zeros(2, 3, dtype=torch.float64), torch.zeros(2, 5, dtype=torch.float64), "fp32, bf16 or fp16"),
        (torch.zeros(3), torch.zeros(1, 5, dtype=torch.float64), "rows, vocab_size"),
        (torch.zeros(2, 0), torch.zeros(2, 5, dtype=torch.float64), "rows, vocab_size"),
        (torch.zeros(3, 2).T, torch.zeros(2, 5, dtype=torch.float64), "side by side"),
        (torch.zeros(1).expand(2, 1 << 23), torch.zeros(2, 5, dtype=torch.float64), "side by side"),
        (torch.zeros(2, 3), torch.zeros(3, 5, dtype=torch.float64), r"parameters are \[2, 5\]"),
        (torch.zeros(2, 3), torch.zeros(2, 5), "fp64"),
        (torch.zeros(2, 3), torch.zeros(5, 2, dtype=torch.float64).T, "without gaps"),
    ],
)
def test_what_does_not_fit_is_refused(logits: Tensor, parameters: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        draw(logits, parameters)


@pytest.mark.parametrize("size", [1, 255, 257, 5000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_mass_of_a_row_is_its_logsumexp(size: int, dtype: torch.dtype, device: torch.device) -> None:
    logits = 5 * torch.randn(6, size, generator=torch.Generator().manual_seed(size)).to(device, dtype)
    logits[1, size // 2 :] = -3e38
    largest, masses = log_masses(logits)
    assert torch.equal(largest, logits.float().amax(dim=-1))
    exact = logits.double()
    expected = exact.logsumexp(dim=-1) - exact.amax(dim=-1)
    torch.testing.assert_close(masses.double(), expected, atol=1e-6, rtol=1e-6)
    assert torch.equal(masses, torch.cat([log_masses(row[None])[1] for row in logits]))


def test_the_mass_of_a_broken_row_is_told_by_its_largest(device: torch.device) -> None:
    logits = torch.zeros(4, 600, device=device)
    logits[1, 599], logits[2, 0], logits[3] = nan, inf, -inf
    largest, masses = log_masses(logits)
    assert [repr(value) for value in largest.tolist()] == ["0.0", "nan", "inf", "-inf"]
    assert masses[0].item() == pytest.approx(np.log(600))


def test_every_kernel_is_compiled_ahead_for_every_dtype() -> None:
    names = [variant.name for variant in (*stats.variants(), *module.variants())]
    assert len(set(names)) == len(names) == 11
