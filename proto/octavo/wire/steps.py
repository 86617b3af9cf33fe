"""Defines the messages between scheduler and worker: registration, plans, results, heartbeats.

A worker says hello with what it is and holds, and is welcomed into an epoch or refused. The scheduler then sends
`StepPlan`s, up to `MAX_STEPS_IN_FLIGHT` ahead of the results; the worker runs them in order and answers each with one
`StepResult`. Whatever carries another epoch or incarnation than the current ones is dropped.
"""

import enum
from typing import Annotated

from msgspec import Meta, field

from octavo.wire.base import (
    MAX_BLOCKS_PER_SEQUENCE,
    MAX_SEQUENCES,
    MAX_TOKENS,
    BlockId,
    Count,
    Fenced,
    FencedWork,
    Identity,
    Message,
    Name,
    Text,
    TokenId,
    TokenIds,
    TraceParent,
    Value,
    since,
)
from octavo.wire.costs import Seconds, StepCosts
from octavo.wire.pooling import PooledOutput, PoolingModel, PoolingParams
from octavo.wire.sampling import MAX_PARALLEL, MAX_STOP_TOKEN_IDS, Logprobs, SamplingParams

MAX_STEPS_IN_FLIGHT = 2
HEARTBEAT_INTERVAL_S = 0.25
MAX_BLOCK_SIZE = 256
MAX_KV_GROUPS = 256
# Guesses of one sequence's next tokens that a step can check.
MAX_DRAFT_TOKENS = 32
# The most tokens a beam search can want of one beam (`octavo.scheduler.core.step.beam_search`).
MAX_CANDIDATES = (1 + MAX_STOP_TOKEN_IDS) * MAX_PARALLEL
# Blocks that one step reads from a worker's disk.
MAX_FETCHED_BLOCKS = 1 << 14


class ModelInfo(Value, frozen=True):
    """Identifies a model: it must be equal on every replica, and a frontend checks requests by it.

    `fingerprint` identifies the model directory (`octavo.runtime.models.directory`); `dtype` is that of the
    computation; `quantization` the format into which weights were quantised as they were loaded, or `none`; `pooling`
    what it gives in place of tokens, None for a model that generates.
    """

    name: Name
    fingerprint: Name
    dtype: Name
    vocab_size: Annotated[int, Meta(ge=1, le=2**31 - 1)]
    max_model_len: Annotated[int, Meta(ge=1, le=MAX_TOKENS)]
    quantization: Annotated[Name, since(9)] = "none"
    pooling: Annotated[PoolingModel | None, since(9)] = None


class KVGroup(Value, frozen=True):
    """Names layers that share one block table per sequence. With a `window` (0: none) they attend to that many tokens,
    the querying one included. Once a step is computed, its sequences' blocks that no later token can see are given
    back: both sides put `NULL_BLOCK` in their place, without a message."""

    window: Annotated[int, Meta(ge=0, le=MAX_TOKENS)]


class Ending(enum.StrEnum):
    """Says how a process came to its end: by its own doing, whatever made it; from outside; or nobody knows."""

    CRASHED = "crashed"
    KILLED = "killed"
    UNKNOWN = "unknown"


class Predecessor(Value, frozen=True):
    """Names the last process that served in a worker's place, by the name in its hello, and says how that process
    ended."""

    process: Identity
    ending: Ending
    detail: Text


class KVDisk(Value, frozen=True):
    """Describes the disk on which a worker keeps blocks by their content, beyond its life, and where other workers of
    its machine may find them: the seconds in which it reads a block, 0 if that was not measured. With a `mirror`, the
    blocks that running sequences fill are to be kept there too, as soon as they are full. Workers that name the same
    `place`, a directory of a host, share what is there."""

    block_read_s: Seconds = 0.0
    mirror: bool = False
    place: Text = ""


class DiskUse(Value, frozen=True):
    """Counts the blocks on a worker's disk that this worker can use, those for which it has room, and those that have
    made way there at this worker's doing."""

    num_blocks: Count
    capacity: Count
    num_evicted: Count


class WorkerRole(enum.StrEnum):
    """Says what a worker is for: whole requests; their prompts, after which they go on elsewhere where they can; or
    what follows their prompts, and whole requests only where no other worker takes those."""

    BOTH = "both"
    PREFILL = "prefill"
    DECODE = "decode"


