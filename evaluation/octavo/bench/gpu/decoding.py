"""Drives a runner in this process whose sequences decode, two steps in flight, as the worker's loop drives it."""

import itertools
import random
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Self

from octavo.bench.gpu.caches import fill
from octavo.bench.gpu.machine import GpuMachine
from octavo.bench.gpu.served.loads import write_model
from octavo.bench.gpu.shapes import DecoderShape
from octavo.wire.sampling import SamplingParams
from octavo.wire.steps import BlockMoves
from octavo.worker.model_settings import ModelSettings
from octavo.worker.runner import LaunchedStep
from octavo.worker.sequences import PENDING_TOKEN, WorkerSequence, WorkItem
from octavo.worker.step.model_runner import ModelRunner

NO_MOVES = BlockMoves()
_GREEDY = SamplingParams(max_tokens=1 << 20)
_WARM_UP_STEPS = 8
_ids = itertools.count(1)


class LocalRunner:
    """Runs a model of random weights, whose blocks hold random keys and values."""

    def __init__(self, machine: GpuMachine, model: str, **settings: Any) -> None:
        self.model = DecoderShape.read(model)
        with TemporaryDirectory(prefix="octavo-") as directory:
            self.runner = ModelRunner(
                write_model(model, Path(directory)),
                ModelSettings(load_format="dummy", block_size=self.model.attention.block_size, **settings),
                device=machine.device.type,
            )
        fill(self.runner._kv_cache)

    def close(self) -> None:
        del self.runner


class Decoding:
    """Decodes `num_sequences` with `context` tokens on average over `num_steps` steps; `idle_blocks` are nobody's. Each
    step also computes `chunk` tokens of one long prompt. Raises `ValueError` if there are too few blocks."""

    def __init__(self, local: LocalRunner, num_sequences: int, context: int, num_steps: int, *, chunk: int = 0) -> None:
        self._runner = local.runner
        self._num_steps = num_steps
        steps = _WARM_UP_STEPS + num_steps + 1
        first = max(1, context - _WARM_UP_STEPS - num_steps // 2)
        width = -(-(first + steps + 1) // local.runner.block_size)
        order = random.Random(0).sample(range(local.runner.num_blocks), local.runner.num_blocks)
        if num_sequences * width > len(order):
            raise ValueError(f"{num_sequences} sequences of {width} blocks do not fit into {len(order)} blocks")
        self.idle_blocks = order[num_sequences * width :]
        blocks = iter(order)
        self._chunk = chunk
        self._prompt: WorkerSequence | None = None
        if chunk:
            # All of it must have a block, and something must be left of it at the end.
            count = -(-(steps * chunk + 1) // local.runner.block_size)
            self._prompt = new_prompt(local, steps * chunk + 1, self.idle_blocks[:count])
        self._sequences = [
            _sequence(first, list(itertools.islice(blocks, width)), local.model.vocab_size)
            for _ in range(num_sequences)
        ]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        prompts = [self._prompt] if self._prompt else []
        self._runner.forget([sequence.sequence_id for sequence in (*self._sequences, *prompts)])

    def step_times(self, moves: BlockMoves = NO_MOVES) -> list[float]:
        """Measures the seconds from result to result, step by step, with `moves` in each step."""
        times = list[float]()
        step, previous = self._launch(NO_MOVES), time.perf_counter()
        for number in range(_WARM_UP_STEPS + self._num_steps):
            # What computes a step before its launch comes back knows no pending tokens.
            known = step.ready()
            if known:
                self._record(step)
            following = self._launch(moves)
            if not known:
                self._record(step)
            now = time.perf_counter()
            if number >= _WARM_UP_STEPS:
                times.append(now - previous)
            step, previous = following, now
        self._record(step)
        return times

    def _launch(self, moves: BlockMoves) -> LaunchedStep:
        items = [WorkItem(each, each.num_computed, 1, (each,)) for each in self._sequences]
        if prompt := self._prompt:
            items.append(WorkItem(prompt, prompt.num_computed, self._chunk, ()))
            prompt.num_computed += self._chunk
        step = self._runner.launch(moves, items)
        for sequence in self._sequences:
            sequence.num_computed += 1
            sequence.token_ids.append(PENDING_TOKEN)
        return step

    def _record(self, step: LaunchedStep) -> None:
        """Raises `RuntimeError` if a sequence has failed."""
        output = step.output()
        if output.failed:
            raise RuntimeError(f"{len(output.failed)} sequences failed: {output.failed[0].detail}")
        for sequence, token in zip(self._sequences, output.sampled, strict=True):
            sequence.token_ids[sequence.token_ids.index(PENDING_TOKEN, sequence.prompt_length)] = token.token_id


def _sequence(length: int, block_ids: list[int], vocab_size: int) -> WorkerSequence:
    """Makes a sequence in `block_ids` all of whose tokens but the last count as computed."""
    number = next(_ids)
    tokens = random.Random(number).choices(range(vocab_size), k=length)
    return WorkerSequence(number, 0, _GREEDY, length, tokens, length - 1, [block_ids])


def new_prompt(local: LocalRunner, length: int, block_ids: list[int]) -> WorkerSequence:
    """Makes a sequence with a prompt of `length` tokens, none of which is computed. Raises `ValueError` if there are
    too few blocks."""
    if len(block_ids) * local.runner.block_size < length:
        raise ValueError(f"a prompt of {length} tokens does not fit into {len(block_ids)} blocks")
    number = next(_ids)
    tokens = random.Random(number).choices(range(local.model.vocab_size), k=length)
    return WorkerSequence(number, 0, _GREEDY, length, tokens, 0, [block_ids])


def prefill_s(local: LocalRunner, length: int, count: int, step_tokens: int) -> float:
    """Seconds from the first launch until `count` prompts of `length` tokens have their first token, in steps of up to
    `step_tokens`."""
    width = -(-length // local.runner.block_size)
    prompts = [new_prompt(local, length, list(range(number * width, (number + 1) * width))) for number in range(count)]
    began = time.perf_counter()
    steps = list[LaunchedStep]()
    while pending := [prompt for prompt in prompts if prompt.num_computed < length]:
        items, left = list[WorkItem](), step_tokens
        for prompt in pending:
            size = min(left, length - prompt.num_computed)
            if size:
                whole = prompt.num_computed + size == length
                items.append(WorkItem(prompt, prompt.num_computed, size, (prompt,) if whole else ()))
                prompt.num_computed += size
                left -= size
        steps.append(local.runner.launch(NO_MOVES, items))
    outputs = [step.output() for step in steps]
    seconds = time.perf_counter() - began
    if failed := [failure for output in outputs for failure in output.failed]:
        raise RuntimeError(f"{len(failed)} prompts failed: {failed[0].detail}")
    local.runner.forget([prompt.sequence_id for prompt in prompts])
    return seconds
