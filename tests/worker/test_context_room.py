"""A pool that cannot hold the longest sequence says how much more it takes."""

from pathlib import Path

import pytest

from octavo.testbed.tiny_model import write_byte_model
from octavo.worker.fake.runner import FakeRunner
from octavo.worker.make_runner import ContextRoomError, check_context_room


@pytest.fixture
def model(tmp_path: Path) -> Path:
    write_byte_model(tmp_path, max_model_len=100)
    return tmp_path


def test_a_pool_that_just_holds_the_context_will_do(model: Path) -> None:
    check_context_room(FakeRunner(model, block_size=16, num_blocks=7))
    check_context_room(FakeRunner(model, block_size=16, num_blocks=14, windows=(0, 32)))
    check_context_room(FakeRunner(model, block_size=16, num_blocks=2, max_model_len=32))


def test_both_figures_and_both_remedies_are_named(model: Path) -> None:
    with pytest.raises(ContextRoomError) as caught:
        check_context_room(FakeRunner(model, block_size=16, num_blocks=6))
    assert str(caught.value) == (
        "the KV cache of 6 blocks (384 bytes) holds 96 tokens of a sequence and the context has 100, which takes 7"
        " blocks: give --kv-cache-memory 448, or shorten the context with --max-model-len 96"
    )


def test_every_kv_group_takes_its_blocks(model: Path) -> None:
    with pytest.raises(ContextRoomError, match=r"holds 96 tokens .* takes 14 blocks: give --kv-cache-memory 896"):
        check_context_room(FakeRunner(model, block_size=16, num_blocks=13, windows=(0, 32)))


def test_with_fewer_blocks_than_groups_only_smaller_ones_help(model: Path) -> None:
    with pytest.raises(ContextRoomError, match=r"holds 0 tokens .* with a smaller --block-size"):
        check_context_room(FakeRunner(model, block_size=16, num_blocks=1, windows=(0, 32)))
