"""The API's page lists the errors that there are, the fields that are not OpenAI's own, and what becomes of each."""

import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from openai.types.batch_create_params import BatchCreateParams as OpenAIBatch
from openai.types.chat.completion_create_params import CompletionCreateParamsBase as OpenAIChat
from openai.types.completion_create_params import CompletionCreateParamsBase as OpenAICompletion
from openai.types.embedding_create_params import EmbeddingCreateParams as OpenAIEmbedding
from openai.types.responses.response_create_params import ResponseCreateParamsBase as OpenAIResponse

from octavo.frontend.access.access import Access
from octavo.frontend.anthropic.schemas import COUNT_UNSUPPORTED, MESSAGES_UNSUPPORTED, CountTokensBody, MessagesBody
from octavo.frontend.api.body import Neutral, read_fields
from octavo.frontend.app import build_app
from octavo.frontend.batch.routes import BatchBody
from octavo.frontend.errors import TABLE, Unsupported
from octavo.frontend.openai.infill import INFILL_UNSUPPORTED, InfillBody
from octavo.frontend.openai.responses_input import RESPONSES_UNSUPPORTED, ResponsesBody
from octavo.frontend.openai.schemas import (
    CHAT_UNSUPPORTED,
    COMPLETION_UNSUPPORTED,
    POOLING_UNSUPPORTED,
    TOKENIZE_UNSUPPORTED,
    ChatBody,
    ClassifyBody,
    CompletionBody,
    DetokenizeBody,
    EmbeddingBody,
    RerankBody,
    ScoreBody,
    TokenizeBody,
)

PAGE = Path(__file__).parents[2] / "docs/api.md"


def test_the_page_has_every_reason_with_its_statuses() -> None:
    page = PAGE.read_text(encoding="utf-8")
    rows = re.findall(r"^\| [^|]+ \| (\d{3}) \| ([A-Z_]+) \| ([^|]+) \|$", page, re.MULTILINE)
    told = {(int(status), code): sorted(re.findall(r"`(\w+)`", reasons)) for status, code, reasons in rows}
    there: dict[tuple[int, str], list[str]] = {(terms.status, terms.code): [] for terms in TABLE}
    for terms, reasons in TABLE.items():
        there[terms.status, terms.code] += reasons
    assert told == {statuses: sorted(reasons) for statuses, reasons in there.items()}


def test_the_page_names_every_field_that_is_not_openais() -> None:
    text = PAGE.read_text(encoding="utf-8")
    paragraph = text[text.index("**Fields.**") : text.index("**Streams**")]
    named = [name.replace("*", r"\w+") for name in re.findall(r"`([\w*]+)`", paragraph)]
    known = re.compile("|".join(named))
    openais = {*OpenAIChat.__annotations__, *OpenAICompletion.__annotations__, "stream"}
    ours = {*ChatBody.__struct_fields__, *CompletionBody.__struct_fields__} - openais
    assert "repetition_penalty" in ours
    assert [name for name in sorted(ours) if not known.fullmatch(name)] == []


@dataclass(frozen=True)
class Call:
    """What a route reads: a body of this kind, of which the example is one, and what it refuses."""

    kind: type[msgspec.Struct]
    unsupported: Neutral
    example: dict[str, Any]


_MESSAGES = [{"role": "user", "content": "a"}]
CALLS: dict[str, Call] = {
    "chat": Call(ChatBody, CHAT_UNSUPPORTED, {"messages": _MESSAGES}),
    "completions": Call(CompletionBody, COMPLETION_UNSUPPORTED, {"prompt": "a"}),
    "responses": Call(ResponsesBody, RESPONSES_UNSUPPORTED, {"input": "a"}),
    "messages": Call(MessagesBody, MESSAGES_UNSUPPORTED, {"messages": _MESSAGES, "max_tokens": 1}),
    "count": Call(CountTokensBody, COUNT_UNSUPPORTED, {"messages": _MESSAGES}),
    "infill": Call(InfillBody, INFILL_UNSUPPORTED, {}),
    "embeddings": Call(EmbeddingBody, POOLING_UNSUPPORTED, {"input": "a"}),
    "score": Call(ScoreBody, POOLING_UNSUPPORTED, {"text_1": "a", "text_2": "b"}),
    "rerank": Call(RerankBody, POOLING_UNSUPPORTED, {"query": "a", "documents": ["b"]}),
    "classify": Call(ClassifyBody, POOLING_UNSUPPORTED, {"input": "a"}),
    "tokenize": Call(TokenizeBody, TOKENIZE_UNSUPPORTED, {"prompt": "a"}),
    "detokenize": Call(DetokenizeBody, {}, {"tokens": [1]}),
    "batches": Call(BatchBody, {}, {"input_file_id": "a", "endpoint": "b", "completion_window": "24h"}),
}
OPENAIS = {
    "chat": OpenAIChat,
    "completions": OpenAICompletion,
    "responses": OpenAIResponse,
    "embeddings": OpenAIEmbedding,
    "batches": OpenAIBatch,
}


