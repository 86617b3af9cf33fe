"""The processors, which change a request's logits before a token is chosen: exclusions, biases and penalties.

They follow the order of vLLM's V1 sampler: what a grammar allows, allowed ids, banned ids, stop ids before
`min_tokens`, logit bias, repetition penalty (CTRL, Keskar et al. 2019), frequency and presence penalties; temperature,
min-p, top-k and top-p follow when the token is drawn. An excluded logit is -inf and stays so, which is why only the
places of the bias and of the penalties matter.

Ids beyond the vocabulary exclude and favour nothing. All counts come from the sequence's tokens, so a sequence that was
computed anew is penalised as before; tokens of a draft count as generated. Only the logits of tokens that a request
names or has are touched.
"""

from collections import Counter
from collections.abc import Iterable
from math import inf

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from octavo.wire.sampling import SamplingParams
from octavo.worker.gpu.transfer import upload
from octavo.worker.sampling.grammar_masks import NO_MASKS, Masks
from octavo.worker.sequences import Chooser, WorkerSequence

Ids = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]


class LogitEdits:
    """Holds the token ids below `vocab_size` that `sampling` names, and the counts of tokens that its penalties
    need."""

    def __init__(self, sampling: SamplingParams, vocab_size: int) -> None:
        self.allowed = _known(sampling.allowed_token_ids, vocab_size)
        self.banned = _known(sampling.banned_token_ids, vocab_size)
        self.banned_before_min_tokens = _known((*sampling.banned_token_ids, *sampling.stop_token_ids), vocab_size)
        pairs = [pair for pair in sampling.logit_bias if pair[0] < vocab_size]
        self.biased = _known((token for token, _ in pairs), vocab_size)
        self.biases: Floats = np.array([bias for _, bias in pairs], dtype=np.float32)
        self.counts = TokenCounts(vocab_size)


class TokenCounts:
    """Holds the distinct tokens of a sequence (`token_ids`, in order of appearance) and how often each was generated
    (`counts`).

    Every token is looked at once, so a step costs no more for a long sequence.
    """

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._places: dict[int, int] = {}
        self._token_ids: Ids = np.empty(0, dtype=np.int64)
        self._counts: Floats = np.empty(0, dtype=np.float32)
        self._num_seen = 0

    @property
    def token_ids(self) -> Ids:
        return self._token_ids[: len(self._places)]

    @property
    def counts(self) -> Floats:
        return self._counts[: len(self._places)]

    def update(self, token_ids: list[int], first: int, end: int, prompt_length: int) -> None:
        """Counts the new tokens of a sequence's `token_ids` from position `first` up to `end`; prompt tokens are
        listed, but not counted."""
        self._num_seen = max(self._num_seen, first)
        for position in range(self._num_seen, end):
            place = self._place(token_ids[position])
            if place is not None and position >= prompt_length:
                self._counts[place] += 1
        self._num_seen = max(self._num_seen, end)

    def after(self, drafted: list[int]) -> tuple[Ids, Floats]:
        """Returns `token_ids` and `counts` as they would be if these tokens had been generated too."""
        more = Counter(token_id for token_id in drafted if token_id < self._vocab_size)
        new = [token_id for token_id in more if token_id not in self._places]
        places = self._places | {token_id: len(self._places) + place for place, token_id in enumerate(new)}
        counts = np.concatenate((self.counts, np.zeros(len(new), dtype=np.float32)))
        for token_id, count in more.items():
            counts[places[token_id]] += count
        return np.concatenate((self.token_ids, np.array(new, dtype=np.int64))), counts

    def _place(self, token_id: int) -> int | None:
        if token_id >= self._vocab_size:
            return None
        place = self._places.setdefault(token_id, len(self._places))
        if place == len(self._token_ids):
            room = max(16, place)
            self._token_ids = np.concatenate((self._token_ids, np.zeros(room, dtype=np.int64)))
            self._counts = np.concatenate((self._counts, np.zeros(room, dtype=np.float32)))
        self._token_ids[place] = token_id
        return place


def _known(token_ids: Iterable[int], vocab_size: int) -> Ids:
    return np.array([token_id for token_id in token_ids if token_id < vocab_size], dtype=np.int64)


def is_processed(chooser: Chooser) -> bool:
    """Tells whether `process` changes anything for the next token of `chooser`."""
    sampling = chooser.sampling
    return bool(
        sampling.grammar
        or sampling.logit_bias
        or sampling.allowed_token_ids
        or sampling.banned_token_ids
        or sampling.is_penalised
        or _must_go_on(chooser)
    )


def process(
    logits: Tensor, choosers: list[Chooser], masks: Masks = NO_MASKS, last_tokens: Tensor | None = None
) -> None:
    """Applies each chooser's grammar mask, exclusions, biases and penalties to its row of `logits`, in place.

    `logits` is [rows, vocab_size] fp32, contiguous; log-probabilities of that shape will do. Rows of choosers that ask
    for nothing stay as they are. Where a chooser's last token is pending, `last_tokens` ([rows] int64, on the device of
    the logits) holds it. The call waits for no device.
    """
    masks.apply(logits, choosers)
    edits = [_edits(chooser.sequence, logits.shape[1]) for chooser in choosers]
    _keep_allowed(logits, choosers, edits)
    _exclude(logits, choosers, edits)
    _add_bias(logits, edits)
    _penalise(logits, choosers, edits, last_tokens)


def _must_go_on(chooser: Chooser) -> bool:
    return chooser.num_generated < chooser.sampling.min_tokens and bool(chooser.sampling.stop_token_ids)


