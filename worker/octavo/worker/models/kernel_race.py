"""The choice between Octavo's own kernels and torch on this CPU: measured once, on some layers of the model, and
explained.

With AVX-512 nothing is measured: Octavo's kernels are known to be faster there. Elsewhere it depends on the CPU and
the version of torch. All workers of a machine must choose alike, for the two round differently: the first one's
figures are kept in Octavo's cache, by everything that they depend on, and hold for the others.
"""

import contextlib
import json
import logging
import math
import os
import platform
import tempfile
import time
import zlib
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from octavo.kernels.backend import AttentionBackend, GroupBatch
from octavo.kernels.choice import AttentionChoice, choose_attention
from octavo.kernels.native.build import source_hash
from octavo.kernels.native.library import VARIANT_VARIABLE, NativeUnavailable, find, set_aside
from octavo.runtime.models.directory import cache_directory
from octavo.runtime.telemetry.optional import KERNEL_SPEEDS, failed
from octavo.worker.loading.load_format import DummyWeights
from octavo.worker.model_settings import ModelSettings
from octavo.worker.models.compiled import CompiledLlama, compiled, obstacle
from octavo.worker.models.config import DecoderConfig, ModelConfigError, read_config
from octavo.worker.models.config_file import has_quantized_integers
from octavo.worker.models.decoder import Decoder, PagedStep
from octavo.worker.models.fused import FusedLlama
from octavo.worker.models.llama import LlamaModel
from octavo.worker.step.kv_cache import KVCache, KVLayout
from octavo.worker.tensor_parallel.group import SINGLE, ShardGroup

logger = logging.getLogger(__name__)
_CPU = torch.device("cpu")
# The tokens of a prompt, and of the cache when one more is decoded.
_PROMPT = 32
# Weights of the layers that are tried, if there are so many: more than most second caches hold.
_WEIGHT_BYTES = 16 << 20
# A layer of fewer weights takes microseconds either way.
_LEAST_WEIGHTS = 1 << 20
# The factor by which torch must be faster: less is chance, and Octavo's kernels give a row the same result whatever is
# beside it.
_CLEARLY = 1.1
# Rounds, the first of which warms up: as many as fit into the time, and two at least.
_LEAST_ROUNDS, _MOST_ROUNDS, _SECONDS = 2, 8, 1.0


def kernel_path(attention: AttentionChoice, model: Decoder) -> str:
    """Describes in words what computes `model` (compiled where it can be) with `attention`.

    Where something faster exists, the text says why it is not used and how to get it.
    """
    name = attention.attention.name
    if attention.reason:
        return f"{name} (not Octavo's own kernels: {attention.reason})"
    if attention.prompts:
        name += f" ({attention.prompts} for prompts)"
    if isinstance(model, CompiledLlama | FusedLlama) or name == "torch":
        return name
    if isinstance(model, LlamaModel):
        return f"{name} for attention, torch for the rest ({obstacle(model)})"
    also = "" if name.startswith("triton") else " and linear layers"
    return f"{name} for attention{also}, transformers for the rest"


@dataclass(frozen=True)
class Speeds:
    """Holds how many times as fast as torch's kernels Octavo's are, in a small prefill and in a decode step."""

    prefill: float
    decode: float

    @property
    def torch_is_faster(self) -> bool:
        return math.sqrt(self.prefill * self.decode) < 1 / _CLEARLY

    def __str__(self) -> str:
        return (
            f"{self.prefill:.2f} times torch's speed in a prefill of {_PROMPT} tokens, {self.decode:.2f} times in a"
            " decode step"
        )


def to_measure(config: DecoderConfig, *, exact: bool) -> bool:
    """Tells whether there is a choice: not if a user has made it, and not where exact numerics need Octavo's
    kernels."""
    library = find()
    if exact or os.environ.get(VARIANT_VARIABLE) or isinstance(library, NativeUnavailable):
        return False
    return not library.variant.startswith(("avx512", "amx")) and _layer_weights(config) >= _LEAST_WEIGHTS


def known(config: DecoderConfig, dtype: torch.dtype, block_size: int) -> Speeds:
    """Returns the figures that the first worker of this machine has measured for such layers.

    These are this worker's own figures if it is the first, or if figures cannot be kept.
    """
    path = cache_directory() / "kernels" / f"{_key(config, dtype, block_size):08x}.json"
    return _kept(path, lambda: measure(config, dtype, block_size))


def settle(directory: Path, settings: ModelSettings, group: ShardGroup = SINGLE) -> str | None:
    """Chooses the faster kernels for all models that this process makes from now on, and returns the choice and its
    reason.

    It returns None where there is no choice. Ranks take torch together or not at all.
    """
    speeds = _speeds(directory, settings)
    ours = speeds is None or not speeds.torch_is_faster
    if max(group.exchange(int(ours))):
        return None if speeds is None else f"Octavo's own kernels compute: they have {speeds}"
    set_aside(f"measured on this CPU, they have {speeds}; {VARIANT_VARIABLE} names one to use all the same")
    return f"torch computes: Octavo's own kernels have {speeds}"


def _speeds(directory: Path, settings: ModelSettings) -> Speeds | None:
    """Measures, or returns None where there is no choice or measuring fails, which is logged and ends nothing."""
    if settings.model_impl == "transformers":
        return None
    try:
        # What is measured are layers, whatever head is behind them.
        config = read_config(directory, settings.max_model_len, headless=True)
        quantized = settings.quantization != "none" or has_quantized_integers(directory)
        if quantized or settings.kv_cache_dtype != "auto" or not to_measure(config, exact=settings.exact):
            # Torch has kernels neither for quantised weights nor for a cache of another dtype.
            return None
        if settings.threads is not None:
            torch.set_num_threads(settings.threads)
        return known(config, _dtype(settings), settings.block_size)
    except ModelConfigError:
        # The model is one that transformers computes, or none; loading it reports that.
        return None
    except (OSError, RuntimeError, ValueError, MemoryError) as error:
        logger.warning("Octavo's own kernels compute: it cannot be measured whether torch is faster (%s)", error)
        return None


