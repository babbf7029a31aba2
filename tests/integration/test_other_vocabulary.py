"""A draft model with another tokenizer than the target's: the same text, whatever is sampled, split or opened again."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from draft_service.lookahead import Lookahead, LookaheadLimits
from draft_service.service import DraftSettings, start_draft
from draft_service.translation import read_vocabularies, translator
from engine.build import build, welcome
from engine.interface import Chunk
from engine.model import ModelError
from engine.step import Engine
from router.text.tokenizer import Tokenizer
from speculation.drafting.draft_session import DraftLimits
from speculation.messages import (
    Limits,
    Loading,
    Open,
    Proposal,
    RequestOptions,
    Rule,
    Sampling,
    SessionId,
    Source,
    Speculation,
    Token,
    Verification,
)
from target_service.verify_loop import TargetLimits, VerifyLoop
from tests.stack import MODELS, decode, dispatcher, forget_prefixes, settings, target_worker
from transport.worker import Door

LINK = "router"
TARGET, OTHER = MODELS / "target", MODELS / "draft_other"
DRAFTS = Speculation(sources=frozenset({Source.DRAFT}))
PLAIN = Speculation(enabled=False)
TEXTS = [
    "def fib(n):\n    if n < 2:\n",
    "# naïve café, 日本語の文章, 🙂👩‍👩‍👧\nclass Café:\n    ",
    "<|endoftext|>import os\n\n\n",
]
NEW = 24


@pytest.fixture(scope="module")
def engines() -> dict[str, Engine]:
    return {name: build(settings(name, cache_tokens=8192)) for name in ("target", "draft_other")}


@pytest.fixture(scope="module")
def known():
    return read_vocabularies(str(OTHER), str(TARGET))


@pytest.fixture(autouse=True)
def nothing_left(engines):
    for engine in engines.values():
        forget_prefixes(engine.cache)
    yield
    for engine in engines.values():
        engine.cache.validate()
        assert engine.cache.free_tokens == engine.cache.capacity


@pytest.fixture
def target(engines) -> VerifyLoop:
    engine = engines["target"]
    return VerifyLoop(engine, welcome(settings("target"), engine.model, "target"), TargetLimits(adaptive=False))


@pytest.fixture
def drafter(engines, known, target) -> Lookahead:
    reader = translator(engines["draft_other"], known)
    return Lookahead(engines["draft_other"], replace(target.welcome(), role="draft"), reader=reader)


def prompts() -> list[tuple[Token, ...]]:
    tokenizer = Tokenizer.load(str(TARGET))
    return [tokenizer.encode(text, special=False) for text in TEXTS]


def openings(sampling: Sampling, speculation: Speculation, epoch: int = 1, **kwargs) -> list[Open]:
    return [
        Open(SessionId(number), epoch, tokens, sampling, Limits(len(tokens) + NEW), speculation, **kwargs)
        for number, tokens in enumerate(prompts())
    ]


def run(
    target: VerifyLoop, opened: list[Open], drafter: Lookahead | None = None, reopened: int = -1
) -> tuple[dict[int, list[Token]], int]:
    """The texts, and how many drafts were accepted; before the step ``reopened`` all sessions are opened again."""
    texts: dict[int, list[Token]] = {}
    accepted = 0
    for opening in opened:
        target.receive(LINK, opening)
        if drafter:
            drafter.receive(LINK, opening)
    step, deadline = 0, time.monotonic() + 60
    while step < 2000 and time.monotonic() < deadline:
        if step == reopened:
            reopened = -1
            for opening in opened:
                again = replace(opening, epoch=2, tokens=opening.tokens + tuple(texts[opening.session]))
                target.receive(LINK, again)
                if drafter:
                    drafter.receive(LINK, again)
        steps = 0
        while drafter and (steps < 4 or drafter.due() is not None) and time.monotonic() < deadline:
            for _, message in drafter.step() or []:
                assert isinstance(message, Proposal), message
                assert max(message.tokens) < 4000
                target.receive(LINK, message)
            if drafter.due() is not None:
                time.sleep(0.002)  # its grammar is being compiled
            steps += 1
        sent = target.step()
        if sent is None and target.due() is None:
            return texts, accepted
        if not sent:
            time.sleep(0.002)  # a grammar is being compiled
            continue
        step += 1
        for _, verification in sent:
            assert isinstance(verification, Verification), verification
            texts.setdefault(verification.session, []).extend(verification.tokens)
            accepted += verification.accepted
            for _, message in drafter.receive(LINK, verification) if drafter else []:
                target.receive(LINK, message)
    raise AssertionError("the target never ran out of work")


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_text_for_a_seed_is_that_of_plain_decoding(target, drafter, temperature):
    sampling = Sampling(temperature=temperature, seed=4)
    plain, _ = run(target, openings(sampling, PLAIN))
    drafted, accepted = run(target, openings(sampling, DRAFTS), drafter)
    assert drafted == plain
    assert accepted > NEW / 2  # of three texts


def test_half_characters_grammars_and_penalties_change_nothing_either(target, drafter):
    """The target writes byte by byte, by grammar: every token is a part of a character, and most are shared."""
    sampling = Sampling(temperature=0.9, seed=2, frequency_penalty=0.3)
    request_options = RequestOptions(grammar="start: /[日本語🙂é ]{6}/")
    plain, _ = run(target, openings(sampling, PLAIN, request_options=request_options))
    drafted, accepted = run(target, openings(sampling, DRAFTS, request_options=request_options), drafter)
    assert drafted == plain
    said = Tokenizer.load(str(TARGET)).decode(plain[0])
    assert set(said) <= set("日本語🙂é ") and len(said) == 6
    assert accepted > 0


def test_a_session_that_is_opened_again_goes_on_as_before(target, drafter):
    sampling = Sampling(temperature=0.8, seed=9)
    plain, _ = run(target, openings(sampling, PLAIN))
    drafted, accepted = run(target, openings(sampling, DRAFTS), drafter, reopened=3)
    assert drafted == plain
    assert accepted > 0


def test_the_rejection_rule_gets_what_was_really_drawn_from(target, drafter):
    speculation = replace(DRAFTS, rule=Rule.REJECTION)
    drafted, accepted = run(target, openings(Sampling(temperature=0.8, seed=1), speculation), drafter)
    assert all(len(text) == NEW for text in drafted.values())
    assert accepted > 0


def test_committed_tokens_are_fed_about_once(target, drafter):
    """Cutting the end of the text anew costs a few tokens, not the text."""
    opened = openings(Sampling(temperature=0.0), DRAFTS)[:1]
    texts, _ = run(target, opened, drafter)
    committed = len(opened[0].tokens) + len(texts[0])
    assert drafter.counters.computed - drafter.counters.proposed < 4 * committed


class Checked(Engine):
    """Compares what it computes at the end of a text with what a fresh cache gives for that text."""

    compared = 0

    def run(self, chunks: Sequence[Chunk]) -> Tensor:
        found_RV = super().run(chunks)
        row = 0
        for chunk in chunks:
            row += len(chunk.rows)
            if chunk.sequence.pending == len(chunk.tokens) and chunk.rows == range(
                len(chunk.tokens) - 1, len(chunk.tokens)
            ):
                text = [*chunk.sequence._tokens[: chunk.sequence.length], *chunk.tokens]
                fresh = self.cache.sequence()
                wanted_1V = super().run([Chunk(fresh, text, rows=[len(text) - 1])])
                fresh.free()
                torch.testing.assert_close(found_RV[row - 1], wanted_1V[0], rtol=1e-3, atol=1e-3)
                self.compared += 1
        return found_RV


def test_what_is_cached_is_the_text_as_it_is_cut_now(engines, known, target):
    engine = Checked(engines["draft_other"].model, engines["draft_other"].cache)
    drafter = Lookahead(engine, replace(target.welcome(), role="draft"), reader=translator(engine, known))
    run(target, openings(Sampling(temperature=0.8, seed=4), DRAFTS), drafter)
    assert engine.compared > NEW / 2


def test_where_its_context_ends_a_draft_model_stops_drafting(engines, known, target):
    """Its own tokens of a text may be more than the target's."""
    engine = engines["draft_other"]
    short = Engine(replace(engine.model, context=len(prompts()[0]) + 12), engine.cache)
    drafter = Lookahead(short, replace(target.welcome(), role="draft"), reader=translator(engine, known))
    sampling = Sampling(temperature=0.0)
    plain, _ = run(target, openings(sampling, PLAIN))
    assert run(target, openings(sampling, DRAFTS), drafter)[0] == plain


