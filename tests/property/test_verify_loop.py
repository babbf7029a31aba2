"""The verify loop under random work: whatever comes, a request has the text it has alone, and no block is lost.

Requests come, are cancelled, are opened again further on, get good drafts and bad ones, and share a cache so small that
they are preempted all the time. Ten thousand run on a model that is a table; some hundred on a transformer.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from random import Random
from typing import Any, cast

import pytest
import torch

from engine.cache.kv_cache import KVCache
from engine.cache.kv_store import CLEAR
from engine.cpu.thread_choice import set_threads
from engine.interface import Chunk
from engine.sampling.sampling import Draw, sample
from engine.step import Engine
from speculation import digest as digests
from speculation.messages import (
    ANCHOR,
    Close,
    FinishReason,
    Limits,
    Open,
    Proposal,
    Refused,
    Rule,
    Sampling,
    Schedule,
    SessionId,
    Source,
    Speculation,
    Token,
    Verification,
    Welcome,
)
from speculation.verifying import planner, target_session
from target_service import scheduler
from target_service.scheduler import Budget
from target_service.verdicts import NOT_FINITE
from target_service.verify_loop import TargetLimits, VerifyLoop
from tests.thorough import more_thorough
from tests.unit.engine.engine_models import load_tiny

VOCABULARY = 32
CONTEXT = 96
LINKS = ("one", "other")
WELCOME = Welcome("target", "tiny", VOCABULARY, CONTEXT)


class TableEngine:
    """Stands in for :class:`engine.step.Engine`: logits are looked up by the digest of a token's whole prefix.

    The prefix is read from the cache, slot by slot, so a slot that holds the wrong token changes the text.
    """

    def __init__(self, capacity: int) -> None:
        self.speculates = True
        self.row_classes: Sequence[int] = ()
        self.eagle = self.drawn = None
        self.cache = KVCache(0, capacity, dtype=torch.float32, device="cpu")
        self.forward_seconds = 0.0
        self._stored: dict[int, Token] = {}

    def run(self, chunks: Sequence[Chunk]) -> torch.Tensor:
        slots = []
        for chunk in chunks:
            assert not chunk.sequence.pending
            slots.append(chunk.sequence.append(chunk.resolved_parents()))
        moves = self.cache.take_moves()
        self._stored |= {destination: self._stored[source] for source, destination in moves if source != CLEAR}
        return table()[[row for pair in zip(chunks, slots, strict=True) for row in self._compute(*pair)]]

    def _compute(self, chunk: Chunk, slots: Sequence[int]) -> list[int]:
        sequence = chunk.sequence
        self._stored |= zip(slots, chunk.tokens, strict=True)
        root = digests.of([self._stored[slot] for slot in sequence.committed_slots(0)])
        ends: list[int] = []
        for slot, parent in zip(slots, sequence.parents, strict=True):
            ends.append(digests.extend(root if parent < 0 else ends[parent], self._stored[slot]))
        return [ends[row] % len(table()) for row in chunk.rows]


@pytest.fixture(autouse=True)
def _crowded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sessions start without room to grow, so that they get in each other's way."""
    monkeypatch.setattr(scheduler, "HEADROOM", 0)
    set_threads(1)


@cache
def table() -> torch.Tensor:
    """What the model that is a table says, ``[N, V]``."""
    return torch.randn(1021, VOCABULARY, generator=torch.Generator().manual_seed(0)) * 2


def table_logits(prefix: Sequence[Token]) -> torch.Tensor:
    return table()[digests.of(prefix) % len(table())][None]


@dataclass(frozen=True)
class Request:
    """A prompt, how to go on from it, and the text that must come of it."""

    prompt: tuple[Token, ...]
    sampling: Sampling
    limits: Limits
    text: tuple[Token, ...]


def alone(logits: Callable[[Sequence[Token]], torch.Tensor], rng: Random) -> Request:
    """A random request, decoded token by token with nothing cached."""
    prompt = tuple(rng.randrange(VOCABULARY) for _ in range(rng.choice((1, 12, 28, 45))))
    sampling = Sampling(rng.choice((0.0, 0.8)), top_k=rng.choice((0, 5)), seed=rng.randrange(3))
    limits = Limits(len(prompt) + rng.randint(1, 10), frozenset({rng.randrange(VOCABULARY)}))
    tokens = list(prompt)
    while len(tokens) < limits.end and (tokens == list(prompt) or tokens[-1] not in limits.stop_tokens):
        tokens += sample(logits(tokens), [Draw(sampling, len(tokens))])
    return Request(prompt, sampling, limits, tuple(tokens[len(prompt) :]))


