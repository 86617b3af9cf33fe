"""The production runner: a model with its KV cache, put together from options, and the executor that runs its steps.

With `--numerics exact`, a request's tokens and logprobs are the same to the last bit whatever runs beside it. That
needs Octavo's own kernels for the whole model: in them each sum is added up in an order that follows from its own row.
Other kernels do not guarantee it. Torch's matrix products and fused attention choose their order by the number of rows,
and on a CPU its SiLU, GELU and sigmoid round the last elements of a tensor, or of a thread's share, in another way than
those before. (He et al., "Defeating Nondeterminism in LLM Inference" (2025), on the same for GPUs.)
"""

import logging
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from octavo.kernels.choice import AttentionChoice, BackendUnavailable, choose_attention
from octavo.kernels.native.build import source_hash
from octavo.kernels.triton.devices import FP8_FROM, takes_fp8
from octavo.runtime.models.directory import fingerprint, model_name
from octavo.wire.pooling import PoolingModel
from octavo.wire.steps import BlockMoves, KVGroup, ModelInfo
from octavo.worker.kv_store.identity import StoreIdentity
from octavo.worker.kv_store.loan import Payload
from octavo.worker.loading.load_format import release_free_memory
from octavo.worker.loading.weights import WeightsError
from octavo.worker.model_settings import DTYPES, KV_CACHE_DTYPES, ModelSettings
from octavo.worker.models import gpu_linear
from octavo.worker.models.compiled import CompiledLlama, compiled, obstacle
from octavo.worker.models.config_file import ModelConfigError, has_quantized_integers, is_quantized
from octavo.worker.models.decoder import Decoder
from octavo.worker.models.fused import FusedLlama
from octavo.worker.models.kernel_race import kernel_path
from octavo.worker.models.llama import LlamaModel
from octavo.worker.models.registry import load_model
from octavo.worker.pooling.decoders import DecoderPooling, decoder_pooling, load_decoder, pooling_settings
from octavo.worker.pooling.executor import PoolingExecutor
from octavo.worker.pooling.gathering import gathers
from octavo.worker.pooling.heads import EmbeddingHead
from octavo.worker.runner import BlockContents, LaunchedStep, Settle, StepOutput, nothing_pending
from octavo.worker.sampling.grammars import Grammars
from octavo.worker.sequences import WorkItem
from octavo.worker.step.block_bytes import BlockBytes
from octavo.worker.step.draft_model import DraftLayout, DraftModel, DraftModelError, LoadedDraft, check_tokenizers
from octavo.worker.step.executor import Executor
from octavo.worker.step.forward import PagedModel, Paging
from octavo.worker.step.kv_cache import KVCache, KVLayout, memory_for_cache, num_blocks_in, num_cpu_blocks_in
from octavo.worker.tensor_parallel.group import SINGLE, ShardGroup
from octavo.worker.tensor_parallel.leader import NO_FOLLOWERS, Followers

if TYPE_CHECKING:
    from octavo.worker.gpu.executor import GpuExecutor


logger = logging.getLogger(__name__)

EXACT_CPU_DTYPE = "float32"


def settings_obstacle(dtype: str, device: torch.device) -> str | None:
    """Returns why these settings cannot be exact, and a remedy; None if they can."""
    if device.type == "cpu" and dtype not in ("auto", EXACT_CPU_DTYPE):
        return f"computes in {EXACT_CPU_DTYPE} on a CPU; leave --dtype {dtype} out"
    return None


def model_obstacle(model: Decoder, attention: AttentionChoice) -> str | None:
    """Returns why `model` (compiled where it can be) with `attention` is not exact, and a remedy; None if it is."""
    if isinstance(model, FusedLlama) and model.group.size > 1:
        return "needs ranks that add up in one order whatever the batch, which GPUs do not; leave it or --tp out"
    if isinstance(model, CompiledLlama | FusedLlama):
        return None
    if not isinstance(model, LlamaModel):
        return (
            "needs a model that Octavo computes itself; this one is computed by transformers, in operations whose last"
            " bits depend on the batch. Leave it out"
        )
    return f"needs Octavo's own kernels for the whole model: {attention.reason or obstacle(model)}"


# `auto` is the same dtype on every CPU: replicas must agree, and `auto` must mean one thing.
_AUTO_DTYPE = "bfloat16"
_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float16": torch.float16}
_CACHE_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "int8": torch.int8}


