"""Parameters in vLLM's words."""

import random

from octavo.client import BeamSearch
from octavo.client import SamplingParams as ClientParams
from octavo.llm.params import BeamSearchParams, SamplingParams, seeded


def test_an_answer_has_sixteen_tokens_unless_told_otherwise() -> None:
    assert (SamplingParams().max_tokens, SamplingParams(max_tokens=None).max_tokens) == (16, None)


def test_seeds_are_drawn_in_order_for_those_that_have_none() -> None:
    params = [SamplingParams(), SamplingParams(seed=9), SamplingParams(), ClientParams()]
    first, again = ([own.seed for own in seeded(params, random.Random(5))] for _ in range(2))
    assert first == again
    assert first[1] == 9
    assert len(set(first)) == 4
    assert first != [own.seed for own in seeded(params, random.Random(6))]


def test_a_beam_search_answers_with_all_its_beams() -> None:
    params = BeamSearchParams(beam_width=3, max_tokens=5, length_penalty=0.5, ignore_eos=True).sampling()
    assert params == ClientParams(n=3, beam_search=BeamSearch(3, 0.5), max_tokens=5, ignore_eos=True)
