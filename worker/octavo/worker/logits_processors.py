"""What a request does to its logits before a token is chosen: exclusions, biases and penalties.

The order is that of vLLM's V1 sampler: what a grammar allows, allowed ids, banned ids, stop ids before `min_tokens`,
logit bias, repetition penalty (CTRL, Keskar et al. 2019), frequency and presence penalties; temperature, min-p, top-k
and top-p follow when the token is drawn. An excluded logit is -inf and stays so, which is why only the bias's place
before the penalties and theirs among each other matter.

Ids beyond the vocabulary exclude and favour nothing. All counts come from the sequence's tokens, so a sequence that was
computed anew is penalised as before. Only the logits of tokens that a request names or has are touched.
"""

from math import inf

import numpy as np
import torch
from torch import Tensor

from octavo.worker.gpu.transfer import upload
from octavo.worker.grammar_masks import NO_MASKS, Masks
from octavo.worker.logit_edits import Ids, LogitEdits, TokenCounts
from octavo.worker.sequences import WorkerSequence


def is_processed(sequence: WorkerSequence) -> bool:
    """Whether `process` changes anything for the next token of `sequence`."""
    sampling = sequence.sampling
    return bool(
        sampling.grammar
        or sampling.logit_bias
        or sampling.allowed_token_ids
        or sampling.banned_token_ids
        or _is_penalised(sequence)
        or _must_go_on(sequence)
    )


def process(logits: Tensor, sequences: list[WorkerSequence], masks: Masks = NO_MASKS) -> None:
    """Changes `logits` ([rows, vocab_size] fp32, contiguous, or log-probabilities of that shape) in place, each row for
    its sequence, and with its mask if it has a grammar; rows of sequences that ask for nothing stay as they are. It
    waits for no device."""
    masks.apply(logits, sequences)
    edits = [_edits(sequence, logits.shape[1]) for sequence in sequences]
    _keep_allowed(logits, sequences, edits)
    _exclude(logits, sequences, edits)
    _add_bias(logits, edits)
    _penalise(logits, sequences, edits)


def _is_penalised(sequence: WorkerSequence) -> bool:
    sampling = sequence.sampling
    return sampling.repetition_penalty != 1 or sampling.presence_penalty != 0 or sampling.frequency_penalty != 0


def _must_go_on(sequence: WorkerSequence) -> bool:
    return sequence.num_generated < sequence.sampling.min_tokens and bool(sequence.sampling.stop_token_ids)


def _edits(sequence: WorkerSequence, vocab_size: int) -> LogitEdits:
    """Those kept with the sequence, made at its first step."""
    if sequence.edits is None:
        sequence.edits = LogitEdits(sequence.sampling, vocab_size)
    return sequence.edits


def _keep_allowed(logits: Tensor, sequences: list[WorkerSequence], edits: list[LogitEdits]) -> None:
    rows = [row for row, sequence in enumerate(sequences) if sequence.sampling.allowed_token_ids]
    if rows:
        flat, at = logits.view(-1), _places([each.allowed for each in edits], logits)
        kept = flat.index_select(0, at)
        logits.index_fill_(0, upload(np.array(rows), logits.device), -inf)
        flat.index_copy_(0, at, kept)


def _exclude(logits: Tensor, sequences: list[WorkerSequence], edits: list[LogitEdits]) -> None:
    excluded = [
        each.banned_before_min_tokens if _must_go_on(sequence) else each.banned
        for sequence, each in zip(sequences, edits, strict=True)
    ]
    logits.view(-1).index_fill_(0, _places(excluded, logits), -inf)


def _add_bias(logits: Tensor, edits: list[LogitEdits]) -> None:
    biases = upload(np.concatenate([each.biases for each in edits]), logits.device)
    logits.view(-1).index_add_(0, _places([each.biased for each in edits], logits), biases)


def _penalise(logits: Tensor, sequences: list[WorkerSequence], edits: list[LogitEdits]) -> None:
    """Divides the positive logits of all tokens of prompt and output by the repetition penalty and multiplies the
    negative ones; then subtracts the frequency penalty per occurrence in the output, and the presence penalty once."""
    counted = [_counts(*pair) for pair in zip(sequences, edits, strict=True)]
    at = _places([each.token_ids for each in counted], logits)
    if not len(at):
        return
    lengths = [len(each.token_ids) for each in counted]

    def per_token(values: list[float]) -> Tensor:
        return upload(np.repeat(np.array(values, dtype=np.float32), lengths), logits.device)

    # A penalty that fp32 rounds to 0 would make NaN of -inf; one near it may overflow.
    numbers = torch.finfo(torch.float32)
    repetition = per_token([each.sampling.repetition_penalty for each in sequences]).clamp_min(numbers.tiny)
    counts = upload(np.concatenate([each.counts for each in counted]), logits.device)
    values = logits.view(-1).index_select(0, at)
    values = torch.where(values > 0, values / repetition, values * repetition).clamp_max(numbers.max)
    values -= per_token([each.sampling.frequency_penalty for each in sequences]) * counts
    values -= per_token([each.sampling.presence_penalty for each in sequences]) * (counts > 0)
    logits.view(-1).index_copy_(0, at, values)


def _counts(sequence: WorkerSequence, edits: LogitEdits) -> TokenCounts:
    """All that the sequence is penalised for; the prompt matters to the repetition penalty alone."""
    if _is_penalised(sequence):
        first = 0 if sequence.sampling.repetition_penalty != 1 else sequence.prompt_length
        edits.counts.update(sequence.token_ids, first, sequence.prompt_length)
    return edits.counts


def _places(token_ids: list[Ids], logits: Tensor) -> Tensor:
    """Where in the flattened `logits` the tokens of all rows are, one array of ids for each."""
    starts = np.arange(len(token_ids)) * logits.shape[1]
    places = np.concatenate(token_ids) + np.repeat(starts, [len(ids) for ids in token_ids])
    return upload(places, logits.device)
