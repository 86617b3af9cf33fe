"""What a sequence is told that cannot go on while its neighbours do."""

from octavo.wire.steps import FailureReason, SequenceFailure


def not_finite(sequence_id: int) -> SequenceFailure:
    """The model gave it a NaN, a positive infinity, or nothing finite."""
    return SequenceFailure(
        sequence_id,
        FailureReason.NOT_FINITE,
        "the model's output for this request is not finite (NaN or infinity): its weights are broken, or these tokens"
        " make it overflow in the worker's dtype; check the checkpoint, or start the workers with --dtype float32",
    )


def no_token_left(sequence_id: int, *, constrained: bool = False) -> SequenceFailure:
    """It excludes all that the model holds possible, where it is `constrained` together with its grammar."""
    grammar = "of those that its grammar lets come next, " if constrained else ""
    return SequenceFailure(
        sequence_id,
        FailureReason.NO_TOKEN_LEFT,
        f"no token is left to choose: {grammar}allowed_token_ids, banned_token_ids and, before the fewest tokens asked"
        " for are generated, the stop tokens exclude all that the model holds possible; exclude fewer",
    )


def bad_grammar(sequence_id: int, reason: str) -> SequenceFailure:
    """Its grammar cannot be compiled, or not be followed any further."""
    return SequenceFailure(
        sequence_id,
        FailureReason.BAD_GRAMMAR,
        f"the grammar of this request cannot be followed: {reason}; ask without a constraint, or for a simpler one",
    )
