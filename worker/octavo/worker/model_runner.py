"""A model with its KV cache, running one step at a time: block moves, batch, forward pass, sampling."""

import time
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from octavo.kernels.backend import GroupBatch
from octavo.kernels.choice import choose_attention
from octavo.wire.model_directory import fingerprint, model_name
from octavo.wire.steps import MAX_BLOCK_SIZE, BlockMoves, KVGroup, ModelInfo, StepTimes
from octavo.worker.batch import Batch, build_batch
from octavo.worker.kernel_path import kernel_path
from octavo.worker.kv_cache import KVCache, num_blocks_in
from octavo.worker.kv_layout import KVLayout
from octavo.worker.loading import release_free_memory
from octavo.worker.models.compiled import compiled
from octavo.worker.models.decoder import Decoder, PagedStep
from octavo.worker.models.registry import load_model
from octavo.worker.numerics import EXACT_DTYPE, model_obstacle, settings_obstacle
from octavo.worker.prompt_logprobs import prompt_logprobs
from octavo.worker.runner import DoneStep, StepOutput
from octavo.worker.sampler import broken, choose
from octavo.worker.sequences import WorkItem

# The same on every CPU: replicas must agree, and `auto` must mean one thing.
_AUTO_DTYPE = "bfloat16"
_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float16": torch.float16}
DTYPES = ("auto", *_DTYPES)


class ModelRunnerError(Exception):
    """Options that do not fit each other or this machine."""


