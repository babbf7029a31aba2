"""Medusa heads at a target worker: the text is the target's own, and what the heads read is the right hidden state."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
import torch
from torch import Tensor

from engine.build import build, build_target, welcome
from engine.cache.kv_cache import KVCache
from engine.interface import StepEngine
from engine.loading.loader import Model
from engine.medusa import MedusaHeads, save
from engine.sampling.sampling import Draw, filtered_log_probs
from engine.settings import EngineSettings
from engine.step import Engine
from speculation import digest as digests
from speculation.messages import (
    ANCHOR,
    Close,
    Limits,
    Open,
    Proposal,
    Rule,
    Sampling,
    SessionId,
    Source,
    Speculation,
    Token,
    Verification,
)
from target_service import scheduler
from target_service.scheduler import Budget
from target_service.verify_loop import TargetLimits, VerifyLoop
from tests.bundled import MODELS, held_out_prompts
from tests.ranks import needs_no_gpu, on_ranks
from tests.unit.engine.engine_models import Stock, load_tiny, random_tokens, save_model

LINK = "router"
HIDDEN, VOCABULARY = 64, 256
NEW = 16
HEADS_ALONE = Speculation(sources=frozenset({Source.MEDUSA}))
PLAIN = Speculation(enabled=False)
GREEDY, WARM = Sampling(temperature=0.0), Sampling(temperature=0.7, top_k=12, seed=5)


def tiny_heads(heads: int = 3) -> MedusaHeads:
    """Random ones that the tiny models of these tests have something in common with."""
    made = MedusaHeads(HIDDEN, VOCABULARY, heads, 1, shared=True)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.normal_(0.0, 0.15, generator=generator)
    return made


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_model("llama", tmp_path_factory.mktemp("tiny") / "model", num_hidden_layers=2)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return load_tiny("llama", tmp_path_factory.mktemp("loaded"), num_hidden_layers=2)


def engine_of(model: Model, heads: MedusaHeads | None, capacity: int = 1024) -> Engine:
    cache = KVCache(model.layers, capacity, block=model.block, dtype=model.dtype, device=model.device)
    return Engine(model, cache, heads=heads)


def loop_of(engine: StepEngine, **limits: object) -> VerifyLoop:
    """Verifies all there is, so that what is tested does not depend on how fast the machine is."""
    chosen = replace(TargetLimits(adaptive=False), **limits)  # type: ignore[arg-type]
    return VerifyLoop(engine, welcome(EngineSettings("tiny"), engine.model, "target"), chosen)


def opening(number: int, sampling: Sampling, speculation: Speculation, new: int = NEW) -> Open:
    prompt = tuple(random_tokens(10 + number, seed=number))
    chosen = replace(sampling, seed=sampling.seed + number)
    return Open(SessionId(number), 1, prompt, chosen, Limits(len(prompt) + new), speculation=speculation)


def texts(loop: VerifyLoop, openings: Sequence[Open]) -> dict[int, list[Token]]:
    """What the sessions say, all at once."""
    for one in openings:
        loop.receive(LINK, one)
    said: dict[int, list[Token]] = {one.session: [] for one in openings}
    while (sent := loop.step()) is not None:
        for _, message in sent:
            assert isinstance(message, Verification), message
            said[message.session] += message.tokens
    assert loop.load().free_tokens == loop.load().capacity_tokens
    return said


@pytest.mark.parametrize("rule", Rule)
@pytest.mark.parametrize(
    ("sources", "capacity"),
    [({Source.MEDUSA}, 1024), (set(Source) - {Source.DRAFT}, 72)],
    ids=["alone", "among others, preempted"],
)
def test_texts_are_those_without_heads(
    model: Model, rule: Rule, sources: set[Source], capacity: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Greedy and sampled, many at once; under the rejection rule where nothing is random."""
    monkeypatch.setattr(scheduler, "HEADROOM", 0)
    openings = [opening(n, GREEDY if n % 2 or rule is Rule.REJECTION else WARM, PLAIN) for n in range(6)]
    expected = texts(loop_of(engine_of(model, None)), openings)
    speculation = Speculation(rule=rule, sources=frozenset(sources))
    loop = loop_of(engine_of(model, tiny_heads(), capacity))
    assert texts(loop, [replace(one, speculation=speculation) for one in openings]) == expected
    assert loop.counters.offered_from[Source.MEDUSA] > 50
    assert bool(loop.counters.preempted) is (capacity < 100)


