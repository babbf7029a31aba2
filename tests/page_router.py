"""A stand-in for the router that speaks to the page: the page's files, and answers that are made up.

The answers are those of a router with drafts: tokens of known origin, the trees that were proposed, when each step ran.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from random import Random
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from router import page

Json = dict[str, Any]

TEXT = '''    """Return the first n Fibonacci numbers."""
    result = []
    a, b = 0, 1
    while len(result) < n:
        result.append(a)
        a, b = b, a + b
    return result
'''
PROMPT_TOKENS = 10
DRAFT_SOURCES = ("draft", "lookup", "prediction", "grammar", "eagle", "suffix")
STEP_SECONDS = 0.03


def words(text: str) -> list[str]:
    """``text`` cut into tokens: a word or sign each, with the spaces before it."""
    tokens: list[str] = []
    for character in text:
        joins = tokens and (tokens[-1].isspace() or (character.isalnum() and tokens[-1][-1].isalnum()))
        if joins and not (tokens[-1].endswith("\n") and character != " "):
            tokens[-1] += character
        else:
            tokens.append(character)
    return tokens


def speculate(text: str, seed: int) -> list[Json]:
    """The ``speculation`` objects of a text that was drafted and verified: one for each step, of every source."""
    random, tokens = Random(seed), words(text)
    steps: list[Json] = []
    done, now = 0, 0.04
    while done < len(tokens):
        left = len(tokens) - done
        offered = min(random.choice([0, 2, 4, 5, 7]) if steps else 0, max(left - 1, 0))
        accepted = random.choice([offered, offered, random.randint(0, offered)])
        waited = 0.012 if steps and random.random() < 0.15 else 0.0
        now += waited
        position = PROMPT_TOKENS + done
        source = random.choice(["draft", "draft", "draft", "lookup", "prediction", "grammar"])
        own = "recovered" if offered > accepted else "bonus" if offered else "target"
        kept = [*[source] * accepted, own]
        committed = tokens[done : done + accepted + 1]
        steps.append(
            {
                "accepted": accepted,
                "offered": offered,
                "tokens": len(committed),
                "position": position,
                "pieces": [
                    {"text": text, "drafted": index < accepted, "source": kept[index]}
                    for index, text in enumerate(committed)
                ],
                "committed": _committed(committed, kept),
                "step": {"start": now, "end": now + STEP_SECONDS, "waited": waited},
                "proposals": [] if not offered else [_proposal(source, position, committed, offered, now, random)],
            }
        )
        done += len(committed)
        now += STEP_SECONDS + 0.001
    return steps


def _id(text: str) -> int:
    return int.from_bytes(text.encode(), "big") % 100_003


def _committed(texts: list[str], sources: list[str]) -> list[Json]:
    return [{"id": _id(text), "text": text, "source": source} for text, source in zip(texts, sources, strict=True)]


def _proposal(source: str, position: int, committed: list[str], offered: int, now: float, random: Random) -> Json:
    """A chain that is right as far as it was kept, with a second choice at every other place."""
    chain = (committed[:-1] + [f" wrong{i}" for i in range(offered)])[:offered]
    texts, parents, confidence, last = [], [], [], -1
    for depth, text in enumerate(chain):
        if depth % 2:
            texts.append(" or")
            parents.append(last)
            confidence.append(0.06)
        texts.append(text)
        parents.append(last)
        confidence.append(round(random.uniform(0.5, 0.99), 2))
        last = len(texts) - 1
    return {
        "source": source,
        "start": now - 0.9 * STEP_SECONDS,
        "end": now - 0.1 * STEP_SECONDS,
        "anchor": position,
        "after": None,
        "tokens": [{"id": _id(text), "text": text, "number": 1000 * position + i} for i, text in enumerate(texts)],
        "parents": parents,
        "confidence": confidence,
    }


@dataclass
class FakeRouter:
    """Answers what the page asks for. Fields may be changed while it serves."""

    text: str = TEXT
    pause: float = 0.0
    """Seconds between two chunks."""
    endless: bool = False
    """Whether a text begins again when it is over."""
    refusal: tuple[int, Json, dict[str, str]] | None = None
    """What completions are answered with instead: status, error and headers."""
    breaks: Json | None = None
    """The error that ends a stream after its third chunk."""
    key: str = ""
    """Empty: nobody needs one."""
    cluster: Json = field(default_factory=lambda: cluster())
    breaks_off: bool = False
    """Whether what is told of the cluster does, as it does where a router ends."""
    bodies: list[Json] = field(default_factory=list)
    """Of all completions that were asked for."""
    left: threading.Event = field(default_factory=threading.Event)
    """Set when a client has gone before its stream was over."""

    @property
    def app(self) -> Starlette:
        """What to serve."""
        return Starlette(
            routes=[
                *page.ROUTES,
                Route("/v1/models", self._models),
                Route("/v1/completions", self._completions, methods=["POST"]),
                Route("/v1/chat/completions", self._completions, methods=["POST"]),
                Route("/cluster", self._cluster),
            ]
        )

    async def _models(self, request: Request) -> Response:
        return self._unknown(request) or JSONResponse({"data": [{"id": "target"}, {"id": "other"}]})

    async def _cluster(self, request: Request) -> Response:
        whole = JSONResponse(self.cluster)
        return self._unknown(request) or (Response(whole.body[:99]) if self.breaks_off else whole)

    def _unknown(self, request: Request) -> Response | None:
        if not self.key or request.headers.get("authorization") == f"Bearer {self.key}":
            return None
        return JSONResponse({"error": {"message": "give an API key", "code": "invalid_api_key"}}, 401)

    async def _completions(self, request: Request) -> Response:
        body = await request.json()
        self.bodies.append(body)
        if self.refusal is not None:
            status, error, headers = self.refusal
            return JSONResponse({"error": error}, status, headers)
        chat = request.url.path.endswith("chat/completions")
        return StreamingResponse(self._events(body, chat), media_type="text/event-stream")

    async def _events(self, body: Json, chat: bool) -> AsyncIterator[bytes]:
        steps = speculate(self.text, seed=7) if body["speculation"]["enabled"] else _plain(self.text)
        over = False
        try:
            while True:
                for number, step in enumerate(steps):
                    if number == 3 and self.breaks:
                        yield _event({"error": self.breaks})
                        over = True
                        return
                    text = "".join(piece["text"] for piece in step["pieces"])
                    yield _event(_chunk(text, step, chat))
                    await asyncio.sleep(self.pause)
                if not self.endless:
                    break
            yield _event(_chunk("", None, chat, finish="stop"))
            yield b"data: [DONE]\n\n"
            over = True
        finally:
            if not over:
                self.left.set()


def _plain(text: str) -> list[Json]:
    return [
        {
            "accepted": 0, "offered": 0, "tokens": 1, "position": PROMPT_TOKENS + index,
            "pieces": [{"text": token, "drafted": False, "source": "target"}],
            "committed": _committed([token], ["target"]),
            "step": {"start": 0.03 * index, "end": 0.03 * index + 0.028, "waited": 0.0},
        }
        for index, token in enumerate(words(text))
    ]  # fmt: skip


def _chunk(text: str, speculation: Json | None, chat: bool, finish: str | None = None) -> Json:
    content = {"delta": {"content": text}} if chat else {"text": text}
    chunk: Json = {"choices": [{"index": 0, **content, "finish_reason": finish}], "usage": None}
    return chunk | ({"speculation": speculation} if speculation else {})


def _event(body: Json) -> bytes:
    return b"data: " + json.dumps(body).encode() + b"\n\n"


def cluster() -> Json:
    """What ``GET /cluster`` says of a target, a drafter and one that was lost."""
    now = 1_800_000_000.0
    return {
        "object": "cluster",
        "time": now,
        "router": {
            "ready": True,
            "unready": None,
            "uptime_seconds": 4000.0,
            "sessions": {"running": 2, "placing": 0, "queued": 1},
            "now": {"tokens_per_second": 140.0, "acceptance": 0.7},
        },
        "totals": {"reopened": 1, "moved": 0},
        "workers": [
            _worker("target@10.0.0.5:7001", "target", "up", now - 4000, 0.7)
            | {"sources": {name: {"offered": 10, "accepted": 7} for name in DRAFT_SOURCES}},
            _worker("draft@10.0.0.6:7002", "draft", "up", now - 30, 0.7),
            _worker("draft@10.0.0.7:7002", "draft", "lost", now - 3, None),
        ],
        "events": [
            _logged_event(1, now - 40, "worker_up", "worker draft@10.0.0.7:7002 is up: draft in bfloat16"),
            _logged_event(2, now - 3, "worker_lost", "worker draft@10.0.0.7:7002 is lost: connection refused"),
        ],
    }


def _worker(name: str, role: str, state: str, since: float, acceptance: float | None) -> Json:
    return {
        "id": name,
        "address": name.partition("@")[2],
        "role": role,
        "model": role,
        "state": state,
        "since": since,
        "sessions": 2,
        "waiting": 1,
        "cache": {"free": 3000, "capacity": 4000},
        "round_trip_ms": 0.41,
        "acceptance": acceptance,
        "tokens_per_second": 140.0,
    }


def _logged_event(number: int, time: float, kind: str, text: str) -> Json:
    return {"number": number, "time": time, "kind": kind, "text": text, "worker": "", "times": 1}
