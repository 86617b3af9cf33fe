"""Probabilities, added up in an order that does not depend on the rows beside a row."""

import torch
from torch import Tensor

# Ids whose probabilities are first summed together, in fp32. (One long sum would be less exact, and added up in another
# order for a single row than for several.)
SPAN = 256


def span_masses(probabilities: Tensor) -> Tensor:
    """[rows, spans] fp64: the sums over every `SPAN` consecutive ids of `probabilities` ([rows, vocab_size] fp32)."""
    rows, size = probabilities.shape
    whole = size // SPAN * SPAN
    sums = probabilities[:, :whole].view(rows, size // SPAN, SPAN).sum(dim=-1)
    if whole < size:
        sums = torch.cat((sums, probabilities[:, whole:].sum(dim=-1, keepdim=True)), dim=1)
    return sums.double()


def total_mass(probabilities: Tensor, likeliest: Tensor) -> Tensor:
    """[rows, 1] fp64: how many times the mass of each row's `likeliest` token ([rows]) that of all its tokens is, from
    torch's softmax of the row ([rows, vocab_size] fp32)."""
    # They were divided by a long sum in fp32, which is not exact; by which, that of the largest tells.
    whole = span_masses(probabilities).cumsum(dim=-1)[:, -1:]
    return whole / probabilities.gather(1, likeliest[:, None]).double()
