"""What is measured of predictions, against what a hand computes."""

import math

import pytest
import torch

from octavo.quality.measures import Distance, Estimate, Tally, divergences, losses, perplexity, predictions, same_top

# Two positions, three tokens: probabilities that logits of these logarithms have, whatever is added to all of a row.
REFERENCE = torch.tensor([[0.5, 0.25, 0.25], [0.1, 0.1, 0.8]]).log() + torch.tensor([[3.0], [-7.0]])
MODEL = torch.tensor([[0.25, 0.5, 0.25], [0.1, 0.2, 0.7]]).log()
# 0.5 ln 2 + 0.25 ln 1/2 + 0, and 0 + 0.1 ln 1/2 + 0.8 ln 8/7.
DIVERGENCES = [0.25 * math.log(2), 0.1 * math.log(0.5) + 0.8 * math.log(8 / 7)]


def test_predictions_are_logarithms_of_probabilities() -> None:
    found = predictions(REFERENCE)
    assert found.dtype == torch.float64
    torch.testing.assert_close(found.exp(), torch.tensor([[0.5, 0.25, 0.25], [0.1, 0.1, 0.8]]).double())


def test_a_loss_is_that_of_the_token_that_came() -> None:
    found = losses(predictions(MODEL), torch.tensor([0, 2]))
    assert found.tolist() == pytest.approx([-math.log(0.25), -math.log(0.7)])


def test_the_divergence_is_of_the_model_from_the_reference() -> None:
    assert divergences(predictions(REFERENCE), predictions(MODEL)).tolist() == pytest.approx(DIVERGENCES, rel=1e-6)
    assert divergences(predictions(MODEL), predictions(MODEL)).tolist() == [0, 0]


def test_a_token_that_the_reference_rules_out_adds_nothing_and_one_that_only_the_model_does_adds_everything() -> None:
    ruled_out = torch.tensor([[0.0, 0.0, -math.inf]])
    others = torch.zeros(1, 3)
    assert divergences(predictions(ruled_out), predictions(ruled_out)).tolist() == [0]
    assert divergences(predictions(ruled_out), predictions(others)).tolist() == pytest.approx([math.log(1.5)])
    assert divergences(predictions(others), predictions(ruled_out)).tolist() == [math.inf]


def test_the_same_top_is_the_same_token_and_not_the_same_probability() -> None:
    assert same_top(predictions(REFERENCE), predictions(MODEL)).tolist() == [0, 1]


def test_an_error_is_the_deviation_of_a_sample_over_the_root_of_its_size() -> None:
    # Their mean is 3, their squares' distances from it 4 + 1 + 0 + 1 + 4 = 10, over 4, the root over that of 5.
    assert Estimate.of(torch.tensor([1.0, 2, 3, 4, 5], dtype=torch.float64)) == Estimate(3, math.sqrt(2.5 / 5))


def test_the_perplexity_is_that_of_the_mean_loss_and_its_error_goes_along() -> None:
    found = perplexity(torch.tensor([math.log(2), math.log(8)], dtype=torch.float64))
    # The mean is ln 4; the deviation of the two is ln 4 over the root of 2.
    assert found.mean == pytest.approx(4)
    assert found.error == pytest.approx(4 * math.log(4) / 2)


def test_a_tally_of_parts_is_that_of_the_whole() -> None:
    parts, whole = Tally(1), Tally(1)
    tokens, reference, model = torch.tensor([0, 2]), predictions(REFERENCE), predictions(MODEL)
    whole.add(model, [reference], tokens)
    for row in (slice(0, 1), slice(1, 2)):
        parts.add(model[row], [reference[row]], tokens[row])
    assert parts.qualities() == whole.qualities()
    quality, of_reference = whole.qualities()
    assert quality.perplexity == perplexity(losses(model, tokens))
    assert of_reference.perplexity == perplexity(losses(reference, tokens))
    assert of_reference.distances == []
    (distance,) = quality.distances
    assert distance == Distance(
        Estimate.of(divergences(reference, model)), max(divergences(reference, model).tolist()), Estimate(0.5, 0.5)
    )