class BlockServer(Value, frozen=True):
    """Names where other workers read this one's blocks, and by its `identity` whom they are of use to: those that name
    the same. Of a worker whose device is not its own memory only CPU blocks are read (`has_device`)."""

    endpoint: Name
    identity: Name
    has_device: bool = True


class WorkerHello(Message, frozen=True):
    """Registers a worker with the scheduler.

    `worker_id` names the process's place and outlives it; `incarnation` is drawn anew for every registration and stands
    for one life of its (empty) block pools; that of its first registration names the `process`, so that it is known
    whether one that was lost has died. `num_blocks` are on the device, which any of the `kv_groups` may use, and
    `num_cpu_blocks` to swap to. `kv_bytes_per_token` is that of all groups together; `costs` is None if the worker did
    not measure. Of the `world_size` ranks that share a replica's model the first
    registers, for all. `predecessor` is None if there was none that served, or one that left in order. `draft_model`
    names the smaller model that makes proposals here, if there is one; of it, each block holds keys and values too.
    `kv_disk` is None if there is none, and `block_server` if nobody can read blocks here. A model that keeps nothing
    between steps, an encoder, has neither `kv_groups` nor blocks: each of its texts is computed whole, in one step.
    """

    schema_version: Count
    worker_id: Name
    incarnation: Identity
    process: Identity
    model: ModelInfo
    device: Name
    world_size: Annotated[int, Meta(ge=1, le=1024)]
    num_blocks: Annotated[int, Meta(ge=0, le=2**31 - 1)]
    num_cpu_blocks: Annotated[int, Meta(ge=0, le=2**31 - 1)]
    block_size: Annotated[int, Meta(ge=1, le=MAX_BLOCK_SIZE)]
    kv_bytes_per_token: Count
    kv_groups: Annotated[list[KVGroup], Meta(max_length=MAX_KV_GROUPS)]
    costs: StepCosts | None = None
    predecessor: Annotated[Predecessor | None, since(9)] = None
    draft_model: Annotated[Name | None, since(9)] = None
    kv_disk: Annotated[KVDisk | None, since(9)] = None
    block_server: Annotated[BlockServer | None, since(9)] = None
    role: Annotated[WorkerRole, since(9)] = WorkerRole.BOTH

    @property
    def gathers(self) -> bool:
        """Tells whether the worker must compute each text from its first token on, without a stop elsewhere."""
        return self.model.pooling is not None and self.model.pooling.gathers


class WorkerWelcome(Fenced, frozen=True):
    """The worker's replica will get plans of this epoch."""


class WorkerRefused(Message, frozen=True):
    """The worker does not fit here (another model, another schema version, results that are none); it must exit with
    `detail`."""

    detail: Text


class WorkerDismissed(Fenced, frozen=True):
    """Nothing is left to do for a worker that is drained: it may end."""


class WorkerUnregistered(Fenced, frozen=True):
    """The scheduler does not hold this incarnation: forget every block and say hello with a new one."""


class Heartbeat(FencedWork, frozen=True):
    """Says that the worker's main loop turns, and is never sent by a thread beside it; it also comes while the loop
    waits for a step. A worker that is `draining` wants to end: it gets nothing new, and is dismissed once nothing is
    left. `disk` is None where there is none."""

    last_step_id: Count
    draining: bool = False
    disk: Annotated[DiskUse | None, since(9)] = None


class WorkerGoodbye(FencedWork, frozen=True):
    """The worker is leaving; its sequences are to be recomputed elsewhere."""


class BlockMove(Value, frozen=True):
    """Copies the whole content of one block, in all layers, to another."""

    source: BlockId
    target: BlockId


class BlockMoves(Value, frozen=True):
    """Lists what a step moves before it computes, in this order: device to CPU, CPU to device, then copies on the
    device. A target may be a block that an earlier move of the plan has left; but no swap-in reads what a swap-out of
    the plan has filled."""

    swap_out: Annotated[list[BlockMove], Meta(max_length=MAX_BLOCKS_PER_SEQUENCE)] = field(default_factory=list)
    swap_in: Annotated[list[BlockMove], Meta(max_length=MAX_BLOCKS_PER_SEQUENCE)] = field(default_factory=list)
    copy: Annotated[list[BlockMove], Meta(max_length=MAX_BLOCKS_PER_SEQUENCE)] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.swap_out or self.swap_in or self.copy)


