"""Defines a draft: guesses of a sequence's next tokens, as values."""

import enum
from dataclasses import dataclass


class DraftSource(enum.Enum):
    """Says where a draft was copied from: the sequence's prompt or output, the output of another sequence of its
    request, what the client expects the answer to be, or recent outputs of other requests like it; or that the worker's
    draft model made it."""

    PROMPT = "prompt"
    OUTPUT = "output"
    SIBLING = "sibling"
    PREDICTION = "prediction"
    STORE = "store"
    MODEL = "model"


@dataclass(frozen=True, slots=True)
class Draft:
    """Guesses the tokens that follow the known ones of a sequence. `chances` are as many: the probability that each is
    chosen if all before it were."""

    token_ids: list[int]
    chances: list[float]
    source: DraftSource


# Stands in the place of a draft where a step makes guesses and checks none.
NO_GUESSES = Draft([], [], DraftSource.MODEL)
