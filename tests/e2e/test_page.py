"""The page at `/` in a real browser: one headless Chromium and one stack for all; pictures are left in target/page/."""

from __future__ import annotations

import os
import re
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from .stack import Gateway, Stack, wait_until
from .test_wasm import NOOP, built
from .tiny import TinyModels

CHROMIUM = shutil.which("chromium")
PICTURES = Path(__file__).resolve().parents[2] / "target" / "page"
KEY = "top-secret"
LIMIT_MS = 60_000
PHONE = {"width": 390, "height": 780}
DESKTOP = {"width": 1280, "height": 860}
# Longer than some pages, and the same whatever is sampled.
QUESTION = "Tell me how the branch line was built, who paid for it and why it was closed in the end. " * 3

pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="Chromium is not there (apt-get install chromium): the page is not tested in a browser"
)
Opener = Callable[..., Page]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Debian's Chromium."""
    # A sandbox of its own is refused to root, as whom containers run.
    arguments = ["--disable-gpu", *(["--no-sandbox"] if os.geteuid() == 0 else [])]
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=arguments)
        yield chromium
        chromium.close()


@pytest.fixture(scope="module")
def stack(tiny: TinyModels) -> Iterator[Stack]:
    """Two engines; there is an administrator's key, so that the page is read-only without it."""
    model = str(tiny.llama("plain"))
    stack = Stack("--max-total-tokens", "4096", model=model, engines=2, gateway_flags=("--admin-api-key", KEY))
    wait_until(lambda: all(one["ready"] for one in stack.client.get("/workers").json()["workers"]), 60, "two workers")
    yield stack
    stack.close()


@pytest.fixture
def page_of(browser: Browser) -> Iterator[Opener]:
    """`page_of(url, view, **context)` opens the page. Whatever its scripts or its policy complain of fails the test."""
    complaints: list[str] = []
    contexts = []

    def open_page(url: str, view: str = "chat", **options: Any) -> Page:
        contexts.append(browser.new_context(**{"viewport": DESKTOP, **options}))
        page = contexts[-1].new_page()
        page.set_default_timeout(LIMIT_MS)
        expect.set_options(timeout=LIMIT_MS)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        # That a call was refused is told there, too.
        page.on("console", lambda line: complaints.append(line.text) if "Failed to load" not in line.text else None)
        page.goto(f"{url}/#{view}")
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert complaints == []


def shoot(page: Page, name: str) -> None:
    PICTURES.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=PICTURES / f"{name}.png")


def give_key(page: Page, key: str) -> None:
    page.get_by_role("button", name="Key").click()
    page.get_by_label("Key", exact=True).fill(key)
    page.get_by_role("button", name="Use key").click()


def send(page: Page, text: str) -> None:
    """Sends a message and waits for the end of its answer."""
    page.get_by_label("Message", exact=True).fill(text)
    page.get_by_label("Message", exact=True).press("Enter")
    expect(page.locator(".turn.theirs").last).to_have_attribute("data-state", "done")


def wait(page: Page, holds: Callable[[], bool]) -> None:
    """Until it holds. The page's policy forbids to evaluate the browser's own way of waiting."""
    end = time.monotonic() + LIMIT_MS / 1000
    while not holds():
        assert time.monotonic() < end
        page.wait_for_timeout(50)


def prepare(page: Page, tokens: int = 12) -> None:
    """Waits for the models and asks for short answers that do not end early."""
    expect(page.locator("#s-model option").first).to_be_attached()
    page.get_by_label("Longest answer, tokens").fill(str(tokens))
    page.get_by_label("Further fields (JSON)").fill('{"ignore_eos": true}')


