"""The failures of sequences that cannot go on while their neighbours do, and steps that ran out of memory."""

import re
import sys
import traceback
from typing import Any

from octavo.wire.steps import FailureReason, SequenceFailure

# The words of torch and of the libraries under it, on CPUs and on GPUs.
_OUT_OF_MEMORY = re.compile(r"out of memory|not enough memory|can't allocate memory|bad_alloc|ALLOC_FAILED")


def not_finite(sequence_id: int) -> SequenceFailure:
    """Returns the failure of a sequence whose logits have a NaN, a positive infinity, or nothing finite."""
    return SequenceFailure(
        sequence_id,
        FailureReason.NOT_FINITE,
        "the model's output for this request is not finite (NaN or infinity): its weights are broken, or these tokens"
        " make it overflow in the worker's dtype; check the checkpoint, or start the workers with --dtype float32",
    )


def no_token_left(sequence_id: int, *, constrained: bool = False) -> SequenceFailure:
    """Returns the failure of a sequence whose parameters exclude every possible token, or with its grammar if
    `constrained`."""
    grammar = "of those that its grammar lets come next, " if constrained else ""
    return SequenceFailure(
        sequence_id,
        FailureReason.NO_TOKEN_LEFT,
        f"no token is left to choose: {grammar}allowed_token_ids, banned_token_ids and, before the fewest tokens asked"
        " for are generated, the stop tokens exclude all that the model holds possible; exclude fewer",
    )


def bad_grammar(sequence_id: int, reason: str) -> SequenceFailure:
    """Returns the failure of a sequence whose grammar cannot be compiled, or not be followed any further."""
    return SequenceFailure(
        sequence_id,
        FailureReason.BAD_GRAMMAR,
        f"the grammar of this request cannot be followed: {reason}; ask without a constraint, or for a simpler one",
    )


def is_out_of_memory(error: Exception) -> bool:
    """Tells whether a step ended for want of memory: a smaller step may pass."""
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and _OUT_OF_MEMORY.search(str(error)) is not None
    )


def release_memory(error: Exception) -> None:
    """Lets go of the tensors of the step that raised `error`, and of the memory that the GPU's allocator keeps
    unused."""
    traceback.clear_frames(error.__traceback__)
    # A worker that computes without torch must not load it here.
    torch: Any = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.empty_cache()