@dataclass
class Client:
    """A request under way."""

    request: Request
    opened: Open
    text: list[Token]

    @property
    def tokens(self) -> tuple[Token, ...]:
        return (*self.request.prompt, *self.text)


class Routers:
    """Two routers that work a target hard."""

    def __init__(self, loop: VerifyLoop, requests: Sequence[Request], rng: Random) -> None:
        self.loop, self.requests, self.rng = loop, requests, rng
        self.clients: dict[tuple[str, SessionId], Client] = {}
        self.seen: Counter[str] = Counter()
        self.opened = 0

    def act(self, more: bool) -> None:
        """Whatever routers do between two steps."""
        for _ in range(self.rng.choice((0, 2, 5, 10)) if more and len(self.clients) < 40 else 0):
            self._open()
        for key in list(self.clients):
            chance = self.rng.random()
            if chance < 0.002:
                self._close(key)
            elif chance < 0.005:
                self._reopen(key)
            elif chance < 0.1:
                self._draft(key)
        if self.rng.random() < 0.0005:
            link = self.rng.choice(LINKS)
            self.loop.forget(link)
            self.clients = {key: client for key, client in self.clients.items() if key[0] != link}

    def _open(self) -> None:
        request = self.rng.choice(self.requests)
        self.opened += 1
        sources = frozenset(self.rng.choice((Source, {Source.DRAFT})))
        speculation = Speculation(enabled=self.rng.random() < 0.8, sources=sources)
        number, priority = SessionId(self.opened), self.rng.choice((0, 0, -1, 2))
        opened = Open(number, 1, request.prompt, request.sampling, request.limits, speculation, priority)
        link = self.rng.choice(LINKS)
        self.clients[link, number] = Client(request, opened, [])
        assert self.loop.receive(link, opened, at=float(self.opened)) == []

    def _close(self, key: tuple[str, SessionId]) -> None:
        self.loop.receive(key[0], Close(key[1], self.clients.pop(key).opened.epoch))

    def _reopen(self, key: tuple[str, SessionId]) -> None:
        client = self.clients[key]
        before = client.opened
        tokens = client.tokens
        client.opened = replace(before, epoch=before.epoch + 1, tokens=tokens, digest=digests.of(tokens))
        assert self.loop.receive(key[0], client.opened) == []
        self.loop.receive(key[0], Close(key[1], before.epoch))  # comes late, means nothing
        self.seen["reopened"] += 1

    def _draft(self, key: tuple[str, SessionId]) -> None:
        """Push what will come, or what will not, or a tree of both."""
        client, rng = self.clients[key], self.rng
        tokens: list[Token] = []
        parents: list[int] = []
        parent = ANCHOR
        for right in client.request.text[len(client.text) :][: rng.randint(1, 5)]:
            wrong = rng.randrange(VOCABULARY)
            for token in rng.choice(((right,), (wrong,), (wrong, right), (right, wrong))):
                if (parent, token) not in zip(parents, tokens, strict=True):
                    tokens.append(token)
                    parents.append(parent)
            parent = len(tokens) - 1 if parent < len(tokens) - 1 else parent
        digest = digests.of(client.tokens)
        epoch = client.opened.epoch - (rng.random() < 0.05)
        proposal = Proposal(key[1], epoch, len(client.tokens), digest, tuple(tokens), tuple(parents))
        assert self.loop.receive(key[0], proposal) == []

    def step(self) -> None:
        """One step of the target, and what its answers come to."""
        for link, message in self.loop.step() or []:
            assert isinstance(message, Verification), message
            client = self.clients[cast(str, link), message.session]
            assert (message.epoch, message.position) == (client.opened.epoch, len(client.tokens))
            client.text += message.tokens
            assert tuple(client.text) == client.request.text[: len(client.text)], client
            self.seen["accepted"] += message.accepted
            self.seen["refused"] += message.offered - message.accepted
            if message.finish:
                del self.clients[cast(str, link), message.session]
                self.seen["finished"] += 1
                assert tuple(client.text) == client.request.text
                assert (message.finish is FinishReason.LENGTH) == (
                    client.text[-1] not in client.opened.limits.stop_tokens
                )


def drive(engine: Any, requests: Sequence[Request], count: int, seed: int, limits: TargetLimits) -> Counter[str]:
    """Serve ``count`` requests; returns how often what happened."""
    loop = VerifyLoop(cast(Engine, engine), WELCOME, limits)
    routers = Routers(loop, requests, Random(seed))
    steps = 0
    while routers.opened < count or routers.clients:
        routers.act(more=routers.opened < count)
        routers.step()
        steps += 1
        assert steps < 50 * count, "no end in sight"
        if steps % 20 == 0:
            load = loop.load()
            assert load.sessions + load.waiting == len(routers.clients)
            loop.validate()
    loop.validate()
    assert engine.cache.free_tokens == engine.cache.capacity
    assert not engine.cache.sequences
    return routers.seen + Counter(preempted=loop.counters.preempted)


