"""The page in headless Chromium: over made-up answers, and once over real models."""

from __future__ import annotations

import asyncio
import os
import queue
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from playwright.sync_api import Browser, expect
from starlette.applications import Starlette

from router import page as pages
from router.http.api import ApiSettings, build_app
from router.http.auth import ApiKeys
from router.text.tokenizer import Tokenizers
from tests.browser import browser, needs_chromium, opened, served
from tests.fakes import FakeGenerator, FakeTokenizers, tiny_tokenizer
from tests.page_router import TEXT, FakeRouter, speculate, words
from tests.stack import dispatcher, draft_worker, target_worker

SCREENSHOT = Path(__file__).parents[2] / "docs" / "images" / "page.png"
KEY = "correct-horse-battery"


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    with browser() as running:
        yield running


# The files


def api(settings: ApiSettings | None = None) -> Starlette:
    return build_app(FakeGenerator(lambda _: []), FakeTokenizers(tiny_tokenizer()), settings)


async def test_files_come_with_headers_that_let_nothing_else_in() -> None:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(api()), base_url="http://paceline") as client:
        answer = await client.get("/")
        assert answer.headers["content-type"] == "text/html; charset=utf-8"
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy and "unsafe" not in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["cache-control"] == "no-cache"
        tag = answer.headers["etag"]
        for known in (tag, f"W/{tag}", f'"other", {tag}', "*"):
            again = await client.get("/", headers={"if-none-match": known})
            assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", tag)
        assert (await client.get("/", headers={"if-none-match": '"other"'})).status_code == 200
        assert (await client.get("/page/absent.js")).status_code == 404
        assert (await client.get("/page/__init__.py")).status_code == 404


async def test_files_need_no_api_key(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text(KEY)
    keyed = api(ApiSettings(api_keys=ApiKeys(tmp_path / "keys")))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(keyed), base_url="http://paceline") as client:
        for path in pages.PATHS:
            assert (await client.get(path)).status_code == 200
        assert (await client.get("/v1/models")).status_code == 401


def test_files_name_nothing_that_is_not_there() -> None:
    folder = Path(pages.__file__).parent
    page, scripts = (folder / "index.html").read_text(), "".join(file.read_text() for file in folder.glob("*.js"))
    linked = {f"/{path}" for path in re.findall(r'(?:href|src)="(page/[^"]+)"', page)}
    linked |= {f"/page/{name}" for name in re.findall(r'from "\./([\w.]+)"', scripts)}
    assert linked | {"/"} == pages.PATHS
    assert set(re.findall(r'byId\("([\w-]+)"\)', scripts)) <= set(re.findall(r'id="([\w-]+)"', page))
    assert not re.search(r"\bstyle=|\bon\w+=|<style|javascript:", page)


# The playground


@needs_chromium
@pytest.mark.parametrize("kind", ["completion", "chat"])
def test_every_piece_is_marked_with_its_source(chromium: Browser, kind: str) -> None:
    fake = FakeRouter()
    with served(fake.app) as address, opened(chromium, address) as tab:
        if kind == "chat":
            tab.page.get_by_text("Chat", exact=True).click()
        tab.page.fill("#depth", "5")
        tab.page.get_by_text("Lookup", exact=True).first.click()
        tab.send("Say it")
        tab.finished()
        steps = speculate(TEXT, seed=7)
        assert tab.pieces == [(piece["text"], piece["source"]) for step in steps for piece in step["pieces"]]
        assert {source for _, source in tab.pieces} >= {
            "draft",
            "lookup",
            "prediction",
            "grammar",
            "recovered",
            "bonus",
        }
        accepted, offered = sum(step["accepted"] for step in steps), sum(step["offered"] for step in steps)
        drafted = sum(step["offered"] > 0 for step in steps)
        assert abs(int(tab.figure("acceptance").removesuffix("\u202f%")) - 100 * accepted / offered) <= 0.5
        assert abs(float(tab.figure("acceptanceLength")) - 1 - accepted / drafted) <= 0.0051
        assert tab.figure("steps") == str(len(steps))
        assert tab.figure("tokens") == str(len(words(TEXT)))
    (body,) = fake.bodies
    assert body["speculation"] == {
        "enabled": True,
        "details": True,
        "remember": False,
        "max_depth": 5,
        "sources": ["draft", "prediction", "suffix"],
    }
    assert body["stream_options"] == {"include_speculation": True}
    assert body["model"] == "target" and body["max_tokens"] == 160 and 0 <= body["seed"] < 2**32
    asked = (
        body["messages"] == [{"role": "user", "content": "Say it"}] if kind == "chat" else body["prompt"] == "Say it"
    )
    assert asked