def test_requests_shape_what_heads_propose(model: Model) -> None:
    """A token that is never allowed is not drafted for the next place, and the text is as without heads."""
    shaped = replace(GREEDY, allowed=tuple(range(3, 40)), repetition_penalty=1.3)
    expected = texts(loop_of(engine_of(model, None)), [opening(1, shaped, PLAIN)])
    loop = loop_of(engine_of(model, tiny_heads()))
    loop.receive(LINK, opening(1, shaped, HEADS_ALONE))
    said: list[Token] = []
    drafted: set[Token] = set()
    while (sent := loop.step()) is not None:
        for sequence in loop._sequences.values():
            drafted |= {node.token for node in sequence.session.trie}
        said += sent[0][1].tokens if isinstance(sent[0][1], Verification) else ()
    assert said == expected[1]
    assert drafted <= set(shaped.allowed)


def test_a_request_that_allows_no_heads_has_none(model: Model) -> None:
    loop = loop_of(engine_of(model, tiny_heads()))
    texts(loop, [opening(1, GREEDY, Speculation(sources=frozenset({Source.LOOKUP}))), opening(2, GREEDY, PLAIN)])
    assert loop.counters.offered_from[Source.MEDUSA] == 0


class WatchedHeads(MedusaHeads):
    """Notes what it reads."""

    def __init__(self) -> None:
        super().__init__(HIDDEN, VOCABULARY, 2, 1, shared=True)
        self.read: list[Tensor] = []

    def forward(self, hidden_ND: Tensor) -> Tensor:
        self.read += hidden_ND
        return super().forward(hidden_ND)


def stock_hidden(folder: str, tokens: Sequence[Token]) -> Tensor:
    """What the output layer of transformers' own forward reads, ``[T, D]``."""
    module = Stock(folder)._module
    with torch.inference_mode():
        return module.model(input_ids=torch.tensor([list(tokens)]), use_cache=False).last_hidden_state[0]


def test_heads_read_the_state_of_the_last_accepted_token(folder: str) -> None:
    """Drafts of which a part is right: the state is that behind what was kept, whatever was verified beside and below.

    With the log-probabilities of the prompt asked for, rows of the step come before those that tokens are drawn from.
    """
    settings = EngineSettings(folder, dtype="fp32", device="cpu", cache_tokens=512)
    plain = build_target(settings)
    drafted = Speculation(sources=frozenset({Source.DRAFT, Source.MEDUSA}))
    one = opening(3, GREEDY, drafted)
    one = replace(one, request_options=replace(one.request_options, prompt_logprobs=1))
    truth = [*one.tokens, *texts(loop_of(plain), [replace(one, speculation=PLAIN)])[3]]
    watched = WatchedHeads()
    loop = loop_of(
        Engine(
            plain.model,
            KVCache(2, 512, block=plain.model.block, dtype=torch.float32, device="cpu"),
            heads=watched,
        )
    )
    loop.receive(LINK, one)
    hidden_TD = stock_hidden(folder, truth)
    rng, position, kept, checked = Random(2), len(one.tokens), Counter[int](), 0
    while (sent := loop.step()) is not None:
        (_, message), *_ = sent
        assert isinstance(message, Verification)
        for row_D in watched.read:  # in this step's plan: the state before the token that was committed last
            torch.testing.assert_close(row_D, hidden_TD[position - 2], atol=1e-4, rtol=1e-4)
            checked += 1
        watched.read.clear()
        kept[message.accepted] += 1
        position = message.end
        path = truth[position : position + rng.randint(0, 3)]
        right = len(path)
        tokens = [*path, *((token + 1) % VOCABULARY for token in truth[position : position + 3])]
        parents = [*range(ANCHOR, right - 1), *[right - 1] * (len(tokens) - right)]
        if message.finish or not path:
            continue
        proposal = Proposal(
            one.session, 1, position, digests.of(truth[:position]), tuple(tokens), tuple(parents), (0.9,) * len(tokens)
        )
        loop.receive(LINK, proposal)
    assert checked >= 5 and len(kept) >= 3, (checked, kept)


class Stubborn(MedusaHeads):
    """Always guesses the same."""

    def __init__(self, token: Token) -> None:
        super().__init__(HIDDEN, VOCABULARY, 1, 0, shared=True)
        self._token = token

    def forward(self, hidden_ND: Tensor) -> Tensor:
        logits_HNV = torch.zeros(1, len(hidden_ND), VOCABULARY)
        logits_HNV[..., self._token] = 9.0
        return logits_HNV


def test_the_rejection_rule_keeps_its_law(folder: str) -> None:
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
    loop = loop_of(Engine(engine.model, engine.cache, heads=Stubborn(guess)), running=64, budget=Budget(verify=128))
    speculation = replace(HEADS_ALONE, rule=Rule.REJECTION)
    count = 480
    openings = [
        Open(SessionId(n), 1, prompt, replace(sampling, seed=n), Limits(len(prompt) + 3), speculation=speculation)
        for n in range(count)
    ]
    loop._limits = replace(loop._limits, waiting=count)
    found = Counter(tuple(said[:2]) for said in texts(loop, openings).values())
    assert loop.counters.accepted_from[Source.MEDUSA] > count / 20
    assert found.keys() <= pairs.keys()
    chi = sum((found[pair] - count * p) ** 2 / (count * p) for pair, p in pairs.items())
    freedom = len(pairs) - 1
    assert chi < freedom + 4 * math.sqrt(2 * freedom), (chi, freedom)


