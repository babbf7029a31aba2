"""Registered draft sources: their names, their faults, how an operator names them, and how they cross the wire."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from protos.paceline.v1 import worker_pb2 as pb
from router.errors import ApiError
from router.schema.request_schema import Body
from router.schema.requests import speculation_of
from speculation.events import Own
from speculation.messages import AllBut, Limits, Open, Sampling, SessionId, Source, Speculation, Token, Verification
from speculation.sources import registry
from speculation.sources.registry import MAX_SOURCES, SourceError, _makers, register, registered
from speculation.verifying.target_session import TargetSession
from target_service.service import load_sources
from transport.codec import decode_from_worker, decode_to_worker, encode_from_worker, encode_to_worker

OPENED = Open(SessionId(1), 1, (1, 2, 3), Sampling(), Limits(50))


@dataclass(frozen=True)
class Said:
    tokens: Any
    confidence: Any
    given_parents: Any = None

    @property
    def parents(self) -> Any:
        return range(-1, len(self.tokens) - 1) if self.given_parents is None else self.given_parents


class Says:
    """A source that says what it is told to."""

    source, depth = "says", 4

    def __init__(self, said: Any = None, error: str = "") -> None:
        self.said, self.error = said, error

    def extend(self, tokens: Sequence[Token]) -> None:
        if self.error == "extend":
            raise RuntimeError("no,\nand no")

    def propose(self, depth: int) -> Any:
        return self.said


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    before = registered()
    yield
    for name in set(registered()) - set(before):
        del _makers[name]


@pytest.mark.parametrize("name", ["", "Upper", "a b", "9a", "x" * 33, "a\n", *Source, *Own])
def test_names_are_short_plain_and_free(name: str) -> None:
    with pytest.raises(SourceError, match="draft source"):
        register(name, lambda _: None)
    assert name not in registered()


def test_a_name_is_for_one_maker_and_there_are_few() -> None:
    register("one", Says)
    register("one", Says)
    with pytest.raises(SourceError, match="taken"):
        register("one", lambda _: None)
    for number in range(MAX_SOURCES - len(registered())):
        register(f"more-{number}", Says)
    with pytest.raises(SourceError, match=f"there are {MAX_SOURCES} already"):
        register("too-many", Says)


def drafts_of(session: TargetSession) -> list[tuple[Token, str]]:
    return [(node.token, node.source) for node in session.candidates(8).nodes]


def test_sessions_draft_with_what_is_registered_when_they_are_opened() -> None:
    register("says", lambda _: Says(Said((7, 8), (0.9, 0.8))))
    register("absent", lambda _: None)
    session = TargetSession(OPENED, vocabulary=10)
    del _makers["says"]
    assert drafts_of(session) == [(7, "says"), (8, "says")]
    assert drafts_of(TargetSession(OPENED, vocabulary=10)) == []
    assert session.faults == {}


@pytest.mark.parametrize(
    "maker",
    [
        lambda _: 1 // 0,
        lambda _: object(),
        lambda _: Says(error="extend"),
        lambda _: Says(None),
        lambda _: Says(Said((7,), ())),
        lambda _: Says(Said((7,) * 5, (0.5,) * 5)),
        lambda _: Says(Said(("7",), (0.5,))),
        lambda _: Says(Said((7,), ("x",))),
        lambda _: Says(Said((7, 8), (0.5, 0.5), (-1, 1))),
        lambda _: Says(Said((7, 8), (0.5, 0.5), (-2, 0))),
        lambda _: Says(Said((7,) * 257, (0.5,) * 257, (-1,) * 257)),
    ],
    ids=[
        *("raises", "is none", "fails to read", "says nothing", "shapes", "too deep", "no tokens", "no confidence"),
        *("its own parent", "no parent", "too many"),
    ],
)
def test_a_fault_costs_the_drafts_of_the_source_and_nothing_else(maker: Any) -> None:
    register("faulty", maker)
    register("fine", lambda _: Says(Said((9,), (0.5,))))
    session = TargetSession(OPENED, vocabulary=10)
    assert drafts_of(session) == [(9, "fine")]
    assert list(session.faults) == ["faulty"]
    assert "\n" not in session.faults["faulty"]


def test_a_source_may_say_a_tree() -> None:
    register("says", lambda _: Says(Said((7, 8, 9), (0.6, 0.3, 0.5), (-1, -1, 1))))
    nodes = TargetSession(OPENED, vocabulary=10).candidates(8).nodes
    assert {(node.parent.token if node.parent and node.parent.parent else None, node.token) for node in nodes} == {
        (None, 7),
        (None, 8),
        (8, 9),
    }


@pytest.mark.parametrize("token", [-1, 10, 1 << 40])
def test_tokens_that_do_not_exist_are_not_drafted(token: Token) -> None:
    register("says", lambda _: Says(Said((7, token, 8), (0.9, 0.9, 0.9))))
    assert drafts_of(TargetSession(OPENED, vocabulary=10)) == [(7, "says")]


def test_requests_name_what_exists() -> None:
    def steered(*sources: str) -> Speculation:
        return speculation_of(Body.read({"speculation": {"sources": list(sources)}}), Speculation(), ["says"])

    assert steered("says", "draft").sources == {"says", Source.DRAFT}
    with pytest.raises(ApiError, match="among draft, lookup, prediction, grammar, eagle, suffix, says, got"):
        steered("other")
    with pytest.raises(ApiError, match=r'got \["medusa"\]'):
        steered("medusa")
    with pytest.raises(ApiError, match="true or false"):
        speculation_of(Body.read({"speculation": {"remember": 1}}), Speculation())


@pytest.mark.parametrize(
    "sources",
    [AllBut(), AllBut(frozenset({Source.LOOKUP, "says"})), frozenset(), frozenset({"says", "other", Source.SUFFIX})],
)
def test_any_choice_of_sources_crosses_the_wire(sources: Any) -> None:
    opened = replace(OPENED, speculation=Speculation(sources=sources, remember=False))
    assert decode_to_worker(encode_to_worker(opened)) == opened


def test_routers_that_know_no_names_choose_as_they_did() -> None:
    entry = pb.ToWorker()
    entry.ParseFromString(encode_to_worker(OPENED))
    for numbers, chosen in (([], AllBut()), ([pb.SOURCE_LOOKUP], {Source.LOOKUP})):
        entry.open.speculation.CopyFrom(pb.Speculation(enabled=True, sources=numbers))
        opened = decode_to_worker(entry.SerializeToString())
        assert isinstance(opened, Open)
        assert opened.speculation.sources == chosen


def test_names_of_sources_are_told_of_every_token() -> None:
    sources, refused = ("says", Source.DRAFT, "other", "says"), (Source.SUFFIX, "other")
    told = Verification(SessionId(1), 1, 5, (1, 2, 3, 4, 5), 9, 4, 6, sources=sources, refused=refused)
    assert decode_from_worker(encode_from_worker(told)) == told


PLUGIN = """
from speculation.sources.registry import register

