"""An EAGLE-3 head on a draft worker of its own: features travel, texts stay the target's own, whatever is lost."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from draft_service.eagle import HeadLookahead
from draft_service.lookahead import LookaheadLimits
from draft_service.service import ROLE as DRAFT
from draft_service.service import DraftSettings, load_head
from engine.attention.attention import Step
from engine.build import build_target, welcome
from engine.eagle.cached import packed, unpacked
from engine.eagle.loading import load_alone, save
from engine.model import ModelError
from engine.settings import EngineSettings
from router.service import Router, RouterSettings
from speculation.drafting.draft_session import FIRST_CREDIT, MORE, PUSHED, WIDER, DraftLimits
from speculation.drafting.proposals import proposal_bytes
from speculation.messages import (
    Close,
    FeatureFormat,
    Features,
    Limits,
    Open,
    Proposal,
    Rule,
    Sampling,
    SessionId,
    Source,
    Speculation,
    Subscribe,
    Token,
    ToWorker,
    Verification,
)
from target_service.drafting.features import SENT_AT_ONCE, FeatureSender
from target_service.service import ROLE as TARGET
from target_service.verify_loop import TargetLimits, VerifyLoop
from tests.bundled import MODELS
from tests.eagle_heads import HIDDEN, LAYERS, VOCABULARY, reference, tiny_head
from tests.integration.test_failover import Process, busiest, stream
from tests.integration.test_metrics import complete, values
from tests.ports import free_port
from tests.stack import decode, dispatcher, serving_worker
from tests.unit.engine.engine_models import random_tokens, save_model

NEW = 24
GREEDY, WARM = Sampling(temperature=0.0), Sampling(temperature=0.8, seed=5)
DRAFTED = Speculation(sources=frozenset({Source.DRAFT}))
PLAIN = Speculation(enabled=False)
EAGER = LookaheadLimits(draft=DraftLimits(min_weight=0.0, bytes_a_token=1e9))


@dataclass(frozen=True)
class Folders:
    target: str
    head: str

    @property
    def of_target(self) -> EngineSettings:
        return EngineSettings(
            self.target, dtype="fp32", device="cpu", cache_tokens=2048, eagle=self.head, eagle_away=True
        )

    @property
    def of_drafter(self) -> EngineSettings:
        return EngineSettings(self.target, dtype="fp32", device="cpu", cache_tokens=2048, eagle=self.head)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    place = tmp_path_factory.mktemp("tiny")
    target = save_model("llama", place / "model", num_hidden_layers=LAYERS)
    save(tiny_head(draft_vocab_size=VOCABULARY), place / "head", dtype=torch.float32)
    return Folders(target, str(place / "head"))


def target_loop(folders: Folders) -> VerifyLoop:
    """Verifies all there is, so that what is tested does not depend on how fast the machine is."""
    engine = build_target(folders.of_target)
    assert engine.eagle is not None
    told = replace(welcome(folders.of_target, engine.model, TARGET), head=engine.eagle.fingerprint)
    return VerifyLoop(engine, told, TargetLimits(adaptive=False))


def head_lookahead(folders: Folders, wanted: str = "bf16", limits: LookaheadLimits = EAGER) -> HeadLookahead:
    engine, told = load_head(DraftSettings(folders.of_drafter, eagle_format=wanted))
    return HeadLookahead(engine, told, limits)


def opening(number: int, sampling: Sampling, speculation: Speculation = DRAFTED, length: int = 12) -> Open:
    prompt = tuple(random_tokens(length + number, seed=number))
    chosen = replace(sampling, seed=sampling.seed + number)
    return Open(SessionId(number), 1, prompt, chosen, Limits(len(prompt) + NEW), speculation=speculation)


class Pair:
    """A target and a drafter that take turns, with everything between them in the test's hands."""

    def __init__(self, target: VerifyLoop, drafter: HeadLookahead, levels: int = 3) -> None:
        self.target, self.drafter, self.levels = target, drafter, levels
        self.on_the_way: Callable[[Features], Sequence[ToWorker]] = lambda features: [features]
        self.said: dict[SessionId, list[Token]] = {}
        self.accepted = self.pushed_bytes = 0

    def open(self, one: Open, *, subscribes: bool = True) -> None:
        self.said[one.session] = []
        self.target.receive("r", one)
        self.drafter.receive("r", one)
        if subscribes:
            told = self.drafter.welcome()
            self._hear(self.target.receive("r", Subscribe(one.session, one.epoch, told.head, told.features)))

    def run(self) -> dict[SessionId, list[Token]]:
        """Until all is said."""
        for _ in range(500):
            found = self.target.step()
            self.target.validate()
            if found is None:
                return self.said
            self._hear(found)
            for _ in range(self.levels):
                self._push(self.drafter.step() or [])
                self.drafter.validate()
        raise AssertionError("it does not end")

    def _hear(self, found: Sequence[tuple[object, object]]) -> None:
        for _, message in found:
            if isinstance(message, Verification):
                self.said[message.session] += message.tokens
                self.accepted += message.accepted
                self._push(self.drafter.receive("r", message))
            elif isinstance(message, Features):
                for arriving in self.on_the_way(message):
                    self._push(self.drafter.receive("r", arriving))
            else:
                raise AssertionError(message)

    def _push(self, outgoing: Sequence[tuple[object, object]]) -> None:
        for _, message in outgoing:
            assert isinstance(message, Proposal), message
            self.pushed_bytes += proposal_bytes(message)
            self.target.receive("r", message)


