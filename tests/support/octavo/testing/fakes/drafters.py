"""Drafters for tests: one that is up to anything, and one that does as it is told. Neither keeps anything, so that they
propose alike in every run and after every loss."""

import zlib
from array import array
from collections.abc import Callable, Iterable

from octavo.scheduler.core.sequence import Sequence, SequenceGroup
from octavo.scheduler.core.speculation.draft import Draft, DraftSource
from octavo.scheduler.core.speculation.drafter import Drafter
from octavo.testing.cluster import VOCABULARY
from octavo.wire.steps import MAX_DRAFT_TOKENS
from octavo.worker.fake.runner import FakeVocabulary

# Returns guesses of what follows, of which at most so many can be used.
Guess = Callable[[SequenceGroup, Sequence, int], list[int]]


class ScriptedDrafter(Drafter):
    """Proposes what `guess` returns, if that is anything, and says of each token that it is right with this
    `chance`."""

    def __init__(self, guess: Guess, source: DraftSource = DraftSource.PROMPT, chance: float = 0.5) -> None:
        self._guess = guess
        self._source = source
        self._chance = chance

    def begin_step(self, worth: float = 0.0) -> None:
        """Does nothing."""

    def propose(self, group: SequenceGroup, sequence: Sequence, most: int) -> Draft | None:
        token_ids = self._guess(group, sequence, most)
        return Draft(token_ids, [self._chance] * len(token_ids), self._source) if token_ids else None

    def forget(self, group: SequenceGroup) -> None:
        """Does nothing."""

    def reset(self, salt: str | None, groups: Iterable[SequenceGroup]) -> None:
        """Does nothing."""


class Foresight:
    """Knows what the fake model goes on with, for any request; `window` is that of the widest KV group, 0 if one sees
    all tokens."""

    def __init__(self, vocabulary: FakeVocabulary, window: int = 0) -> None:
        self._vocabulary = vocabulary
        self._window = window

    def __call__(self, group: SequenceGroup, sequence: Sequence, count: int) -> list[int]:
        """Returns the next `count` tokens, whatever ends the sequence before."""
        history = array("i", sequence.known_tokens(0, sequence.num_known))
        for num_generated in range(sequence.num_generated, sequence.num_generated + count):
            seen = history[max(0, len(history) - self._window) if self._window else 0 :]
            history.append(self._vocabulary.choose(seen.tobytes(), group.sampling, sequence.index, num_generated))
        return history[sequence.num_known :].tolist()


class AdversarialDrafter(ScriptedDrafter):
    """Proposes, by a hash of where a sequence is: nothing, what is right, right and too long, right but for one token,
    what is wrong, and what no vocabulary holds. All that is right goes on past stop tokens and the end."""

    def __init__(self, foresight: Foresight, seed: int = 0) -> None:
        super().__init__(self._propose, DraftSource.PREDICTION)
        self._foresight = foresight
        self._seed = seed

    def _propose(self, group: SequenceGroup, sequence: Sequence, most: int) -> list[int]:
        where = f"{self._seed}:{group.request_id}:{sequence.index}:{sequence.num_known}"
        draw = zlib.crc32(where.encode())
        way, place = draw % 8, draw >> 8
        if way == 0:
            return []
        if way == 1:
            return [place % 7, place % 5, place % 3] * (1 + place % 4)
        token_ids = self._foresight(group, sequence, most)
        if way == 2:
            return token_ids + token_ids[:1] * MAX_DRAFT_TOKENS
        if way in (3, 4):
            token_ids[place % len(token_ids)] ^= 1
        if way == 5:
            return token_ids[: 1 + place % len(token_ids)]
        if way == 6:
            token_ids[place % len(token_ids)] = (-1, 2**31 - 1)[place % 2]
        return token_ids


def adversary(windows: tuple[int, ...] = (0,), seed: int = 0) -> AdversarialDrafter:
    """Makes one for requests to fake replicas whose KV groups have these windows."""
    return AdversarialDrafter(Foresight(VOCABULARY, 0 if 0 in windows else max(windows)), seed)
