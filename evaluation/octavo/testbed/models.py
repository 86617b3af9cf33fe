"""Makes small random models, and drives a runner without a scheduler."""

import itertools
import random
from pathlib import Path
from typing import Any

import torch

from octavo.wire.base import NULL_BLOCK
from octavo.wire.sampling import SamplingParams
from octavo.wire.steps import BlockMoves
from octavo.worker.model_settings import DEFAULT_BLOCK_SIZE, ModelSettings
from octavo.worker.models.decoder import PagedStep
from octavo.worker.runner import Runner, StepOutput
from octavo.worker.sequences import WorkerSequence, WorkItem
from octavo.worker.step.executor import Executor
from octavo.worker.step.model_runner import ModelRunner
from octavo.worker.tensor_parallel.group import SINGLE, ShardGroup
from octavo.worker.tensor_parallel.leader import NO_FOLLOWERS, Followers

NO_MOVES = BlockMoves()
GREEDY = SamplingParams(max_tokens=1 << 20)


def write_tiny_model(directory: Path, config: Any) -> Any:
    """Saves a random model of `config` (a transformers configuration) to `directory`, and returns it as the
    transformers model in fp32."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    from_config: Any = AutoModelForCausalLM.from_config
    model = from_config(config).eval()
    for parameter in model.parameters():
        # The default initialisation gives logits so alike that nothing could be told apart.
        torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(directory)
    return model


def transformers_greedy(model: Any, prompt: list[int], num_tokens: int) -> list[int]:
    """Returns what `generate` of transformers continues `prompt` with, greedily and past any EOS."""
    output = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        max_new_tokens=num_tokens,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    token_ids: list[int] = output[0, len(prompt) :].tolist()
    return token_ids


def fp32_runner(
    directory: Path, *, group: ShardGroup = SINGLE, followers: Followers = NO_FOLLOWERS, **options: Any
) -> ModelRunner:
    """Makes a runner in fp32 with room for 4,096 tokens unless `options`, fields of its settings, say otherwise."""
    room = {"num_blocks": 4096 // options.get("block_size", DEFAULT_BLOCK_SIZE)}
    settings = ModelSettings(dtype="float32", **room | options)
    return ModelRunner(directory, settings, group=group, followers=followers)


def new_sequences(
    runner: Runner, prompts: list[list[int]], room: int, sampling: SamplingParams = GREEDY
) -> list[WorkerSequence]:
    """Makes sequences for `prompts` with blocks, in shuffled order, for `room` more tokens each."""
    shuffled = list(range(runner.num_blocks))
    random.Random(0).shuffle(shuffled)
    free = iter(shuffled)
    sequences = []
    for index, prompt in enumerate(prompts):
        width = -(-(len(prompt) + room) // runner.block_size)
        tables = [list(itertools.islice(free, width)) for _ in runner.kv_groups]
        assert len(tables[-1]) == width, "the test asks for more blocks than its runner has"
        sequences.append(WorkerSequence(index, 0, sampling, len(prompt), list(prompt), 0, tables))
    return sequences


def next_item(sequence: WorkerSequence, num_tokens: int, *followers: WorkerSequence) -> WorkItem:
    """Makes the work on the sequence's next `num_tokens` tokens."""
    reached = sequence.num_computed + num_tokens == len(sequence.token_ids)
    return WorkItem(sequence, sequence.num_computed, num_tokens, (sequence, *followers) if reached else ())


def last_logits(runner: ModelRunner, prompt: list[int]) -> torch.Tensor:
    """Computes the logits after `prompt`, [vocab_size], in one step."""
    [sequence] = new_sequences(runner, [prompt], 0)
    with torch.inference_mode():
        hidden = runner._model.forward(paged_step(runner, [next_item(sequence, len(prompt))]))
        # The next call may write to the same memory.
        return runner._model.logits(hidden)[0].clone()


def paged_step(runner: ModelRunner, items: list[WorkItem]) -> PagedStep:
    """Makes the model's inputs of one step on the CPU."""
    executor = runner.executor
    assert isinstance(executor, Executor)
    return executor.paged_step(executor.batch(items))


def run_items(runner: Runner, items: list[WorkItem], moves: BlockMoves = NO_MOVES) -> StepOutput:
    """Runs one step; its results are recorded in the sequences, which then let go of blocks that a window has
    passed."""
    output = runner.execute(moves, items)
    sampled = iter(output.sampled)
    for item in items:
        for sequence in item.choosers or (item.sequence,):
            sequence.num_computed += item.num_tokens
            drop_passed_blocks(runner, sequence)
        for chooser in item.choosers:
            chooser.token_ids.append(next(sampled).token_id)
    return output


def run_step(runner: Runner, sequences: list[WorkerSequence], budget: int) -> StepOutput:
    """Runs one step over `sequences` in order, each given what is left of `budget` tokens."""
    items = []
    for sequence in sequences:
        num_tokens = min(len(sequence.token_ids) - sequence.num_computed, budget)
        if num_tokens:
            budget -= num_tokens
            items.append(next_item(sequence, num_tokens))
    return run_items(runner, items)


def drop_passed_blocks(runner: Runner, sequence: WorkerSequence) -> None:
    """Takes the blocks out of the sequence's tables that no later token attends to."""
    for group, table in zip(runner.kv_groups, sequence.block_tables, strict=True):
        if group.window:
            passed = max(0, sequence.num_computed + 1 - group.window) // runner.block_size
            table[:passed] = [NULL_BLOCK] * passed


def finish(runner: Runner, sequences: list[WorkerSequence], num_tokens: int, budget: int = 2048) -> list[list[int]]:
    """Runs all to `num_tokens` generated ids each, in steps of at most `budget` tokens; these ids."""
    while live := [sequence for sequence in sequences if sequence.num_generated < num_tokens]:
        run_step(runner, live, budget)
    return [sequence.token_ids[sequence.prompt_length :] for sequence in sequences]


def generate(
    runner: Runner,
    prompts: list[list[int]],
    num_tokens: int,
    *,
    budget: int = 2048,
    sampling: SamplingParams = GREEDY,
) -> list[list[int]]:
    """Generates `num_tokens` ids per prompt, all prompts together."""
    return finish(runner, new_sequences(runner, prompts, num_tokens, sampling), num_tokens, budget)
