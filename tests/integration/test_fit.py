"""A fit on real workers: what they serve is what is counted, and what a draft is said to say, it says serving."""

from __future__ import annotations

import json
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from benchmarks.fit import main, report, serving, teacher, validate
from benchmarks.fit.command import FitError, FitOptions, Way
from benchmarks.fit.predict import Known, Loaded, Predictor, forecast
from benchmarks.harness.measure import PLAIN, Batch, served
from benchmarks.harness.processes import ReadyProcess, connected
from benchmarks.harness.prompts import Prompt, PromptError
from draft_service.in_turn import MAX_LEVELS
from draft_service.lookahead import Lookahead
from draft_service.translation import read_vocabularies, translator
from engine.build import build, build_target, welcome
from engine.cache.kv_store import PAGE
from engine.interface import Chunk
from engine.recorder import Recorder
from router.text.tokenizer import Tokenizer
from simulation.agreement import AgreementPassage
from simulation.costs import Costs, Curve
from speculation import digest as digests
from speculation.events import Role
from speculation.messages import Limits, Open, SessionId, Source, Verification
from speculation.sources.suffix import SuffixSettings
from target_service.drafting.eagle import EagleDrafter
from target_service.verify_loop import TargetLimits, VerifyLoop
from tests.bundled import MODELS, held_out_prompts
from tests.stack import settings
from transport.worker import Door, Worker

TOKENS = 16
TARGET, DRAFT, OTHER = (str(MODELS / name) for name in ("target", "draft", "draft_other"))
EAGLE = str(MODELS / "eagle")
PROMPTS = (
    Prompt("code", "code: line 1", "import re\nimport functools\n\n\ndef "),
    Prompt("json", "json: line 1", '{"a": 1, "b": 2}\n{"a": 1, "b": 2}\n{"a": 1, '),
)
OPTIONS = FitOptions(
    target=TARGET,
    drafts=(DRAFT,),
    sources=("none", "lookup"),
    prompts=PROMPTS,
    tokens=TOKENS,
    sessions=(1, 2),
    dtype="float32",
)
DRAFTED = Way(DRAFT)
COSTS = Costs({1: Curve.straight(0.03, 0.01)}, Curve.straight(0.0, 0.0), 0.0, 0.0)


def tokens_of(options: FitOptions) -> list[tuple[int, ...]]:
    tokenizer = Tokenizer.load(options.target)
    return [prompt.tokens(tokenizer) for prompt in options.prompts]


@pytest.fixture(scope="module")
def engines():
    return {
        Role.TARGET: build_target(replace(settings("target", 2048), eagle=EAGLE)),
        Role.DRAFT: build(settings("draft", 2048), invariant=False),
    }


@pytest.fixture
def in_process(monkeypatch, engines):
    """Workers in this process, on engines that are loaded once; ``changed``: what they say of themselves."""
    changed: dict[Role, dict] = {}

    @asynccontextmanager
    async def serve(options, role, model, record):
        engine = engines[role]
        hello = replace(welcome(settings(role.value), engine.model, role.value), **changed.get(role, {}))
        recorder = Recorder(record)
        if role is Role.TARGET:
            limits = TargetLimits(adaptive=False, suffix=SuffixSettings(serving.kept(options)))
            loop = VerifyLoop(engine, hello, limits, recorder)
        else:
            loop = Lookahead(engine, hello, recorder=recorder)
        worker = Worker(loop, role.value)
        await worker.start(await Door.open(role.value, "127.0.0.1:0"))
        try:
            yield ReadyProcess(role.value, None, worker.address)
        finally:
            await worker.stop()
            recorder.flush()

    monkeypatch.setattr(serving, "serving", serve)
    monkeypatch.setattr(validate, "serving", serve)
    return changed


@pytest.fixture(scope="module")
def texts() -> list[serving.TargetText]:
    """Any words do for what a draft says along them."""
    tokenizer = Tokenizer.load(TARGET)
    words = tokenizer.encode("def add(a, b):\n    return a + b\n\n\ndef add(a, c):\n    return a + c\n", special=False)
    return [serving.TargetText("code", words[:first], words[first : first + 14]) for first in (5, 9)]


@pytest.fixture(scope="module")
def written(engines) -> serving.TargetText:
    """What the target says itself, in which a draft that the other tokenizer would cut elsewhere is right."""
    engine, prompt = engines[Role.TARGET], held_out_prompts()[6]
    sequence, words = engine.cache.sequence(), list(prompt)
    for _ in range(TOKENS):
        fed = words[sequence.length :]
        logits_RV = engine.run([Chunk(sequence, fed, rows=[len(fed) - 1])])
        sequence.advance(range(len(fed)))
        words.append(int(logits_RV.argmax()))
    sequence.free()
    return serving.TargetText("code", prompt, tuple(words[len(prompt) :]))


