"""Texts held to grammars, through both machines: real engines, a random model, llguidance itself."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any
from unittest.mock import Mock

import jsonschema
import pytest

from draft_service.lookahead import Lookahead, LookaheadLimits
from engine.shaping.grammar import TOO_COMPLEX
from engine.step import Engine
from router.generation import Committed, Ended, Generation, GenerationError
from router.text.tokenizer import Tokenizer
from speculation.drafting.draft_session import DraftLimits
from speculation.messages import (
    Close,
    FinishReason,
    FromWorker,
    Limits,
    Open,
    Proposal,
    RefusalCode,
    Refused,
    RequestOptions,
    Rule,
    Sampling,
    SessionId,
    Source,
    Speculation,
    Verification,
    Welcome,
)
from target_service.scheduler import Budget
from target_service.sequence import TargetSequence
from target_service.verify_loop import TargetLimits, VerifyLoop
from tests.bundled import MODELS, held_out_prompts
from tests.grammars import STOP, json_grammar, random_schema, regex, tiny_engine
from tests.stack import dispatcher, draft_worker, target_worker

LINK = "router"
PLAIN = Speculation(enabled=False)
SPECULATIONS = (PLAIN, Speculation(), Speculation(sources=frozenset({Source.GRAMMAR})))
PROMPT = (40, 50, 60)


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    engine, backend = tiny_engine(tmp_path_factory.mktemp("target"))
    return Bench(engine, backend.decode)


@dataclass
class Bench:
    """A target and a drafter on the same engine, and all that was said."""

    engine: Engine
    decode: Callable[..., str]
    texts: dict[int, list[int]] = field(default_factory=dict)
    finishes: dict[int, FinishReason] = field(default_factory=dict)
    refusals: dict[int, Refused] = field(default_factory=dict)
    verifications: list[Verification] = field(default_factory=list)

    def run(self, *opens: Open, drafts: bool = False) -> None:
        """Serve sessions to their ends."""
        self.texts, self.finishes, self.refusals, self.verifications = {}, {}, {}, []
        welcome = Welcome("target", "tiny", self.engine.model.vocabulary, self.engine.model.context)
        limits = TargetLimits(budget=Budget(drafts_per_session=24, verify=96), adaptive=False)
        target = VerifyLoop(self.engine, welcome, limits)
        drafter = Lookahead(self.engine, welcome, LookaheadLimits(draft=DraftLimits(hold=1))) if drafts else None
        for opened in opens:
            target.receive(LINK, opened)
            if drafter is not None and opened.speculation.enabled:
                drafter.receive(LINK, opened)
        deadline = time.monotonic() + 60
        while drafter is not None and drafter.due() is not None:  # so that drafts do not depend on how fast it compiles
            assert time.monotonic() < deadline
            self._propose(target, drafter.step() or [])
        while target.load().sessions or target.load().waiting:
            assert time.monotonic() < deadline
            if drafter is not None:
                for _ in range(3):
                    self._propose(target, drafter.step() or [])
            for _, message in target.step() or []:
                self._note(message)
                if drafter is not None and isinstance(message, Verification):
                    self._propose(target, drafter.receive(LINK, message))
        if drafter is not None:
            drafter.forget(LINK)
        self.engine.cache.validate()
        assert self.engine.cache.free_tokens == self.engine.cache.capacity

    @staticmethod
    def _propose(target: VerifyLoop, sent: list[Any]) -> None:
        for _, message in sent:
            if isinstance(message, Proposal):
                target.receive(LINK, message)

    def _note(self, message: FromWorker) -> None:
        if isinstance(message, Refused):
            self.refusals[message.session] = message
            return
        assert isinstance(message, Verification)
        self.verifications.append(message)
        self.texts.setdefault(message.session, []).extend(message.tokens)
        if message.finish:
            self.finishes[message.session] = message.finish

    def text(self, session: int = 1) -> str:
        """What a session said."""
        return self.decode(self.texts[session], skip_special_tokens=True)

    def sources(self) -> set[Source]:
        """Where accepted drafts came from; drafters alone go without saying."""
        return {source for one in self.verifications for source in (one.sources or (Source.DRAFT,) * one.accepted)}


def opened(grammar: str, number: int = 1, new: int = 120, **changes: Any) -> Open:
    sampling = changes.pop("sampling", Sampling(temperature=1.0, seed=number))
    limits = Limits(len(PROMPT) + new, frozenset({STOP}))
    whole = Open(
        SessionId(number),
        1,
        PROMPT,
        sampling,
        limits,
        prompt=len(PROMPT),
        request_options=RequestOptions(grammar=grammar),
    )
    return replace(whole, **changes)


@pytest.mark.thorough
def test_two_hundred_random_schemas_at_temperature_one(bench):
    """Always valid unless cut by length, and the same text however it was drafted."""
    rng = Random(6)
    schemas = {number: random_schema(rng) for number in range(200)}
    compact = {number: rng.random() < 0.5 for number in schemas}
    said: list[dict[int, tuple[list[int], FinishReason]]] = []
    for speculation in SPECULATIONS[:2]:
        opens = [
            opened(json_grammar(schema, compact[number]), number, speculation=speculation, new=70)
            for number, schema in schemas.items()
        ]
        whole: dict[int, tuple[list[int], FinishReason]] = {}
        for start in range(0, len(opens), 50):
            bench.run(*opens[start : start + 50], drafts=speculation.enabled)
            whole |= {number: (text, bench.finishes[number]) for number, text in bench.texts.items()}
        said.append(whole)
    assert said[0] == said[1]
    assert bench.sources() >= {Source.DRAFT, Source.GRAMMAR}
    assert len(said[0]) == len(schemas)
    ended = [number for number, (_, finish) in said[0].items() if finish is FinishReason.STOP]
    assert len(ended) > 180
    for number in ended:
        jsonschema.validate(json.loads(bench.decode(said[0][number][0])), schemas[number])


@pytest.mark.parametrize("rule", list(Rule))
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    ("grammar", "fits"),
    [
        (regex("[0-9]{3}-[a-f]+!"), lambda text: text[3] == "-" and text[-1] == "!"),
        ('start: "yes" | "no" | "not sure at all"', lambda text: text in ("yes", "no", "not sure at all")),
        ('start: item ("," item)~1..3\nitem: /[a-z]{1,3}/ "=" /[0-9]/', lambda text: text.count("=") > 1),
    ],
)
def test_the_text_follows_its_grammar(bench, grammar, fits, temperature, rule):
    for speculation in SPECULATIONS:
        opening = opened(
            grammar, sampling=Sampling(temperature, seed=3), speculation=replace(speculation, rule=rule), new=200
        )
        bench.run(opening, drafts=True)
        assert bench.finishes[1] is FinishReason.STOP
        assert fits(bench.text())


FORCED = 'start: "The answer, whatever the question may have been, is " /[0-9]/ ", and that was that."'


def test_forced_text_takes_few_steps(bench):
    bench.run(opened(FORCED, speculation=PLAIN))
    plain, steps = bench.texts[1], len(bench.verifications)
    bench.run(opened(FORCED, speculation=SPECULATIONS[2]))
    assert bench.texts[1] == plain
    assert bench.sources() == {Source.GRAMMAR}
    assert len(bench.verifications) < steps / 4
    bench.run(opened(FORCED, speculation=Speculation(sources=frozenset({Source.DRAFT}))))
    assert (bench.texts[1], len(bench.verifications)) == (plain, steps)


@pytest.mark.parametrize("rule", list(Rule))
def test_a_drafter_knows_the_grammar(bench, rule):
    """One with the target's weights is right nearly always, as it is not without the grammar."""
    grammar = regex("([a-f]{3}-[0-9]{2};){12}")
    speculation = Speculation(rule=rule, sources=frozenset({Source.DRAFT}))
    bench.run(opened(grammar, speculation=speculation), drafts=True)
    assert bench.finishes[1] is FinishReason.STOP
    accepted = sum(one.accepted for one in bench.verifications)
    assert accepted > 0.8 * (len(bench.texts[1]) - len(bench.verifications))
    assert len(bench.verifications) < len(bench.texts[1]) / 2