def test_the_parts_without_elements_keep_their_promises(stack: Stack, page_of: Opener) -> None:
    page = page_of(stack.url)
    found = page.evaluate("""async () => {
        const { parse, sums, quantile, History } = await import("./page/series.js");
        const { EventReader } = await import("./page/api.js");
        const { Conversation, Sentences, parts } = await import("./page/turns.js");
        const { layout } = await import("./page/layout.js");
        const text = '# HELP a x\\na_total{k="x \\\\"}, y",l="1"} 2\\n'
            + 'a_total{k="z",l="1"} 3 # {t="1"} 9\\nb +Inf\\n# EOF\\n';
        const family = parse(text).get("a_total");
        const history = new History(3);
        for (const [time, value] of [[0, 10], [1, 14], [2, 3]]) history.push(parse(`a_total{l="1"} ${value}`), time);
        const events = new EventReader();
        const pieces = [": ping\\n\\ndata: {\\"a\\"", ":1}\\n", "\\nda", "ta: [DONE]\\n\\n"];
        const data = pieces.flatMap((piece) => events.feed(piece));
        const talk = new Conversation();
        const first = talk.add("user", "a");
        talk.add("assistant", "b");
        talk.fork(first.id);
        const other = talk.add("assistant", "c");
        const sentences = new Sentences();
        const node = (node, parent, hits) => ({ node, parent, hits, tokens: 16, children: 0 });
        const spots = layout([node(3, 1, 1), node(1, null, 4), node(2, 1, 9), node(9, 7, 1)]).spots;
        return {
            labels: family.map((sample) => sample.labels.k), sum: sums(parse(text), "a_total", "l").get("1"),
            rates: history.rate("a_total").map((line) => line.points),
            half: quantile([[1, 2], [2, 4], [Infinity, 4]], 0.75), none: quantile([[1, 0]], 0.5),
            data, siblings: talk.siblings(other).length,
            messages: talk.messages("s").map((message) => message.content).join(""),
            spoken: [sentences.next("One. Tw", false), sentences.next("One. Two", true)],
            parts: parts("a\\n```js\\nb\\n```\\nc").map((part) => part.code),
            spots: spots.map(({ node, level, place, among, y }) => [node.node, level, place, among, y]),
        };
    }""")
    assert found["labels"] == ['x "}, y', "z"] and found["sum"] == 5
    assert found["rates"] == [[[1, 4], [2, 3]]], "a counter that starts again counts from zero"
    assert (found["half"], found["none"]) == (1.5, None)
    assert found["data"] == ['{"a":1}', "[DONE]"]
    assert (found["siblings"], found["messages"]) == (2, "sac")
    assert found["spoken"] == ["One.", "Two"] and found["parts"] == [False, True, False]
    # The most used child goes on in its parent's row; whose parent is not shown is a root.
    rows = {row[0]: row[4] for row in found["spots"]}
    assert [row[:4] for row in found["spots"]] == [[1, 1, 1, 2], [2, 2, 1, 2], [3, 2, 2, 2], [9, 1, 2, 2]]
    assert rows[1] == rows[2] < rows[3] < rows[9]


def test_an_answer_streams_and_says_why_its_worker_was_chosen(stack: Stack, page_of: Opener) -> None:
    page = page_of(stack.url)
    prepare(page, 96)
    page.evaluate("""() => {
        globalThis.seen = new Set();
        new MutationObserver(() => {
            const turn = document.querySelector('.turn.theirs[aria-busy="true"] .body');
            if (turn) seen.add(turn.textContent.length);
        }).observe(document.getElementById("turns"), { childList: true, subtree: true, characterData: true });
    }""")
    send(page, QUESTION)
    assert page.evaluate("seen.size") >= 3, "it grows while it is made"
    answer = page.locator(".turn.theirs").last
    expect(answer.locator(".foot")).to_contain_text("96 tokens")
    expect(answer.locator(".foot")).to_contain_text("ended by length")
    answer.get_by_text("Why this worker").click()
    expect(answer.get_by_role("table").locator("tbody tr")).to_have_count(2)
    expect(answer.locator(".decision p").first).to_contain_text("cache_aware chose it: 0 of ")  # of equal ones, either
    said = page.locator("#spoken")
    expect(said).to_have_attribute("aria-live", "polite")
    assert len(said.inner_text()) > 50, "what was said can be heard"
    shoot(page, "chat")


def test_escape_stops_an_answer(stack: Stack, page_of: Opener) -> None:
    page = page_of(stack.url)
    prepare(page, 1500)
    page.get_by_label("Message", exact=True).fill("Go on")
    page.get_by_label("Message", exact=True).press("Enter")
    expect(page.locator(".turn.theirs .body")).not_to_have_text("···")
    page.keyboard.press("Escape")
    expect(page.locator(".turn.theirs")).to_have_attribute("data-state", "stopped")
    expect(page.get_by_role("button", name="Send")).to_be_visible()


