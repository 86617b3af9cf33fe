"""Texts are worked on in processes that may be slow, greedy or killed, and nobody else notices."""

import asyncio
import json
import os
import signal
import sys
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from octavo.frontend.errors import Broken, InvalidRequest, Reason, Unavailable
from octavo.frontend.request.chat import Chat, ChatMessage
from octavo.frontend.request.request import Constraint, ConstraintKind
from octavo.frontend.text.pool import AT_ONCE_CHARACTERS, SHORT_BYTES, TextPool, TextWorker
from octavo.frontend.text.tasks import Answer, Compile, Grammar, Loaded, LoadVocabulary, Task, TextSetup
from octavo.frontend.text.tokenizer import ModelTokenizer
from octavo.testbed.tiny_model import write_byte_model

# Does as the first word of the chat says.
TEMPLATE = """
{%- set word = messages[0].content.split(' ')[0] %}
{%- if word == 'slow' %}{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}{% endif %}
{%- if word == 'greedy' %}{{ messages[0].content * 999999 }}{% endif %}
{%- if word == 'wordy' %}{% for i in range(99999) %}{{ word * 200 }}{% endfor %}{% endif %}
{%- if word == 'bad' %}{{ raise_exception('not so') }}{% endif %}
{{- messages[0].content }}"""
LONG = "x" * SHORT_BYTES


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> ModelTokenizer:
    directory = tmp_path_factory.mktemp("texts")
    write_byte_model(directory)
    path = directory / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": TEMPLATE}))
    return ModelTokenizer(directory)


@pytest.fixture
async def pool(tokenizer: ModelTokenizer) -> AsyncIterator[TextPool]:
    pool = TextPool(tokenizer, processes=2, timeout_s=30.0)
    yield pool
    pool.close()


def chat(word: str) -> Chat:
    return Chat((ChatMessage("user", f"{word} {LONG}"),))


