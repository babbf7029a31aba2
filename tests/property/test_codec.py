"""Every message survives the wire; garbage never does more than refuse itself."""

import contextlib
import itertools
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protos.paceline.v1 import worker_pb2 as pb
from speculation import messages as m
from transport.codec import (
    MAX_CHILDREN,
    MAX_PROPOSAL_BYTES,
    MAX_PROPOSED,
    MAX_SUPPORT,
    MalformedMessage,
    decode_from_worker,
    decode_to_worker,
    encode_from_worker,
    encode_to_worker,
    is_features,
)
from transport.incoming import MAX_RELAYED_BYTES, heading, relayed

u32 = st.integers(0, 2**32 - 1)
u64 = st.integers(0, 2**64 - 1)
sessions = u64.map(m.SessionId)
token_lists = st.lists(u32, max_size=20).map(tuple)
SHORT = m.Verification(m.SessionId(7), 300, 9, (1, 2, 70_000), 12345, 2, 4, lead=8, recovered=True)
few_tokens = st.lists(u32, max_size=4).map(tuple)
shifts = st.floats(-1e4, 1e4)
samplings = st.builds(
    m.Sampling,
    temperature=st.floats(0, 100),
    top_k=u32,
    top_p=st.floats(0.001, 1.0),
    min_p=st.floats(0, 1),
    seed=u64,
    presence_penalty=shifts,
    frequency_penalty=shifts,
    repetition_penalty=st.floats(1e-4, 1e4),
    bias=st.lists(st.tuples(u32, shifts), max_size=4).map(tuple),
    allowed=few_tokens,
    banned=st.lists(st.lists(u32, min_size=1, max_size=4).map(tuple), max_size=3).map(tuple),
)
request_options = st.builds(
    m.RequestOptions,
    grammar=st.text(max_size=20),
    prediction=token_lists,
    logprobs=st.none() | st.integers(0, 128),
    prompt_logprobs=st.none() | st.integers(0, 128),
    request=st.text(max_size=20),
    trace=st.text(max_size=20),
    scope=st.text(max_size=20),
    cache_salt=st.text(max_size=20),
)


@st.composite
def opens(draw: st.DrawFn) -> m.Open:
    tokens = draw(st.lists(u32, min_size=1, max_size=20).map(tuple))
    stop_tokens = frozenset(draw(st.lists(u32, max_size=4)))
    limits = m.Limits(draw(st.integers(len(tokens) + 1, 2**32 - 1)), stop_tokens, draw(u32))
    speculation = m.Speculation(
        draw(st.booleans()),
        draw(u32),
        draw(st.sampled_from(m.Rule)),
        draw(st.sampled_from(m.Schedule)),
        draw(st.frozensets(st.sampled_from(m.Source), min_size=1)),
    )
    priority = draw(st.integers(-m.MAX_PRIORITY, m.MAX_PRIORITY))
    return m.Open(
        draw(sessions), draw(u32), tokens, draw(samplings), limits, speculation, priority,
        age_ms=draw(u32), prompt=draw(st.integers(0, len(tokens))), request_options=draw(request_options),
        digest=draw(u64),
    )  # fmt: skip


@st.composite
def supports(draw: st.DrawFn, token: int) -> m.Support:
    others = draw(st.sets(u32, max_size=4)) - {token}
    cuts = draw(st.sets(st.integers(1, m.SUPPORT_TOTAL - 1), min_size=len(others), max_size=len(others)))
    edges = [0, *sorted(cuts), m.SUPPORT_TOTAL]
    return m.Support((token, *others), tuple(b - a for a, b in itertools.pairwise(edges)))


@st.composite
def proposals(draw: st.DrawFn) -> m.Proposal:
    size = draw(st.integers(0, 12))
    parents = tuple(draw(st.integers(-1, i - 1)) for i in range(size))
    tokens = tuple(draw(u32) for _ in parents)
    confidence = tuple(draw(st.integers(0, 255)) / 255 for _ in parents) if draw(st.booleans()) else ()
    source = draw(st.sampled_from(m.Source))
    q = tuple(draw(supports(token)) for token in tokens) if draw(st.booleans()) else ()
    took = draw(u32)
    return m.Proposal(draw(sessions), draw(u32), draw(u32), draw(u64), tokens, parents, confidence, source, q, took)