@pytest.mark.parametrize("stop_tokens", [frozenset({STOP}), frozenset()])
@pytest.mark.parametrize("speculation", SPECULATIONS)
def test_a_text_is_over_where_nothing_may_follow(bench, speculation, stop_tokens):
    """Also in the middle of what was offered, and without any token to stop with."""
    opening = opened(FORCED, speculation=speculation)
    bench.run(replace(opening, limits=replace(opening.limits, stop_tokens=stop_tokens)), drafts=True)
    assert bench.finishes[1] is FinishReason.STOP
    assert bench.text().endswith("and that was that.")
    assert STOP not in bench.texts[1]


def test_where_the_text_could_end_only_a_stop_token_ends_it(bench):
    """And without one it goes on to its end."""
    grammar = regex("[ab]{1,40}")
    opening = opened(grammar)
    bench.run(opening)
    stopped = bench.texts[1]
    assert (stopped[-1], bench.finishes[1]) == (STOP, FinishReason.STOP)
    assert len(bench.text()) < 40
    bench.run(replace(opening, limits=replace(opening.limits, stop_tokens=frozenset())))
    assert bench.finishes[1] is FinishReason.STOP
    assert len(bench.text()) == 40
    late = Limits(opening.limits.end, opening.limits.stop_tokens, min_end=len(PROMPT) + len(stopped) + 1)
    bench.run(replace(opening, limits=late))
    assert len(bench.texts[1]) > len(stopped)