@pytest.mark.thorough
async def test_a_fit_of_real_workers_from_their_records_to_the_check(in_process, tmp_path, monkeypatch):
    """Costs from the records, the draft's words, a forecast, the tables, and the same text when it is served."""
    for name in ("TIMED", "DRAFTED"):
        monkeypatch.setattr(serving, name, 1)
    options = replace(OPTIONS, eagle=EAGLE)
    watched = await serving.watch(options, tokens_of(options), tmp_path, lambda _: None)
    assert [text.kind for text in watched.texts] == ["code", "json"]
    known = main.learned(options, watched, watched.texts, lambda _: None)
    assert set(known.costs[None].verify) == set(known.heads) == {1, 2}
    for passage in (*known.passages[None], *known.passages[DRAFT]):
        assert len(passage.by_age) == teacher.AGES and all(len(places) == TOKENS for places in passage.by_age)
    alone, drafted = known.costs[None], known.costs[DRAFT]
    assert alone.verify_seconds(2, 6) == drafted.verify_seconds(2, 6) >= alone.verify_seconds(2, 2) > 0
    assert 0 < drafted.draft(1) < 1
    predictor = Predictor(known, 0, 40)
    forecasts = tuple(forecast(predictor, way, (0.0,), (1, 4)) for way in OPTIONS.ways[:2])
    assert [str(one.way) for one in forecasts] == ["lookup", "draft"]
    monkeypatch.setattr(validate, "TEXTS", 2)
    monkeypatch.setattr(validate, "WARM_UP", 0)
    monkeypatch.setattr(validate, "FINE", 60)
    found = await validate.validate(OPTIONS, DRAFTED, 2, known, watched.texts, tmp_path, lambda _: None)
    assert found.same_text == 1
    assert [one.depth for one in found.depths] == [1, 2, 3, 32]
    assert all(one.measured > 0 and one.predicted > 0 for one in found.depths)
    assert all(1 <= one.measured_step <= 1 + one.depth and one.predicted_step >= 1 for one in found.depths)
    loaded = (Loaded(1, 1, 20.0, 10.0),)
    told = replace(OPTIONS, out=tmp_path / "fit")
    result = report.FitResult(told, known, forecasts, forecasts[1], loaded, found)
    assert json.loads(json.dumps(report.as_json(result)))["validation"]["same_text"] == 1
    assert sum(len(table.lines) for table in report.tables(result)) > 10
    pytest.importorskip("matplotlib")
    main.publish(result)
    assert (tmp_path / "fit" / "fit.png").read_bytes().startswith(b"\x89PNG")
    assert {file.name for file in (tmp_path / "fit").iterdir()} == {"fit.json", "fit.png", "paceline.yaml", "README.md"}


def test_vocabularies_are_compared_in_a_cache_of_large_pages(monkeypatch):
    monkeypatch.setattr("engine.model.BLOCK", PAGE)  # as on a GPU
    assert teacher.translated(replace(OPTIONS, drafts=(DRAFT, OTHER))) == {OTHER}


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("draft", [DRAFT, OTHER])
def test_what_a_draft_is_said_to_say_is_what_it_says_while_it_serves(written, lookahead, draft, tmp_path, temperature):
    """Asked along the text, against a draft worker that is led along it, token by token."""
    options = replace(OPTIONS, temperature=temperature, seed=3)
    (passage,) = teacher.passages(options, draft, [written])
    recorder = Recorder(tmp_path / "served.jsonl")
    led_along(lookahead(draft, recorder), written, options)
    recorder.flush()
    learned = learned_in(tmp_path / "served.jsonl")
    assert len(learned) == len(written.tokens)
    for place, token, (confidences, right) in zip(passage.places, written.tokens, learned, strict=True):
        assert [candidate.confidence for candidate in place] == pytest.approx(confidences, abs=2e-3)
        assert right == next((i for i, candidate in enumerate(place) if candidate.token == token), -1)


@pytest.fixture
def lookahead(engines):
    """A draft worker, which translates if it has to."""

    def start(draft: str, recorder: Recorder) -> Lookahead:
        known = read_vocabularies(draft, TARGET)
        if known is None:
            engine, reader = engines[Role.DRAFT], None
        else:
            engine = build(settings(draft, 2048), invariant=False)
            reader = translator(engine, known)
        hello = replace(
            welcome(settings(draft), engine.model, "draft"), vocabulary=engines[Role.TARGET].model.vocabulary
        )
        return Lookahead(engine, hello, recorder=recorder, reader=reader)

    return start


