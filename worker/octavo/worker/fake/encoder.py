"""A fake encoder, for tests of everything around one: its output is a hash of all of a text's tokens."""

import hashlib
import time
from array import array
from collections.abc import Iterable, Sequence
from pathlib import Path

from octavo.runtime.models.directory import fingerprint, model_name
from octavo.wire.pooling import PooledOutput, PoolingModel, PoolingTask
from octavo.wire.steps import BlockMoves, KVGroup, ModelInfo, StepTimes
from octavo.worker.fake.config import read_positive
from octavo.worker.fake.faults import FakeFault, FakeFaults
from octavo.worker.kv_store.identity import StoreIdentity
from octavo.worker.kv_store.loan import Payload
from octavo.worker.models.encoders.families import classifies
from octavo.worker.runner import BlockContents, DoneStep, Settle, StepOutput, nothing_pending
from octavo.worker.sequences import WorkItem
from octavo.worker.step.failures import not_finite

FAKE_OUTPUTS = 8
_NO_BLOCKS = "an encoder keeps no keys and values"


def expected_output(token_ids: Sequence[int], pair_start: int = 0, num_outputs: int = FAKE_OUTPUTS) -> bytes:
    """Returns the output that any correct system gives of a text with the fake encoder."""
    key = pair_start.to_bytes(8, "little")
    digest = hashlib.blake2b(array("i", token_ids).tobytes(), digest_size=2 * num_outputs, key=key).digest()
    return array("f", (value / 65536 for value in array("H", digest))).tobytes()


class FakeEncoderRunner:
    """The `Runner` of the fake encoder: a vector of `FAKE_OUTPUTS` numbers, or for a classifier the score of one class.
    Every step takes `step_ms` longer than it must. Raises `ValueError` for a text that is not computed whole."""

    device = kernels = "fake"
    num_blocks = num_cpu_blocks = 0
    kv_bytes_per_token = 0
    kv_cache_dtype = "none"
    world_size = 1
    draft_model: str | None = None

    def __init__(
        self,
        directory: Path,
        *,
        block_size: int,
        max_model_len: int | None = None,
        step_ms: float = 0.0,
        load_format: str = "auto",
        faults: tuple[FakeFault, ...] = (),
    ) -> None:
        self.block_size = block_size
        self.kv_groups: list[KVGroup] = []
        self._step_s = step_ms / 1000
        self._faults = FakeFaults(faults)
        longest = read_positive(directory, "max_position_embeddings")
        is_classifier = classifies(directory)
        self._num_outputs = 1 if is_classifier else FAKE_OUTPUTS
        task = PoolingTask.CLASSIFY if is_classifier else PoolingTask.EMBED
        self.model = ModelInfo(
            name=model_name(directory),
            fingerprint=fingerprint(directory, load_format),
            dtype="fake",
            vocab_size=read_positive(directory, "vocab_size"),
            max_model_len=min(longest, max_model_len or longest),
            pooling=PoolingModel(task, self._num_outputs),
        )

    def launch(self, moves: BlockMoves, items: list[WorkItem], settle: Settle = nothing_pending) -> DoneStep:
        return DoneStep(self.execute(moves, items))

    def execute(self, moves: BlockMoves, items: list[WorkItem]) -> StepOutput:
        if moves:
            raise ValueError(_NO_BLOCKS)
        began = time.monotonic_ns()
        spoiled = [not_finite(each.sequence_id) for each in self._faults.strike(items)]
        if self._step_s:
            time.sleep(self._step_s)
        pooled = [self._output(item) for item in items]
        times = StepTimes(0, (time.monotonic_ns() - began) // 1000, 0)
        return StepOutput([], [], [], [], times, pooled=pooled).without(spoiled)

    def _output(self, item: WorkItem) -> PooledOutput:
        sequence, pooling = item.sequence, item.sequence.pooling
        if pooling is None or item.start or item.num_tokens != len(sequence.token_ids):
            raise ValueError(f"{sequence} is not computed whole for an output")
        values = expected_output(sequence.token_ids, pooling.pair_start, self._num_outputs)
        return PooledOutput(sequence.sequence_id, values)

    def forget(self, sequence_ids: Iterable[int]) -> None:
        """Does nothing: nothing is kept of a text."""

    @property
    def kv_identity(self) -> StoreIdentity:
        raise ValueError(_NO_BLOCKS)

    def read_blocks(self, block_ids: Sequence[int]) -> BlockContents:
        raise ValueError(_NO_BLOCKS)

    def fill_cpu_block(self, block_id: int, payload: Payload) -> None:
        raise ValueError(_NO_BLOCKS)

    def peek_blocks(self, block_ids: Sequence[int], *, in_cpu: bool) -> list[Payload] | None:
        return None
