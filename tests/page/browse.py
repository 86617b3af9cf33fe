"""What a reader of the page does and sees. Runs in an environment of its own, without Octavo: see run.py.

browse.py CHROMIUM SCREENSHOTS AXE URL LOCKED_URL TENANT_KEY TRUSTED_KEY
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from playwright.sync_api import Browser, Page, expect, sync_playwright  # type: ignore[import-not-found]
from tests.page.reader import COLOURS, LONG_PROMPT, Reader, load, posts, until

# What a shell would take for something else than text, and what a terminal would act on or hide.
NASTY: Final = "it's \"quoted\" $HOME `id` $(id) \\n !! * ~ \t; & | > 'twice' é 漢 \u2028\u202e\x7f\nand a line"
# A request that stays for a while, of few blocks.
LASTING: Final = {"prompt": "x", "max_tokens": 420}


def shows_what_is_there(reader: Reader) -> str:
    expect(reader.page).to_have_title("Octavo")
    expect(reader.page.locator("#model")).to_have_text("model")
    expect(reader.page.locator("#live-status")).to_have_text("as the scheduler sees it")
    counts = " ".join(reader.text("#counts").split())
    assert counts == "waiting 0 running 0 swapped out 0 preemptions 0 moved 0 frontends 2 workers 1", counts
    legend = reader.legend()
    assert legend["pinned"] > 0
    assert sum(legend.values()) == 96 + 48, legend
    assert "worker-0: fake" in reader.text("#workers")
    assert "No request is held" in reader.text("#table")
    return counts


def keeps_the_pools_apart(reader: Reader) -> str:
    """Each with a caption; that in CPU memory is folded while nothing is in it, unless its reader opens it."""
    device, cpu = reader.pools()
    assert re.fullmatch(r"KV blocks on the device: \d+ of 96 in use, 16 tokens each", device["caption"]), device
    assert cpu["caption"] == "Blocks in CPU memory, for requests swapped out and what is cached: 0 of 48 in use", cpu
    assert (device["folded"], cpu["folded"]) == (False, True)
    squares = reader.page.locator(".cpu canvas")
    expect(squares).to_be_hidden()
    reader.page.click(".cpu summary")
    expect(squares).to_be_visible()
    until(lambda: not reader.pools()[1]["folded"] and reader.legend(), "the squares in CPU memory")
    reader.page.reload()
    expect(reader.page.locator("#live-status")).to_have_text("as the scheduler sees it")
    return f"{device['caption']}; {cpu['caption']}"


def streams_an_answer(reader: Reader) -> str:
    reader.ask("Tell me of paper.", 80)
    lengths: list[int] = []
    row = False
    while "generated" not in reader.text("#status"):
        length = len(reader.page.locator(".answer").first.text_content() or "")
        if not lengths or length != lengths[-1]:
            lengths.append(length)
        row = row or reader.rows().count() == 1
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


def tells_of_every_tier(reader: Reader) -> str:
    """What was just said is said once more, and found on the device; a mirror has it on the disk."""
    reader.start_anew()
    for _ in range(2):
        reader.answer("Tell me at length of the tiers of a cake, from the first of them to the last.", 3)
        reader.start_anew()

    def told() -> list[str]:
        lines = [line.strip() for line in reader.page.locator(".tiers li").all_text_contents()]
        is_found = re.match(
            r"[1-9]\d* of 96 blocks cached on the device; found there [1-9]\d* tokens of [1-9]", lines[0]
        )
        is_kept = re.match(r"[1-9]\d* of [1-9]\d+ blocks cached on the disk; .*/kv\)$", lines[2])
        return lines if is_found and is_kept else []

    lines: list[str] = until(told, "the tiers")
    assert len(lines) == 3, lines
    assert lines[1].startswith("0 of 48 blocks cached in CPU memory; found there 0 tokens of 0 requests"), lines
    assert "moved to disk" in lines[0], lines
    bar = reader.page.locator(".tiers li[data-tier=device] meter")
    assert (bar.evaluate("bar => bar.max"), bar.evaluate("bar => bar.value") > 0) == (96, True)
    return "; ".join(line.split(";")[0] for line in lines)


# Of requests that two workers hold, one of which is on its way.
_TOLD: Final[dict[str, Any]] = {
    "load": {
        **dict.fromkeys(("waiting", "swapped", "preemptions"), 0),
        **{"running": 1, "moved": 4, "frontends": 1, "workers": ["w0", "w1"]},
    },
    **dict.fromkeys(("at_s", "first_tokens", "first_token_s", "between_tokens", "between_tokens_s"), 0),
    "frontend_ids": ["f0"],
    "workers": [
        {
            **{"id": name, "device": "fake", "token_rate": 1, "tokens_sampled": 0, "block_size": 16},
            **{"moved_in": moved_in, "tiers": [], "states": "AQI=", "cpu_states": "CA==", "owners": []},
        }
        for name, moved_in in (("w0", 0), ("w1", 4))
    ],
}
_ON_ITS_WAY: Final[dict[str, Any]] = {
    **{"request_id": "r", "frontend_id": "f0", "state": "running", "tenant": "", "worker_id": "w0", "moves_to": "w1"},
    **dict.fromkeys(("prompt_tokens", "computed_tokens", "output_tokens", "sequences", "preemptions", "swaps"), 2),
    "age_s": 1.5,
}
_EXPLAINED: Final[dict[str, Any]] = {
    **_ON_ITS_WAY,
    **{"queue_position": 0, "ahead": [], "steps": 0, "tokens_in_flight": 0},
    "obstacles": [
        {"worker_id": "w1", "kind": kind, "needed": 3, "available": 0} for kind in ("move", "disk", "of another time")
    ],
    "cache": {
        **{"worker_id": "w0", "tokens": 60, "device_tokens": 16, "cpu_tokens": 32, "disk_tokens": 0},
        **{"reason": "evicted", "position": 48, "evicted_s": 2.5, "token": None, "other_token": None, "elsewhere": ""},
    },
}


def tells_of_moves(reader: Reader) -> str:
    """As a scheduler would tell of two workers and a request that moves between them."""
    page = reader.page.context.new_page()
    snapshot = f"data: {json.dumps({**_TOLD, 'requests': [_ON_ITS_WAY]})}\n\n"
    page.route(f"{reader.url}/live", lambda route: route.fulfill(content_type="text/event-stream", body=snapshot))
    page.route(f"{reader.url}/requests/**", lambda route: route.fulfill(json={"explanations": [_EXPLAINED]}))
    page.goto(reader.url)
    row = page.locator("[data-request=r]")
    expect(row.locator(".worker")).to_have_text("w0 to w1")
    expect(page.locator("#counts")).to_contain_text("moved4")
    expect(page.locator("[data-worker=w1] h4")).to_contain_text("4 requests came from other workers")
    assert "came from" not in str(page.locator("[data-worker=w0] h4").text_content())
    assert page.locator("[data-worker=w0] .cpu li[data-state=arriving]").text_content() == "arriving 1"
    row.get_by_role("button", name="Explain").click()
    expect(page.locator(".told")).to_contain_text("w1: waits for of another time")
    told = page.locator(".told td div").all_text_contents()
    assert told[0] == "running on w0, on its way to w1, 1.5 s after it came", told
    assert told[2:4] == [
        "found computed: 48 of 60 tokens: 16 on the device, 32 in CPU memory, 0 on the disk; w0",
        "the block with token 48 made way for others 2.5 s before",
    ], told
    assert told[5:7] == [
        "w1: the worker copies 3 KV blocks of it, to go on with them",
        "w1: the worker's disk is reading 3 KV blocks of it",
    ], told
    page.close()
    return str(told[5])


def shows_every_answer(reader: Reader) -> str:
    reader.start_anew()
    reader.page.check("input[value=text]")
    reader.ask(LONG_PROMPT, 20, answers=3)
    expect(reader.page.locator("#status")).to_contain_text("60 generated", timeout=20_000)
    texts = reader.page.locator(".answer").all_text_contents()
    reader.page.check("input[value=chat]")
    assert len(set(texts)) == 3, texts
    assert all(texts)
    return "3 answers"


def talks_with_a_history(reader: Reader) -> str:
    """What was said, and the system prompt, go along with the next turn; a new conversation knows nothing of it."""
    reader.start_anew()
    reader.page.click("#instructions summary")
    reader.page.fill("#system", "Be brief.")
    first = reader.answer("Tell me of lead.", 12)
    assert reader.page.locator("#prompt").input_value() == "", "what was said is not to be said again"
    second = reader.answer("And of tin?", 12)
    said = [text for text in reader.page.locator(".said, .answer").all_text_contents() if text]
    assert said == ["Tell me of lead.", first, "And of tin?", second], said
    assert reader.sent[-1][0]["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Tell me of lead."},
        {"role": "assistant", "content": first},
        {"role": "user", "content": "And of tin?"},
    ], reader.sent[-1]
    reader.start_anew()
    reader.page.fill("#system", "")
    reader.answer("Tell me of ink.", 3)
    assert reader.sent[-1][0]["messages"] == [{"role": "user", "content": "Tell me of ink."}], reader.sent[-1]
    return "two turns with a system prompt, then one without"


def a_new_conversation_ends_the_old_one(reader: Reader) -> str:
    reader.ask("Go on and on.", 900)
    until(lambda: reader.page.locator(".answer").last.text_content(), "the beginning")
    reader.start_anew()
    until(lambda: reader.rows().count() == 0, "the end of the request")
    reader.answer("Tell me of glue.", 3)
    assert reader.sent[-1][0]["messages"] == [{"role": "user", "content": "Tell me of glue."}], reader.sent[-1]
    assert reader.page.locator(".turn").count() == 2
    return "and nothing of it comes back"


def leaves_the_tokens_to_the_server(reader: Reader) -> str:
    """With an empty field nothing is said of them, and the answer has as many as the model's context has room for."""
    reader.start_anew()
    reader.ask("Go on.", None)
    until(lambda: len(reader.page.locator(".answer").last.text_content() or "") > 16, "more than one token")
    body = reader.sent[-1][0]
    assert "max_tokens" not in body, body
    assert reader.page.locator("#status").get_attribute("class") == "quiet", reader.text("#status")
    reader.page.click("#stop")
    expect(reader.page.locator("#status")).to_have_text("stopped")
    return "no max_tokens"