def test_the_tree_grows_with_a_fork(stack: Stack, page_of: Opener) -> None:
    stack.flush()
    page = page_of(stack.url)
    prepare(page, 20)
    send(page, QUESTION)
    send(page, "And what of the viaduct over the river, how many arches did it have?")
    nodes = page.locator("#view-tree .node")
    page.get_by_role("link", name="Tree").click()
    expect(nodes.first).to_be_visible()
    before = nodes.count()
    page.get_by_role("link", name="Chat").click()
    page.get_by_role("button", name="Fork the conversation here").first.click()
    expect(page.locator("#fork-note")).to_be_visible()
    send(page, "Rather name the engines that ran on it, and where each of them ended.")
    expect(page.locator(".way").nth(2)).to_contain_text("branch 2 of 2")
    page.get_by_role("button", name="Branch before").click()
    expect(page.locator(".turn.mine").last).to_contain_text("viaduct")
    page.get_by_role("link", name="Tree").click()
    expect(page.locator('#view-tree .node[aria-label*="2 children"]').first).to_be_visible()
    wait(page, lambda: page.locator("#view-tree .node").count() > before)
    shoot(page, "tree")
    page.get_by_label("Show text").click()  # the refusal may take the mark back at once
    expect(page.locator("#view-tree .fault")).to_contain_text("to an administrator only")
    expect(page.get_by_label("Show text")).not_to_be_checked()
    give_key(page, KEY)
    page.get_by_label("Show text").check()
    expect(page.locator(".node-text:visible")).to_contain_text("branch line")


def test_the_latest_decisions_are_listed_and_any_can_be_asked_for(stack: Stack, page_of: Opener) -> None:
    stack.client.post("/v1/completions", json={"prompt": QUESTION, "max_tokens": 1}, headers={"x-request-id": "mine"})
    page = page_of(stack.url, "routing")
    first = page.locator("#routing-list > li").first
    first.locator("summary").click()
    expect(first).to_contain_text("request mine")
    expect(first.locator("tr.chosen")).to_have_count(1)
    page.get_by_label("Request id").fill("mine")
    page.get_by_role("button", name="Explain").click()
    expect(page.locator("#routing-found")).to_contain_text("Request mine")
    page.get_by_label("Request id").fill("nobody's")
    page.get_by_label("Request id").press("Enter")
    expect(page.locator("#view-routing .fault")).to_contain_text("no choice is kept for request 'nobody's'")
    shoot(page, "routing")


def test_a_module_is_uploaded_tried_and_removed_by_whoever_has_the_key(
    stack: Stack, page_of: Opener, tmp_path: Path
) -> None:
    module = built(NOOP, tmp_path)
    page = page_of(stack.url, "modules")
    expect(page.locator("#banner")).to_contain_text("Read-only")
    load = page.get_by_role("button", name="Load", exact=True)
    expect(load).to_be_disabled()
    give_key(page, "wrong")
    expect(page.locator("#key-said")).to_contain_text("does not know this key")
    page.get_by_label("Key", exact=True).fill(KEY)
    page.get_by_role("button", name="Use key").click()
    expect(load).to_be_enabled()
    assert page.evaluate("Object.keys(sessionStorage).length + localStorage.length") == 1
    fault = page.locator("#view-modules .fault")
    page.get_by_label("Component (.wasm)").set_input_files(module)
    page.get_by_label("Settings (JSON)").fill('{"order": }')
    load.click()
    expect(fault).to_contain_text("Settings: this is not JSON")
    expect(page.get_by_label("Settings (JSON)")).to_be_focused()
    page.get_by_label("Settings (JSON)").fill('{"order": 5}')
    load.click()
    card = page.locator("#modules > li")
    expect(card).to_contain_text("noop v1")
    expect(fault).to_be_empty()
    card.get_by_text("Dry run").click()
    card.get_by_role("button", name="Run").click()
    expect(card.locator(".dry pre")).to_contain_text('"hook": "on-request"')
    shoot(page, "modules")
    card.get_by_role("button", name="Switch off noop").click()
    expect(card.locator(".state")).to_have_text("off")
    page.get_by_label("Component (.wasm)").set_input_files({"name": "x.wasm", "mimeType": "", "buffer": b"no module"})
    load.click()
    expect(fault.get_by_role("paragraph")).to_be_visible()
    card.get_by_role("button", name="Remove noop").click()
    page.get_by_role("dialog").get_by_role("button", name="Remove").click()
    expect(card).to_have_count(0)


