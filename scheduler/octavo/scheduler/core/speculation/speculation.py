"""Speculation: which sequences of a step get drafts, how long ones, of which the draft model makes others for the next
step, and which wait for an answer so that they can."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from octavo.scheduler.core.config import SchedulerConfig
from octavo.scheduler.core.replica import Replica
from octavo.scheduler.core.sequence import Member, RequestGroup, Sequence, SequenceGroup
from octavo.scheduler.core.speculation.asking import Asking, ask
from octavo.scheduler.core.speculation.draft import Draft, DraftSource
from octavo.scheduler.core.speculation.drafter import Drafter
from octavo.scheduler.core.speculation.model_guesses import ModelGuesses
from octavo.scheduler.core.speculation.pauses import Pause
from octavo.scheduler.core.speculation.pricing import Decision, Offer, Pace, Prices, always, decide
from octavo.scheduler.core.speculation.text import SHORTEST_MATCH
from octavo.scheduler.core.step import grammar_time
from octavo.wire.steps import MAX_DRAFT_TOKENS

# Workers of older schemas know no drafts, nor what becomes of their blocks.
_FIRST_SCHEMA = 9
# Sequences for which a step asks though they repeat nothing: to ask for all of a batch would take a millisecond.
_ASKED_IN_TURN = 4
# Of many, one that has repeated nothing has its turn less and less often: one in so many at last.
_MOST_TURNS = 4
# Guesses of one sequence, by which a draft model that does not pay is tried again.
_TRIED_DEPTH = 2

_Proposal = tuple[RequestGroup, Sequence, Draft]


@dataclass(frozen=True, slots=True)
class Spending:
    """The `decodes` of a step that are planned now, the `drafts` of some of them, and by `proposals` how many guesses
    the draft model makes of what follows; the others are `waiting` for the answer to an earlier one. `is_awaited`: the
    next plan waits for the step's answer; with `stands` false this one waits for those that are outstanding."""

    decodes: list[Member]
    waiting: list[Sequence] = field(default_factory=list)
    drafts: dict[Sequence, Draft] = field(default_factory=dict)
    proposals: dict[Sequence, int] = field(default_factory=dict)
    is_awaited: bool = False
    stands: bool = True


@dataclass(slots=True)
class Room:
    """Counts what others leave to drafts of a step: `rows` of it, free `blocks`, and microseconds of grammars."""

    rows: int
    blocks: int
    grammar_us: int = grammar_time.STEP_US