def stops_when_told(reader: Reader) -> str:
    reader.start_anew()
    reader.ask("Go on and on.", 900)
    until(lambda: reader.page.locator(".answer").last.text_content(), "the beginning")
    reader.page.click("#stop")
    expect(reader.page.locator("#status")).to_have_text("stopped")
    until(lambda: reader.rows().count() == 0, "the end of the request")
    assert "(stopped)" in reader.text("#turns")
    half = reader.page.locator(".answer").last.text_content()
    reader.answer("And?", 3)
    assert reader.sent[-1][0]["messages"][1] == {"role": "assistant", "content": half}, reader.sent[-1]
    return "its request is gone, and what was said of it is history"


def says_what_is_wrong(reader: Reader) -> str:
    reader.start_anew()
    reader.ask("hello", 1_000_000)
    expect(reader.page.locator("#status")).to_have_class("error")
    reader.expect_errors("400")
    message = reader.text("#status")
    assert "max_tokens" in message, message
    assert reader.page.locator("#prompt").input_value() == "hello", "it can be mended and sent again"
    assert reader.page.locator(".turn").count() == 0
    return message


def arguments_of(command: str) -> list[str]:
    """What a shell makes of a curl command, without a call."""
    with tempfile.TemporaryDirectory() as directory:
        script = f"curl() {{ printf '%s\\0' \"$@\" > told; }}\n{command}\n"
        subprocess.run(["sh", "-euc", script], cwd=directory, check=True, env={"PATH": os.environ["PATH"]}, timeout=60)
        return Path(directory, "told").read_text(encoding="utf-8").split("\0")[:-1]