@pytest.mark.parametrize("speculation", SPECULATIONS)
def test_a_session_that_is_opened_again_goes_on_in_mid_object(bench, speculation):
    schema = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 9}, "age": {"type": "integer"}}}
    opening = opened(json_grammar({**schema, "required": ["name", "age"], "additionalProperties": False}))
    bench.run(opening)
    whole = bench.texts[1]
    for cut in range(1, len(whole), 3):
        again = replace(opening, epoch=2, tokens=(*PROMPT, *whole[:cut]), speculation=speculation)
        bench.run(again, drafts=True)
        assert bench.texts[1] == whole[cut:], cut


BAD = ("", "start:", "start: (", '{"x": 1}', "\x00", "start: X\nX: /a/ & /b/", '{"grammars": []}', "start: /(/")


def test_a_bad_grammar_is_refused_and_bothers_nobody(bench):
    opening = opened(json_grammar({"enum": ["good", "better"]}))
    bench.run(opening)
    alone = bench.texts[1]
    bad = [opened(grammar, number) for number, grammar in enumerate(BAD[1:], 2)]
    elsewhere = opened(regex("[a-z]+"), 99, tokens=(*PROMPT, 7), prompt=len(PROMPT))
    bench.run(*bad, opening, elsewhere)
    assert bench.texts == {1: alone}
    assert set(bench.refusals) == {one.session for one in (*bad, elsewhere)}
    for refused in bench.refusals.values():
        assert refused.code is RefusalCode.INVALID
        assert "grammar" in refused.message
        assert "\n" not in refused.message


@pytest.mark.parametrize("speculation", SPECULATIONS)
def test_where_a_grammar_gets_too_complex_all_that_is_committed_is_told(bench, speculation, monkeypatch):
    """However much of it one step committed, and then the reason."""
    bench.run(opened(FORCED))
    whole, enough = bench.texts[1], len(PROMPT) + 20
    monkeypatch.setattr(
        TargetSequence, "follow", lambda self: TOO_COMPLEX if len(self.session.tokens) >= enough else ""
    )
    bench.run(opened(FORCED, speculation=speculation), drafts=True)
    told = bench.texts[1]
    assert len(PROMPT) + len(told) >= enough
    assert told == whole[: len(told)]
    assert (bench.refusals[1].message, bench.finishes) == (TOO_COMPLEX, {})


def test_a_grammar_that_fails_in_passing_is_no_fault_of_the_request(bench, monkeypatch):
    """So that the router tries another target, which may go on with the text."""
    monkeypatch.setattr("engine.shaping.grammar.LLMatcher", Mock(side_effect=MemoryError))
    bench.run(opened(regex("a+"), tokens=(*PROMPT, 5)))
    assert bench.refusals[1].code is RefusalCode.INTERNAL
    assert "MemoryError" in bench.refusals[1].message


