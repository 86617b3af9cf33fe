"""What a reader of the page does and sees. Runs in an environment of its own, without Octavo: see run.py.

browse.py CHROMIUM SCREENSHOTS URL LOCKED_URL TENANT_KEY TRUSTED_KEY
"""

import argparse
import json
import re
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, Page, expect, sync_playwright  # type: ignore[import-not-found]

STATES = ("free", "cached", "private", "shared", "pinned", "parked", "swapped")
# Of the page as it is shown in light colours: those of states.js.
COLOURS = {
    "free": "#e6e2d8",
    "cached": "#8fb8de",
    "private": "#3f8f60",
    "shared": "#e0a33b",
    "pinned": "#8d63b0",
    "parked": "#8b9298",
    "swapped": "#b4574a",
}
LONG_PROMPT = "Once upon a time there was a printer who set eight leaves from every sheet. " * 2
_WAIT_S = 60.0
# How many squares of each colour there are in all canvases, as "#rrggbb" -> squares; and what the legend says.
_COUNT = """() => {
  const seen = {};
  for (const canvas of document.querySelectorAll("canvas")) {
    if (!canvas.width || !canvas.height) continue;
    const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
    const square = (Number(canvas.dataset.size) * devicePixelRatio) ** 2;
    for (let i = 0; i < data.length; i += 4) {
      if (data[i + 3] !== 255) continue;
      const name = "#" + [data[i], data[i + 1], data[i + 2]].map((part) => part.toString(16).padStart(2, "0")).join("");
      seen[name] = (seen[name] ?? 0) + 1 / square;
    }
  }
  const entries = [...document.querySelectorAll("#legend span")];
  return [seen, Object.fromEntries(entries.map((entry) => [entry.dataset.state, entry.textContent]))];
}"""
# Where on the page the first square of a colour is; null where none is.
_FIND = """(wanted) => {
  for (const canvas of document.querySelectorAll("canvas")) {
    if (!canvas.width || !canvas.height) continue;
    const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
    for (let i = 0; i < data.length; i += 4) {
      const name = "#" + [data[i], data[i + 1], data[i + 2]].map((part) => part.toString(16).padStart(2, "0")).join("");
      if (data[i + 3] !== 255 || name !== wanted) continue;
      const box = canvas.getBoundingClientRect(), at = i / 4, ratio = devicePixelRatio;
      return [box.left + (at % canvas.width) / ratio + 2, box.top + Math.floor(at / canvas.width) / ratio + 2];
    }
  }
  return null;
}"""


@dataclass
class Reader:
    """A page in a browser, and what its console and its network have seen."""

    page: Page
    url: str
    screenshots: Path
    errors: list[str] = field(default_factory=list)
    hosts: set[str] = field(default_factory=set)

    def open(self) -> None:
        self.page.on("console", lambda message: self.errors.extend([message.text] if message.type == "error" else []))
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("request", lambda request: self.hosts.add("/".join(request.url.split("/")[:3])))
        self.page.goto(self.url)

    def text(self, selector: str) -> str:
        return str(self.page.locator(selector).inner_text())

    def ask(self, prompt: str, tokens: int, answers: int = 1) -> None:
        for selector, value in (("#prompt", prompt), ("#tokens", str(tokens)), ("#answers", str(answers))):
            self.page.fill(selector, value)
        self.page.click("#send")

    def screenshot(self, name: str) -> None:
        """Of the whole page, which must not be wider than the window."""
        self.page.screenshot(path=self.screenshots / f"{name}.png", full_page=True)
        overflow = self.page.evaluate("document.documentElement.scrollWidth - innerWidth")
        assert overflow <= 0, f"{name}: {overflow} pixels too wide"

    def legend(self) -> dict[str, int]:
        """Blocks by state, as the legend says it and the squares show it."""
        squares, legend = self.page.evaluate(_COUNT)
        told = {name: int(text.removeprefix(name)) for name, text in legend.items()}
        assert tuple(told) == STATES, told
        shown = {name: round(squares.get(colour, 0)) for name, colour in COLOURS.items()}
        assert shown == told, (shown, told)
        assert set(squares) <= set(COLOURS.values()), squares
        return told

    def hover(self, state: str) -> str:
        """What the tooltip says of a block in this state; empty where there is none."""
        self.page.mouse.move(0, 0)
        place = self.page.evaluate(_FIND, COLOURS[state])
        if place is None:
            return ""
        self.page.mouse.move(*place)
        tooltip = self.page.locator("#tooltip")
        return str(tooltip.inner_text()) if tooltip.is_visible() else ""


