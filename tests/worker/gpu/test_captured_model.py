"""Decode steps of ranks as CUDA graphs: which steps are replayed, and that all ranks say the same of each.

Ranks are threads, kernels run in Triton's interpreter, and graphs are fakes that compute when they are replayed.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Qwen3Config

from octavo.kernels.triton.attention import TritonAttention
from octavo.testbed.models import next_item, write_tiny_model
from octavo.testing.depth import deep
from octavo.testing.shard_threads import RankRunner, ThreadGroup, run_ranks
from octavo.wire.base import NULL_BLOCK
from octavo.worker.gpu import captured_model
from octavo.worker.gpu.captured_model import CapturedModel
from octavo.worker.gpu.graphs import GraphReplay, Outputs, StepGraphs
from octavo.worker.models import linear
from octavo.worker.models.decoder import Decoder
from octavo.worker.models.linear import LinearKind
from octavo.worker.sequences import WorkItem
from octavo.worker.step.batch import build_batch
from octavo.worker.step.forward import Paging
from octavo.worker.step.kv_cache import KVCache

LAYERS = 2
CONFIG = Qwen3Config(
    vocab_size=91,
    hidden_size=48,
    intermediate_size=56,
    num_hidden_layers=LAYERS,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=64,
    use_sliding_window=True,
    sliding_window=5,
    layer_types=["sliding_attention", "full_attention"],
)
PROMPTS = [[7], [3, 1, 4, 1, 5, 9]]
NUM_TOKENS, MAX_BATCH = 3, 2
# Of the embedding, and two of each layer.
SUMS = 1 + 2 * LAYERS


@dataclass
class Captures:
    """What each rank captures and replays, and the sums of the ranks within each capture."""

    captured: dict[int, list[tuple[int, int]]] = field(default_factory=lambda: {0: [], 1: []})
    replayed: dict[int, list[int]] = field(default_factory=lambda: {0: [], 1: []})
    # A rank (2: none) that cannot capture a size; then nothing is computed meanwhile, which takes long here.
    failing: tuple[int, int] | None = None

    def of(self, group: ThreadGroup) -> type[StepGraphs]:
        record = self

        class Graphs(StepGraphs):
            def _capture(self, size: int) -> GraphReplay:
                if record.failing == (group.rank, size):
                    raise RuntimeError("operation not permitted when stream is capturing")
                if record.failing is None:
                    record.captured[group.rank].append((size, self._sums_of(size)))

                def replay() -> Outputs:
                    record.replayed[group.rank].append(size)
                    return self._compute(size)

                return replay

            def _sums_of(self, size: int) -> int:
                """What is captured is not carried out, and waits for no other rank."""
                num_sums = 0

                def counted(tensor: Tensor) -> Tensor:
                    nonlocal num_sums
                    num_sums += 1
                    return tensor

                with pytest.MonkeyPatch.context() as patch:
                    patch.setattr(group, "all_reduce", counted)
                    self._compute(size)
                return num_sums

        return Graphs


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    write_tiny_model(directory, CONFIG)
    return directory


@pytest.fixture(autouse=True)
def _plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights lie on a CPU as they would on a GPU."""
    monkeypatch.setattr(linear, "best_kind", lambda weight: LinearKind.PLAIN)


def runner_of(directory: Path, captures: Captures, patch: pytest.MonkeyPatch, group: ThreadGroup) -> RankRunner:
    def make(model: Decoder, cache: KVCache, paging: Paging) -> CapturedModel:
        # No other rank runs before this one waits in its first step.
        patch.setattr(captured_model, "StepGraphs", captures.of(group))
        return CapturedModel(model, cache, paging, group, MAX_BATCH)

    return RankRunner(directory, group, make_attention=TritonAttention, make_paged=make)


def generated(make: Callable[[ThreadGroup], RankRunner]) -> list[list[int]]:
    first, other = run_ranks(2, lambda group: make(group).generate(PROMPTS, NUM_TOKENS))
    assert first == other
    return first


@pytest.fixture(scope="module")
def expected(directory: Path) -> list[list[int]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(linear, "best_kind", lambda weight: LinearKind.PLAIN)
        return generated(partial(RankRunner, directory, make_attention=TritonAttention))


def test_all_ranks_capture_their_sums_and_replay_every_decode_step(
    directory: Path, monkeypatch: pytest.MonkeyPatch, expected: list[list[int]]
) -> None:
    captures = Captures()
    assert generated(partial(runner_of, directory, captures, monkeypatch)) == expected
    assert captures.captured == {rank: [(size, SUMS) for size in (2, 1)] for rank in range(2)}
    # The first step computes prompts.
    assert captures.replayed == {rank: [2] * (NUM_TOKENS - 1) for rank in range(2)}


@pytest.mark.parametrize("failing", [(1, 1), *deep((0, 2))])
def test_if_one_rank_cannot_capture_a_step_none_replays_and_both_say_why(
    directory: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    expected: list[list[int]],
    failing: tuple[int, int],
) -> None:
    captures = Captures(failing=failing)
    assert generated(partial(runner_of, directory, captures, monkeypatch)) == expected
    assert captures.replayed == {0: [], 1: []}
    reasons = sorted(record.getMessage().split(": ")[1] for record in caplog.records)
    assert reasons == ["another rank cannot capture them", "operation not permitted when stream is capturing"]


def test_more_sequences_than_the_largest_graph_are_computed_as_they_come(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    captures = Captures(failing=(2, 0))

    def compute(group: ThreadGroup) -> None:
        runner = runner_of(directory, captures, monkeypatch, group)
        for count in (MAX_BATCH + 1, MAX_BATCH - 1):
            runner.logits(runner.sequences([[token] for token in range(count)], 0), [1] * count)

    run_ranks(2, compute)
    assert captures.replayed == {0: [1], 1: [1]}


def test_a_step_that_cannot_be_is_refused_before_any_rank_computes_it(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(group: ThreadGroup) -> int:
        runner = runner_of(directory, Captures(failing=(2, 0)), monkeypatch, group)
        [sequence] = runner.sequences([[5, 6]], 1)
        sequence.num_computed, sequence.block_tables[1][0] = 1, NULL_BLOCK
        batch = build_batch([next_item(sequence, 1)], 2, 16, torch.device("cpu"))
        before = group.num_reduces
        with pytest.raises(ValueError, match="no block where a query looks"):
            runner.paged.step(batch)
        return group.num_reduces - before

    assert run_ranks(2, refused) == [0, 0]


def test_only_the_wanted_rows_come_back_in_their_order(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sequence that chooses nothing yet stands before one that chooses."""

    def hidden(group: ThreadGroup, make: Any) -> Tensor:
        runner = make(group)
        watched, choosing = runner.sequences([[5, 6], [8]], 1)
        items = [WorkItem(watched, 0, 1, ()), WorkItem(choosing, 0, 1, (choosing,))]
        batch = build_batch(items, 2, 16, torch.device("cpu"))
        assert batch.logit_rows.rows == [1, 0]
        found: Tensor = runner.paged.forward(batch, runner.paged.step(batch)).clone()
        return found

    plain = partial(RankRunner, directory, make_attention=TritonAttention)
    captured = partial(runner_of, directory, Captures(failing=(2, 0)), monkeypatch)
    [expected, _], [found, _] = (run_ranks(2, partial(hidden, make=make)) for make in (plain, captured))
    assert torch.equal(found, expected)