class Mine:
    source = "{name}"
    depth = 2
    def __init__(self, opened): ...
    def extend(self, tokens): ...
    def propose(self, depth): ...

class Nameless: ...
{last}
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    monkeypatch.syspath_prepend(tmp_path)
    name = f"drafts_{abs(hash(request.node.nodeid))}"
    (tmp_path / f"{name}.py").write_text(PLUGIN.format(name="mine", last=""))
    (tmp_path / f"{name}_all.py").write_text(PLUGIN.format(name="all", last='register("all", Mine)'))
    (tmp_path / f"{name}_bad.py").write_text("raise RuntimeError('two\\nlines')")
    return name


def test_operators_name_modules_and_what_is_in_them(module: str) -> None:
    load_sources([f"{module}:Mine", f"{module}_all", f"{module}_all:Mine"])
    assert registered()[-2:] == ("mine", "all")


@pytest.mark.parametrize(
    ("entry", "why"),
    [
        ("{}", "registers none"),
        ("{}:Other", "no class or function 'Other'"),
        ("{}:Nameless", "no class or function 'Nameless' with a name"),
        ("{}_bad", "cannot be imported \\(RuntimeError: two lines\\)"),
        ("{}_gone", "cannot be imported \\(ModuleNotFoundError"),
        ("../{}", "is not MODULE or MODULE:NAME"),
        (":Mine", "is not MODULE or MODULE:NAME"),
    ],
)
def test_what_cannot_be_loaded_ends_in_one_line(module: str, entry: str, why: str) -> None:
    assert registry.registered() == ()
    with pytest.raises(SourceError, match=why) as refused:
        load_sources([entry.format(module)])
    assert "\n" not in str(refused.value)