class ModelRunnerError(Exception):
    """Raised for options that do not fit each other or this machine."""


class ModelRunner:
    """The production `octavo.worker.runner.Runner`.

    `device` is this process's own where `settings` do not name it: `cuda:1` of several ranks. The number of threads is
    torch's, for the whole process. Each rank of a `group` holds a share; the memory given is that of all its ranks,
    and the first rank sends its steps to its `followers`. The model in `draft_directory`, if there is one, makes
    proposals.

    Raises `ModelRunnerError`, `ModelConfigError`, `WeightsError` or `KVCacheError`.
    """

    def __init__(
        self,
        directory: Path,
        settings: ModelSettings = ModelSettings(),  # noqa: B008 (frozen)
        *,
        device: str | None = None,
        group: ShardGroup = SINGLE,
        followers: Followers = NO_FOLLOWERS,
        draft_directory: Path | None = None,
    ) -> None:
        if settings.threads is not None:
            torch.set_num_threads(settings.threads)
        self.device = device or settings.device
        self.block_size = settings.block_size
        self.world_size = group.size
        # What it gives of whole texts in place of tokens; None: it generates.
        pooling = decoder_pooling(directory, settings.pooling)
        self._settings = settings = pooling_settings(settings, pooling)
        self._head: EmbeddingHead | None = None
        self._group = group
        self._device = _torch_device(self.device)
        if self._device.index is not None and self._device.type == "cuda":
            # Triton launches on this thread's current device, whatever its tensors are on; libraries open it first.
            torch.cuda.set_device(self._device)
        identity = fingerprint(directory, settings.load_format)
        _check_ranks(group, identity, settings)
        self._dtype = _torch_dtype(settings, self._device, directory)
        with torch.inference_mode():
            choice = self._load(directory, pooling)
            self.kv_groups = [KVGroup(group.window) for group in self._layout.groups]
            self._draft = self._load_draft(draft_directory, directory, choice) if draft_directory else None
            self._make_cache(choice)
            self.grammars = Grammars(directory)
            self.paged_model = self._make_paged_model()
            draft_model = self._make_draft_model()
            self.executor = self._make_executor(followers, draft_model)
            self._bytes = BlockBytes([self._kv_cache])
            if draft_model is not None:
                self._bytes = BlockBytes([self._kv_cache, draft_model.cache], draft_model.followed)
        self.kernels = kernel_path(choice, self._model)
        self.kv_bytes_per_token = self._block_bytes * len(self.kv_groups) // self.block_size
        self.kv_cache_dtype = str(self._layout.dtype).removeprefix("torch.")
        self.draft_model = model_name(draft_directory) if draft_directory else None
        self.model = ModelInfo(
            name=model_name(directory),
            fingerprint=identity,
            dtype=str(self._dtype).removeprefix("torch."),
            vocab_size=self._model.config.vocab_size,
            max_model_len=self._model.config.max_model_len,
            quantization=settings.quantization,
            pooling=_described(pooling, self._head),
        )
        self._draft_fingerprint = fingerprint(draft_directory, settings.load_format) if draft_directory else ""

    def _load(self, directory: Path, pooling: DecoderPooling | None) -> AttentionChoice:
        """Loads the model and compiles it where it can be; returns the attention that it takes."""
        settings = self._settings
        by_numbers = settings.exact and gpu_linear.on_gpu(self._device)
        if by_numbers and is_quantized(directory):
            logger.info("quantised weights become %s: --numerics exact multiplies by numbers on a GPU", self._dtype)
        model: Decoder
        if pooling is not None:
            model, self._head = load_decoder(directory, settings, self._dtype, pooling)
        else:
            model = load_model(
                directory,
                dtype=self._dtype,
                device=self._device,
                max_model_len=settings.max_model_len,
                load_format=settings.load_format,
                model_impl=settings.model_impl,
                quantization=settings.quantization,
                dequantized=settings.dequantized or by_numbers,
                group=self._group,
            )
        release_free_memory()
        quantized = _is_quantized(settings, self._device, directory)
        cache_dtype = _cache_dtype(settings.kv_cache_dtype, self._dtype, self._device, quantized=quantized)
        choice = self._attend_over(model, cache_dtype)
        if choice.reason and cache_dtype != self._dtype:
            if settings.kv_cache_dtype != "auto":
                raise ModelRunnerError(
                    f"--kv-cache-dtype {settings.kv_cache_dtype} needs Octavo's own kernels: {choice.reason}"
                )
            choice = self._attend_over(model, self._dtype)
        scales = model.kv_scales if isinstance(model, LlamaModel) else None
        self._kv_scales = scales if cache_dtype == torch.float8_e4m3fn else None
        self._model = compiled(model, choice.attention, exact=settings.exact)
        if settings.exact:
            _refuse(model_obstacle(self._model, choice))
        return choice

    def _load_draft(self, directory: Path, main: Path, choice: AttentionChoice) -> LoadedDraft:
        """Loads the draft model, with the context of the model in `main`, whose attention is that of `choice`."""
        settings = replace(self._settings, quantization="none", numerics="default", kv_cache_dtype="auto")
        refusal = f"--draft-model {directory} cannot be used beside {main}: "
        if choice.reason:
            raise ModelRunnerError(f"{refusal}drafts are checked by Octavo's own kernels alone: {choice.reason}")
        sizes = self._model.config
        try:
            check_tokenizers(directory, main)
            model = load_model(
                directory,
                dtype=_torch_dtype(settings, self._device, directory),
                device=self._device,
                max_model_len=sizes.max_model_len,
                load_format=settings.load_format,
            )
        except (DraftModelError, ModelConfigError, WeightsError) as error:
            raise ModelRunnerError(refusal + str(error)) from error
        if model.config.vocab_size != sizes.vocab_size:
            raise ModelRunnerError(
                f"{refusal}it has a vocabulary of {model.config.vocab_size} tokens, and the model one of"
                f" {sizes.vocab_size}; give a smaller model of the same family"
            )
        loaded = self._placed(model, directory, settings)
        if loaded.choice.reason:
            raise ModelRunnerError(f"{refusal}Octavo's own kernels do not compute it: {loaded.choice.reason}")
        release_free_memory()
        logger.info("%s guesses what comes next: %s", directory, loaded)
        return loaded

    def _placed(self, model: Decoder, directory: Path, settings: ModelSettings) -> LoadedDraft:
        """Lays the draft model's keys and values out in the model's blocks, and compiles it where it can be."""
        dtype, quantized = _torch_dtype(settings, self._device, directory), has_quantized_integers(directory)
        cache_dtype = _cache_dtype("auto", dtype, self._device, quantized=quantized)
        placed = DraftLayout.of(model.config, self.kv_groups, self.block_size, cache_dtype, self._settings.kv_layout)
        choice = choose_attention(placed.layout.cache_shape, self._device, dtype)
        return LoadedDraft(compiled(model, choice.attention), choice, placed)

    def _make_draft_model(self) -> DraftModel | None:
        if self._draft is None:
            return None
        layout = self._draft.placed.layout
        cache = KVCache(layout, num_blocks=self.num_blocks, num_cpu_blocks=self.num_cpu_blocks, device=self._device)
        return DraftModel(
            self._draft.model, self._draft.choice.attention, self._draft.placed, cache, self._paging, self.grammars
        )

    def _attend_over(self, model: Decoder, cache_dtype: torch.dtype) -> AttentionChoice:
        """Lays out a cache of `cache_dtype` for `model`; returns the attention that it takes."""
        settings = self._settings
        self._layout = KVLayout.of(model.config, self.block_size, cache_dtype, settings.kv_layout)
        try:
            return choose_attention(
                self._layout.cache_shape,
                self._device,
                self._dtype,
                exact=settings.exact,
                backend=settings.attention_backend,
            )
        except BackendUnavailable as error:
            raise ModelRunnerError(
                f"--attention-backend {settings.attention_backend} cannot be had: {error}; or leave it out"
            ) from error

    def _make_cache(self, choice: AttentionChoice) -> None:
        # The bytes of all ranks together, whose shares may differ.
        block_bytes = self._layout.bytes_per_block
        if self._draft is not None:
            block_bytes += self._draft.placed.layout.bytes_per_block
        self._block_bytes = sum(self._group.exchange(block_bytes))
        self.attention = choice.attention
        max_model_len = self._model.config.max_model_len
        self._paging = Paging(choice.attention, self.kv_groups, self.block_size, max_model_len, self._device)
        self.num_blocks = self._num_blocks()
        self._kv_cache = KVCache(
            self._layout,
            num_blocks=self.num_blocks,
            num_cpu_blocks=num_cpu_blocks_in(self._settings, self.num_blocks, self._block_bytes, self._agreed),
            device=self._device,
            scales=self._kv_scales,
        )
        # A host may refuse to pin memory for CPU blocks.
        self.num_cpu_blocks: int = self._agreed(self._kv_cache.num_cpu_blocks)

    @property
    def decoder(self) -> Decoder:
        """Returns the model that computes the forward pass."""
        return self._model

    def _num_blocks(self) -> int:
        """Returns the number of blocks, the same on every rank; the memory given is that of all ranks together."""
        if self._settings.num_blocks is not None:
            return self._settings.num_blocks
        memory = self._settings.kv_cache_memory
        if memory is None:
            memory = self._usual_memory()
        return num_blocks_in(self._agreed(memory), self._block_bytes, self.block_size)

    def _usual_memory(self) -> int:
        if self._device.type != "cuda":
            return memory_for_cache()
        if self._group.size > 1:
            raise ModelRunnerError(
                "what several ranks leave of their GPUs' memory is not measured yet: give --kv-cache-memory (of all"
                " ranks together) or --num-blocks"
            )
        from octavo.worker.gpu.memory import memory_for_blocks

        return memory_for_blocks(self._model, self._layout, self._paging, self._settings)

    def _agreed(self, number: int) -> int:
        """Returns the least `number` of all ranks."""
        return min(self._group.exchange(number))

    def _make_paged_model(self) -> PagedModel:
        """Makes the model that ranks compute together step by step; a single rank on a GPU has an executor that knows
        more of its steps."""
        if self._group.size > 1 and self._head is None:
            wanted = self._settings.cuda_graphs and self._paging.attention.name == "triton"
            if self._agreed(int(wanted)):
                from octavo.worker.gpu.captured_model import CapturedModel

                graph_batch = self._settings.graph_batch
                return CapturedModel(self._model, self._kv_cache, self._paging, self._group, graph_batch)
            if wanted:
                logger.warning("steps are not captured as CUDA graphs: another rank does not capture them")
        return PagedModel(self._model, self._kv_cache, self._paging)

    def _make_executor(self, followers: Followers, draft_model: DraftModel | None) -> "Executor | GpuExecutor":
        if self._head is not None:
            return PoolingExecutor(self.paged_model, self._paging, self.grammars, self._head)
        if self._paging.attention.name != "triton" or self._group.size > 1:
            return Executor(self.paged_model, self._paging, self.grammars, followers, draft_model)
        from octavo.worker.gpu.executor import GpuExecutor

        return GpuExecutor(self._model, self._kv_cache, self._paging, self.grammars, self._settings)

    def launch(self, moves: BlockMoves, items: list[WorkItem], settle: Settle = nothing_pending) -> LaunchedStep:
        """Launches a step that carries out `moves`, then computes `items` as one batch.

        A sequence fails alone if it can choose no token, or if the model's output for it is not finite. Raises
        `ValueError` on moves or tables that name no block.
        """
        return self.executor.launch(moves, items, settle)

    def execute(self, moves: BlockMoves, items: list[WorkItem]) -> StepOutput:
        """Runs a step as `launch` does, and waits for its output."""
        return self.launch(moves, items).output()

    def forget(self, sequence_ids: Iterable[int]) -> None:
        """Lets go of what the device keeps of these sequences."""
        self.executor.forget(sequence_ids)

    @property
    def kv_identity(self) -> StoreIdentity:
        """Names all that the last bits of keys and values may depend on, besides tokens."""
        settings, model = self._settings, self.model
        computed = (
            f"{settings.numerics} {model.dtype} on {self._device.type}, {self.kernels} by"
            f" {type(self._model).__name__}, {settings.model_impl}, {model.max_model_len} positions,"
            f" dequantized {settings.dequantized}, torch {torch.__version__}, kernels {source_hash()[:16]}"
        )
        return StoreIdentity(
            model=f"{model.fingerprint} {model.quantization} {self._draft_fingerprint}".strip(),
            dtype=self.kv_cache_dtype,
            layout=self._bytes.layout,
            numerics=computed,
            block_size=self.block_size,
            block_bytes=self._bytes.num_bytes,
            shard=f"{self._group.rank}/{self._group.size}",
        )

    def read_blocks(self, block_ids: Sequence[int]) -> BlockContents:
        """Gives what is in device blocks of this rank, as `octavo.worker.runner.Runner` says."""
        return self._bytes.read(block_ids)

    def fill_cpu_block(self, block_id: int, payload: Payload) -> None:
        """Fills a CPU block of this rank with what `read_blocks` has given."""
        self._bytes.fill(block_id, payload)

    def peek_blocks(self, block_ids: Sequence[int], *, in_cpu: bool) -> list[Payload] | None:
        """Returns the bytes of blocks of this rank as `octavo.worker.runner.Runner` says."""
        return self._bytes.peek(block_ids, in_cpu=in_cpu)


