"""A drafter may say anything: it is counted, dropped and in the end replaced, and nobody else notices.

From the bytes of a stream through transport.incoming, the router's pool and the session, without sockets. Hypothesis
prints the failing input and, with ``print_blob``, how to replay it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protos.paceline.v1 import worker_pb2 as pb
from router.sessions.choice import WantedWorker
from router.sessions.pool import Peer, PoolEvents, WorkerPool
from router.sessions.run import outside_vocabulary
from speculation import digest as digests
from speculation.events import (
    Effect,
    Emit,
    Event,
    Faulted,
    Lost,
    PeerId,
    Place,
    Placed,
    Received,
    Role,
    Send,
    Start,
)
from speculation.messages import (
    ANCHOR,
    SUPPORT_TOTAL,
    Close,
    FromWorker,
    Limits,
    Load,
    Open,
    Proposal,
    Rule,
    Sampling,
    Schedule,
    SessionId,
    SessionMessage,
    Speculation,
    Support,
    Verification,
    Welcome,
)
from speculation.request.session import Phase, Session
from transport.codec import MalformedMessage, decode_to_worker, encode_from_worker, encode_to_worker
from transport.incoming import Incoming

VOCABULARY = 24
PROMPT = (1, 2, 3)
VICTIM, OTHER = SessionId(1), SessionId(1 << 40)
T0, D0, D1 = PeerId("target@t0"), PeerId("draft@d0"), PeerId("draft@d1")
DRAFT_EPOCH = 2
"""Epoch of both sessions at d0: the target side took the first."""
REJECTION = Speculation(rule=Rule.REJECTION)


@dataclass
class Router:
    """A router without sockets: both sessions run at t0 and d0; d1 is up too, but busier."""

    speculation: Speculation = Speculation()
    effects: dict[SessionId, list[Effect]] = field(default_factory=lambda: {VICTIM: [], OTHER: []})
    malformed: int = 0

    def __post_init__(self) -> None:
        self.sessions = {
            number: Session(Open(number, 0, PROMPT, Sampling(), Limits(99), self.speculation))
            for number in self.effects
        }
        events = PoolEvents(self.changed, self.lost, self.received, self.note_malformed)
        self.pool = WorkerPool(events, Random(0))
        self.streams: dict[PeerId, Incoming] = {}
        for name, role in ((T0, Role.TARGET), (D0, Role.DRAFT)):
            self.come_up(name, role)
        for number in self.sessions:
            self.handle(number, Start())
        self.come_up(D1, Role.DRAFT)
        self.heard(D1, Load(sessions=1000))
        for effects in self.effects.values():
            assert [effect.peer for effect in sent(effects, Open)] == [T0, D0]
            effects.clear()

    def come_up(self, name: PeerId, role: Role) -> None:
        peer = self.pool.peers[name] = Peer(name, role, self.pool)
        self.streams[name] = Incoming(name, role.value, peer, {})
        self.heard(name, Welcome(role.value, "fake", VOCABULARY, 100))

    def heard(self, name: PeerId, *messages: FromWorker | bytes) -> None:
        """A frame of a worker comes in."""
        entries = [entry if isinstance(entry, bytes) else encode_from_worker(entry) for entry in messages]
        self.streams[name].take(pb.Frame(messages=entries))

    def changed(self, event: Event) -> None:
        for number in self.sessions:
            self.handle(number, event)

    def lost(self, role: Role, peer: PeerId, expected: bool) -> None:
        self.changed(Lost(peer))

    def received(self, peer: PeerId, message: SessionMessage) -> None:
        if isinstance(message, Proposal) and (wrong := outside_vocabulary(message, VOCABULARY)):
            self.note_malformed(peer, wrong)
        elif message.session in self.sessions:
            self.handle(message.session, Received(peer, message))

    def note_malformed(self, peer: PeerId, error: MalformedMessage) -> None:
        self.malformed += 1
        if error.session in self.sessions:
            self.handle(error.session, Faulted(peer, error.epoch or 0, str(error)))

    def handle(self, number: SessionId, event: Event) -> None:
        for effect in self.sessions[number].handle(0.0, event):
            self.effects[number].append(effect)
            if isinstance(effect, Place):
                self.handle(
                    number, Placed(effect.role, self.pool.choose(effect.role, effect.avoid, WantedWorker(), None))
                )

    # -- what must hold whatever was said ------------------------------------------------------------------------------

    def check(self) -> None:
        victim, other = self.sessions[VICTIM], self.sessions[OTHER]
        assert self.effects[OTHER] == []
        assert not other.drafting.strikes and not other.stale
        assert victim.phase is Phase.RUNNING and victim.output == ()
        assert {effect.message.epoch for effect in sent(self.effects[VICTIM], Proposal)} <= {1}
        for effect in sent(self.effects[VICTIM], Proposal):
            assert effect.peer == T0
            assert all(token < VOCABULARY for token in effect.message.tokens)
            assert decode_to_worker(encode_to_worker(effect.message)) == effect.message
        if D0 in victim.drafting.quarantined:
            self.check_replaced()
        self.check_text()

    def check_replaced(self) -> None:
        """The victim has left d0 for d1, and stays away however often d0 comes back."""
        effects = self.effects[VICTIM]
        assert [effect.message for effect in sent(effects, Close)] == [Close(VICTIM, DRAFT_EPOCH)]
        assert [effect.peer for effect in sent(effects, Open)] == [D1]
        self.pool.peers[D1].down("for the test")
        self.pool.peers[D0].up(Welcome("draft", "fake", VOCABULARY, 100))
        assert [effect.peer for effect in sent(effects, Open)] == [D1]
        assert self.effects[OTHER] == []

    def check_text(self) -> None:
        """The target is heard as before."""
        for number, session in self.sessions.items():
            tokens = (4, 5)
            self.heard(T0, Verification(number, 1, len(PROMPT), tokens, digests.of((*PROMPT, *tokens))))
            assert Emit(tokens, 0, 0) in self.effects[number]
            assert session.reopened == 0


def sent(effects: list[Effect], kind: type) -> list[Send]:
    return [effect for effect in effects if isinstance(effect, Send) and isinstance(effect.message, kind)]


# -- every kind of wrong message, alone --------------------------------------------------------------------------------


def good(**changes: object) -> Proposal:
    """A proposal as a drafter should send it, and changes to it."""
    proposal = Proposal(VICTIM, DRAFT_EPOCH, len(PROMPT), digests.of(PROMPT), (7,), (ANCHOR,))
    return replace(proposal, **changes)  # type: ignore[arg-type]


def wire(**fields: object) -> bytes:
    """A proposal that this program's own types would refuse to build."""
    proposal = pb.Proposal(session=VICTIM, epoch=DRAFT_EPOCH, anchor_position=3, **fields)  # type: ignore[arg-type]
    return pb.FromWorker(proposed=proposal).SerializeToString()


