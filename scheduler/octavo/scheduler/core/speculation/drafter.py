"""Drafts by copying: what followed in another place of a text that the sequence repeats, or is expected to."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import islice

from octavo.scheduler.core.sequence import Sequence, SequenceGroup
from octavo.scheduler.core.speculation.acceptance import LEAST_WORTH, LONGEST_COPY, Acceptance, TrackRecord
from octavo.scheduler.core.speculation.draft import NO_GUESSES, Draft, DraftSource
from octavo.scheduler.core.speculation.store import OutputStore, Owner
from octavo.scheduler.core.speculation.text import LONGEST_MATCH, SHORTEST_MATCH, Tail, Text, packed, tail

# Tokens that the proposals of one step may index together: well below a millisecond.
_INDEXED_PER_STEP = 2048
# After more unseen tokens than that what was followed before is not worth looking at.
_MOST_UNSEEN = 64
# A copy that departs from its text is looked for again among so many tokens of the text, for so many of the sequence.
_REJOIN_AHEAD = 16
_REJOIN_TOKENS = 16
# Other sequences of a request whose outputs are searched; and sequences whose outputs are kept when it ends.
_MOST_SIBLINGS = 4


@dataclass(slots=True)
class _Cursor:
    """Follows a text: the sequence's latest `length` tokens stand before `place`, where its next one should be."""

    text: Text
    source: DraftSource
    acceptance: Acceptance
    place: int
    length: int


@dataclass(slots=True)
class _Track:
    """Follows one sequence, of whose generated tokens `seen` were looked at; the latest stand in the text of `cursor`.
    The text that it has `departed` from lately may be found again within its next `rejoin_left` tokens."""

    output: Text
    seen: int = 0
    cursor: _Cursor | None = None
    departed: _Cursor | None = None
    rejoin_left: int = 0
    record: TrackRecord = field(default_factory=TrackRecord)


@dataclass(slots=True)
class _GroupTexts:
    """The texts that all sequences of a group share, and the track of each; and whose the group's outputs are."""

    owner: Owner
    prompt: Text
    prediction: Text | None
    tracks: dict[Sequence, _Track] = field(default_factory=dict)

    def each(self) -> Iterable[Text]:
        """Yields all texts."""
        yield self.prompt
        if self.prediction is not None:
            yield self.prediction
        yield from (track.output for track in self.tracks.values())


class Drafter:
    """Proposes drafts for the sequences of one scheduler: pure, deterministic, and of bounded memory. It looks at what
    was appended to a sequence when it is asked for its next draft, and costs nothing where it is not."""

    def __init__(self) -> None:
        self._groups: dict[SequenceGroup, _GroupTexts] = {}
        self._store = OutputStore()
        # Groups whose outputs are not kept when they end.
        self._unkept: set[SequenceGroup] = set()
        self._acceptance = {source: Acceptance() for source in DraftSource}
        self._worth = LEAST_WORTH
        self._may_index = _INDEXED_PER_STEP
        # Texts that are indexed over some steps, the first first.
        self._unindexed: dict[Text, None] = {}

    def begin_step(self, worth: float = 0.0) -> None:
        """Begins a step, in which a guess is `worth` a row if it comes true so often, with all before it. Texts that
        were too long to be indexed in one step are indexed on."""
        self._worth = max(worth, LEAST_WORTH)
        self._may_index = _INDEXED_PER_STEP
        while self._may_index and self._unindexed:
            self._index(next(iter(self._unindexed)))

    def propose(self, group: SequenceGroup, sequence: Sequence, most: int) -> Draft | None:
        """Guesses up to `most` tokens that follow the known ones of a sequence of `group`; none of them if it may go on
        to repeat something. Returns None if it repeats nothing."""
        texts = self._groups.get(group)
        if texts is None:
            texts = self._groups[group] = _texts_of(group)
        track = texts.tracks.get(sequence)
        if track is None:
            track = texts.tracks[sequence] = self._new_track(sequence, texts.prediction)
        _look(track, sequence.generated_token_ids)
        if track.cursor is None or track.cursor.length < SHORTEST_MATCH:
            self._find(texts, track, sequence)
        cursor = track.cursor
        if cursor is None:
            may_begin = track.departed is not None or texts.prompt in self._unindexed
            return NO_GUESSES if may_begin else None
        chances = cursor.acceptance.chances(cursor.length, _num_copied(cursor, most), track.record, self._worth)
        return Draft(_copied(cursor, len(chances)), chances, cursor.source)

    def forget(self, group: SequenceGroup) -> None:
        """Forgets a group that has ended; outputs that have come here from their first token on are kept for others of
        its tenant and salt."""
        if (texts := self._groups.pop(group, None)) is not None and self._unindexed:
            for text in texts.each():
                self._unindexed.pop(text, None)
        # What came with a request that was submitted again may be from before a reset.
        if group in self._unkept or any(known.token_ids for known in group.request.generated):
            self._unkept.discard(group)
            return
        for sequence in group.sequences[:_MOST_SIBLINGS]:
            if sequence.num_generated > SHORTEST_MATCH:
                self._store.add(_owner(group), sequence.generated_token_ids)

    def reset(self, salt: str | None, groups: Iterable[SequenceGroup]) -> None:
        """Lets no later group be told what is kept now behind `salt`, None for all, nor what those of `groups` make of
        it, which are all that there are."""
        self._store.forget(salt)
        self._unkept.update(group for group in groups if salt in (None, _owner(group).salt))

    def _new_track(self, sequence: Sequence, prediction: Text | None) -> _Track:
        """Makes the track of a sequence. One that begins is expected to begin as its prediction."""
        track = _Track(Text(sequence.generated_token_ids))
        if prediction is not None and not sequence.generated_token_ids:
            acceptance = self._acceptance[DraftSource.PREDICTION]
            track.cursor = _Cursor(prediction, DraftSource.PREDICTION, acceptance, 0, 0)
        return track

    def _find(self, texts: _GroupTexts, track: _Track, sequence: Sequence) -> None:
        """Makes the sequence follow the text in which the longest run of its latest tokens stands."""
        known = sequence.num_known
        if known < SHORTEST_MATCH:
            return
        wanted = packed(sequence.known_tokens(known - SHORTEST_MATCH, known))
        latest: Tail | None = None
        length = track.cursor.length if track.cursor else 0
        for source, text in self._searched(texts, track):
            if text.is_behind:
                self._index(text)
            # Most texts repeat nothing: that is soon said.
            if not text.may_hold(wanted):
                continue
            if latest is None:
                latest = tail(sequence.known_tokens(max(0, known - LONGEST_MATCH), known))
            place, found = text.find(latest, length)
            if found:
                track.cursor, length = _Cursor(text, source, self._acceptance[source], place, found), found

    def _index(self, text: Text) -> None:
        """Indexes a text, as far as this step may; the next ones go on."""
        self._may_index -= text.index(self._may_index)
        if text.is_behind:
            self._unindexed[text] = None
        else:
            self._unindexed.pop(text, None)

    def _searched(self, texts: _GroupTexts, track: _Track) -> Iterable[tuple[DraftSource, Text]]:
        """Yields the texts that a sequence may repeat, those first which win where others match as long."""
        if texts.prediction is not None:
            yield DraftSource.PREDICTION, texts.prediction
        yield DraftSource.OUTPUT, track.output
        yield DraftSource.PROMPT, texts.prompt
        if len(texts.tracks) > 1:
            others = (each.output for each in texts.tracks.values() if each is not track)
            for text in islice(others, _MOST_SIBLINGS):
                yield DraftSource.SIBLING, text
        for text in self._store.texts(texts.owner):
            yield DraftSource.STORE, text


