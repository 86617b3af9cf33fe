"""The page and its files."""

import re

import httpx
import pytest

FILES = {
    "/page/style.css": "text/css; charset=utf-8",
    "/page/icon.svg": "image/svg+xml",
    "/page/http.js": "text/javascript; charset=utf-8",
    "/page/prompt.js": "text/javascript; charset=utf-8",
    **{
        f"/page/{name}.js": "text/javascript; charset=utf-8"
        for name in (
            *("live", "blocks", "states", "curves", "requests", "explanation", "tiers"),
            *("conversation", "request", "own", "dom"),
        )
    },
}


async def test_the_page_is_at_the_root(http: httpx.AsyncClient) -> None:
    answer = await http.get("/")
    assert (answer.status_code, answer.headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert "<title>Octavo</title>" in answer.text


async def test_all_that_it_names_is_there(http: httpx.AsyncClient) -> None:
    page = (await http.get("/")).text
    assert not re.findall(r'(?:src|href)="(?!/page/|#)', page), "it loads nothing from elsewhere"
    for path in set(re.findall(r'(?:src|href)="([^"#]+)"', page)) | FILES.keys():
        answer = await http.get(path)
        assert (answer.status_code, answer.headers["content-type"]) == (200, FILES[path])


@pytest.mark.parametrize("path", ["/", "/page/live.js"])
async def test_browsers_are_told_to_load_nothing_from_elsewhere(http: httpx.AsyncClient, path: str) -> None:
    headers = (await http.get(path)).headers
    policy = headers["content-security-policy"].split("; ")
    assert "default-src 'self'" in policy
    assert "frame-ancestors 'none'" in policy
    assert not re.search("unsafe|http|data:", headers["content-security-policy"])
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["referrer-policy"] == "no-referrer"


async def test_scripts_and_styles_are_files_of_their_own(http: httpx.AsyncClient) -> None:
    page = (await http.get("/")).text
    assert not re.findall(r"<style|style=|<script(?![^>]*src=)|\son\w+=", page), "the policy forbids them"


async def test_a_file_that_is_the_same_is_not_sent_again(http: httpx.AsyncClient) -> None:
    first = await http.get("/page/live.js")
    assert first.headers["cache-control"] == "no-cache"
    again = await http.get("/page/live.js", headers={"if-none-match": first.headers["etag"]})
    assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", first.headers["etag"])
    other = await http.get("/page/live.js", headers={"if-none-match": '"other"'})
    assert (other.status_code, other.content) == (200, first.content)


async def test_head_tells_the_same_without_the_file(http: httpx.AsyncClient) -> None:
    answer = await http.head("/page/live.js")
    assert (answer.status_code, answer.content) == (200, b"")
    assert answer.headers["etag"] == (await http.get("/page/live.js")).headers["etag"]


@pytest.mark.parametrize(
    "path",
    [
        "/page/",
        "/page/none.js",
        "/page/__init__.py",
        "/page/../routes.py",
        "/page/%2e%2e/routes.py",
        "/page/..%2froutes.py",
        "/page/%2fetc%2fpasswd",
        "/page/static/live.js",
        "/page/live.js%00.css",
        "/page/" + "x" * 5000,
    ],
)
async def test_nothing_else_is_served(http: httpx.AsyncClient, path: str) -> None:
    request = http.build_request("GET", "/")
    # As it stands: the client would resolve the dots.
    request.url = httpx.URL(http.base_url, raw_path=path.encode())
    answer = await http.send(request)
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "route_not_found")
    assert len(answer.content) < 1000
