"""The paper's promises about memory (§6.3), kept by the production scheduler on requests of the paper's lengths."""

import pytest

from octavo.bench.parts.memory_figures import ALPACA, SHAREGPT, kv_waste, sampling_savings


def test_of_the_slots_reserved_for_conversations_at_most_four_percent_are_empty() -> None:
    # The paper wastes 3.7 %.
    assert 0.005 < kv_waste(SHAREGPT.draw(100)) <= 0.04


def test_short_sequences_waste_more_of_their_last_block() -> None:
    # Half a block of sequences that are about five long on average.
    assert 0.05 < kv_waste(ALPACA.draw(300)) < 0.13


@pytest.mark.parametrize(("num_sequences", "paper"), [(2, 0.061), (4, 0.085), (6, 0.098)])
def test_parallel_sampling_saves_about_what_it_saves_in_the_paper(num_sequences: int, paper: float) -> None:
    assert sampling_savings(ALPACA.draw(300), num_sequences) == pytest.approx(paper, abs=0.03)


def test_drawn_lengths_keep_to_their_means_and_bounds() -> None:
    for lengths in (SHAREGPT, ALPACA):
        pairs = lengths.draw(4000)
        assert all(4 <= prompt <= 1024 and 4 <= output <= 2048 - prompt for prompt, output in pairs)
        prompts, outputs = zip(*pairs, strict=True)
        assert sum(prompts) / len(pairs) == pytest.approx(lengths.prompt_mean, rel=0.15)
        assert sum(outputs) / len(pairs) == pytest.approx(lengths.output_mean, rel=0.15)
