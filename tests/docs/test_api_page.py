"""The API's page lists the errors that there are, and the fields that are not OpenAI's own."""

import re
from pathlib import Path

from openai.types.chat.completion_create_params import CompletionCreateParamsBase as OpenAIChat
from openai.types.completion_create_params import CompletionCreateParamsBase as OpenAICompletion

from octavo.frontend.errors import TABLE
from octavo.frontend.openai.schemas import ChatBody, CompletionBody

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