class Speculation:
    """Asks a drafter, and workers' draft models, for guesses, and decides by their price which are made and checked."""

    def __init__(self, config: SchedulerConfig, drafter: Drafter) -> None:
        self._model_guesses = ModelGuesses()
        self._setting = config.speculation
        self._most = config.speculation if isinstance(config.speculation, int) else MAX_DRAFT_TOKENS
        self._drafter = drafter

    def serves(self, replica: Replica) -> bool:
        """Tells whether decodes of the replica's next step may get drafts.

        A suspect runs without them. While a group that is swapped out, or a prefix to be pinned, waits for blocks and
        tokens of a step, drafts take none.
        """
        if self._setting == "off" or (self._setting == "auto" and not replica.prices.is_known):
            return False
        return not (
            replica.hello.schema_version < _FIRST_SCHEMA
            or replica.isolates
            or replica.swapped
            or replica.prefixes.to_compute
        )

    def forget(self, group: RequestGroup) -> None:
        """Lets go of a group that has ended."""
        if self._setting != "off":
            self._drafter.forget(group)
            if self._model_guesses.tracks:
                self._model_guesses.forget(group)

    def reset_cache(self, salt: str | None, groups: Iterable[RequestGroup]) -> None:
        """Lets no later group be given drafts of what is known now behind `salt`, None for all, nor of what those of
        `groups` make of it, which are all that there are."""
        if self._setting != "off":
            self._drafter.reset(salt, groups)

    def take(self, replica: Replica, sequence: Sequence, guesses: list[int]) -> None:
        """Keeps what the replica's draft model guesses to follow the known tokens of a sequence."""
        if replica.hello.draft_model is not None:
            self._model_guesses.take(replica.hello.draft_model, sequence, guesses)

    def spend(self, replica: Replica, decodes: list[Member], other_rows: int, room: Room) -> Spending:
        """Returns which of a step's decodes are planned now beside `other_rows` of prompts, with drafts and proposals
        for them as far as there is `room`."""
        prices, is_priced = replica.prices, self._setting == "auto"
        if is_priced and not prices.may_pay(len(decodes), other_rows):
            return Spending(decodes)
        self._drafter.begin_step(prices.worth(len(decodes), other_rows) if is_priced else 0.0)
        proposals = self._proposals(replica, decodes)
        if not proposals and replica.hello.draft_model is None:
            return Spending(decodes)
        offers = [Offer(draft.chances, sequence.placement.num_in_flight > 0) for _, sequence, draft in proposals]
        decision = self._decide(prices, offers, len(decodes), other_rows, room.rows)
        chosen = [(proposal, count) for proposal, count in zip(proposals, decision.counts, strict=True) if count]
        asked, pace = self._to_guess(replica, decodes, chosen, other_rows)
        if not chosen and not asked:
            return Spending(decodes)
        wanted = {sequence for (_, sequence, _), _ in chosen} | asked.keys()
        left = _left(replica, decodes, sum(not each.placement.num_in_flight for each in wanted), room)
        drafts, guessed = _fitting(replica, chosen, asked, left)
        # Who waits has the rows of the next step; and does not wait where there is no room for what is guessed then.
        left = Room(room.rows, left.blocks, grammar_time.left_by(decodes))
        drafts_then, guessed_then = _fitting(replica, chosen, asked, left, in_flight=True)
        waiting = [*{**drafts_then, **guessed_then}]
        all_wait = Pace.ALL in (decision.pace, pace) and bool(drafts or guessed or waiting)
        if all_wait and replica.outstanding:
            return Spending(decodes, stands=False)
        held = set(waiting)
        going = [decode for decode in decodes if decode[1] not in held] if waiting else decodes
        return Spending(going, waiting, drafts, guessed, is_awaited=all_wait)

    def _to_guess(
        self, replica: Replica, decodes: list[Member], chosen: list[tuple[_Proposal, int]], other_rows: int
    ) -> tuple[dict[Sequence, int], Pace]:
        """Returns how many guesses the draft model is to make of what follows the step's tokens, for sequences that do
        not copy a text, which are to wait for their answers where these are outstanding; and whether all others are
        to."""
        model = replica.hello.draft_model
        if model is None:
            return {}, Pace.GO
        drafted = {sequence: count for (_, sequence, _), count in chosen}
        copying = {sequence for (_, sequence, draft), _ in chosen if draft.source is not DraftSource.MODEL}
        # How many may be made of each: their room is behind all that the step may bring.
        most: dict[Sequence, int] = {}
        for group, sequence in decodes:
            count = min(self._most, group.longest - sequence.num_known - drafted.get(sequence, 0) - 2)
            if (
                count > 0
                and sequence not in copying
                and isinstance(group, RequestGroup)
                and _may_draft(group, sequence)
            ):
                most[sequence] = count
        if self._setting != "auto":
            return most, Pace.DRAFTERS
        if not most or not replica.asking.is_known:
            return {}, Pace.GO
        sequences = list(most)
        chances = [self._model_guesses.chances(model, sequence, count) for sequence, count in most.items()]
        found = ask(replica.prices, replica.asking, chances, len(decodes), other_rows)
        trials = replica.asking.trials
        if found.depth:
            trials.paid()
            return _first(found, sequences, most), Pace.ALL
        if not trials.is_over():
            return {}, Pace.GO
        # The draft model may have to catch up with all that it tries: that is the least of the shortest.
        trial = min(sequences, key=lambda each: (each.placement.num_in_flight > 0, each.num_known))
        if not trial.placement.num_in_flight:
            trials.was_used()
        return {trial: min(_TRIED_DEPTH, most[trial])}, Pace.DRAFTERS

    def _decide(
        self, prices: Prices, offers: list[Offer], num_decodes: int, other_rows: int, num_rows: int
    ) -> Decision:
        if self._setting == "auto":
            return decide(prices, offers, num_decodes, other_rows, num_rows)
        return always(self._most, offers)

    def _proposals(self, replica: Replica, decodes: list[Member]) -> list[_Proposal]:
        """Returns the drafts that the drafter proposes to those that it is asked for, with their sequences."""
        found: list[_Proposal] = []
        vocab_size, model = replica.hello.model.vocab_size, replica.hello.draft_model
        may_repeat = self._asked(decodes, replica.next_plan.step_id)
        copying = {sequence for _, sequence in may_repeat} if model is not None else None
        for group, sequence in may_repeat if copying is None else decodes:
            if not isinstance(group, RequestGroup) or not _may_draft(group, sequence):
                continue
            # Of a token in flight the first guess is for that, and takes no row.
            most = min(self._most + sequence.placement.num_in_flight, group.longest - sequence.num_known - 1)
            if most < 1:
                continue
            draft = None
            if copying is None or sequence in copying:
                draft = self._drafter.propose(group, sequence, most)
                _asked_in_turn(sequence, draft)
            if model is not None and not sequence.placement.num_in_flight:
                draft = _better(draft, self._model_guesses.draft(model, sequence, most))
            if draft is not None and (sound := _cut(draft, min(most, _num_sound(draft.token_ids, vocab_size)))):
                found.append((group, sequence, sound))
        return found

    def _asked(self, decodes: list[Member], step_id: int) -> list[Member]:
        """Returns the decodes for which the drafter is asked: where it is for their price, of those that repeated
        nothing when they were asked last a few, in turn, and the less often, the more turns were in vain."""
        if self._setting != "auto":
            return decodes
        period = max(1, len(decodes) // _ASKED_IN_TURN)
        asked = [decode for decode in decodes if decode[1].placement.silence is None]
        if period > 1:
            # Whoever has nothing to repeat yet would be asked in vain, and then only in turn.
            asked = [decode for decode in asked if _has_begun(*decode)]
        # Where each has its turn in every step, nothing is gained by leaving some out.
        return asked + [
            decode
            for decode in decodes[step_id % period :: period]
            if (silence := decode[1].placement.silence) is not None and (period == 1 or silence.is_over())
        ]


def _has_begun(group: SequenceGroup, sequence: Sequence) -> bool:
    """Tells whether a sequence has generated enough to repeat a text, or has a prediction, which its first token may
    follow."""
    return sequence.num_generated >= SHORTEST_MATCH or bool(group.request.predicted_token_ids)


def _asked_in_turn(sequence: Sequence, draft: Draft | None) -> None:
    """Notes what the drafter has said of a sequence: as long as that is nothing, its turns become fewer."""
    placement = sequence.placement
    if draft is not None:
        placement.silence = None
    elif placement.silence is None:
        placement.silence = Pause(1, _MOST_TURNS)
    else:
        placement.silence.was_used()


def _may_draft(group: RequestGroup, sequence: Sequence) -> bool:
    """Tells whether a sequence's next token may come with a draft: beams and those that others follow have none."""
    return group.search is None and not sequence.is_unwanted and not group.followers(sequence)


def _better(copy: Draft | None, guess: Draft | None) -> Draft | None:
    """Returns the draft of which more is expected to come true."""
    if copy is None or guess is None:
        return copy or guess
    return max(copy, guess, key=lambda draft: sum(Offer(draft.chances).gains()))


def _first(found: Asking, sequences: list[Sequence], most: dict[Sequence, int]) -> dict[Sequence, int]:
    """Returns how deep each sequence is asked for, in the order of `sequences`."""
    places = set(found.places)
    return {each: min(found.depth, most[each]) for place, each in enumerate(sequences) if place in places}


def _num_sound(token_ids: list[int], vocab_size: int) -> int:
    """Counts the first guesses that are tokens at all: a client may predict anything."""
    if min(token_ids, default=0) >= 0 and max(token_ids, default=0) < vocab_size:
        return len(token_ids)
    return next(place for place, token_id in enumerate(token_ids) if not 0 <= token_id < vocab_size)


def _cut(draft: Draft, count: int) -> Draft | None:
    """Returns the first `count` guesses; None where that is none."""
    if count >= len(draft.token_ids):
        return draft if draft.token_ids else None
    return Draft(draft.token_ids[:count], draft.chances[:count], draft.source) if count else None


def _left(replica: Replica, decodes: list[Member], num_ready: int, room: Room) -> Room:
    """Returns the room that decodes leave, of which `num_ready` may have drafts: of blocks what neither they take, nor
    the others in the next step, which is planned before this one is answered."""
    kv = replica.kv
    soon = (len(decodes) - num_ready) * kv.blocks_for(1)
    blocks = room.blocks - kv.num_missing(sequence for _, sequence in decodes) - soon
    return Room(room.rows, max(0, blocks), grammar_time.left_by(decodes))


def _fitting(
    replica: Replica,
    chosen: list[tuple[_Proposal, int]],
    asked: dict[Sequence, int],
    left: Room,
    *,
    in_flight: bool = False,
) -> tuple[dict[Sequence, Draft], dict[Sequence, int]]:
    """Returns the drafts by sequence, the first `count` guesses of each that is `chosen`, and how many guesses are
    asked for of each behind its draft, as far as there is room for them: of those alone that wait for no answer, or of
    those that do."""
    drafts: dict[Sequence, Draft] = {}
    for (group, sequence, draft), count in chosen:
        if in_flight != (sequence.placement.num_in_flight > 0):
            continue
        count = min(count, left.rows)
        if group.grammar is not None:
            count = min(count, left.grammar_us // max(1, group.grammar.us))
        count = _num_fitting(replica, sequence, 0, count, left)
        if count and (cut := _cut(draft, count)):
            drafts[sequence] = cut
            left.rows -= count
            left.grammar_us -= count * group.grammar.us if group.grammar is not None else 0
    proposals: dict[Sequence, int] = {}
    for sequence, count in asked.items():
        if in_flight == (sequence.placement.num_in_flight > 0):
            num_drafted = len(drafts[sequence].token_ids) if sequence in drafts else 0
            if count := _num_fitting(replica, sequence, num_drafted, count, left):
                proposals[sequence] = count
    return drafts, proposals


def _num_fitting(replica: Replica, sequence: Sequence, num_drafted: int, count: int, left: Room) -> int:
    """Returns how many of `count` guesses find blocks behind the first `num_drafted`, and takes these out of what is
    left."""
    num_missing = replica.kv.num_missing
    before = num_missing((sequence,), 1 + num_drafted)
    while count and (taken := num_missing((sequence,), 1 + num_drafted + count) - before):
        if taken <= left.blocks:
            left.blocks -= taken
            break
        count -= 1
    return count