def _described(pooling: DecoderPooling | None, head: EmbeddingHead | None) -> PoolingModel | None:
    if pooling is None or head is None:
        return None
    return PoolingModel(pooling.task, head.num_outputs, gathers(head.modes))


def _check_ranks(group: ShardGroup, identity: str, settings: ModelSettings) -> None:
    """Checks that all ranks have the same model and settings, before they compute anything together."""
    shared = (
        identity,
        settings.model_impl,
        settings.dtype,
        settings.quantization,
        settings.exact,
        settings.block_size,
        settings.kv_cache_dtype,
        settings.max_model_len,
        settings.num_blocks,
        settings.num_cpu_blocks,
    )
    if len(set(group.exchange(zlib.crc32(repr(shared).encode())))) > 1:
        raise ModelRunnerError(
            "the ranks of this replica were started with different models, or with different --model-impl, --dtype,"
            " --quantization, --numerics, --block-size, --kv-cache-dtype, --max-model-len, --num-blocks or"
            " --num-cpu-blocks; start them all alike"
        )


def _refuse(obstacle: str | None) -> None:
    if obstacle:
        raise ModelRunnerError(f"--numerics exact {obstacle}")


def _cache_dtype(name: str, dtype: torch.dtype, device: torch.device, *, quantized: bool = False) -> torch.dtype:
    if name not in KV_CACHE_DTYPES:
        raise ModelRunnerError(
            f"{name!r} is no type of a KV cache; --kv-cache-dtype takes {', '.join(KV_CACHE_DTYPES)}"
        )
    if name == "auto":
        # What quantised weights leave open is far more than bf16 does to keys and values.
        return torch.bfloat16 if quantized else dtype
    if name != "fp8":
        return _CACHE_DTYPES[name]
    major, minor = torch.cuda.get_device_capability(device)
    if not takes_fp8(10 * major + minor):
        raise ModelRunnerError(
            f"--kv-cache-dtype {name} takes a GPU of compute capability {FP8_FROM / 10} or higher (Ada, Hopper and"
            f" later); {device} has {major}.{minor}: leave it out"
        )
    return torch.float8_e4m3fn


