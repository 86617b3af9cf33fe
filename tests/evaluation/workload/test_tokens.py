import pytest

from octavo.workload.job import Job, prompt_token_ids


def ids(index: int, prompt_tokens: int = 20, prefix: str = "", prefix_tokens: int = 0, seed: int = 0) -> list[int]:
    job = Job(0.0, prompt_tokens, 1, prefix=prefix, prefix_tokens=prefix_tokens)
    return prompt_token_ids(job, index, vocab_size=1000, seed=seed)


def test_a_prompt_has_its_length_and_ids_of_the_vocabulary() -> None:
    assert len(ids(0, 500)) == 500
    assert 0 <= min(ids(0, 500)) < max(ids(0, 500)) < 1000


def test_a_prompt_is_the_same_for_its_index_and_seed_alone() -> None:
    assert ids(3) == ids(3)
    assert ids(3)[:2] != ids(4)[:2]
    assert ids(3) != ids(3, seed=1)


def test_jobs_of_a_prefix_share_its_tokens_and_no_more() -> None:
    one, other, third = ids(0, 20, "a", 8), ids(1, 20, "a", 8), ids(2, 20, "b", 8)
    assert one[:8] == other[:8]
    assert one[8:] != other[8:]
    assert one[:8] != third[:8]


def test_a_shorter_prefix_of_the_same_name_begins_alike() -> None:
    assert ids(0, 20, "a", 16)[:8] == ids(1, 20, "a", 8)[:8]


def test_prompts_that_are_all_prefix_are_equal() -> None:
    assert ids(0, 8, "a", 8) == ids(1, 8, "a", 8)


def test_a_vocabulary_without_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1 token"):
        prompt_token_ids(Job(0.0, 1, 1), 0, vocab_size=0, seed=0)