@st.composite
def thoughts(draw: st.DrawFn) -> m.TokenLogprobs:
    logprobs = st.floats(max_value=0, width=32)
    tokens = draw(few_tokens)
    return m.TokenLogprobs(draw(logprobs), tokens, tuple(draw(logprobs) for _ in tokens))


@st.composite
def verifications(draw: st.DrawFn) -> m.Verification:
    tokens = draw(token_lists)
    accepted = draw(st.integers(0, len(tokens)))
    offered = draw(st.integers(accepted, 100))
    finish = draw(st.none() | st.sampled_from(m.FinishReason))
    lead = draw(st.none() | u32)
    position = draw(u32)
    cached = draw(st.integers(0, position))
    return m.Verification(
        draw(sessions), draw(u32), position, tokens, draw(u64), accepted, offered, finish, lead, cached,
        sources=tuple(draw(st.sampled_from(m.Source)) for _ in range(accepted)) if draw(st.booleans()) else (),
        logprobs=tuple(draw(thoughts()) for _ in tokens) if draw(st.booleans()) else (),
        prompt_logprobs=tuple(draw(st.lists(thoughts(), max_size=3))), took_us=draw(u32), waited_us=draw(u32),
    )  # fmt: skip


@st.composite
def features(draw: st.DrawFn) -> m.Features:
    count, width = draw(st.integers(1, 5)), draw(st.integers(1, 9))
    written = draw(st.sampled_from(m.FeatureFormat))
    size = count * width * written.size
    scales = 4 * count if written is m.FeatureFormat.FP8 else 0
    return m.Features(
        *(draw(sessions), draw(u32), draw(u32), draw(u64), width),
        *(draw(st.binary(min_size=size, max_size=size)), written, draw(st.binary(min_size=scales, max_size=scales))),
    )


subscriptions = st.builds(m.Subscribe, sessions, u32, u64, st.sampled_from(m.FeatureFormat))
to_worker = st.one_of(
    opens(), proposals(), verifications(), st.builds(m.Close, sessions, u32), subscriptions, features()
)
from_worker = st.one_of(
    verifications(),
    proposals(),
    st.builds(m.Refused, sessions, u32, st.sampled_from(m.RefusalCode), st.text(max_size=50)),
    st.builds(m.Load, u32, u32, u64, u64, st.booleans(), st.dictionaries(st.text(max_size=8), u64, max_size=3)),
    st.builds(
        m.Welcome,
        *(st.text(max_size=9), st.text(max_size=9), u32, u32, u64),
        *(st.text(max_size=9), st.text(max_size=9), st.text(max_size=9), st.booleans()),
        head=st.integers(1, 2**64 - 1),
        features=st.sampled_from(m.FeatureFormat),
    ),
)


@given(to_worker)
def test_messages_to_workers_survive(message):
    assert decode_to_worker(encode_to_worker(message)) == message


@given(from_worker)
def test_messages_from_workers_survive(message):
    assert decode_from_worker(encode_from_worker(message)) == message


@given(st.one_of(verifications(), proposals()), u32)
def test_what_is_relayed_arrives_as_it_was_sent_under_another_epoch(message, epoch):
    entry = encode_from_worker(message)
    head = heading(entry)
    if head is None:
        assert not message.session or not message.epoch
    else:
        assert head.role == ("target" if isinstance(message, m.Verification) else "draft")
        assert (head.session, head.epoch) == (message.session, message.epoch)
        assert decode_to_worker(relayed(entry, head, epoch)) == replace(message, epoch=epoch)


@given(features(), u32)
def test_features_are_passed_on_however_long(message, epoch):
    times = 1 + MAX_RELAYED_BYTES // len(message.values)
    long = replace(message, values=message.values * times, scales=message.scales * times)
    entry = encode_from_worker(long)
    head = heading(entry)
    if head is None:
        assert not message.session or not message.epoch
    else:
        assert is_features(entry) and head.role == "target"
        assert decode_to_worker(relayed(entry, head, epoch)) == replace(long, epoch=epoch)
    with pytest.raises(MalformedMessage):
        decode_from_worker(entry)


