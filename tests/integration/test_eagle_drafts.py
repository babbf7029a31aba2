"""What an EAGLE-3 head at a target drafts: shaped as the text will be, with the target's noise or none of it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from engine.build import build_target
from engine.eagle.cached import CachedHead
from engine.loading.loader import Model
from engine.sampling.sampling import Draw, filtered_log_probs
from engine.settings import EngineSettings
from engine.step import Engine
from speculation.messages import (
    Close,
    Limits,
    Open,
    Rule,
    Sampling,
    SessionId,
    Source,
    Speculation,
    Token,
    Verification,
)
from target_service.scheduler import Budget
from tests.by_rows import Recorder, by_rows
from tests.eagle_heads import (
    ALONE,
    GREEDY,
    LAYERS,
    LINK,
    NEW,
    VOCABULARY,
    WARM,
    assert_empty,
    drafted,
    engine_of,
    loop_of,
    of_eagle,
    opening,
    plain_texts,
    recorded_head,
    texts,
    tiny_head,
)
from tests.unit.engine.engine_models import Stock, load_tiny, random_tokens, save_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_model("llama", tmp_path_factory.mktemp("tiny") / "model", num_hidden_layers=LAYERS)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return load_tiny("llama", tmp_path_factory.mktemp("loaded"), num_hidden_layers=LAYERS)


def test_a_head_is_recorded_beside_a_target_that_is(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on CUDA: its states are fused in the target's recorded steps, its levels launched; the text is the same."""
    monkeypatch.setattr("target_service.drafting.eagle.CachedHead", recorded_head)
    openings = [opening(n, WARM if n % 2 else GREEDY) for n in range(4)]
    engine = by_rows(model, record=Recorder(), eagle=tiny_head())
    assert engine.fuses and engine.record_steps()
    loop = loop_of(engine)
    head = of_eagle(loop)
    assert head._levels.max_sessions, "levels are not launched"
    assert texts(loop, openings) == plain_texts(model, openings)
    assert loop.counters.offered_from[Source.EAGLE] > 50
    assert_empty(loop)


def says(monkeypatch: pytest.MonkeyPatch, logits_V: Tensor) -> None:
    """Have every head say this of every place."""

    class Says(CachedHead):
        def said(self, own_RX: Tensor, vocabulary: int) -> Tensor:
            return logits_V.expand(len(own_RX), vocabulary)

    monkeypatch.setattr("target_service.drafting.eagle.CachedHead", Says)


def test_requests_shape_what_a_head_proposes(model: Model) -> None:
    """A token that is never allowed is not drafted, and the text is as without a head."""
    one = opening(1, replace(GREEDY, allowed=tuple(range(3, 40)), repetition_penalty=1.3))
    loop = loop_of(engine_of(model, tiny_head()))
    loop.receive(LINK, one)
    said: list[Token] = []
    proposed: set[Token] = set()
    while (sent := loop.step()) is not None:
        proposed |= {node.token for trie in drafted(loop) for node in trie}
        said += sent[0][1].tokens if isinstance(sent[0][1], Verification) else ()
    assert said == plain_texts(model, [one])[1]
    assert proposed and proposed <= set(one.sampling.allowed)


