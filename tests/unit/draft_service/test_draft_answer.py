"""A draft worker answers a verification with what it has, and the answer leaves before it computes anything else."""

import asyncio
import threading
from collections.abc import Hashable
from dataclasses import dataclass, field

import pytest

from draft_service.lookahead import Lookahead, LookaheadLimits
from engine.build import build, welcome
from speculation import digest as digests
from speculation.drafting.draft_session import DraftLimits
from speculation.messages import (
    Limits,
    Load,
    Open,
    Proposal,
    Sampling,
    SessionId,
    Token,
    ToWorker,
    Verification,
    Welcome,
)
from tests.stack import held_out_prompts, settings
from transport.codec import decode_from_worker
from transport.server import Link
from transport.worker import Door, Outgoing, Worker

PATIENCE = 60.0
"""Seconds after which an answer is not coming."""
ROUTER = "router"
HELD_BACK = DraftLimits(children=1, width=1, min_weight=0.0, hold=12)


@pytest.fixture
def drafter():
    engine = build(settings("draft"))
    yield Lookahead(engine, welcome(settings("draft"), engine.model, "draft"), LookaheadLimits(draft=HELD_BACK))
    engine.cache.validate()
    assert engine.cache.free_tokens == engine.cache.capacity


def proposals(outgoing: Outgoing | None) -> list[Proposal]:
    return [message for _, message in outgoing or [] if isinstance(message, Proposal)]


def test_a_verification_of_all_that_was_sent_is_answered_with_what_was_held_back(drafter):
    prompt = held_out_prompts()[0]
    opened = Open(SessionId(1), 1, prompt, Sampling(temperature=0.0), Limits(len(prompt) + 50))
    assert drafter.receive(ROUTER, opened) == []
    sent: list[Token] = []
    for _ in range(4):  # the last of these tokens is held back
        sent += [token for proposal in proposals(drafter.step()) for token in proposal.tokens]
    assert len(sent) == 3
    tokens = tuple(sent)
    digest = digests.of((*prompt, *tokens))
    verification = Verification(SessionId(1), 1, len(prompt), tokens, digest, accepted=2, offered=2)
    steps = drafter.counters.steps
    (answer,) = proposals(drafter.receive(ROUTER, verification))
    assert drafter.counters.steps == steps
    assert (answer.anchor_position, answer.anchor_digest) == (len(prompt) + 3, digest)
    assert len(answer.tokens) == 1
    assert drafter.receive(ROUTER, verification) == []  # a repetition is no news
    drafter.forget(ROUTER)


class Heard(Link):
    """A router's stream that notes when a verification was sent on it."""

    def __init__(self) -> None:
        super().__init__("router", lambda: None)
        self.answered = threading.Event()

    def put(self, entry: bytes) -> None:
        if isinstance(decode_from_worker(entry), Verification):
            self.answered.set()


@dataclass
class Answering:
    """A machine that answers at once, and whose step lasts until the answer is out."""

    link: Heard
    asked: bool = False
    stepped: threading.Event = field(default_factory=threading.Event)
    in_time: bool = False

    def welcome(self) -> Welcome:
        return Welcome("draft", "fake", 100, 64)

    def load(self) -> Load:
        return Load()

    def receive(self, link: Hashable, message: ToWorker, at: float) -> Outgoing:
        self.asked = True
        return [(link, Verification(message.session, message.epoch, 2, (7,), 0))]

    def forget(self, link: Hashable) -> None:
        pass

    def step(self) -> None:
        if self.asked:
            self.in_time = self.link.answered.wait(PATIENCE)
            self.stepped.set()

    def due(self) -> None:
        return None


async def test_an_answer_does_not_wait_for_the_step_that_follows():
    link = Heard()
    machine = Answering(link)
    worker = Worker(machine, "draft")
    await worker.start(await Door.open("draft", "127.0.0.1:0"))
    worker.received(link, [Open(SessionId(1), 1, (1, 2), Sampling(), Limits(9))])
    assert await asyncio.to_thread(machine.stepped.wait, 2 * PATIENCE)
    await worker.stop()
    assert machine.in_time