@pytest.mark.parametrize(
    "spoilt",
    [
        pb.Features(session=1, epoch=2, width=0, values=b"1234"),
        pb.Features(session=1, epoch=2, width=2, values=b""),
        pb.Features(session=1, epoch=2, width=3, values=b"1234"),
        pb.Features(session=1, epoch=2, width=1 << 17, values=bytes(1 << 18)),
        pb.Features(session=1, epoch=2, width=1, values=bytes((1 << 20) + 2)),
        pb.Features(session=1, epoch=2, width=2, values=b"1234", format=pb.FEATURE_FORMAT_FP8, scales=b"123"),
    ],
    ids=["no width", "nothing", "half a token", "too wide", "too long", "scales"],
)
def test_features_of_a_wrong_size_are_refused(spoilt):
    with pytest.raises(MalformedMessage) as refused:
        decode_to_worker(pb.ToWorker(features=spoilt).SerializeToString())
    assert (refused.value.session, refused.value.epoch) == (1, 2)


def test_the_heading_of_a_usual_message_is_read():
    assert heading(encode_from_worker(SHORT)) is not None
    assert heading(encode_from_worker(replace(SHORT, session=(1 << 64) - 1, epoch=(1 << 32) - 1))) is not None


@given(st.binary(max_size=60) | st.binary(max_size=60).map(lambda rest: encode_from_worker(SHORT)[:7] + rest))
def test_what_is_passed_on_unread_is_about_what_its_heading_says_or_nothing_at_all(entry):
    head = heading(entry)
    if head is not None:
        with contextlib.suppress(MalformedMessage):
            arrived = decode_to_worker(relayed(entry, head, 9))
            assert isinstance(arrived, m.Verification | m.Proposal)
            assert (arrived.session, arrived.epoch) == (head.session & (1 << 64) - 1, 9)


def test_a_message_about_two_sessions_is_passed_on_as_of_the_first():
    said = pb.Proposal(session=5, epoch=2, tokens=[1]).SerializeToString()
    entry = pb.FromWorker(proposed=pb.Proposal()).SerializeToString()[:1]
    body = said + pb.Proposal(session=9, epoch=3).SerializeToString()
    entry += bytes((len(body),)) + body
    assert decode_from_worker(entry).session == 9
    head = heading(entry)
    assert head is not None and head.session == 5
    arrived = decode_to_worker(relayed(entry, head, 7))
    assert (arrived.session, arrived.epoch) == (5, 7)


def test_what_comes_with_something_else_is_not_passed_on_unread():
    sent = encode_from_worker(SHORT)
    assert heading(sent + b"\xfa\x07\x01x") is None, "a field 127, of some later version"
    stuffed = pb.FromWorker()
    stuffed.ParseFromString(sent)
    stuffed.verified.MergeFromString(b"\xfa\x07\xa0\x8d\x06" + bytes(100_000))
    assert decode_from_worker(stuffed.SerializeToString()) == SHORT
    for other in (m.Refused(m.SessionId(1), 1, m.RefusalCode.INTERNAL), m.Load(sessions=1)):
        assert heading(encode_from_worker(other)) is None


@given(st.lists(st.dictionaries(st.text(max_size=3), u64, max_size=3).map(lambda counters: m.Load(counters=counters))))
def test_a_stream_of_loads_survives_although_names_are_left_out(loads):
    said: tuple[str, ...] = ()
    heard: tuple[str, ...] = ()
    for load in loads:
        read = decode_from_worker(encode_from_worker(load, said), heard)
        assert read == load
        assert isinstance(read, m.Load)
        said, heard = tuple(load.counters), tuple(read.counters)


def test_the_names_of_counters_are_sent_once():
    load = m.Load(counters={f"a_rather_long_name_{i}": i for i in range(20)})
    assert len(encode_from_worker(load)) > 400
    assert len(encode_from_worker(load, tuple(load.counters))) < 30


@pytest.mark.parametrize(
    "wire",
    [
        pb.Load(counters=[1, 2], counter_names=["a"]),
        pb.Load(counters=[1, 2], counter_names=["a", "a"]),
        pb.Load(counters=[1, 2]),
        pb.Load(counters=[1] * 300, counter_names=[str(i) for i in range(300)]),
    ],
)
def test_counters_without_their_names_are_refused(wire):
    with pytest.raises(MalformedMessage, match="counters has") as error:
        decode_from_worker(pb.FromWorker(load=wire).SerializeToString(), ("only",))
    assert error.value.session is None


@given(st.binary(max_size=200))
def test_garbage_is_refused_or_read_but_never_breaks_the_reader(entry):
    for decode in (decode_to_worker, decode_from_worker):
        with contextlib.suppress(MalformedMessage):
            decode(entry)


