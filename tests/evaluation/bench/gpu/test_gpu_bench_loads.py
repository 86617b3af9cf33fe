"""What is asked of whole systems on a GPU, and the models that they are asked of."""

from pathlib import Path

import pytest
import torch

from octavo.bench.gpu.cases import NotMeasured
from octavo.bench.gpu.exactness import draw_prompts, equal_share
from octavo.bench.gpu.problems import check, expected_rows, paged_problem
from octavo.bench.gpu.served.loads import equal_load, mixed_load, vocabulary, warm_up_load, write_model
from octavo.bench.gpu.shapes import AttentionShape, DecoderShape
from octavo.frontend.text.tokenizer import ModelTokenizer, check_vocabulary
from octavo.kernels.reference import paged_attention


def test_the_mixed_load_is_that_of_the_published_figures() -> None:
    load = mixed_load()
    assert len(load.jobs) == 256
    assert sum(prompt for prompt, _ in load.lengths) == 142_827
    assert load.num_output_tokens == 133_966
    assert all(100 <= length <= 1024 for lengths in load.lengths for length in lengths)


def test_an_equal_load_shares_no_prefix_with_another() -> None:
    one, other = equal_load(3, 20, 5, "one"), equal_load(3, 20, 5, "other")
    assert one.lengths == [(20, 5)] * 3
    assert len({tuple(job.prompt_token_ids[:4]) for job in [*one.jobs, *other.jobs]}) == 6
    assert equal_load(3, 20, 5, "one") == one


def test_every_load_fits_every_model() -> None:
    most = max(token for load in (mixed_load(), warm_up_load()) for job in load.jobs for token in job.prompt_token_ids)
    assert most < min(DecoderShape.read(name).vocab_size for name in ("tiny", "qwen3-8b", "qwen3-0.6b", "llama-3.1-8b"))


def test_a_model_directory_has_a_text_for_every_token(tmp_path: Path) -> None:
    directory = write_model("tiny", tmp_path)
    tokenizer, vocab_size = ModelTokenizer(directory), DecoderShape.read("tiny").vocab_size
    check_vocabulary(tokenizer, directory, vocab_size)
    assert sorted(tokenizer.ids(added=True).values()) == list(range(vocab_size))
    assert tokenizer.decode([*tokenizer.encode("so"), 300, 301], skip_special_tokens=True) == "so sbaaa tbaaa"


def test_a_vocabulary_names_no_token_twice() -> None:
    assert len(set(vocabulary(151_936))) == 151_936


def test_prompts_that_are_compared_end_at_block_borders_and_beside_them() -> None:
    lengths = [len(prompt) for prompt in draw_prompts(6, 100)]
    assert {length % 16 for length in lengths} == {0, 1, 2}


def test_a_token_with_other_bits_is_not_equal() -> None:
    alone = [[(5, -1.5), (6, -2.0)], [(7, -0.5), (8, -0.25)]]
    assert equal_share(alone, alone) == 1.0
    assert equal_share([[(5, -1.5), (6, -2.0)], [(7, -0.5), (8, -0.25 - 2**-50)]], alone) == 0.75


@pytest.mark.parametrize("num_queries", [1, 5])
def test_a_problem_is_what_the_oracle_computes(num_queries: int) -> None:
    problem = paged_problem(
        AttentionShape(6, 2, 16),
        torch.device("cpu"),
        num_sequences=3,
        context=37,
        num_layers=2,
        num_queries=num_queries,
    )
    keys, values = problem.caches(0)
    oracle = paged_attention(
        problem.queries[0].float(),
        keys.float(),
        values.float(),
        problem.tables,
        [37] * 3,
        [num_queries] * 3,
        problem.scale,
    )
    expected = expected_rows(problem).transpose(0, 1)
    torch.testing.assert_close(oracle[:num_queries], expected, rtol=1e-4, atol=1e-4)
    check(problem, oracle)
    with pytest.raises(NotMeasured, match="its result is wrong"):
        check(problem, oracle.roll(1, dims=1))
