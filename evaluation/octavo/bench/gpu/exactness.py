"""Measures whether a token's bits depend on what it is computed with, where they must not (D1)."""

import random
from functools import partial
from typing import TYPE_CHECKING, Any

from octavo.bench.gpu.cases import CaseResult, Goal, GpuCase, HeldModel
from octavo.bench.gpu.machine import GpuMachine
from octavo.bench.gpu.shapes import SMALL_MODEL, TINY_MODEL, DecoderShape
from octavo.bench.gpu.steps import LOCAL_MODULES

if TYPE_CHECKING:
    from octavo.bench.gpu.decoding import LocalRunner
    from octavo.worker.sequences import WorkerSequence

_EQUAL = Goal("tokens and logprobs equal, bit by bit, to those alone", "%", 100, 100, at_least=True)
# Tokens of a step where prompts are cut into chunks.
_CHUNK = 37
Chosen = list[tuple[int, float]]


def cases(*, quick: bool) -> list[GpuCase]:
    model, num_prompts, num_tokens = (TINY_MODEL, 3, 6) if quick else (SMALL_MODEL, 8, 64)
    held = HeldModel(f"runner {model}, exact", 30.0)
    return [
        GpuCase(
            "D1",
            f"bits, {model}, {num_prompts} prompts",
            _EQUAL,
            partial(_equal_bits, model=model, num_prompts=num_prompts, num_tokens=num_tokens, held=held),
            seconds=30.0,
            held=held,
            modules=LOCAL_MODULES,
        )
    ]


def _equal_bits(machine: GpuMachine, *, model: str, num_prompts: int, num_tokens: int, held: HeldModel) -> CaseResult:
    from octavo.bench.gpu.decoding import LocalRunner

    def make() -> LocalRunner:
        return LocalRunner(machine, model, num_blocks=2048, num_cpu_blocks=0, max_model_len=2048, numerics="exact")

    local = machine.hold(held, make)
    prompts = draw_prompts(num_prompts, DecoderShape.read(model).vocab_size)
    alone = [_continued(local, [prompt], num_tokens)[0] for prompt in prompts]
    company = {
        "together": _continued(local, prompts, num_tokens),
        "in chunks": [_continued(local, [prompt], num_tokens, budget=_CHUNK)[0] for prompt in prompts],
        "together, in chunks": _continued(local, prompts, num_tokens, budget=_CHUNK + num_prompts),
        "recomputed half-way": _recomputed(local, prompts, alone, num_tokens),
    }
    shares: dict[str, float | str] = {name: 100 * equal_share(found, alone) for name, found in company.items()}
    return CaseResult(min(float(share) for share in shares.values()), notes=shares)


def draw_prompts(count: int, vocab_size: int) -> list[list[int]]:
    """Draws prompts of rising lengths that end in the middle of blocks and at their borders."""
    rng = random.Random("exact")
    return [rng.choices(range(vocab_size), k=16 * number + number % 3) for number in range(1, count + 1)]


def equal_share(found: list[Chosen], alone: list[Chosen]) -> float:
    """Returns the share of all tokens that are the same, with the same logprob."""
    pairs = [pair for row, row_alone in zip(found, alone, strict=True) for pair in zip(row, row_alone, strict=True)]
    return sum(a == b for a, b in pairs) / len(pairs)


def _continued(local: "LocalRunner", prompts: list[list[int]], num_tokens: int, budget: int = 8192) -> list[Chosen]:
    """Generates `num_tokens` greedy tokens after each of the prompts, all at once, in steps of at most `budget`
    tokens."""
    from octavo.testbed.models import new_sequences

    sequences = new_sequences(local.runner, prompts, num_tokens, _sampling())
    return _finish(local, sequences, num_tokens, budget)


def _recomputed(local: "LocalRunner", prompts: list[list[int]], alone: list[Chosen], num_tokens: int) -> list[Chosen]:
    """Continues sequences as preemption by recompute does: prompt and generated tokens come back as one prompt, all at
    once."""
    from octavo.testbed.models import new_sequences

    half = num_tokens // 2
    kept = [chosen[:half] for chosen in alone]
    longer = [[*prompt, *(token for token, _ in first)] for prompt, first in zip(prompts, kept, strict=True)]
    sequences = new_sequences(local.runner, longer, num_tokens, _sampling())
    for sequence, prompt in zip(sequences, prompts, strict=True):
        sequence.prompt_length = len(prompt)
    rest = _finish(local, sequences, num_tokens - half, budget=8192)
    return [first + second for first, second in zip(kept, rest, strict=True)]


def _finish(local: "LocalRunner", sequences: "list[WorkerSequence]", num_tokens: int, budget: int) -> list[Chosen]:
    from octavo.testbed.models import run_step

    chosen: dict[int, Chosen] = {sequence.sequence_id: [] for sequence in sequences}
    while live := [each for each in sequences if len(chosen[each.sequence_id]) < num_tokens]:
        # Decodes first: a long prompt must not keep them waiting for ever.
        live.sort(key=lambda each: len(each.token_ids) - each.num_computed)
        for token in run_step(local.runner, live, budget).sampled:
            assert token.logprobs is not None
            chosen[token.sequence_id].append((token.token_id, token.logprobs.logprob))
    local.runner.forget(list(chosen))
    return list(chosen.values())


def _sampling() -> Any:
    from octavo.wire.sampling import SamplingParams

    return SamplingParams(max_tokens=1 << 20, logprobs=0)
