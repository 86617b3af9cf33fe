"""`EncoderRunner`: the `Runner` of an encoder, which keeps nothing between steps and computes every text whole."""

import logging
import time
from collections.abc import Iterable, Sequence
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor

from octavo.runtime.models.directory import fingerprint, model_name
from octavo.wire.pooling import PooledOutput, PoolingModel, PoolingTask
from octavo.wire.steps import BlockMoves, KVGroup, ModelInfo, SequenceFailure, StepTimes
from octavo.worker.kv_store.identity import StoreIdentity
from octavo.worker.kv_store.loan import Payload
from octavo.worker.loading.load_format import open_weights, release_free_memory
from octavo.worker.loading.weights import WeightSource
from octavo.worker.model_settings import ModelSettings
from octavo.worker.models.config_file import ModelConfigError
from octavo.worker.models.encoders.compiled import CompiledEncoder, compiled_encoder
from octavo.worker.models.encoders.config import encoder_config, read_file
from octavo.worker.models.encoders.encoder import EncoderModel, TextBatch
from octavo.worker.models.encoders.families import has_classes
from octavo.worker.pooling.heads import EmbeddingHead, Head, classifier_head
from octavo.worker.pooling.sentence_files import read_pooling
from octavo.worker.runner import BlockContents, DoneStep, Settle, StepOutput, nothing_pending
from octavo.worker.sequences import WorkItem
from octavo.worker.step.failures import not_finite

logger = logging.getLogger(__name__)

_DTYPES = {"auto": torch.float32, "float32": torch.float32, "bfloat16": torch.bfloat16}
# What heads on language modelling leave behind, of which a vector takes nothing.
_UNUSED = ("pooler.", "cls.", "lm_head.", "decoder.", "head.", "classifier.", "qa_outputs.")
_NO_BLOCKS = "an encoder keeps no keys and values"


class EncoderRunner:
    """The `octavo.worker.runner.Runner` of the encoder in `directory`, on a CPU.

    It has no blocks, so plans move none. `--dtype auto` is float32, as vectors are compared with others that were made
    so. Raises `ModelConfigError` or `WeightsError`.
    """

    device = "cpu"
    num_blocks = num_cpu_blocks = 0
    kv_bytes_per_token = 0
    kv_cache_dtype = "none"
    world_size = 1
    draft_model: str | None = None

    def __init__(self, directory: Path, settings: ModelSettings) -> None:
        if reason := _obstacle(settings):
            raise ModelConfigError(f"{directory} is an encoder: {reason}")
        if settings.threads is not None:
            torch.set_num_threads(settings.threads)
        self.block_size = settings.block_size
        self.kv_groups: list[KVGroup] = []
        file = read_file(directory)
        source = open_weights(directory, settings.load_format)
        dtype = _DTYPES[settings.dtype]
        classifies = has_classes(file.architectures) and settings.pooling == "auto"
        with torch.inference_mode():
            config = encoder_config(file)
            pooling = None if classifies else read_pooling(directory, settings.pooling)
            longest = config.max_model_len
            if pooling is not None and pooling.max_tokens is not None:
                longest = min(longest, pooling.max_tokens)
            config = encoder_config(file, settings.max_model_len or longest)
            model = EncoderModel(config, source, dtype)
            self._head: Head
            if pooling is None:
                self._head = classifier_head(file, config, source, model.prefix or "")
            else:
                self._head = EmbeddingHead(pooling, config.hidden_size)
            _drop_unused(source)
            source.finish()
            self._encoder = compiled_encoder(model)
        release_free_memory()
        self.kernels = "native" if isinstance(self._encoder, CompiledEncoder) else "torch"
        task = PoolingTask.CLASSIFY if classifies else PoolingTask.EMBED
        self.model = ModelInfo(
            name=model_name(directory),
            fingerprint=fingerprint(directory, settings.load_format),
            dtype=str(dtype).removeprefix("torch."),
            vocab_size=config.vocab_size,
            max_model_len=config.max_model_len,
            pooling=PoolingModel(task, self._head.num_outputs),
        )

    def launch(self, moves: BlockMoves, items: list[WorkItem], settle: Settle = nothing_pending) -> DoneStep:
        """Computes `items`, each a whole text. Raises `ValueError` on one that is not."""
        return DoneStep(self.execute(moves, items))

    @torch.inference_mode()
    def execute(self, moves: BlockMoves, items: list[WorkItem]) -> StepOutput:
        began = time.monotonic_ns()
        if moves:
            raise ValueError(_NO_BLOCKS)
        if not items:
            return StepOutput([], [], [], [], StepTimes(0, 0, 0))
        batch = text_batch(items)
        prepared = time.monotonic_ns()
        hidden = self._encoder.forward(batch)
        computed = time.monotonic_ns()
        pooled, failed = pool(self._head, hidden, batch, items)
        times = StepTimes(
            (prepared - began) // 1000, (computed - prepared) // 1000, (time.monotonic_ns() - computed) // 1000
        )
        return StepOutput([], [], [], failed, times, pooled=pooled)

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


def text_batch(items: Sequence[WorkItem]) -> TextBatch:
    """Puts whole texts side by side. Raises `ValueError` on an item that is a part of one, or asks for no output."""
    token_ids: list[int] = []
    types: list[int] = []
    for item in items:
        sequence = item.sequence
        if sequence.pooling is None or item.start or item.num_tokens != len(sequence.token_ids):
            raise ValueError(f"{sequence} is not computed whole for an output, as an encoder computes its texts")
        first = sequence.pooling.pair_start or item.num_tokens
        token_ids += sequence.token_ids
        types += [0] * first + [1] * (item.num_tokens - first)
    lengths = [item.num_tokens for item in items]
    firsts = torch.tensor([0, *accumulate(lengths[:-1])])
    positions = torch.arange(len(token_ids)) - firsts.repeat_interleave(torch.tensor(lengths))
    return TextBatch(torch.tensor(token_ids), positions, torch.tensor(types), lengths)


def pool(
    head: Head, hidden: Tensor, batch: TextBatch, items: Sequence[WorkItem]
) -> tuple[list[PooledOutput], list[SequenceFailure]]:
    """Makes the outputs of all texts; those that are not finite have failed."""
    outputs = head(hidden.float(), batch.lengths)
    finite, rows = torch.isfinite(outputs).all(1).tolist(), outputs.numpy().astype("<f4", copy=False)
    ids = [item.sequence.sequence_id for item in items]
    pooled = [PooledOutput(each, row.tobytes()) for each, row, fine in zip(ids, rows, finite, strict=True) if fine]
    failed = [not_finite(each) for each, fine in zip(ids, finite, strict=True) if not fine]
    return pooled, failed


def _drop_unused(source: WeightSource) -> None:
    for name in source.shapes():
        bare = name.removeprefix("bert.").removeprefix("roberta.")
        if bare.startswith(_UNUSED):
            source.drop(name)


def _obstacle(settings: ModelSettings) -> str | None:
    """Returns which setting means nothing for an encoder, and a remedy; None if all do."""
    for option, value, plain in (
        ("--device", settings.device, "cpu"),
        ("--tp", settings.tp, 1),
        ("--quantization", settings.quantization, "none"),
        ("--draft-model", settings.draft_model, None),
        ("--kv-cache-dtype", settings.kv_cache_dtype, "auto"),
    ):
        if value != plain:
            return f"{option} {value} is not for one; leave it out"
    if settings.pooling == "none":
        return "it generates nothing; leave --pooling none out"
    if settings.dtype not in _DTYPES:
        return f"it is computed in float32 or bfloat16, not in {settings.dtype}"
    return None