@pytest.mark.parametrize("count", more_thorough(2500, 10_000))
def test_thousands_of_requests_on_a_model_that_is_a_table(count):
    rng = Random(1)
    requests = [alone(table_logits, rng) for _ in range(300)]
    limits = TargetLimits(running=12, budget=Budget(tokens=48, drafts_per_session=6, verify=24), adaptive=False)
    seen = drive(TableEngine(capacity=128), requests, count, 1, limits)
    assert seen["finished"] > 0.8 * count
    assert min(seen["preempted"], seen["reopened"], seen["accepted"], seen["refused"]) > count // 50, seen


@pytest.mark.parametrize("adaptive", [True, False])
def test_some_hundred_requests_on_a_transformer(tmp_path, adaptive):
    """In float64, in which it does not matter to a token how it is batched."""
    size = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
    model = load_tiny("llama", tmp_path, dtype="fp64", vocab_size=VOCABULARY, **size)
    plain = Engine(model, KVCache(model.layers, CONTEXT, dtype=model.dtype, device=model.device))

    def logits(prefix: Sequence[Token]) -> torch.Tensor:
        sequence = plain.cache.sequence()
        rows = plain.run([Chunk(sequence, prefix, rows=[len(prefix) - 1])])
        sequence.free()
        return rows

    rng = Random(2)
    requests = [alone(logits, rng) for _ in range(60)]
    engine = Engine(model, KVCache(model.layers, 128, dtype=model.dtype, device=model.device))
    budget = Budget(tokens=48, drafts_per_session=6, verify=24)
    seen = drive(engine, requests, 250, 2, TargetLimits(running=12, budget=budget, adaptive=adaptive))
    assert seen["finished"] > 200
    # Whether drafts pay, of which the adaptive loop decides, depends on what steps take here and now.
    happened = ["preempted", "reopened", *([] if adaptive else ["accepted"])]
    assert min(seen[name] for name in happened) > 0, seen


def test_the_better_priority_starts_first():
    loop = VerifyLoop(cast(Engine, TableEngine(capacity=64)), WELCOME, TargetLimits(running=1))
    for number, priority in ((1, 0), (2, 3), (3, -1)):
        loop.receive("one", Open(SessionId(number), 1, (1,), Sampling(), Limits(3), priority=priority), at=0.1 * number)
    order: list[int] = []
    while (sent := loop.step()) is not None:
        order += [message.session for _, message in sent]
        assert loop.load().sessions + loop.load().waiting == 3 - len(order) // 2
    assert order == [3, 3, 1, 1, 2, 2]


@pytest.mark.parametrize(("row_classes", "offered"), [((), 3), ((4, 8), 7), ((8,), 7), ((2,), 3)])
def test_drafts_fill_the_class_of_rows_that_the_engine_pads_steps_to(row_classes, offered):
    engine = TableEngine(capacity=64)
    engine.row_classes = row_classes
    loop = VerifyLoop(cast(Engine, engine), WELCOME, TargetLimits(budget=Budget(drafts_per_session=3)))
    loop.receive("one", Open(SessionId(1), 1, (1,), Sampling(), Limits(40)))
    (first,) = (message for _, message in loop.step() or [])
    assert isinstance(first, Verification)
    chain = tuple(range(10))
    anchor = digests.of((1, *first.tokens))
    loop.receive("one", Proposal(SessionId(1), 1, 2, anchor, chain, tuple(range(-1, 9)), (0.9,) * 10))
    (second,) = (message for _, message in loop.step() or [])
    assert isinstance(second, Verification)
    assert second.offered == offered


POISON = 7
"""A first token after which the model breaks."""


def broken(engine: TableEngine, break_it: Callable[[torch.Tensor, int], None]) -> TableEngine:
    """Calls ``break_it(logits, row)`` for each row of a session whose text begins with the poison."""
    run, poisoned = engine.run, set[int]()

    def faulty(chunks: Sequence[Chunk]) -> torch.Tensor:
        logits = run(chunks).clone()
        poisoned.update(id(one.sequence) for one in chunks if one.sequence.length == 0 and one.tokens[0] == POISON)
        owners = [id(chunk.sequence) for chunk in chunks for _ in chunk.rows]
        for row in (row for row, owner in enumerate(owners) if owner in poisoned):
            break_it(logits, row)
        return logits

    engine.run = faulty  # type: ignore[method-assign]
    return engine


def not_a_number(logits: torch.Tensor, row: int) -> None:
    logits[row, 9] = float("nan")


