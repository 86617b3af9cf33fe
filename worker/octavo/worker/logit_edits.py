"""What the processors need to know of one sequence, in arrays, kept up as it grows."""

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from octavo.wire.sampling import SamplingParams

Ids = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]


class LogitEdits:
    """Ids below `vocab_size` that `sampling` names, and the tokens of the sequence that its penalties count."""

    def __init__(self, sampling: SamplingParams, vocab_size: int) -> None:
        self.allowed = _known(sampling.allowed_token_ids, vocab_size)
        self.banned = _known(sampling.banned_token_ids, vocab_size)
        self.banned_before_min_tokens = _known((*sampling.banned_token_ids, *sampling.stop_token_ids), vocab_size)
        pairs = [pair for pair in sampling.logit_bias if pair[0] < vocab_size]
        self.biased = _known((token for token, _ in pairs), vocab_size)
        self.biases: Floats = np.array([bias for _, bias in pairs], dtype=np.float32)
        self.counts = TokenCounts(vocab_size)


class TokenCounts:
    """The distinct tokens of a sequence (`token_ids`, in the order of their first coming) and how often each was
    generated (`counts`). Every token is looked at once, so a step costs no more for a long sequence."""

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

    def update(self, token_ids: list[int], first: int, prompt_length: int) -> None:
        """Takes in what is new of a sequence's `token_ids`, looking at none before `first`; those of the prompt are
        listed, but not counted."""
        self._num_seen = max(self._num_seen, first)
        for position in range(self._num_seen, len(token_ids)):
            place = self._place(token_ids[position])
            if place is not None and position >= prompt_length:
                self._counts[place] += 1
        self._num_seen = len(token_ids)

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
