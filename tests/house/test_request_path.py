"""A request lies in few kinds of object, and goes through few files: a reader can follow it."""

from pathlib import Path
from typing import Final

import pytest

from .request_path import RequestPath, walk

# What is asked, its share of what may be held, who reads it and how it ended, what was generated, and what its client
# gets.
LIES_IN: Final = {
    "request.request.GenerationRequest",
    "access.admission.Ticket",
    "stream.running.RunningRequest",
    "scheduler.journal.Journal",
    "scheduler.journal.SequenceJournal",
    "stream.answer.Answer",
    "stream.completion.SequenceText",
}


@pytest.fixture
async def path(tmp_path: Path) -> RequestPath:
    return await walk(tmp_path)


async def test_a_request_lies_in_few_kinds_of_object_and_goes_through_few_files(path: RequestPath) -> None:
    assert {kind.removeprefix("octavo.frontend.") for kind in path.kinds} == LIES_IN
    services = {file.split("/")[0] for file in path.files}
    assert services == {"frontend", "scheduler"}
    # On a busy machine one or two more: what a late timer does.
    assert len(path.files) <= 62
    assert len(path.functions) <= 533
