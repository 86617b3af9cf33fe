"""Short ways to write the messages that a test sends to a worker."""

from octavo.wire.sampling import SamplingParams
from octavo.wire.steps import SequenceStart, SequenceWork, StepPlan

EPOCH = 7
INCARNATION = 100


def sampling(temperature: float = 0.0, seed: int = 0, max_tokens: int = 64) -> SamplingParams:
    return SamplingParams(
        temperature=temperature, top_k=0, top_p=1.0, seed=seed, max_tokens=max_tokens, stop_token_ids=[]
    )


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


def work(sequence_id: int, num_tokens: int, new_block_ids: list[int] | None = None) -> SequenceWork:
    return SequenceWork(sequence_id, num_tokens, new_block_ids or [])


def plan(
    step_id: int = 1,
    *,
    forget: list[int] | None = None,
    starts: list[SequenceStart] | None = None,
    work: list[SequenceWork] | None = None,
    answered: int | None = None,
    epoch: int = EPOCH,
    incarnation: int = INCARNATION,
) -> StepPlan:
    """A plan made knowing every earlier result, unless `answered` says otherwise."""
    answered = step_id - 1 if answered is None else answered
    return StepPlan(epoch, incarnation, step_id, answered, forget or [], starts or [], work or [])