def rows() -> Iterator[tuple[str, str, str]]:
    """Each call and field of the table, with the word that says what becomes of it."""
    section = PAGE.read_text(encoding="utf-8").partition("## Routes and fields, one by one")[2]
    table = section.partition("| route that is not there")[0]
    for calls, fields, _, here in re.findall(
        r"^\| ([a-z, ]+) \| ([^|]+) \| ([^|]*)\| ([^|]+) \|$", table, re.MULTILINE
    ):
        word = re.split(r"\W", here)[0]
        for call in calls.split(", "):
            for field in re.findall(r"`(\w+)`", fields):
                if call != "calls":
                    yield call, field, word


def told(word: str) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {call: set() for call in CALLS}
    for call, field, said in rows():
        if said == word:
            found[call].add(field)
    return found


def test_the_table_says_one_thing_of_each_field() -> None:
    assert [each for each, count in Counter((call, field) for call, field, _ in rows()).items() if count > 1] == []
    assert {word for _, _, word in rows()} == {"served", "idle", "named", "refused"}


@pytest.mark.parametrize("call", CALLS)
def test_the_table_has_every_field_that_a_call_reads_or_refuses(call: str) -> None:
    kind, unsupported = CALLS[call].kind, CALLS[call].unsupported
    read = set(kind.__struct_encode_fields__) - unsupported.keys()
    assert told("served")[call] | told("idle")[call] == read
    assert told("refused")[call] == set(unsupported)


@pytest.mark.parametrize("call", CALLS)
def test_what_the_table_says_of_a_field_becomes_of_it(call: str) -> None:
    of = CALLS[call]

    def unknown(**fields: Any) -> list[str]:
        return read_fields(json.dumps({**of.example, **fields}).encode(), of.kind, of.unsupported)[1]

    for field in told("refused")[call]:
        with pytest.raises(Unsupported) as refused:
            unknown(**{field: "x"})
        assert refused.value.metadata["field"] == field
    for field in told("named")[call]:
        assert unknown(**{field: "x"}) == [field]


@pytest.mark.parametrize("call", OPENAIS)
def test_the_table_has_every_field_of_openais(call: str) -> None:
    named = {field for each, field, _ in rows() if each == call}
    assert OPENAIS[call].__annotations__.keys() - named == set()


def test_the_page_has_every_route_and_none_that_is_not_there() -> None:
    config = SimpleNamespace(scheduler_admin="", enable_cache_reset=True, batch_directory=None)
    app = build_app(SimpleNamespace(), Access(), config)  # type: ignore[arg-type]
    there = {_plain(route.path) for route in app.routes if not route.path.startswith("/page/")}  # type: ignore[attr-defined]
    page = PAGE.read_text(encoding="utf-8")
    named = set(map(_plain, re.findall(r"(/[\w/{}-]*)`", page[page.index("## HTTP") : page.index("```console")])))
    assert there - named == set()
    rows = page.partition("| route that is not there")[2].partition("\n\n")[0].splitlines()
    absent = {_plain(path) for row in rows for path in re.findall(r"`(/[\w/-]+)`", row.split("|")[1])}
    assert len(absent) > 30
    assert absent & there == set()


def _plain(path: str) -> str:
    """Without the names of its variables, and without the version: some paths have several."""
    return re.sub(r"^/v[12](?=/)", "", re.sub(r"\{[^}]*}", "{}", path))
