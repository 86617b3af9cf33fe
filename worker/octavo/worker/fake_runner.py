"""A model without arithmetic, for tests of everything around it: the next token is a hash of the whole history.

It keeps a real paged cache, though: tokens are written through the slot mapping and read back through the block table,
so a lost, repeated or misplaced token or a block given to two sequences changes every token that follows.
"""

import hashlib
import json
import struct
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from octavo.wire.model_directory import ModelDirectoryError, fingerprint, model_name
from octavo.wire.sampling import SamplingParams
from octavo.wire.steps import ModelInfo, StepTimes
from octavo.worker.runner import StepOutput
from octavo.worker.sequences import WorkerSequence, WorkItem

_EMPTY_SLOT = -1


@dataclass(frozen=True)
class FakeVocabulary:
    """The tokens a fake model may choose: all ids below `size` but `eos_token_ids`, of which the first is chosen with
    `eos_probability`."""

    size: int
    eos_token_ids: tuple[int, ...] = ()
    eos_probability: float = 0.0

    def __post_init__(self) -> None:
        if len(self.eos_token_ids) >= self.size:
            raise ValueError(f"a vocabulary of {self.size} tokens holds nothing but EOS tokens")
        if self.eos_probability and not self.eos_token_ids:
            raise ValueError("the model has no EOS token to be chosen with a probability")

    @classmethod
    def read(cls, directory: Path, eos_probability: float = 0.0) -> Self:
        """That of a model directory. Raises `ModelDirectoryError` if it cannot be told."""
        size = _positive(_read_json(directory / "config.json"), "vocab_size", directory)
        eos = {token for name in ("config.json", "generation_config.json") for token in _eos(directory / name)}
        return cls(size, tuple(sorted(token for token in eos if token < size)), eos_probability)

    def choose(self, history: bytes, sampling: SamplingParams, sequence_index: int) -> int:
        """The token after `history` (int32 ids). As in a real model, a greedy choice knows no seed and no index."""
        key = struct.pack("<QQ", sampling.seed, sequence_index) if sampling.temperature > 0 else b"greedy"
        digest = hashlib.blake2b(history, digest_size=16, key=key).digest()
        token_draw, eos_draw = struct.unpack("<QQ", digest)
        if eos_draw < self.eos_probability * 2**64:
            return self.eos_token_ids[0]
        token_id: int = token_draw % (self.size - len(self.eos_token_ids))
        for eos in self.eos_token_ids:
            token_id += token_id >= eos
        return token_id


def expected_tokens(
    prompt_ids: Sequence[int],
    sampling: SamplingParams,
    sequence_index: int,
    count: int,
    vocabulary: FakeVocabulary,
) -> list[int]:
    """The first `count` tokens any correct system generates from `prompt_ids` with the fake model."""
    history = array("i", prompt_ids)
    for _ in range(count):
        history.append(vocabulary.choose(history.tobytes(), sampling, sequence_index))
    return history[len(prompt_ids) :].tolist()


class FakeRunner:
    """`Runner` of the fake model; its cache is one int32 per slot. Every step takes `step_ms` longer than it must."""

    def __init__(
        self,
        directory: Path,
        *,
        block_size: int,
        num_blocks: int,
        max_model_len: int | None = None,
        step_ms: float = 0.0,
        eos_probability: float = 0.0,
    ) -> None:
        self._vocabulary = FakeVocabulary.read(directory, eos_probability)
        self._step_s = step_ms / 1000
        self._slots = array("i", [_EMPTY_SLOT]) * (num_blocks * block_size)
        longest = _positive(_read_json(directory / "config.json"), "max_position_embeddings", directory)
        self.model = ModelInfo(
            name=model_name(directory),
            fingerprint=fingerprint(directory),
            dtype="fake",
            vocab_size=self._vocabulary.size,
            max_model_len=min(longest, max_model_len or longest),
        )
        self.device = "fake"
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.kv_bytes_per_token = self._slots.itemsize

    def execute(self, items: list[WorkItem]) -> StepOutput:
        began = time.monotonic_ns()
        for item in items:
            self._write(item)
        written = time.monotonic_ns()
        time.sleep(self._step_s)
        slept = time.monotonic_ns()
        sampled = [self._sample(item.sequence) for item in items if item.samples]
        ended = time.monotonic_ns()
        times = StepTimes((written - began) // 1000, (slept - written) // 1000, (ended - slept) // 1000)
        return StepOutput(sampled, times)

    def _write(self, item: WorkItem) -> None:
        sequence = item.sequence
        for position in range(item.start, item.start + item.num_tokens):
            block, offset = divmod(position, self.block_size)
            self._slots[sequence.block_ids[block] * self.block_size + offset] = sequence.token_ids[position]

    def _sample(self, sequence: WorkerSequence) -> int:
        size = self.block_size
        blocks = (self._slots[block * size : (block + 1) * size].tobytes() for block in sequence.block_ids)
        history = b"".join(blocks)[: len(sequence.token_ids) * self._slots.itemsize]
        return self._vocabulary.choose(history, sequence.sampling, sequence.sequence_index)


def _eos(path: Path) -> list[int]:
    value = _read_json(path).get("eos_token_id") if path.is_file() else None
    return [value] if isinstance(value, int) else list(value or [])


def _positive(config: dict[str, Any], name: str, directory: Path) -> int:
    value = config.get(name)
    if not isinstance(value, int) or value < 1:
        raise ModelDirectoryError(f"{directory}/config.json has no positive {name}; the fake device needs it")
    return value


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ModelDirectoryError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(content, dict):
        raise ModelDirectoryError(f"{path} holds no JSON object")
    return content
