"""The production runner: a model with its KV cache, put together from options, and the executor that runs its steps.

With `--numerics exact`, a request's tokens and logprobs are the same to the last bit whatever runs beside it. That
needs Octavo's own kernels for the whole model: in them each sum is added up in an order that follows from its own row.
Other kernels do not guarantee it. Torch's matrix products and fused attention choose their order by the number of rows,
and on a CPU its SiLU, GELU and sigmoid round the last elements of a tensor, or of a thread's share, in another way than
those before. (He et al., "Defeating Nondeterminism in LLM Inference" (2025), on the same for GPUs.)
"""

import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from octavo.kernels.choice import Choice, choose_attention
from octavo.runtime.models.directory import fingerprint, model_name
from octavo.wire.steps import MAX_BLOCK_SIZE, BlockMoves, KVGroup, ModelInfo
from octavo.worker.gpu.options import GpuOptions
from octavo.worker.loading.load_format import release_free_memory
from octavo.worker.models.compiled import CompiledLlama, compiled, obstacle
from octavo.worker.models.decoder import Decoder
from octavo.worker.models.fused import FusedLlama
from octavo.worker.models.kernel_race import kernel_path
from octavo.worker.models.llama import LlamaModel
from octavo.worker.models.registry import load_model
from octavo.worker.runner import LaunchedStep, StepOutput
from octavo.worker.sampling.grammars import Grammars
from octavo.worker.sequences import WorkItem
from octavo.worker.step.executor import Executor
from octavo.worker.step.forward import PagedModel, Paging
from octavo.worker.step.kv_cache import KVCache, KVLayout, available_memory, memory_for_cache, num_blocks_in
from octavo.worker.tensor_parallel.group import SINGLE, ShardGroup
from octavo.worker.tensor_parallel.leader import NO_FOLLOWERS, Followers

if TYPE_CHECKING:
    from octavo.worker.gpu.executor import GpuExecutor


EXACT_CPU_DTYPE = "float32"


def settings_obstacle(dtype: str, device: torch.device) -> str | None:
    """Returns why these settings cannot be exact, and a remedy; None if they can."""
    if device.type == "cpu" and dtype not in ("auto", EXACT_CPU_DTYPE):
        return f"computes in {EXACT_CPU_DTYPE} on a CPU; leave --dtype {dtype} out"
    return None


def model_obstacle(model: Decoder, attention: Choice) -> str | None:
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
DTYPES = ("auto", *_DTYPES)
# The dtypes of keys and values; `auto`: the dtype of the computation.
KV_CACHE_DTYPES = ("auto", "fp8")
# The compute capability from which on kernels convert to and from fp8.
_FP8_FROM = (8, 9)
# The share of CPU memory that may be pinned: pinned memory is taken from all other processes on the host.
_PINNED_SHARE = 0.25


class ModelRunnerError(Exception):
    """Raised for options that do not fit each other or this machine."""