@needs_chromium
def test_sources_can_be_told_apart_without_colour(chromium: Browser) -> None:
    with served(FakeRouter().app) as address, opened(chromium, address) as tab:
        expect(tab.page.locator("#legend .piece")).to_have_count(8)
        looks = tab.page.eval_on_selector_all(
            "#legend .piece",
            """all => all.map(piece => {
                const style = getComputedStyle(piece);
                const unseen = style.borderBottomWidth === "0px" || style.borderBottomColor === "rgba(0, 0, 0, 0)";
                const line = `${style.borderBottomWidth} ${style.borderBottomStyle}`;
                return [unseen ? "none" : line, style.textDecorationStyle].join(" ");
            })""",
        )
        assert len(set(looks)) == len(looks) == 8


@needs_chromium
def test_the_legend_leaves_out_sources_that_do_not_run(chromium: Browser) -> None:
    fake = FakeRouter()
    target, drafter, _ = fake.cluster["workers"]
    target["sources"], drafter["state"] = {"suffix": {"offered": 4, "accepted": 1}}, "lost"
    with served(fake.app) as address, opened(chromium, address) as tab:
        legend = tab.page.locator("#legend li > span:last-of-type")
        expect(legend).to_have_text(["Earlier outputs", "Recovered", "Bonus"])
        tab.send()
        tab.finished()
        said = set(legend.all_text_contents())
        assert {"Draft model", "Lookup", "Earlier outputs", "Target alone"} < said
        assert "EAGLE" not in said


@needs_chromium
def test_a_piece_shows_the_trie_of_its_step(chromium: Browser) -> None:
    steps = speculate(TEXT, seed=7)
    chosen = next(i for i, step in enumerate(steps) if step["offered"] > step["accepted"] > 1)
    step, before = steps[chosen], sum(len(step["pieces"]) for step in steps[:chosen])
    with served(FakeRouter().app) as address, opened(chromium, address) as tab:
        tab.send()
        tab.finished()
        tab.page.hover(f".piece[data-index='{before}']")
        boxes = tab.page.locator("#tree .box")
        (proposal,) = step["proposals"]
        assert boxes.count() == len(proposal["tokens"]) + 1  # and the target's own
        assert tab.page.locator("#tree .box.kept").count() == step["accepted"]
        assert tab.page.locator("#tree .box.own").get_attribute("data-source") == "recovered"
        sure = [text.replace("\u202f", "") for text in tab.page.locator("#tree .sure").all_text_contents()]
        assert sorted(sure) == sorted(f"{100 * value:.0f}%" for value in proposal["confidence"])
        assert f"{step['accepted']} of {step['offered']}" in tab.page.locator("#step-summary").inner_text()
        assert tab.page.locator("#output .lit").count() == len(step["pieces"])
        assert tab.page.locator("#tracks .verify.lit").count() == 1

        tab.page.focus("#output")
        tab.page.keyboard.press("Home")
        expect(tab.page.locator("#step-summary")).to_contain_text("Step 1:")
        for _ in range(before):
            tab.page.keyboard.press("ArrowRight")
        expect(tab.page.locator("#step-summary")).to_contain_text(f"Step {chosen + 1}:")
        expect(tab.page.locator("#announcer")).to_contain_text(f"Step {chosen + 1}:")


@needs_chromium
def test_stop_ends_the_stream_and_a_new_one_can_begin(chromium: Browser) -> None:
    fake = FakeRouter(endless=True, pause=0.005)
    with served(fake.app) as address, opened(chromium, address) as tab:
        tab.send()
        tab.page.wait_for_selector(".piece[data-index='20']")
        tab.page.click("#stop")
        tab.finished()
        assert fake.left.wait(10)
        expect(tab.page.locator("#outcome")).to_contain_text("stopped")
        assert tab.page.locator("#error").is_hidden()
        fake.endless = False
        tab.send()
        expect(tab.page.locator("#outcome")).to_contain_text("ended by itself")


@needs_chromium
def test_comparing_runs_it_again_without_speculation(chromium: Browser) -> None:
    fake = FakeRouter(pause=0.002)
    with served(fake.app) as address, opened(chromium, address) as tab:
        tab.send()
        tab.finished()
        tab.page.click("#compare")
        verdict = tab.page.locator(".verdict")
        expect(verdict).to_contain_text("The text is identical.")
        assert re.match(r"\d+(\.\d+)?× as fast", verdict.inner_text())
        fast, slow = fake.bodies
        assert slow == fast | {"speculation": {"enabled": False, "details": True, "remember": False}}
        assert len(tab.pieces) == len(words(TEXT)), "the text that is compared stays"
        fake.text = TEXT.replace("append", "extend")
        tab.page.click("#compare")
        expect(verdict).to_contain_text(f"differs from character {TEXT.index('append') + 1} on")