def plain(folders: Folders, openings: Sequence[Open]) -> dict[SessionId, list[Token]]:
    engine = build_target(replace(folders.of_target, eagle="", eagle_away=False))
    loop = VerifyLoop(engine, welcome(folders.of_target, engine.model, TARGET), TargetLimits(adaptive=False))
    said: dict[SessionId, list[Token]] = {one.session: [] for one in openings}
    for one in openings:
        loop.receive("r", replace(one, speculation=PLAIN))
    while (found := loop.step()) is not None:
        for _, message in found:
            assert isinstance(message, Verification)
            said[message.session] += message.tokens
    return said


@pytest.mark.parametrize("rule", Rule)
@pytest.mark.parametrize("wanted", list(FeatureFormat))
def test_texts_are_the_targets_own(folders: Folders, rule: Rule, wanted: FeatureFormat) -> None:
    speculation = replace(DRAFTED, rule=rule)
    openings = [opening(n, GREEDY if n % 2 or rule is Rule.REJECTION else WARM, speculation) for n in range(5)]
    pair = Pair(target_loop(folders), head_lookahead(folders, wanted))
    for one in openings:
        pair.open(one)
    assert pair.run() == plain(folders, openings)
    assert pair.target.counters.offered_from[Source.DRAFT] > 50
    counters = pair.drafter.counters
    assert counters.features > 5 * NEW and not counters.features_refused
    assert not pair.drafter._sequences and not pair.drafter._head.cache.sequences and not pair.drafter._head._known


def test_a_head_may_push_more_than_a_draft_model(folders: Folders) -> None:
    """Each step makes its drafts new, and those that are not sent in time are of no use."""
    few = DraftLimits(min_weight=0.0, bytes_a_token=40.0)
    pair, one = (
        Pair(target_loop(folders), head_lookahead(folders, limits=LookaheadLimits(draft=few))),
        opening(1, GREEDY),
    )
    pair.open(one)
    assert pair.run() == plain(folders, [one])
    allowed = few.bytes_a_token * (FIRST_CREDIT + NEW)
    assert allowed < pair.pushed_bytes <= PUSHED * allowed


def test_a_head_may_hold_and_expand_more_drafts_than_a_draft_model(folders: Folders) -> None:
    few = DraftLimits(nodes=10, width=1, children=2)
    drafter = head_lookahead(folders, limits=LookaheadLimits(draft=few))
    one = opening(1, GREEDY)
    drafter.receive("r", one)
    session = drafter._sequences["r", one.session].session
    assert (session.trie.limits.nodes, session.limits.width, session.children) == (10 * WIDER, WIDER, 2 + MORE)


