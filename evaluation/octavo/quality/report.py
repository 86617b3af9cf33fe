"""Writes the qualities of models as a table."""

from collections.abc import Iterator, Mapping

from octavo.quality.measures import Estimate, Quality

_HEADS = ("", "perplexity", "KL divergence, nats", "largest", "same top token")


def as_text(qualities: Mapping[str, Quality]) -> str:
    """Formats the quality of a model, the first, and of what it was compared with: what stands beside a reference is
    the model's distance from it."""
    rows = [_HEADS, *_rows(qualities)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip() for row in rows
    )


def _rows(qualities: Mapping[str, Quality]) -> Iterator[tuple[str, ...]]:
    (name, model), *references = qualities.items()
    yield name, _shown(model.perplexity, 3), "", "", ""
    for (reference, quality), distance in zip(references, model.distances, strict=True):
        yield (
            f"  beside {reference}",
            _shown(quality.perplexity, 3),
            _shown(distance.divergence, 5),
            f"{distance.largest:.4f}",
            f"{_shown(Estimate(100 * distance.same_top.mean, 100 * distance.same_top.error), 2)} %",
        )


def _shown(estimate: Estimate, digits: int) -> str:
    return f"{estimate.mean:.{digits}f} ± {estimate.error:.{digits}f}"
