"""The API's page lists the errors that there are."""

import re
from pathlib import Path

from octavo.frontend.errors import TABLE

PAGE = Path(__file__).parents[2] / "docs/api.md"


def test_the_page_has_every_reason_with_its_statuses() -> None:
    page = PAGE.read_text(encoding="utf-8")
    rows = re.findall(r"^\| [^|]+ \| (\d{3}) \| ([A-Z_]+) \| ([^|]+) \|$", page, re.MULTILINE)
    told = {(int(status), code): sorted(re.findall(r"`(\w+)`", reasons)) for status, code, reasons in rows}
    assert told == {(terms.status, terms.code): sorted(reasons) for terms, reasons in TABLE.items()}