class ModelRunner:
    """The production `octavo.worker.runner.Runner`.

    `dtype` is one of `DTYPES`; `exact`: see `octavo.worker.numerics`. `num_blocks`, if given, wins over
    `kv_cache_memory` (bytes; None: a share of what is free), and `num_cpu_blocks` over `swap_memory` (bytes; None: a
    quarter of the device blocks). `max_model_len` shortens the model's context; `threads` is torch's number of threads,
    of the whole process; `load_format` is one of `octavo.wire.model_directory.LOAD_FORMATS`, `model_impl` of
    `octavo.worker.config.MODEL_IMPLS`.
    Raises `ModelRunnerError`, `ConfigError`, `WeightsError` or `KVCacheError`.
    """

    def __init__(
        self,
        directory: Path,
        *,
        dtype: str = "auto",
        exact: bool = False,
        device: str = "cpu",
        block_size: int = 16,
        kv_cache_memory: int | None = None,
        num_blocks: int | None = None,
        num_cpu_blocks: int | None = None,
        swap_memory: int | None = None,
        max_model_len: int | None = None,
        threads: int | None = None,
        load_format: str = "auto",
        model_impl: str = "auto",
    ) -> None:
        if threads is not None:
            torch.set_num_threads(threads)
        self.device = device
        self.block_size = _check_block_size(block_size)
        self._device = _torch_device(device)
        if exact:
            _refuse(settings_obstacle(dtype, self._device))
            dtype = EXACT_DTYPE
        self._dtype = _torch_dtype(dtype, self._device)
        with torch.inference_mode():
            self._model = load_model(
                directory,
                dtype=self._dtype,
                device=self._device,
                max_model_len=max_model_len,
                load_format=load_format,
                model_impl=model_impl,
            )
            release_free_memory()
            config = self._model.config
            self._layout = KVLayout.of(config, block_size, self._dtype)
            self.num_blocks = (
                num_blocks_in(kv_cache_memory, self._layout, self._device) if num_blocks is None else num_blocks
            )
            self.num_cpu_blocks = _num_cpu_blocks(num_cpu_blocks, swap_memory, self._layout, self.num_blocks)
            choice = choose_attention(self._layout.cache_shape, self._device)
            self._attention = choice.attention
            self._model = compiled(self._model, self._attention)
            self.kernels = kernel_path(choice, self._model)
            if exact:
                _refuse(model_obstacle(self._model, choice))
            self._kv_cache = KVCache(
                self._layout, num_blocks=self.num_blocks, num_cpu_blocks=self.num_cpu_blocks, device=self._device
            )
        self.kv_bytes_per_token = self._layout.bytes_per_token
        self.kv_groups = [KVGroup(group.window) for group in self._layout.groups]
        self.model = ModelInfo(
            name=model_name(directory),
            fingerprint=fingerprint(directory, load_format),
            dtype=str(self._dtype).removeprefix("torch."),
            vocab_size=config.vocab_size,
            max_model_len=config.max_model_len,
        )

    @property
    def decoder(self) -> Decoder:
        """What computes the forward pass."""
        return self._model

    def launch(self, moves: BlockMoves, items: list[WorkItem]) -> DoneStep:
        return DoneStep(self.execute(moves, items))

    def forget(self, sequence_ids: Iterable[int]) -> None:
        """It keeps nothing of them."""

    @torch.inference_mode()
    def execute(self, moves: BlockMoves, items: list[WorkItem]) -> StepOutput:
        """Carries out `moves`, then computes `items` as one batch.

        A sequence fails alone if it can choose no token, or if what the model gave it is not finite. Raises
        `ValueError` on moves or tables that name no block.
        """
        began = time.monotonic_ns()
        self._kv_cache.move(moves)
        if not items:
            return StepOutput([], [], [], [], StepTimes((self._now() - began) // 1000, 0, 0))
        batch = build_batch(items, len(self.kv_groups), self.block_size, self._device)
        step = self._paged_step(batch)
        prepared = self._now()
        if not self._attention.masks_unwritten:
            self._kv_cache.clear(batch.fresh_blocks)
        wanted = batch.logit_rows
        hidden = self._model.forward(step)
        counts = [wanted.num_choosing, len(wanted.watched), sum(span.length for span in wanted.prompt_spans)]
        choosing, watched, prompt = torch.split(hidden, counts)
        logits = self._model.logits(choosing)
        computed = self._now()
        choices = choose(_by_chooser(logits, wanted.chooser_rows), wanted.choosers)
        prompts, failed = prompt_logprobs(prompt, wanted.prompt_spans, self._model.logits)
        failed += broken(watched, wanted.watched)
        times = StepTimes(
            prepare_us=(prepared - began) // 1000,
            model_us=(computed - prepared) // 1000,
            sample_us=(self._now() - computed) // 1000,
        )
        return StepOutput(choices.sampled, choices.candidates, prompts, choices.failed, times).without(failed)

    def _paged_step(self, batch: Batch) -> PagedStep:
        groups = (
            GroupBatch(slot_mapping, block_tables, batch.context_lens, batch.query_lens, group.window)
            for group, slot_mapping, block_tables in zip(
                self.kv_groups, batch.slot_mappings, batch.block_tables, strict=True
            )
        )
        return PagedStep(
            input_ids=batch.input_ids,
            positions=batch.positions,
            rows=batch.logit_rows.rows,
            attention=self._attention,
            groups=[self._attention.step(group) for group in groups],
            caches=self._kv_cache.layers,
        )

    def _now(self) -> int:
        """Nanoseconds, once the device has done what it was given."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.monotonic_ns()


def _by_chooser(logits: Tensor, rows: list[int]) -> Tensor:
    """One row per chooser; `logits` itself if each row has just one."""
    return logits if len(rows) == len(logits) else logits[torch.tensor(rows, device=logits.device)]


def _num_cpu_blocks(num_cpu_blocks: int | None, swap_memory: int | None, layout: KVLayout, num_blocks: int) -> int:
    if num_cpu_blocks is None:
        num_cpu_blocks = num_blocks // 4 if swap_memory is None else swap_memory // layout.bytes_per_block
    if not 0 <= num_cpu_blocks <= num_blocks:
        raise ModelRunnerError(
            f"{num_cpu_blocks} CPU blocks to swap to are asked for; with {num_blocks} device blocks 0 to {num_blocks}"
            f" ({num_blocks * layout.bytes_per_block} bytes) make sense; see --swap-memory and --num-cpu-blocks"
        )
    return num_cpu_blocks


def _refuse(obstacle: str | None) -> None:
    if obstacle:
        raise ModelRunnerError(f"--numerics exact {obstacle}")


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
