"""Steps of two ranks, both threads of this process, over a real process group: what one rank alone gives."""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any, cast

import pytest
import torch
from transformers import AutoConfig

from octavo.testbed.models import fp32_runner, generate, new_sequences, run_items, run_step, write_tiny_model
from octavo.testbed.tiny_model import VOCAB_SIZE, write_byte_model
from octavo.testing.oracles.drafted_runs import compare, random_requests
from octavo.wire.base import NULL_BLOCK
from octavo.wire.sampling import Logprobs, SamplingParams
from octavo.wire.steps import BlockMove, BlockMoves
from octavo.worker.health import DEADLINE_S, STEP_DEADLINE_S, Liveness
from octavo.worker.runner import DeviceLostError
from octavo.worker.sequences import WorkItem
from octavo.worker.step.forward import PagedModel
from octavo.worker.step.model_runner import ModelRunner, ModelRunnerError
from octavo.worker.tensor_parallel.distributed import DistributedGroup, RankLostError
from octavo.worker.tensor_parallel.follower import Follower
from octavo.worker.tensor_parallel.frames import EndFrame, Move, encode
from octavo.worker.tensor_parallel.leader import Leader
from octavo.worker.tensor_parallel.rendezvous import connect

PROMPTS = [[5, 6, 7], list(range(40)), [250, 3, 250]]
_END_S = 60.0
_SETTINGS: dict[str, Any] = {"num_blocks": 32, "num_cpu_blocks": 8, "block_size": 8}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    directory = tmp_path_factory.mktemp("models") / "tiny"
    write_byte_model(directory)
    write_tiny_model(directory, AutoConfig.from_pretrained(directory, head_dim=16))
    return directory


@pytest.fixture(scope="module")
def alone(directory: Path) -> ModelRunner:
    return fp32_runner(directory, **_SETTINGS)


