"""The page's timeline, cluster view and looks, in headless Chromium over made-up answers."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, expect

from tests.browser import PHONE, browser, needs_chromium, opened, served
from tests.page_router import TEXT, FakeRouter, speculate
from tests.thorough import mostly_thorough


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    with browser() as running:
        yield running


# Timeline and cluster


@needs_chromium
def test_the_timeline_has_bars_on_both_tracks(chromium: Browser) -> None:
    steps = speculate(TEXT, seed=7)
    with served(FakeRouter().app) as address, opened(chromium, address) as tab:
        tab.send()
        tab.finished()
        tab.page.click("#zoom-fit")
        bars = tab.page.locator("#tracks .bar")
        assert tab.page.locator("#tracks .bar.draft").count() == sum(len(step["proposals"]) for step in steps)
        assert tab.page.locator("#tracks .bar.verify").count() == len(steps)
        assert tab.page.locator("#tracks .bar.wait").count() == sum(step["step"]["waited"] > 0 for step in steps) > 0
        share = re.match(r"(\d+)\u202f% of verification", tab.page.locator("#overlap").inner_text())
        assert share and abs(int(share[1]) - expected_overlap(steps)) <= 1
        tab.page.locator("#tracks .bar.verify").nth(2).hover()
        expect(tab.page.locator("#tracks-detail")).to_contain_text("Step 3:")
        assert tab.page.locator("#output .lit").count() == len(steps[2]["pieces"])
        tab.page.locator("#tracks .bar.draft").first.hover()
        expect(tab.page.locator("#tracks-detail")).to_contain_text(re.compile(r"\d+\stokens? in 24\sms"))
        whole = bars.count()
        tab.page.focus("#tracks")
        for _ in range(4):
            tab.page.keyboard.press("+")
        assert 0 < bars.count() < whole
        tab.page.keyboard.press("Home")
        first = tab.page.locator("#tracks .tick").first.text_content()
        tab.page.keyboard.press("ArrowRight")
        assert tab.page.locator("#tracks .tick").first.text_content() != first


def expected_overlap(steps: list[Any]) -> float:
    """Percent of verification time, by microseconds: slow and plain."""
    stretches = [(step["step"]["start"], step["step"]["end"]) for step in steps]
    drafts = [(p["start"], p["end"]) for step in steps for p in step["proposals"]]
    drafting = {us for start, end in drafts for us in range(round(1e4 * start), round(1e4 * end))}
    verifying = [us for start, end in stretches for us in range(round(1e4 * start), round(1e4 * end))]
    return 100 * sum(us in drafting for us in verifying) / len(verifying)


@needs_chromium
def test_the_trie_follows_what_was_committed(chromium: Browser) -> None:
    """What survives a commit stands in the next step's tree, late proposals in their place, unknown ones nowhere."""
    script = """async () => {
        const { Trie, below } = await import("./page/trie.js");
        const number = (text) => text?.charCodeAt(0) ?? null;
        const tokens = (...texts) => texts.map((text) => ({ id: number(text), text, number: number(text) }));
        const show = ({ parent, text, kept }) => parent.text + text + (kept ? "!" : "");
        const texts = (root) => [...below(root)].map(show);
        const trie = new Trie(5);
        const rest = { source: "draft", end: 0 };
        const offer = (anchor, after, parents, ...of) => trie.insert({ ...rest, anchor, after: number(after), parents,
            tokens: tokens(...of), confidence: parents.map(() => 0.5) });
        offer(5, null, [-1, 0, 0, 1], "a", "b", "c", "d");
        offer(8, "d", [-1], "e");
        offer(7, "b", [-1], "k");       // although c is as likely, and has no followers
        offer(7, "y", [-1], "z");       // below nothing
        const commit = (...of) => of.map((text) => ({ id: number(text), text, source: "lookup" }));
        const first = trie.advance(commit("a", "c"), 1);
        const empty = texts(trie.root);
        offer(5, null, [-1, 0, 1], "a", "c", "f");    // begins in what is committed
        offer(5, null, [-1, 0, 1], "a", "b", "g");    // a branch that was refused
        offer(9, "e", [-1], "q");                     // another one
        offer(8, "f", [-1], "s");
        const second = trie.advance(commit("f", "l", "h"), 2);  // l was drafted at the target
        return [texts(first), empty, texts(second), texts(trie.root)];
    }"""
    with served(FakeRouter().app) as address, opened(chromium, address, bypass_csp=True) as tab:
        first, empty, second, rest = tab.page.evaluate(script)
    assert sorted(first) == ["a!", "ab", "ac", "bd", "bk", "de"]
    assert (empty, second, rest) == ([], ["cf!", "fs", "fl!"], [])