def opening(besides: dict[str, Any] | None = None, **sampling: Any) -> pb.Open:
    """Nothing wrong but what is given."""
    sampling = {"top_p": 1, **sampling}
    how = pb.Sampling(**sampling)
    return pb.Open(session=3, epoch=2, tokens=[1], limits=pb.Limits(end=9), sampling=how, **(besides or {}))


@pytest.mark.parametrize(
    ("wire", "what"),
    [
        (pb.Open(session=3, epoch=2), "tokens is empty"),
        (pb.Open(session=3, epoch=2, tokens=[1, 2], limits=pb.Limits(end=2)), "limits.end is 2; it must be above"),
        (
            pb.Open(
                session=3, epoch=2, tokens=[1], limits=pb.Limits(end=9), sampling=pb.Sampling(top_p=1), priority=101
            ),
            "priority must be from -100 to 100, got 101",
        ),
        (
            pb.Open(session=3, epoch=2, tokens=[1], limits=pb.Limits(end=9), sampling=pb.Sampling(top_p=7)),
            "top_p must be in",
        ),
        (
            pb.Open(session=3, epoch=2, tokens=[1], limits=pb.Limits(end=9), sampling=pb.Sampling(temperature=-1)),
            "temperature must be",
        ),
        (opening(presence_penalty=float("nan")), "presence_penalty must be from -10000 to 10000, got nan"),
        (opening(frequency_penalty=1e300), "frequency_penalty must be from -10000 to 10000, got 1e"),
        (opening(repetition_penalty=-1), "repetition_penalty must be from 0.0001 to 10000"),
        (opening(bias_tokens=[7], bias_values=[float("inf")]), "the bias of token 7 must be from -10000 to 10000"),
        (opening(bias_tokens=[7, 8], bias_values=[1]), "bias has 1 values for 2 tokens"),
        (opening(banned=[pb.TokenList(tokens=[1]), pb.TokenList()]), "banned has an empty sequence"),
        (
            opening(allowed=range(40_000), banned=[pb.TokenList(tokens=range(30_000))]),
            "has 70000 entries; at most 65536",
        ),
        (opening({"prompt": 2}), "prompt is 2; it must be at most the 1 tokens sent"),
        (opening({"logprobs": 129}), "logprobs has 129 entries; at most 128"),
        (opening({"prompt_logprobs": 1000}), "logprobs has 1000 entries; at most 128"),
        (opening({"grammar": "x" * (1 << 20) + "y"}), "grammar has 1048577 entries; at most 1048576"),
        (opening({"prediction": [1] * ((1 << 20) + 1)}), "prediction has 1048577 entries"),
    ],
)
def test_a_malformed_opening_names_the_field_and_its_session(wire, what):
    with pytest.raises(MalformedMessage, match=what) as error:
        decode_to_worker(pb.ToWorker(open=wire).SerializeToString())
    assert (error.value.session, error.value.epoch) == (3, 2)


@pytest.mark.parametrize(
    ("wire", "what"),
    [
        (pb.Proposal(session=3, tokens=[1, 2], parents=[-1, 1]), r"parents\[1\] is 1"),
        (pb.Proposal(session=3, tokens=[1, 2], parents=[-1]), "parents has 1 entries for 2 tokens"),
        (pb.Proposal(session=3, tokens=[1] * 600), "at most 512"),
        (pb.Proposal(session=3, tokens=[1, 2], confidence=b"x"), "confidence has 1 entries for 2 tokens"),
        (pb.Proposal(session=3, tokens=[1], parents=[-1] * 513), "parents has 513 entries; at most 512"),
        (pb.Proposal(session=3, tokens=[1], confidence=b"x" * 513), "confidence has 513 entries; at most 512"),
        (pb.Proposal(session=3, tokens=[1], q=[pb.Support()] * 513), "q has 513 entries; at most 512"),
        (pb.Proposal(session=3, tokens=[1], q=[pb.Support(weights=[1] * 65)]), "q has 65 entries; at most 64"),
        (pb.Proposal(session=3, tokens=[1], q=[pb.Support(tokens=[1] * 65)]), "q has 65 entries; at most 64"),
        (pb.Proposal(session=3, tokens=range(129)), "129 tokens deep; at most 128"),
        (pb.Proposal(session=3, tokens=range(33), parents=[-1] * 33), "more than 32 tokens follow the same place"),
    ],
)
def test_a_malformed_proposal_names_the_field_and_its_session(wire, what):
    with pytest.raises(MalformedMessage, match=what) as error:
        decode_from_worker(pb.FromWorker(proposed=wire).SerializeToString())
    assert error.value.session == 3


