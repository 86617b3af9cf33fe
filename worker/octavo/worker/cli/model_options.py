"""The flags that say which model a worker computes, where, and with how much memory for its KV blocks."""

from collections.abc import Callable
from typing import Any

import click

from octavo.runtime.models.directory import BUNDLED_MODEL, LOAD_FORMATS
from octavo.wire.steps import MAX_BLOCK_SIZE
from octavo.worker.config import (
    DEFAULT_BLOCK_SIZE,
    DEFAULT_FAKE_BLOCKS,
    MAX_RANKS,
    MODEL_IMPLS,
    NUMERICS,
    parse_memory,
    parse_windows,
)
from octavo.worker.fake.faults import parse_faults


def _parsed(parse: Callable[[str], object]) -> Callable[[click.Context, click.Parameter, str | None], object]:
    """An option's callback that reads its text with `parse`; no text stays None."""

    def callback(context: click.Context, parameter: click.Parameter, text: str | None) -> object:
        try:
            return None if text is None else parse(text)
        except ValueError as error:
            raise click.BadParameter(str(error), context, parameter) from error

    return callback


_OPTIONS = (
    click.option(
        "--model",
        envvar="OCTAVO_MODEL",
        default=BUNDLED_MODEL,
        show_default=True,
        help="Model directory, the bundled model's name, or a model of the Hugging Face hub as org/name[@revision].",
    ),
    click.option(
        "--load-format",
        envvar="OCTAVO_LOAD_FORMAT",
        type=click.Choice(LOAD_FORMATS),
        default="auto",
        show_default=True,
        help="Where weights come from: safetensors (auto), or dummy: random numbers, no weight file needed.",
    ),
    click.option(
        "--model-impl",
        envvar="OCTAVO_MODEL_IMPL",
        type=click.Choice(MODEL_IMPLS),
        default="auto",
        show_default=True,
        help="Who computes the model: Octavo itself (native), transformers, or the first of them that can (auto).",
    ),
    click.option(
        "--device",
        envvar="OCTAVO_DEVICE",
        type=click.Choice(["cpu", "cuda", "fake"]),
        default="cpu",
        show_default=True,
        help="Where to compute. `fake` computes no model: it hashes tokens, to test everything around one.",
    ),
    click.option(
        "--dtype",
        envvar="OCTAVO_DTYPE",
        type=click.Choice(["auto", "float32", "bfloat16", "float16"]),
        default="auto",
        show_default=True,
        help="Type of the computation, and of the KV cache.",
    ),
    click.option(
        "--kv-cache-dtype",
        envvar="OCTAVO_KV_CACHE_DTYPE",
        type=click.Choice(["auto", "fp8"]),
        default="auto",
        show_default=True,
        help="Another type for the KV cache: fp8 (e4m3) holds twice as many tokens as bfloat16, on a GPU.",
    ),
    click.option(
        "--numerics",
        envvar="OCTAVO_NUMERICS",
        type=click.Choice(NUMERICS),
        default="default",
        show_default=True,
        help="exact: a request's tokens and logprobs never depend on what runs beside it (float32 on a CPU); refused"
        " where that cannot be kept.",
    ),
    click.option(
        "--block-size",
        envvar="OCTAVO_BLOCK_SIZE",
        type=click.IntRange(1, MAX_BLOCK_SIZE),
        default=DEFAULT_BLOCK_SIZE,
        show_default=True,
        help="Tokens in a KV block.",
    ),
    click.option(
        "--kv-cache-memory",
        envvar="OCTAVO_KV_CACHE_MEMORY",
        metavar="SIZE",
        callback=_parsed(parse_memory),
        help="Memory for KV blocks: bytes, or with KiB, MiB or GiB. [default: the device decides]",
    ),
    click.option(
        "--num-blocks",
        envvar="OCTAVO_NUM_BLOCKS",
        type=click.IntRange(1, 2**31 - 1),
        help=f"Exact number of KV blocks; wins over --kv-cache-memory. [default: {DEFAULT_FAKE_BLOCKS} on fake]",
    ),
    click.option(
        "--swap-memory",
        envvar="OCTAVO_SWAP_MEMORY",
        metavar="SIZE",
        callback=_parsed(parse_memory),
        help="CPU memory for swapped-out KV blocks, like --kv-cache-memory; 0: none. [default: a quarter as many"
        " blocks]",
    ),
    click.option(
        "--num-cpu-blocks",
        envvar="OCTAVO_NUM_CPU_BLOCKS",
        type=click.IntRange(0, 2**31 - 1),
        help="Exact number of blocks in CPU memory, at most as many as KV blocks; wins over --swap-memory.",
    ),
    click.option(
        "--max-model-len",
        envvar="OCTAVO_MAX_MODEL_LEN",
        type=click.IntRange(1),
        help="Longest sequence, in tokens, where less than the model's.",
    ),
    click.option(
        "--threads", envvar="OCTAVO_THREADS", type=click.IntRange(1), help="CPU threads. [default: the device decides]"
    ),
    click.option(
        "--tp",
        envvar="OCTAVO_TP",
        type=click.IntRange(1, MAX_RANKS),
        default=1,
        show_default=True,
        help="Ranks that share the model (tensor parallel): processes on this machine, one GPU each if on GPUs. Memory"
        " is that of all together, --threads those of each.",
    ),
    click.option(
        "--tp-rank",
        envvar="OCTAVO_TP_RANK",
        type=click.IntRange(0, MAX_RANKS - 1),
        help="Which of the ranks this one is, where they run on several machines. [default: 0, which starts the"
        " others]",
    ),
    click.option(
        "--tp-rendezvous",
        envvar="OCTAVO_TP_RENDEZVOUS",
        metavar="HOST:PORT",
        help="Where ranks on several machines meet: a free port at rank 0's address. What they send each other is not"
        " encrypted: only they may reach it.",
    ),
    click.option(
        "--gpu-memory-utilization",
        envvar="OCTAVO_GPU_MEMORY_UTILIZATION",
        type=click.FloatRange(0, 1, min_open=True),
        default=0.9,
        show_default=True,
        help="Share of a GPU's memory that may be used, by all processes on it together; what weights and steps leave"
        " of it is for KV blocks.",
    ),
    click.option(
        "--max-num-batched-tokens",
        envvar="OCTAVO_MAX_NUM_BATCHED_TOKENS",
        type=click.IntRange(1),
        default=8192,
        show_default=True,
        help="Tokens of the largest step that room is left for on a GPU; give it as the scheduler's.",
    ),
    click.option(
        "--max-num-seqs",
        envvar="OCTAVO_MAX_NUM_SEQS",
        type=click.IntRange(1),
        default=256,
        show_default=True,
        help="Sequences that a GPU's tables have room for from the start; give it as the scheduler's.",
    ),
    click.option(
        "--cuda-graphs/--no-cuda-graphs",
        envvar="OCTAVO_CUDA_GRAPHS",
        default=True,
        show_default=True,
        help="Capture decode steps on a GPU: a start some seconds longer, and steps without launches.",
    ),
    click.option(
        "--fake-step-ms",
        envvar="OCTAVO_FAKE_STEP_MS",
        type=click.FloatRange(0, 60_000),
        default=0.0,
        help="How long each step of the fake device takes, at least.",
    ),
    click.option(
        "--fake-eos-probability",
        envvar="OCTAVO_FAKE_EOS_PROBABILITY",
        type=click.FloatRange(0, 1),
        default=0.0,
        help="How often the fake device chooses EOS.",
    ),
    click.option(
        "--fake-windows",
        envvar="OCTAVO_FAKE_WINDOWS",
        metavar="TOKENS,...",
        callback=_parsed(parse_windows),
        default="0",
        show_default=True,
        help="The windows of the fake device's KV groups; 0 sees all tokens.",
    ),
    click.option(
        "--fake-fault",
        "fake_faults",
        envvar="OCTAVO_FAKE_FAULT",
        metavar="KIND=TOKENS,...",
        callback=_parsed(parse_faults),
        default="",
        hidden=True,
        help="What prompts bring about on the fake device (octavo.worker.fake.faults).",
    ),
)


def model_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Gives a command these flags, named as the fields of `octavo.worker.config.WorkerConfig`."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command
