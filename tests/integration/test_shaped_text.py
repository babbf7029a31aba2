"""Requests that shape what is said, through the loops that serve: whatever is drafted, the text is plain decoding's.

Target and drafter are real loops over real caches; their models are tables of logits by the last token. What plain
decoding must say is computed without them: row by row, by transformers' processors.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from draft_service.lookahead import Lookahead, LookaheadLimits
from engine.attention.row_attention import RowAttention
from engine.cache.kv_cache import KVCache
from engine.forward import StepInput
from engine.sampling.sampling import Draw, sample
from engine.shaping.shaping import Shaping
from engine.step import Engine
from speculation.acceptance import finish_at
from speculation.drafting.draft_session import DraftLimits
from speculation.messages import (
    Limits,
    Open,
    Proposal,
    RefusalCode,
    Refused,
    Rule,
    Sampling,
    SessionId,
    Source,
    Speculation,
    Token,
    Verification,
    Welcome,
)
from target_service.scheduler import Budget
from target_service.verify_loop import TargetLimits, VerifyLoop
from tests.unit.engine.shaping.test_shaping import VOCABULARY, by_transformers
from transport.worker import Outgoing

LINK = "router"
WELCOME = Welcome("target", "table", VOCABULARY, 10_000)
LIMITS = TargetLimits(budget=Budget(tokens=400, drafts_per_session=6, verify=300), adaptive=False)
PROMPT = (3, 5, 3, 7)
TOKENS = 16
PLAIN = Speculation(enabled=False)
CHAIN = LookaheadLimits(draft=DraftLimits(children=1, width=1, hold=1))


class TableEngine(Engine):
    """An engine whose model knows the last token only."""

    def __init__(self, logits_VV: Tensor) -> None:
        model: Any = SimpleNamespace(
            module=torch.nn.Module(), vocabulary=VOCABULARY, context=10_000, dtype=torch.float64, layers=0,
            device=torch.device("cpu"), attention=RowAttention(),
        )  # fmt: skip
        super().__init__(model, KVCache(0, 20_000, dtype=torch.float64, device="cpu"))
        self._table_VV = logits_VV

    def _by_rows(self, inputs: StepInput) -> Tensor:
        return self._table_VV[torch.tensor(inputs.tokens)[torch.tensor(inputs.rows, dtype=torch.long)]]


def table(seed: int) -> Tensor:
    return torch.randn(VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).mul(
        2.5
    )


TARGET = table(1)
DRAFTER = TARGET + 0.25 * table(2)
LIKELY = TARGET.topk(4).indices.tolist()
"""After every token."""


@dataclass
class Served:
    """What became of sessions."""

    texts: dict[int, list[Token]] = field(default_factory=dict)
    refusals: dict[int, Refused] = field(default_factory=dict)
    accepted: int = 0
    offered: int = 0


def serve(
    openings: Sequence[Open],
    drafter: Tensor | None = None,
    failovers: float = 0.0,
    seed: int = 0,
    drafting_limits: LookaheadLimits = LookaheadLimits(),
) -> Served:
    """Serve all at once; ``failovers``: chance that the sessions lose both workers after a step and are opened anew."""
    rng = Random(seed)
    target = VerifyLoop(TableEngine(TARGET), WELCOME, LIMITS)
    drafting = Lookahead(TableEngine(drafter), WELCOME, drafting_limits) if drafter is not None else None
    current = {opened.session: opened for opened in openings}
    served = Served({opened.session: [] for opened in openings})

    def open_all() -> None:
        for opened in current.values():
            for worker in (target, drafting):
                assert worker is None or worker.receive(LINK, opened) == []

    def relay(drafts: Outgoing | None) -> None:
        for _, message in drafts or []:
            assert isinstance(message, Proposal), message
            target.receive(LINK, message)

    open_all()
    while current:
        for _ in range(3 if drafting else 0):
            relay(drafting.step())
        for _, message in target.step() or []:
            if isinstance(message, Refused):
                served.refusals[message.session] = message
                del current[message.session]
                continue
            assert isinstance(message, Verification)
            served.texts[message.session] += message.tokens
            served.accepted += message.accepted
            served.offered += message.offered
            if drafting:
                relay(drafting.receive(LINK, message))
            if message.finish:
                del current[message.session]
        if rng.random() < failovers:
            for number, opened in current.items():
                tokens = (*PROMPT, *served.texts[number])
                current[number] = replace(opened, epoch=opened.epoch + 1, tokens=tokens, prompt=len(PROMPT))
            open_all()
    for worker in filter(None, (target, drafting)):
        worker.forget(LINK)
        worker._engine.cache.validate()
        assert worker._engine.cache.free_tokens == worker._engine.cache.capacity
    return served


def opening(number: int, sampling: Sampling, **kwargs: Any) -> Open:
    """Banned sequences, bias and stop tokens are hit all the time by texts this likely."""
    limits = Limits(len(PROMPT) + TOKENS, kwargs.pop("stop", frozenset()), len(PROMPT) + kwargs.pop("least", 0))
    return Open(SessionId(number), 1, PROMPT, sampling, limits, **kwargs)


def decoded_alone(opened: Open) -> list[Token]:
    """The text of plain decoding, by transformers' processors."""
    text = list(opened.tokens)
    while len(text) < opened.limits.end:
        scores_V = by_transformers(TARGET[text[-1]].clone(), opened, text)
        text += sample(scores_V[None], [Draw(opened.sampling, len(text))])
        if finish_at(len(text) - 1, text[-1:], opened.limits)[1]:
            break
    return text[len(opened.tokens) :]