def drawn(**support: list[int]) -> bytes:
    """Token 7, said to be drawn from this q."""
    return wire(tokens=[7], q=[pb.Support(**support)])


HALF = SUPPORT_TOTAL // 2
SURE = Support((7,), (SUPPORT_TOTAL,))

WRONG: dict[str, tuple[Speculation, FromWorker | bytes]] = {
    "token outside the vocabulary": (Speculation(), good(tokens=(VOCABULARY,))),
    "far outside": (Speculation(), good(tokens=(2**32 - 1,))),
    "parents in a cycle": (Speculation(), wire(tokens=[7, 8], parents=[1, 0])),
    "its own parent": (Speculation(), wire(tokens=[7], parents=[0])),
    "parent below the anchor": (Speculation(), wire(tokens=[7], parents=[-2])),
    "a parent missing": (Speculation(), wire(tokens=[7, 8], parents=[-1])),
    "too deep": (Speculation(), wire(tokens=[7] * 129)),
    "too wide": (Speculation(), wire(tokens=range(33), parents=[-1] * 33)),
    "too many": (Speculation(), wire(tokens=[7] * 513, parents=[-1, *[0] * 512])),
    "confidence of another length": (Speculation(), wire(tokens=[7, 8], confidence=b"x")),
    "a verification": (Speculation(), Verification(VICTIM, DRAFT_EPOCH, 3, (7,), digests.of((*PROMPT, 7)))),
    "a verification that makes no sense": (
        Speculation(),
        pb.FromWorker(verified=pb.Verification(session=VICTIM, epoch=DRAFT_EPOCH, accepted=9)).SerializeToString(),
    ),
    "q nobody asked for": (Speculation(), good(q=(SURE,))),
    "no q": (REJECTION, good()),
    "q with a negative weight": (REJECTION, drawn(tokens=[7, 8], weights=[SUPPORT_TOTAL + 1, 2**32 - 1])),
    "q with a weight of nothing": (REJECTION, drawn(tokens=[7, 8], weights=[SUPPORT_TOTAL, 0])),
    "q that does not sum to one": (REJECTION, drawn(tokens=[7, 8], weights=[HALF, HALF - 1])),
    "q without the drawn token": (REJECTION, drawn(tokens=[8, 9], weights=[HALF, HALF])),
    "q with a token twice": (REJECTION, drawn(tokens=[7, 7], weights=[HALF, HALF])),
    "q with a weight missing": (REJECTION, drawn(tokens=[7, 8], weights=[SUPPORT_TOTAL])),
    "q outside the vocabulary": (REJECTION, good(q=(Support((7, VOCABULARY), (HALF, HALF)),))),
    "fewer q than tokens": (REJECTION, wire(tokens=[7, 8], q=[pb.Support(tokens=[7], weights=[SUPPORT_TOTAL])])),
    "a branch where chains are wanted": (
        Speculation(schedule=Schedule.PARALLEL),
        good(tokens=(7, 8), parents=(ANCHOR, ANCHOR)),
    ),
}


