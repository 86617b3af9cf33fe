"""What a draft model has missed while it slept, or finds elsewhere, it computes when it is asked, and nothing else."""

from pathlib import Path
from typing import Any

import pytest
import torch

from octavo.testing.oracles.worker_plans import moves
from octavo.testing.small.draft_models import make_runner, write_model
from octavo.wire.base import NULL_BLOCK
from octavo.wire.sampling import SamplingParams
from octavo.worker.sequences import WorkerSequence, WorkItem
from octavo.worker.step import draft_model
from octavo.worker.step.draft_model import STEPS_AWAKE, DraftModel
from octavo.worker.step.model_runner import ModelRunner

pytestmark = pytest.mark.usefixtures("compiled_kernels")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {name: tmp_path_factory.mktemp("models") / name for name in ("llama", "only windows")}
    for name, directory in made.items():
        write_model(directory, name)
    return made


class Steps:
    """Runs one sequence after the other on a runner, a step at a time, and writes down the tokens that its draft model
    computes in each forward pass, and the last hidden states that the last one gives."""

    def __init__(self, runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
        self.runner = runner
        self.passes: list[int] = []
        forward = DraftModel._forward

        def counted(model: DraftModel, items: list[WorkItem], rows: list[int], *first_blocks: Any) -> Any:
            self.draft_model = model
            self.passes.append(sum(item.num_tokens for item in items))
            self.hidden = forward(model, items, rows, *first_blocks)
            return self.hidden

        monkeypatch.setattr(DraftModel, "_forward", counted)

    def begin(self, sequence_id: int, prompt: list[int], blocks: list[int], num_computed: int = 0) -> WorkerSequence:
        params = SamplingParams(max_tokens=64, temperature=1.0, seed=5)
        return WorkerSequence(sequence_id, 0, params, len(prompt), list(prompt), num_computed, [blocks])

    def step(self, *asked: tuple[WorkerSequence, int]) -> list[list[int]]:
        """Computes what is left of sequences, and has so many guesses made of each; returns these."""
        items = [
            WorkItem(each, each.num_computed, len(each.token_ids) - each.num_computed, (each,), [], count)
            for each, count in asked
        ]
        self.passes.clear()
        output = self.runner.execute(moves(), items)
        for (sequence, _), sampled in zip(asked, output.sampled, strict=True):
            sequence.num_computed = len(sequence.token_ids)
            sequence.token_ids.append(sampled.token_id)
        return [each.token_ids for each in output.proposed]

    def check(self, sequence: WorkerSequence, guessed: list[int]) -> None:
        """The model itself has guessed: all comes true."""
        for guess in guessed:
            self.step((sequence, 0))
            assert sequence.token_ids[-1] == guess


PROMPT = list(range(3, 43))


@pytest.fixture
def steps(models: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> Steps:
    """Steps of a model that guesses itself."""
    return Steps(make_runner(models["llama"], models["llama"], num_cpu_blocks=8), monkeypatch)


class TestBlocks:
    @pytest.mark.parametrize("is_awake", [False, True])
    def test_move_for_both_models(self, steps: Steps, is_awake: bool) -> None:
        """Out, in to other places, and copied: then the draft model goes on as before, and knows what it has."""
        runner, sequence = steps.runner, steps.begin(1, PROMPT, [4, 5, 6, 7])
        steps.step((sequence, 1 if is_awake else 0))
        runner.execute(moves(swap_out=[(4, 0), (5, 1), (6, 2)]), [])
        runner.execute(moves(swap_in=[(0, 20), (1, 21), (2, 22)]), [])
        runner.execute(moves(copy=[(20, 30), (22, 31)]), [])
        sequence.block_tables = [[30, 21, 31, 40]]
        # The old ones are somebody else's by now.
        steps.step((steps.begin(2, [9] * 64, [4, 5, 20, 22]), 0))
        (guessed,) = steps.step((sequence, 5))
        assert steps.passes == [*([] if is_awake else [40]), 2, 1, 1, 1, 1]
        assert len(guessed) == 5
        steps.check(sequence, guessed)

    @pytest.mark.parametrize("is_awake", [False, True])
    def test_say_where_they_are_kept_how_far_they_are_followed(self, steps: Steps, is_awake: bool) -> None:
        """What is read from a disk, or another worker, and found there."""
        runner, first = steps.runner, steps.begin(1, PROMPT, [4, 5, 6, 7])
        steps.step((first, 1 if is_awake else 0))
        contents = [bytearray(b"".join(parts)) for parts in runner.read_blocks([4, 5]).blocks()]
        copied = runner.peek_blocks([4, 5], in_cpu=False)
        assert copied is not None
        assert [bytearray(each) for each in copied] == contents
        for cpu_block, content in enumerate(contents):
            runner.fill_cpu_block(cpu_block, content)
        runner.execute(moves(swap_in=[(0, 20), (1, 21)]), [])
        second = steps.begin(2, PROMPT, [20, 21, 22, 23], num_computed=32)
        (guessed,) = steps.step((second, 4))
        assert steps.passes == [*([] if is_awake else [32]), 9, 1, 1, 1]
        steps.check(second, guessed)


class TestSleep:
    def test_costs_nothing_until_a_guess_is_asked_for(self, steps: Steps) -> None:
        sequence = steps.begin(1, PROMPT, [4, 5, 6, 7, 8])
        steps.step((sequence, 0))
        assert steps.passes == []
        (guessed,) = steps.step((sequence, 3))
        # The prompt, the last two tokens, and two of the guesses.
        assert steps.passes == [40, 2, 1, 1]
        steps.check(sequence, guessed)

    def test_begins_again_after_some_steps_without_a_question(self, steps: Steps) -> None:
        sequence = steps.begin(1, PROMPT, [4, 5, 6, 7, 8])
        steps.step((sequence, 1))
        assert steps.passes == [41]
        for _ in range(STEPS_AWAKE):
            steps.step((sequence, 0))
            assert steps.passes == [1]
        for _ in range(3):
            steps.step((sequence, 0))
            assert steps.passes == []
        (guessed,) = steps.step((sequence, 2))
        assert steps.passes == [3, 2, 1]
        steps.check(sequence, guessed)

    def test_is_caught_up_with_by_those_alone_that_are_asked_about(self, steps: Steps) -> None:
        """And by what they share with others: that is there then."""
        first, other = steps.begin(1, PROMPT, [4, 5, 6, 7]), steps.begin(2, [9] * 40, [8, 9, 10, 11])
        steps.step((first, 0), (other, 0))
        steps.step((first, 1), (other, 0))
        assert steps.passes == [40, 2]
        third = steps.begin(3, [*PROMPT[:32], 7, 7, 7], [4, 5, 12], num_computed=32)
        (guessed,) = steps.step((third, 2), (other, 0))
        assert steps.passes == [4, 1]
        steps.check(third, guessed)

    def test_of_a_long_prompt_is_caught_up_with_in_pieces(self, steps: Steps, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(draft_model, "_MOST_CAUGHT_UP", 25)
        first, second = steps.begin(1, PROMPT, [4, 5, 6, 7]), steps.begin(2, [9] * 20, [8, 9, 10])
        steps.step((first, 0), (second, 0))
        guessed = steps.step((first, 2), (second, 2))
        assert steps.passes == [25, 25, 10, 4, 2]
        steps.check(first, guessed[0])
        steps.check(second, guessed[1])


class TestSleepBesideWindowsAlone:
    @pytest.fixture
    def steps(self, models: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> Steps:
        return Steps(make_runner(models["only windows"], models["only windows"]), monkeypatch)

    def test_is_caught_up_with_from_where_the_window_begins(self, steps: Steps) -> None:
        """As if nothing had been before, whatever other sequences put into the blocks that were given back."""
        sequence = steps.begin(1, PROMPT, [4, 5, 6])
        steps.step((sequence, 0))
        assert steps.passes == []
        # What follows the prompt sees 19 tokens before it.
        sequence.block_tables = [[NULL_BLOCK, 5, 6]]
        steps.step((steps.begin(2, [9] * 16, [4]), 0))
        steps.step((sequence, 1))
        assert steps.passes == [24, 2]
        found = steps.hidden
        alone = steps.begin(3, sequence.token_ids[16:], [20, 21])
        steps.draft_model._forward([WorkItem(alone, 0, len(alone.token_ids), ())], [len(alone.token_ids) - 1])
        torch.testing.assert_close(found, steps.hidden)

    def test_is_of_no_more_account_some_windows_later(self, steps: Steps) -> None:
        sequence = steps.begin(1, PROMPT, [4, 5, 6, 7, 8, 9, 10, 11, 12])
        steps.step((sequence, 0))
        sequence.block_tables[0][0] = NULL_BLOCK
        # Each of four layers sees a window further than the one before it.
        for _ in range(4 * 20):
            steps.step((sequence, 1))
        assert steps.passes == [2]
        (guessed,) = steps.step((sequence, 5))
        steps.check(sequence, guessed)

    def test_is_over_for_what_begins_with_blocks_that_were_followed(self, steps: Steps) -> None:
        """Those in the window count alone: whoever shares them needs none before."""
        first = steps.begin(1, [*PROMPT, *PROMPT], [4, 5, 6, 7, 8, 9])
        steps.step((first, 1))
        assert steps.passes == [81]
        second = steps.begin(2, [*first.token_ids[:64], 7, 7], [NULL_BLOCK, NULL_BLOCK, 6, 7, 12], num_computed=64)
        steps.step((second, 1))
        assert steps.passes == [3]
        steps.step((steps.begin(3, [9] * 16, [7]), 0))
        third = steps.begin(4, [*first.token_ids[:48], 7, 7], [NULL_BLOCK, 5, 6, 13], num_computed=48)
        steps.step((third, 1))
        assert steps.passes == [3]