async def test_such_a_worker_is_one_of_the_target_to_a_router():
    chosen = DraftSettings(
        settings("draft_other"), LookaheadLimits(draft=DraftLimits(lead=8)), target_tokenizer=str(TARGET)
    )
    told: list[Loading] = []
    draft = await start_draft(chosen, await Door.open("draft", "127.0.0.1:0"), told.append)
    try:
        assert draft.welcome.vocabulary == 4000
        assert any("of the target's tokens are shared" in loading.doing for loading in told)
        async with target_worker() as target, dispatcher([target.worker.address], [draft.address]) as serving:
            assert target.worker.welcome.tokenizer == draft.welcome.tokenizer
            drafted = await decode(serving, prompts()[0], NEW, speculation=DRAFTS)
            plain = await decode(serving, prompts()[0], NEW, speculation=PLAIN)
        assert drafted.tokens == plain.tokens
    finally:
        await draft.stop()


async def test_a_model_without_a_tokenizer_cannot_be_translated(tmp_path: Path):
    with pytest.raises(ModelError, match=f"^{tmp_path}: has no tokenizer; give a folder that has the files of one$"):
        await start_draft(
            DraftSettings(settings("draft_other"), target_tokenizer=str(tmp_path)),
            await Door.open("draft", "127.0.0.1:0"),
        )
