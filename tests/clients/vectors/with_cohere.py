"""cohere: documents in the order of their scores, and what it makes of a refusal."""

from typing import Any

import cohere  # type: ignore[import-not-found]

from ..checks import Service, main

_DOCUMENTS = ["The sea is wide.", "A red house stands on the hill.", "Trains leave at noon."]


def client_of(service: Service) -> Any:
    return cohere.ClientV2(api_key=service.key, base_url=f"http://{service.http}", timeout=60)


def rerank(service: Service) -> str:
    answer = client_of(service).rerank(model=service.model, query=_DOCUMENTS[1], documents=_DOCUMENTS)
    assert [sorted(each.index for each in answer.results)] == [[0, 1, 2]]
    scores = [each.relevance_score for each in answer.results]
    assert scores == sorted(scores, reverse=True)
    assert (answer.results[0].index, scores[0] > 0.999) == (1, True)
    return str([(each.index, round(each.relevance_score, 4)) for each in answer.results])


def the_best_of_many(service: Service) -> str:
    many = [f"{text} {number}" for number in range(100) for text in _DOCUMENTS]
    answer = client_of(service).rerank(model=service.model, query=many[250], documents=many, top_n=2)
    assert (len(answer.results), answer.results[0].index) == (2, 250)
    return f"{len(many)} documents"


def too_many(service: Service) -> str:
    refusal = (0, "")
    try:
        client_of(service).rerank(model=service.model, query="q", documents=["d"] * 10_000)
    except cohere.core.ApiError as error:
        refusal = (error.status_code, str(error.body))
    assert refusal[0] == 400, refusal
    return refusal[1]


main(rerank, the_best_of_many, too_many)
