"""Peers of a schema that knows nothing of EAGLE heads read all else, and pass over what is said of heads."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import pytest
from google.protobuf import descriptor_pb2, message_factory

from protos.paceline.v1 import worker_pb2 as pb
from speculation.messages import (
    FeatureFormat,
    Features,
    Limits,
    Load,
    Open,
    Sampling,
    Source,
    Subscribe,
    Verification,
    Welcome,
)
from tests.unit.transport.test_incoming import HERE, ONE, Router, verified
from transport import codec
from transport.codec import UnknownKind, decode_to_worker, encode_from_worker, encode_to_worker

OF_HEADS = {"ToWorker": {"subscribe", "features"}, "FromWorker": {"features"}, "Welcome": {"head", "features"}}
"""Fields, by the message that they are in."""
FEATURES = Features(ONE, HERE, 3, 9, 4, bytes(8 * 2000))
MANY = 100


def older_schema() -> dict[str, Any]:
    """Its messages, by name."""
    file = descriptor_pb2.FileDescriptorProto()
    pb.DESCRIPTOR.CopyToProto(file)
    for message in file.message_type:
        later = OF_HEADS.get(message.name, set())
        kept = [field for field in message.field if field.name not in later]
        assert len(message.field) - len(kept) == len(later)
        del message.field[:]
        message.field.extend(kept)
    found = message_factory.GetMessages([file])
    return {name: found[f"paceline.v1.{name}"] for name in OF_HEADS}


def read_as_older(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on."""
    for name, message in older_schema().items():
        monkeypatch.setattr(pb, name, message)
    monkeypatch.delitem(codec.RELAYED, codec._FEATURES)


def test_a_router_hears_all_else_of_a_target_that_sends_features(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    router, load = Router(), Load(sessions=2)
    router.join(ONE)
    entries = [encode_from_worker(message) for message in (verified(ONE, 3), *[FEATURES] * MANY, load)]
    read_as_older(monkeypatch)
    router.take(*entries)
    router.incoming.finish()
    assert not router.given_up
    assert len(router.sent) == len(router.passed) == 1
    assert (router.heard[0], router.heard[-1]) == (verified(ONE, 3), load)
    assert [type(message) for message in router.heard[1:-1]] == [UnknownKind] * MANY
    assert [(line.levelname, "it is newer" in line.getMessage()) for line in caplog.records] == [("INFO", True)]


@pytest.mark.parametrize("told", [Subscribe(ONE, HERE, 9), FEATURES], ids=["a target", "a drafter"])
def test_a_worker_takes_what_is_said_of_heads_for_a_kind_yet_to_come(
    monkeypatch: pytest.MonkeyPatch, told: Subscribe | Features
) -> None:
    """Which ends no stream, and no session; a verification reads as ever."""
    entry, verification = encode_to_worker(told), encode_to_worker(verified(ONE, 3))
    read_as_older(monkeypatch)
    assert decode_to_worker(verification) == verified(ONE, 3)
    with pytest.raises(UnknownKind):
        decode_to_worker(entry)


OF_MEDUSA = 5
"""The number of a source that older peers may still name."""


def test_a_source_that_there_is_no_more_is_one_that_means_nothing() -> None:
    """Who drafted a token is taken for a draft model, as of any number yet to come; nobody is allowed by it."""
    said = replace(verified(ONE, 3), tokens=(4, 5), accepted=1, offered=1, sources=(Source.LOOKUP,))
    told = pb.FromWorker.FromString(encode_from_worker(said))
    told.verified.sources[:] = [OF_MEDUSA]
    heard = codec.decode_from_worker(told.SerializeToString())
    assert isinstance(heard, Verification) and heard.sources == (Source.DRAFT,)
    asked = pb.ToWorker.FromString(encode_to_worker(Open(ONE, HERE, (1, 2), Sampling(), Limits(9))))
    for numbers, allowed in (([OF_MEDUSA, 2], {Source.LOOKUP}), ([OF_MEDUSA], set())):
        asked.open.speculation.sources[:] = numbers
        asked.open.speculation.all_but = False
        opened = decode_to_worker(asked.SerializeToString())
        assert isinstance(opened, Open) and opened.speculation.sources == allowed


def test_who_a_worker_with_a_head_is_reads_the_same_but_for_the_head() -> None:
    entry = encode_from_worker(Welcome("draft", "m", 100, 200, head=9, features=FeatureFormat.FP8))
    new, old = (
        {field.name: value for field, value in schema.FromString(entry).welcome.ListFields()}
        for schema in (pb.FromWorker, older_schema()["FromWorker"])
    )
    assert new.keys() - old.keys() == OF_HEADS["Welcome"]
    assert old.items() <= new.items()
    assert (old["role"], old["vocabulary"], old["context"]) == ("draft", 100, 200)
