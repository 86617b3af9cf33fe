"""The benchmark's cases: how much they ask for, and that none finds another's prompts."""

import json

import pytest

from octavo.bench.workloads import NAMES, Case, make_case

VOCAB_SIZE = 49152
BLOCK_SIZE = 16


def first_blocks(case: Case) -> set[tuple[int, ...]]:
    return {tuple(job.prompt_token_ids[:BLOCK_SIZE]) for job in case.jobs}


@pytest.mark.parametrize(
    ("name", "requests", "prompt_tokens", "output_tokens"),
    [
        ("a", 1, 128, 128),
        ("b", 64, 10122, 10441),
        ("c", 8, 8192, 8),
        ("d", 32, 32 * 544, 32 * 32),
        ("d-warm", 32, 32 * 544, 32 * 32),
        ("e", 1, 256, 8 * 64),
    ],
)
def test_each_case_asks_for_its_lengths(name: str, requests: int, prompt_tokens: int, output_tokens: int) -> None:
    case = make_case(name, VOCAB_SIZE)
    assert (len(case.jobs), case.num_prompt_tokens, case.num_output_tokens) == (requests, prompt_tokens, output_tokens)


def test_only_several_sequences_of_a_prompt_are_sampled() -> None:
    temperatures = {name: {job.temperature for job in make_case(name, VOCAB_SIZE).jobs} for name in NAMES}
    assert temperatures.pop("e") == {1.0}
    assert set.union(*temperatures.values()) == {0.0}


def test_no_prompt_begins_as_another_but_those_of_d() -> None:
    cases = [make_case(name, VOCAB_SIZE, repetition) for name in "abce" for repetition in range(2)]
    assert len(set.union(*map(first_blocks, cases))) == sum(len(case.jobs) for case in cases)


def test_the_prompts_of_d_share_512_tokens_and_end_apart() -> None:
    prompts = [job.prompt_token_ids for job in make_case("d", VOCAB_SIZE).jobs]
    assert len({tuple(prompt[:512]) for prompt in prompts}) == 1
    assert len({tuple(prompt[512 : 512 + BLOCK_SIZE]) for prompt in prompts}) == 32


def test_d_warm_repeats_d_and_another_round_does_not() -> None:
    assert make_case("d-warm", VOCAB_SIZE, 1).jobs == make_case("d", VOCAB_SIZE, 1).jobs
    assert not first_blocks(make_case("d", VOCAB_SIZE, 0)) & first_blocks(make_case("d", VOCAB_SIZE, 1))


def test_token_ids_are_of_the_vocabulary() -> None:
    ids = {token_id for job in make_case("b", 100).jobs for token_id in job.prompt_token_ids}
    assert ids == set(range(17, 100))


@pytest.mark.parametrize("name", NAMES)
def test_quick_cases_are_small_and_of_the_same_kind(name: str) -> None:
    quick, case = make_case(name, VOCAB_SIZE, quick=True), make_case(name, VOCAB_SIZE)
    assert quick.num_prompt_tokens <= 256
    assert quick.num_output_tokens <= 32
    assert [job.num_sequences for job in quick.jobs] == [job.num_sequences for job in case.jobs[:4]]


def test_a_case_survives_json() -> None:
    case = make_case("e", VOCAB_SIZE)
    assert Case.from_json(json.loads(json.dumps(case.to_json()))) == case


def test_what_there_is_no_case_for_is_refused() -> None:
    with pytest.raises(ValueError, match="no case 'f'"):
        make_case("f", VOCAB_SIZE)
    with pytest.raises(ValueError, match="vocabulary of 17 tokens is too small"):
        make_case("a", 17)
