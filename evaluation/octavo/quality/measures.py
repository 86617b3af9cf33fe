"""Measures how well a model predicts a text, and how far its predictions are from another model's.

Predictions are logarithms of probabilities, [positions, vocab_size] fp64.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Estimate:
    """Holds a mean over positions and its standard error, as if positions were independent of each other."""

    mean: float
    error: float

    @classmethod
    def of(cls, values: Tensor) -> "Estimate":
        """Estimates from `values` ([positions] fp64), at least two."""
        return cls(values.mean().item(), values.std().item() / math.sqrt(len(values)))


def predictions(logits: Tensor) -> Tensor:
    """Returns the logarithms of the probabilities that `logits` ([positions, vocab_size]) are of."""
    return logits.double().log_softmax(dim=-1)


def losses(predicted: Tensor, tokens: Tensor) -> Tensor:
    """Returns the negative logarithm of the probability of each position's token; `tokens` is [positions] int64."""
    return -predicted.gather(1, tokens[:, None]).squeeze(1)


def divergences(reference: Tensor, predicted: Tensor) -> Tensor:
    """Returns each position's Kullback-Leibler divergence of `predicted` from `reference`, in nats."""
    # What the reference rules out adds nothing, also where both say -inf.
    parts = reference.exp() * (reference - predicted)
    return parts.where(reference > -math.inf, 0.0).sum(dim=-1)


def same_top(reference: Tensor, predicted: Tensor) -> Tensor:
    """Returns 1 for each position where both predict the same token first, else 0."""
    return (reference.argmax(dim=-1) == predicted.argmax(dim=-1)).double()


@dataclass(frozen=True, slots=True)
class Distance:
    """Holds how far a model is from a reference: the mean divergence and the largest, in nats, and the share of
    positions with the same top token."""

    divergence: Estimate
    largest: float
    same_top: Estimate


@dataclass(frozen=True, slots=True)
class Quality:
    """Holds what a model makes of a text: its perplexity, and its distance from each reference, in their order."""

    perplexity: Estimate
    distances: list[Distance]


class Tally:
    """Collects a model's predictions and those of `num_references` others, position by position."""

    def __init__(self, num_references: int) -> None:
        self._losses: list[list[Tensor]] = [[] for _ in range(1 + num_references)]
        self._divergences: list[list[Tensor]] = [[] for _ in range(num_references)]
        self._same_top: list[list[Tensor]] = [[] for _ in range(num_references)]

    def add(self, predicted: Tensor, references: Sequence[Tensor], tokens: Tensor) -> None:
        """Adds some positions: what each model predicts there, and the `tokens` that came."""
        for losses_of, each in zip(self._losses, (predicted, *references), strict=True):
            losses_of.append(losses(each, tokens))
        for index, reference in enumerate(references):
            self._divergences[index].append(divergences(reference, predicted))
            self._same_top[index].append(same_top(reference, predicted))

    def qualities(self) -> list[Quality]:
        """Returns the quality of the model, then that of each reference, which has no distances."""
        distances = [
            Distance(Estimate.of(both), both.max().item(), Estimate.of(torch.cat(same)))
            for both, same in zip(map(torch.cat, self._divergences), self._same_top, strict=True)
        ]
        perplexities = [perplexity(torch.cat(each)) for each in self._losses]
        return [Quality(perplexities[0], distances), *(Quality(each, []) for each in perplexities[1:])]


def perplexity(loss: Tensor) -> Estimate:
    """Returns the exponential of the mean of `loss` ([positions]), with the error that the mean's makes of it."""
    mean = Estimate.of(loss)
    value = math.exp(mean.mean)
    return Estimate(value, value * mean.error)