def test_masks_that_take_long_hold_up_nobody_else(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock on which every question to a grammar takes hours, a session with one meets others without.

    Those are served as if they were alone; then the first goes on, and says what it would have said anyway.
    """
    slow = opened(regex("[ab]{30,40}"), 1, speculation=PLAIN)
    others = opened("", 2, speculation=PLAIN), opened("", 3, speculation=PLAIN)
    bench.run(slow, *others)
    texts = bench.texts
    clock = itertools.count(0, 10_000)
    monkeypatch.setattr(time, "thread_time", lambda: next(clock))
    welcome = Welcome("target", "tiny", bench.engine.model.vocabulary, bench.engine.model.context)
    target, said = VerifyLoop(bench.engine, welcome), dict[int, list[int]]()

    def step() -> None:
        for _, message in target.step() or []:
            assert isinstance(message, Verification)
            said.setdefault(message.session, []).extend(message.tokens)

    target.receive(LINK, slow)
    deadline = time.monotonic() + 60
    while not said:
        assert time.monotonic() < deadline
        step()
    begun = list(said[1])
    for other in others:
        target.receive(LINK, other)
    while {session: said.get(session) for session in (2, 3)} != {2: texts[2], 3: texts[3]}:
        assert time.monotonic() < deadline
        step()
        assert said[1] == begun
    assert target.counters.grammar_waits == max(len(texts[2]), len(texts[3]))
    while target.load().sessions:
        step()
    assert said == texts


@pytest.mark.parametrize(("scope", "later"), [("alice", False), ("", True)])
def test_one_key_has_one_budget_for_masks(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, scope: str, later: bool
) -> None:
    """What a session's grammar took, the next one of its key pays for; without a key it is another caller's."""
    clock = itertools.count(0, 10_000)
    monkeypatch.setattr(time, "thread_time", lambda: next(clock))
    grammar = RequestOptions(grammar=regex("[ab]{3}"), scope=scope)
    first, second = (opened("", number, speculation=PLAIN, request_options=grammar) for number in (1, 2))
    welcome = Welcome("target", "tiny", bench.engine.model.vocabulary, bench.engine.model.context)
    target, said = VerifyLoop(bench.engine, welcome), list[int]()

    def serve(*opens: Open) -> None:
        for one in opens:
            target.receive(LINK, one)
        deadline = time.monotonic() + 60
        while target.load().sessions or target.load().waiting:
            assert time.monotonic() < deadline
            said.extend(message.session for _, message in target.step() or [] if isinstance(message, Verification))

    serve(first)
    said.clear()
    monkeypatch.setattr(time, "thread_time", lambda: 0.0)
    serve(second, opened("", 3, new=200, speculation=PLAIN))
    assert (said.index(2) < len(said) - 1 - said[::-1].index(3)) is later


def test_a_session_may_go_while_its_grammar_is_compiled(bench):
    welcome = Welcome("target", "tiny", bench.engine.model.vocabulary, bench.engine.model.context)
    machines = (VerifyLoop(bench.engine, welcome), Lookahead(bench.engine, welcome))
    for machine in machines:
        for number in (1, 2, 3):
            assert machine.receive(LINK, opened(regex("[a-z]+"), number)) == []
        assert machine.due() is not None
        machine.receive(LINK, Close(SessionId(1), 1))
        machine.receive(LINK, opened(regex("[a-z]+"), 2, epoch=2))
        load = machine.load()
        assert load.sessions + load.waiting == 2
        machine.forget(LINK)
        assert machine.step() is None
        assert machine.load().sessions + machine.load().waiting == 0
        assert machine.due() is None


def test_garbage_for_a_grammar_ends_in_a_text_or_a_refusal(bench):
    """Pieces of grammars in almost any order."""
    rng = Random(8)
    atoms = ['"a" ', "/[a-z]{2}/ ", '("b"|/c+/) ', "x ", "%json {} ", '"é" ']
    others = ["| ", "* ", "? ", "~1..3 ", "\nx: ", "& ", "( ", "{ ", "\\ ", "\x00"]
    grammars = [
        "start: " + "".join(rng.choice(atoms if rng.random() < 0.7 else others) for _ in range(rng.randint(1, 6)))
        for _ in range(150)
    ]
    bench.run(*(opened(grammar, number, new=12) for number, grammar in enumerate(grammars)))
    assert len(bench.refusals) + len(bench.finishes) == len(grammars)
    assert min(len(bench.refusals), len(bench.finishes)) > 10
    assert all(refused.code is RefusalCode.INVALID for refused in bench.refusals.values())


@pytest.fixture(autouse=True)
def nothing_left(bench) -> Iterator[None]:
    yield
    assert not bench.engine.cache.sequences


PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


async def test_over_real_streams_with_the_bundled_pair():
    """Workers that have nothing else to do notice that a grammar is compiled; a bad one is the client's fault."""
    request_options = RequestOptions(grammar=json_grammar(PERSON, compact=True))
    texts = []
    async with target_worker() as target, draft_worker() as draft:
        async with dispatcher([target.worker.address], [draft.worker.address]) as serving:
            prompt = held_out_prompts()[0]
            for speculation in SPECULATIONS:
                generation = Generation(
                    prompt, Sampling(0.0), 60, request_options=request_options, speculation=speculation
                )
                async with asyncio.timeout(60):
                    items = [item async for item in serving.generate(generation)]
                ended = items.pop()
                assert isinstance(ended, Ended) and ended.reason is FinishReason.STOP
                texts.append([token for item in items if isinstance(item, Committed) for token in item.tokens])
            with pytest.raises(GenerationError, match="the grammar cannot be used") as caught:
                async for _ in serving.generate(
                    replace(generation, request_options=RequestOptions(grammar="start: ("))
                ):
                    pass
            assert caught.value.code.name == "invalid"
    assert texts[0] == texts[1] == texts[2]
    text = Tokenizer.load(str(MODELS / "target")).decode(texts[0])
    jsonschema.validate(json.loads(text), PERSON)