def _owner(group: SequenceGroup) -> Owner:
    """Returns who may be told what the group was told."""
    request = group.request
    return Owner(request.tenant, request.cache_key.adapter, request.cache_key.salt)


def _texts_of(group: SequenceGroup) -> _GroupTexts:
    predicted = group.request.predicted_token_ids
    return _GroupTexts(_owner(group), Text(group.request.prompt_token_ids), Text(predicted) if predicted else None)


def _look(track: _Track, generated: list[int]) -> None:
    """Goes on along the text that the sequence follows, through the tokens that have come since."""
    if len(generated) - track.seen > _MOST_UNSEEN:
        track.cursor = track.departed = None
    if track.cursor is None and track.departed is None:
        track.seen = len(generated)
        return
    for token in generated[track.seen :]:
        cursor = track.cursor
        if cursor is not None:
            came_true = cursor.text.tokens[cursor.place] == token
            cursor.acceptance.note(cursor.length, track.record, came_true)
            if came_true:
                _advance(track, cursor)
                continue
            track.cursor, track.departed, track.rejoin_left = None, cursor, _REJOIN_TOKENS
        if track.departed is not None:
            _rejoin(track, track.departed, token)
    track.seen = len(generated)


def _advance(track: _Track, cursor: _Cursor) -> None:
    cursor.place += 1
    cursor.length = min(cursor.length + 1, LONGEST_COPY)
    if cursor.place >= len(cursor.text.tokens):
        track.cursor = None


def _rejoin(track: _Track, departed: _Cursor, token: int) -> None:
    """Follows the text again from where `token` stands next in it."""
    tokens, place = departed.text.tokens, departed.place
    try:
        found = tokens.index(token, place, place + _REJOIN_AHEAD) + 1
    except ValueError:
        track.rejoin_left -= 1
        if not track.rejoin_left:
            track.departed = None
        return
    track.departed = None
    if found < len(tokens):
        track.cursor = _Cursor(departed.text, departed.source, departed.acceptance, found, 1)


def _num_copied(cursor: _Cursor, most: int) -> int:
    """Returns how many tokens can be copied from the cursor on: an output that repeats itself goes on repeating."""
    return most if cursor.source is DraftSource.OUTPUT else min(most, len(cursor.text.tokens) - cursor.place)


def _copied(cursor: _Cursor, count: int) -> list[int]:
    """Returns what stands at the cursor; at the end of an output that repeats itself, what would go on repeating."""
    token_ids = list(cursor.text.tokens[cursor.place : cursor.place + count])
    while 0 < len(token_ids) < count:
        token_ids += token_ids[: count - len(token_ids)]
    return token_ids
