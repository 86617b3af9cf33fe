"""How prompts are to be answered, in vLLM's words and with its defaults where they are not the model's."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from octavo.client import BeamSearch
from octavo.client import SamplingParams as ClientParams


@dataclass(frozen=True, kw_only=True)
class SamplingParams(ClientParams):
    """Those of `octavo.client`, but for `max_tokens`: 16 unless told otherwise; None is what there is room for."""

    max_tokens: int | None = 16


@dataclass(frozen=True, kw_only=True)
class BeamSearchParams:
    """The answer is the `beam_width` likeliest sequences, best first. A sequence scores its cumulative logprob divided
    by its length to the power of `length_penalty`."""

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    length_penalty: float = 1.0

    def sampling(self) -> ClientParams:
        """The same in words of `octavo.client`."""
        return ClientParams(
            n=self.beam_width,
            beam_search=BeamSearch(self.beam_width, self.length_penalty),
            max_tokens=self.max_tokens,
            ignore_eos=self.ignore_eos,
        )


def seeded(params: Sequence[ClientParams], source: random.Random) -> list[ClientParams]:
    """The same, with seeds from `source` where there are none: in order, so that a script draws the same every time it
    is run."""
    return [own if own.seed is not None else replace(own, seed=source.getrandbits(64)) for own in params]