def infinite(logits: torch.Tensor, row: int) -> None:
    logits[row, 9] = float("inf")


def nothing_allowed(logits: torch.Tensor, row: int) -> None:
    logits[row] = float("-inf")


def unheard_of(logits: torch.Tensor, row: int) -> None:
    raise ArithmeticError("planted")


@pytest.mark.parametrize("fault", [not_a_number, infinite, nothing_allowed, unheard_of])
@pytest.mark.parametrize("rule", list(Rule))
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_session_whose_logits_are_no_numbers_is_refused_and_bothers_nobody(fault, rule, temperature):
    engine = broken(TableEngine(capacity=512), fault)
    loop = VerifyLoop(cast(Engine, engine), WELCOME)
    rng = Random(4)
    requests = [request for request in (alone(table_logits, rng) for _ in range(8)) if request.prompt[0] != POISON]
    for number, request in enumerate(requests):
        loop.receive("one", Open(SessionId(number), 1, request.prompt, request.sampling, request.limits))
    sampling, speculation = Sampling(temperature), Speculation(rule=rule)
    loop.receive("one", Open(SessionId(99), 1, (POISON, 1), sampling, Limits(40), speculation))
    texts: dict[int, list[Token]] = {number: [] for number in range(len(requests))}
    refusals: list[Refused] = []
    while (sent := loop.step()) is not None:
        for _, message in sent:
            if isinstance(message, Refused):
                refusals.append(message)
            else:
                texts[message.session] += message.tokens
    assert [tuple(text) for text in texts.values()] == [request.text for request in requests]
    ((session, code, why),) = [(refused.session, refused.code, refused.message) for refused in refusals]
    assert (session, code) == (99, "internal")
    assert why == ("ArithmeticError: planted" if fault is unheard_of else NOT_FINITE.format(2))
    assert loop.load().counters["refused"] == 1
    engine.cache.validate()
    assert engine.cache.free_tokens == engine.cache.capacity


def test_a_request_that_cannot_be_is_refused_and_bothers_nobody():
    request = alone(table_logits, Random(3))
    loop = VerifyLoop(cast(Engine, TableEngine(capacity=64)), WELCOME)
    loop.receive("one", Open(SessionId(1), 1, request.prompt, request.sampling, request.limits))
    for number, change, words in (
        (2, {"tokens": (1, VOCABULARY)}, f"token {VOCABULARY} is outside the vocabulary of {VOCABULARY}"),
        (3, {"limits": Limits(65)}, "65 tokens exceed the context of 64"),
    ):
        bad = replace(Open(SessionId(number), 1, (1,), Sampling(), Limits(9)), **change)
        ((_, refused),) = loop.receive("one", bad)
        assert isinstance(refused, Refused)
        assert (refused.code, refused.message) == ("invalid", words)
    text: list[Token] = []
    while (sent := loop.step()) is not None:
        text += [token for _, message in sent for token in message.tokens]
    assert tuple(text) == request.text


def test_a_prompt_that_one_step_computed_is_read_before_the_next(monkeypatch):
    """However long it is: lookup drafts from it at once."""
    monkeypatch.setattr(planner, "READ_AT_ONCE", 4)
    monkeypatch.setattr(target_session, "READ_AT_LEAST", 4)
    loop = VerifyLoop(cast(Engine, TableEngine(capacity=CONTEXT)), WELCOME)
    speculation = Speculation(sources=frozenset({Source.LOOKUP}))
    prompt = tuple(range(8)) * 6
    loop.receive("one", Open(SessionId(1), 1, prompt, Sampling(allowed=(0,)), Limits(60), speculation))
    said = [message for _ in range(2) for _, message in loop.step() or ()]
    assert said[0].tokens == (0,)
    assert said[1].offered


def test_a_verification_tells_how_long_its_step_and_the_wait_before_it_took(monkeypatch):
    monkeypatch.setattr(planner, "DEAF_AFTER", 0.02)
    loop = VerifyLoop(cast(Engine, TableEngine(capacity=64)), WELCOME)
    speculation = Speculation(schedule=Schedule.SEQUENTIAL, max_depth=3)
    loop.receive("one", Open(SessionId(1), 1, (1,), Sampling(), Limits(9), speculation))
    started = time.perf_counter()
    said: list[Verification] = []
    while len(said) < 2:
        said += [message for _, message in loop.step() or [] if isinstance(message, Verification)]
    spent = (time.perf_counter() - started) * 1e6
    first, second = said
    assert 0 < first.took_us < spent
    assert 19_000 < first.waited_us < spent
    assert second.waited_us == 0, "it waited in vain, and waits no more"
    loop.forget("one")