@needs_chromium
def test_the_tree_knows_the_tokens_of_one_character_apart(chromium: Browser) -> None:
    script = """async () => {
        const { Run } = await import("./page/run.js");
        const { below } = await import("./page/trie.js");
        const { drawTree } = await import("./page/tree_view.js");
        const run = new Run("completion", {}, 0);
        const token = (id, text) => ({ id, text, number: id });
        const proposals = [{ source: "draft", start: 0, end: 1, anchor: 3, after: null, parents: [-1, 0, 1, 1],
            tokens: [token(7, "\ufffd"), token(8, "\ufffd"), token(9, "?"), token(10, "!")],
            confidence: [0.9, 0.8, 0.2, 0.7] }];
        const own = (id, text, source) => ({ id, text, source });
        run.take({ choices: [{ text: "\u00e9!" }], speculation: { accepted: 2, offered: 3, tokens: 3, position: 3,
            pieces: [{ text: "\u00e9", source: "draft" }, { text: "!", source: "recovered" }],
            committed: [own(7, "\ufffd", "draft"), own(8, "\ufffd", "draft"), own(10, "!", "recovered")],
            step: { start: 1, end: 2, waited: 0 }, proposals } }, 2);
        const [step] = run.steps;
        const boxes = drawTree(step).querySelectorAll(".box");
        return [[...below(step.tree)].map(({ id, kept }) => [id, kept]), [...boxes].map((box) => box.classList[1])];
    }"""
    with served(FakeRouter().app) as address, opened(chromium, address, bypass_csp=True) as tab:
        nodes, boxes = tab.page.evaluate(script)
    assert nodes == [[7, True], [8, True], [9, False], [10, False]]
    assert boxes == ["kept", "kept", "own", "left"]


@needs_chromium
def test_the_cluster_is_followed(chromium: Browser) -> None:
    fake = FakeRouter()
    with served(fake.app) as address, opened(chromium, address) as tab:
        rows = tab.page.locator("#workers tbody tr")
        expect(rows).to_have_count(3)
        expect(rows.nth(0)).to_contain_text(
            re.compile(r"10\.0\.0\.5:7001.*target.*up.*25\s%.*2 \+ 1 waiting.*0\.4\sms.*70\s%.*140")
        )
        expect(rows.nth(2)).to_contain_text("lost")
        expect(tab.page.locator("#pulse-text")).to_have_text("1\u00a0target, 1\u00a0drafter")
        expect(tab.page.locator("#events li").first).to_contain_text("connection refused")
        assert tab.page.locator("#events .new").count() == 0
        moved = fake.cluster["events"][-1] | {"number": 3, "kind": "session_moved", "text": "session 4 moved"}
        fake.cluster = fake.cluster | {"events": [*fake.cluster["events"], moved], "workers": []}
        expect(tab.page.locator("#events li.new")).to_contain_text("session 4 moved")
        expect(rows).to_have_count(0)


@needs_chromium
def test_the_cluster_is_asked_for_again_after_an_answer_that_breaks_off(chromium: Browser) -> None:
    fake = FakeRouter()
    with served(fake.app) as address, opened(chromium, address) as tab:
        pulse = tab.page.locator("#pulse-text")
        for broken, told in ((False, "1\u00a0target, 1\u00a0drafter"), (True, "no connection")) * 2:
            fake.breaks_off = broken
            expect(pulse).to_have_text(told)


@needs_chromium
def test_what_was_held_back_to_the_end_is_no_step(chromium: Browser) -> None:
    script = """async () => {
        const { Run } = await import("./page/run.js");
        const run = new Run("completion", {}, 0);
        const said = { accepted: 0, offered: 0, position: 3 };
        const pieces = (text) => (text ? [{ text, source: "target" }] : []);
        const take = (text, tokens) => run.take({ choices: [{ text }],
            speculation: { ...said, tokens, pieces: pieces(text), step: { start: 0, end: 1, waited: 0 } } }, 1);
        take("ab", 2);
        take("", 1);
        take("?", 0);
        const { steps, tokensPerStep } = run.figures(2);
        return [run.text, steps, tokensPerStep];
    }"""
    with served(FakeRouter().app) as address, opened(chromium, address, bypass_csp=True) as tab:
        assert tab.page.evaluate(script) == ["ab?", 2, 1.5]


# Looks


