"""Admission: which requests can never run here, and why; and what keeps a request that can from running now."""

import enum
from collections.abc import Collection
from dataclasses import dataclass

from octavo.scheduler.core.replica import Replica
from octavo.scheduler.core.sequence import SequenceGroup
from octavo.scheduler.kv.memory import KVMemory
from octavo.wire.requests import RejectReason, Request
from octavo.wire.steps import ModelInfo

Refusal = tuple[RejectReason, str]


def refuse_malformed(request: Request, max_parallel: int) -> Refusal | None:
    """Returns what is wrong with a request whatever replica would serve it; None if nothing is."""
    sampling, generated = request.sampling, request.generated
    if not request.prompt_token_ids:
        return RejectReason.EMPTY_PROMPT, "the prompt has no tokens"
    if sampling.parallel > max_parallel:
        return (
            RejectReason.TOO_MANY_SEQUENCES,
            f"{sampling.parallel} sequences side by side; this scheduler runs at most {max_parallel} at once",
        )
    if generated and len(generated) != (0 if sampling.beam else sampling.num_sequences):
        # The tokens to go on with belong to another request.
        return (
            RejectReason.TOO_MANY_SEQUENCES,
            f"{len(generated)} sequences are known of the {sampling.parallel} asked for",
        )
    if generated and all(sequence.is_over(sampling.max_tokens) for sequence in generated):
        return RejectReason.ALREADY_COMPLETE, "nothing is left to generate"
    if request.pooling is not None and (generated or sampling.parallel > 1):
        return RejectReason.TOO_MANY_SEQUENCES, "a request for an output of the model has one sequence, and no tokens"
    return None


def refuse_misfit(
    request: Request, model: ModelInfo, replicas: Collection[Replica], *, was_accepted: bool
) -> Refusal | None:
    """Returns why `model` on none of `replicas` can run the request; None if it can, or there is no replica.

    A request that was accepted before waits for a replica that is large enough (`octavo.scheduler.core.placement`): the
    one it ran on may come back. One that was not gets no blocks that are owed to a pinned prefix, or that would never
    come back.
    """
    longest = request.longest
    if request.model_fingerprint != model.fingerprint:
        return RejectReason.MODEL_MISMATCH, f"the workers serve {model.name}, fingerprint {model.fingerprint[:12]}"
    asked = "generate" if request.pooling is None else request.pooling.task.value
    does = "generate" if model.pooling is None else model.pooling.task.value
    if asked != does:
        return (
            RejectReason.WRONG_TASK,
            f"the request is to {asked}, and the workers' model {model.name} can only {does}",
        )
    if longest > model.max_model_len:
        return RejectReason.PROMPT_TOO_LONG, f"{longest} tokens exceed the context of {model.max_model_len}"
    generated = (token_id for sequence in request.generated for token_id in sequence.token_ids)
    if max(max(request.prompt_token_ids), max(generated, default=0)) >= model.vocab_size:
        return RejectReason.BAD_TOKEN_ID, f"a token id is outside the vocabulary of {model.vocab_size}"
    if was_accepted or not replicas or any(_may_accept(request, replica) for replica in replicas):
        return None
    largest = max(replica.kv.capacity_tokens for replica in replicas)
    return (
        RejectReason.NEVER_FITS_KV,
        f"{request.sampling.parallel} times {longest} tokens exceed the KV cache of {largest}",
    )


def worst_case_blocks(request: Request, replica: Replica) -> int:
    """Returns how many blocks the request can grow to, nothing shared."""
    return request.sampling.parallel * replica.kv.blocks_for(request.longest)


def has_capacity(request: Request, replica: Replica) -> bool:
    """Tells whether the request fits an otherwise empty replica, whatever it grows to."""
    return worst_case_blocks(request, replica) <= replica.kv.num_usable


def _may_accept(request: Request, replica: Replica) -> bool:
    free = replica.kv.num_usable - sum(replica.prefixes.owed.values())
    return worst_case_blocks(request, replica) <= free


class ObstacleKind(enum.StrEnum):
    """Kinds of things that a group waits for."""

    TOKEN_BUDGET = "token_budget"
    SEQUENCE_SLOTS = "sequence_slots"
    KV_BLOCKS = "kv_blocks"
    SWAPPED = "swapped"
    PREEMPTION = "preemption"
    CAPACITY = "capacity"
    DELAY = "delay"
    NO_WORKER = "no_worker"
    ISOLATION = "isolation"
    DISK = "disk"
    MOVE = "move"
    PREFIX_COPY = "prefix_copy"


@dataclass(frozen=True, slots=True)
class Obstacle:
    """A reason why a group is not admitted in a step: it needs more of `kind` than is available."""

    kind: ObstacleKind
    needed: int
    available: int


def returns_before(group: SequenceGroup | None, swapped: SequenceGroup) -> bool:
    """Tells whether a waiting group comes before one that is swapped out: all groups that have lost their blocks come
    back in one order, whatever became of their KV, and before groups that never had any."""
    return group is not None and group.comes_back and group.order < swapped.order


def capacity_obstacle(request: Request, replica: Replica) -> Obstacle | None:
    """Returns the obstacle of a request that does not fit the replica, however empty that is; None if it does."""
    worst_case, usable = worst_case_blocks(request, replica), replica.kv.num_usable
    return Obstacle(ObstacleKind.CAPACITY, worst_case, usable) if worst_case > usable else None


def read_obstacle(group: SequenceGroup) -> Obstacle | None:
    """Returns the obstacle of a group for which a disk is reading what it begins with, or which another replica has and
    is copied; None if nothing is."""
    reads = group.open_reads
    if not reads:
        return None
    kind = ObstacleKind.PREFIX_COPY if any(read.source for read in reads) else ObstacleKind.DISK
    return Obstacle(kind, sum(read.num_blocks for read in reads), 0)


def start_obstacle(kv: KVMemory, group: SequenceGroup, num_kept: int = 0) -> Obstacle | None:
    """Returns what keeps a group from getting the blocks of its known tokens now, while `num_kept` free ones are
    others'; None if nothing does."""
    needed, free = kv.num_needed(group) + kv.watermark_blocks, kv.num_free - num_kept
    return Obstacle(ObstacleKind.KV_BLOCKS, needed, free) if needed > free else None