def test_bad_input_is_told_where_it_stands(stack: Stack, page_of: Opener) -> None:
    page = page_of(stack.url)
    prepare(page)
    alert = page.locator("#chat-error")
    page.get_by_label("Further fields (JSON)").fill('{"logit_bias": ')
    page.get_by_label("Message", exact=True).fill("Hello")
    page.get_by_label("Message", exact=True).press("Enter")
    expect(alert).to_contain_text("Further fields: this is not JSON")
    expect(page.get_by_label("Further fields (JSON)")).to_be_focused()
    expect(page.get_by_label("Message", exact=True)).to_have_value("Hello")
    page.get_by_label("Further fields (JSON)").fill("")
    page.get_by_label("Top p").fill("7")
    page.get_by_label("Message", exact=True).press("Enter")
    expect(alert).to_contain_text("top_p")
    expect(page.get_by_label("Top p")).to_have_attribute("aria-invalid", "true")
    expect(page.locator(".turn.theirs")).to_have_attribute("data-state", "failed")


def test_what_a_port_or_a_missing_key_or_fleet_keeps_from_the_page_is_said(page_of: Opener) -> None:
    gateway = Gateway("--admin-port", "0", "--api-key", KEY, workers=[])
    try:
        gateway.process.wait_for_line("serving")
        page = page_of(gateway.url)
        expect(page.locator("#access")).to_have_text("no key")
        expect(page.locator("#chat-error")).to_contain_text("the API key is missing or wrong")
        give_key(page, KEY)
        expect(page.locator("#chat-error")).to_contain_text("no worker has been reached yet")
        for view in ("Fleet", "Tree", "Routing", "Middleware", "Metrics"):
            page.get_by_role("link", name=view).click()
            expect(page.locator("#banner")).to_contain_text("a port of their own (--admin-port)")
        assert page.locator("#fleet-body").is_hidden()
    finally:
        gateway.stop()


def test_everything_can_be_reached_by_the_keyboard_alone(stack: Stack, page_of: Opener) -> None:
    page = page_of(stack.url)
    prepare(page)
    page.reload()
    expect(page.locator("#s-model option").first).to_be_attached()

    def tab_to(selector: str, key: str = "Tab") -> None:
        for _ in range(60):
            page.keyboard.press(key)
            if page.evaluate("selector => document.activeElement.matches(selector)", selector):
                return
        raise AssertionError(f"Tab does not lead to {selector}")

    page.keyboard.press("Tab")
    expect(page.get_by_text("Skip to content")).to_be_focused()
    tab_to("#s-max_tokens")
    page.keyboard.type("8")
    tab_to("#prompt")
    page.keyboard.type(QUESTION)
    page.keyboard.press("Enter")
    expect(page.locator(".turn.theirs")).to_have_attribute("data-state", "done")
    page.reload()
    tab_to('#nav [href="#tree"]')
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", name="Radix tree")).to_be_focused()
    expect(page.locator("#view-tree .node").first).to_be_visible()
    tab_to(".node")
    at = (
        "document.activeElement.getAttribute('aria-posinset') + '/' + document.activeElement.getAttribute('aria-level')"
    )
    start = page.evaluate(at)
    for key in ("ArrowDown", "End", "Home"):
        page.keyboard.press(key)
        assert page.evaluate("document.activeElement.matches('.node[aria-selected=true][tabindex=\"0\"]')"), key
    assert page.evaluate(at) == start
    outline = "getComputedStyle(document.activeElement.querySelector('.ring')).strokeWidth"
    assert page.evaluate(outline) == "3px", "the focus can be seen"
    tab_to("#key-button", "Shift+Tab")
    page.keyboard.press("Enter")
    expect(page.get_by_label("Key", exact=True)).to_be_focused()
    page.keyboard.press("Escape")
    expect(page.locator("#key-button")).to_be_focused()