def until(condition: Callable[[], Any], what: str) -> Any:
    """The first true value of the condition."""
    deadline = time.monotonic() + _WAIT_S
    while not (found := condition()):
        assert time.monotonic() < deadline, f"{what} did not come"
        time.sleep(0.05)
    return found


def shows_what_is_there(reader: Reader) -> str:
    expect(reader.page).to_have_title("Octavo")
    expect(reader.page.locator("#model")).to_have_text("model")
    expect(reader.page.locator("#live-status")).to_have_text("as the scheduler sees it")
    counts = " ".join(reader.text("#counts").split())
    assert counts == "waiting 0 running 0 swapped out 0 preemptions 0 frontends 2 workers 1", counts
    legend = reader.legend()
    assert legend["pinned"] > 0
    assert sum(legend.values()) == 96 + 48, legend
    assert "worker-0: fake, 96 blocks and 48 in CPU memory" in reader.text("#workers")
    return counts


def streams_an_answer(reader: Reader) -> str:
    reader.ask("Tell me of paper.", 80)
    lengths: list[int] = []
    row = False
    while "generated" not in reader.text("#status"):
        length = len(reader.page.locator(".answer").first.text_content() or "")
        if not lengths or length != lengths[-1]:
            lengths.append(length)
        row = row or reader.page.locator("#requests tr").count() == 1
        assert reader.page.locator("#stop").is_enabled() or "generated" in reader.text("#status")
        assert "error" not in (reader.page.locator("#status").get_attribute("class") or ""), reader.text("#status")
    assert len(lengths) > 10, lengths
    assert lengths == sorted(lengths)
    assert row, "the request was not among those that run"
    found = re.fullmatch(
        r"\d+ prompt tokens \(\d+ cached\), 80 generated; first after \d+ ms, then [\d.]+ tokens/s",
        reader.text("#status"),
    )
    assert found, reader.text("#status")
    return found[0]


def leaves_cached_blocks(reader: Reader) -> str:
    return str(until(lambda: reader.legend()["cached"], "a cached block"))


def shows_every_answer(reader: Reader) -> str:
    reader.page.check("input[value=text]")
    reader.ask(LONG_PROMPT, 20, answers=3)
    expect(reader.page.locator("#status")).to_contain_text("60 generated", timeout=20_000)
    texts = reader.page.locator(".answer").all_text_contents()
    reader.page.check("input[value=chat]")
    assert len(set(texts)) == 3, texts
    assert all(texts)
    return "3 answers"


def stops_when_told(reader: Reader) -> str:
    reader.ask("Go on and on.", 900)
    until(lambda: reader.page.locator(".answer").first.text_content(), "the beginning")
    reader.page.click("#stop")
    expect(reader.page.locator("#status")).to_have_text("stopped")
    until(lambda: reader.page.locator("#requests tr").count() == 0, "the end of the request")
    return "and its request is gone"


def says_what_is_wrong(reader: Reader) -> str:
    reader.ask("hello", 1_000_000)
    expect(reader.page.locator("#status")).to_have_class("error")
    # The browser's own line about the status.
    until(lambda: [error for error in reader.errors if "400" in error], "the browser's line")
    reader.errors[:] = [error for error in reader.errors if "400" not in error]
    message = reader.text("#status")
    assert "max_tokens" in message, message
    return message


def shows_every_state_of_blocks(reader: Reader) -> str:
    """Under load; with the tooltips of those that somebody holds."""
    seen, tips = set(), {}
    with load(reader.url):
        for _ in range(600):
            seen |= {name for name, count in reader.legend().items() if count}
            for state in ("pinned", "shared", "private", "swapped"):
                tip = reader.hover(state)
                if f": {state}, " in tip:
                    tips[state] = tip
            if seen >= set(STATES) - {"parked"} and len(tips) == 4:
                break
            time.sleep(0.05)
        assert seen >= set(STATES) - {"parked"}, seen
        assert len(tips) == 4, tips
        assert re.fullmatch(r"block \d+: pinned, pinned prefix clerk", tips["pinned"]), tips
        assert re.fullmatch(r"block \d+: shared, request \S+", tips["shared"]), tips
        assert re.fullmatch(r"block \d+: private, request \S+", tips["private"]), tips
        assert re.fullmatch(r"CPU block \d+: swapped, request \S+", tips["swapped"]), tips
        assert "swapped" in reader.text("#requests")
        reader.ask("Tell me of type.", 40, answers=2)
        until(lambda: "generated" in reader.text("#status"), "the answer")
        reader.hover("pinned")
        take_screenshots(reader)
    until(lambda: reader.page.locator("#requests tr").count() == 0, "the end of all requests")
    return "; ".join(tips.values())


