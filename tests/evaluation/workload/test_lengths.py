import math
from random import Random
from statistics import NormalDist, mean, median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.workload.synthetic import DATASETS, Chatbot, Dataset, Fixed, Lengths, LogNormal, Uniform, _bounded_mean, _mu

SHAREGPT = (LogNormal(161.31, 1.12), LogNormal(337.99, 1.02))
ALPACA = (LogNormal(19.31, 0.72), LogNormal(58.45, 0.88))


def drawn(lengths: Lengths, count: int) -> list[int]:
    random = Random(0)
    return [lengths.draw(random) for _ in range(count)]


def exact_mean(lengths: LogNormal, points: int = 20_000) -> float:
    """Of what `draw` makes of every quantile of the normal distribution."""
    mu, normal = _mu(lengths.mean, lengths.sigma, lengths.low, lengths.high), NormalDist()
    quantiles = (normal.inv_cdf((place + 0.5) / points) for place in range(points))
    return mean(round(min(max(math.exp(mu + lengths.sigma * z), lengths.low), lengths.high)) for z in quantiles)


@pytest.mark.parametrize("lengths", [*SHAREGPT, *ALPACA], ids=str)
def test_the_mean_after_the_bounds_is_the_one_asked_for(lengths: LogNormal) -> None:
    assert exact_mean(lengths) == pytest.approx(lengths.mean, rel=0.005)


@pytest.mark.parametrize("factor", [0.75, 1.25])
def test_another_sigma_leaves_the_means(factor: float) -> None:
    sharegpt = DATASETS["sharegpt"].scaled_sigma(factor)
    assert isinstance(sharegpt, Dataset)
    for scaled, lengths in zip((sharegpt.inputs, sharegpt.outputs), SHAREGPT, strict=True):
        assert isinstance(scaled, LogNormal)
        assert scaled.sigma == pytest.approx(lengths.sigma * factor)
        assert exact_mean(scaled) == pytest.approx(lengths.mean, rel=0.005)


@given(st.floats(0.05, 5.0), st.integers(1, 100), st.integers(10, 100_000), st.floats(0.02, 0.98))
def test_any_mean_between_the_bounds_can_be_had(sigma: float, low: int, room: int, share: float) -> None:
    high = low + room
    asked = low + share * room
    lengths = LogNormal(asked, sigma, low, high)
    assert _bounded_mean(_mu(asked, sigma, low, high), sigma, low, high) == pytest.approx(asked, rel=0.005)
    assert low <= lengths.draw(Random(0)) <= high


@pytest.mark.parametrize("lengths", [*SHAREGPT, *ALPACA], ids=str)
def test_drawn_lengths_are_skewed_to_the_right_and_within_the_bounds(lengths: LogNormal) -> None:
    values = drawn(lengths, 20_000)
    assert mean(values) == pytest.approx(lengths.mean, rel=0.03)
    assert median(values) < 0.85 * mean(values)
    assert min(values) >= 4
    assert max(values) <= 1024


def test_uniform_and_fixed_lengths_have_their_means() -> None:
    assert set(drawn(Uniform(3, 5), 100)) == {3, 4, 5}
    assert Uniform(3, 5).mean == 4.0
    assert set(drawn(Fixed(7), 10)) == {7}
    assert Fixed(7).mean == 7.0


@pytest.mark.parametrize(
    ("make", "complaint"),
    [
        (lambda: Fixed(0), "at least 1 token"),
        (lambda: Uniform(0, 5), "lower is at least 1"),
        (lambda: Uniform(6, 5), "at most the higher"),
        (lambda: LogNormal(100, 0.0), "sigma must be above 0"),
        (lambda: LogNormal(100, 9.0), "at most 5"),
        (lambda: LogNormal(2000, 1.0), "between low = 4 and high = 1024"),
        (lambda: LogNormal(4, 1.0), "between low = 4"),
        (lambda: LogNormal(float("nan"), 1.0), "a mean of nan"),
        (lambda: LogNormal(100, float("nan")), "sigma"),
    ],
)
def test_lengths_that_cannot_be_are_refused(make: type[Lengths], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        make()


def test_prompt_and_output_are_cut_to_the_total() -> None:
    dataset = Dataset("long", Fixed(30), Fixed(30), max_total=40)
    assert dataset.draw(Random(0)) == (30, 10)
    assert dataset.draw(Random(0), prefix_tokens=8) == (30, 2)
    assert dataset.draw(Random(0), prefix_tokens=20) == (19, 1)
    with pytest.raises(ValueError, match="leaves no room in 40 tokens"):
        dataset.draw(Random(0), prefix_tokens=39)


def test_lengths_without_a_sigma_cannot_be_scaled() -> None:
    with pytest.raises(ValueError, match="no sigma"):
        Dataset("fixed", Fixed(1), Fixed(1)).scaled_sigma(2.0)


def test_a_conversation_is_a_prompt_of_all_that_was_said() -> None:
    chatbot = Chatbot("chatbot", Dataset("turn", Fixed(10), Fixed(100)), rounds=Fixed(4))
    assert chatbot.draw(Random(0)) == (3 * 110 + 10, 100)


def test_a_conversation_is_cut_to_its_last_tokens() -> None:
    chatbot = Chatbot("chatbot", Dataset("turn", Fixed(10), Fixed(100)), Fixed(4), max_prompt=64, max_output=32)
    assert chatbot.draw(Random(0)) == (64, 32)


def test_most_prompts_of_the_chatbot_are_as_long_as_can_be() -> None:
    random = Random(0)
    prompts, outputs = zip(*(DATASETS["chatbot"].draw(random) for _ in range(3000)), strict=True)
    assert max(prompts) == max(outputs) == 1024
    assert prompts.count(1024) > len(prompts) / 2
