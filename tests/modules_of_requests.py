"""``python -m tests.modules_of_requests``: which modules each kind of request brings into a router that has started.

Prints a JSON object: lists of their names by request.
"""

from __future__ import annotations

import asyncio
import json
import sys

from router.generation import ServedModel
from router.http.admission import AdmissionSettings
from router.http.api import ApiSettings, build_app
from router.service import Router, server_config
from tests.fakes import EOS, FakeGenerator, FakeTokenizers, commits, tiny_tokenizer
from transport.address import bound

MESSAGES = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 99}
PROMPT = {"prompt": "hi", "max_tokens": 99}
PREFLIGHT = b"origin: http://a\r\naccess-control-request-method: POST\r\n"
REQUESTS: tuple[tuple[str, object, bytes], ...] = (
    *((f"GET {path}", None, b"") for path in ("/v1/models", "/v1/models/x", "/health", "/ready", "/metrics", "/")),
    *((f"GET {path}", None, b"") for path in ("/openapi.json", "/cluster", "/nowhere")),
    ("PUT /v1/completions", None, b""),
    ("OPTIONS /v1/completions", None, PREFLIGHT),
    ("POST /v1/completions", [], b""),
    ("POST /v1/completions", PROMPT, b""),
    ("POST /v1/completions", PROMPT | {"stream": True, "logprobs": 3}, b""),
    ("POST /v1/completions", PROMPT | {"prompt": "hi" * 20_000}, b""),
    ("POST /v1/chat/completions", MESSAGES | {"stream": True}, b""),
    ("POST /v1/chat/completions", MESSAGES | {"response_format": {"type": "json_object"}}, b""),
)


async def main() -> None:
    """Ask all of it, one after the other."""
    import uvicorn

    tokenizer = tiny_tokenizer()
    text = (*tokenizer.encode("hello", special=False), EOS)
    model = ServedModel("tiny/model", tokenizer.size, 256, tokenizer.digest)
    settings = ApiSettings(admission=AdmissionSettings(cors_origins=("*",)))
    app = build_app(FakeGenerator(lambda _: commits(text, (2,)), model=model), FakeTokenizers(tokenizer), settings)
    server, listener = uvicorn.Server(server_config(app, "127.0.0.1", 0)), bound("127.0.0.1", 0)
    serving = asyncio.create_task(Router._serve(server, listener))
    while not server.started:
        await asyncio.sleep(0.001)
    found = {}
    for request, body, headers in REQUESTS:
        before = set(sys.modules)
        reader, writer = await asyncio.open_connection(*listener.getsockname())
        data = b"" if body is None else json.dumps(body).encode()
        head = f"{request} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {len(data)}\r\n"
        writer.write(head.encode() + headers + b"\r\n" + data)
        status = (await reader.read()).split(b" ", 2)[1].decode()
        writer.close()
        found[f"{request} {str(body)[:60]}: {status}"] = sorted(set(sys.modules) - before)
    server.should_exit = True
    await serving
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    asyncio.run(main())