FIELDS: dict[str, dict[str, Any]] = {
    "presence_penalty": {"presence_penalty": 1.5},
    "frequency_penalty": {"frequency_penalty": -0.8},
    "repetition_penalty": {"repetition_penalty": 1.6},
    "bias": {"bias": ((LIKELY[7][0], -6.0), (11, 4.0), (12, 3.5))},
    "allowed": {"allowed": tuple(range(0, VOCABULARY, 3))},
    "banned": {"banned": (*((token, LIKELY[token][0]) for token in range(VOCABULARY)), (LIKELY[7][1],))},
}


def with_fields(names: Sequence[str], number: int, temperature: float, **kwargs: Any) -> Open:
    fields = {key: value for name in names for key, value in FIELDS[name].items()}
    return opening(number, Sampling(temperature=temperature, seed=number, **fields), **kwargs)


STOP = frozenset(token for row in LIKELY for token in row[:1])
"""Hardly a token after which none of these comes first."""


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Threads only get in each other's way on rows this short."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("name", [*FIELDS, "min_tokens"])
def test_each_field_says_the_same_with_drafts_and_without(name: str) -> None:
    names, ending = ([], {"stop": STOP, "least": 9}) if name == "min_tokens" else ([name], {})
    openings = [
        with_fields(names, number, temperature, **ending)
        for number, temperature in enumerate((0.0, 0.0, 0.7, 1.0, 1.2))
    ]
    expected = {opened.session: decoded_alone(opened) for opened in openings}
    unshaped = {opened.session: decoded_alone(replace(opened, sampling=Sampling(seed=9))) for opened in openings}
    assert expected != unshaped
    plain = serve([replace(opened, speculation=PLAIN) for opened in openings])
    assert plain.texts == expected
    drafted = serve(openings, DRAFTER)
    assert drafted.texts == expected
    # A drafter that shaped nothing would be refused nearly all the time where its favourites are excluded.
    assert drafted.accepted > 0.4 * sum(map(len, expected.values()))
    assert drafted.accepted < drafted.offered
    if name == "min_tokens":
        assert all(len(text) > 9 for text in expected.values())
        assert min(map(len, expected.values())) < TOKENS
    assert serve(openings, DRAFTER, failovers=0.3).texts == expected


def test_random_mixtures_say_the_same_with_drafts_lookup_and_failovers() -> None:
    for seed in range(2):
        rng = Random(seed)
        openings = []
        for number in range(8):
            names = rng.sample(list(FIELDS), rng.randint(0, 4))
            ending = {"stop": STOP, "least": rng.randrange(TOKENS)} if rng.random() < 0.4 else {}
            openings.append(with_fields(names, number, rng.choice([0.0, 0.6, 1.0]), **ending))
        expected = {opened.session: decoded_alone(opened) for opened in openings}
        for failovers in (0.0, 0.4):
            served = serve(openings, DRAFTER, failovers, seed)
            assert served.texts == expected, f"seed {seed}, failovers {failovers}"
            assert served.accepted > 0


