"""Unnormalised probabilities, added up in an order that does not depend on the rows beside a row."""

import torch
from torch import Tensor

# Tokens whose probabilities are first summed together. (One long sum would be added up in another order for a single
# row than for several.)
SPAN = 256


def in_spans(shifted: Tensor) -> Tensor:
    """The exponentials of `shifted` ([rows, vocab_size], at most 0) as [rows, spans, SPAN] fp64, padded with zeros."""
    masses = shifted.exp().double()
    padding = -masses.shape[1] % SPAN
    return torch.nn.functional.pad(masses, (0, padding)).view(len(masses), -1, SPAN)


def total_mass(shifted: Tensor) -> Tensor:
    """[rows, 1] fp64: the sum of all exponentials of `shifted` ([rows, vocab_size], at most 0)."""
    return in_spans(shifted).sum(dim=-1).cumsum(dim=-1)[:, -1:]
