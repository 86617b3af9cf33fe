"""Simulates what speculation guesses from: what sequences say, and how often a guess of it is right.

A request of an event log says again what it said, so production's drafter guesses for it what it would have guessed.
One that was drawn says what nothing repeats; how often there are guesses for it, and how often these are right, is
given.
"""

import zlib
from collections.abc import Sequence as Sequenced
from dataclasses import dataclass
from itertools import accumulate, chain, repeat
from operator import mul
from random import Random

from octavo.scheduler.core.sequence import Sequence, SequenceGroup
from octavo.scheduler.core.speculation.draft import Draft, DraftSource
from octavo.scheduler.core.speculation.drafter import Drafter
from octavo.wire.steps import MAX_DRAFT_TOKENS


@dataclass(frozen=True)
class Acceptance:
    """Gives the chances of guesses: `by_depth` that the first, second, ... is right if all before it are, the last of
    them for all further ones; and the share of a sequence's steps for which there are any `proposals`. Raises
    `ValueError` on what is no share."""

    by_depth: tuple[float, ...]
    proposals: float = 1.0

    def __post_init__(self) -> None:
        if not self.by_depth or len(self.by_depth) > MAX_DRAFT_TOKENS:
            raise ValueError(f"give 1 to {MAX_DRAFT_TOKENS} chances of guesses, not {len(self.by_depth)}")
        for share in (*self.by_depth, self.proposals):
            if not 0.0 <= share <= 1.0:
                raise ValueError(f"a chance is from 0 to 1, not {share:g}")

    @classmethod
    def parse(cls, text: str, proposals: float = 1.0) -> "Acceptance":
        """Reads such as "0.8" or "0.8,0.9,0.95". Raises `ValueError`."""
        try:
            chances = tuple(map(float, text.split(",")))
        except ValueError as error:
            raise ValueError(f"{text!r} are no chances: write one number, or several between commas") from error
        return cls(chances, proposals)

    def chances(self, count: int) -> list[float]:
        """Returns the chances of `count` guesses, each given those before it."""
        given = self.by_depth[:count]
        return [*given, *repeat(given[-1], count - len(given))] if count else []

    def tokens_per_step(self, most: int) -> float:
        """Returns the tokens that a step of a sequence is expected to give if it checks `most` guesses whenever there
        are any."""
        expected: float = sum(accumulate(self.chances(most), mul))
        return 1.0 + self.proposals * expected


class Outputs:
    """Says which tokens sequences choose: those that were recorded, and beyond them, or without, some that nothing
    repeats."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._recorded: dict[str, list[list[int]]] = {}

    def expect(self, request_id: str, recorded: list[list[int]]) -> None:
        """Expects a request whose sequences will say what was recorded of them."""
        self._recorded[request_id] = recorded

    def is_recorded(self, request_id: str) -> bool:
        """Tells whether the request's sequences say what was recorded of them."""
        return request_id in self._recorded

    def tokens(self, request_id: str, sequence: int, first: int, count: int) -> list[int]:
        """Returns `count` generated tokens of a request's sequence, from number `first` on."""
        outputs = self._recorded.get(request_id, ())
        said = outputs[sequence][first : first + count] if sequence < len(outputs) else ()
        places = range(first + len(said), first + count)
        others = (zlib.crc32(f"{request_id} {sequence} {place}".encode()) for place in places)
        return [token % self._vocab_size for token in chain(said, others)]

    def other_than(self, token_id: int) -> int:
        """Returns a token that is not this one."""
        return (token_id + 1) % self._vocab_size


class SimulatedDrafter(Drafter):
    """Guesses as production does for what was recorded. For all else there are guesses as often as `acceptance` says,
    and are right as often; None: never. Then a scheduler knows the chances, which in production it learns."""

    def __init__(self, acceptance: Acceptance | None, outputs: Outputs, seed: str) -> None:
        super().__init__()
        self._given = acceptance
        self._outputs = outputs
        self._seed = seed

    def propose(self, group: SequenceGroup, sequence: Sequence, most: int) -> Draft | None:
        if self._outputs.is_recorded(group.request_id):
            return super().propose(group, sequence, most)
        return self._drawn(self._given, group, sequence, most) if self._given else None

    def forget(self, group: SequenceGroup) -> None:
        if self._outputs.is_recorded(group.request_id):
            super().forget(group)

    def _drawn(self, acceptance: Acceptance, group: SequenceGroup, sequence: Sequence, most: int) -> Draft | None:
        # Drawn by place, so that who waits for a token in flight finds the guesses behind it for which it waits.
        in_flight = sequence.placement.num_in_flight
        place = sequence.num_generated + in_flight
        random = Random(f"{self._seed} {group.request_id} {sequence.index} {place}")
        if random.random() >= acceptance.proposals:
            return None
        guesses = acceptance.chances(most - in_flight)
        token_ids = self._outputs.tokens(group.request_id, sequence.index, place - in_flight, most)
        num_right = _num_right(random, guesses)
        if num_right < len(guesses):
            token_ids[in_flight + num_right] = self._outputs.other_than(token_ids[in_flight + num_right])
        return Draft(token_ids, [*guesses[:1] * in_flight, *guesses], DraftSource.PROMPT) if guesses else None


def _num_right(random: Random, chances: Sequenced[float]) -> int:
    """Draws how many guesses are right before the first wrong one."""
    return next((depth for depth, chance in enumerate(chances) if random.random() >= chance), len(chances))