def tells_the_same_as_curl(reader: Reader) -> str:
    """The command sends what the page would, whatever stands in it; and it can be copied."""
    reader.start_anew()
    reader.answer("It's a 'first' turn.", 6)
    if not reader.page.locator("#system").is_visible():
        reader.page.click("#instructions summary")
    reader.page.fill("#system", f"Be brief. {NASTY}")
    reader.page.fill("#prompt", NASTY)
    reader.page.fill("#temperature", "0.5")
    reader.page.click("#curl summary")
    # The page writes the command once it hears that its place is open.
    expect(reader.page.locator("#command")).to_contain_text("0.5")
    command = str(reader.page.locator("#command").text_content())
    assert not re.search("[\x7f\u2028\u202e]", command), "what cannot be seen is written as JSON's escape"
    [*before, body] = arguments_of(command)
    url = f"{reader.url}/v1/chat/completions"
    assert before == ["-N", url, "-H", "content-type: application/json", "-d"], before
    reader.page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    reader.page.click("#copy")
    expect(reader.page.locator("#copied")).to_have_text("copied")
    assert reader.page.evaluate("navigator.clipboard.readText()") == command
    answered = subprocess.run(["sh", "-c", command], capture_output=True, check=True, timeout=60)
    assert answered.stdout.endswith(b"data: [DONE]\n\n"), answered.stdout[-300:]
    reader.page.click("#send")
    until(lambda: "generated" in reader.text("#status"), "the answer")
    sent = dict(reader.sent[-1][0])
    # Of one call alone.
    del sent["request_id"]
    assert json.loads(body) == sent, (body, sent)
    reader.page.click("#curl summary")
    reader.page.fill("#system", "")
    reader.page.fill("#temperature", "")
    return f"{len(command)} characters, read by sh as they were meant, and sent by curl"


