"""Serves POST /score, /rerank and /classify: scores of pairs of texts, the order of documents by them, and classes."""

import asyncio
from array import array
from collections.abc import Callable, Sequence
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import Response

from octavo.frontend.api.body import read_call, unknown_fields_header
from octavo.frontend.api.endpoint import Api, fresh_id
from octavo.frontend.errors import InvalidRequest, Reason, bad_parameter
from octavo.frontend.openai.answers import encode
from octavo.frontend.openai.embeddings import asking, read_inputs, run, usage_of
from octavo.frontend.openai.schemas import POOLING_UNSUPPORTED, ClassifyBody, PoolingBody, RerankBody, ScoreBody
from octavo.frontend.request.pooling import check_inputs, cosine, numbers_of, sigmoid, softmax
from octavo.frontend.stream.pooling import Output
from octavo.frontend.stream.preparation import check_task
from octavo.frontend.text.pooling_defaults import Activation
from octavo.wire.pooling import PoolingTask

# The names by which models know the prompts of the two sides of a comparison.
_QUERY, _DOCUMENT = ("query",), ("document", "passage")


async def score(api: Api, request: Request) -> Response:
    """Scores a text against each of several, or several pairs of texts, in vLLM's form."""
    body, unknown = await read_call(request, ScoreBody, POOLING_UNSUPPORTED, api.generation.beginnings)
    first, second = _sides(body)
    scores, found = await _scores(api, request, body, first, second, activates=body.use_activation is not False)
    answer = {
        "id": f"score-{body.request_id or fresh_id()}",
        "object": "list",
        "created": api.started_at,
        "model": body.model or api.generation.model_name,
        "data": [{"object": "score", "index": index, "score": each} for index, each in enumerate(scores)],
        "usage": usage_of(found),
    }
    return Response(encode(answer), headers=unknown_fields_header(unknown), media_type="application/json")


async def rerank(api: Api, request: Request) -> Response:
    """Orders documents by how well they answer a query, in the form of Jina's and Cohere's APIs."""
    body, unknown = await read_call(request, RerankBody, POOLING_UNSUPPORTED, api.generation.beginnings)
    if body.top_n is not None and body.top_n < 0:
        raise bad_parameter("top_n", body.top_n, "it must be at least 1; leave it out for all documents")
    documents = [_text_of(index, each) for index, each in enumerate(body.documents)]
    check_inputs("documents", len(documents))
    activates = body.use_activation is not False
    scores, found = await _scores(api, request, body, [body.query], documents, activates=activates)
    order = sorted(range(len(scores)), key=lambda index: -scores[index])
    results: list[dict[str, Any]] = [
        {"index": index, "relevance_score": scores[index]} for index in order[: body.top_n or len(order)]
    ]
    if body.return_documents is not False:
        for result in results:
            result["document"] = {"text": documents[result["index"]]}
    answer = {
        "id": f"rerank-{body.request_id or fresh_id()}",
        "model": body.model or api.generation.model_name,
        "usage": usage_of(found),
        "results": results,
    }
    return Response(encode(answer), headers=unknown_fields_header(unknown), media_type="application/json")


async def classify(api: Api, request: Request) -> Response:
    """Gives the probability of each class, in vLLM's form."""
    body, unknown = await read_call(request, ClassifyBody, POOLING_UNSUPPORTED, api.generation.beginnings)
    inputs = read_inputs("input", body.input)
    if (pooling := api.generation.pooling_model) is not None:
        check_task(pooling, PoolingTask.CLASSIFY, api.generation.model_name)
    asks = asking(api, request, body, PoolingTask.CLASSIFY)
    asked = [asks(each) for each in inputs]
    found = await run(api, request, asked, body)
    data = []
    for index, output in enumerate(found):
        probabilities = _activated(api, numbers_of(output.values), activates=body.use_activation is not False)
        best = max(range(len(probabilities)), key=probabilities.__getitem__)
        names = api.generation.pooling_defaults.labels
        label = names[best] if best < len(names) else f"LABEL_{best}"
        data.append({"index": index, "label": label, "probs": probabilities, "num_classes": len(probabilities)})
    answer = {
        "id": f"classify-{body.request_id or fresh_id()}",
        "object": "list",
        "created": api.started_at,
        "model": body.model or api.generation.model_name,
        "data": data,
        "usage": usage_of(found),
    }
    return Response(encode(answer), headers=unknown_fields_header(unknown), media_type="application/json")


