"""What a request does to its logits before a token is chosen: exclusions, biases and penalties.

The order is that of vLLM's V1 sampler: allowed ids, banned ids, stop ids before `min_tokens`, logit bias, repetition
penalty (CTRL, Keskar et al. 2019), frequency and presence penalties; temperature, min-p, top-k and top-p follow when
the token is drawn. An excluded logit is -inf and stays so, which is why only the bias's place before the penalties and
theirs among each other matter.

Ids beyond the vocabulary exclude and favour nothing. All counts come from the sequence's tokens, so a sequence that was
computed anew is penalised as before.
"""

from itertools import chain
from math import inf

import numpy as np
import torch
from torch import Tensor

from octavo.worker.sequences import WorkerSequence


def is_processed(sequence: WorkerSequence) -> bool:
    """Whether `process` changes anything for the next token of `sequence`."""
    sampling = sequence.sampling
    return bool(
        sampling.logit_bias
        or sampling.allowed_token_ids
        or sampling.banned_token_ids
        or sampling.repetition_penalty != 1
        or _counts_tokens(sequence)
        or _must_go_on(sequence)
    )


def process(logits: Tensor, sequences: list[WorkerSequence]) -> None:
    """Changes `logits` ([rows, vocab_size] fp32, or log-probabilities of that shape) in place, each row for its
    sequence; rows of sequences that ask for nothing stay as they are."""
    _keep_allowed(logits, sequences)
    _exclude(logits, sequences)
    _add_bias(logits, sequences)
    _penalise_repetition(logits, sequences)
    _penalise_generated(logits, sequences)


def _counts_tokens(sequence: WorkerSequence) -> bool:
    return sequence.sampling.presence_penalty != 0 or sequence.sampling.frequency_penalty != 0


def _must_go_on(sequence: WorkerSequence) -> bool:
    return sequence.num_generated < sequence.sampling.min_tokens and bool(sequence.sampling.stop_token_ids)


def _keep_allowed(logits: Tensor, sequences: list[WorkerSequence]) -> None:
    rows = [row for row, sequence in enumerate(sequences) if sequence.sampling.allowed_token_ids]
    if rows:
        index = torch.tensor(rows, device=logits.device)
        whole = logits[index]
        kept = torch.full_like(whole, -inf)
        at = _places([sequences[row].sampling.allowed_token_ids for row in rows], logits)
        kept[at] = whole[at]
        logits[index] = kept


def _exclude(logits: Tensor, sequences: list[WorkerSequence]) -> None:
    stops = [sequence.sampling.stop_token_ids if _must_go_on(sequence) else [] for sequence in sequences]
    banned = [sequence.sampling.banned_token_ids for sequence in sequences]
    logits[_places([[*pair[0], *pair[1]] for pair in zip(banned, stops, strict=True)], logits)] = -inf


def _add_bias(logits: Tensor, sequences: list[WorkerSequence]) -> None:
    vocab_size = logits.shape[1]
    pairs = [[pair for pair in sequence.sampling.logit_bias if pair[0] < vocab_size] for sequence in sequences]
    biases = torch.tensor([bias for _, bias in chain.from_iterable(pairs)], dtype=torch.float32, device=logits.device)
    logits.index_put_(_places([[token for token, _ in row] for row in pairs], logits), biases, accumulate=True)


def _penalise_repetition(logits: Tensor, sequences: list[WorkerSequence]) -> None:
    """Divides the positive logits of all tokens of prompt and output and multiplies the negative ones. A token that
    occurs often is read before any write, so it is changed once."""
    penalties = [sequence.sampling.repetition_penalty for sequence in sequences]
    seen = [s.token_ids if penalty != 1 else [] for s, penalty in zip(sequences, penalties, strict=True)]
    at = _places(seen, logits)
    # A penalty that fp32 rounds to 0 would make NaN of -inf; one near it may overflow.
    numbers = torch.finfo(torch.float32)
    penalty = torch.tensor(penalties, dtype=torch.float32, device=logits.device).clamp_min(numbers.tiny)[at[0]]
    values = logits[at]
    logits[at] = torch.where(values > 0, values / penalty, values * penalty).clamp_max(numbers.max)


def _penalise_generated(logits: Tensor, sequences: list[WorkerSequence]) -> None:
    """Subtracts the frequency penalty per occurrence in the output and the presence penalty once."""
    rows = [row for row, sequence in enumerate(sequences) if _counts_tokens(sequence)]
    if not rows:
        return
    members = [sequences[row] for row in rows]
    local, tokens = _places([sequence.token_ids[sequence.prompt_length :] for sequence in members], logits)
    ones = torch.ones(len(tokens), device=logits.device)
    counts = logits.new_zeros(len(rows), logits.shape[1]).index_put_((local, tokens), ones, accumulate=True)
    frequency, presence = torch.tensor(
        [(sequence.sampling.frequency_penalty, sequence.sampling.presence_penalty) for sequence in members],
        dtype=torch.float32,
        device=logits.device,
    ).T
    at = torch.tensor(rows, device=logits.device)[local], tokens
    logits[at] = logits[at] - frequency[local] * counts[local, tokens] - presence[local]


def _places(token_ids: list[list[int]], logits: Tensor) -> tuple[Tensor, Tensor]:
    """Row numbers and token ids, [n] each, of all `token_ids` (one list per row) that are columns of `logits`."""
    lengths = [len(ids) for ids in token_ids]
    tokens = np.fromiter(chain.from_iterable(token_ids), np.int64, sum(lengths))
    rows = np.repeat(np.arange(len(token_ids)), lengths)
    known = tokens < logits.shape[1]
    return torch.from_numpy(rows[known]).to(logits.device), torch.from_numpy(tokens[known]).to(logits.device)