class Turns(Liveness):
    """Counts them."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def turn(self, *, idle: bool = True) -> None:
        self.count += 1
        super().turn(idle=idle)


class TwoRanks:
    """The first rank's `runner` is this thread's; the other rank follows on a thread of its own until the end."""

    def __init__(self, pool: ThreadPoolExecutor, rendezvous: str, directory: Path, *settings: dict[str, Any]) -> None:
        connecting = [pool.submit(connect, rendezvous, rank, 2, patience_s=60) for rank in range(2)]
        self.groups = [each.result() for each in connecting]
        self.leader = Leader(self.groups[0])
        self.following: Future[int] = pool.submit(self._follow, directory, self.groups[1], settings[-1])
        try:
            self.runner = fp32_runner(directory, group=self.groups[0], followers=self.leader, **settings[0])
        except ModelRunnerError:
            self.close()
            raise

    def _follow(self, directory: Path, group: DistributedGroup, settings: dict[str, Any]) -> int:
        """How many frames there were before the last."""
        turns = Turns()
        runner = fp32_runner(directory, group=group, **settings)
        Follower(runner.paged_model, group).run(turns)
        return turns.count

    def close(self) -> None:
        self.following.exception(_END_S)
        for group in self.groups:
            group.close()


@contextmanager
def two_ranks(rendezvous: str, directory: Path, *settings: dict[str, Any]) -> Iterator[TwoRanks]:
    with ThreadPoolExecutor(2) as pool:
        ranks = TwoRanks(pool, rendezvous, directory, *settings)
        yield ranks
        if not ranks.following.done():
            ranks.leader.end()
        ranks.close()


@pytest.fixture
def ranks(directory: Path, tmp_path: Path) -> Iterator[TwoRanks]:
    with two_ranks(f"file:{tmp_path}", directory, _SETTINGS) as ranks:
        yield ranks


def test_two_ranks_sample_what_one_does(ranks: TwoRanks, alone: ModelRunner) -> None:
    assert generate(ranks.runner, PROMPTS, 24) == generate(alone, PROMPTS, 24)


def test_drafts_change_no_bit_of_what_two_ranks_say(directory: Path, tmp_path: Path) -> None:
    settings = {**_SETTINGS, "num_blocks": 256, "block_size": 16}
    with two_ranks(f"file:{tmp_path}", directory, settings) as ranks:
        asked = random_requests(Random(2), 8, VOCAB_SIZE, longest_prompt=40, most_tokens=16)
        drafted = compare(ranks.runner, asked, 2)
    assert 0 < drafted.num_accepted < drafted.num_drafted


def test_prompt_logprobs_are_those_of_one_rank(ranks: TwoRanks, alone: ModelRunner) -> None:
    wanting = SamplingParams(max_tokens=4, prompt_logprobs=2)

    def logprobs(runner: ModelRunner) -> list[Logprobs]:
        parts = run_step(runner, new_sequences(runner, PROMPTS, 4, wanting), 2048).prompt_logprobs
        return [each for part in parts for each in part.logprobs]

    found, expected = logprobs(ranks.runner), logprobs(alone)
    assert [each.top_token_ids for each in found] == [each.top_token_ids for each in expected]
    assert [each.logprob for each in found] == pytest.approx([each.logprob for each in expected], abs=1e-4)


def test_exact_ranks_compute_a_sequence_alike_whatever_is_beside_it(directory: Path, tmp_path: Path) -> None:
    exact = {**_SETTINGS, "block_size": 16, "numerics": "exact"}
    wanting = SamplingParams(max_tokens=4, logprobs=5)

    def logprobs(runner: ModelRunner, prompts: list[list[int]]) -> list[Logprobs | None]:
        sequences = new_sequences(runner, prompts, 8, wanting)
        return [run_step(runner, sequences, 2048).sampled[0].logprobs for _ in range(8)]

    with two_ranks(f"file:{tmp_path}", directory, exact) as ranks:
        alone, beside = (logprobs(ranks.runner, prompts) for prompts in (PROMPTS[:1], PROMPTS))
    assert alone == beside


def test_blocks_move_on_all_ranks(ranks: TwoRanks, alone: ModelRunner) -> None:
    def after_moves(runner: ModelRunner) -> list[int]:
        [sequence] = new_sequences(runner, PROMPTS[1:2], 16)
        run_step(runner, [sequence], 2048)
        [table] = sequence.block_tables
        away = [BlockMove(block, index) for index, block in enumerate(table)]
        back = [BlockMove(index, 20 + index) for index in range(len(table) - 1)]
        runner.execute(BlockMoves(swap_out=away), [])
        runner.execute(BlockMoves(swap_in=back, copy=[BlockMove(20, 30)]), [])
        table[:] = [30, *(move.target for move in back[1:]), table[-1]]
        return [run_step(runner, [sequence], 2048).sampled[0].token_id for _ in range(8)]

    assert after_moves(ranks.runner) == after_moves(alone)


def test_a_step_that_cannot_be_is_told_to_nobody(ranks: TwoRanks, alone: ModelRunner) -> None:
    [sequence] = new_sequences(ranks.runner, PROMPTS[:1], 4)
    with pytest.raises(ValueError, match="block"):
        ranks.runner.execute(BlockMoves(copy=[BlockMove(0, 1 << 20)]), [])
    sequence.block_tables[0][0] = NULL_BLOCK
    with pytest.raises(ValueError, match="block"):
        run_items(ranks.runner, [WorkItem(sequence, 0, 3, (sequence,))])
    assert generate(ranks.runner, PROMPTS, 4) == generate(alone, PROMPTS, 4)


def test_what_fails_beside_the_others_ends_the_replica(ranks: TwoRanks, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> torch.Tensor:
        raise MemoryError("no memory")

    # The other rank's alone: it takes it over with the beat, which may take longer on a busy machine.
    ranks.groups[1].set_patience(2.0)
    ranks.leader.beat()
    monkeypatch.setattr(ranks.runner.paged_model, "forward", broken)
    with pytest.raises(DeviceLostError, match="no memory"):
        generate(ranks.runner, PROMPTS, 1)
    # In a process of its own the first rank would end now, and its connections with it.
    assert isinstance(ranks.following.exception(_END_S), RankLostError)


def test_beats_are_turns_and_the_end_is_none(ranks: TwoRanks) -> None:
    for _ in range(3):
        ranks.leader.beat()
    ranks.leader.end()
    assert ranks.following.result(_END_S) == 3


def test_a_step_may_keep_a_follower_as_long_as_any_worker() -> None:
    now, alive = [0.0], []
    liveness = Liveness(lambda: now[0])

    class Frames:
        left = iter([encode(Move(BlockMoves())), encode(Move(BlockMoves())), encode(EndFrame())])

        def receive_frame(self) -> bytes:
            alive.append(liveness.alive)
            return next(self.left)

    class Slow:
        def move(self, moves: BlockMoves) -> None:
            for pause in (DEADLINE_S + 1, STEP_DEADLINE_S):
                now[0] += pause
                alive.append(liveness.alive)

    Follower(cast(PagedModel, Slow()), cast(DistributedGroup, Frames())).run(liveness)
    assert alive == [True, True, False, True, True, False, True]


def test_a_beat_is_not_over_before_all_ranks_have_answered(tmp_path: Path) -> None:
    with ThreadPoolExecutor(2) as pool:
        connecting = [pool.submit(connect, f"file:{tmp_path}", rank, 2, patience_s=60) for rank in range(2)]
        groups = [each.result() for each in connecting]
    groups[0].set_patience(0.1)
    with pytest.raises(RankLostError, match="hangs"):
        Leader(groups[0]).beat()
    for group in groups:
        group.close()


def test_all_ranks_hold_as_many_blocks_and_the_memory_is_that_of_all(directory: Path, tmp_path: Path) -> None:
    whole = fp32_runner(directory, kv_cache_memory=1 << 20, swap_memory=1 << 18, block_size=8)
    memory = {"kv_cache_memory": 1 << 20, "swap_memory": 1 << 18, "block_size": 8}
    with two_ranks(f"file:{tmp_path}", directory, memory, {**memory, "kv_cache_memory": 1 << 21}) as ranks:
        found = ranks.runner
    assert (found.num_blocks, found.num_cpu_blocks) == (whole.num_blocks, whole.num_cpu_blocks)
    assert found.kv_bytes_per_token == whole.kv_bytes_per_token
    assert found.world_size == 2


def test_a_step_that_fails_on_a_follower_ends_it(ranks: TwoRanks) -> None:
    ranks.groups[0].send_frame(b"no frame")
    with pytest.raises(DeviceLostError, match="this rank failed"):
        ranks.following.result(_END_S)


@pytest.mark.parametrize(
    "other", [{"block_size": 16}, {"num_blocks": 63}, {"num_cpu_blocks": 3}, {"model_impl": "native"}], ids=str
)
def test_ranks_that_were_started_differently_are_refused(
    directory: Path, tmp_path: Path, other: dict[str, Any]
) -> None:
    with ThreadPoolExecutor(2) as pool, pytest.raises(ModelRunnerError, match="start them all alike"):
        TwoRanks(pool, f"file:{tmp_path}", directory, _SETTINGS, {**_SETTINGS, **other})
