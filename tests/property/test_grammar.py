"""What a constraint says depends on the text alone, however often and along whatever drafts it was asked."""

from __future__ import annotations

import gc
import json
import threading
import time
from collections.abc import Iterator
from random import Random
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import pytest
import torch
from llguidance import LLParserLimits

import engine.shaping.grammar
from engine.model import Model
from engine.shaping.compiling import Compiling
from engine.shaping.grammar import (
    COMPILE_SECONDS,
    KEPT,
    MASK_BURST,
    MASK_SHARE,
    Compiled,
    GrammarConstraint,
    GrammarError,
    Grammars,
    MaskBudget,
    PassingError,
    Vocabulary,
)
from speculation.messages import Limits, Open, RequestOptions, Sampling, SessionId, Token
from speculation.settings import MAX_GRAMMAR_BYTES
from tests.grammars import STOP, json_grammar, random_schema, regex, save_tokenizer

PATTERNS = ("(foo|foobar|fo)+ ba{2,5}z( the quick brown fox)?", "[ab]{1,9}", "x*y*é?z", "yes|no|no way")
SECONDS = 30


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Model:
    """As much of a model as grammars need."""
    folder = tmp_path_factory.mktemp("model")
    size = save_tokenizer(folder).get_vocab_size()
    return cast(Model, SimpleNamespace(name=str(folder), vocabulary=size, stop_tokens=frozenset({STOP})))


@pytest.fixture(scope="module")
def vocabulary(model) -> Vocabulary:
    return Vocabulary(model)


def tokens_of(bits_W: torch.Tensor) -> list[Token]:
    return [32 * w + i for w, word in enumerate(bits_W.tolist()) for i in range(32) if word >> i & 1]


def constraint(
    vocabulary: Vocabulary, grammar: str, stop_tokens: frozenset[Token] = frozenset({STOP})
) -> GrammarConstraint:
    return GrammarConstraint(Compiled(grammar, vocabulary), stop_tokens)


def wander(asked: GrammarConstraint, rng: Random) -> None:
    """Ask this and that along drafts of all kinds: right, wrong, beyond the end."""
    for _ in range(rng.randint(0, 3)):
        path: list[Token] = []
        for _ in range(rng.randint(0, 6)):
            bits_W = asked.bits(path)
            open_ = tokens_of(bits_W) if bits_W is not None else []
            path.append(rng.choice(open_) if open_ and rng.random() < 0.9 else rng.randrange(300))
            if rng.random() < 0.3:
                path += asked.forced(path)
            if rng.random() < 0.3:
                asked.ending(path)


@pytest.mark.parametrize("seed", range(60))
def test_asking_changes_nothing(vocabulary, seed):
    rng = Random(seed)
    grammar = (
        regex(rng.choice(PATTERNS)) if rng.random() < 0.4 else json_grammar(random_schema(rng), rng.random() < 0.5)
    )
    plain, asked = constraint(vocabulary, grammar), constraint(vocabulary, grammar)
    text: list[Token] = []
    for _ in range(60):
        wander(asked, rng)
        bits_W, same_W = plain.bits(()), asked.bits(())
        assert bits_W is not None and same_W is not None and torch.equal(bits_W, same_W), (seed, text)
        token = rng.choice(tokens_of(bits_W))
        if token == STOP:
            return
        over = plain.ending((token, rng.randrange(300)))
        assert over == asked.ending((token, rng.randrange(300)))
        text.append(token)
        plain.advance((token,))
        asked.advance((token,))
        assert not plain.error and not asked.error
        if over:
            anew = constraint(vocabulary, grammar)
            assert anew.ending(text) == len(text)
            assert tokens_of(plain.bits(())) == [STOP]
            return


def test_forced_text_is_open_all_along(vocabulary):
    held = constraint(vocabulary, 'start: "once upon a time" | "once upon a tree"')
    forced = held.forced(())
    assert vocabulary.tokenizer.decode_str(list(forced)).startswith("once upon a")
    for count, token in enumerate(forced):
        assert token in tokens_of(held.bits(forced[:count]))
    assert held.forced((1, 2, 3)) == ()


SPECIAL = ("<eos>", "<|user|>", "<tool>", "[end]")
"""One token each. ``<tool>`` is not declared special: to grammars it is, as it is written like this."""


@pytest.fixture(scope="module")
def marked(tmp_path_factory) -> Vocabulary:
    """Of a tokenizer with more special tokens, and one added token that is none."""
    folder = tmp_path_factory.mktemp("marked")
    backend = save_tokenizer(folder)
    backend.add_special_tokens(["<|user|>", "[end]"])
    backend.add_tokens(["<tool>", "plain"])
    backend.save(str(folder / "tokenizer.json"))
    size = backend.get_vocab_size()
    return Vocabulary(cast(Model, SimpleNamespace(name=str(folder), vocabulary=size, stop_tokens=frozenset({STOP}))))