def test_the_head_reads_what_the_target_has_of_committed_tokens(folders: Folders) -> None:
    """Every row comes to what one causal pass over the true states makes of it, however it was drafted before."""
    pair = Pair(target_loop(folders), head_lookahead(folders))
    drafter, engine = pair.drafter, pair.drafter._head
    one = opening(3, GREEDY)
    pair.open(one)
    rows: dict[int, torch.Tensor] = {}
    real = engine._head.normed

    def watched(step: Step, tokens_T: torch.Tensor, positions_T: torch.Tensor) -> torch.Tensor:
        normed_TD = real(step, tokens_T, positions_T)
        ((sequence, known),) = engine._known.items()
        if sequence.pending == len(normed_TD):  # nothing was before these
            found = zip(positions_T.tolist(), normed_TD, strict=True)
            rows.update((position - 1, normed_D) for position, normed_D in found if position - sequence.first in known)
        return normed_TD

    engine._head.normed = watched  # type: ignore[method-assign]
    said = pair.run()[one.session]
    text = [*one.tokens, *said]
    stock = load_alone(folders.head, folders.target, torch.device("cpu"), torch.float32)
    expected = reference(folders.target, stock, text)
    assert len(rows) > NEW // 2
    for position, normed_D in rows.items():
        torch.testing.assert_close(normed_D, expected[position], atol=1e-2, rtol=1e-2)
    assert drafter.counters.features >= len(text) - 2


def test_features_of_several_sessions_are_each_their_own(folders: Folders) -> None:
    """Of a step that reads two prompts, in the format that each wants, in parts that follow each other."""
    target = target_loop(folders)
    (sender,) = target._drafters
    assert isinstance(sender, FeatureSender)
    formats = {SessionId(2): FeatureFormat.BF16, SessionId(3): FeatureFormat.FP8}
    for number, how in formats.items():
        target.receive("r", opening(number, GREEDY, length=70))
        target.receive("r", Subscribe(number, 1, target.welcome().head, how))
    sent = [message for _, message in target.step() or [] if isinstance(message, Features)]
    assert len(sent) == 4 and max(map(len, sent)) == SENT_AT_ONCE
    for sequence, session in sender._sessions.items():
        mine = [one for one in sent if one.session == sequence.session.opened.session]
        assert [one.position for one in mine] == [1, 1 + SENT_AT_ONCE] and mine[-1].end == session.end
        states_ND = torch.stack(list(session.kept))
        found_ND = torch.cat([unpacked(one, states_ND.shape[1], torch.float32) for one in mine])
        assert {one.format for one in mine} == {formats[mine[0].session]}
        torch.testing.assert_close(found_ND, states_ND.float(), atol=0.02, rtol=0.07)


def test_a_drafter_that_comes_late_gets_what_was_kept(folders: Folders) -> None:
    target, one = target_loop(folders), opening(2, GREEDY)
    target.receive("r", one)
    target.step()
    drafter = head_lookahead(folders)
    told = drafter.welcome()
    (sent,) = target.receive("r", Subscribe(one.session, 1, told.head, told.features))
    assert isinstance(sent[1], Features)
    assert (sent[1].position, sent[1].end) == (1, len(one.tokens) + 1)
    assert target.receive("r", Subscribe(one.session, 1, 0)) == []
    assert not any(isinstance(message, Features) for _, message in target.step() or [])


