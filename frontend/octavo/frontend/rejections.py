"""What clients are told where the scheduler will not, or can no longer, run a request."""

from octavo.frontend.errors import (
    AlreadyExists,
    Broken,
    DeadlineExceeded,
    InvalidRequest,
    Overloaded,
    Reason,
    ServiceError,
    Unavailable,
)
from octavo.wire.requests import Rejected, RejectReason


def rejection(message: Rejected) -> ServiceError:
    """The error that the rejection is to its client."""
    detail = message.detail or f"the scheduler rejected the request: {message.reason.value}"
    match message.reason:
        case RejectReason.DUPLICATE_ID:
            return AlreadyExists(Reason.DUPLICATE_ID, detail)
        case RejectReason.NEVER_FITS_KV:
            return InvalidRequest(Reason.NEVER_FITS_KV, detail)
        case RejectReason.PROMPT_TOO_LONG:
            return InvalidRequest(Reason.PROMPT_TOO_LONG, detail)
        case RejectReason.BAD_TOKEN_ID | RejectReason.EMPTY_PROMPT | RejectReason.TOO_MANY_SEQUENCES:
            return InvalidRequest(Reason.BAD_PARAMETER, detail)
        case RejectReason.MODEL_MISMATCH:
            advice = "start them and this frontend with the same model directory"
            return Unavailable(Reason.MODEL_MISMATCH, f"{detail}, not this frontend's model; {advice}")
        case RejectReason.QUEUE_FULL:
            return Overloaded(Reason.QUEUE_FULL, f"{detail}, as many as the queue takes; try again later")
        case RejectReason.STEP_FAILED:
            return Broken(Reason.STEP_FAILED, detail)
        case RejectReason.NOT_FINITE:
            return Broken(Reason.LOGITS_NOT_FINITE, detail)
        case RejectReason.OUT_OF_MEMORY:
            return Overloaded(Reason.OUT_OF_MEMORY, detail)
        case RejectReason.QUARANTINED:
            return Broken(Reason.QUARANTINED, detail)
        case RejectReason.NO_TOKEN_LEFT:
            return InvalidRequest(Reason.NO_TOKEN_LEFT, detail)
        case RejectReason.BAD_GRAMMAR:
            return InvalidRequest(Reason.BAD_CONSTRAINT, detail)
        case RejectReason.QUEUE_TIMEOUT:
            return DeadlineExceeded(Reason.QUEUE_TIMEOUT, detail)
        case RejectReason.ALREADY_COMPLETE:
            return Broken(Reason.STREAM_BROKEN, detail)