@pytest.mark.parametrize("mark", SPECIAL)
@pytest.mark.parametrize("around", ["{}", "x {} y", "plain{0}é{0}"])
def test_letters_that_spell_a_special_token_come_out(marked, mark, around):
    """Those of a draft that is forced too."""
    wanted = around.format(mark)
    for drafted in (False, True):
        held, rng, text = constraint(marked, f"start: {json.dumps(wanted)}"), Random(1), list[Token]()
        while open_ := set(tokens_of(held.bits(()))) - {STOP}:
            forced = list(held.forced(())) if drafted else []
            added = forced or [rng.choice(sorted(open_))]
            assert added[0] in open_
            held.advance(added)
            assert not held.error
            text += added
        assert marked.tokenizer.decode_str(text) == wanted
        assert not any(marked.tokenizer.is_special_token(token) for token in text)


def test_a_special_token_is_still_open_by_its_name(marked):
    held = constraint(marked, 'start: <|user|> "<|user|>" <tool>')
    user, tool = (next(t for t in range(marked.size) if marked.tokenizer.decode_str([t]) == n) for n in SPECIAL[1:3])
    assert tokens_of(held.bits(())) == [user]
    text = list(held.forced(()))
    assert text[0] == user and text[-1] == tool and user not in text[1:]
    held.advance(text)
    assert not held.error and tokens_of(held.bits(())) == [STOP]


def test_an_id_that_is_no_token_is_never_open(tmp_path):
    save_tokenizer(tmp_path)
    saved = json.loads((tmp_path / "tokenizer.json").read_text())
    vocabulary = saved["model"]["vocab"]
    last = max(vocabulary, key=vocabulary.__getitem__)
    hole = vocabulary[last]
    vocabulary[last] += 1
    (tmp_path / "tokenizer.json").write_text(json.dumps(saved))
    model = SimpleNamespace(name=str(tmp_path), vocabulary=hole + 2, stop_tokens=frozenset({STOP}))
    open_ = tokens_of(constraint(Vocabulary(cast(Model, model)), r"start: /(.|\n)*/").bits(()))
    assert hole - 1 in open_
    assert hole not in open_


def test_behind_an_end_or_a_break_nothing_matters(vocabulary):
    held = constraint(vocabulary, regex("a{2}"))
    (a,) = vocabulary.tokenizer.tokenize_str("a")
    assert held.bits((STOP,)) is None
    assert held.bits((a, a + 1)) is None
    assert held.bits((a, a, a)) is None
    assert held.ending((a, a, a)) == 2
    assert held.ending((a,)) is None
    assert constraint(vocabulary, regex("a{2}"), frozenset()).bits((a, a)) is None
    held.advance((a + 1,))
    assert "none of the grammar's" in held.error
    assert held.bits(()) is None


def test_a_stop_token_is_open_only_where_the_text_may_end(vocabulary):
    (a,) = vocabulary.tokenizer.tokenize_str("a")
    for stops in (frozenset({STOP}), frozenset({STOP, 7}), frozenset({7}), frozenset()):
        held = constraint(vocabulary, regex("ba*"), stops)
        assert not stops & set(tokens_of(held.bits(())))
        (b,) = vocabulary.tokenizer.tokenize_str("b")
        assert set(tokens_of(held.bits((b,)))) & {STOP, 7} == stops
        assert a in tokens_of(held.bits((b,)))


def test_grammars_are_compiled_once(model):
    grammars = Grammars(model)
    first = grammars.compiled(regex("a"))
    assert first.result(SECONDS) is grammars.compiled(regex("a")).result(SECONDS)
    for number in range(KEPT):
        grammars.compiled(regex(f"a{number}")).result(SECONDS)
    assert grammars.compiled(regex("a")) is not first


@pytest.mark.parametrize(
    ("grammar", "words"),
    [
        ("start: (", "cannot be used"),
        ('{"x": 1}', "missing field"),
        ("start: X\nX: /a/ & /b/", "allows no text at all"),
        ('start: ""', "allows no text at all"),
        ("x" * (MAX_GRAMMAR_BYTES + 1), f"at most {MAX_GRAMMAR_BYTES}"),
    ],
)
def test_a_bad_grammar_fails_with_one_line(model, grammar, words):
    with pytest.raises(GrammarError, match=words) as caught:
        Grammars(model).compiled(grammar).result(SECONDS)
    assert "\n" not in str(caught.value)


