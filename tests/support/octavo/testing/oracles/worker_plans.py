"""Short ways to write the messages that a test sends to a worker."""

from typing import Any

from octavo.wire.sampling import BeamSearch, EarlyStopping, SamplingParams
from octavo.wire.steps import (
    BlockMove,
    BlockMoves,
    Proposal,
    Remap,
    SequenceDraft,
    SequenceFork,
    SequenceStart,
    SequenceWork,
    StepPlan,
)

EPOCH = 7
INCARNATION = 100


def sampling(temperature: float = 0.0, seed: int = 0, max_tokens: int = 64, **settings: Any) -> SamplingParams:
    return SamplingParams(temperature=temperature, seed=seed, max_tokens=max_tokens, **settings)


def beam_sampling(width: int = 2, **settings: Any) -> SamplingParams:
    return sampling(beam=BeamSearch(width, 1.0, EarlyStopping.OFF), **settings)


def start(
    sequence_id: int,
    prompt: list[int],
    generated: list[int] | None = None,
    *,
    index: int = 0,
    num_computed: int = 0,
    params: SamplingParams | None = None,
) -> SequenceStart:
    return SequenceStart(sequence_id, index, prompt, generated or [], num_computed, params or sampling())


def work(
    sequence_id: int,
    num_tokens: int,
    *new_block_ids: list[int],
    input_token_id: int | None = None,
    followers: list[int] | None = None,
) -> SequenceWork:
    """Makes a sequence's work. `new_block_ids` holds one list per KV group, or none at all."""
    return SequenceWork(sequence_id, num_tokens, list(new_block_ids), input_token_id, followers or [])


def moves(
    *,
    swap_out: list[tuple[int, int]] | None = None,
    swap_in: list[tuple[int, int]] | None = None,
    copy: list[tuple[int, int]] | None = None,
) -> BlockMoves:
    """Makes block moves from pairs of source and target."""
    return BlockMoves(*([BlockMove(*pair) for pair in pairs or []] for pairs in (swap_out, swap_in, copy)))


def plan(
    step_id: int = 1,
    *,
    forget: list[int] | None = None,
    moves: BlockMoves | None = None,
    starts: list[SequenceStart] | None = None,
    forks: list[SequenceFork] | None = None,
    remaps: list[Remap] | None = None,
    work: list[SequenceWork] | None = None,
    drafts: dict[int, list[int]] | None = None,
    proposals: dict[int, int] | None = None,
    answered: int | None = None,
    epoch: int = EPOCH,
    incarnation: int = INCARNATION,
) -> StepPlan:
    """A plan made knowing every earlier result, unless `answered` says otherwise. `drafts` and `proposals` are by
    sequence."""
    return StepPlan(
        epoch,
        incarnation,
        step_id,
        step_id - 1 if answered is None else answered,
        forget or [],
        moves or BlockMoves(),
        starts or [],
        forks or [],
        remaps or [],
        work or [],
        [SequenceDraft(*pair) for pair in (drafts or {}).items()],
        [Proposal(*pair) for pair in (proposals or {}).items()],
    )
