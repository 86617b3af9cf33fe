"""Speculation: which sequences of a step get drafts, how long ones, and which wait for an answer so that they can."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from octavo.scheduler.core.config import SchedulerConfig
from octavo.scheduler.core.replica import Replica
from octavo.scheduler.core.sequence import RequestGroup, Sequence, SequenceGroup
from octavo.scheduler.core.speculation.draft import Draft
from octavo.scheduler.core.speculation.drafter import Drafter
from octavo.scheduler.core.speculation.pricing import Decision, Offer, Pace, Prices, always, decide
from octavo.scheduler.core.step import grammar_time
from octavo.wire.steps import MAX_DRAFT_TOKENS

# Workers of older schemas know no drafts, nor what becomes of their blocks.
_FIRST_SCHEMA = 9
# Sequences for which a step asks though they repeat nothing: to ask for all of a batch would take a millisecond.
_ASKED_IN_TURN = 4

Decode = tuple[SequenceGroup, Sequence]
_Proposal = tuple[RequestGroup, Sequence, Draft]


@dataclass(frozen=True, slots=True)
class Spending:
    """The `decodes` of a step that are planned now, and the `drafts` of some of them; the others are `waiting` for the
    answer to an earlier one. `is_awaited`: the next plan waits for the step's answer; with `stands` false this one
    waits for those that are outstanding."""

    decodes: list[Decode]
    waiting: list[Sequence] = field(default_factory=list)
    drafts: dict[Sequence, Draft] = field(default_factory=dict)
    is_awaited: bool = False
    stands: bool = True


@dataclass(slots=True)
class Room:
    """What others leave to drafts of a step: `rows` of it, free `blocks`, and microseconds of grammars."""

    rows: int
    blocks: int
    grammar_us: int = grammar_time.STEP_US


class Speculation:
    """Asks a drafter for guesses, and decides by their price which are checked."""

    def __init__(self, config: SchedulerConfig, drafter: Drafter) -> None:
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

    def reset_cache(self, salt: str | None, groups: Iterable[RequestGroup]) -> None:
        """Lets no later group be given drafts of what is known now behind `salt`, None for all, nor of what those of
        `groups` make of it, which are all that there are."""
        if self._setting != "off":
            self._drafter.reset(salt, groups)

    def spend(self, replica: Replica, decodes: list[Decode], other_rows: int, room: Room) -> Spending:
        """Returns which of a step's decodes are planned now beside `other_rows` of prompts, and drafts for them as far
        as there is `room`."""
        prices, is_priced = replica.prices, self._setting == "auto"
        if is_priced and not prices.may_pay(len(decodes), other_rows):
            return Spending(decodes)
        self._drafter.begin_step(prices.worth(len(decodes), other_rows) if is_priced else 0.0)
        proposals = self._proposals(replica, decodes)
        if not proposals:
            return Spending(decodes)
        offers = [Offer(draft.chances, sequence.placement.num_in_flight > 0) for _, sequence, draft in proposals]
        decision = self._decide(prices, offers, len(decodes), other_rows, room.rows)
        if decision.pace is Pace.ALL and replica.outstanding:
            return Spending(decodes, stands=False)
        chosen = [(proposal, count) for proposal, count in zip(proposals, decision.counts, strict=True) if count]
        waiting = [sequence for (_, sequence, _), _ in chosen if sequence.placement.num_in_flight]
        held = set(waiting)
        going = [decode for decode in decodes if decode[1] not in held] if waiting else decodes
        ready = [(proposal, count) for proposal, count in chosen if not proposal[1].placement.num_in_flight]
        drafts = _fitting(replica, ready, _left(replica, decodes, len(ready), room))
        return Spending(going, waiting, drafts, is_awaited=decision.pace is Pace.ALL)

    def _decide(
        self, prices: Prices, offers: list[Offer], num_decodes: int, other_rows: int, num_rows: int
    ) -> Decision:
        if self._setting == "auto":
            return decide(prices, offers, num_decodes, other_rows, num_rows)
        return always(self._most, offers)

    def _proposals(self, replica: Replica, decodes: list[Decode]) -> list[_Proposal]:
        """Returns the drafts that the drafter proposes to those that it is asked for, with their sequences."""
        found: list[_Proposal] = []
        vocab_size = replica.hello.model.vocab_size
        for group, sequence in self._asked(decodes, replica.next_plan.step_id):
            if not isinstance(group, RequestGroup) or not _may_draft(group, sequence):
                continue
            # Of a token in flight the first guess is for that, and takes no row.
            most = min(self._most + sequence.placement.num_in_flight, group.longest - sequence.num_known - 1)
            if most < 1:
                continue
            draft = self._drafter.propose(group, sequence, most)
            sequence.placement.may_repeat = draft is not None
            if draft is not None and (sound := _cut(draft, min(most, _num_sound(draft.token_ids, vocab_size)))):
                found.append((group, sequence, sound))
        return found

    def _asked(self, decodes: list[Decode], step_id: int) -> list[Decode]:
        """Returns the decodes for which the drafter is asked: where it is for their price, of those that repeated
        nothing when they were asked last a few, in turn."""
        if self._setting != "auto":
            return decodes
        period = max(1, len(decodes) // _ASKED_IN_TURN)
        asked = [decode for decode in decodes if decode[1].placement.may_repeat]
        return asked + [decode for decode in decodes[step_id % period :: period] if not decode[1].placement.may_repeat]


def _may_draft(group: RequestGroup, sequence: Sequence) -> bool:
    """Tells whether a sequence's next token may come with a draft: beams and those that others follow have none."""
    return group.search is None and not sequence.is_unwanted and not group.followers(sequence)


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


def _left(replica: Replica, decodes: list[Decode], num_ready: int, room: Room) -> Room:
    """Returns the room that decodes leave, of which `num_ready` may have drafts: of blocks what neither they take, nor
    the others in the next step, which is planned before this one is answered."""
    kv = replica.kv
    soon = (len(decodes) - num_ready) * kv.blocks_for(1)
    blocks = room.blocks - kv.num_missing(sequence for _, sequence in decodes) - soon
    return Room(room.rows, max(0, blocks), grammar_time.left_by(decodes))


def _fitting(replica: Replica, ready: list[tuple[_Proposal, int]], left: Room) -> dict[Sequence, Draft]:
    """Returns the drafts by sequence, the first `count` guesses of each, as far as there is room for them."""
    drafts: dict[Sequence, Draft] = {}
    for (group, sequence, draft), count in ready:
        count = min(count, left.rows)
        if group.grammar is not None:
            count = min(count, left.grammar_us // max(1, group.grammar.us))
        while count and _num_more(replica, sequence, count) > left.blocks:
            count -= 1
        if count and (cut := _cut(draft, count)):
            drafts[sequence] = cut
            left.rows -= count
            left.blocks -= _num_more(replica, sequence, count)
            left.grammar_us -= count * group.grammar.us if group.grammar is not None else 0
    return drafts


def _num_more(replica: Replica, sequence: Sequence, num_guesses: int) -> int:
    """Counts the blocks that guesses take beside those of the token before them."""
    kv = replica.kv
    return kv.num_missing((sequence,), 1 + num_guesses) - kv.num_missing((sequence,))
