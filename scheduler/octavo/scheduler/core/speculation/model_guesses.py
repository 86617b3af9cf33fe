"""The guesses of draft models: each sequence's are kept until tokens show which were right, and that teaches how often
guesses are."""

from collections import defaultdict
from dataclasses import dataclass, field
from functools import partial

from octavo.scheduler.core.sequence import Sequence, SequenceGroup
from octavo.scheduler.core.speculation.acceptance import Acceptance, TrackRecord
from octavo.scheduler.core.speculation.draft import Draft, DraftSource

# What guesses are expected to be worth before any was seen.
_FIRST_CHANCE = 0.6
# A sequence of which nothing was guessed for so many tokens is believed again like a new one; the next time after twice
# as many.
_FORGIVEN_AFTER = 256


def _fresh_record() -> TrackRecord:
    return TrackRecord(4.0, 4.0)


@dataclass(slots=True)
class _Track:
    """Holds the guesses for one sequence: of its tokens from `place` on, the first of them so `deep` among those that
    were made with it."""

    acceptance: Acceptance
    record: TrackRecord = field(default_factory=_fresh_record)
    guesses: list[int] = field(default_factory=list)
    place: int = 0
    depth: int = 1
    forgiven_after: int = _FORGIVEN_AFTER


class ModelGuesses:
    """Holds what draft models have guessed, of which each has its own acceptance, by depth."""

    def __init__(self) -> None:
        self.tracks: dict[Sequence, _Track] = {}
        self._acceptance: defaultdict[str, Acceptance] = defaultdict(partial(Acceptance, _FIRST_CHANCE))

    def take(self, model: str, sequence: Sequence, guesses: list[int]) -> None:
        """Keeps what `model` guesses to follow the known tokens of a sequence, in place of earlier guesses."""
        track = self._looked(model, sequence)
        track.acceptance = self._acceptance[model]
        track.guesses, track.place, track.depth = list(guesses), sequence.num_known, 1

    def draft(self, model: str, sequence: Sequence, most: int) -> Draft | None:
        """Returns up to `most` of the guesses that follow the known tokens of a sequence; None if there are none."""
        if sequence not in self.tracks:
            return None
        track = self._looked(model, sequence)
        count = min(most, len(track.guesses))
        chances = track.acceptance.chances(track.depth, count, track.record) if count > 0 else []
        return Draft(track.guesses[: len(chances)], chances, DraftSource.MODEL) if chances else None

    def chances(self, model: str, sequence: Sequence, count: int) -> list[float]:
        """Returns the chances of up to `count` guesses that `model` would make of what follows a sequence, each given
        those before it."""
        acceptance = self._acceptance[model]
        if sequence not in self.tracks:
            return acceptance.chances(1, count, _fresh_record())
        track = self._looked(model, sequence)
        if sequence.num_known - track.place > track.forgiven_after:
            track.record, track.place = _fresh_record(), sequence.num_known
            track.forgiven_after *= 2
        return acceptance.chances(1, count, track.record)

    def forget(self, group: SequenceGroup) -> None:
        """Forgets the sequences of a group that has ended."""
        for sequence in group.sequences:
            self.tracks.pop(sequence, None)

    def _looked(self, model: str, sequence: Sequence) -> _Track:
        """Returns the track of a sequence, once it has learnt from the tokens that have come since its guesses."""
        track = self.tracks.get(sequence)
        if track is None:
            track = self.tracks[sequence] = _Track(self._acceptance[model])
        while track.guesses and track.place < sequence.num_known:
            came_true = track.guesses.pop(0) == sequence.generated_token_ids[track.place - sequence.num_prompt]
            track.acceptance.note(track.depth, track.record, came_true)
            track.place += 1
            track.depth += 1
            if not came_true:
                # What was to follow was guessed for another token.
                track.guesses.clear()
        return track