class BlockContent(Value, frozen=True):
    """Pairs a block with the content that it holds or is to hold: the chained hash of its tokens and all before them,
    with adapter and salt, and the KV group whose keys and values these are."""

    value: Annotated[bytes, Meta(min_length=32, max_length=32)]
    kv_group: Annotated[int, Meta(ge=0, lt=MAX_KV_GROUPS)]
    block_id: Annotated[int, Meta(ge=0, le=2**31 - 1)]


class DiskMoves(Value, frozen=True):
    """Lists what a step has a worker's disk do. Nothing here makes the step wait.

    First, if `clear`, all that the disk keeps for this model is forgotten. Then the device blocks in `store`, which the
    steps before have computed, are copied, before this plan moves or computes anything, to be written sometime; a disk
    that does not keep up drops some. Once the step is done, the blocks in `fetch` are read into CPU blocks, which
    belong to the disk until `BlocksFetched` answers; where the step is not `DONE`, none is read, and nothing answers.
    """

    clear: bool = False
    store: Annotated[list[BlockContent], Meta(max_length=MAX_BLOCKS_PER_SEQUENCE)] = field(default_factory=list)
    fetch: Annotated[list[BlockContent], Meta(max_length=MAX_FETCHED_BLOCKS)] = field(default_factory=list)


class PullBlocks(FencedWork, frozen=True):
    """Has a worker copy blocks of another one into its own CPU blocks, beside its steps; `BlocksPulled` answers once.

    Each of the `moves` names a block of the worker that serves at `endpoint` as `source`, its incarnation: a CPU block
    if `from_cpu`, else one of its device; and a CPU block here, which is the pull's until it is answered. Nothing is
    written there before step `after_step_id` is done.
    """

    pull_id: Identity
    after_step_id: Count
    endpoint: Name
    source: Identity
    from_cpu: bool
    moves: Annotated[list[BlockMove], Meta(min_length=1, max_length=MAX_BLOCKS_PER_SEQUENCE)]


class SequenceStart(Value, frozen=True):
    """Starts a sequence that the worker has not seen, or was asked to forget, with its tokens and how to sample, once.

    The KV of its first `num_computed` tokens is in the first of the blocks that its first work item brings; never of
    all, so there is something to compute. `sequence_index` is its place in its request (for the sampling key); the
    position of a sampled token in the sequence of generated ones is part of that key too, which is why prompt and
    generated ids stay apart.
    """

    sequence_id: Identity
    sequence_index: Annotated[int, Meta(ge=0, le=MAX_SEQUENCES)]
    prompt_token_ids: TokenIds
    generated_token_ids: TokenIds
    num_computed: Annotated[int, Meta(ge=0, le=MAX_TOKENS)]
    sampling: SamplingParams
    traceparent: TraceParent = ""
    pooling: Annotated[PoolingParams | None, since(9)] = None


class SequenceFork(Value, frozen=True):
    """Starts a new sequence as the copy of a known one, as that stands before this plan's work: tokens, block tables
    and all, but for its `sequence_index`."""

    parent_id: Identity
    sequence_id: Identity
    sequence_index: Annotated[int, Meta(ge=0, le=MAX_SEQUENCES)]


class Remap(Value, frozen=True):
    """Replaces an entry of a sequence's block table by another block from now on: the target of a copy-on-write, or a
    block that was found to hold the same. An entry that has become null stays so."""

    sequence_id: Identity
    kv_group: Annotated[int, Meta(ge=0, lt=MAX_KV_GROUPS)]
    logical_index: Annotated[int, Meta(ge=0, le=MAX_BLOCKS_PER_SEQUENCE)]
    block_id: BlockId


class SequenceWork(Value, frozen=True):
    """Computes the next `num_tokens` tokens of one known sequence: its share of a step.

    First its block tables grow by `new_block_ids`, one list per KV group (none at all where none grows), and its tokens
    by `input_token_id`, if the scheduler chooses them. A work item that reaches the last known token brings the next
    one: sampled, and appended by the worker itself, so that the scheduler need not know it to plan the step after; or,
    with beams, candidates to choose from.

    `follower_ids` have the same tokens and tables, which grow with this item's: they count as computed with it and
    choose from its last row, each by its own key.
    """

    sequence_id: Identity
    num_tokens: Annotated[int, Meta(ge=1, le=MAX_TOKENS)]
    new_block_ids: Annotated[
        list[Annotated[list[BlockId], Meta(max_length=MAX_BLOCKS_PER_SEQUENCE)]], Meta(max_length=MAX_KV_GROUPS)
    ] = field(default_factory=list)
    input_token_id: TokenId | None = None
    follower_ids: Annotated[list[Identity], Meta(max_length=MAX_PARALLEL)] = field(default_factory=list)


