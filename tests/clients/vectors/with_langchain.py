"""langchain-openai's embeddings: documents and queries, over asyncio too, cut vectors, and a store that searches by
them."""

import asyncio
import math
from collections.abc import Sequence
from typing import Any

from langchain_core.vectorstores import InMemoryVectorStore  # type: ignore[import-not-found]
from langchain_openai import OpenAIEmbeddings  # type: ignore[import-not-found]

from ..checks import Service, main

_TEXTS = [f"The {colour} house is number {number}." for number in range(20) for colour in ("red", "blue", "green")]


def model_of(service: Service, **options: Any) -> Any:
    place = {"base_url": service.base_url, "api_key": service.key, "max_retries": 0}
    # Else it would count tokens as OpenAI's models do.
    return OpenAIEmbeddings(**{"model": service.model, "check_embedding_ctx_length": False, **place, **options})


def _length(vector: Sequence[float]) -> float:
    return math.sqrt(sum(value * value for value in vector))


def _differ(one: Sequence[float], other: Sequence[float]) -> float:
    return max(abs(a - b) for a, b in zip(one, other, strict=True))


def documents_and_query(service: Service) -> str:
    model = model_of(service, chunk_size=7)
    vectors = model.embed_documents(_TEXTS)
    assert len(vectors) == len(_TEXTS)
    # A query is a text like others, and the same whatever is beside it.
    assert _differ(model.embed_query(_TEXTS[5]), vectors[5]) < 1e-6
    assert _differ(vectors[0], vectors[1]) > 1e-3
    return f"{len(vectors)} vectors of {len(vectors[0])} numbers"


def asyncio_too(service: Service) -> str:
    async def both() -> tuple[list[list[float]], list[float]]:
        model = model_of(service)
        return await model.aembed_documents(_TEXTS[:3]), await model.aembed_query(_TEXTS[2])

    vectors, query = asyncio.run(both())
    assert _differ(query, vectors[2]) < 1e-6
    return f"{len(vectors)} vectors"


def cut_vectors(service: Service) -> str:
    [vector] = model_of(service, dimensions=32).embed_documents(_TEXTS[:1])
    assert len(vector) == 32
    assert abs(_length(vector) - 1) < 1e-5
    return f"{len(vector)} numbers, length {_length(vector):.6f}"


def a_store_finds_a_text(service: Service) -> str:
    store = InMemoryVectorStore(model_of(service))
    store.add_texts(_TEXTS)
    [(found, score)] = store.similarity_search_with_score(_TEXTS[17], k=1)
    assert found.page_content == _TEXTS[17]
    assert score > 0.999
    return f"{found.page_content!r}, {score:.6f}"


def a_bad_request(service: Service) -> str:
    refusal = ""
    try:
        model_of(service).embed_documents(["fine", ""])
    except Exception as error:
        refusal = str(error)
    assert "400" in refusal, refusal
    return refusal


main(documents_and_query, asyncio_too, cut_vectors, a_store_finds_a_text, a_bad_request)
