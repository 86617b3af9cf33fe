"""Beam search in its plainest form, to compare with: no blocks, no steps, whole sequences in lists."""

from collections.abc import Callable
from dataclasses import dataclass

from octavo.wire.sampling import EarlyStopping

Tokens = tuple[int, ...]
# What a model offers after a sequence: tokens and their logprobs, likeliest first.
Offers = Callable[[Tokens], list[tuple[int, float]]]


@dataclass(frozen=True)
class Found:
    """A finished sequence."""

    score: float
    logprob: float
    tokens: Tokens


def plain_search(
    offers: Offers,
    width: int,
    length_penalty: float,
    early_stopping: EarlyStopping | None,
    max_tokens: int,
    stops: frozenset[int],
) -> list[Found]:
    """The best finished sequences, best first; with `early_stopping` None the search goes on until `max_tokens`."""
    beams: list[tuple[float, Tokens]] = [(0.0, ())]
    found: list[Found] = []
    for length in range(1, max_tokens + 1):
        options = [(sum_ + logprob, (*tokens, token)) for sum_, tokens in beams for token, logprob in offers(tokens)]
        options = sorted(options, reverse=True)[: width * max(2, 1 + len(stops))]
        ended = [length == max_tokens or tokens[-1] in stops for _, tokens in options]
        found += [
            Found(sum_ / length**length_penalty, sum_, tokens)
            for (sum_, tokens), has_ended in list(zip(options, ended, strict=True))[:width]
            if has_ended
        ]
        found = sorted(found, key=lambda each: each.score, reverse=True)[:width]
        beams = [option for option, has_ended in zip(options, ended, strict=True) if not has_ended][:width]
        if not beams or _is_content(found, width, early_stopping, beams[0][0], length, max_tokens, length_penalty):
            break
    return found


def _is_content(
    found: list[Found],
    width: int,
    early_stopping: EarlyStopping | None,
    best: float,
    length: int,
    max_tokens: int,
    length_penalty: float,
) -> bool:
    if len(found) < width or early_stopping is None:
        return False
    if early_stopping is EarlyStopping.ON:
        return True
    scores: list[float] = [best / length**length_penalty]
    if early_stopping is EarlyStopping.NEVER:
        # No logprob is above 0, so no longer sequence scores better than the beam would at one of these lengths.
        scores += [best / later**length_penalty for later in range(length + 1, max_tokens + 1)]
    return max(scores) <= found[-1].score