def test_the_longest_proposal_is_shorter_than_what_a_router_reads():
    tokens = tuple(range(2**32 - MAX_SUPPORT, 2**32))
    q = (m.Support(tokens, (*[1] * (MAX_SUPPORT - 1), m.SUPPORT_TOTAL - MAX_SUPPORT + 1)),) * MAX_PROPOSED
    parents = tuple(i // MAX_CHILDREN - 1 for i in range(MAX_PROPOSED))
    fullest = m.Proposal(m.SessionId(2**64 - 1), 1, 1, 1, tokens[-1:] * MAX_PROPOSED, parents, q=q)
    entry = encode_from_worker(fullest)
    assert decode_from_worker(entry) == fullest
    assert len(entry) + 2 * MAX_PROPOSED * MAX_SUPPORT < MAX_PROPOSAL_BYTES  # weights of up to three bytes


def test_a_verification_cannot_accept_more_than_it_offered():
    wire = pb.Verification(session=3, tokens=[1], accepted=1)
    with pytest.raises(MalformedMessage, match="accepted is 1"):
        decode_from_worker(pb.FromWorker(verified=wire).SerializeToString())


@pytest.mark.parametrize(
    ("wire", "what"),
    [
        (pb.Verification(session=3, tokens=[1, 2], logprobs=[pb.Logprobs()]), "logprobs has 1 entries for 2 tokens"),
        (pb.Verification(session=3, tokens=[1] * 4097), "tokens has 4097 entries; at most 4096"),
        (pb.Verification(session=3, offered=1 << 30), "offered has 1073741824 entries; at most 1048576"),
        (
            pb.Verification(session=3, tokens=[1], logprobs=[pb.Logprobs(tokens=[5, 6], logprobs=[-1.0])]),
            "logprobs has 1 entries for 2 tokens",
        ),
        (
            pb.Verification(session=3, tokens=[1, 2], accepted=1, offered=1, sources=[1, 1]),
            "sources has 2 entries for 1 accepted tokens",
        ),
    ],
)
def test_what_is_told_of_tokens_fits_them(wire, what):
    with pytest.raises(MalformedMessage, match=what) as error:
        decode_from_worker(pb.FromWorker(verified=wire).SerializeToString())
    assert error.value.session == 3


def test_what_is_told_of_a_prompt_is_checked_when_it_is_read():
    wire = pb.Verification(session=3, tokens=[1], prompt_logprobs=[pb.Logprobs(tokens=[5, 6], logprobs=[-1.0])])
    said = decode_from_worker(pb.FromWorker(verified=wire).SerializeToString())
    assert isinstance(said, m.Verification) and len(said.prompt_logprobs) == 1
    with pytest.raises(ValueError, match="logprobs has 1 entries for 2 tokens"):
        list(said.prompt_logprobs)


def test_no_more_tokens_can_be_cached_than_there_are():
    wire = pb.Verification(session=3, position=4, tokens=[1], cached=5)
    with pytest.raises(MalformedMessage, match=r"cached is 5; it must be at most position \(4\)"):
        decode_from_worker(pb.FromWorker(verified=wire).SerializeToString())


def test_fields_of_a_later_version_are_ignored():
    close = encode_to_worker(m.Close(m.SessionId(5), 2))
    later = close + bytes([0xFA, 0x07, 0x01, 0x00])  # field 127, one byte
    assert decode_to_worker(later) == m.Close(m.SessionId(5), 2)


@given(verifications(), st.data())
def test_where_tokens_came_from_survives(verification, data):
    def of(count: int) -> tuple[m.Source, ...]:
        named = st.lists(st.sampled_from(m.Source), min_size=count, max_size=count).map(tuple)
        return data.draw(st.just(()) | named)

    attributed = replace(
        verification,
        sources=of(verification.accepted),
        refused=of(verification.offered - verification.accepted),
        recovered=data.draw(st.booleans()),
    )
    assert decode_from_worker(encode_from_worker(attributed)) == attributed


def test_refused_drafts_have_one_source_each():
    wire = pb.Verification(session=3, tokens=[1], offered=2, refused=[pb.SOURCE_LOOKUP])
    with pytest.raises(MalformedMessage, match="refused has 1 entries for 2 refused tokens"):
        decode_from_worker(pb.FromWorker(verified=wire).SerializeToString())
