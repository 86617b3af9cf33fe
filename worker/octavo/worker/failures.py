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


def no_token_left(sequence_id: int) -> SequenceFailure:
    """It excludes all that the model holds possible."""
    return SequenceFailure(
        sequence_id,
        FailureReason.NO_TOKEN_LEFT,
        "no token is left to choose: allowed_token_ids, banned_token_ids and, before the fewest tokens asked for are"
        " generated, the stop tokens exclude all that the model holds possible; exclude fewer",
    )