def shows_every_state_of_blocks(reader: Reader) -> str:
    """Under load; with the tooltips of those that somebody holds, requests by state, and curves."""
    seen, tips = set(), {}
    reader.start_anew()
    with load(reader.url):
        for _ in range(600):
            seen |= {name for name, count in reader.legend().items() if count}
            for state in ("pinned", "shared", "private", "swapped"):
                tip = reader.hover(state)
                if f": {state}, " in tip:
                    tips[state] = tip
            if seen >= set(COLOURS) - {"parked", "arriving"} and len(tips) == 4:
                break
            time.sleep(0.05)
        assert seen >= set(COLOURS) - {"parked", "arriving"}, seen
        assert len(tips) == 4, tips
        assert re.fullmatch(r"KV block \d+: pinned, pinned prefix clerk", tips["pinned"]), tips
        assert re.fullmatch(r"KV block \d+: shared, request \S+", tips["shared"]), tips
        assert re.fullmatch(r"KV block \d+: private, request \S+", tips["private"]), tips
        assert re.fullmatch(r"CPU block \d+: swapped, request \S+", tips["swapped"]), tips
        until(lambda: not reader.pools()[1]["folded"], "the pool in CPU memory, unfolded")
        groups_requests_by_state(reader)
        reader.ask("Tell me of type.", 40, answers=2)
        until(lambda: "generated" in reader.text("#status"), "the answer")
        reader.page.fill("#prompt", "And of the case it lies in?")
        reader.page.click("#curl summary")
        explains_what_waits(reader)
        take_screenshots(reader)
        reader.page.click("#curl summary")
        draws_four_curves(reader)
    until(lambda: reader.rows().count() == 0, "the end of all requests")
    until(lambda: reader.pools()[1]["folded"], "the pool in CPU memory, folded again")
    return "; ".join(tips.values())


_GROUPS: Final = """() => [...document.querySelectorAll("#requests tbody")].filter((body) => !body.hidden).map(
  (body) => [body.rows[0].textContent, body.querySelectorAll("tr[data-request]").length])"""