class SequenceDraft(Value, frozen=True):
    """Guesses what follows the last known token of a sequence. In a plan, its work item reaches that token, and the
    guesses are further rows of the item, at the next positions, which its `num_tokens` does not count but its blocks
    have room for.

    Each row chooses as if the guesses before it had been chosen, and counts if they were. Then both sides drop the
    blocks behind the last computed token that counts. A sequence with a draft has no followers, and is no beam.
    """

    sequence_id: Identity
    token_ids: Annotated[list[TokenId], Meta(min_length=1, max_length=MAX_DRAFT_TOKENS)]


class Proposal(Value, frozen=True):
    """Asks the worker's draft model for guesses: of up to `num_tokens` tokens that follow those which the step brings
    to a sequence. Its blocks have room for these behind its draft; both sides drop what the step's tokens do not reach.
    A sequence with a proposal reaches its last known token, has no followers, and is no beam."""

    sequence_id: Identity
    num_tokens: Annotated[int, Meta(ge=1, le=MAX_DRAFT_TOKENS)]


class StepPlan(FencedWork, frozen=True):
    """Plans one forward pass: first forget, move blocks, start, fork and remap, then compute all work as one batch,
    with the `drafts` of some of its sequences; then have the draft model make the `proposals`; both in the order of the
    work.

    `answered_step_id` is the last step whose result the scheduler had when it made this plan (0: none). After a failed
    step the worker skips every plan made without knowing of the failure.
    """

    step_id: Annotated[int, Meta(ge=1, le=2**53)]
    answered_step_id: Count
    forget: Annotated[list[Identity], Meta(max_length=MAX_SEQUENCES)]
    moves: BlockMoves
    starts: Annotated[list[SequenceStart], Meta(max_length=MAX_SEQUENCES)]
    forks: Annotated[list[SequenceFork], Meta(max_length=MAX_SEQUENCES)]
    remaps: Annotated[list[Remap], Meta(max_length=MAX_SEQUENCES)]
    work: Annotated[list[SequenceWork], Meta(max_length=MAX_SEQUENCES)]
    drafts: Annotated[list[SequenceDraft], Meta(max_length=MAX_SEQUENCES, extra={"since": 9})] = field(
        default_factory=list
    )
    proposals: Annotated[list[Proposal], Meta(max_length=MAX_SEQUENCES, extra={"since": 9})] = field(
        default_factory=list
    )
    disk: Annotated[DiskMoves | None, since(9)] = None


class StepOutcome(enum.StrEnum):
    """Says how a plan ended: computed; raised in the worker, for want of memory or otherwise; or not tried, because one
    before it had failed."""

    DONE = "done"
    FAILED = "failed"
    OUT_OF_MEMORY = "out_of_memory"
    SKIPPED = "skipped"


class SampledToken(Value, frozen=True):
    """Reports the token that a sequence sampled in a step, with its logprobs if they are wanted."""

    sequence_id: Identity
    token_id: TokenId
    logprobs: Logprobs | None = None


class FurtherTokens(Value, frozen=True):
    """Reports the tokens that a sequence sampled after the first of a step: one for each token of its draft that was
    chosen, so that all but the last of first and further ones are the draft's. `logprobs` are as many, if wanted."""

    sequence_id: Identity
    token_ids: Annotated[list[TokenId], Meta(min_length=1, max_length=MAX_DRAFT_TOKENS)]
    logprobs: Annotated[list[Logprobs], Meta(max_length=MAX_DRAFT_TOKENS)] = field(default_factory=list)


class Candidates(Value, frozen=True):
    """Holds the most probable next tokens of a beam, in falling order of their logprobs."""

    sequence_id: Identity
    token_ids: Annotated[list[TokenId], Meta(max_length=MAX_CANDIDATES)]
    logprobs: Annotated[list[float], Meta(max_length=MAX_CANDIDATES)]