def test_features_that_cannot_be_packed_for_who_comes_late_cost_it_drafts_only(
    folders: Folders, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def without_memory(*_: object) -> None:
        raise RuntimeError("no memory for features")

    target, one = target_loop(folders), opening(2, GREEDY)
    target.receive("r", one)
    target.step()
    told = head_lookahead(folders).welcome()
    with monkeypatch.context() as failing:
        failing.setattr("target_service.drafting.features.packed", without_memory)
        assert target.receive("r", Subscribe(one.session, 1, told.head, told.features)) == []
    assert "no memory for features" in caplog.text
    assert any(isinstance(message, Features) for _, message in target.step() or [])


@pytest.mark.parametrize(
    "wanted",
    [Subscribe(SessionId(2), 1, 12345), Subscribe(SessionId(2), 7, -1), Subscribe(SessionId(9), 1, -1)],
    ids=["another head", "another epoch", "no session"],
)
def test_what_nobody_may_want_is_not_sent(folders: Folders, wanted: Subscribe) -> None:
    target = target_loop(folders)
    if wanted.head == -1:
        wanted = replace(wanted, head=target.welcome().head)
    target.receive("r", opening(2, GREEDY))
    assert target.receive("r", wanted) == []
    assert not any(isinstance(message, Features) for _, message in target.step() or [])
    assert target.counters.features_refused == 1


def spoilt(kind: str) -> Callable[[Features], Sequence[ToWorker]]:
    """What becomes of features on the way."""

    def spoil(features: Features) -> Sequence[ToWorker]:
        count = len(features)
        match kind:
            case "lost":
                return []
            case "doubled":
                return [features, features]
            case "of an old epoch":
                return [replace(features, epoch=features.epoch - 1)]
            case "of no session":
                return [replace(features, session=SessionId(99))]
            case "of another head":
                return [replace(features, head=features.head ^ 1)]
            case "NaN":
                values, _ = packed(torch.full((count, features.width), float("nan")), FeatureFormat.BF16)
                return [replace(features, values=values)]
            case "of another size":
                return [replace(features, width=features.width // 2)]
            case "of the future":
                return [replace(features, position=features.position + 10_000)]
            case "random":
                generator = torch.Generator().manual_seed(features.position)
                values, _ = packed(1e3 * torch.randn(count, features.width, generator=generator), FeatureFormat.BF16)
                return [replace(features, values=values)]
        raise AssertionError(kind)

    return spoil


REFUSED = ("of another head", "NaN", "of another size", "of the future")
KINDS = ("lost", "doubled", "of an old epoch", "of no session", *REFUSED, "random")


@pytest.mark.parametrize("kind", KINDS)
def test_features_of_any_kind_leave_the_text_alone(folders: Folders, kind: str) -> None:
    """One session's are spoilt from the second step on; the other's drafts come as ever."""
    openings = [opening(1, WARM), opening(2, GREEDY)]
    pair = Pair(target_loop(folders), head_lookahead(folders))
    spoil = spoilt(kind)

    def on_the_way(features: Features) -> Sequence[ToWorker]:
        return spoil(features) if features.session == 1 and features.position > 13 else [features]

    pair.on_the_way = on_the_way
    for one in openings:
        pair.open(one)
    assert pair.run() == plain(folders, openings)
    counters = pair.drafter.counters
    assert bool(counters.features_refused) is (kind in REFUSED)
    assert bool(counters.features_late) is (kind in ("of an old epoch", "of no session"))
    assert pair.target.counters.offered_from[Source.DRAFT] > 20


def test_without_features_nothing_is_drafted(folders: Folders) -> None:
    one = opening(1, GREEDY)
    pair = Pair(target_loop(folders), head_lookahead(folders))
    pair.open(one, subscribes=False)
    assert pair.run() == plain(folders, [one])
    assert not pair.target.counters.offered and not pair.drafter.counters.proposed


def test_a_target_that_never_hears_of_a_head_sends_no_features(folders: Folders) -> None:
    """As behind an older router, which subscribes to nothing."""
    target, one = target_loop(folders), opening(1, GREEDY)
    target.receive("r", one)
    sent: list[object] = []
    while (found := target.step()) is not None:
        sent += [message for _, message in found]
    assert sent and all(isinstance(message, Verification) for message in sent)
    assert not target.counters.features


def test_features_that_overtake_their_verification_wait_for_it(folders: Folders) -> None:
    one = opening(1, GREEDY)
    target, drafter = target_loop(folders), head_lookahead(folders)
    told = drafter.welcome()
    for machine in (target, drafter):
        machine.receive("r", one)
    target.receive("r", Subscribe(one.session, 1, told.head, told.features))
    (_, verification), (_, features) = target.step() or []
    assert isinstance(verification, Verification) and isinstance(features, Features)
    drafter.receive("r", features)
    assert drafter.counters.features == len(one.tokens)
    drafter.receive("r", verification)
    assert drafter.step() is not None
    assert drafter.counters.proposed
    drafter.receive("r", Close(one.session, 1))
    drafter.validate()


def test_what_was_drawn_from_a_q_stands_when_features_come(folders: Folders) -> None:
    """The head goes on from there; under the coupled rule it begins again at the end of the text."""
    drafted: dict[Rule, list[int]] = {}
    for rule in Rule:
        one = opening(1, WARM, replace(DRAFTED, rule=rule))
        target, drafter = target_loop(folders), head_lookahead(folders)
        target.receive("r", one)
        drafter.receive("r", one)
        told = drafter.welcome()
        target.receive("r", Subscribe(one.session, 1, told.head, told.features))
        (_, verification), (_, features) = target.step() or []
        assert isinstance(verification, Verification) and isinstance(features, Features)
        last = len(features.values) // len(features)
        drafter.receive("r", verification)
        drafter.receive("r", replace(features, values=features.values[:-last]))
        sent = drafter.step() or []
        drafter.receive("r", replace(features, position=features.end - 1, values=features.values[-last:]))
        sent += drafter.step() or []
        drafted[rule] = [message.anchor_position for _, message in sent if isinstance(message, Proposal)]
    end = len(one.tokens) + 1
    assert drafted[Rule.REJECTION] == [end, end + 1]
    assert set(drafted[Rule.COUPLED]) == {end}


@pytest.mark.parametrize("wanted", list(FeatureFormat))
def test_features_arrive_as_they_were_sent_but_for_rounding(wanted: FeatureFormat) -> None:
    states_ND = torch.randn(7, 40, generator=torch.Generator().manual_seed(1)) * torch.logspace(-3, 3, 7)[:, None]
    values, scales = packed(states_ND, wanted)
    features = Features(SessionId(1), 1, 5, 9, 40, values, wanted, scales)
    assert len(features) == 7 and features.end == 12
    found_ND = unpacked(features, 40, torch.float32)
    error = (found_ND - states_ND).abs().amax(-1) / states_ND.abs().amax(-1)
    assert error.max() < (2**-8 if wanted is FeatureFormat.BF16 else 2**-4)


def test_a_router_passes_features_on_to_the_drafter_of_the_session(folders: Folders) -> None:
    """Real streams, several sessions at once, one of them without drafts."""

    async def run() -> None:
        target, drafter = target_loop(folders), head_lookahead(folders)
        async with AsyncExitStack() as stack:
            up = await stack.enter_async_context(serving_worker(target, target._engine, TARGET))
            head = await stack.enter_async_context(serving_worker(drafter, drafter._head, DRAFT))
            serving = await stack.enter_async_context(dispatcher([up.worker.address], [head.worker.address]))
            openings = [opening(n, WARM if n % 2 else GREEDY) for n in range(1, 5)]
            expected = plain(folders, openings)
            spoken = [DRAFTED, DRAFTED, DRAFTED, PLAIN]
            found = await asyncio.gather(
                *(
                    decode(serving, one.tokens, NEW, one.sampling, speculation=speculation)
                    for one, speculation in zip(openings, spoken, strict=True)
                )
            )
            assert [result.tokens for result in found] == list(expected.values())
            assert target.counters.features and drafter.counters.features
            assert not drafter.counters.features_refused and not target.counters.features_refused
            assert serving.totals.malformed == 0

    asyncio.run(run())


async def test_metrics_say_what_became_of_features() -> None:
    """Beside what a session brings there are a subscription to no session, and features of none."""
    bundled = Folders(str(MODELS / "target"), str(MODELS / "eagle"))
    target, drafter = target_loop(bundled), head_lookahead(bundled)
    target.receive("r", Subscribe(SessionId(9), 1, 1))
    drafter.receive("r", Features(SessionId(9), 1, 1, 1, width=1, values=bytes(2)))
    async with (
        serving_worker(target, target._engine, TARGET) as up,
        serving_worker(drafter, drafter._head, DRAFT) as head,
        asyncio.timeout(120),
    ):
        router = Router(RouterSettings([up.worker.address], [head.worker.address], port=0))
        await router.start()
        try:
            async with httpx.AsyncClient(base_url=router.address, timeout=60, trust_env=False) as client:
                while not drafter.counters.features:  # until the router knows the drafter
                    await complete(client)
                told: dict[str, float] = {}
                while (
                    told.get("paceline_features_received_tokens_total") != drafter.counters.features
                    or told["paceline_feature_tokens_total"] != target.counters.features
                ):
                    told = values((await client.get("/metrics")).text)
        finally:
            await router.stop()
    assert told["paceline_feature_tokens_total"] >= told["paceline_features_received_tokens_total"] > 0
    assert told["paceline_features_refused_total"] == 1
    assert told["paceline_features_dropped_total"] == 1


@pytest.mark.parametrize("beside", ["another head", "no head"])
def test_a_head_that_no_target_feeds_gets_no_sessions(folders: Folders, beside: str) -> None:
    async def run() -> None:
        target, drafter = target_loop(folders), head_lookahead(folders)
        head = drafter._welcome.head ^ 1 if beside == "another head" else 0
        target._welcome = replace(target._welcome, head=head)
        async with AsyncExitStack() as stack:
            up = await stack.enter_async_context(serving_worker(target, target._engine, TARGET))
            idle = await stack.enter_async_context(serving_worker(drafter, drafter._head, DRAFT))
            serving = await stack.enter_async_context(dispatcher([up.worker.address], [idle.worker.address]))
            one = opening(1, GREEDY)
            found = await decode(serving, one.tokens, NEW, one.sampling, speculation=DRAFTED)
            assert found.tokens == plain(folders, [one])[one.session]
            assert not drafter.counters.verified and not target.counters.features

    asyncio.run(run())


@pytest.mark.thorough
@pytest.mark.slow
async def test_killed_workers_do_not_change_the_text(slow_target: Path, tmp_path: Path) -> None:
    """kill -9 of the drafter, then of the target: the next ones go on, and get features again."""
    changes: dict[str, Any] = {"vocab_size": 4096, "draft_vocab_size": 4096, "target_hidden_size": 768}
    save(tiny_head(**changes, aux_layers=(1, 3, 5)), tmp_path / "head", embedding=True)
    flags = ["--draft-eagle", str(tmp_path / "head")]
    processes = [
        Process(role, slow_target, f"127.0.0.1:{free_port()}", flags=[*flags, *more])
        for role, more in 2 * [("target", ["--eagle-at", "drafter"]), ("draft", ["--eagle-format", "fp8"])]
    ]
    addresses = {role: [each.address for each in processes if each.role == role] for role in ("target", "draft")}
    async with AsyncExitStack() as stack:
        for process in processes:
            stack.push_async_callback(process.end)
        await asyncio.gather(*(process.start() for process in processes))
        async with dispatcher(addresses["target"], addresses["draft"]) as serving:
            plain, _, _ = await stream(serving, speculate=False)

            def kill(role: str) -> Callable[[], None]:
                return lambda: busiest(serving, processes, role).signal(signal.SIGKILL)

            killed, _, reopened = await stream(serving, kill("draft"))
            assert (killed, reopened) == (plain, 0)
            killed, _, reopened = await stream(serving, kill("target"))
            assert (killed, reopened) == (plain, 1)
            up = [peer for peer in serving.pool.peers.values() if peer.welcome is not None]
            assert len(up) == 2
            assert all(peer.load.counters["features"] for peer in up)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"assistant": "./small"}, r"an EAGLE head drafts alone, .* leave assistant \(./small\) out"),
        ({"target_tokenizer": "./other"}, r"leave target_tokenizer \(./other\) out"),
    ],
)
def test_what_a_head_has_no_use_for_is_refused(folders: Folders, changes: dict[str, str], words: str) -> None:
    with pytest.raises(ModelError, match=words):
        load_head(replace(DraftSettings(folders.of_drafter), **changes))  # type: ignore[arg-type]


def test_a_head_for_another_target_is_refused(folders: Folders, tmp_path: Path) -> None:
    save(tiny_head(target_hidden_size=2 * HIDDEN), tmp_path / "head", embedding=True, dtype=torch.float32)
    settings = DraftSettings(replace(folders.of_drafter, eagle=str(tmp_path / "head")))
    with pytest.raises(ModelError, match=f"reads hidden states of {2 * HIDDEN} numbers"):
        load_head(settings)


def test_the_fingerprint_tells_heads_and_targets_apart(folders: Folders, tmp_path: Path) -> None:
    _, told = load_head(DraftSettings(folders.of_drafter))
    assert told.head == target_loop(folders).welcome().head != 0
    other = tiny_head(draft_vocab_size=VOCABULARY, rms_norm_eps=1e-6)
    save(other, tmp_path / "head", dtype=torch.float32)
    assert load_head(DraftSettings(replace(folders.of_drafter, eagle=str(tmp_path / "head"))))[1].head != told.head
    other_target = save_model("llama", tmp_path / "model", num_hidden_layers=LAYERS + 1)
    assert load_head(DraftSettings(replace(folders.of_drafter, model=other_target)))[1].head != told.head