def _edits(sequence: WorkerSequence, vocab_size: int) -> LogitEdits:
    """Returns the edits kept with the sequence; its first step makes them."""
    if sequence.edits is None:
        sequence.edits = LogitEdits(sequence.sampling, vocab_size)
    return sequence.edits


def _keep_allowed(logits: Tensor, choosers: list[Chooser], edits: list[LogitEdits]) -> None:
    rows = [row for row, chooser in enumerate(choosers) if chooser.sampling.allowed_token_ids]
    if rows:
        flat, at = logits.view(-1), _places([each.allowed for each in edits], logits)
        kept = flat.index_select(0, at)
        logits.index_fill_(0, upload(np.array(rows), logits.device), -inf)
        flat.index_copy_(0, at, kept)


def _exclude(logits: Tensor, choosers: list[Chooser], edits: list[LogitEdits]) -> None:
    excluded = [
        each.banned_before_min_tokens if _must_go_on(chooser) else each.banned
        for chooser, each in zip(choosers, edits, strict=True)
    ]
    logits.view(-1).index_fill_(0, _places(excluded, logits), -inf)


def _add_bias(logits: Tensor, edits: list[LogitEdits]) -> None:
    biases = upload(np.concatenate([each.biases for each in edits]), logits.device)
    logits.view(-1).index_add_(0, _places([each.biased for each in edits], logits), biases)


def _penalise(logits: Tensor, choosers: list[Chooser], edits: list[LogitEdits], last_tokens: Tensor | None) -> None:
    """Applies the penalties to the tokens that each chooser has.

    Divides the positive logits of all tokens of prompt and output by the repetition penalty and multiplies the negative
    ones; then subtracts the frequency penalty per occurrence in the output, and the presence penalty once.
    """
    counted = [_counts(*pair) for pair in zip(choosers, edits, strict=True)]
    lengths = [len(token_ids) for token_ids, _ in counted]
    penalised = [row for row, each in enumerate(choosers) if each.sampling.is_penalised]
    pending = [row for row in penalised if choosers[row].sequence.has_pending_token]
    if not any(lengths) and not pending:
        return
    at = _places([token_ids for token_ids, _ in counted], logits)
    counts = upload(np.concatenate([counts for _, counts in counted]), logits.device)
    # The row of each token that is penalised, the pending ones last.
    rows = np.concatenate((np.repeat(np.arange(len(choosers)), lengths), np.array(pending, dtype=np.int64)))
    if pending:
        assert last_tokens is not None, "a pending token stands in `last_tokens`"
        at, counts = _with_pending(at, counts, upload(rows, logits.device), last_tokens, logits.shape[1])

    def per_token(values: list[float]) -> Tensor:
        return upload(np.array(values, dtype=np.float32)[rows], logits.device)

    # A penalty that fp32 rounds to 0 would make NaN of -inf; one near it may overflow.
    numbers = torch.finfo(torch.float32)
    repetition = per_token([each.sampling.repetition_penalty for each in choosers]).clamp_min(numbers.tiny)
    values = logits.view(-1).index_select(0, at)
    values = torch.where(values > 0, values / repetition, values * repetition).clamp_max(numbers.max)
    values -= per_token([each.sampling.frequency_penalty for each in choosers]) * counts
    values -= per_token([each.sampling.presence_penalty for each in choosers]) * (counts > 0)
    logits.view(-1).index_copy_(0, at, values)


def _with_pending(
    at: Tensor, counts: Tensor, rows: Tensor, last_tokens: Tensor, vocab_size: int
) -> tuple[Tensor, Tensor]:
    """Returns the places `at` of tokens and their `counts` as they are with the pending tokens of some rows, which
    `last_tokens` holds. `rows` ([tokens + pending]) says whose each is.

    Such a token gets a place of its own at the end. Where it has one already, both have the same count, so that the two
    are penalised to the same number.
    """
    known, own = rows[: len(at)], rows[len(at) :]
    places = torch.full_like(last_tokens, -1)
    places.index_copy_(0, own, own * vocab_size + last_tokens.index_select(0, own))
    again = (at == places.index_select(0, known)).float()
    before = torch.zeros(len(places), dtype=counts.dtype, device=counts.device)
    # No more than one number of each row is not zero: their sum has no order.
    before.index_add_(0, known, again * counts)
    new = torch.cat((counts + again, before.index_select(0, own) + 1))
    return torch.cat((at, places.index_select(0, own))), new


def _counts(chooser: Chooser, edits: LogitEdits) -> tuple[Ids, Floats]:
    """Returns all tokens that the chooser is penalised for, and their counts; prompt tokens count for the repetition
    penalty alone."""
    sequence, counts = chooser.sequence, edits.counts
    if not sequence.sampling.is_penalised:
        return counts.token_ids, counts.counts
    first = 0 if sequence.sampling.repetition_penalty != 1 else sequence.prompt_length
    end = len(sequence.token_ids) - sequence.has_pending_token
    counts.update(sequence.token_ids, first, end, sequence.prompt_length)
    return counts.after(chooser.drafted) if chooser.num_drafted else (counts.token_ids, counts.counts)


def _places(token_ids: list[Ids], logits: Tensor) -> Tensor:
    """Returns the indices, in the flattened `logits`, of the tokens of all rows, of which `token_ids` holds an array
    each."""
    starts = np.arange(len(token_ids)) * logits.shape[1]
    places = np.concatenate(token_ids) + np.repeat(starts, [len(ids) for ids in token_ids])
    return upload(places, logits.device)