class ModelRunner:
    """The production `octavo.worker.runner.Runner`.

    `dtype` is one of `DTYPES`, `kv_cache_dtype` of `KV_CACHE_DTYPES`; `exact` asks for exact numerics, as described
    above. `num_blocks`, if given, wins over `kv_cache_memory` (bytes; None: a share of the free memory, or what a GPU
    has left), and `num_cpu_blocks` over `swap_memory` (bytes; None: a quarter of the device blocks). `max_model_len`
    shortens the model's context; `threads` is torch's number of threads, for the whole process; `load_format` is one of
    `octavo.runtime.models.directory.LOAD_FORMATS`, `model_impl` of `octavo.worker.config.MODEL_IMPLS`. Each rank of a
    `group` holds a share; the memory given is that of all its ranks, and the first rank sends its steps to its
    `followers`.

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
        kv_cache_dtype: str = "auto",
        gpu: GpuOptions = GpuOptions(),  # noqa: B008 (frozen)
        group: ShardGroup = SINGLE,
        followers: Followers = NO_FOLLOWERS,
    ) -> None:
        if threads is not None:
            torch.set_num_threads(threads)
        self.device = device
        self.block_size = _check_block_size(block_size)
        self.world_size = group.size
        self._group = group
        self._device = _torch_device(device)
        if self._device.index is not None and self._device.type == "cuda":
            # Triton launches on this thread's current device, whatever its tensors are on; libraries open it first.
            torch.cuda.set_device(self._device)
        identity = fingerprint(directory, load_format)
        _check_ranks(
            group,
            (identity, model_impl, dtype, exact, block_size, kv_cache_dtype, max_model_len, num_blocks, num_cpu_blocks),
        )
        if exact:
            _refuse(settings_obstacle(dtype, self._device))
            dtype = EXACT_CPU_DTYPE if self._device.type == "cpu" else dtype
        self._dtype = _torch_dtype(dtype, self._device)
        with torch.inference_mode():
            self._model = load_model(
                directory,
                dtype=self._dtype,
                device=self._device,
                max_model_len=max_model_len,
                load_format=load_format,
                model_impl=model_impl,
                group=group,
            )
            release_free_memory()
            config = self._model.config
            cache_dtype = _cache_dtype(kv_cache_dtype, self._dtype, self._device)
            self._layout = KVLayout.of(config, block_size, cache_dtype)
            # The bytes of all ranks together, whose shares may differ.
            self._block_bytes = sum(group.exchange(self._layout.bytes_per_block))
            self.kv_groups = [KVGroup(group.window) for group in self._layout.groups]
            choice = choose_attention(self._layout.cache_shape, self._device, exact=exact)
            self.attention = choice.attention
            if choice.reason and cache_dtype != self._dtype:
                raise ModelRunnerError(f"--kv-cache-dtype {kv_cache_dtype} needs Octavo's GPU kernels: {choice.reason}")
            kv_scales = self._model.kv_scales if isinstance(self._model, LlamaModel) else None
            self._model = compiled(self._model, choice.attention, exact=exact)
            if exact:
                _refuse(model_obstacle(self._model, choice))
            paging = Paging(choice.attention, self.kv_groups, block_size, config.max_model_len, self._device)
            self.num_blocks = self._num_blocks(num_blocks, kv_cache_memory, paging, gpu)
            self.num_cpu_blocks = self._num_cpu_blocks(num_cpu_blocks, swap_memory)
            self._kv_cache = KVCache(
                self._layout,
                num_blocks=self.num_blocks,
                num_cpu_blocks=self.num_cpu_blocks,
                device=self._device,
                scales=kv_scales if cache_dtype != self._dtype else None,
            )
            # A host may refuse to pin memory for CPU blocks.
            self.num_cpu_blocks = self._agreed(self._kv_cache.num_cpu_blocks)
            self.grammars = Grammars(directory)
            self.paged_model = PagedModel(self._model, self._kv_cache, paging)
            self.executor = self._make_executor(paging, gpu, followers)
        self.kernels = kernel_path(choice, self._model)
        self.kv_bytes_per_token = self._block_bytes * len(self.kv_groups) // block_size
        self.model = ModelInfo(
            name=model_name(directory),
            fingerprint=identity,
            dtype=str(self._dtype).removeprefix("torch."),
            vocab_size=config.vocab_size,
            max_model_len=config.max_model_len,
        )

    @property
    def decoder(self) -> Decoder:
        """Returns the model that computes the forward pass."""
        return self._model

    def _num_blocks(self, num_blocks: int | None, memory: int | None, paging: Paging, gpu: GpuOptions) -> int:
        """Returns the number of blocks, the same on every rank; `memory` is that of all ranks together."""
        if num_blocks is not None:
            return num_blocks
        if memory is None:
            memory = self._usual_memory(paging, gpu)
        return num_blocks_in(self._agreed(memory), self._block_bytes, self.block_size)

    def _usual_memory(self, paging: Paging, gpu: GpuOptions) -> int:
        if self._device.type != "cuda":
            return memory_for_cache()
        if self._group.size > 1:
            raise ModelRunnerError(
                "what several ranks leave of their GPUs' memory is not measured yet: give --kv-cache-memory (of all"
                " ranks together) or --num-blocks"
            )
        from octavo.worker.gpu.memory import memory_for_blocks

        return memory_for_blocks(self._model, self._layout, paging, gpu)

    def _num_cpu_blocks(self, num_cpu_blocks: int | None, swap_memory: int | None) -> int:
        if num_cpu_blocks is None:
            affordable = int(_PINNED_SHARE * available_memory()) if swap_memory is None else swap_memory
            num_cpu_blocks = self._agreed(affordable) // self._block_bytes
            if swap_memory is None:
                num_cpu_blocks = min(num_cpu_blocks, self.num_blocks // 4)
        if not 0 <= num_cpu_blocks <= self.num_blocks:
            raise ModelRunnerError(
                f"{num_cpu_blocks} CPU blocks to swap to are asked for; with {self.num_blocks} device blocks 0 to"
                f" {self.num_blocks} ({self.num_blocks * self._block_bytes} bytes) make sense; see --swap-memory and"
                " --num-cpu-blocks"
            )
        return num_cpu_blocks

    def _agreed(self, number: int) -> int:
        """Returns the least `number` of all ranks."""
        return min(self._group.exchange(number))

    def _make_executor(self, paging: Paging, gpu: GpuOptions, followers: Followers) -> "Executor | GpuExecutor":
        if paging.attention.name != "triton" or self._group.size > 1:
            return Executor(self.paged_model, paging, self.grammars, followers)
        from octavo.worker.gpu.executor import GpuExecutor

        return GpuExecutor(self._model, self._kv_cache, paging, self.grammars, gpu)

    def launch(self, moves: BlockMoves, items: list[WorkItem]) -> LaunchedStep:
        """Launches a step that carries out `moves`, then computes `items` as one batch.

        A sequence fails alone if it can choose no token, or if the model's output for it is not finite. Raises
        `ValueError` on moves or tables that name no block.
        """
        return self.executor.launch(moves, items)

    def execute(self, moves: BlockMoves, items: list[WorkItem]) -> StepOutput:
        """Runs a step as `launch` does, and waits for its output."""
        return self.launch(moves, items).output()

    def forget(self, sequence_ids: Iterable[int]) -> None:
        """Lets go of what the device keeps of these sequences."""
        self.executor.forget(sequence_ids)


def _check_ranks(group: ShardGroup, settings: tuple[object, ...]) -> None:
    """Checks that all ranks have the same `settings`, before they compute anything together."""
    if len(set(group.exchange(zlib.crc32(repr(settings).encode())))) > 1:
        raise ModelRunnerError(
            "the ranks of this replica were started with different models, or with different --model-impl, --dtype,"
            " --numerics, --block-size, --kv-cache-dtype, --max-model-len, --num-blocks or --num-cpu-blocks; start them"
            " all alike"
        )


def _refuse(obstacle: str | None) -> None:
    if obstacle:
        raise ModelRunnerError(f"--numerics exact {obstacle}")


def _cache_dtype(name: str, dtype: torch.dtype, device: torch.device) -> torch.dtype:
    if name not in KV_CACHE_DTYPES:
        raise ModelRunnerError(
            f"{name!r} is no type of a KV cache; --kv-cache-dtype takes {', '.join(KV_CACHE_DTYPES)}"
        )
    if name == "auto":
        return dtype
    if device.type != "cuda":
        raise ModelRunnerError(f"--kv-cache-dtype {name} is for a GPU; leave it out on {device.type}")
    if (capability := torch.cuda.get_device_capability(device)) < _FP8_FROM:
        raise ModelRunnerError(
            f"--kv-cache-dtype {name} takes a GPU of compute capability {_dotted(_FP8_FROM)} or higher (Ada, Hopper and"
            f" later); {device} has {_dotted(capability)}: leave it out"
        )
    return torch.float8_e4m3fn


def _dotted(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))


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
        raise ModelRunnerError(
            f"{name!r} is asked for, but this torch ({torch.__version__}) finds no CUDA device: it takes a GPU, its"
            " driver, and a torch that is built for CUDA; or use --device cpu"
        )
    if device.type == "cuda" and (device.index or 0) >= (count := torch.cuda.device_count()):
        raise ModelRunnerError(f"{name!r} is asked for, but this process sees {count} GPUs; ranks take one each")
    if device.type not in ("cpu", "cuda"):
        raise ModelRunnerError(f"{name!r} is not implemented; --device takes cpu, cuda or cuda:N")
    return device


def _torch_dtype(name: str, device: torch.device) -> torch.dtype:
    if name not in DTYPES:
        raise ModelRunnerError(f"{name!r} is no dtype; --dtype takes {', '.join(DTYPES)}")
    if name == "float16" and device.type == "cpu":
        raise ModelRunnerError("float16 is slow and overflows on a CPU; use --dtype bfloat16 or float32 there")
    return _DTYPES[_AUTO_DTYPE if name == "auto" else name]