@pytest.mark.parametrize(("speculation", "message"), WRONG.values(), ids=WRONG)
def test_three_wrong_messages_end_a_drafters_part_in_a_session(speculation, message):
    router = Router(speculation)
    router.heard(D0, message, message)
    assert router.effects[VICTIM] == []
    router.heard(D0, message)
    assert router.sessions[VICTIM].drafting.quarantined == {D0}
    router.heard(D0, message, message)  # too late to matter
    assert len(router.sessions[VICTIM].drafting.strikes[D0]) == 3
    router.check()


LATE: dict[str, FromWorker | bytes] = {
    "old epoch": good(epoch=DRAFT_EPOCH - 1),
    "epoch to come": good(epoch=DRAFT_EPOCH + 1),
    "unknown session": good(session=SessionId(77)),
    "malformed, old epoch": encode_from_worker(good(epoch=DRAFT_EPOCH - 1, tokens=(VOCABULARY,))),
    "unreadable": b"\xff\xff",
    "a second welcome": Welcome("target", "fake", 5, 5),
    "a prefix the target will not know": good(anchor_digest=5),
    "nothing": good(tokens=(), parents=()),
}


@pytest.mark.parametrize("message", LATE.values(), ids=LATE)
def test_what_happens_to_honest_drafters_too_is_not_held_against_one(message):
    router = Router()
    router.heard(D0, *[message] * 10)
    assert not router.sessions[VICTIM].drafting.strikes
    assert not sent(router.effects[VICTIM], Close)
    router.check()


# -- anything at all ---------------------------------------------------------------------------------------------------

small = st.integers(0, 40)
u32 = small | st.integers(0, 2**32 - 1)
epochs = st.just(DRAFT_EPOCH) | st.integers(0, 4)
victims = st.sampled_from([VICTIM, VICTIM, SessionId(77)])
supports = st.builds(pb.Support, tokens=st.lists(small, max_size=3), weights=st.lists(u32, max_size=3))
wild_proposals = st.builds(
    lambda **fields: pb.FromWorker(proposed=pb.Proposal(**fields)).SerializeToString(),
    session=victims,
    epoch=epochs,
    anchor_position=small,
    anchor_digest=st.sampled_from([digests.of(PROMPT), 0, 5]),
    tokens=st.lists(u32, max_size=8),
    parents=st.lists(st.integers(-3, 8), max_size=8),
    confidence=st.binary(max_size=8),
    source=st.integers(0, 5),
    q=st.lists(supports, max_size=3),
)
wild_verifications = st.builds(
    lambda **fields: pb.FromWorker(verified=pb.Verification(**fields)).SerializeToString(),
    session=victims,
    epoch=epochs,
    position=small,
    tokens=st.lists(u32, max_size=4),
    digest=st.sampled_from([digests.of((*PROMPT, 7)), 0]),
    accepted=small,
    offered=small,
    finish=st.integers(0, 3),
)
valid = st.sampled_from([encode_from_worker(good()), encode_from_worker(good(q=(SURE,)))])


@st.composite
def mutated(draw: st.DrawFn) -> bytes:
    """A valid message with some bytes changed, added or gone."""
    entry = bytearray(draw(valid))
    edits: list[Callable[[int, int], None]] = [
        lambda at, byte: entry.__setitem__(at, byte),
        lambda at, byte: entry.insert(at, byte),
        lambda at, byte: entry.__delitem__(at),
    ]
    for _ in range(draw(st.integers(1, 4))):
        if entry:
            draw(st.sampled_from(edits))(draw(st.integers(0, len(entry) - 1)), draw(st.integers(0, 255)))
    return bytes(entry)


garbage = st.one_of(wild_proposals, wild_verifications, mutated(), valid, st.binary(max_size=60))
kinds = st.sampled_from([Speculation(), REJECTION, Speculation(schedule=Schedule.SEQUENTIAL)])


@settings(max_examples=300, print_blob=True)
@given(kinds, st.lists(garbage, max_size=12))
def test_whatever_a_drafter_says_nobody_else_notices(speculation, entries):
    router = Router(speculation)
    for entry in entries:
        router.heard(D0, entry)
        assert len(router.sessions[VICTIM].drafting.strikes.get(D0, [])) <= 3
    router.check()