@needs_chromium
@pytest.mark.parametrize("scheme", mostly_thorough(["light", "dark"], quick=["dark"]))
def test_it_works_on_a_phone(chromium: Browser, scheme: Any, tmp_path: Path) -> None:
    options = {"has_touch": True, "is_mobile": True, "color_scheme": scheme}
    with served(FakeRouter().app) as address, opened(chromium, address, PHONE, **options) as tab:
        expect(tab.page.locator("#workers tbody tr")).to_have_count(3)
        assert not tab.overflows()
        tab.send("a_very_long_name_" * 20)
        tab.finished()
        assert not tab.page.locator("#step").is_visible()
        tab.page.locator(".piece[data-index='3']").tap()
        expect(tab.page.locator("#step")).to_be_visible()
        tab.page.click("#compare")
        expect(tab.page.locator(".verdict")).to_be_visible()
        assert not tab.overflows()
        tab.page.click("#step-close")
        expect(tab.page.locator("#step")).not_to_be_visible()
        tab.page.screenshot(path=tmp_path / f"phone-{scheme}.png")


CONTRAST = """() => {
    const canvas = new OffscreenCanvas(1, 1).getContext("2d", { willReadFrequently: true });
    const over = (colours) => {
        canvas.clearRect(0, 0, 1, 1);
        for (const colour of colours) { canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1); }
        return [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3);
    };
    const light = (rgb) => rgb.map((v) => v / 255).map((v) => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
        .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
    const poor = [];
    const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    while (walker.nextNode()) {
        const node = walker.currentNode.parentElement;
        const disabled = node.closest("button, label, fieldset, .off")?.matches(":disabled, .off");
        const unseen = disabled || !node.checkVisibility() || node.closest("svg, .hidden");
        if (unseen || !walker.currentNode.textContent.trim()) continue;
        const grounds = [];
        for (let at = node; at; at = at.parentElement) grounds.unshift(getComputedStyle(at).backgroundColor);
        const a = light(over(["white", ...grounds]));
        const b = light(over(["white", ...grounds, getComputedStyle(node).color]));
        const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
        if (ratio < 4.5) poor.push(`${ratio.toFixed(2)} ${node.outerHTML}`);
    }
    return poor;
}"""


@needs_chromium
@pytest.mark.parametrize("scheme", mostly_thorough(["light", "dark"], quick=["dark"]))
def test_text_has_the_contrast_of_wcag_aa(chromium: Browser, scheme: Any, tmp_path: Path) -> None:
    with served(FakeRouter().app) as address, opened(chromium, address, color_scheme=scheme) as tab:
        tab.send()
        tab.finished()
        tab.page.click("#compare")
        expect(tab.page.locator(".verdict")).to_be_visible()
        expect(tab.page.locator("#workers tbody tr")).to_have_count(3)
        tab.page.hover(".piece[data-index='9']")
        assert tab.page.evaluate(CONTRAST) == []
        tab.page.screenshot(path=tmp_path / f"{scheme}.png", full_page=True)


@needs_chromium
def test_the_theme_can_be_switched_and_is_remembered(chromium: Browser) -> None:
    ground = "getComputedStyle(document.body).backgroundColor"
    with served(FakeRouter().app) as address, opened(chromium, address, color_scheme="dark") as tab:
        dark = tab.page.evaluate(ground)
        tab.page.get_by_role("button", name="Theme: as the system").click()
        light = tab.page.evaluate(ground)
        assert light != dark
        tab.page.reload()
        assert tab.page.evaluate(ground) == light
        tab.page.get_by_role("button", name="Theme: light").click()
        assert tab.page.evaluate(ground) == dark


@needs_chromium
def test_everything_has_a_name_and_can_be_reached_by_keys(chromium: Browser) -> None:
    unnamed = """() => [...document.querySelectorAll("button, input, select, textarea, [tabindex], [role], dialog")]
        .filter((one) => one.checkVisibility())
        .filter((one) => !(one.ariaLabel || one.getAttribute("aria-labelledby") || one.labels?.length))
        .filter((one) => !one.textContent.trim() && one.role !== "status" && one.role !== "alert")
        .map((one) => one.outerHTML)"""
    with served(FakeRouter().app) as address, opened(chromium, address) as tab:
        assert tab.page.evaluate(unnamed) == []
        tab.page.focus("#prompt")
        tab.page.keyboard.press("Control+Enter")
        tab.finished()
        reached = set()
        for _ in range(40):
            tab.page.keyboard.press("Tab")
            reached.add(tab.page.evaluate("document.activeElement.id || document.activeElement.name"))
        assert reached >= {"theme", "speculate", "source", "send", "output", "compare", "tree", "zoom-fit", "tracks"}
