"""The fake model's distribution over the tokens that may follow one history, which is made from a hash of that
history."""

import hashlib
import math
import struct
from array import array
from collections.abc import Iterable
from dataclasses import dataclass

from octavo.wire.sampling import DRAWING, NEUTRAL, PENALTIES, Logprobs, SamplingParams


class NoTokenLeftError(ValueError):
    """Raised if a request excludes every token."""


@dataclass(frozen=True)
class FakeDistribution:
    """A geometric distribution over the token ids below `size` in an order of its own.

    Each token has `exp(-decay)` times the probability of the one before it. The order is an arithmetic progression
    modulo the number of ordinary tokens, so that a rank is found without making a list. The `eos_token_ids` (in rising
    order) come last; with `eos_first` the first of them comes first of all.
    """

    size: int
    eos_token_ids: tuple[int, ...]
    eos_first: bool
    draw: int
    decay: float

    @classmethod
    def of(cls, digest: bytes, size: int, eos_token_ids: tuple[int, ...], eos_probability: float) -> "FakeDistribution":
        """Returns the distribution that the 16 bytes of `digest` stand for; `eos_first` holds with
        `eos_probability`."""
        draw, eos_draw = struct.unpack("<QQ", digest)
        eos_first = eos_draw < eos_probability * 2**64
        return cls(size, eos_token_ids, eos_first, draw, 0.1 + eos_draw * 2.0**-64)

    def token(self, rank: int) -> int:
        """Returns the token of a rank, 1 to `size`."""
        place = rank - 1 - self.eos_first
        if place < 0:
            return self.eos_token_ids[0]
        if place >= self._num_ordinary:
            return self.eos_token_ids[rank - 1 - self._num_ordinary]
        token_id = (self._head + place * self._stride) % self._num_ordinary
        for eos in self.eos_token_ids:
            token_id += token_id >= eos
        return token_id

    def rank(self, token_id: int) -> int:
        """Returns the rank of a token among all, from 1 on."""
        if token_id in self.eos_token_ids:
            index = self.eos_token_ids.index(token_id)
            return 1 if self.eos_first and index == 0 else 1 + self._num_ordinary + index
        ordinary = token_id - sum(eos < token_id for eos in self.eos_token_ids)
        place = (ordinary - self._head) * pow(self._stride, -1, self._num_ordinary) % self._num_ordinary
        return 1 + self.eos_first + place

    def permitted(
        self, sampling: SamplingParams, num_generated: int, count: int, mask: bytes | None = None
    ) -> list[int]:
        """Returns the `count` most likely tokens that neither `sampling` nor `mask` excludes; fewer if there are not so
        many.

        `sampling` excludes after `num_generated` tokens; `mask`, if given, has a bit for each id that may come, lowest
        first. Raises `NoTokenLeftError` if there is no token.
        """
        excluded = set(sampling.banned_token_ids)
        if num_generated < sampling.min_tokens:
            excluded.update(sampling.stop_token_ids)
        found: list[int] = []
        for token_id in self._ranked(sampling.allowed_token_ids):
            if token_id not in excluded and (mask is None or _is_set(mask, token_id)):
                found.append(token_id)
                if len(found) == count:
                    return found
        if not found:
            raise NoTokenLeftError("every token is excluded; allow more, ban fewer or ask for fewer min_tokens")
        return found

    def _ranked(self, allowed: list[int]) -> Iterable[int]:
        """Returns the tokens of `allowed`, or all if that is empty, the most likely first."""
        if allowed:
            return sorted({token_id for token_id in allowed if token_id < self.size}, key=self.rank)
        return map(self.token, range(1, self.size + 1))

    def logprob(self, token_id: int) -> float:
        """Returns the natural logarithm of a token's probability, neglecting that the vocabulary ends somewhere."""
        return math.log1p(-math.exp(-self.decay)) - self.decay * (self.rank(token_id) - 1)

    def logprobs(self, token_id: int, top: int) -> Logprobs:
        """Returns the report on a token, with the `top` most likely tokens."""
        top_tokens = [self.token(rank) for rank in range(1, min(top, self.size) + 1)]
        return Logprobs(self.logprob(token_id), self.rank(token_id), top_tokens, list(map(self.logprob, top_tokens)))

    @property
    def _num_ordinary(self) -> int:
        return self.size - len(self.eos_token_ids)

    @property
    def _head(self) -> int:
        return self.draw % self._num_ordinary

    @property
    def _stride(self) -> int:
        """Returns a stride that shares no factor with the number of ordinary tokens, so that its multiples meet each of
        them once."""
        stride = 1 + self.draw // self._num_ordinary % self._num_ordinary
        while math.gcd(stride, self._num_ordinary) != 1:
            stride += 1
        return stride


def _is_set(mask: bytes, token_id: int) -> bool:
    return token_id < 8 * len(mask) and bool(mask[token_id // 8] >> token_id % 8 & 1)


def settings_digest(sampling: SamplingParams, *, drawn: bool) -> bytes:
    """Returns bytes of the settings that shape a choice, drawn or greedy, so that a lost one shows; none if all are
    neutral."""
    names = (*PENALTIES, *DRAWING) if drawn else PENALTIES
    values: list[float] = [getattr(sampling, name) for name in names]
    # What is drawn at a temperature of 1 is drawn from the model's own distribution.
    neutral = [1.0 if name == "temperature" else NEUTRAL[name] for name in names]
    values += [number for pair in sampling.logit_bias for number in pair]
    return b"" if values == neutral else hashlib.blake2b(array("d", values).tobytes(), digest_size=16).digest()
