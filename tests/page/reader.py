"""A page in a browser, as its reader sees and works it. Runs in an environment of its own: see run.py."""

import json
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from playwright.sync_api import Page  # type: ignore[import-not-found]

DEVICE_STATES: Final = ("free", "cached", "private", "shared", "pinned", "parked")
CPU_STATES: Final = ("free", "cached", "swapped")
# Of the page as it is shown in light colours: those of states.js.
COLOURS: Final = {
    "free": "#e6e2d8",
    "cached": "#8fb8de",
    "private": "#3f8f60",
    "shared": "#e0a33b",
    "pinned": "#8d63b0",
    "parked": "#8b9298",
    "swapped": "#b4574a",
    "arriving": "#2f9aa8",
}
LONG_PROMPT: Final = "Once upon a time there was a printer who set eight leaves from every sheet. " * 2
_WAIT_S: Final = 60.0
# Of each pool's canvas: how many squares of each colour there are, as "#rrggbb" -> squares; and what legend and caption
# say of it.
_POOLS: Final = """() => [...document.querySelectorAll(".worker canvas")].map((canvas) => {
  const seen = {};
  const folded = canvas.closest("details:not([open])") !== null;
  if (!folded && canvas.width && canvas.height) {
    const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
    const square = (Number(canvas.dataset.size) * devicePixelRatio) ** 2;
    for (let i = 0; i < data.length; i += 4) {
      if (data[i + 3] !== 255) continue;
      const name = "#" + [data[i], data[i + 1], data[i + 2]].map((part) => part.toString(16).padStart(2, "0")).join("");
      seen[name] = (seen[name] ?? 0) + 1 / square;
    }
  }
  const legend = [...canvas.parentNode.querySelectorAll(".legend li")];
  return {
    folded, seen, legend: Object.fromEntries(legend.map((entry) => [entry.dataset.state, entry.textContent])),
    caption: canvas.parentNode.querySelector("figcaption, summary").textContent,
    told: canvas.getAttribute("aria-label"),
  };
})"""
# Where on the page the first square of a colour is; null where none is.
_FIND: Final = """(wanted) => {
  for (const canvas of document.querySelectorAll(".worker canvas")) {
    if (!canvas.width || !canvas.height || canvas.closest("details:not([open])")) continue;
    const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
    for (let i = 0; i < data.length; i += 4) {
      const name = "#" + [data[i], data[i + 1], data[i + 2]].map((part) => part.toString(16).padStart(2, "0")).join("");
      if (data[i + 3] !== 255 || name !== wanted) continue;
      canvas.scrollIntoView({ block: "nearest" });
      const box = canvas.getBoundingClientRect(), at = i / 4, ratio = devicePixelRatio;
      return [box.left + (at % canvas.width) / ratio + 2, box.top + Math.floor(at / canvas.width) / ratio + 2];
    }
  }
  return null;
}"""
# All that axe-core knows of, best practices too.
_AXE: Final = """async () => (await axe.run(document, { resultTypes: ["violations"] })).violations.map(
  (found) => `${found.id}: ${found.nodes.map((node) => node.target.join(" ")).join(", ")}`)"""
# A button that says nothing, and a text that can hardly be read.
_PLANT: Final = """() => {
  const planted = document.createElement("div");
  planted.id = "planted";
  planted.innerHTML = "<button></button><p>hardly</p>";
  planted.lastChild.style.color = "#777";
  planted.lastChild.style.background = "#888";
  document.querySelector("main").append(planted);
}"""