# Every text's colour on its ground (WCAG 2.2, 1.4.3).
CONTRAST = """() => {
    const style = getComputedStyle(document.documentElement);
    const light = (name) => {
        const hex = style.getPropertyValue(name).trim();
        const part = (at) => parseInt(hex.slice(at, at + 2), 16) / 255;
        const line = (value) => (value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4);
        return 0.2126 * line(part(1)) + 0.7152 * line(part(3)) + 0.0722 * line(part(5));
    };
    const grounds = ["--ground", "--panel", "--sunk"].flatMap((ground) => [["--text", ground], ["--dim", ground]]);
    const pairs = [...grounds, ["--accent-text", "--accent"], ["--accent", "--accent-soft"],
        ["--text", "--accent-soft"],
        ["--good", "--good-soft"], ["--warm", "--warm-soft"], ["--bad", "--bad-soft"], ["--bad", "--panel"]];
    return pairs.map(([text, ground]) => {
        const [low, high] = [light(text), light(ground)].sort((a, b) => a - b);
        return [`${text} on ${ground}`, (high + 0.05) / (low + 0.05)];
    }).filter(([, ratio]) => ratio < 4.5);
}"""
UNNAMED = """() => [...document.querySelectorAll("button, input, select, textarea, a")]
    .filter((one) => !(one.labels?.length || one.getAttribute("aria-label") || one.textContent.trim() || one.alt))
    .map((one) => one.outerHTML)"""


def test_it_fits_a_phone_and_is_dark_where_the_system_is(stack: Stack, page_of: Opener) -> None:
    stack.client.post("/v1/completions", json={"prompt": QUESTION, "max_tokens": 40})
    page = page_of(stack.url, viewport=PHONE, has_touch=True, is_mobile=True, color_scheme="dark")
    expect(page.locator("#s-model option").first).to_be_attached()
    for view in ("Chat", "Fleet", "Tree", "Routing", "Middleware", "Metrics"):
        page.get_by_role("link", name=view).click()
        page.locator("section.view:visible").locator(".card:visible, .composer:visible").first.wait_for()
        assert page.evaluate("document.scrollingElement.scrollWidth") <= PHONE["width"], view
        box = page.locator("#nav").bounding_box()
        assert box is not None and round(box["y"] + box["height"]) == PHONE["height"], "the views are where thumbs are"
        shoot(page, f"phone-{view.lower()}")
    assert page.evaluate(UNNAMED) == []
    dark = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert page.evaluate(CONTRAST) == []
    page.emulate_media(color_scheme="light")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != dark
    assert page.evaluate(CONTRAST) == []


def test_the_charts_follow_the_metrics(stack: Stack, page_of: Opener) -> None:
    page = page_of(stack.url, "metrics")
    flight = page.get_by_role("img", name="Requests in flight")
    expect(flight).to_have_attribute("aria-label", "Requests in flight: all 1")
    stack.client.post("/v1/completions", json={"prompt": QUESTION, "max_tokens": 20})
    status = page.get_by_role("img", name="Requests by status")
    expect(status.locator("path.line").first).to_be_attached()
    expect(page.locator("#view-metrics .line").first).to_have_attribute("d", re.compile("L"))
    hits = page.get_by_role("img", name="Cache hits")
    expect(hits.locator("path.line")).to_have_count(2)
    page.get_by_text("All series as text").click()
    expect(page.locator("#metrics-raw")).to_contain_text("branchline_router_requests_total")
    shoot(page, "metrics")


def test_a_killed_worker_turns_red(stack: Stack, page_of: Opener) -> None:
    page = page_of(stack.url, "fleet")
    cards = page.locator(".worker")
    expect(cards).to_have_count(2)
    expect(page.locator(".worker.good")).to_have_count(2)
    expect(page.get_by_role("button", name="Drain w0")).to_be_disabled()
    stack.engines[1].process.stop(signal.SIGKILL)
    expect(page.locator(".worker.bad")).to_have_count(1)
    expect(page.locator(".worker.bad .state")).to_have_text("down")
    expect(page.locator("#fleet-said")).to_have_text("w1 is down")
    expect(page.locator("#fleet-totals")).to_contain_text("1 of 2")
    red = page.locator(".worker.bad").evaluate("card => getComputedStyle(card).borderTopColor")
    assert red == "rgb(179, 38, 30)"
    shoot(page, "fleet")
    give_key(page, KEY)
    page.get_by_role("button", name="Remove w1").click()
    page.get_by_role("dialog").get_by_role("button", name="Remove").click()
    expect(cards).to_have_count(1)
