"""What one worker says and another waits for is passed on before it is read; all is read in between other things."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from protos.paceline.v1 import worker_pb2 as pb
from speculation.messages import (
    SUPPORT_TOTAL,
    FeatureFormat,
    Features,
    FromWorker,
    Load,
    Loading,
    Proposal,
    SessionId,
    Support,
    TokenLogprobs,
    Verification,
    Welcome,
)
from transport import codec, outbox
from transport import incoming as module
from transport.codec import (
    MAX_PROPOSAL_BYTES,
    MAX_PROPOSED,
    MAX_SUPPORT,
    MalformedMessage,
    decode_to_worker,
    encode_from_worker,
)
from transport.codec_parts import MAX_FEATURE_BYTES, MAX_PLAIN_BYTES, AskedLogprobs
from transport.incoming import (
    HEARD_PER_MALFORMED,
    MAX_MALFORMED,
    MAX_UNREAD_BYTES,
    READ_AT_ONCE,
    READ_BYTES,
    Incoming,
    Listener,
    Route,
    heading,
    varint,
)
from transport.outbox import MAX_FRAME_ENTRIES

ONE, TWO = SessionId(1), SessionId(2)
HERE, THERE = 5, 7
"""Epochs at the worker that speaks and at the one that listens."""


@dataclass
class Router(Listener):
    """What a router hears, sends on and has yet to do."""

    heard: list[FromWorker | MalformedMessage] = field(default_factory=list)
    sent: list[bytes] = field(default_factory=list)
    later: list[Callable[[], None]] = field(default_factory=list)
    writable: bool = True

    def __post_init__(self) -> None:
        self.routes: dict[SessionId, Route] = {}
        self.given_up: list[str] = []
        self.late_features = 0
        self.may_tell: AskedLogprobs | None = None
        self.incoming = Incoming("w", "target", self, self.routes, self.later.append, self.given_up.append)
        self.take(Welcome("target", "m", 100, 100))

    def take(self, *messages: FromWorker | Features | bytes) -> None:
        entries = [message if isinstance(message, bytes) else encode_from_worker(message) for message in messages]
        self.incoming.take(pb.Frame(messages=entries))

    def turn(self) -> None:
        """One turn of the event loop."""
        due, self.later[:] = list(self.later), []
        for call in due:
            call()

    def join(self, session: SessionId, epoch: int = HERE, there: int = THERE) -> None:
        self.routes[session] = Route(epoch, self, there)  # type: ignore[arg-type]

    def put(self, entry: bytes, *, hint: bool = False) -> bool:
        """As the connection to the other worker."""
        if self.writable:
            self.sent.append(entry)
        return self.writable

    @property
    def passed(self) -> list[tuple[SessionId, int, int]]:
        """Session, epoch and position of what was sent on."""
        messages = [decode_to_worker(entry) for entry in self.sent]
        return [(said.session, said.epoch, said.position) for said in messages if isinstance(said, Verification)]

    def loading(self, loading: Loading | None) -> None:
        self.heard.append(loading)

    def received(self, message: FromWorker) -> None:
        self.heard.append(message)

    def malformed(self, error: MalformedMessage) -> None:
        self.heard.append(error)

    def asked(self, session: SessionId, epoch: int) -> AskedLogprobs | None:
        return self.may_tell

    def unrouted(self) -> None:
        self.late_features += 1


def verified(session: SessionId, position: int, epoch: int = HERE) -> Verification:
    return Verification(session, epoch, position, (4,), 0)


def test_all_of_a_frame_is_passed_on_before_any_of_it_is_read():
    router = Router()
    said = [verified(SessionId(number), 3) for number in range(1, 17)]
    for message in said:
        router.join(message.session)
    router.take(*said)
    assert router.passed == [(message.session, THERE, 3) for message in said]
    assert not router.heard
    router.turn()
    assert router.heard == said[:READ_AT_ONCE]
    while router.later:
        router.turn()
    assert router.heard == said
    assert [message.passed for message in router.heard if isinstance(message, Verification)] == [THERE] * 16


@pytest.mark.parametrize(
    ("said", "heard"),
    [
        (Loading("warming up"), Loading("warming up")),
        (Loading("loading weights", 1 / 3, "llama"), Loading("loading weights", 0.333, "llama")),
        (Loading("x", 1.5), Loading("x")),
        (Loading("x", float("nan")), Loading("x")),
    ],
)
def test_a_worker_that_loads_is_heard_until_it_introduces_itself(said: Loading, heard: Loading):
    router = Router()
    stream = Incoming("w", "target", router, {}, router.later.append)
    stream.take(pb.Frame(messages=[encode_from_worker(said)]))
    while router.later:
        router.turn()
    assert (router.heard, stream.loading, stream.up) == ([heard], True, False)
    stream.take(pb.Frame(messages=[encode_from_worker(Welcome("target", "m", 9, 9))]))
    while router.later:
        router.turn()
    assert (router.heard, stream.loading, stream.up) == ([heard], False, True)


def test_what_comes_meanwhile_is_passed_on_at_once_and_read_in_its_turn():
    router = Router()
    router.join(ONE)
    said = [verified(ONE, position) for position in range(READ_AT_ONCE + 1)]
    router.take(*said[:-1])
    router.take(said[-1], Load(sessions=3))
    assert len(router.sent) == len(said)
    while router.later:
        router.turn()
    assert router.heard == [*said, Load(sessions=3)]


@pytest.mark.parametrize(
    "message",
    [
        verified(ONE, 3, HERE - 1),
        verified(TWO, 3),
        Proposal(ONE, HERE, 3, 0, (1,), (-1,)),
    ],
    ids=["an older epoch", "another session", "what a target does not say"],
)
def test_nothing_else_is_passed_on_unread(message):
    router = Router()
    router.join(ONE)
    router.take(message)
    router.turn()
    assert router.heard == [message] and not router.sent
    assert not message.passed


def test_what_cannot_be_passed_on_is_left_to_the_reader():
    router = Router(writable=False)
    router.join(ONE)
    router.take(verified(ONE, 3))
    router.turn()
    (message,) = router.heard
    assert isinstance(message, Verification) and not message.passed


def test_nothing_overtakes_what_the_reader_has_to_pass_on():
    """A session may be opened at a drafter while a verification of it waits to be read."""
    router = Router()
    router.join(TWO)
    router.take(verified(ONE, 3))
    router.join(ONE)
    router.take(verified(ONE, 4), verified(TWO, 9))
    assert router.passed == [(TWO, THERE, 9)]
    router.turn()
    passed = [message.passed for message in router.heard if isinstance(message, Verification)]
    assert passed == [0, 0, THERE]
    router.take(verified(ONE, 5))
    assert router.passed == [(TWO, THERE, 9), (ONE, THERE, 5)]


def test_nothing_overtakes_what_is_too_long_to_be_passed_on_as_it_came():
    router = Router()
    router.may_tell = AskedLogprobs(None, 1, 400)
    router.join(ONE)
    told = replace(verified(ONE, 400), prompt_logprobs=(TokenLogprobs(-1.0, (5,), (-1.0,)),) * 399)
    router.take(told, verified(ONE, 401))
    assert router.passed == []
    router.turn()
    heard = [message for message in router.heard if isinstance(message, Verification)]
    assert [(message.position, message.passed) for message in heard] == [(400, 0), (401, 0)]
    router.take(verified(ONE, 402))
    assert router.passed == [(ONE, THERE, 402)]


def test_nothing_goes_to_another_worker_than_what_is_unread_went_to():
    """That one was opened with what has been read."""
    router = Router()
    router.join(ONE)
    router.take(verified(ONE, 3))
    router.join(ONE, there=THERE + 1)
    router.take(verified(ONE, 4))
    assert router.passed == [(ONE, THERE, 3)]
    router.turn()
    heard = [message for message in router.heard if isinstance(message, Verification)]
    assert [(message.position, message.passed) for message in heard] == [(3, THERE), (4, 0)]
    router.take(verified(ONE, 5))
    assert router.passed[1:] == [(ONE, THERE + 1, 5)]


def test_garbage_is_passed_on_to_nobody_but_the_session_it_names_and_then_reported():
    router = Router()
    router.join(ONE)
    wrong = pb.FromWorker(verified=pb.Verification(session=1, epoch=HERE, accepted=9)).SerializeToString()
    router.take(b"\xff\xff", wrong, verified(ONE, 3))
    with pytest.raises(MalformedMessage):
        decode_to_worker(router.sent[0])
    router.turn()
    first, second, last = router.heard
    assert isinstance(first, MalformedMessage) and isinstance(second, MalformedMessage)
    assert (first.session, second.session) == (None, ONE)
    assert last == verified(ONE, 3)


def test_a_reader_that_falls_behind_says_so_and_still_reads_little_at_a_time(monkeypatch):
    monkeypatch.setattr(module, "MAX_UNREAD", 20)
    router = Router()
    router.take(*[verified(ONE, position) for position in range(20)])
    assert not router.incoming.behind
    router.take(verified(ONE, 20))
    assert router.incoming.behind and not router.heard
    router.turn()
    assert not router.incoming.behind and len(router.heard) == READ_AT_ONCE


def test_a_frame_of_more_messages_than_anybody_writes_ends_the_stream_unread():
    router = Router()
    router.join(ONE)
    router.take(*[encode_from_worker(verified(ONE, 3))] * (MAX_FRAME_ENTRIES + 1))
    assert router.given_up == ["a frame of 8193 messages; at most 8192 are allowed"]
    router.take(verified(ONE, 3))
    router.incoming.finish()
    assert not (router.heard or router.sent or router.later) and router.incoming.broken


def test_a_stream_of_garbage_is_given_up_and_not_read_to_its_end():
    router = Router()
    router.take(*[b"\xff"] * MAX_FRAME_ENTRIES)
    while router.later:
        router.turn()
    assert len(router.heard) == MAX_MALFORMED + 1
    (why,) = router.given_up
    assert why.startswith("17 of 18 messages are malformed, the last one: not a FromWorker message")


def test_garbage_among_much_that_is_right_ends_no_stream():
    router = Router()
    for _ in range(3):
        router.take(*[b"\xff"] * MAX_MALFORMED, *[verified(ONE, 3)] * (MAX_MALFORMED * HEARD_PER_MALFORMED))
        router.incoming.finish()
    assert not router.given_up
    router.take(*[b"\xff"] * (MAX_MALFORMED + 2))
    router.incoming.finish()
    assert len(router.given_up) == 1


def test_messages_of_a_kind_yet_to_come_end_no_stream():
    router = Router()
    router.take(*[b"\xfa\x01\x00"] * 100, verified(ONE, 3))
    router.incoming.finish()
    assert not router.given_up
    assert router.heard[-1] == verified(ONE, 3) and len(router.heard) == 101


def test_a_number_longer_than_any_is_not_read():
    """Each of its bytes made the next one slower."""
    entry = encode_from_worker(verified(ONE, 3))
    padded = entry[:1] + bytes([len(entry) - 2 + 11]) + entry[2:3] + b"\x81" + b"\x80" * 10 + b"\x00" + entry[4:]
    assert entry[2:4] == b"\x08\x01" and len(padded) == len(entry) + 11
    assert heading(entry) is not None and heading(padded) is None
    largest = encode_from_worker(verified(SessionId((1 << 64) - 1), 3))
    head = heading(largest)
    assert head is not None and head.session == (1 << 64) - 1


def test_drafts_and_nothing_else_are_dropped_for_a_target_that_falls_behind(monkeypatch):
    monkeypatch.setattr(outbox, "MAX_HINTS_WAITING", 2)

    async def fill() -> list[bool]:
        box = outbox.Outbox()
        return [box.put(b"draft", hint=True) for _ in range(3)] + [box.put(b"text")]

    assert asyncio.run(fill()) == [True, True, False, True]


def test_an_outbox_writes_no_frame_that_would_be_refused():
    async def frames() -> list[int]:
        box = outbox.Outbox()
        for _ in range(MAX_FRAME_ENTRIES + 3):
            box.put(b"x")
        box.close()
        sizes = []
        while (frame := await box.next_frame()) is not None:
            sizes.append(len(frame.messages))
        return sizes

    assert asyncio.run(frames()) == [MAX_FRAME_ENTRIES, 3]


def test_all_that_came_is_read_when_the_stream_ends():
    router = Router()
    router.take(*[verified(ONE, position) for position in range(20)])
    router.incoming.finish()
    assert len(router.heard) == 20
    router.turn()
    assert len(router.heard) == 20


def drafter(router: Router) -> Router:
    """The same, of a drafter."""
    router.incoming = Incoming("w", "draft", router, router.routes, router.later.append, router.given_up.append)
    router.take(Welcome("draft", "m", 100, 100))
    router.heard.clear()
    return router


def fullest(tokens: int = MAX_PROPOSED, support: int = MAX_SUPPORT) -> Proposal:
    """Takes the longest to read."""
    q = Support(tuple(range(support)), (SUPPORT_TOTAL // support,) * support)
    return Proposal(ONE, HERE, 3, 0, (1,) * tokens, tuple(i % 64 - 1 for i in range(tokens)), q=(q,) * tokens)


def test_one_turn_reads_no_more_of_long_messages_than_one():
    router = drafter(Router())
    router.may_tell = AskedLogprobs()
    router.take(*[fullest()] * READ_AT_ONCE)
    for read in range(READ_AT_ONCE):
        assert len(router.heard) == read and len(router.later) == 1
        router.turn()
    assert router.heard == [fullest()] * READ_AT_ONCE and not router.later


def test_one_turn_reads_all_that_drafters_write_in_one():
    router = drafter(Router())
    router.take(*[fullest(8, 16)] * READ_AT_ONCE)
    router.turn()
    assert len(router.heard) == READ_AT_ONCE


def test_a_long_proposal_of_a_session_that_is_not_open_is_not_read(monkeypatch):
    """It came late, or nobody asked for it."""
    router = drafter(Router())
    parsed: list[bytes] = []
    monkeypatch.setattr(module, "decode_from_worker", lambda entry, *_: parsed.append(entry))
    router.take(*[fullest()] * (2 * MAX_MALFORMED))
    router.incoming.finish()
    assert not parsed and not router.heard and not router.given_up


def test_a_proposal_longer_than_any_is_malformed_unread():
    router = drafter(Router())
    wire = pb.Proposal(session=ONE, epoch=HERE, tokens=[1], q=[pb.Support(tokens=[1] * MAX_PROPOSAL_BYTES)])
    router.take(pb.FromWorker(proposed=wire).SerializeToString())
    router.turn()
    (error,) = router.heard
    assert isinstance(error, MalformedMessage) and (error.session, error.epoch) == (ONE, HERE)
    assert str(error).startswith("a proposal of 524") and "at most 524288 are allowed" in str(error)


def test_little_is_read_at_once_of_what_comes_before_a_welcome():
    router = Router()
    router.incoming = Incoming("w", "draft", router, router.routes, router.later.append, router.given_up.append)
    parsed: list[bytes] = []
    decode = module.decode_from_worker
    short = encode_from_worker(fullest(256, 16))
    assert READ_BYTES / 2 < len(short) < READ_BYTES
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(module, "decode_from_worker", lambda entry, *more: parsed.append(entry) or decode(entry, *more))
        router.take(*[short] * 9, Welcome("draft", "m", 100, 100), Load(sessions=3))
        assert len(parsed) == 2 and not router.incoming.up
        while router.later:
            router.turn()
    assert router.incoming.up and router.heard == [Load(sessions=3)]


def test_a_reader_is_behind_with_few_messages_if_they_are_long():
    router = drafter(Router())
    count = MAX_UNREAD_BYTES // len(encode_from_worker(fullest()))
    router.take(*[fullest()] * count)
    assert not router.incoming.behind
    router.take(fullest())
    assert router.incoming.behind
    router.turn()
    assert not router.incoming.behind
    router.incoming.finish()
    router.take(*[fullest()] * count)
    assert not router.incoming.behind, "what has been read does not count"


@dataclass
class Target:
    """A target that is heard, and what it costs to hear it."""

    monkeypatch: pytest.MonkeyPatch
    asked: AskedLogprobs | None = AskedLogprobs()

    def __post_init__(self) -> None:
        self.router = Router()
        self.router.may_tell = self.asked
        self.router.incoming = Incoming("w", "target", self.router, {})
        self.router.take(Welcome("target", "m", 100, 100))
        self.parsed = self.read = 0
        parse, read = codec._parse, codec._read_logprobs
        self.monkeypatch.setattr(codec, "_parse", lambda *said: self.counted("parsed", parse, *said))
        self.monkeypatch.setattr(codec, "_read_logprobs", lambda *said: self.counted("read", read, *said))

    def counted(self, what: str, call: Callable[..., Any], *arguments: object) -> Any:
        setattr(self, what, getattr(self, what) + 1)
        return call(*arguments)

    def tells(self, *, of_prompt: int = 0, of_tokens: int = 0, epoch: int = HERE) -> None:
        wire = pb.Verification(session=ONE, epoch=epoch, position=3, tokens=[4])
        body = wire.SerializeToString() + b"\x5a\x00" * of_tokens + b"\x62\x00" * of_prompt
        kind = encode_from_worker(verified(ONE, 3))[:1]
        self.router.take(kind + varint(len(body)) + body)


@pytest.mark.parametrize(
    ("asked", "told", "parsed", "why"),
    [
        (AskedLogprobs(), {"of_prompt": 1}, 1, "prompt_logprobs has 1 entries; at most 0 are allowed"),
        (AskedLogprobs(), {"of_tokens": 1}, 1, "logprobs has 1 entries; at most 0 are allowed"),
        (AskedLogprobs(), {"of_prompt": 1 << 20}, 0, "a verification of 2097166 bytes; what was asked for takes at"),
        (AskedLogprobs(prompt=1), {"of_prompt": 1 << 20}, 0, "a verification of 2097166 bytes; what was asked for"),
        (AskedLogprobs(prompt=0, prompt_tokens=9), {"of_prompt": 10}, 1, "prompt_logprobs has 10 entries; at most 9"),
        (AskedLogprobs(prompt=0, prompt_tokens=9), {"of_tokens": 1}, 1, "logprobs has 1 entries; at most 0"),
    ],
)
def test_log_probabilities_that_nobody_asked_for_are_refused_before_they_are_read(
    monkeypatch, asked, told, parsed, why
):
    target = Target(monkeypatch, asked)
    target.tells(**told)
    (error,) = target.router.heard
    assert isinstance(error, MalformedMessage) and str(error).startswith(why), error
    assert (error.session, error.epoch) == (ONE, HERE)
    assert (target.parsed, target.read) == (parsed, 0)


def test_log_probabilities_that_were_asked_for_are_heard(monkeypatch):
    target = Target(monkeypatch, AskedLogprobs(tokens=0, prompt=0, prompt_tokens=1 << 17))
    target.tells(of_tokens=1, of_prompt=1 << 17)
    (message,) = target.router.heard
    assert isinstance(message, Verification)
    assert (len(message.logprobs), len(message.prompt_logprobs)) == (1, 1 << 17)
    assert message.prompt_logprobs and target.read == 1, "those of a prompt keep the event loop from the others"
    assert len(tuple(message.prompt_logprobs)) == target.read - 1 == 1 << 17


@pytest.mark.parametrize("of_prompt", [1, 1 << 20])
def test_a_session_that_is_over_makes_no_target_one_that_breaks_the_protocol(monkeypatch, of_prompt):
    """It was asked for, and came late."""
    target = Target(monkeypatch, None)
    for _ in range(2 * MAX_MALFORMED):
        target.tells(of_prompt=of_prompt)
    assert not target.router.incoming.broken and not target.read
    assert all(isinstance(message, Verification) and not message.prompt_logprobs for message in target.router.heard)


def test_a_long_message_that_names_no_session_is_not_parsed(monkeypatch):
    target = Target(monkeypatch)
    target.router.take(b"\x0a" + b"\x00" * (MAX_PLAIN_BYTES + 1))
    (error,) = target.router.heard
    assert str(error) == f"a message of {MAX_PLAIN_BYTES + 2} bytes; at most {MAX_PLAIN_BYTES} are allowed"
    assert not target.parsed


def test_features_are_passed_on_and_never_read():
    """Those of a session without a drafter, or of another opening, are dropped and counted."""
    router = Router()
    router.join(ONE)
    features = Features(ONE, HERE, 3, 9, 4, bytes(8 * 2000))
    router.take(features, replace(features, epoch=HERE - 1), replace(features, session=TWO))
    assert [decode_to_worker(entry) for entry in router.sent] == [replace(features, epoch=THERE)]
    assert router.incoming.unread == 0 and not router.heard and router.late_features == 2


@pytest.mark.parametrize("of", [ONE, TWO], ids=["open", "not open"])
def test_features_longer_than_any_are_passed_on_to_nobody_and_count_against_their_target(of):
    """Long enough, they would make a frame that a drafter does not take, and end the stream to it."""
    router = Router()
    router.may_tell = AskedLogprobs() if of == ONE else None
    router.join(ONE)
    values, scales = bytes(MAX_FEATURE_BYTES), bytes(MAX_FEATURE_BYTES // 32)
    longest = Features(ONE, HERE, 3, 9, 128, values, FeatureFormat.FP8, scales)
    router.take(longest)
    assert len(router.sent) == 1
    router.take(*[replace(longest, session=of, values=2 * values, scales=2 * scales)] * (MAX_MALFORMED + 1))
    while router.later:
        router.turn()
    assert len(router.sent) == 1 and not router.late_features
    error = router.heard[0]
    assert isinstance(error, MalformedMessage) and (error.session, error.epoch) == (of, HERE)
    assert str(error).startswith("features of 2162") and len(router.given_up) == 1


def test_features_of_a_drafter_are_malformed():
    router = drafter(Router())
    router.join(ONE)
    router.take(Features(ONE, HERE, 3, 9, 4, bytes(8)))
    router.turn()
    assert not router.sent and isinstance(router.heard[-1], MalformedMessage)
