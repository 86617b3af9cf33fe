"""Files, through the official client and by hand."""

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import openai
import pytest
from tests.frontend.batch.conftest import upload

from octavo.frontend.batch.files import FileBounds, Files
from octavo.frontend.batch.storage import Storage
from octavo.frontend.batch.upload import Form
from octavo.frontend.config import FrontendConfig
from octavo.frontend.http import protocol
from octavo.frontend.server import FrontendServer
from octavo.testing.fakes.failing_disk import FULL, failing_disk

BOUNDARY = "limit-of-parts"
HEADERS = {"content-type": f"multipart/form-data; boundary={BOUNDARY}"}


def part(name: str, value: bytes, filename: str | None = None) -> bytes:
    file = f'; filename="{filename}"' if filename else ""
    head = f'--{BOUNDARY}\r\ncontent-disposition: form-data; name="{name}"{file}\r\n\r\n'
    return head.encode() + value + b"\r\n"


END = f"--{BOUNDARY}--\r\n".encode()
PURPOSE = part("purpose", b"batch")


@pytest.fixture
async def http(frontend: FrontendServer) -> AsyncIterator[httpx.AsyncClient]:
    base_url = f"http://127.0.0.1:{frontend.http_port}"
    async with httpx.AsyncClient(base_url=base_url, trust_env=False, timeout=60) as client:
        yield client


async def test_a_file_comes_back_as_it_went(client: openai.AsyncOpenAI) -> None:
    content = bytes(range(256)) * 1000
    file = await client.files.create(file=("calls.jsonl", content), purpose="batch")
    assert (file.object, file.filename, file.bytes, file.purpose) == ("file", "calls.jsonl", 256_000, "batch")
    assert (await client.files.content(file.id)).content == content
    assert await client.files.retrieve(file.id) == file
    assert [each.id async for each in await client.files.list(purpose="batch")] == [file.id]
    assert [each.id async for each in await client.files.list(purpose="batch_output")] == []
    assert (await client.files.delete(file.id)).deleted
    with pytest.raises(openai.NotFoundError):
        await client.files.retrieve(file.id)
    with pytest.raises(openai.NotFoundError):
        await client.files.content(file.id)


@pytest.mark.parametrize("file_id", ["file-x", "..", "batch_" + "0" * 32, "file-" + "0" * 32, "%2e%2e%2fkeys"])
async def test_an_id_is_never_a_path(file_id: str, http: httpx.AsyncClient) -> None:
    answer = await http.get(f"/v1/files/{file_id}/content")
    assert (answer.status_code, answer.json()["error"]["code"] in ("file_not_found", "route_not_found")) == (404, True)


@pytest.mark.parametrize(
    ("body", "param", "code"),
    [
        (PURPOSE + END, "file", "bad_parameter"),
        (part("file", b"x", "a") + END, "purpose", "bad_parameter"),
        (part("file", b"x", "a") + part("purpose", b"vision") + END, "purpose", "bad_parameter"),
        (part("file", b"x", "a") + part("file", b"x", "b") + PURPOSE + END, "file", "bad_parameter"),
        (part("file", b"x", "a") + PURPOSE, None, "bad_message"),
        (b"no form", None, "bad_message"),
        (part("purpose", b"x" * 5000) + END, "purpose", "bad_parameter"),
        (b"".join(part(f"a{n}", b"x") for n in range(17)) + END, "a16", "bad_parameter"),
        (
            PURPOSE + part("expires_after[seconds]", b"soon") + part("file", b"x", "a") + END,
            "expires_after[seconds]",
            "bad_parameter",
        ),
        (
            PURPOSE + part("expires_after[seconds]", b"99999999") + part("file", b"x", "a") + END,
            "expires_after.seconds",
            "bad_parameter",
        ),
    ],
)
async def test_a_bad_form_is_refused_and_leaves_nothing(
    body: bytes, param: str | None, code: str, config: FrontendConfig, http: httpx.AsyncClient
) -> None:
    answer = await http.post("/v1/files", content=body, headers=HEADERS)
    assert answer.status_code == 400
    assert (answer.json()["error"]["param"], answer.json()["error"]["code"]) == (param, code)
    assert _kept(config) == []