def _dtype(settings: ModelSettings) -> torch.dtype:
    """Returns the dtype of the computation on a CPU."""
    return torch.float32 if settings.dtype == "float32" else torch.bfloat16


@torch.inference_mode()
def measure(config: DecoderConfig, dtype: torch.dtype, block_size: int) -> Speeds:
    """Measures both ways in turns, with random weights: a machine's speed changes from moment to moment."""
    few = _few_layers(config, dtype)
    ours = _Way(few, dtype, block_size)
    set_aside("torch is measured")
    try:
        theirs = _Way(few, dtype, block_size)
    finally:
        set_aside(None)
    rounds, began = list[tuple[tuple[float, float], tuple[float, float]]](), time.perf_counter()
    while len(rounds) < _LEAST_ROUNDS or (len(rounds) < _MOST_ROUNDS and time.perf_counter() - began < _SECONDS):
        rounds.append((ours.round_s(), theirs.round_s()))
    del rounds[0]
    (prefill, decode), (their_prefill, their_decode) = (
        map(min, zip(*way, strict=True)) for way in zip(*rounds, strict=True)
    )
    return Speeds(their_prefill / prefill, their_decode / decode)


class _Way:
    """Some layers of a model, on the kernels that `load` gives or refuses at this moment."""

    def __init__(self, config: DecoderConfig, dtype: torch.dtype, block_size: int) -> None:
        layout = KVLayout.of(config, block_size, dtype)
        self._windows = [group.window for group in layout.groups]
        self._attention: AttentionBackend = choose_attention(layout.cache_shape, _CPU).attention
        self._model: Decoder = compiled(LlamaModel(config, DummyWeights(), dtype, _CPU), self._attention)
        blocks = -(-(_PROMPT + 1) // block_size)
        # A block holds one group's layers; unwritten slots must be finite for torch.
        self._tables = torch.arange(blocks * len(self._windows)).view(len(self._windows), 1, blocks)
        self._block_size = block_size
        self._cache = KVCache(layout, num_blocks=self._tables.numel(), num_cpu_blocks=0, device=_CPU)

    def round_s(self) -> tuple[float, float]:
        """Returns the seconds of a small prefill and of a decode step after it."""
        return self._seconds(_PROMPT, _PROMPT), self._seconds(1, _PROMPT + 1)

    def _seconds(self, tokens: int, context: int) -> float:
        """Returns the seconds of one pass of `tokens` tokens, the last of `context`."""
        began = time.perf_counter()
        positions = torch.arange(context - tokens, context)
        groups = [
            self._attention.step(GroupBatch(self._slots(table, positions), table, [context], [tokens], window))
            for window, table in zip(self._windows, self._tables, strict=True)
        ]
        ids, rows = torch.zeros(tokens, dtype=torch.int64), torch.tensor([tokens - 1])
        self._model.forward(PagedStep(ids, positions, rows, self._attention, groups, self._cache.layers))
        return time.perf_counter() - began

    def _slots(self, table: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return table[0, positions // self._block_size] * self._block_size + positions % self._block_size


def _layer_weights(config: DecoderConfig) -> int:
    heads = (2 * config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    return config.hidden_size * (heads + 3 * config.intermediate_size)


def _few_layers(config: DecoderConfig, dtype: torch.dtype) -> DecoderConfig:
    """Returns a configuration with as many layers as outgrow the CPU's caches, and hardly a vocabulary."""
    wanted = math.ceil(_WEIGHT_BYTES / (_layer_weights(config) * dtype.itemsize))
    layers = min(wanted, config.num_layers)
    return replace(
        config,
        num_layers=layers,
        rotaries=config.rotaries[:layers],
        windows=config.windows[:layers],
        vocab_size=min(config.vocab_size, 64),
        max_model_len=min(config.max_model_len, 2 * _PROMPT),
    )


def _key(config: DecoderConfig, dtype: torch.dtype, block_size: int) -> int:
    """Returns a hash of everything that the figures depend on."""
    few = replace(_few_layers(config, dtype), rotaries=(), windows=())
    machine = platform.machine(), _cpu_name(), torch.__version__, torch.get_num_threads(), source_hash()
    return zlib.crc32(repr((machine, few, config.windows, str(dtype), block_size)).encode())


def _cpu_name() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith(("model name", "CPU part")):
                return line.partition(":")[2].strip()
    return platform.processor()


def _kept(path: Path, make: Callable[[], Speeds]) -> Speeds:
    """Returns the figures that the file `path` holds. If there are none, writes those of `make`, unless another worker
    was quicker.

    Where nothing can be kept, each worker's own figures hold.
    """
    if (found := _read(path)) is not None:
        return found
    made = make()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, encoding="utf-8") as file:
            json.dump(asdict(made), file)
            file.flush()
            if _read(path) is None:
                path.unlink(missing_ok=True)
            with contextlib.suppress(FileExistsError):
                os.link(file.name, path)
    except OSError as error:
        failed(KERNEL_SPEEDS, error, f"what computes faster is not kept in {path}: workers may choose differently")
    return _read(path) or made


def _read(path: Path) -> Speeds | None:
    try:
        speeds = Speeds(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None
    numbers = (speeds.prefill, speeds.decode)
    return speeds if all(isinstance(one, float) and 0 < one < math.inf for one in numbers) else None