def test_a_model_without_a_tokenizer_has_no_grammars(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    model: Any = SimpleNamespace(name=str(tmp_path), vocabulary=300, stop_tokens=frozenset())
    with pytest.raises(GrammarError, match="no grammars"):
        Grammars(model).compiled(regex("a")).result(SECONDS)


def test_what_fails_in_passing_is_tried_again(model, monkeypatch):
    grammars, bad = Grammars(model), "start: ("
    with monkeypatch.context() as broken:
        broken.setattr(
            "engine.shaping.grammar.AutoTokenizer.from_pretrained", Mock(side_effect=OSError("no file left"))
        )
        with pytest.raises(GrammarError, match="no file left"):
            grammars.compiled(regex("a")).result(SECONDS)
    with monkeypatch.context() as broken:
        broken.setattr("engine.shaping.grammar.LLMatcher", Mock(side_effect=MemoryError))
        with pytest.raises(GrammarError, match="MemoryError"):
            grammars.compiled(regex("a")).result(SECONDS)
    assert grammars.compiled(regex("a")).result(SECONDS)
    refused = grammars.compiled(bad)
    with pytest.raises(GrammarError):
        refused.result(SECONDS)
    assert grammars.compiled(bad) is refused


def test_nobody_waits_for_ever(model):
    """Neither a session whose grammar takes too long, nor the others of its worker."""
    compiling: Compiling[str] = Compiling(lambda: Grammars(model))
    for name, grammar in (
        ("hostile", json_grammar({"type": "integer", "multipleOf": 29_989})),
        ("bad", "start: ("),
        ("good", regex("a")),
    ):
        request_options = RequestOptions(grammar=grammar)
        compiling.add(
            name, Open(SessionId(1), 1, (1,), Sampling(), Limits(9), request_options=request_options), now=5.0
        )
        assert compiling.due == 5.0
        if name == "hostile":
            ((session, why),) = compiling.ready(5.0 + COMPILE_SECONDS)
            assert session == name and isinstance(why, PassingError) and "takes more than" in str(why)
    found: dict[str, object] = {}
    deadline = time.monotonic() + SECONDS
    while compiling.due is not None and time.monotonic() < deadline:
        found |= dict(compiling.ready(5.0))
    assert len(compiling) == 0
    assert isinstance(found["bad"], GrammarError)
    assert isinstance(found["good"], GrammarConstraint)


def test_its_thread_ends_with_it(model):
    before = set(threading.enumerate())
    grammars = Grammars(model)
    grammars.compiled(regex("a")).result(SECONDS)
    (thread,) = set(threading.enumerate()) - before
    del grammars
    gc.collect()
    thread.join(SECONDS)
    assert not thread.is_alive()


def test_who_takes_too_long_is_left_behind(model):
    """Others get a thread of their own."""
    grammars = Grammars(model)
    assert grammars.compiled(regex("b")).result(SECONDS)
    hostile = grammars.compiled(json_grammar({"type": "integer", "multipleOf": 29_989}))
    grammars.give_up()
    assert grammars.compiled(regex("a")).result(SECONDS)
    assert not hostile.done()


class Patient:
    """Sessions of one worker, and a clock that it is asked by."""

    def __init__(self, model: Model) -> None:
        self.compiling: Compiling[str] = Compiling(lambda: Grammars(model))

    def add(self, session: str, grammar: str, now: float) -> None:
        opened = Open(SessionId(1), 1, (1,), Sampling(), Limits(9), request_options=RequestOptions(grammar=grammar))
        self.compiling.add(session, opened, now)

    def outcomes(self, now: float) -> dict[str, object]:
        """What becomes of all that wait, in real time, while the clock stands still."""
        found: dict[str, object] = {}
        deadline = time.monotonic() + SECONDS
        while len(self.compiling) and time.monotonic() < deadline:
            found |= dict(self.compiling.ready(now))
        return found


@pytest.fixture
def stuck(monkeypatch) -> Iterator[str]:
    """A grammar that is compiled only when the test is over."""
    grammar, over = regex("stuck"), threading.Event()

    class Slow(Compiled):
        def __init__(self, compiled: str, vocabulary: Vocabulary) -> None:
            if compiled == grammar:
                over.wait(SECONDS)
            super().__init__(compiled, vocabulary)

    monkeypatch.setattr(engine.shaping.grammar, "Compiled", Slow)
    yield grammar
    over.set()


def test_behind_a_grammar_that_takes_too_long_others_are_compiled(model, stuck):
    """Now, whenever they came, and later."""
    worker = Patient(model)
    for session, grammar, now in (("stuck", stuck, 5.0), ("alike", stuck, 9.0), ("early", regex("a"), 5.1)):
        worker.add(session, grammar, now)
    worker.add("bad", "start: (", 5.2)
    worker.add("late", regex("b"), 14.9)
    assert worker.compiling.ready(5.0 + COMPILE_SECONDS - 0.1) == []
    refused = dict(worker.compiling.ready(5.0 + COMPILE_SECONDS))
    assert all("takes more than" in str(refused.pop(session)) for session in ("stuck", "alike"))
    found = refused | worker.outcomes(5.0 + 2 * COMPILE_SECONDS - 0.1)
    assert isinstance(found["early"], GrammarConstraint) and isinstance(found["late"], GrammarConstraint)
    assert "cannot be used" in str(found["bad"])
    worker.add("again", regex("a"), 40.0)
    assert isinstance(dict(worker.compiling.ready(90.0))["again"], GrammarConstraint)


def test_time_spent_behind_others_is_not_a_grammars_own(model, monkeypatch):
    """Two that take most of the time allowed are both compiled."""
    turn = threading.Semaphore(0)

    class InTurn(Compiled):
        def __init__(self, compiled: str, vocabulary: Vocabulary) -> None:
            assert turn.acquire(timeout=SECONDS)
            super().__init__(compiled, vocabulary)

    monkeypatch.setattr(engine.shaping.grammar, "Compiled", InTurn)
    worker = Patient(model)
    worker.add("first", regex("a"), 0.0)
    worker.add("second", regex("b"), 0.0)
    assert worker.compiling.ready(0.9 * COMPILE_SECONDS) == []
    turn.release()
    while not (found := dict(worker.compiling.ready(0.9 * COMPILE_SECONDS))):
        pass
    assert worker.compiling.ready(1.8 * COMPILE_SECONDS) == []
    turn.release()
    found |= worker.outcomes(1.8 * COMPILE_SECONDS)
    assert {session: type(outcome) for session, outcome in found.items()} == {
        "first": GrammarConstraint,
        "second": GrammarConstraint,
    }


def test_a_grammar_that_was_given_up_gets_another_try(model, monkeypatch, stuck):
    worker = Patient(model)
    worker.add("stuck", stuck, 0.0)
    assert set(dict(worker.compiling.ready(COMPILE_SECONDS))) == {"stuck"}
    monkeypatch.setattr(engine.shaping.grammar, "Compiled", Compiled)
    worker.add("again", stuck, 20.0)
    assert isinstance(worker.outcomes(20.0)["again"], GrammarConstraint)


def test_a_caller_pays_for_its_masks_by_a_part_of_the_time():
    budget = MaskBudget()
    budget.charge("alice", 0.0, 0.0)
    budget.charge("alice", MASK_BURST, 0.0)
    assert not budget.is_spent("alice", 0.0)
    budget.charge("alice", 0.3, 0.0)
    assert budget.is_spent("alice", 0.0) and not budget.is_spent("bob", 0.0)
    assert not budget.is_spent("alice", 0.3 / MASK_SHARE + 1e-6), "nothing is owed for ever"
    rng, now, taken = Random(1), 100.0, 0.0
    while now < 1100.0:  # a step of 30 ms that a mask of 20 ms is added to whenever that is let
        now += 0.03
        if not budget.is_spent("alice", now):
            budget.charge("alice", 0.02, now)
            taken += 0.02
            now += 0.02
        if rng.random() < 0.1:
            budget.charge(f"other {now}", 0.01, now)
    assert taken < MASK_BURST + 0.02 + MASK_SHARE * 1000.0
    assert len(budget._paid) < 20, "who has paid is forgotten"


AMBIGUOUS = "\n".join(
    [
        'start: W | "zq" s?',
        "W: /[b-y]*/",
        f"s: {' | '.join(f'r{i}' for i in range(40))}",
        *(f'r{i}: "a" | r{i} r{i}' for i in range(40)),
    ]
)


def test_what_gets_too_complex_behind_a_draft_is_the_end_there_as_without_drafts(vocabulary):
    (a,), before = vocabulary.tokenizer.tokenize_str("a"), vocabulary.tokenizer.tokenize_str("zq")
    asked = constraint(vocabulary, AMBIGUOUS)
    asked.advance(before)
    for _ in range(60):
        here, behind = asked.bits(()), asked.bits((a,))
        assert here is not None and a in tokens_of(here)
        asked.advance((a,))
        if asked.error:
            break
        assert behind is not None and tokens_of(behind)
    assert asked.error == "the grammar is too complex for the text so far"
    assert behind is not None and not behind.any()


def test_a_mask_that_fails_is_not_the_end_of_a_text(vocabulary, monkeypatch):
    few = LLParserLimits(step_max_items=60, max_lexer_states=50_000, max_grammar_size=200_000, verbose_errors=False)
    monkeypatch.setattr(engine.shaping.grammar, "LIMITS", few)
    (a,) = vocabulary.tokenizer.tokenize_str("a")
    asked = constraint(vocabulary, 'start: s\ns: "a" | s s | s s s s')
    for _ in range(60):
        assert asked.ending((a,)) is None
        if (behind := asked.bits((a,))) is not None and not behind.any():
            break
        asked.advance((a,))
    assert behind is not None and not behind.any()
