"""The HTTP API over a fake router, on a real socket."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn

from router.http.api import ApiSettings, build_app
from router.text.tokenizer import Tokenizer
from tests.fakes import FakeGenerator, FakeTokenizers


@contextmanager
def serve(
    generator: FakeGenerator, tokenizer: Tokenizer, settings: ApiSettings | None = None, **options: Any
) -> Iterator[str]:
    """A real server in a thread; yields its address. Its end waits until every request is over."""
    listener = socket.create_server(("127.0.0.1", 0))
    app = build_app(generator, FakeTokenizers(tokenizer), settings)
    config = uvicorn.Config(app, log_level="critical", **options)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(timeout=60)
        listener.close()
    assert not thread.is_alive()
    assert generator.running == 0