def groups_requests_by_state(reader: Reader) -> None:
    def told() -> Any:
        groups = dict(reader.page.evaluate(_GROUPS))
        for title, rows in groups.items():
            assert title.endswith(f" ({rows})"), groups
        states = [title.partition(" ")[0] for title in groups]
        assert states == sorted(states, key=["running", "waiting", "swapped"].index), groups
        return {"running", "swapped"} <= set(states)

    until(told, "running and swapped requests")


def explains_what_waits(reader: Reader) -> None:
    """Whatever request stays long enough: those that wait for blocks do."""

    def told() -> bool:
        button = reader.page.locator("#requests tbody[data-state=swapped] button[aria-expanded=false]").first
        if not button.count():
            return False
        button.click()
        try:
            expect(reader.page.locator(".told")).to_contain_text("prompt tokens", timeout=3000)
        except AssertionError:
            # It has ended meanwhile, or gone on.
            return False
        return bool(
            re.search("KV blocks|come back first|tokens of the next step|joins the next", reader.text("#table"))
        )

    until(told, "an explanation")


_CURVES: Final = """() => [...document.querySelectorAll(".curve")].map((curve) => ({
  title: curve.querySelector("figcaption").firstChild.textContent, now: curve.querySelector("strong").textContent,
  told: curve.querySelector("svg[role=img]").getAttribute("aria-label"),
  drawn: curve.querySelector("path").getAttribute("d"),
  row: [...document.querySelectorAll("#figures tr")].map((row) => [...row.cells].map((cell) => cell.textContent))
    .find((row) => row[0] === curve.querySelector("figcaption").firstChild.textContent),
  used: document.querySelector(".worker figcaption").textContent,
}))"""


def draws_four_curves(reader: Reader) -> None:
    curves = {found["title"]: found for found in reader.page.evaluate(_CURVES)}
    names = {"Tokens per second", "Time to first token", "Time between tokens", "KV blocks in use"}
    assert set(curves) == names, curves
    for title, curve in curves.items():
        assert curve["drawn"].count("L") > 3 or title == "Time to first token", curve
        assert curve["drawn"].startswith("M"), curve
        now, least, mean, most = curve["row"][1:]
        assert curve["now"] == now, curve
        told = f"{title} in the last two minutes: now {now}, least {least}, mean {mean}, most {most}"
        assert curve["told"] == told, curve
        assert re.fullmatch(r"[\d.]+( ms| s)?", most), curve
        assert float(most.split()[0]) > 0, curve
    assert f" {curves['KV blocks in use']['now']} of 96 in use" in curves["KV blocks in use"]["used"], curves


def take_screenshots(reader: Reader) -> None:
    """Wide and narrow, in light and dark colours; each as axe-core sees it, too."""
    for width in (1280, 390):
        for scheme in ("light", "dark"):
            reader.page.set_viewport_size({"width": width, "height": 900})
            reader.page.emulate_media(color_scheme=scheme)
            # The next snapshot is drawn that way.
            reader.page.wait_for_timeout(1500)
            reader.screenshot(f"{width}-{scheme}")
            reader.check_axe(f"{width}-{scheme}")
    reader.page.set_viewport_size({"width": 1280, "height": 900})
    reader.page.emulate_media(color_scheme="light")