def is_gone(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()


async def until(pool: TextPool, count: int) -> None:
    async with asyncio.timeout(60):
        while len(pool.pids) < count:
            await asyncio.sleep(0.01)


async def test_long_and_short_texts_become_the_same_ids_as_ever(pool: TextPool, tokenizer: ModelTokenizer) -> None:
    for text in ("a", LONG, "日本" * 4000):
        assert await pool.encode(text) == tokenizer.encode(text)
    for conversation in (Chat((ChatMessage("user", "hi"),)), chat("fine")):
        assert await pool.encode(conversation) == tokenizer.encode_chat(conversation)
    assert await pool.encode([1, 2]) == [1, 2]
    assert await pool.decode(tokenizer.encode("日本"), skip_special_tokens=True) == "日本"


async def test_short_texts_need_no_process(pool: TextPool) -> None:
    await pool.encode("a" * (SHORT_BYTES // 4 - 1))
    await pool.encode(Chat((ChatMessage("user", "hi"),)))
    assert pool.pids == []


async def test_very_short_texts_need_no_thread(pool: TextPool) -> None:
    before = set(threading.enumerate())
    assert len(await pool.encode("a" * AT_ONCE_CHARACTERS)) == AT_ONCE_CHARACTERS
    assert set(threading.enumerate()) <= before
    assert len(await pool.encode("a" * (AT_ONCE_CHARACTERS + 1))) == AT_ONCE_CHARACTERS + 1
    assert set(threading.enumerate()) - before


async def test_a_slow_text_is_ended_and_nobody_else_is(tokenizer: ModelTokenizer) -> None:
    pool = TextPool(tokenizer, processes=2, timeout_s=2.0)
    try:
        slow = asyncio.create_task(pool.encode(chat("slow")))
        await until(pool, 1)
        [pid] = pool.pids
        assert len(await pool.encode(LONG)) == SHORT_BYTES
        with pytest.raises(InvalidRequest, match=r"more than 2(\.0)? s") as caught:
            await slow
        assert caught.value.reason is Reason.TEXT_TIMEOUT
        assert is_gone(pid)
        assert len(await pool.encode(LONG)) == SHORT_BYTES
    finally:
        pool.close()


async def test_a_killed_process_is_made_up_for(pool: TextPool) -> None:
    await pool.encode(LONG)
    [pid] = pool.pids
    os.kill(pid, signal.SIGKILL)
    assert len(await pool.encode(LONG)) == SHORT_BYTES
    assert pool.pids != [pid]


async def test_processes_killed_while_they_are_idle_are_no_texts_fault(pool: TextPool) -> None:
    slow = [asyncio.create_task(pool.encode(LONG * 50)) for _ in range(2)]
    await until(pool, 2)
    await asyncio.gather(*slow)
    for pid in pool.pids:
        os.kill(pid, signal.SIGKILL)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert len(await pool.encode(LONG)) == SHORT_BYTES
    assert len(pool.pids) == 1


async def test_a_process_is_told_no_secrets(pool: TextPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "a secret")
    await pool.encode(LONG)
    [pid] = pool.pids
    environment = Path(f"/proc/{pid}/environ").read_bytes()
    assert b"PATH=" in environment
    assert b"a secret" not in environment


async def test_what_kills_two_processes_is_refused(pool: TextPool) -> None:
    slow = asyncio.create_task(pool.encode(chat("slow")))
    killed: set[int] = set()
    while not slow.done():
        for pid in set(pool.pids) - killed:
            os.kill(pid, signal.SIGKILL)
            killed.add(pid)
        await asyncio.sleep(0.01)
    with pytest.raises(Broken, match="on this one, and on it alone"):
        await slow
    assert len(killed) == 2
    assert len(await pool.encode(LONG)) == SHORT_BYTES


@pytest.mark.parametrize(
    ("word", "message"),
    [("bad", "not so"), ("greedy", "too much memory"), ("wordy", "more than 16777216 characters")],
)
async def test_a_bad_text_is_refused_by_a_process_that_goes_on(pool: TextPool, word: str, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        await pool.encode(chat(word))
    [pid] = pool.pids
    assert len(await pool.encode(LONG)) == SHORT_BYTES
    assert pool.pids == [pid]


async def test_a_client_that_leaves_costs_no_process(pool: TextPool) -> None:
    await pool.encode(LONG)
    [pid] = pool.pids
    waiting = [asyncio.create_task(pool.encode(LONG * 50)) for _ in range(8)]
    await asyncio.sleep(0)
    for task in waiting:
        task.cancel()
    assert len(await pool.encode(LONG)) == SHORT_BYTES
    assert pid in pool.pids


async def test_constraints_become_grammars(pool: TextPool) -> None:
    assert await pool.compile(Constraint(ConstraintKind.REGEX, "[a-z]+"))
    with pytest.raises(InvalidRequest) as caught:
        await pool.compile(Constraint(ConstraintKind.REGEX, "("))
    assert caught.value.reason is Reason.BAD_CONSTRAINT
    assert caught.value.metadata["field"] == "constraint"


async def test_a_grammar_that_is_known_is_not_made_again(pool: TextPool) -> None:
    constraint = Constraint(ConstraintKind.CHOICE, choices=("a", "b"))
    grammar = await pool.compile(constraint)
    [pid] = pool.pids
    os.kill(pid, signal.SIGKILL)
    assert await pool.compile(constraint) == grammar
    assert pool.pids == [pid]


async def test_the_first_grammar_waits_for_a_vocabulary_however_long_a_task_may_take(
    tokenizer: ModelTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Task] = []

    async def ask(worker: TextWorker, task: Task) -> Answer:
        asked.append(task)
        if isinstance(task, LoadVocabulary):
            await asyncio.sleep(0.5)
            return Loaded()
        return Grammar("start: DIGIT")

    monkeypatch.setattr(TextWorker, "ask", ask)
    pool = TextPool(tokenizer, processes=1, timeout_s=0.2)
    constraints = [Constraint(ConstraintKind.REGEX, text) for text in ("1", "2")]
    try:
        assert [await pool.compile(each) for each in constraints] == ["start: DIGIT"] * 2
    finally:
        pool.close()
    assert asked == [LoadVocabulary(), *(Compile(each) for each in constraints)]


async def test_closing_leaves_no_process(tokenizer: ModelTokenizer) -> None:
    pool = TextPool(tokenizer, processes=2, timeout_s=30.0)
    await pool.encode(LONG)
    busy = asyncio.create_task(pool.encode(chat("slow")))
    await asyncio.sleep(0)
    idle = asyncio.create_task(pool.encode(LONG))
    await until(pool, 2)
    pids = pool.pids
    await idle
    pool.close()
    with pytest.raises(Unavailable, match="shutting down"):
        await busy
    assert all(map(is_gone, pids))
    with pytest.raises(Unavailable, match="shutting down"):
        await pool.encode(LONG)


async def test_a_process_ends_with_its_frontend(tokenizer: ModelTokenizer) -> None:
    script = """
import asyncio, sys
import msgspec
from octavo.frontend.text.tasks import TextSetup
from octavo.frontend.text.pool import TextWorker
async def main():
    worker = await TextWorker.start(msgspec.json.decode(sys.stdin.read(), type=TextSetup))
    print(worker.pid, flush=True)
    await asyncio.sleep(60)
asyncio.run(main())
"""
    pipe = asyncio.subprocess.PIPE
    frontend = await asyncio.create_subprocess_exec(sys.executable, "-c", script, stdin=pipe, stdout=pipe)
    assert frontend.stdin
    assert frontend.stdout
    frontend.stdin.write(msgspec.json.encode(TextSetup(tokenizer.files, 30.0)))
    frontend.stdin.close()
    pid = int(await asyncio.wait_for(frontend.stdout.readline(), 60))
    frontend.kill()
    await frontend.wait()
    async with asyncio.timeout(60):
        while not is_gone(pid):
            await asyncio.sleep(0.01)