def test_the_rejection_rule_keeps_its_law(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two tokens, the second is guessed by a head and kept by a coin: its distribution is the target's."""
    engine = build_target(EngineSettings(folder, dtype="fp32", device="cpu", cache_tokens=4096))
    prompt = tuple(random_tokens(9, seed=4))
    sampling = Sampling(temperature=1.2, top_k=2)
    stock = Stock(folder)

    def law(tokens: Sequence[Token]) -> dict[Token, float]:
        p_V = filtered_log_probs(stock(tokens)[-1:], [Draw(sampling, 0)])[0].exp()
        return {int(token): float(p_V[token]) for token in p_V.nonzero().flatten()}

    firsts = law(prompt)
    pairs = {(one, other): p * q for one, p in firsts.items() for other, q in law([*prompt, one]).items()}
    likely = max(firsts, key=lambda token: firsts[token])
    seconds = law([*prompt, likely])
    guess = min(seconds, key=lambda token: abs(seconds[token] - 0.5))
    says(monkeypatch, 9.0 * torch.nn.functional.one_hot(torch.tensor(guess), VOCABULARY))
    loop = loop_of(Engine(engine.model, engine.cache, eagle=tiny_head()), running=64, budget=Budget(verify=128))
    speculation = replace(ALONE, rule=Rule.REJECTION)
    count = 480
    openings = [
        Open(SessionId(n), 1, prompt, replace(sampling, seed=n), Limits(len(prompt) + 3), speculation=speculation)
        for n in range(count)
    ]
    loop._limits = replace(loop._limits, waiting=count)
    found = Counter(tuple(said[:2]) for said in texts(loop, openings).values())
    assert loop.counters.accepted_from[Source.EAGLE] > count / 20
    assert found.keys() <= pairs.keys()
    chi = sum((found[pair] - count * p) ** 2 / (count * p) for pair, p in pairs.items())
    freedom = len(pairs) - 1
    assert chi < freedom + 4 * math.sqrt(2 * freedom), (chi, freedom)


def test_under_the_rejection_rule_drafts_are_chains_that_come_with_their_q(model: Model) -> None:
    """And what the target decides with is no noise of theirs: the law above would not hold."""
    loop = loop_of(engine_of(model, tiny_head()))
    openings = [
        opening(n, Sampling(temperature=0.9, top_k=3, seed=n), replace(ALONE, rule=Rule.REJECTION)) for n in range(4)
    ]
    for one in openings:
        loop.receive(LINK, one)
    seen = 0
    while loop.step() is not None:
        for trie in drafted(loop):
            assert all(node.q is not None and len(node.children) <= 1 for node in trie)
            seen += len(trie)
    assert seen > 20


def test_coupled_guesses_share_the_noise_of_the_target(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """A head that knows the distribution exactly draws what the target draws, though it is flat and hot."""
    logits_V = torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(1))
    says(monkeypatch, logits_V)
    engine = engine_of(model, tiny_head())
    plain_run = engine.run
    engine.run = lambda chunks: logits_V.expand(len(plain_run(chunks)), VOCABULARY)  # type: ignore[method-assign]
    loop = loop_of(engine)
    texts(loop, [opening(1, Sampling(temperature=1.0, seed=9))])
    assert loop.counters.accepted_from[Source.EAGLE] >= NEW // 2
    assert loop.counters.steps <= NEW // 2


def test_cancelled_sessions_leave_nothing_and_others_do_not_notice(model: Model) -> None:
    openings = [opening(n, WARM, Speculation()) for n in range(4)]
    expected = plain_texts(model, openings)
    loop = loop_of(engine_of(model, tiny_head()))
    for one in openings:
        loop.receive(LINK, one)
    said: dict[int, list[Token]] = {n: [] for n in range(4)}
    for step in range(10 * NEW):
        if step == 3:
            loop.receive(LINK, Close(openings[1].session, 1))
        sent = loop.step()
        if sent is None:
            break
        for _, message in sent:
            assert isinstance(message, Verification)
            said[message.session] += message.tokens
    assert {n: text for n, text in said.items() if n != 1} == {n: text for n, text in expected.items() if n != 1}
    assert loop.load().free_tokens == loop.load().capacity_tokens
    assert_empty(loop)


@pytest.mark.parametrize("fingerprint", [0, 7], ids=["here", "away"])
def test_states_that_cannot_be_fused_cost_speed_only(
    folder: str, fingerprint: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As where a device has no memory left for them."""
    model, head, fused = build_target(EngineSettings(folder, dtype="fp32", device="cpu")).model, tiny_head(), 0

    def fuse(aux_NA: Tensor) -> Tensor:
        nonlocal fused
        fused += 1
        if fused == 4:
            raise RuntimeError("no memory for states")
        return head.fc(aux_NA)

    monkeypatch.setattr(head, "fuse", fuse)
    head.fingerprint = fingerprint
    openings = [opening(n, WARM if n % 2 else GREEDY) for n in range(4)]
    engine = engine_of(model, head)
    engine.fuses = False
    loop = loop_of(engine)
    assert texts(loop, openings) == plain_texts(model, openings)
    assert fused >= 4 and "no memory for states" in caplog.text
    assert (loop.counters.draft_faults > 0) == (fingerprint == 0)
