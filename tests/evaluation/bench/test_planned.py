"""The steps that are planned for a case, and what is seen of them."""

from pathlib import Path

import pytest

from octavo.bench.figures import StepRows
from octavo.bench.in_process import ObservedRunner, planned_steps
from octavo.bench.workloads import NAMES, make_case
from octavo.testbed.tiny_model import VOCAB_SIZE, write_byte_model
from octavo.worker.fake.runner import FakeRunner


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    write_byte_model(directory)
    return directory


@pytest.fixture(scope="module")
def steps(model: Path) -> dict[str, list[StepRows]]:
    return planned_steps(model, [make_case(name, VOCAB_SIZE) for name in NAMES])


def total(steps: list[StepRows]) -> tuple[int, int]:
    return sum(step.tokens for step in steps), sum(step.logit_rows for step in steps)


def test_a_stream_is_a_prompt_and_then_token_by_token(steps: dict[str, list[StepRows]]) -> None:
    assert steps["a"] == [StepRows(128, 1), *127 * [StepRows(1, 1)]]


@pytest.mark.parametrize("name", ["a", "b", "c"])
def test_every_token_but_the_last_of_each_request_is_computed_once(name: str, steps: dict[str, list[StepRows]]) -> None:
    case = make_case(name, VOCAB_SIZE)
    computed = case.num_prompt_tokens + case.num_output_tokens - len(case.jobs)
    assert total(steps[name]) == (computed, case.num_output_tokens)


def test_a_shared_prefix_is_computed_once_and_not_again_while_it_is_cached(steps: dict[str, list[StepRows]]) -> None:
    assert total(steps["d"]) == (512 + 32 * (32 + 31), 32 * 32)
    # Of 544 prompt tokens, the last block is computed again for its logits.
    assert total(steps["d-warm"]) == (32 * (16 + 31), 32 * 32)


def test_sequences_of_one_prompt_share_its_row(steps: dict[str, list[StepRows]]) -> None:
    assert steps["e"] == [StepRows(256, 1), *63 * [StepRows(8, 8)]]


def test_all_blocks_count_as_memory(model: Path) -> None:
    runner = ObservedRunner(FakeRunner(model, block_size=16, num_blocks=256))
    assert runner.kv_bytes == 256 * 16 * runner.kv_bytes_per_token