def _sides(body: ScoreBody) -> tuple[list[str], list[str]]:
    """Returns the two sides of the pairs, under any of the names that APIs give them."""
    sides = []
    for names in (("text_1", "queries"), ("text_2", "documents", "items")):
        given = [(name, value) for name in names if (value := getattr(body, name)) is not None]
        if len(given) != 1:
            raise bad_parameter(
                names[0], "missing" if not given else "given twice", f"one of {', '.join(names)} must be set"
            )
        [(name, value)] = given
        texts = [value] if isinstance(value, str) else list(value)
        check_inputs(name, len(texts))
        sides.append(texts)
    first, second = sides
    if len(first) not in (1, len(second)):
        rule = f"it must be one text, or as many as the {len(second)} of the other side"
        raise bad_parameter("text_1", f"a list of {len(first)}", rule)
    return first, second


def _text_of(index: int, document: str | dict[str, Any]) -> str:
    text = document if isinstance(document, str) else document.get("text")
    if not isinstance(text, str):
        raise bad_parameter(f"documents[{index}]", "without a text", "it must be a text, or an object with one")
    return text


async def _scores(
    api: Api, request: Request, body: PoolingBody, first: Sequence[str], second: Sequence[str], *, activates: bool
) -> tuple[list[float], list[Output]]:
    """Returns the score of each pair: by a model that reads both texts together, or by the angle between their
    vectors."""
    for field, texts in (("query", first), ("document", second)):
        if not all(texts):
            raise bad_parameter(field, "empty", "there must be at least one token in each text")
    pooling = api.generation.pooling_model
    task = PoolingTask.EMBED if pooling is None else pooling.task
    if pooling is None and api.generation.served_model_len:
        check_task(None, PoolingTask.EMBED, api.generation.model_name)
    if task is PoolingTask.EMBED:
        return await _angles(api, request, body, first, second)
    if pooling is not None and pooling.num_outputs != 1:
        raise InvalidRequest(
            Reason.WRONG_TASK,
            f"the model {api.generation.model_name} scores {pooling.num_outputs} classes, and a pair needs a model of"
            " one; use /classify",
        )
    pairs = zip([first[0]] * len(second) if len(first) == 1 else first, second, strict=True)
    asks = asking(api, request, body, task)
    asked = [asks(one, pair=other) for one, other in pairs]
    found = await run(api, request, asked, body)
    return [_activated(api, numbers_of(output.values), activates=activates)[0] for output in found], found


async def _angles(
    api: Api, request: Request, body: PoolingBody, first: Sequence[str], second: Sequence[str]
) -> tuple[list[float], list[Output]]:
    prompts = api.generation.pooling_defaults
    query, document = prompts.prompt(None, *_QUERY), prompts.prompt(None, *_DOCUMENT)
    asks = asking(api, request, body, PoolingTask.EMBED)
    asked = [asks(each, prompt=query) for each in first] + [asks(each, prompt=document) for each in second]
    found = await run(api, request, asked, body)
    vectors = [numbers_of(output.values) for output in found]
    ones, others = vectors[: len(first)], vectors[len(first) :]
    scores = []
    for index, other in enumerate(others):
        # Others get their turn meanwhile.
        if index % 64 == 63:
            await asyncio.sleep(0)
        scores.append(cosine(ones[index if len(ones) > 1 else 0], other))
    return scores, found


_ACTIVATIONS: Final[dict[Activation, Callable[[Sequence[float]], list[float]]]] = {
    Activation.NONE: list,
    Activation.SIGMOID: lambda scores: [sigmoid(each) for each in scores],
    Activation.SOFTMAX: softmax,
}


def _activated(api: Api, scores: "array[float]", *, activates: bool) -> list[float]:
    """Returns the probabilities that the model's files say its scores stand for, or with no activation the scores."""
    defaults = api.generation.pooling_defaults
    activation = defaults.activation if len(scores) == 1 else defaults.activation_of_many
    return _ACTIVATIONS[activation if activates else Activation.NONE](scores)
