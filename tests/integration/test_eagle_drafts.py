"""What an EAGLE-3 head at a target drafts: shaped as the text will be, with the target's noise or none of it."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

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
from tests.eagle_heads import (
    ALONE,
    GREEDY,
    LAYERS,
    LINK,
    NEW,
    VOCABULARY,
    WARM,
    engine_of,
    loop_of,
    of_eagle,
    opening,
    plain_texts,
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


def says(monkeypatch: pytest.MonkeyPatch, logits_V: Tensor) -> None:
    """Have every head say this of every place."""

    class Says(CachedHead):
        def logits(self, normed_RD: Tensor, vocabulary: int) -> Tensor:
            return logits_V.expand(len(normed_RD), vocabulary)

    monkeypatch.setattr("target_service.drafting.draft_model.CachedHead", Says)


def test_requests_shape_what_a_head_proposes(model: Model) -> None:
    """A token that is never allowed is not drafted, and the text is as without a head."""
    one = opening(1, replace(GREEDY, allowed=tuple(range(3, 40)), repetition_penalty=1.3))
    loop = loop_of(engine_of(model, tiny_head()))
    loop.receive(LINK, one)
    said: list[Token] = []
    drafted: set[Token] = set()
    while (sent := loop.step()) is not None:
        for session in of_eagle(loop)._sessions.values():
            drafted |= {*session.drafts._tree.tokens}
        said += sent[0][1].tokens if isinstance(sent[0][1], Verification) else ()
    assert said == plain_texts(model, [one])[1]
    assert drafted and drafted <= set(one.sampling.allowed)


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


def test_under_the_rejection_rule_guesses_do_not_know_the_seed(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is guessed behind the same text is the same, whatever is drawn next; and it is a chain."""
    monkeypatch.setattr("speculation.drafting.heads.MIN_CHANCE", 0.0)
    drafted: defaultdict[Token, list[tuple[Any, ...]]] = defaultdict(list)
    for seed in range(1, 9):
        loop = loop_of(engine_of(model, tiny_head()))
        opened = opening(1, Sampling(temperature=0.9, top_k=2, seed=seed), replace(ALONE, rule=Rule.REJECTION))
        loop.receive(LINK, opened)
        loop.step()
        (sequence,) = loop._sequences.values()
        of_eagle(loop).draft([sequence], [sequence], [sequence])
        tree = sequence.session.candidates(8)
        assert len(tree.nodes) > 1 and not tree.branched
        drafted[sequence.session.tokens[-1]].append((tree.tokens, tree.parents))
    assert max(map(len, drafted.values())) > 1
    assert all(len(set(of_a_token)) == 1 for of_a_token in drafted.values())


def test_coupled_guesses_share_the_noise_of_the_target(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """A head that knows the distribution exactly draws what the target draws, though it is flat and hot."""
    monkeypatch.setattr("speculation.drafting.heads.MIN_CHANCE", 0.0)
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
    assert not of_eagle(loop)._sessions and not of_eagle(loop)._head.cache.sequences
