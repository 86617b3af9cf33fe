"""A model with its KV cache, running one step at a time: batch, forward pass, sampling."""

import time
from pathlib import Path

import torch

from octavo.kernels.attention_plan import AttentionPlan, plan_attention
from octavo.wire.model_directory import fingerprint, model_name
from octavo.wire.steps import MAX_BLOCK_SIZE, ModelInfo, StepTimes
from octavo.worker.batch import Batch, build_batch
from octavo.worker.kv_cache import KVCache, kv_bytes_per_token, num_blocks_in
from octavo.worker.models.registry import load_model
from octavo.worker.runner import StepOutput
from octavo.worker.sampler import sample
from octavo.worker.sequences import WorkItem

# The same on every CPU: replicas must agree, and `auto` must mean one thing.
_AUTO_DTYPE = "bfloat16"
_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float16": torch.float16}
DTYPES = ("auto", *_DTYPES)


class ModelRunnerError(Exception):
    """Options that do not fit each other or this machine."""


class ModelRunner:
    """The production `octavo.worker.runner.Runner`.

    `dtype` is one of `DTYPES`; `num_blocks`, if given, wins over `kv_cache_memory` (bytes; None: a share of what is
    free); `max_model_len` shortens the model's context; `threads` is torch's number of threads, of the whole process.
    Raises `ModelRunnerError`, `ConfigError`, `WeightsError` or `KVCacheError`.
    """

    def __init__(
        self,
        directory: Path,
        *,
        dtype: str = "auto",
        device: str = "cpu",
        block_size: int = 16,
        kv_cache_memory: int | None = None,
        num_blocks: int | None = None,
        max_model_len: int | None = None,
        threads: int | None = None,
    ) -> None:
        if threads is not None:
            torch.set_num_threads(threads)
        self.device = device
        self.block_size = _check_block_size(block_size)
        self._device = _torch_device(device)
        self._dtype = _torch_dtype(dtype, self._device)
        with torch.inference_mode():
            self._model = load_model(directory, dtype=self._dtype, device=self._device, max_model_len=max_model_len)
            config = self._model.config
            self.kv_bytes_per_token = kv_bytes_per_token(config, self._dtype)
            self.num_blocks = (
                num_blocks_in(kv_cache_memory, block_size, self.kv_bytes_per_token, self._device)
                if num_blocks is None
                else num_blocks
            )
            self._kv_cache = KVCache(
                config, num_blocks=self.num_blocks, block_size=block_size, dtype=self._dtype, device=self._device
            )
        self._bytes_per_layer_token = self.kv_bytes_per_token // config.num_layers
        self.model = ModelInfo(
            name=model_name(directory),
            fingerprint=fingerprint(directory),
            dtype=str(self._dtype).removeprefix("torch."),
            vocab_size=config.vocab_size,
            max_model_len=config.max_model_len,
        )

    @torch.inference_mode()
    def execute(self, items: list[WorkItem]) -> StepOutput:
        """Computes `items` as one batch. Raises `SamplingError` if the logits are not finite."""
        began = time.monotonic_ns()
        batch = build_batch(items, self.block_size, self._device)
        plan = self._plan_attention(batch)
        prepared = self._now()
        self._kv_cache.clear(batch.fresh_blocks)
        logits = self._model.forward(
            batch.input_ids, batch.positions, batch.slot_mapping, plan, self._kv_cache.layers, batch.sample_rows
        )
        computed = self._now()
        sampled = sample(logits, [item.sequence for item in items if item.samples])
        return StepOutput(
            sampled,
            StepTimes(
                prepare_us=(prepared - began) // 1000,
                model_us=(computed - prepared) // 1000,
                sample_us=(self._now() - computed) // 1000,
            ),
        )

    def _plan_attention(self, batch: Batch) -> AttentionPlan:
        return plan_attention(
            batch.block_tables,
            batch.context_lens,
            batch.query_lens,
            block_size=self.block_size,
            bytes_per_token=self._bytes_per_layer_token,
            dtype=self._dtype,
            device=self._device,
        )

    def _now(self) -> int:
        """Nanoseconds, once the device has done what it was given."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.monotonic_ns()


def _check_block_size(block_size: int) -> int:
    if not 1 <= block_size <= MAX_BLOCK_SIZE:
        raise ModelRunnerError(f"a block of {block_size} tokens is asked for; --block-size takes 1 to {MAX_BLOCK_SIZE}")
    return block_size


def _torch_device(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ModelRunnerError(f"{name!r} is no device; --device takes cpu, cuda or cuda:N") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ModelRunnerError(f"{name!r} is asked for, but this torch ({torch.__version__}) finds no CUDA device")
    if device.type not in ("cpu", "cuda"):
        raise ModelRunnerError(f"{name!r} is not implemented; --device takes cpu, cuda or cuda:N")
    return device


def _torch_dtype(name: str, device: torch.device) -> torch.dtype:
    if name not in DTYPES:
        raise ModelRunnerError(f"{name!r} is no dtype; --dtype takes {', '.join(DTYPES)}")
    if name == "float16" and device.type == "cpu":
        raise ModelRunnerError("float16 is slow and overflows on a CPU; use --dtype bfloat16 or float32 there")
    return _DTYPES[_AUTO_DTYPE if name == "auto" else name]
