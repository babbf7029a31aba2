"""Which tokenizers a router reads from disk, and when."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from typing import Any

import httpx
import pytest

from router.generation import ServedModel
from router.http.api import build_app
from router.text import tokenizer as tokenizer_module
from router.text.tokenizer import Tokenizer, TokenizerError, Tokenizers
from tests.fakes import EOS, FakeGenerator, commits, tiny_tokenizer


class Disk:
    """Tokenizers by folder. ``gate``: nothing is read before it opens."""

    def __init__(self) -> None:
        self.kept = {"a": tiny_tokenizer(), "b": tiny_tokenizer(tags=["<other>"])}
        self.reads: Counter[str] = Counter()
        self.gate = threading.Event()
        self.gate.set()

    def load(self, source: str) -> Tokenizer:
        self.reads[source] += 1
        assert self.gate.wait(60)
        if source not in self.kept:
            raise TokenizerError(f"{source}: neither a folder nor available from the hub")
        return self.kept[source]

    def model(self, source: str) -> ServedModel:
        digest = self.kept[source].digest if source in self.kept else 1
        return ServedModel(f"model-{source}", 400, 64, digest, source)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    disk = Disk()
    monkeypatch.setattr(Tokenizer, "load", disk.load)
    return disk


async def test_models_of_different_tokenizers_each_have_theirs_read_once(disk: Disk) -> None:
    tokenizers = Tokenizers("a")
    for _ in range(5):
        for source in ("a", "b"):
            assert await tokenizers.of(disk.model(source)) is disk.kept[source]
    assert disk.reads == {"a": 2, "b": 1}  # once again for the one of b, which it might have become


async def test_a_tokenizer_that_was_replaced_is_found_and_a_wrong_one_is_not_read_for_every_request(disk: Disk) -> None:
    tokenizers = Tokenizers()
    first = disk.model("a")
    assert await tokenizers.of(first) is disk.kept["a"]
    disk.kept["a"] = tiny_tokenizer(tags=["<new>"])
    second = disk.model("a")
    assert await tokenizers.of(second) is disk.kept["a"]
    assert await tokenizers.of(first) is not disk.kept["a"]
    for name in range(5):
        with pytest.raises(TokenizerError, match="is not that of the served model"):
            await tokenizers.of(ServedModel(str(name), 400, 64, 7, "a"))
    assert disk.reads == {"a": 2}


async def test_those_who_ask_at_the_same_time_share_what_is_read(disk: Disk) -> None:
    tokenizers = Tokenizers("a")
    disk.gate.clear()
    asking = [asyncio.create_task(tokenizers.of(disk.model(source))) for source in "aabbaabb"]
    async with asyncio.timeout(60):
        while not disk.reads:
            await asyncio.sleep(0)
        asking.pop(0).cancel()
        disk.gate.set()
        found = await asyncio.gather(*asking)
    assert found == [disk.kept[source] for source in "abbaabb"]
    assert disk.reads["a"] <= 2
    assert disk.reads["b"] == 1


def says(tokenizer: Tokenizer, *models: ServedModel) -> FakeGenerator:
    tokens = (*tokenizer.encode("fine", special=False), EOS)
    generator = FakeGenerator(lambda _: commits(tokens, (2,)))
    generator.models = {model.name: model for model in models}
    return generator


async def ask(client: httpx.AsyncClient, model: str) -> tuple[int, Any]:
    answer = await client.post("/v1/completions", json={"prompt": "hi", "model": model, "max_tokens": 20})
    return answer.status_code, answer.json().get("error", {}).get("code")


async def test_a_tokenizer_that_cannot_be_read_is_the_trouble_of_its_own_model(disk: Disk) -> None:
    generator, tokenizers = says(disk.kept["a"], disk.model("a"), disk.model("gone")), Tokenizers()
    await tokenizers.of(disk.model("a"))
    disk.gate.clear()
    transport = httpx.ASGITransport(build_app(generator, tokenizers))
    async with httpx.AsyncClient(transport=transport, base_url="http://paceline") as client:
        waiting = asyncio.create_task(ask(client, "model-gone"))
        async with asyncio.timeout(60):
            while not disk.reads["gone"]:
                await asyncio.sleep(0)
        assert await ask(client, "model-a") == (200, None)
        assert not waiting.done()
        disk.gate.set()
        assert await waiting == (503, "unavailable")
        assert await ask(client, "model-none") == (404, "model_not_found")
    assert disk.reads == {"a": 1, "gone": 1}


async def test_one_that_cannot_be_read_is_tried_ever_more_rarely(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    loop, passed = asyncio.get_running_loop(), 0.0
    now = loop.time
    monkeypatch.setattr(loop, "time", lambda: now() + passed)
    tokenizers, tried = Tokenizers(), []
    for _ in range(20):
        before = disk.reads["gone"]
        with pytest.raises(TokenizerError, match="neither a folder nor"):
            await tokenizers.of(disk.model("gone"))
        tried.append(disk.reads["gone"] > before)
        passed += 15.0
    assert [15.0 * turn for turn, read in enumerate(tried) if read] == [0, 15, 45, 90, 150, 210, 270]
    passed += 60.0
    disk.kept["gone"] = tiny_tokenizer()
    assert await tokenizers.of(disk.model("gone")) is disk.kept["gone"]
    wrong, before = ServedModel("wrong", 400, 64, 7, "gone"), disk.reads["gone"]
    for late in (60.0, 15.0):  # as at first
        passed += late
        with pytest.raises(TokenizerError, match="is not that of"):
            await tokenizers.of(wrong)
    assert disk.reads["gone"] == before + 2


async def test_nothing_is_opened_on_the_word_of_a_worker_that_nobody_configured(disk: Disk) -> None:
    disk.kept["/etc"] = tiny_tokenizer(tags=["<secret>"])
    tokenizers = Tokenizers("", ["a", "b"])
    for digest in (disk.kept["/etc"].digest, 0):
        with pytest.raises(TokenizerError, match="is not that of the served model m"):
            await tokenizers.of(ServedModel("m", 400, 64, digest, "/etc"))
    assert "/etc" not in disk.reads
    moved = ServedModel("m", 400, 64, disk.kept["b"].digest, "/elsewhere/b")
    assert await tokenizers.of(moved) is disk.kept["b"], "it is one that was configured, wherever its target read it"
    assert await tokenizers.of(disk.model("a")) is disk.kept["a"]
    assert set(disk.reads) == {"a", "b"}


async def test_a_preferred_tokenizer_needs_no_other_leave(disk: Disk) -> None:
    tokenizers = Tokenizers("a", [])
    assert await tokenizers.of(ServedModel("m", 400, 64, disk.kept["a"].digest, "/etc")) is disk.kept["a"]
    assert await tokenizers.of(ServedModel("m", 400, 64, 0, "/etc")) is disk.kept["a"]
    with pytest.raises(TokenizerError, match="the tokenizer in 'a' is not that of"):
        await tokenizers.of(disk.model("b"))


async def test_a_hub_that_never_answers_holds_up_no_request_for_good(
    disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer_module, "READ_SECONDS", 0.05)
    monkeypatch.setattr(tokenizer_module, "SILENT_SECONDS", 0.0)
    tokenizers = Tokenizers()
    disk.gate.clear()
    with pytest.raises(TokenizerError, match=r"a: not read within 0.05 s; is the hub reachable\?"):
        await tokenizers.of(disk.model("a"))
    disk.gate.set()
    monkeypatch.setattr(tokenizer_module, "READ_SECONDS", 60.0)
    assert await tokenizers.of(disk.model("a")) is disk.kept["a"]
    assert disk.reads == {"a": 2}


def test_no_loop_waits_at_its_end_for_what_is_still_read(disk: Disk) -> None:
    async def ask() -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await Tokenizers().read("a")

    disk.gate.clear()
    began = threading.active_count()
    asyncio.run(ask())
    assert threading.active_count() == began + 1
    disk.gate.set()