class PromptLogprobs(Value, frozen=True):
    """Holds the logprobs of consecutive prompt tokens from position `start` on, each given the tokens before it; the
    first token of a prompt has none."""

    sequence_id: Identity
    start: Annotated[int, Meta(ge=1, le=MAX_TOKENS)]
    logprobs: Annotated[list[Logprobs], Meta(max_length=MAX_TOKENS)]


class FailureReason(enum.StrEnum):
    """Says why a sequence cannot go on: the model gave it numbers that are not finite; its own exclusions left no token
    to choose; or its grammar cannot be followed."""

    NOT_FINITE = "not_finite"
    NO_TOKEN_LEFT = "no_token_left"
    BAD_GRAMMAR = "bad_grammar"


class SequenceFailure(Value, frozen=True):
    """Reports a sequence that cannot go on, while all others of its step do."""

    sequence_id: Identity
    reason: FailureReason
    detail: Text


class GrammarTime(Value, frozen=True):
    """Gives the microseconds by which a step was longer for the grammar of one sequence that chose in it: for each of
    its rows that the grammar was asked about, on average."""

    sequence_id: Identity
    microseconds: Count


class StepTimes(Value, frozen=True):
    """Says where a step's time went in the worker, in microseconds: batch building, model, sampling; and how much of
    the last is due to each sequence's `grammars`, where it has one. `propose_us` come on top, for a draft model that
    follows the step and makes its proposals."""

    prepare_us: Count
    model_us: Count
    sample_us: Count
    grammars: Annotated[list[GrammarTime], Meta(max_length=MAX_SEQUENCES, extra={"since": 9})] = field(
        default_factory=list
    )
    propose_us: Annotated[Count, since(9)] = 0


class StepResult(FencedWork, frozen=True):
    """Answers one plan, in the order of its work, a sequence before its followers.

    It holds what was `sampled`, the `candidates` of sequences that are beams, `prompt_logprobs` of those that want them
    and got some computed, and what `failed`. `detail` says why a whole step did. `further` tokens are those of
    sequences in `sampled` whose drafts began right. `proposed` are guesses of what follows all of these, for sequences
    in `sampled` that a proposal was asked for: as many, or fewer. `pooled` are the outputs of sequences that ask for
    one.

    Each sequence that chooses in the step is in exactly one of `sampled`, `candidates`, `pooled` and `failed`; one that
    does not choose may have failed too. A sequence that has failed is dead: until it is forgotten, every plan with work
    for it computes nothing of it and answers its failure again, and a fork of it has failed as well. So the scheduler,
    which may have planned one step with it already, need not know of the failure when it plans. What a sequence that is
    `NOT_FINITE` has written to its blocks is not to be relied on.
    """

    step_id: Count
    outcome: StepOutcome
    sampled: Annotated[list[SampledToken], Meta(max_length=MAX_SEQUENCES)]
    candidates: Annotated[list[Candidates], Meta(max_length=MAX_SEQUENCES)]
    prompt_logprobs: Annotated[list[PromptLogprobs], Meta(max_length=MAX_SEQUENCES)]
    failed: Annotated[list[SequenceFailure], Meta(max_length=MAX_SEQUENCES)]
    times: StepTimes
    detail: Text
    further: Annotated[list[FurtherTokens], Meta(max_length=MAX_SEQUENCES, extra={"since": 9})] = field(
        default_factory=list
    )
    proposed: Annotated[list[SequenceDraft], Meta(max_length=MAX_SEQUENCES, extra={"since": 9})] = field(
        default_factory=list
    )
    pooled: Annotated[list[PooledOutput], Meta(max_length=MAX_SEQUENCES, extra={"since": 9})] = field(
        default_factory=list
    )


class BlocksFetched(FencedWork, frozen=True):
    """Ends what a step had a disk fetch, in the plan's order: whether each CPU block now holds its content. It comes
    once, after the result of that step, for a step that is done and fetched anything."""

    step_id: Count
    found: Annotated[list[bool], Meta(max_length=MAX_FETCHED_BLOCKS)]


class BlocksPulled(FencedWork, frozen=True):
    """Ends a pull: whether all CPU blocks that it named now hold what it was to bring. If not, any of them may hold
    anything."""

    pull_id: Identity
    is_complete: bool


FromWorker = WorkerHello | StepResult | BlocksFetched | BlocksPulled | Heartbeat | WorkerGoodbye
ToWorker = WorkerWelcome | WorkerRefused | WorkerUnregistered | WorkerDismissed | StepPlan | PullBlocks