def can_be_used_without_a_mouse(reader: Reader) -> str:
    """Tab gets to the requests' buttons, arrows from row to row, and the focus stays while figures change."""
    page = reader.page
    with posts(reader.url, [LASTING] * 3):
        until(lambda: reader.rows().count() == 3, "three requests")
        page.focus("#key")
        for _ in range(40):
            page.keyboard.press("Tab")
            if reader.focused("aria-label").startswith("Explain"):
                break
        first = reader.focused("aria-label")
        assert first.startswith("Explain request"), "Tab does not get to the requests"
        outline = page.evaluate("getComputedStyle(document.activeElement).outline")
        assert "solid" in outline, outline
        assert "0px" not in outline, outline
        page.keyboard.press("ArrowDown")
        second = reader.focused("aria-label")
        assert second.startswith("Explain request"), second
        assert second != first
        page.keyboard.press("End")
        page.keyboard.press("Home")
        assert reader.focused("aria-label") == first
        page.keyboard.press("Enter")
        expect(page.locator(".told")).to_contain_text("prompt tokens")
        assert reader.focused("aria-expanded") == "true"
        age = page.locator("#requests tr[data-request] .age").first
        before = age.text_content()
        until(lambda: age.text_content() != before, "the next snapshot")
        assert reader.focused("aria-label") == first, "figures that change take the focus away"
        page.keyboard.press("Tab")
        assert reader.focused("aria-label") == first.replace("Explain", "Abort")
        page.once("dialog", lambda dialog: dialog.accept())
        page.keyboard.press("Enter")
        expect(page.locator("#deed")).to_contain_text("is aborted")
        until(lambda: reader.focused("id") == "table", "the focus at the table, once its row is gone")
    until(lambda: reader.rows().count() == 0, "the end of all requests")
    page.locator(".worker figure canvas").focus()
    page.keyboard.press("Home")
    tips = []
    for _ in range(3):
        tips.append(reader.text("#tooltip"))
        assert reader.focused("aria-valuetext") == tips[-1]
        page.keyboard.press("ArrowRight")
    assert [tip.partition(":")[0] for tip in tips] == ["KV block 0", "KV block 1", "KV block 2"], tips
    page.keyboard.press("Escape")
    expect(page.locator("#tooltip")).to_be_hidden()
    page.evaluate("document.activeElement.blur()")
    return "; ".join(tips)


def ends_requests(reader: Reader) -> str:
    """Its own at once, those of others when asked again."""
    page = reader.page
    reader.start_anew()
    reader.ask("Go on and on.", 900)
    until(lambda: page.locator(".answer").last.text_content(), "the beginning")
    page.get_by_role("button", name="Abort request").click()
    expect(page.locator("#status")).to_contain_text("was aborted by its id")
    until(lambda: reader.rows().count() == 0, "the end of the request")
    with posts(reader.url, [LASTING]):
        row = reader.rows().first
        asked: list[str] = []

        def refuse(dialog: Any) -> None:
            asked.append(dialog.message)
            dialog.dismiss()

        page.once("dialog", refuse)
        row.get_by_role("button", name="Abort").click()
        name = row.get_attribute("data-request")
        assert asked == [f"Abort request {name}? Its client is told that it was aborted."], asked
        page.once("dialog", lambda dialog: dialog.accept())
        row.get_by_role("button", name="Abort").click()
        expect(page.locator("#deed")).to_have_text(f"request {name} is aborted")
        until(lambda: page.locator(f"[data-request='{name}']").count() == 0, "the end of the request")
    until(lambda: reader.rows().count() == 0, "the end of the next one")
    return asked[0]


def leaves_others_to_their_frontend(reader: Reader, locked: Reader, trusted: str) -> str:
    with posts(locked.url, [LASTING], trusted):
        button = reader.page.get_by_role("button", name="Abort request")
        expect(button).to_be_disabled()
        assert "another frontend" in str(button.get_attribute("title"))
        reader.page.get_by_role("button", name="Explain request").click()
        expect(reader.page.locator(".told")).to_contain_text("prompt tokens")
    until(lambda: reader.rows().count() == 0, "the end of the request")
    return "explained, not aborted"


def asks_for_a_key(reader: Reader, tenant: str, trusted: str) -> str:
    for place in ("#model", "#live-status"):
        expect(reader.page.locator(place)).to_contain_text("asks for an API key")
    assert all("401" in error for error in reader.errors), reader.errors
    reader.screenshot("locked")
    reader.check_axe("locked")
    give_key(reader, "wrong")
    expect(reader.page.locator("#model")).to_contain_text("does not know this API key")
    give_key(reader, tenant)
    expect(reader.page.locator("#model")).to_have_text("model")
    expect(reader.page.locator("#live-status")).to_contain_text("key of a trusted tenant")
    reader.ask("Tell me of ink.", 5)
    expect(reader.page.locator("#status")).to_contain_text("5 generated")
    reader.expect_errors("401")
    return "told and taken"