def _torch_device(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ModelRunnerError(f"{name!r} is no device; --device takes cpu, cuda or cuda:N") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ModelRunnerError(
            f"{name!r} is asked for, but this torch ({torch.__version__}) finds no CUDA device: it takes a GPU, its"
            " driver, and a torch that is built for CUDA; or use --device cpu"
        )
    if device.type == "cuda" and (device.index or 0) >= (count := torch.cuda.device_count()):
        raise ModelRunnerError(f"{name!r} is asked for, but this process sees {count} GPUs; ranks take one each")
    if device.type not in ("cpu", "cuda"):
        raise ModelRunnerError(f"{name!r} is not implemented; --device takes cpu, cuda or cuda:N")
    return device


def _torch_dtype(settings: ModelSettings, device: torch.device, directory: Path) -> torch.dtype:
    name = settings.dtype
    if name not in DTYPES:
        raise ModelRunnerError(f"{name!r} is no dtype; --dtype takes {', '.join(DTYPES)}")
    if settings.exact:
        _refuse(settings_obstacle(name, device))
        name = EXACT_CPU_DTYPE if device.type == "cpu" else name
    if name == "float16" and device.type == "cpu":
        raise ModelRunnerError("float16 is slow and overflows on a CPU; use --dtype bfloat16 or float32 there")
    if name == "auto":
        # Quantised weights are multiplied in integers on a CPU, and what lies between them costs little.
        name = "float32" if _is_quantized(settings, device, directory) else _AUTO_DTYPE
    return _DTYPES[name]


def _is_quantized(settings: ModelSettings, device: torch.device, directory: Path) -> bool:
    """Tells whether the model has quantised weights that a CPU multiplies by as they are."""
    stored = settings.load_format != "dummy" and has_quantized_integers(directory)
    on_cpu = not gpu_linear.on_gpu(device)
    return on_cpu and not settings.dequantized and (stored or settings.quantization != "none")
