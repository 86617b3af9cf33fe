"""Measures the host's time for a step on a GPU that need not be there: `python -m octavo.bench.gpu.host_time`.

Kernels are compiled for Hopper, and everything of a step is done but that they are launched and that matrices are
multiplied: what a driver takes for a launch (some 2 us) and a library for a product (some 5 us) comes on top. So does
the launch of a captured step's graph.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Iterator

    from octavo.worker.gpu.executor import GpuExecutor
    from octavo.worker.sequences import WorkItem

_BLOCK_SIZE, _CONTEXT = 16, 1200
_WARM_UPS = 3
_CONFIG = {
    "vocab_size": 256,
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 4096,
}


@dataclass(frozen=True)
class HostTimes:
    """Holds the host's microseconds: `captured_us` for all of a step whose model is a graph, `layer_us` for each layer
    of one whose kernels are launched one by one."""

    captured_us: float
    layer_us: float


class _NoDevice:
    """Stands in for Triton's driver of a Hopper GPU: it loads and launches nothing."""

    def __init__(self) -> None:
        self.utils = self

    def load_binary(self, *_: object) -> tuple[int, int, int, int, int]:
        return 1, 1, 0, 0, 1024

    def get_device_properties(self, _: int) -> dict[str, int]:
        return {"max_shared_mem": 227 << 10}

    def launcher_cls(self, *_: object) -> Callable[..., None]:
        return lambda *_: None

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _: int = 0) -> int:
        return 0

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)


@contextmanager
def _executor(max_batch: int, num_layers: int) -> "Iterator[GpuExecutor]":
    from transformers import LlamaConfig
    from triton.runtime import driver

    from octavo.kernels.choice import AttentionChoice
    from octavo.kernels.triton.attention import TritonAttention
    from octavo.testbed.models import write_tiny_model
    from octavo.worker.gpu.executor import GpuExecutor
    from octavo.worker.model_settings import ModelSettings
    from octavo.worker.models import linear
    from octavo.worker.models.linear import LinearKind
    from octavo.worker.step import model_runner

    def attention(
        shape: Any, device: torch.device, dtype: torch.dtype, *, exact: bool, backend: str
    ) -> AttentionChoice:
        return AttentionChoice(TritonAttention(shape, device, exact=exact), None)

    width = _CONTEXT // _BLOCK_SIZE + 2
    settings = ModelSettings(
        dtype="bfloat16", num_blocks=(max_batch + 2) * width, block_size=_BLOCK_SIZE, max_num_seqs=max_batch + 1,
        threads=1, graph_batch=max_batch,
    )  # fmt: skip
    with (
        TemporaryDirectory(prefix="octavo-") as directory,
        mock.patch.object(driver, "_active", _NoDevice()),
        mock.patch.object(model_runner, "choose_attention", attention),
        mock.patch.object(linear, "best_kind", return_value=LinearKind.PLAIN),
        mock.patch("torch.nn.functional.linear", _no_product),
    ):
        write_tiny_model(Path(directory), LlamaConfig(**_CONFIG, num_hidden_layers=num_layers))
        runner = model_runner.ModelRunner(Path(directory), settings, device="cpu")
        assert isinstance(runner.executor, GpuExecutor)
        yield runner.executor


def _no_product(inputs: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return torch.empty((inputs.shape[0], weight.shape[0]), dtype=inputs.dtype)


def _items(num_sequences: int, chunk: int) -> "list[WorkItem]":
    from octavo.wire.sampling import SamplingParams
    from octavo.worker.sequences import WorkerSequence, WorkItem

    width = _CONTEXT // _BLOCK_SIZE + 2

    def sequence(number: int, computed: int) -> WorkerSequence:
        table = list(range(number * width, (number + 1) * width))
        return WorkerSequence(
            number, 0, SamplingParams(max_tokens=9), _CONTEXT, [5] * _CONTEXT, computed, [table]
        )  # fmt: skip

    items = [WorkItem(each, _CONTEXT - 1, 1, (each,)) for each in (sequence(n, 0) for n in range(num_sequences))]
    return [*items, WorkItem(sequence(num_sequences, 0), 100, chunk, ())] if chunk else items


@torch.inference_mode()
def measure(executor: "GpuExecutor", num_sequences: int, chunk: int, repeats: int) -> HostTimes:
    """Measures a step of `num_sequences` decodes and `chunk` tokens of a prompt: medians of its thread's CPU time."""
    from octavo.wire.steps import BlockMoves
    from octavo.worker.step.batch import logit_rows

    items = _items(num_sequences, chunk)
    hidden, vocabulary = int(_CONFIG["hidden_size"]), int(_CONFIG["vocab_size"])
    places = torch.zeros(num_sequences + chunk + 512, hidden, dtype=torch.bfloat16)
    logits = torch.zeros(len(places), vocabulary, dtype=torch.bfloat16)
    captured, launched = [], []
    with (
        mock.patch.object(executor._graphs, "replay", lambda size: (places[:size], logits[:size])),
        mock.patch.object(executor._chunk_graphs, "replay", return_value=(places,)),
    ):
        for _ in range(_WARM_UPS + repeats):
            began = time.thread_time()
            executor.launch(BlockMoves(), items)
            captured.append(time.thread_time() - began)
            step = executor._inputs.step(items, logit_rows(items).rows)
            step.input_ids.zero_()
            began = time.thread_time()
            executor._model.forward(step)
            launched.append(time.thread_time() - began)
    executor.forget(item.sequence.sequence_id for item in items)
    step_us, model_us = (1e6 * statistics.median(times[_WARM_UPS:]) for times in (captured, launched))
    return HostTimes(step_us, model_us / len(executor._cache.layers))


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints a line for each kind of step."""
    parser = argparse.ArgumentParser(prog="octavo.bench.gpu.host_time", description=__doc__)
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 64, 256])
    parser.add_argument("--chunks", type=int, nargs="+", default=[0, 256], help="prompt tokens beside them; 0: none")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=20)
    options = parser.parse_args(arguments)
    print("sequences | prompt tokens | captured, us a step | launched one by one, us a layer")
    with _executor(max(options.sequences), options.layers) as executor:
        for num_sequences in options.sequences:
            for chunk in options.chunks:
                found = measure(executor, num_sequences, chunk, options.repeats)
                print(
                    f"{num_sequences:9} | {chunk:13} | {found.captured_us:19.0f} | {found.layer_us:12.1f}", flush=True
                )


if __name__ == "__main__":
    main()