async def test_what_is_no_form_is_refused(http: httpx.AsyncClient) -> None:
    answer = await http.post("/v1/files", json={"file": "x"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "bad_message")


async def test_fields_that_nobody_knows_are_named(http: httpx.AsyncClient) -> None:
    body = part("file", b"x", "a") + PURPOSE + part("colour", b"red") + END
    answer = await http.post("/v1/files", content=body, headers=HEADERS)
    assert (answer.status_code, answer.headers["x-octavo-unknown-fields"]) == (200, "colour")


class TestBounds:
    @pytest.fixture
    def config(self, config: FrontendConfig) -> FrontendConfig:
        return dataclasses.replace(config, max_file_bytes=100_000, tenant_max_file_bytes=150_000)

    @pytest.mark.parametrize("says_its_length", [True, False])
    async def test_a_file_that_is_too_large_is_refused_and_leaves_nothing(
        self, says_its_length: bool, config: FrontendConfig, http: httpx.AsyncClient
    ) -> None:
        body = PURPOSE + part("file", b"x" * 300_000, "a") + END

        async def pieces() -> AsyncIterator[bytes]:
            for start in range(0, len(body), 10_000):
                yield body[start : start + 10_000]

        answer = await http.post("/v1/files", content=body if says_its_length else pieces(), headers=HEADERS)
        assert (answer.status_code, answer.json()["error"]["code"]) == (413, "too_large")
        assert _kept(config) == []

    async def test_a_tenant_has_room_for_so_many_bytes(self, client: openai.AsyncOpenAI) -> None:
        first = await upload(client, b"x" * 100_000)
        with pytest.raises(openai.APIStatusError, match="delete"):
            await upload(client, b"x" * 100_000)
        await client.files.delete(first)
        await upload(client, b"x" * 100_000)


async def test_a_client_that_leaves_in_the_middle_leaves_nothing(
    config: FrontendConfig, frontend: FrontendServer
) -> None:
    _, writer = await asyncio.open_connection("127.0.0.1", frontend.http_port)
    head = (
        f"POST /v1/files HTTP/1.1\r\nhost: localhost\r\ncontent-length: 9999\r\ncontent-type: {HEADERS['content-type']}"
    )
    writer.write(f"{head}\r\n\r\n".encode() + PURPOSE + part("file", b"x" * 1000, "a"))
    await writer.drain()
    async with asyncio.timeout(60):
        while not _kept(config):
            await asyncio.sleep(0.01)
        writer.close()
        while _kept(config):
            await asyncio.sleep(0.01)


async def test_a_large_file_may_take_longer_than_other_bodies_as_long_as_it_comes(
    frontend: FrontendServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(protocol, "REQUEST_S", 1.5)
    reader, writer = await asyncio.open_connection("127.0.0.1", frontend.http_port)
    body = PURPOSE + part("file", b"x" * (4 << 20), "a") + END
    head = f"POST /v1/files HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n"
    writer.write(f"{head}content-type: {HEADERS['content-type']}\r\n\r\n".encode())
    began = asyncio.get_running_loop().time()
    for start in range(0, len(body), 1 << 19):
        writer.write(body[start : start + (1 << 19)])
        await writer.drain()
        await asyncio.sleep(0.25)
    assert asyncio.get_running_loop().time() - began > 1.5
    assert b"200 OK" in await reader.readline()
    writer.close()


async def test_a_full_disk_refuses_a_file_and_keeps_the_others(
    config: FrontendConfig, client: openai.AsyncOpenAI
) -> None:
    first = await upload(client, b"x" * 1000)
    assert config.batch_directory is not None
    with failing_disk(config.batch_directory, FULL), pytest.raises(openai.APIStatusError) as refused:
        await upload(client, b"x" * 1000)
    assert (refused.value.status_code, refused.value.code) == (503, "storage_failed")
    assert [each.id async for each in await client.files.list()] == [first]
    await upload(client, b"x" * 1000)


def test_files_are_there_until_they_expire(tmp_path: Path) -> None:
    now = 1000
    storage = Storage(tmp_path / "batches")
    files = Files(storage, FileBounds(100, 1000, 60), lambda: now)
    for seconds in (10, 20):
        made = files.begin("a")
        made.write(b"hello")
        made.finish("f", now, now + seconds)
    now += 15
    [kept] = files.all_of("a")
    assert kept.expires_at == 1020
    files.sweep()
    left = sorted(path.suffix for path in storage.files_of("a").iterdir())
    assert left == [".data", ".json"]


@pytest.mark.parametrize("size", [1, 2, 7, 64, 10_000])
def test_a_form_is_the_same_in_whatever_pieces_it_comes(size: int) -> None:
    body = PURPOSE + part("file", b"\r\n--limit-of\r\n" * 20, "calls.jsonl") + END
    form, content = Form(HEADERS["content-type"]), b""
    for start in range(0, len(body), size):
        form.feed(body[start : start + size])
        content += b"".join(form.content)
        form.content.clear()
    form.finish()
    assert (content, form.filename, form.values) == (b"\r\n--limit-of\r\n" * 20, "calls.jsonl", {"purpose": "batch"})


def _kept(config: FrontendConfig) -> list[Path]:
    assert config.batch_directory is not None
    return list(config.batch_directory.glob("tenants/*/files/*"))
