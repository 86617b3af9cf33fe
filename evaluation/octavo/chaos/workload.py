"""Draws what clients ask of the real processes: every kind of request, each short."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import cycle
from random import Random
from typing import Final

from octavo.frontend.request.request import bounds_of
from octavo.testbed.stack import token_request
from octavo.v1 import generation_pb2 as pb
from octavo.wire.sampling import NEUTRAL, PENALTIES

PREFIX_NAME: Final = "chaos"
PREFIX: Final = [(5 * i) % 250 for i in range(37)]
_SCHEMA: Final = {
    # Whatever a version's own is, so that answers are the same across an upgrade.
    "x-guidance": {"whitespace_pattern": "[ ]?"},
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 24}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@dataclass(frozen=True)
class Question:
    """Holds a request without an id, and what is special about it."""

    kind: str
    request: pb.GenerateRequest


def questions(random: Random, num_tokens: int, *, pinned: bool = True) -> Iterator[Question]:
    """Yields questions without end, all kinds in turn, of about `num_tokens` tokens; `pinned` if `PREFIX` is pinned."""
    beginning = random.choices(range(250), k=40)
    makers = dict(_MAKERS) if pinned else {kind: make for kind, make in _MAKERS.items() if kind != "pinned prefix"}
    for kind, make in cycle(makers.items()):
        own = random.choices(range(250), k=random.randint(3, 30))
        shared = beginning[: random.choice((0, 0, 17, 40))]
        request = token_request([*shared, *own], random.randint(num_tokens // 2, num_tokens))
        request.sampling.seed = random.getrandbits(32)
        make(random, request)
        yield Question(kind, request)


def _greedy(random: Random, request: pb.GenerateRequest) -> None:
    pass


def _sampled(random: Random, request: pb.GenerateRequest) -> None:
    request.sampling.temperature = random.choice((0.5, 1.0))


def _penalised(random: Random, request: pb.GenerateRequest) -> None:
    request.sampling.temperature = 1.0
    for name in PENALTIES:
        # As far as half-way from none to the most.
        most = bounds_of(name).high
        setattr(request.sampling, name, random.uniform(NEUTRAL[name], (NEUTRAL[name] + most) / 2))


def _with_logprobs(random: Random, request: pb.GenerateRequest) -> None:
    request.response.top_logprobs = 2
    request.response.prompt_logprobs = 1


def _parallel(random: Random, request: pb.GenerateRequest) -> None:
    request.sampling.temperature = 1.0
    request.sampling.num_sequences = random.randint(2, 3)


def _best(random: Random, request: pb.GenerateRequest) -> None:
    request.sampling.temperature = 1.0
    request.sampling.num_sequences, request.sampling.best_of = 1, 3


def _beams(random: Random, request: pb.GenerateRequest) -> None:
    request.sampling.beam_search.beam_width = 3
    request.sampling.num_sequences = 2
    request.stopping.max_new_tokens = min(12, request.stopping.max_new_tokens)


def _at_least(random: Random, request: pb.GenerateRequest) -> None:
    """Half of the vocabulary would end it, and may not at first."""
    request.stopping.stop_token_ids.extend(range(0, 250, 2))
    request.stopping.min_new_tokens = request.stopping.max_new_tokens // 2


def _constrained(random: Random, request: pb.GenerateRequest) -> None:
    request.sampling.temperature = 1.0
    request.stopping.ignore_eos = False
    if random.random() < 0.5:
        request.constraint.json_schema = json.dumps(_SCHEMA)
    else:
        request.constraint.regex = "([a-f]{3} ){5,12}"


def _pinned(random: Random, request: pb.GenerateRequest) -> None:
    request.cache.pinned_prefix = PREFIX_NAME


_MAKERS: Final[dict[str, Callable[[Random, pb.GenerateRequest], None]]] = {
    "greedy": _greedy,
    "sampled": _sampled,
    "penalties": _penalised,
    "logprobs": _with_logprobs,
    "parallel": _parallel,
    "best of": _best,
    "beam search": _beams,
    "min tokens": _at_least,
    "structured output": _constrained,
    "pinned prefix": _pinned,
}
KINDS: Final = tuple(_MAKERS)