def lets_a_tenant_see_its_own(reader: Reader, others: str) -> str:
    """What this page has sent, and nothing of what others do."""
    with posts(reader.url, [LASTING], others):
        reader.ask("Go on and on.", 900)
        until(lambda: reader.page.locator(".answer").last.text_content(), "the beginning")
        assert dict(reader.page.evaluate(_GROUPS)) == {"sent by this page (1)": 1}
        assert reader.text("#workers") == reader.text("#counts") == ""
        reader.page.get_by_role("button", name="Explain request").click()
        expect(reader.page.locator(".told")).to_contain_text("running on worker-0")
        reader.page.get_by_role("button", name="Abort request").click()
        expect(reader.page.locator("#status")).to_contain_text("was aborted by its id")
        assert reader.rows().count() == 0
    return "explained and aborted"


def keeps_the_key(reader: Reader, trusted: str) -> str:
    """While the tab is open; and never tells it."""
    give_key(reader, trusted)
    expect(reader.page.locator("#live-status")).to_have_text("as the scheduler sees it")
    reader.page.reload()
    expect(reader.page.locator("#live-status")).to_have_text("as the scheduler sees it")
    expect(reader.page.locator("#model")).to_have_text("model")
    reader.page.click("#curl summary")
    command = str(reader.page.locator("#command").text_content())
    html = reader.page.evaluate("document.documentElement.outerHTML")
    assert trusted not in html, html[max(0, html.find(trusted) - 200) :][:400]
    assert '-H "authorization: Bearer $OCTAVO_API_KEY"' in command, command
    environment = {**os.environ, "OCTAVO_API_KEY": trusted}
    answered = subprocess.run(["sh", "-c", command], capture_output=True, check=True, timeout=60, env=environment)
    assert answered.stdout.endswith(b"data: [DONE]\n\n"), answered.stdout[-300:]
    return "kept, and a variable in the command"


def give_key(reader: Reader, key: str) -> None:
    reader.page.fill("#key", key)
    reader.page.press("#key", "Tab")


def is_quiet_and_stays_at_home(reader: Reader) -> str:
    # The browser's line about an explanation of a request that had just ended.
    errors = [error for error in reader.errors if "status of 404" not in error]
    assert errors == [], errors
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
    axe = Path(given.axe).read_text(encoding="utf-8")

    def page() -> Page:
        return browser.new_context(viewport={"width": 1280, "height": 900}).new_page()

    reader, locked = (Reader(page(), url, Path(given.screenshots), axe) for url in (given.url, given.locked_url))
    reader.open()
    locked.open()
    checks: list[tuple[str, Callable[[], str]]] = [
        (check.__name__, lambda check=check: check(reader))  # type: ignore[misc]
        for check in (
            shows_what_is_there,
            keeps_the_pools_apart,
            streams_an_answer,
            leaves_cached_blocks,
            tells_of_every_tier,
            tells_of_moves,
            shows_every_answer,
            talks_with_a_history,
            a_new_conversation_ends_the_old_one,
            leaves_the_tokens_to_the_server,
            stops_when_told,
            says_what_is_wrong,
            tells_the_same_as_curl,
            shows_every_state_of_blocks,
            can_be_used_without_a_mouse,
            ends_requests,
        )
    ]
    return run(
        [
            *checks,
            ("leaves_others_alone", lambda: leaves_others_to_their_frontend(reader, locked, given.trusted)),
            ("is_quiet_and_stays_at_home", lambda: is_quiet_and_stays_at_home(reader)),
            ("asks_for_a_key", lambda: asks_for_a_key(locked, given.tenant, given.trusted)),
            ("lets_a_tenant_see_its_own", lambda: lets_a_tenant_see_its_own(locked, given.trusted)),
            ("keeps_the_key", lambda: keeps_the_key(locked, given.trusted)),
            ("is_quiet_with_a_key", lambda: is_quiet_and_stays_at_home(locked)),
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("chromium", "screenshots", "axe", "url", "locked_url", "tenant", "trusted"):
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