@needs_chromium
@pytest.mark.parametrize(
    ("answer", "shown"),
    [
        (
            (429, {"message": "too many requests"}, {"retry-after": "7"}),
            "too many requests Try again in 7\u00a0seconds.",
        ),
        ((400, {"message": "max_tokens is 9999, but the context leaves 40"}, {}), "max_tokens is 9999"),
        ((502, None, {}), "status 502"),
    ],
)
def test_refusals_are_shown(chromium: Browser, answer: Any, shown: str) -> None:
    with served(FakeRouter(refusal=answer).app) as address, opened(chromium, address, complains=True) as tab:
        tab.send()
        expect(tab.page.locator("#error")).to_contain_text(shown)
        expect(tab.page.locator("#send")).to_be_enabled()
        assert tab.page.locator("#outcome").inner_text() == ""


@needs_chromium
def test_an_error_within_a_stream_keeps_its_text(chromium: Browser) -> None:
    fake = FakeRouter(breaks={"message": "no target is left", "code": "unavailable"})
    with served(fake.app) as address, opened(chromium, address) as tab:
        tab.send()
        expect(tab.page.locator("#error")).to_have_text("no target is left")
        tab.finished()
        outcome = tab.page.locator("#outcome").inner_text()
        assert "tokens in" in outcome and "stopped" not in outcome
        assert "".join(text for text, _ in tab.pieces) == "".join(
            piece["text"] for step in speculate(TEXT, seed=7)[:3] for piece in step["pieces"]
        )


@needs_chromium
def test_a_key_is_asked_for_and_kept_in_the_tab(chromium: Browser) -> None:
    with served(FakeRouter(key=KEY).app) as address, opened(chromium, address, complains=True) as tab:
        expect(tab.page.locator("#key-dialog")).to_be_visible()
        tab.page.fill("#key-input", "wrong")
        tab.page.get_by_text("Use it").click()
        expect(tab.page.locator("#key-reason")).to_contain_text("does not know")
        tab.page.fill("#key-input", KEY)
        tab.page.get_by_text("Use it").click()
        expect(tab.page.locator("#model option")).to_have_count(2)
        expect(tab.page.locator("#workers tbody tr")).to_have_count(3)
        assert tab.page.evaluate("[sessionStorage.getItem('paceline.key'), localStorage.length]") == [KEY, 0]
        tab.page.reload()
        expect(tab.page.locator("#model option")).to_have_count(2)
        assert not tab.page.locator("#key-dialog").is_visible()


# Real models


@contextmanager
def real_router(target: Path) -> Iterator[str]:
    """Its address: real workers, a real router and its HTTP side, in a thread."""
    addresses: queue.Queue[str | BaseException] = queue.Queue()
    stop = threading.Event()

    async def serve() -> None:
        async with target_worker(model=target) as verifying, draft_worker(model="target") as drafting:
            async with dispatcher([verifying.worker.address], [drafting.worker.address]) as routing:
                app = build_app(routing, Tokenizers(), metrics=routing.metrics)
                server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error"))
                serving = asyncio.create_task(server.serve())
                while not server.started and not serving.done():
                    await asyncio.sleep(0.005)
                port = server.servers[0].sockets[0].getsockname()[1]
                addresses.put(f"http://127.0.0.1:{port}")
                await asyncio.to_thread(stop.wait)
                server.should_exit = True
                await serving

    def run() -> None:
        try:
            asyncio.run(serve())
        except BaseException as error:
            addresses.put(error)
            raise

    thread = threading.Thread(target=run)
    thread.start()
    try:
        address = addresses.get(timeout=240)
        if isinstance(address, BaseException):
            raise address
        yield address
    finally:
        stop.set()
        thread.join(60)
    assert not thread.is_alive()


@needs_chromium
@pytest.mark.thorough
def test_over_real_models(chromium: Browser, slow_target: Path, tmp_path: Path) -> None:
    """Also makes the picture of the README, if ``PACELINE_SCREENSHOTS`` is set."""
    picture = SCREENSHOT if os.environ.get("PACELINE_SCREENSHOTS") else tmp_path / "page.png"
    with real_router(slow_target) as address, opened(chromium, address) as tab:
        expect(tab.page.locator("#workers tbody tr")).to_have_count(2)
        expect(tab.page.locator("#model option")).to_have_count(1)
        tab.page.fill("#max-tokens", "200")
        tab.page.fill("#seed", "1")
        tab.page.click("#send")
        tab.page.wait_for_selector(".piece[data-index='110']")
        # For the picture one of the last; on a busy machine there may be few.
        which = -12 if os.environ.get("PACELINE_SCREENSHOTS") else 0
        tab.page.hover(f".piece[data-source='draft'] >> nth={which}")
        picture.parent.mkdir(parents=True, exist_ok=True)
        tab.page.screenshot(path=picture)
        tab.finished()
        assert {"draft"} < {source for _, source in tab.pieces}
        tab.page.click("#zoom-fit")
        assert tab.page.locator("#tracks .bar.draft").count() and tab.page.locator("#tracks .bar.verify").count()
        assert "% of verification time" in tab.page.locator("#overlap").inner_text()
        tab.page.click("#compare")
        expect(tab.page.locator(".verdict")).to_contain_text("The text is identical.")
