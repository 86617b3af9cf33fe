"""Decoders that give outputs of whole texts: which do, by what files or by what option, and how they are loaded."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import torch

from octavo.wire.pooling import PoolingTask
from octavo.worker.loading.headless import HeadlessWeights
from octavo.worker.loading.load_format import open_weights
from octavo.worker.model_settings import ModelSettings
from octavo.worker.models.config import read_config
from octavo.worker.models.config_file import ModelConfigError, UnsupportedSetting
from octavo.worker.models.encoders.families import classifies
from octavo.worker.models.linear import obstacle_to_quantized
from octavo.worker.models.llama import LlamaModel
from octavo.worker.pooling.gathering import LAST
from octavo.worker.pooling.heads import EmbeddingHead, score_layer
from octavo.worker.pooling.sentence_files import NAMED_MODES, SentencePooling, has_sentence_files, read_pooling


@dataclass(frozen=True, slots=True)
class DecoderPooling:
    """Says what a decoder gives of whole texts: its `task`, and how that is `pooled`; scores of `num_classes`."""

    task: PoolingTask
    pooled: SentencePooling
    num_classes: int = 0


def decoder_pooling(directory: Path, asked: str) -> DecoderPooling | None:
    """Returns what the decoder in `directory` is to give of texts, by one of `POOLINGS`; None if it generates.

    Raises `ModelConfigError` for one that its files say to be computed in another way.
    """
    if asked == "none":
        return None
    scores = asked == "auto" and classifies(directory)
    if not (scores or asked in NAMED_MODES or has_sentence_files(directory)):
        return None
    keys = _read(directory / "config.json")
    if keys.get("is_causal") is False:
        raise UnsupportedSetting(
            f"{directory} has is_causal = false: a decoder that attends to both sides is not served"
        )
    if keys.get("auto_map") and asked == "auto":
        raise UnsupportedSetting(
            f"{directory} has code of its own, which Octavo does not run, and which may attend to both sides: if it"
            f" does not, say so by naming the pooling: --pooling {'|'.join(NAMED_MODES)}"
        )
    if scores:
        # transformers' own number of classes where config.json says nothing.
        count = len(keys.get("id2label") or ()) or keys.get("num_labels") or 2
        return DecoderPooling(PoolingTask.CLASSIFY, SentencePooling((LAST,)), count)
    pooled, context = read_pooling(directory, asked), keys.get("max_position_embeddings")
    if pooled.max_tokens is not None and isinstance(context, int):
        pooled = replace(pooled, max_tokens=min(pooled.max_tokens, context))
    return DecoderPooling(PoolingTask.EMBED, pooled)


def pooling_settings(settings: ModelSettings, pooling: DecoderPooling | None) -> ModelSettings:
    """Returns the settings of a worker with `pooling`: `--dtype auto` is float32 there, as vectors are compared with
    others that were made so; and texts are no longer than the model's files say. Raises `ModelConfigError`."""
    if pooling is None:
        return settings
    if reason := _obstacle(settings):
        raise ModelConfigError(f"{settings.model} is to give outputs of texts: {reason}")
    return replace(
        settings,
        dtype="float32" if settings.dtype == "auto" else settings.dtype,
        max_model_len=settings.max_model_len or pooling.pooled.max_tokens,
    )


def _obstacle(settings: ModelSettings) -> str | None:
    """Returns which setting such a decoder is not computed with, and a remedy; None if there is none."""
    for option, value, plain in (
        ("--device", settings.device, "cpu"),
        ("--tp", settings.tp, 1),
        ("--draft-model", settings.draft_model, None),
    ):
        if value != plain:
            return f"{option} {value} is not for that; leave it out, or have it generate by --pooling none"
    if settings.model_impl == "transformers":
        return "Octavo itself computes that; leave --model-impl transformers out, or have it generate by --pooling none"
    return None


def load_decoder(
    directory: Path, settings: ModelSettings, dtype: torch.dtype, pooling: DecoderPooling
) -> tuple[LlamaModel, EmbeddingHead]:
    """Loads the layers of a decoder, and what makes outputs of their states. Raises `ModelConfigError` or
    `WeightsError`."""
    if settings.quantization != "none" and (reason := obstacle_to_quantized()):
        raise ModelConfigError(f"--quantization {settings.quantization} needs Octavo's own kernels: {reason}")
    config = read_config(directory, settings.max_model_len, headless=True)
    source = open_weights(
        directory, settings.load_format, quantization=settings.quantization, dequantized=settings.dequantized
    )
    size = config.hidden_size
    scores = score_layer(pooling.num_classes, size, source) if pooling.num_classes else None
    head = EmbeddingHead(pooling.pooled, size, scores)
    return LlamaModel(config, HeadlessWeights(source), dtype, torch.device("cpu"), headless=True), head


def _read(path: Path) -> dict[str, Any]:
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.MsgspecError) as error:
        raise ModelConfigError(f"{path} cannot be read: {error}") from error
