"""Measures texts per second through all processes beside sentence-transformers: `python -m
octavo.bench.whole.embeddings --peer PYTHON`.

PYTHON is that of the environment that `make bench-embeddings` makes, which has sentence-transformers and
all-MiniLM-L6-v2. Both sides compute with as many threads, in turns, the same texts; each round is timed from the first
text to the last vector. sentence-transformers gets all texts in one call of `encode`, which sorts them by their length
and takes 32 at a time. Octavo gets them as a client for MTEB sends them, one call of 32 texts after the other, over
HTTP with vectors in base64 as OpenAI's client wants them, or over gRPC.
"""

import argparse
import base64
import contextlib
import statistics
import sys
import tempfile
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, Final

from octavo.bench.child import MeasuredChild
from octavo.bench.table import keep, table
from octavo.runtime.models.directory import resolve_model
from octavo.testbed.stack import Stack
from octavo.v1 import generation_pb2 as pb
from octavo.worker.process import available_cores

GOAL: Final = 1.5
# As much as two vectors of one text may differ by in any number.
TOLERANCE: Final = 1e-4
_BATCH: Final = 32
_PEER: Final = Path(__file__).parent / "sentence_transformers_peer.py"
_TEXT: Final = (
    "the quick brown fox jumps over lazy dogs while seven wizards brew potions under northern lights and trains depart"
    " from quiet stations every morning because nobody asked them to wait for rain"
)

Encode = Callable[[Sequence[str]], list["array[float]"]]


@dataclass(frozen=True)
class TextLoad:
    """Describes texts of `least` to `most` words; more tokens than the model takes are cut off."""

    name: str
    count: int
    least: int
    most: int

    def texts(self) -> list[str]:
        """Returns the texts, the same at each call."""
        chance, words = Random(self.name), _TEXT.split()
        return [" ".join(chance.choices(words, k=chance.randint(self.least, self.most))) for _ in range(self.count)]


# Titles and queries; and passages of as many tokens as all-MiniLM-L6-v2 takes.
LOADS: Final = (TextLoad("short texts", 512, 4, 16), TextLoad("256 tokens", 64, 300, 300))


@dataclass
class TextSpeeds:
    """Holds texts per second of each side in each round, and the largest difference between numbers of vectors."""

    load: TextLoad
    peer: list[float] = field(default_factory=list)
    http: list[float] = field(default_factory=list)
    grpc: list[float] = field(default_factory=list)
    difference: float = 0.0

    def ratio(self, side: Sequence[float]) -> float:
        """Returns how many times as fast as sentence-transformers a side is: the median of rounds, each beside its
        own."""
        return statistics.median(ours / theirs for ours, theirs in zip(side, self.peer, strict=True))


def measure(stack: Stack, peer: MeasuredChild, loads: Sequence[TextLoad], rounds: int) -> Iterator[TextSpeeds]:
    """Measures each load in turns, after a round that is not counted."""
    with contextlib.closing(stack.http()) as client:
        sides: dict[str, Encode] = {
            "http": lambda texts: _over_http(client, texts),
            "grpc": lambda texts: _over_grpc(stack, texts),
        }
        for load in loads:
            texts, speeds = load.texts(), TextSpeeds(load)
            for number in range(rounds + 1):
                answer: dict[str, Any] = peer.ask("encode", texts)
                expected = [array("f", each) for each in answer["vectors"]]
                if number:
                    speeds.peer.append(load.count / answer["seconds"])
                for side, encode in sides.items():
                    began = time.perf_counter()
                    vectors = [vector for batch in _batches(texts) for vector in encode(batch)]
                    if number:
                        getattr(speeds, side).append(load.count / (time.perf_counter() - began))
                    speeds.difference = max(speeds.difference, _difference(vectors, expected))
            yield speeds


def _batches(texts: Sequence[str]) -> Iterator[Sequence[str]]:
    return (texts[first : first + _BATCH] for first in range(0, len(texts), _BATCH))


def _difference(vectors: Sequence["array[float]"], expected: Sequence["array[float]"]) -> float:
    pairs = zip(vectors, expected, strict=True)
    return max(abs(one - other) for ours, theirs in pairs for one, other in zip(ours, theirs, strict=True))


def _over_http(client: Any, texts: Sequence[str]) -> list["array[float]"]:
    body = {"input": list(texts), "encoding_format": "base64", "truncate_prompt_tokens": -1}
    answer = client.post("/v1/embeddings", json=body)
    answer.raise_for_status()
    return [array("f", base64.b64decode(each["embedding"])) for each in answer.json()["data"]]


def _over_grpc(stack: Stack, texts: Sequence[str]) -> list["array[float]"]:
    inputs = [pb.EmbedInput(text=text) for text in texts]
    answer = stack.generation.Embed(pb.EmbedRequest(inputs=inputs, truncate_to=0), timeout=120)
    return [array("f", each.values) for each in answer.embeddings]


def to_lines(found: Sequence[TextSpeeds]) -> Iterator[str]:
    """Yields the lines of a table."""
    heads = ("texts a second", "sentence-transformers", "HTTP", "gRPC", "times as fast", "goal", "differ by")
    yield from table([heads, *map(_cells, found)])


def _cells(speeds: TextSpeeds) -> tuple[str, ...]:
    return (
        speeds.load.name,
        *(f"{statistics.median(side):.1f}" for side in (speeds.peer, speeds.http, speeds.grpc)),
        f"{speeds.ratio(speeds.http):.2f}, {speeds.ratio(speeds.grpc):.2f}",
        f"{GOAL:g}",
        f"{speeds.difference:.1e}",
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the table, and writes JSON where asked; fails where the two give other vectors."""
    parser = argparse.ArgumentParser(prog="octavo.bench.whole.embeddings", description=__doc__)
    parser.add_argument("--peer", required=True, type=Path, help="the Python that has sentence-transformers")
    parser.add_argument("--model", help="a model of sentence-transformers; the peer's package where left out")
    parser.add_argument("--threads", type=int, default=available_cores())
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--loads", nargs="+", choices=[load.name for load in LOADS], default=[each.name for each in LOADS]
    )
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    loads = [load for load in LOADS if load.name in options.loads]
    with contextlib.ExitStack() as open_until_then:
        directory = Path(open_until_then.enter_context(tempfile.TemporaryDirectory(prefix="octavo-")))
        command = [options.peer, _PEER, str(options.threads), options.model or ""]
        peer = open_until_then.enter_context(contextlib.closing(MeasuredChild(command, directory / "peer.log")))
        about: dict[str, str] = peer.ask("about")
        print(f"{about['version']}, {about['model']}, {options.threads} threads each, {options.rounds} rounds")
        environment = {"OCTAVO_THREADS": str(options.threads), "OCTAVO_CALIBRATE": "false"}
        stack = open_until_then.enter_context(Stack(resolve_model(about["model"]), directory / "stack", environment))
        stack.start_all()
        found = list(measure(stack, peer, loads, options.rounds))
    print("\n".join(to_lines(found)))
    keep(found, options.json)
    return int(any(speeds.difference > TOLERANCE for speeds in found))


if __name__ == "__main__":
    sys.exit(main())
