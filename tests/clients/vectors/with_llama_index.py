"""llama-index: vectors of texts and queries, whole lists, and over asyncio."""

import asyncio
from typing import Any

from llama_index.embeddings.openai_like import OpenAILikeEmbedding  # type: ignore[import-not-found]

from ..checks import Service, main

_TEXTS = [f"Text number {number} of some." for number in range(25)]


def model_of(service: Service) -> Any:
    return OpenAILikeEmbedding(
        model_name=service.model, api_base=service.base_url, api_key=service.key, embed_batch_size=10, max_retries=0
    )


def texts_and_query(service: Service) -> str:
    model = model_of(service)
    vectors = model.get_text_embedding_batch(_TEXTS)
    assert len(vectors) == len(_TEXTS)
    query = model.get_query_embedding(_TEXTS[3])
    assert model.similarity(query, vectors[3]) > 0.99999
    assert model.similarity(query, vectors[4]) < 0.99999
    return f"{len(vectors)} vectors of {len(vectors[0])} numbers"


def asyncio_too(service: Service) -> str:
    model = model_of(service)
    vectors = asyncio.run(model.aget_text_embedding_batch(_TEXTS[:12]))
    assert model.similarity(vectors[11], model.get_text_embedding(_TEXTS[11])) > 0.99999
    return f"{len(vectors)} vectors"


main(texts_and_query, asyncio_too)