def take_screenshots(reader: Reader) -> None:
    """As it is, narrow, and in dark colours."""
    for name, width, scheme in (("wide", 1280, "light"), ("narrow", 420, "light"), ("dark", 1280, "dark")):
        reader.page.set_viewport_size({"width": width, "height": 900})
        reader.page.emulate_media(color_scheme=scheme)
        # The next snapshot is drawn that way.
        reader.page.wait_for_timeout(1500)
        reader.screenshot(name)
    reader.page.set_viewport_size({"width": 1280, "height": 900})
    reader.page.emulate_media(color_scheme="light")


@contextmanager
def load(url: str) -> Iterator[None]:
    """Requests that share blocks, and more of them than there are blocks for; they leave when the block ends."""
    bodies: list[dict[str, Any]] = [{"prompt": LONG_PROMPT, "n": 3, "temperature": 1, "max_tokens": 200}]
    bodies += [{"prompt": f"{i}. {LONG_PROMPT}", "max_tokens": 500} for i in range(4)]
    stop = threading.Event()
    with ThreadPoolExecutor(len(bodies)) as pool:
        posts = [pool.submit(_post_again, f"{url}/v1/completions", body, stop) for body in bodies]
        try:
            yield
        finally:
            stop.set()
        for post in posts:
            post.result()


def _post_again(url: str, body: dict[str, Any], stop: threading.Event) -> None:
    content = json.dumps({**body, "stream": True, "ignore_eos": True}).encode()
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    while not stop.is_set():
        with direct.open(urllib.request.Request(url, content, {"content-type": "application/json"})) as answer:
            while not stop.is_set() and answer.readline():
                pass


def asks_for_a_key(reader: Reader, tenant: str, trusted: str) -> str:
    for place in ("#model", "#live-status"):
        expect(reader.page.locator(place)).to_contain_text("asks for an API key")
    assert all("401" in error for error in reader.errors), reader.errors
    reader.screenshot("locked")
    give_key(reader, "wrong")
    expect(reader.page.locator("#model")).to_contain_text("does not know this API key")
    give_key(reader, tenant)
    expect(reader.page.locator("#model")).to_have_text("model")
    expect(reader.page.locator("#live-status")).to_contain_text("key of a trusted tenant")
    reader.ask("Tell me of ink.", 5)
    expect(reader.page.locator("#status")).to_contain_text("5 generated")
    give_key(reader, trusted)
    reader.errors.clear()
    expect(reader.page.locator("#live-status")).to_have_text("as the scheduler sees it")
    reader.page.reload()
    expect(reader.page.locator("#live-status")).to_have_text("as the scheduler sees it")
    expect(reader.page.locator("#model")).to_have_text("model")
    return "told, taken, and kept while the tab is open"


def give_key(reader: Reader, key: str) -> None:
    reader.page.fill("#key", key)
    reader.page.press("#key", "Tab")


def is_quiet_and_stays_at_home(reader: Reader) -> str:
    assert reader.errors == [], reader.errors
    assert reader.hosts == {reader.url}, reader.hosts
    return "no error in the console, no request to another host"


def run(checks: list[tuple[str, Callable[[], str]]]) -> int:
    """How many have failed."""
    failures = 0
    for name, check in checks:
        try:
            print(f"PASS {name}: {check()}", flush=True)
        except Exception as error:
            failures += 1
            print(f"FAIL {name}: {type(error).__name__}: {str(error)[:800]}", flush=True)
    return failures


def browse(browser: Browser, given: argparse.Namespace) -> int:
    """How many checks have failed."""
    reader, locked = (
        Reader(browser.new_page(viewport={"width": 1280, "height": 900}), url, Path(given.screenshots))
        for url in (given.url, given.locked_url)
    )
    reader.open()
    checks = (
        shows_what_is_there,
        streams_an_answer,
        leaves_cached_blocks,
        shows_every_answer,
        stops_when_told,
        says_what_is_wrong,
        shows_every_state_of_blocks,
        is_quiet_and_stays_at_home,
    )
    failures = run([(check.__name__, lambda check=check: check(reader)) for check in checks])  # type: ignore[misc]
    locked.open()
    return failures + run(
        [
            ("asks_for_a_key", lambda: asks_for_a_key(locked, given.tenant, given.trusted)),
            ("is_quiet_with_a_key", lambda: is_quiet_and_stays_at_home(locked)),
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("chromium", "screenshots", "url", "locked_url", "tenant", "trusted"):
        parser.add_argument(name)
    given = parser.parse_args()
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=given.chromium, args=["--no-proxy-server"])
        print(f"Chromium {browser.version}", flush=True)
        failures = browse(browser, given)
        browser.close()
    print("FAILED" if failures else "all checks passed", flush=True)
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
