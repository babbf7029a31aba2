"""Drafting from earlier outputs, with real models: the same text, for whom it may be, once, and not without consent."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from draft_service.lookahead import Lookahead
from engine.build import build, welcome
from engine.step import Engine
from router.http.api import ApiSettings
from router.http.auth import ApiKeys
from router.service import Router, RouterSettings
from speculation.messages import (
    Close,
    Limits,
    Open,
    Proposal,
    RequestOptions,
    Rule,
    Sampling,
    SessionId,
    Source,
    Speculation,
    Token,
    Verification,
)
from speculation.sources.suffix import SuffixScope, SuffixSettings
from target_service.verify_loop import TargetLimits, VerifyLoop
from tests.stack import forget_prefixes, held_out_prompts, settings, target_worker

LINK = "router"
ROOM = 4096
NEW = 24
PLAIN = Speculation(enabled=False)
SUFFIX = Speculation(sources=frozenset({Source.SUFFIX}))
KEYS = {"alice": "sk-alice-0123456789", "bob": "sk-bob-0123456789ab"}


@pytest.fixture(scope="module")
def engines() -> dict[str, Engine]:
    return {name: build(settings(name, cache_tokens=2048)) for name in ("target", "draft")}


@pytest.fixture(autouse=True)
def nothing_left(engines: dict[str, Engine]) -> Iterator[None]:
    for engine in engines.values():
        forget_prefixes(engine.cache)
    yield
    for engine in engines.values():
        engine.cache.validate()
        assert engine.cache.free_tokens == engine.cache.capacity


class Bench:
    """A target, driven step by step, and a drafter if there is to be one."""

    def __init__(
        self, engines: dict[str, Engine], scope: SuffixScope = SuffixScope.KEY, *, drafter: bool = False
    ) -> None:
        limits = TargetLimits(adaptive=False, suffix=SuffixSettings(ROOM, scope))
        engine = engines["target"]
        self.target = VerifyLoop(engine, welcome(settings("target"), engine.model, "target"), limits)
        self.drafter = None
        if drafter:
            small = engines["draft"]
            self.drafter = Lookahead(small, welcome(settings("draft"), small.model, "draft"))

    def run(self, opened: Open, steps: int = 400) -> list[Verification]:
        """What the target says, to the end of the session or for so many steps."""
        said: list[Verification] = []
        for worker in (self.target, self.drafter):
            if worker is not None:
                assert worker.receive(LINK, opened) == []
        for _ in range(steps):
            for _, message in (self.drafter.step() or []) if self.drafter else []:
                if isinstance(message, Proposal):
                    self.target.receive(LINK, message)
            for _, message in self.target.step() or []:
                assert isinstance(message, Verification)
                said.append(message)
                if self.drafter:
                    self.drafter.receive(LINK, message)
                if message.finish:
                    self.settle()
                    return said
        return said

    def settle(self) -> None:
        """Step until there is nothing to do."""
        while self.target.due() is not None:
            assert not self.target.step()
        self.store.validate()

    @property
    def store(self) -> Any:
        return self.target._suffix_store


def opened(
    speculation: Speculation = Speculation(), temperature: float = 0.0, number: int = 1, scope: str = ""
) -> Open:
    prompt = held_out_prompts()[0]
    sampling = Sampling(temperature=temperature, seed=7)
    limits, request_options = Limits(len(prompt) + NEW), RequestOptions(scope=scope)
    return Open(SessionId(number), 1, prompt, sampling, limits, speculation, request_options=request_options)


def text(said: list[Verification]) -> list[Token]:
    return [token for verification in said for token in verification.tokens]


def sources(said: list[Verification]) -> set[str]:
    return {source for one in said for source in (one.sources or (Source.DRAFT,) * one.accepted)}


@pytest.mark.parametrize("temperature", [0.0, 0.9], ids=["greedy", "drawn"])
@pytest.mark.parametrize("mixed", [False, True], ids=["alone", "mixture"])
def test_the_text_is_the_targets_own(engines: dict[str, Engine], temperature: float, mixed: bool) -> None:
    plain = Bench(engines).run(opened(PLAIN, temperature))
    bench = Bench(engines, drafter=mixed)
    speculation = Speculation() if mixed else SUFFIX
    first = bench.run(opened(speculation, temperature))
    other = bench.run(opened(speculation, 1.3, number=2))
    again = bench.run(opened(speculation, temperature, number=3))
    assert text(first) == text(again) == text(plain) != text(other)
    assert Source.SUFFIX in sources(again)
    assert len(again) < NEW / 3
    if not mixed:
        assert sources(again) == {Source.SUFFIX}
        assert sources(first) == set()


def test_under_the_rejection_rule_it_is_left_out_and_its_text_is_kept(engines: dict[str, Engine]) -> None:
    bench = Bench(engines)
    rejection = Speculation(rule=Rule.REJECTION)
    for number in (1, 2):
        assert Source.SUFFIX not in sources(bench.run(opened(rejection, 0.9, number)))
    assert bench.store.held
    assert bench.store.counters.asked == 0


@pytest.mark.parametrize(
    ("policy", "found"),
    [(SuffixScope.KEY, (True, False, False)), (SuffixScope.ALL, (True, True, True)), (SuffixScope.OFF, (False,) * 3)],
)
def test_the_operator_decides_who_drafts_from_whom(
    engines: dict[str, Engine], policy: SuffixScope, found: tuple[bool, ...]
) -> None:
    bench = Bench(engines, policy)
    bench.run(opened(SUFFIX, scope="alice"))
    for number, (scope, expected) in enumerate(zip(("alice", "bob", ""), found, strict=True), 2):
        forgetful = replace(SUFFIX, remember=False)
        said = bench.run(opened(forgetful, number=number, scope=scope))
        assert (Source.SUFFIX in sources(said)) is expected, scope


def test_what_is_not_to_be_remembered_is_not(engines: dict[str, Engine]) -> None:
    bench = Bench(engines)
    bench.run(opened(replace(SUFFIX, remember=False)))
    assert bench.store.held == 0
    bench.run(opened(PLAIN, number=2))
    assert bench.store.held > 0, "what was decoded plainly is of use to others"
    assert Source.SUFFIX not in sources(bench.run(opened(Speculation(sources=frozenset({Source.LOOKUP})), number=3)))


def test_a_session_that_is_opened_again_is_kept_once_and_whole(engines: dict[str, Engine]) -> None:
    whole = text(Bench(engines).run(opened(PLAIN)))
    bench, opening = Bench(engines), opened(PLAIN)
    begun = text(bench.run(opening, steps=9))
    assert 0 < len(begun) < NEW
    prompt = len(opening.tokens)
    assert (
        text(bench.run(replace(opening, epoch=2, tokens=(*opening.tokens, *begun), prompt=prompt)))
        == whole[len(begun) :]
    )
    once = Bench(engines)
    once.run(opening)
    assert bench.store.held == once.store.held > NEW
    assert len(bench.store._texts) == 1


def test_what_a_router_closes_is_kept_and_what_it_loses_is_not(engines: dict[str, Engine]) -> None:
    bench = Bench(engines)
    bench.run(opened(PLAIN), steps=12)
    bench.target.forget(LINK)
    bench.settle()
    assert bench.store.held == 0
    bench.run(opened(PLAIN, number=2), steps=12)
    bench.target.receive(LINK, Close(SessionId(2), 1))
    bench.settle()
    assert bench.store.held > 0


@asynccontextmanager
async def serving(keys: Path) -> AsyncIterator[httpx.AsyncClient]:
    async with target_worker(TargetLimits(adaptive=False, suffix=SuffixSettings(ROOM))) as target:
        router = Router(RouterSettings([target.worker.address], port=0, api=ApiSettings(api_keys=ApiKeys(keys))))
        await router.start()
        try:
            async with httpx.AsyncClient(base_url=router.address, timeout=60) as client:
                yield client
        finally:
            await router.stop()


async def ask(client: httpx.AsyncClient, key: str, **steering: Any) -> dict[str, Any]:
    body = {
        "prompt": "def add(a, b):\n",
        "max_tokens": NEW,
        "temperature": 0,
        "ignore_eos": True,
        "speculation": {"sources": ["suffix"], "details": True} | steering,
    }
    answer = await client.post("/v1/completions", json=body, headers={"authorization": f"Bearer {key}"})
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    path = tmp_path / "keys"
    path.write_text("".join(f"{name}: {key}\n" for name, key in KEYS.items()) + "sk-nameless-0123456789\n")
    return path


async def test_what_was_computed_is_found_within_a_key_and_a_salt_only(keys: Path) -> None:
    alice, bob = KEYS.values()
    async with serving(keys) as client:

        async def asked(key: str, **fields: Any) -> tuple[bool, str]:
            body = {"prompt": "def add(a, b):\n" * 8, "max_tokens": 4, "temperature": 0, **fields}
            answer = await client.post("/v1/completions", json=body, headers={"authorization": f"Bearer {key}"})
            assert answer.status_code == 200, answer.text
            usage = answer.json()["usage"]
            return usage["prompt_tokens_details"]["cached_tokens"] > 0, answer.json()["choices"][0]["text"]

        answers = [
            await asked(alice),
            await asked(bob),
            await asked(alice),
            await asked(alice, cache_salt="tenant 7"),
            await asked(bob, cache_salt="tenant 7"),
            await asked(alice, cache_salt="tenant 7"),
            await asked(alice, cache_salt="tenant 8"),
        ]
    assert [found for found, _ in answers] == [False, False, True, False, False, True, False]
    assert len({text for _, text in answers}) == 1


async def test_two_keys_never_draft_from_each_others_text(keys: Path) -> None:
    alice, bob = KEYS.values()
    async with serving(keys) as client:
        asked = [
            ("alice, not to be remembered", await ask(client, alice, remember=False), False),
            ("alice", await ask(client, alice), False),
            ("bob", await ask(client, bob), False),
            ("nameless", await ask(client, "sk-nameless-0123456789"), False),
            ("alice again", await ask(client, alice), True),
            ("bob again", await ask(client, bob), True),
            ("alice, excluding it", await ask(client, alice, sources=["lookup"]), False),
        ]
    texts = {answer["choices"][0]["text"] for _, answer, _ in asked}
    assert len(texts) == 1
    for who, answer, expected in asked:
        drafted = answer["speculation"]["summary"]["by_source"]
        assert ("suffix" in drafted) is expected, who