def test_under_the_rejection_rule_guesses_do_not_know_the_seed(model: Model) -> None:
    """What is guessed behind the same prompt is the same, whatever is drawn there and next; and it is a chain."""
    drafted = []
    for seed in (1, 2):
        loop = loop_of(engine_of(model, tiny_heads()))
        speculation = replace(HEADS_ALONE, rule=Rule.REJECTION)
        opened = opening(1, Sampling(temperature=0.9, seed=seed), speculation)
        loop.receive(LINK, opened)
        loop.step()
        (sequence,) = loop._sequences.values()
        loop._drafters[0].draft([sequence], [sequence], [sequence])
        drafted.append(sequence.session.candidates(8).tokens)
    assert drafted[0] == drafted[1] and len(drafted[0]) == 3


def test_coupled_guesses_share_the_noise_of_the_target(model: Model) -> None:
    """Heads that know the distribution exactly draw what the target draws, though it is flat and hot."""
    logits_V = torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(1))

    class Knows(MedusaHeads):
        def forward(self, hidden_ND: Tensor) -> Tensor:
            return logits_V.expand(2, len(hidden_ND), VOCABULARY)

    engine = engine_of(model, Knows(HIDDEN, VOCABULARY, 2, 0))
    plain_run = engine.run
    engine.run = lambda chunks: logits_V.expand(len(plain_run(chunks)), VOCABULARY)  # type: ignore[method-assign]
    loop = loop_of(engine)
    texts(loop, [opening(1, Sampling(temperature=1.0, seed=9), HEADS_ALONE)])
    assert loop.counters.accepted_from[Source.MEDUSA] >= NEW // 2
    assert loop.counters.steps <= NEW // 2


def test_cancelled_sessions_leave_nothing_and_others_do_not_notice(model: Model) -> None:
    openings = [opening(n, WARM, Speculation()) for n in range(4)]
    expected = texts(loop_of(engine_of(model, None)), [replace(one, speculation=PLAIN) for one in openings])
    loop = loop_of(engine_of(model, tiny_heads()))
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


def test_heads_that_fail_cost_speed_only(model: Model, caplog: pytest.LogCaptureFixture) -> None:
    class Failing(MedusaHeads):
        def forward(self, hidden_ND: Tensor) -> Tensor:
            raise RuntimeError("out of memory")

    openings = [opening(1, GREEDY, Speculation())]
    expected = texts(loop_of(engine_of(model, None)), [replace(one, speculation=PLAIN) for one in openings])
    assert texts(loop_of(engine_of(model, Failing(HIDDEN, VOCABULARY, 2, 1))), openings) == expected
    assert caplog.text.count("Medusa heads failed; drafting goes on without them") == 1


@needs_no_gpu
def test_on_two_ranks_heads_say_what_they_say_on_one(model: Model, folder: str, tmp_path: Path) -> None:
    save(tiny_heads(), tmp_path / "heads", "tiny", torch.float32)
    heads = str(tmp_path / "heads")
    settings = EngineSettings(folder, dtype="fp32", device="cpu", cache_tokens=512, medusa=heads)
    openings = [opening(n, WARM if n % 2 else GREEDY, HEADS_ALONE) for n in range(4)]
    plain = [replace(one, speculation=PLAIN) for one in openings]
    expected = texts(loop_of(engine_of(model, None)), plain)
    alone = loop_of(build(settings))
    assert texts(alone, openings) == expected
    with on_ranks(settings) as engine:
        loop = loop_of(engine)
        assert texts(loop, openings) == expected
    assert loop.counters.offered_from[Source.MEDUSA] == alone.counters.offered_from[Source.MEDUSA] > 50


BUNDLED = MODELS / "medusa"


def test_the_bundled_heads_are_often_right() -> None:
    settings = EngineSettings(str(MODELS / "target"), dtype="float32", device="cpu", cache_tokens=2048)
    openings = [
        Open(SessionId(n), 1, prompt, replace(WARM if n % 2 else GREEDY, seed=n), Limits(len(prompt) + NEW))
        for n, prompt in enumerate(held_out_prompts()[:6])
    ]
    plain = texts(loop_of(build_target(settings)), [replace(one, speculation=PLAIN) for one in openings])
    loop = loop_of(build_target(replace(settings, medusa=str(BUNDLED))))
    assert texts(loop, [replace(one, speculation=HEADS_ALONE) for one in openings]) == plain
    assert loop.counters.accepted_from[Source.MEDUSA] > 0.2 * loop.counters.committed