def led_along(worker: Lookahead, text: serving.TargetText, options: FitOptions) -> None:
    """Let a draft worker follow a text, one token at a time, as one that is always in time."""
    words = list(text.prompt)
    end = Limits(len(words) + len(text.tokens) + 64)
    worker.receive("router", Open(SessionId(1), 1, text.prompt, options.sampling, end))
    for token in text.tokens:
        worker.step()  # expands the end of the text first,
        worker.step()  # and reads its own first choice before it hears of the target's
        words.append(token)
        worker.receive("router", Verification(SessionId(1), 1, len(words) - 1, (token,), digests.of(words)))
    worker.step()
    worker.step()
    worker.forget("router")


def learned_in(record) -> list:
    """What a draft worker has learned about its candidates at every place of a text."""
    lines = [json.loads(line) for line in record.read_text().splitlines()]
    return [one for line in lines for session in line["learned"] for one in session["outcomes"]]


def written_with_a_head(engine, prompt, options: FitOptions) -> tuple[int, ...]:
    """A text as a target worker writes it; whatever its head says goes unused here, so every place has a step."""
    loop = VerifyLoop(engine, welcome(settings("target"), engine.model, "target"), TargetLimits(adaptive=False))
    alone = Way(None, frozenset({Source.EAGLE})).speculation()
    end = Limits(len(prompt) + TOKENS)
    loop.receive("router", Open(SessionId(1), 1, prompt, options.sampling, end, speculation=alone))
    found = []
    while (sent := loop.step()) is not None:
        found += [token for _, message in sent if isinstance(message, Verification) for token in message.tokens]
    return tuple(found)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_what_an_eagle_head_is_said_to_say_is_what_it_says_while_it_serves(monkeypatch, temperature):
    """At every place along the text, and after each number of its own guesses that were right."""
    trees = {}

    def unused(drafter, _outgoing):
        for sequence in drafter._drafter._sequences.values():
            trie = sequence.session.trie
            if len(trie):
                paths = {tuple(above.token for above in node.path_from(trie.root)): node.confidence for node in trie}
                trees[trie.position] = paths
                trie.clear()

    monkeypatch.setattr(EagleDrafter, "_take", unused)
    options = replace(OPTIONS, temperature=temperature, seed=3, eagle=EAGLE, sources=("eagle",))
    engine = build_target(replace(settings("target", 2048), eagle=EAGLE))
    prompt = tokens_of(options)[0]
    text = serving.TargetText("code", prompt, written_with_a_head(engine, prompt, options))
    (by_age,) = teacher.by_age(options, [text])
    assert sorted(trees) == [len(prompt) + place for place in range(1, TOKENS - 1)], "before the last nothing fits"
    compared = [0] * MAX_LEVELS
    for position, paths in trees.items():
        place = position - len(prompt)
        for age in range(min(MAX_LEVELS, TOKENS - 1 - place)):
            before = text.tokens[place : place + age]
            said = {path[-1]: sure for path, sure in paths.items() if path[:-1] == before}
            known = {one.token: one.confidence for one in by_age[age][place + age]}
            if not said.keys() & known.keys():
                break
            for token in said.keys() & known.keys():
                assert said[token] == pytest.approx(known[token], abs=2e-3)
            assert max(said, key=said.get) in known
            compared[age] += 1
    assert compared[0] == TOKENS - 2 and compared[3], compared


async def test_contenders_of_a_check_learn_nothing_from_each_other(in_process, texts, tmp_path, monkeypatch):
    """All decode the same one text, and none of them has an answer of its own before."""
    monkeypatch.setattr(validate, "TEXTS", 1)
    monkeypatch.setattr(validate, "FINE", 60)
    options = replace(OPTIONS, sources=("suffix",))
    way = Way(None, frozenset({Source.SUFFIX}))
    text = await plainly_decoded(options, tmp_path)
    known = Known({None: COSTS}, {None: [AgreementPassage(text.prompt, text.tokens)]}, ["code"], 4000)
    found = await validate.validate(options, way, 2, known, [text], tmp_path, lambda _: None)
    assert [one.measured_step for one in found.depths] == [1.0] * len(found.depths)
    assert [one.predicted_step for one in found.depths] == [1.0] * len(found.depths)
    twice = [text, replace(text, kind="again")]
    known = Known({None: COSTS}, {None: [AgreementPassage(text.prompt, text.tokens)] * 2}, ["code", "again"], 4000)
    monkeypatch.setattr(validate, "TEXTS", 2)
    found = await validate.validate(options, way, 2, known, twice, tmp_path, lambda _: None)
    assert all(one.measured_step > 1.2 and one.predicted_step > 1.2 for one in found.depths)