def test_drafts_that_are_shaped_alike_are_all_kept() -> None:
    """A drafter with the target's weights is never wrong, under penalties that change with every token it drafts."""
    fields = [name for name in FIELDS if name != "bias"]
    openings = [
        with_fields(fields, number, temperature, speculation=Speculation(sources=frozenset({Source.DRAFT})))
        for number, temperature in enumerate((0.0, 0.8, 1.0))
    ]
    served = serve(openings, TARGET, drafting_limits=CHAIN)
    assert served.texts == {opened.session: decoded_alone(opened) for opened in openings}
    assert served.accepted == served.offered > TOKENS


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("rule", [Rule.COUPLED, Rule.REJECTION])
def test_where_nothing_may_be_said_the_text_ends_in_a_refusal_as_without_drafts(rule: Rule, temperature: float) -> None:
    """Every token is allowed once; a drafter that does not know leads right into the dead end and beyond."""
    sampling = Sampling(temperature=temperature, seed=1, allowed=(1, 2), banned=((1, 1), (2, 2), (1, 2, 1), (2, 1, 2)))
    texts = []
    for drafter, speculation in ((None, PLAIN), (TARGET, Speculation(rule=rule)), (DRAFTER, Speculation(rule=rule))):
        served = serve([opening(1, sampling, speculation=speculation)], drafter)
        texts.append(served.texts[1])
        assert served.refusals[1].code is RefusalCode.INVALID
        assert "nothing may be said after 2 tokens of text" in served.refusals[1].message
    assert [sorted(text) for text in texts] == [[1, 2]] * 3
    assert rule is Rule.REJECTION or texts[0] == texts[1] == texts[2]


class OnlyNext:
    """A mask under which every token is one more than the last, until it says nothing may follow."""

    def __init__(self, last: Token) -> None:
        self.last = last

    def advance(self, tokens: Sequence[Token]) -> None:
        assert list(tokens) == list(range(self.last + 1, self.last + 1 + len(tokens)))
        self.last += len(tokens)

    def bits(self, path: Sequence[Token]) -> Tensor:
        words = [0, 0, 0]
        last = (self.last, *path)[-1]
        if last + 1 < VOCABULARY and last < 19:
            word, bit = divmod(last + 1, 32)
            words[word] = 1 << bit if bit < 31 else -(1 << 31)
        return torch.tensor(words, dtype=torch.int32)


def test_masks_rule_out_drafts_and_follow_the_text_on_both_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    of = Shaping.of
    monkeypatch.setattr(Shaping, "of", lambda *given: of(*given, OnlyNext(PROMPT[-1])))
    for stop in (frozenset({19}), frozenset[Token]()):
        for speculation in (PLAIN, Speculation(), Speculation(rule=Rule.REJECTION)):
            opened = opening(1, Sampling(temperature=0.9, seed=4), stop=stop, speculation=speculation)
            served = serve([opened], None if speculation is PLAIN else DRAFTER, failovers=0.2)
            assert served.texts[1] == list(range(8, 20)), speculation
            assert bool(served.refusals) is not bool(stop)
            assert bool(served.accepted) is speculation.enabled


def test_tokens_that_do_not_exist_are_refused_by_name() -> None:
    beyond = VOCABULARY + 1
    target = VerifyLoop(TableEngine(TARGET), WELCOME, LIMITS)
    good = opening(1, Sampling())
    for field_name, bad in (
        ("logit_bias", replace(good, sampling=Sampling(bias=((1, 1.0), (beyond, 1.0))))),
        ("allowed_token_ids", replace(good, sampling=Sampling(allowed=(1, beyond)))),
        ("bad_words", replace(good, sampling=Sampling(banned=((1,), (2, beyond))))),
        ("prediction", replace(good, request_options=replace(good.request_options, prediction=(1, beyond)))),
    ):
        ((_, refused),) = target.receive(LINK, bad)
        assert isinstance(refused, Refused)
        assert refused.code is RefusalCode.INVALID
        assert refused.message == f"{field_name} token {beyond} is outside the vocabulary of {VOCABULARY}"
