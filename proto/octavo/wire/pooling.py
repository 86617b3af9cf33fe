"""Defines what pooling models give in place of tokens: vectors of texts, or scores of classes."""

import enum
from typing import Annotated

from msgspec import Meta

from octavo.wire.base import MAX_TOKENS, Identity, Value

# Numbers in one output: dimensions of a vector, or classes.
MAX_OUTPUTS = 1 << 14


class PoolingTask(enum.StrEnum):
    """Says what a pooling model gives of a text: a vector that stands for it, or a score for each class."""

    EMBED = "embed"
    CLASSIFY = "classify"


class PoolingModel(Value, frozen=True):
    """Describes a model that generates no tokens: what it gives, and how many numbers that is. A score is of any size:
    what makes a probability of it is the frontend's.

    One that `gathers` makes an output of what the computation of each token gives, which a worker keeps while it
    computes a text in steps. So keys and values that were computed before, or elsewhere, are of no use to it.
    """

    task: PoolingTask
    num_outputs: Annotated[int, Meta(ge=1, le=MAX_OUTPUTS)]
    gathers: bool = False


class PoolingParams(Value, frozen=True):
    """Asks for a model's output of all tokens of a prompt, in place of further tokens. With a `pair_start` (0: none)
    the prompt is a pair of texts, of which the second begins there, for models that tell them apart."""

    task: PoolingTask
    pair_start: Annotated[int, Meta(ge=0, le=MAX_TOKENS)] = 0


# An output: its numbers as little-endian fp32, side by side; empty where there is none.
OutputBytes = Annotated[bytes, Meta(max_length=4 * MAX_OUTPUTS)]


class PooledOutput(Value, frozen=True):
    """Reports the model's output of a sequence that asks for one, once all its tokens are computed."""

    sequence_id: Identity
    values: OutputBytes
