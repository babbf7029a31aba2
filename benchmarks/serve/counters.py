"""What a server counts of drafts, over all its requests: Paceline and vLLM, at ``/metrics``.

Read before and after a turn, so requests of others meanwhile are in it.
"""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass

import httpx

from benchmarks.serve.settings import Make

SECONDS = 5.0
COUNTING = (Make.PACELINE, Make.VLLM)
_LINE = re.compile(
    r"^(?:vllm:|paceline_)spec_decode_num_(drafts|draft_tokens|accepted_tokens)_total(?:\{.*\})? ([0-9.eE+]+)\s*$",
    re.MULTILINE,
)


@dataclass(frozen=True, slots=True)
class Counts:
    """Since the server's start, or of a stretch of time."""

    drafts: float = 0.0
    """Verifications with drafts."""
    offered: float = 0.0
    accepted: float = 0.0

    def __add__(self, other: Counts) -> Counts:
        return Counts(self.drafts + other.drafts, self.offered + other.offered, self.accepted + other.accepted)

    def __sub__(self, other: Counts) -> Counts:
        return Counts(self.drafts - other.drafts, self.offered - other.offered, self.accepted - other.accepted)


def parse(exposition: str) -> Counts | None:
    """All models together, from Prometheus' text format; None: the server does not count drafts."""
    sums: dict[str, float] = {}
    for name, value in _LINE.findall(exposition):
        sums[name] = sums.get(name, 0.0) + float(value)
    if not sums:
        return None
    return Counts(sums.get("drafts", 0.0), sums.get("draft_tokens", 0.0), sums.get("accepted_tokens", 0.0))


async def fetch(client: httpx.AsyncClient) -> Counts | None:
    """None also where there is no such page."""
    try:
        async with asyncio.timeout(SECONDS):
            response = await client.get("/metrics")
    except (httpx.TransportError, TimeoutError):
        return None
    return parse(response.text) if response.is_success else None
