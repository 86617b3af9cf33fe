"""Declares sampling parameters under vLLM's names, with vLLM's defaults where they are not the model's."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from octavo.client import BeamSearch
from octavo.client import SamplingParams as ClientParams


@dataclass(frozen=True, kw_only=True)
class SamplingParams(ClientParams):
    """Has the fields of `octavo.client.SamplingParams`, but 16 as default of `max_tokens`; None is all the room."""

    max_tokens: int | None = 16


@dataclass(frozen=True, kw_only=True)
class BeamSearchParams:
    """Asks for the `beam_width` sequences with the highest scores, best first.

    A sequence's score is its cumulative logprob divided by its length to the power of `length_penalty`.
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    length_penalty: float = 1.0

    def sampling(self) -> ClientParams:
        """Returns the same search as parameters of `octavo.client`."""
        return ClientParams(
            n=self.beam_width,
            beam_search=BeamSearch(self.beam_width, self.length_penalty),
            max_tokens=self.max_tokens,
            ignore_eos=self.ignore_eos,
        )


def seeded(params: Sequence[ClientParams], source: random.Random) -> list[ClientParams]:
    """Returns `params` with seeds from `source` where they have none.

    Seeds are drawn in order, so that a script draws the same ones every time it is run.
    """
    return [own if own.seed is not None else replace(own, seed=source.getrandbits(64)) for own in params]
