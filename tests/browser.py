"""A real browser with the page in it, and a server for it."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import pytest
import uvicorn
from playwright.sync_api import Browser, Page, expect, sync_playwright
from starlette.applications import Starlette

CHROMIUM = shutil.which("chromium")
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: apt-get install chromium")
WIDE, PHONE = {"width": 1440, "height": 1000}, {"width": 360, "height": 740}
PATIENCE = 60_000
"""Milliseconds."""


@contextmanager
def browser() -> Iterator[Browser]:
    """Headless Chromium."""
    expect.set_options(timeout=PATIENCE)
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, timeout=PATIENCE, args=["--no-sandbox"])
        try:
            yield chromium
        finally:
            chromium.close()


@contextmanager
def served(app: Starlette) -> Iterator[str]:
    """Its address, while it is served from a thread."""
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error"))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started and thread.is_alive():
            thread.join(0.005)
        host, port = server.servers[0].sockets[0].getsockname()[:2]
        yield f"http://{host}:{port}"
    finally:
        server.should_exit = True
        thread.join(60)
        assert not thread.is_alive(), "the server has not stopped"


@dataclass
class Opened:
    """The page in a tab, with what it complained of and whom it asked."""

    page: Page
    complaints: list[str] = field(default_factory=list)
    hosts: set[str] = field(default_factory=set)

    def send(self, prompt: str = "def fibonacci(n):\n") -> None:
        self.page.fill("#prompt", prompt)
        self.page.click("#send")

    def finished(self) -> None:
        expect(self.page.locator("#outcome")).to_contain_text("tokens in")

    @property
    def pieces(self) -> list[tuple[str, str]]:
        """Text and source of each."""
        found = self.page.eval_on_selector_all(
            "#output .piece", "all => all.map(piece => [piece.textContent, piece.dataset.source])"
        )
        return [(text, source) for text, source in found]

    def figure(self, key: str) -> str:
        return self.page.locator(f"[data-figure={key}]").inner_text()

    def overflows(self) -> bool:
        return bool(self.page.evaluate("document.documentElement.scrollWidth > window.innerWidth"))


@contextmanager
def opened(
    chromium: Browser, address: str, viewport: dict[str, int] = WIDE, *, complains: bool = False, **options: Any
) -> Iterator[Opened]:
    """The page. It must ask nobody but its own server, and complain of nothing, unless ``complains``."""
    context = chromium.new_context(viewport=viewport, reduced_motion="reduce", **options)  # type: ignore[arg-type]
    context.set_default_timeout(PATIENCE)
    tab = Opened(context.new_page())
    tab.page.on("console", lambda message: tab.complaints.append(message.text) if message.type == "error" else None)
    tab.page.on("pageerror", lambda error: tab.complaints.append(str(error)))
    tab.page.on("request", lambda request: tab.hosts.add(urlsplit(request.url).netloc))
    try:
        tab.page.goto(address)
        yield tab
        assert tab.hosts == {urlsplit(address).netloc}
        assert complains or not tab.complaints
    finally:
        context.close()
