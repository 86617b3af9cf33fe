"""Declares requests for a model's output of a text, in place of tokens, as every interface hands them on."""

import math
import operator
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Final

from msgspec import Meta

from octavo.frontend.errors import bad_parameter
from octavo.frontend.request.chat import check_label
from octavo.frontend.request.fields import range_of
from octavo.frontend.request.request import MAX_LABEL_LENGTH, MAX_WAIT_S
from octavo.wire.pooling import PoolingTask
from octavo.wire.requests import Priority

# Texts, or documents, of one call: as many as OpenAI takes.
MAX_INPUTS: Final = 2048
_WAIT: Final = range_of(
    Annotated[float, Meta(ge=0.001, le=MAX_WAIT_S, description=f"between 0.001 and {MAX_WAIT_S:g} seconds")]
)
_PRIORITY: Final = range_of(Priority)


@dataclass(frozen=True)
class PoolingRequest:
    """Holds a client's request for an output of the model: a vector of a text, or scores of classes.

    `prompt` is a text or token ids; with a `pair` the model reads two texts, the second of which that is. A text of
    more tokens than `truncate_to` is cut to as many; None: refused if it is too long for the model. The other fields
    are as in `GenerationRequest`.
    """

    prompt: str | Sequence[int]
    task: PoolingTask
    pair: str | None = None
    truncate_to: int | None = None
    add_special_tokens: bool = True
    request_id: str = ""
    model: str = ""
    tenant: str = ""
    priority: int = 0
    salt: str = ""
    max_queue_s: float | None = None
    traceparent: str = ""

    @property
    def detach_grace_s(self) -> float:
        """Returns 0: nobody comes back to such a request."""
        return 0.0

    @property
    def texts(self) -> list[str]:
        """Returns what is to be tokenized."""
        return [each for each in (self.prompt, self.pair) if isinstance(each, str)]


def check_pooling_form(request: PoolingRequest) -> None:
    """Raises `InvalidRequest` for values that no model takes."""
    for field, most in (("request_id", 128), ("tenant", MAX_LABEL_LENGTH), ("salt", MAX_LABEL_LENGTH)):
        check_label(field, getattr(request, field), most)
    if not _PRIORITY.holds(request.priority):
        raise bad_parameter("priority", request.priority, f"it must be {_PRIORITY.rule}")
    if request.max_queue_s is not None and not _WAIT.holds(request.max_queue_s):
        raise bad_parameter("max_queue_time", request.max_queue_s, f"it must be {_WAIT.rule}")
    if not request.prompt:
        raise bad_parameter("input", "empty", "there must be at least one token in each text")
    if request.truncate_to is not None and request.truncate_to < 1:
        rule = "it must be at least 1, or -1 for as many tokens as the model takes"
        raise bad_parameter("truncate_prompt_tokens", request.truncate_to, rule)


def check_inputs(field: str, count: int) -> None:
    """Raises `InvalidRequest` for no text in a call, or for too many."""
    if not 1 <= count <= MAX_INPUTS:
        rule = f"a call takes 1 to {MAX_INPUTS}; send more in several calls"
        raise bad_parameter(field, f"a list of {count}", rule)


def check_dimensions(dimensions: int, most: int | None) -> None:
    """Raises `InvalidRequest` for vectors of more numbers than the model has, `most`, or of none."""
    if dimensions < 1 or (most is not None and dimensions > most):
        rule = f"the model's vectors have {most or 'more'}, and may be cut to 1 or more"
        raise bad_parameter("dimensions", dimensions, rule)


# -- numbers ------------------------------------------------------------------------------------------------------


def numbers_of(values: bytes) -> "array[float]":
    """Returns the numbers of an output."""
    numbers = array("f")
    numbers.frombytes(values)
    return numbers


def shortened(vector: "array[float]", dimensions: int) -> "array[float]":
    """Returns the first numbers of a vector, divided by their length (Kusupati et al., "Matryoshka Representation
    Learning", 2022)."""
    return normalised(vector[:dimensions])


def normalised(vector: "array[float]") -> "array[float]":
    """Returns the vector divided by its length; zeros stay zeros."""
    length = math.sqrt(sum(map(operator.mul, vector, vector)))
    return array("f", [number / length for number in vector]) if length else vector


def cosine(one: "array[float]", other: "array[float]") -> float:
    """Returns the cosine of the angle between two vectors; 0 where one has no length."""
    lengths = math.sqrt(sum(map(operator.mul, one, one)) * sum(map(operator.mul, other, other)))
    return sum(map(operator.mul, one, other)) / lengths if lengths else 0.0


def sigmoid(score: float) -> float:
    """Returns 1 / (1 + e^-score), whatever the size of the score."""
    if score < 0:
        power = math.exp(score)
        return power / (1.0 + power)
    return 1.0 / (1.0 + math.exp(-score))


def softmax(scores: Sequence[float]) -> list[float]:
    """Returns what each score's power of e is of all of them."""
    largest = max(scores)
    powers = [math.exp(score - largest) for score in scores]
    total = sum(powers)
    return [power / total for power in powers]