@dataclass
class Reader:
    """A page in a browser, what its console and its network have seen, and the source of axe-core."""

    page: Page
    url: str
    screenshots: Path
    axe: str
    errors: list[str] = field(default_factory=list)
    hosts: set[str] = field(default_factory=set)
    # Bodies of the page's calls, with the headers that they had.
    sent: list[tuple[dict[str, Any], dict[str, str]]] = field(default_factory=list)

    def open(self) -> None:
        self.page.on("console", lambda message: self.errors.extend([message.text] if message.type == "error" else []))
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("request", self._note)
        self.page.goto(self.url)

    def _note(self, request: Any) -> None:
        self.hosts.add("/".join(request.url.split("/")[:3]))
        if request.method == "POST":
            self.sent.append((json.loads(request.post_data), request.headers))

    def expect_errors(self, *texts: str) -> None:
        """Takes out of the errors what the browser says of answers that a check has asked for."""
        until(lambda: any(text in error for error in self.errors for text in texts), f"the browser's line on {texts}")
        self.errors[:] = [error for error in self.errors if not any(text in error for text in texts)]

    def text(self, selector: str) -> str:
        return str(self.page.locator(selector).inner_text())

    def ask(self, prompt: str, tokens: int | None, answers: int = 1) -> None:
        told = "" if tokens is None else str(tokens)
        for selector, value in (("#prompt", prompt), ("#tokens", told), ("#answers", str(answers))):
            self.page.fill(selector, value)
        self.page.click("#send")

    def answer(self, prompt: str, tokens: int) -> str:
        """The text of the answer to a prompt, once it is there."""
        self.ask(prompt, tokens)
        until(lambda: "generated" in self.text("#status"), "the answer")
        return str(self.page.locator(".answer").last.text_content())

    def start_anew(self) -> None:
        self.page.click("#new")
        assert self.page.locator(".turn").count() == 0

    def rows(self) -> Any:
        """The rows of requests."""
        return self.page.locator("#requests tr[data-request]")

    def screenshot(self, name: str) -> None:
        """Of the whole page, which must not be wider than the window."""
        self.page.screenshot(path=self.screenshots / f"{name}.png", full_page=True)
        overflow = self.page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
        assert overflow <= 0, f"{name}: {overflow} pixels too wide"

    def pools(self) -> list[Any]:
        """What is shown of device blocks, and of those in CPU memory."""
        found = self.page.evaluate(_POOLS)
        assert isinstance(found, list)
        return found

    def legend(self) -> dict[str, int]:
        """Blocks by state, of both pools together, as the legends say it; the squares that are not folded away must
        show the same."""
        told = dict.fromkeys(COLOURS, 0)
        for pool, states in zip(self.pools(), (DEVICE_STATES, CPU_STATES), strict=True):
            counts = {name: int(text.removeprefix(name)) for name, text in pool["legend"].items()}
            # What is being read is rarely seen, and told only then.
            assert tuple(counts) in (states, (*states, "arriving")), counts
            shown = {name: round(pool["seen"].get(COLOURS[name], 0)) for name in counts}
            assert pool["folded"] or shown == counts, (shown, counts)
            assert set(pool["seen"]) <= set(COLOURS.values()), pool
            for name, count in counts.items():
                assert f"{count} {name}" in pool["told"], pool
                told[name] += count
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

    def focused(self, name: str) -> str:
        """An attribute of the element that has the focus; empty where it has none."""
        return str(self.page.evaluate("(name) => document.activeElement.getAttribute(name) ?? ''", name))

    def check_axe(self, what: str) -> None:
        """Asks axe-core whether all can use the page as it is; and whether it would have noticed."""
        self.page.evaluate(self.axe)
        violations = self.page.evaluate(_AXE)
        assert not violations, f"{what}: {violations}"
        self.page.evaluate(_PLANT)
        planted = self.page.evaluate(_AXE)
        self.page.evaluate("document.getElementById('planted').remove()")
        assert {found.partition(":")[0] for found in planted} >= {"button-name", "color-contrast"}, planted


def until(condition: Callable[[], Any], what: str) -> Any:
    """The first true value of the condition."""
    deadline = time.monotonic() + _WAIT_S
    while not (found := condition()):
        assert time.monotonic() < deadline, f"{what} did not come"
        time.sleep(0.05)
    return found


@contextmanager
def load(url: str) -> Iterator[None]:
    """Requests that share blocks, and more of them than there are blocks for."""
    bodies: list[dict[str, Any]] = [{"prompt": LONG_PROMPT, "n": 3, "temperature": 1, "max_tokens": 200}]
    bodies += [{"prompt": f"{i}. {LONG_PROMPT}", "max_tokens": 500} for i in range(4)]
    with posts(url, bodies):
        yield


@contextmanager
def posts(url: str, bodies: Sequence[dict[str, Any]], key: str = "") -> Iterator[None]:
    """Requests that are sent again and again; they leave when the block ends."""
    stop = threading.Event()
    with ThreadPoolExecutor(len(bodies)) as pool:
        running = [pool.submit(_post_again, f"{url}/v1/completions", body, key, stop) for body in bodies]
        try:
            yield
        finally:
            stop.set()
        for post in running:
            post.result()


def _post_again(url: str, body: dict[str, Any], key: str, stop: threading.Event) -> None:
    content = json.dumps({**body, "stream": True, "ignore_eos": True}).encode()
    headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {key}"} if key else {})
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    while not stop.is_set():
        try:
            with direct.open(urllib.request.Request(url, content, headers)) as answer:
                while not stop.is_set() and answer.readline():
                    pass
        except urllib.error.HTTPError as error:
            # Of a request that was aborted before its first token.
            if error.code != 409:
                raise