async def plainly_decoded(options: FitOptions, folder) -> serving.TargetText:
    """The target's own text for the first prompt."""
    async with (
        serving.serving(options, Role.TARGET, TARGET, folder / "plain.jsonl") as target,
        connected(target) as dispatcher,
    ):
        prompt = tokens_of(options)[0]
        run = await served(dispatcher, PLAIN)(Batch((prompt,), options.tokens))
    return serving.TargetText("code", prompt, run.decoded[0].tokens)


def test_the_pieces_of_a_long_text_are_put_together_as_one(texts, monkeypatch):
    whole = teacher.passages(OPTIONS, DRAFT, texts)
    monkeypatch.setattr(teacher, "FED", 7)
    assert said(teacher.passages(OPTIONS, DRAFT, texts)) == said(whole)
    assert [len(passage.places) for passage in whole] == [14, 14]


def said(passages) -> list:
    return [[candidate.token for candidate in place] for passage in passages for place in passage.places]


def test_a_text_beyond_the_context_of_a_draft_is_refused(texts):
    long = serving.TargetText("code", texts[0].prompt * 300, texts[0].tokens)
    with pytest.raises(FitError, match=r"its context holds 1024 tokens, prompt and text have up to 1514"):
        teacher.passages(OPTIONS, DRAFT, [long])


async def test_a_target_that_cannot_speculate_is_told_at_once(in_process, tmp_path):
    in_process[Role.TARGET] = {"speculates": False}
    with pytest.raises(FitError, match="cannot take back a token that was drafted in vain"):
        await serving.watch(OPTIONS, tokens_of(OPTIONS), tmp_path, lambda _: None)


async def test_a_prompt_beyond_the_context_is_named(in_process, tmp_path):
    in_process[Role.TARGET] = {"context": 32}
    with pytest.raises(PromptError, match=r"json: line 1: the prompt has \d+ tokens; it must have 1 to 16, as the"):
        await serving.watch(OPTIONS, tokens_of(OPTIONS), tmp_path, lambda _: None)


def test_no_costs_without_steps_of_the_drafter():
    target = {"role": "target", "start": 0.0, "end": 0.03, "tokens": 1, "sessions": [{"session": 1, "feed": 1}]}
    found = serving.Watched(4000, [], {None: [target], DRAFT: []})
    with pytest.raises(FitError, match="it drafted nothing that could be timed"):
        found.costs(DRAFT)
    assert found.costs(None).verify_seconds(1, 1) == pytest.approx(0.03)
    assert found.heads == {}
    found.lines[None].append(target | {"start": 1.0, "end": 1.04})
    found.guessing.append((1.0, 2.0))
    assert found.heads[1](1) == pytest.approx(0.04)
    assert found.costs(None).verify_seconds(1, 1) == pytest.approx(0.03), "without heads"


def step(start: float, seconds: float, role: str = "target") -> dict:
    return {"role": role, "start": start, "end": start + seconds, "tokens": 1, "sessions": [{"session": 1, "feed": 1}]}


def test_what_a_working_drafter_costs_the_target_is_told_apart_from_a_machine_that_has_slowed_down():
    alone = [step(float(at), 0.030) for at in range(10)]
    later = [step(20.0 + at, 0.033) for at in range(5)] + [step(30.0 + at, 0.0396) for at in range(5)]
    drafter = [step(30.0 + at, 0.002, "draft") for at in range(5)]
    found = serving.Watched(4000, [], {None: alone, DRAFT: later + drafter}, {DRAFT: [(20, 25)]}, {DRAFT: [(30, 35)]})
    costs = found.costs(DRAFT)
    assert costs.contention == pytest.approx(0.0396 / 0.033)
    assert costs.verify_seconds(1, 1) == pytest.approx(0.031), "of all steps beside which nobody drafted"
    assert found.costs(None).contention == 1


def test_texts_are_spread_over_kinds():
    texts = [serving.TargetText(kind, (1,), (number,)) for number, kind in enumerate("aaabbc")]
    assert "".join(text.kind for text in serving.spread(texts, 9)) == "abcaba"
    assert [text.tokens for text in serving.repeated(texts[:2], 3)] == [(0,), (1,), (0,)]


def test_known_texts_can_be_told_by_kind():
    known = Known({}, {None: ["first", "second", "third"]}, ["x", "y", "x"], 9)
    assert known.of(Way(), "x") == ["first", "third"]
    assert known.of(Way()) == ["first", "second", "third"]
