"""What a fit predicts from made-up measurements with known agreement, and what it makes of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
import yaml

from benchmarks.fit import main, predict, report
from benchmarks.fit.command import DEPTH, FitOptions, Way
from benchmarks.fit.predict import (
    Agreement,
    DraftRun,
    Forecast,
    Known,
    Loaded,
    Predictor,
    TargetLoad,
    best_depth,
    forecast,
    loads,
    pays_until,
    recommended,
)
from benchmarks.fit.validate import Checked, Validation, depths_around
from cluster.config.config import Config, load
from simulation import costs
from simulation.agreement import AgreementPassage
from simulation.costs import Costs, Curve
from speculation.drafting.draft_session import Candidate
from speculation.messages import Source

VOCABULARY = 4000
VERIFY, DRAFT = 0.030, 0.001
SEED = 9
A, B = Way("a"), Way("b")
LOOKUP, HEAD, SUFFIX = (Way(None, frozenset({source})) for source in (Source.LOOKUP, Source.EAGLE, Source.SUFFIX))
FREE = Costs({1: Curve.straight(VERIFY, 0.0)}, Curve.straight(DRAFT, 0.0), to_target=0.0, to_draft=0.0)


def passage(rng: Random, acceptance: float, length: int = 120) -> AgreementPassage:
    """Words at random; a drafter that is right so often, and knows nothing else."""
    tokens = tuple(rng.randrange(VOCABULARY) for _ in range(length))
    places = tuple(
        (Candidate(token if rng.random() < acceptance else (token + 1) % VOCABULARY, 0.8),) for token in tokens
    )
    return AgreementPassage((1, 2), tokens, places)


def predictor(acceptance: float, costs: Costs = FREE, tokens: int = 160) -> Predictor:
    rng = Random(SEED)
    texts = [passage(rng, acceptance) for _ in range(4)]
    passages = {"a": texts, None: [AgreementPassage(text.prompt, text.tokens) for text in texts]}
    return Predictor(Known({"a": costs, None: costs}, passages, ["text"] * 4, VOCABULARY), SEED, tokens)


def test_a_perfect_drafter_brings_a_token_more_for_every_depth():
    """Nearly: its first probe, of five plain steps, costs 14 % of the 27 steps of 160 tokens, 1 % of those of 1600."""
    found = predictor(1.0, tokens=1600)
    for depth in (1, 3, 5):
        assert found.speedup(A, depth=depth) == pytest.approx(depth + 1, rel=0.03)


def test_a_drafter_that_is_always_wrong_brings_nothing_and_is_not_recommended():
    found = forecast(predictor(0.0), A, (0.0,), (1, 4))
    assert found.speedup == pytest.approx(1.0, abs=0.02)
    assert (found.depth, found.agreement.first) == (1, 0.0)
    assert recommended([found]) is None


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_with_even_odds_and_free_drafts_the_speed_up_is_near_that_of_the_textbook(depth):
    """No more than a turn commits. No less than if every refusal cost a plain step: with no second choice, it may."""
    acceptance = 0.7
    maximum = costs.expected_tokens(acceptance, depth)
    in_a_row = 1 / (1 - acceptance ** (depth + 1))
    minimum = (maximum * in_a_row + 1) / (in_a_row + 1)
    found = predictor(acceptance).speedup(A, depth=depth)
    assert 0.93 * minimum < found < 1.05 * maximum, f"between {minimum:.2f} and {maximum:.2f}, seed {SEED}"


def test_lookup_alone_needs_no_drafter_and_lives_on_repetition():
    rng = Random(SEED)
    verse = tuple(rng.randrange(VOCABULARY) for _ in range(20))
    texts = {None: [AgreementPassage((1, 2), verse * 6)]}
    repeating = Predictor(Known({None: FREE}, texts, ["song"], VOCABULARY), SEED, 240)
    assert repeating.speedup(LOOKUP) > 3
    assert repeating.drafters(LOOKUP, 1, 0.0, 8) == 0
    assert repeating.report(LOOKUP).draft_busy == 0
    assert predictor(0.5).speedup(LOOKUP) == pytest.approx(1.0, abs=0.01), "nothing repeats in random words"


def test_a_way_with_a_head_is_measured_by_steps_in_which_it_guesses():
    """A head that is always wrong costs what it makes a step longer, until it rests, and only its own ways."""
    heads = {1: Curve.straight(1.25 * VERIFY, 0.0)}

    def found(length: int) -> Predictor:
        wrong = ((Candidate(1, 0.5),),) * length
        text = AgreementPassage((1, 2), tuple(range(2, length + 2)), by_age=(wrong,))
        return Predictor(Known({None: FREE}, {None: [text]}, ["text"], VOCABULARY, heads=heads), SEED, 2 * length)

    assert found(30).speedup(HEAD) == pytest.approx(0.8, abs=0.01)
    assert found(30).speedup(LOOKUP) == pytest.approx(1.0, abs=0.01)
    assert 0.9 < found(300).speedup(HEAD) < 0.97


def test_answers_that_were_given_before_speed_up_those_that_are_alike():
    rng = Random(SEED)
    answers = [tuple(rng.randrange(VOCABULARY) for _ in range(60)) for _ in range(2)]
    texts = [AgreementPassage((rng.randrange(VOCABULARY), 2), answers[number % 2]) for number in range(6)]
    found = Predictor(Known({None: FREE}, {None: texts}, ["text"] * 6, VOCABULARY), SEED, 200)
    assert found.report(SUFFIX).tokens >= 360, "all of them, the last ones too"
    assert 2 < found.speedup(SUFFIX) < 4, f"two of six come as new; seed {SEED}"
    assert found.forgetful(SUFFIX) == 1.0
    assert found.forgetful(replace(SUFFIX, local=SUFFIX.local | LOOKUP.local)) == found.speedup(LOOKUP)


def test_of_many_answers_no_more_are_gone_through_than_a_limit(monkeypatch):
    texts = [AgreementPassage((1, 2), tuple(range(10 * number, 10 * number + 10))) for number in range(8)]
    found = Predictor(Known({None: FREE}, {None: texts}, ["text"] * 8, VOCABULARY), SEED, 20)
    assert found.report(SUFFIX).tokens >= 72, "without the first token of each"
    monkeypatch.setattr(predict, "MOST_REMEMBERED", 35)
    assert Predictor(found.known, SEED, 20).report(SUFFIX).tokens < 72


def test_a_kind_is_predicted_on_its_own_texts():
    rng = Random(SEED)
    texts = [passage(rng, 1.0), passage(rng, 0.0)]
    known = Known({"a": FREE}, {"a": texts}, ["easy", "hard"], VOCABULARY)
    found = forecast(Predictor(known, SEED, 120), A, (0.0, 0.05), (4,))
    assert found.kinds["easy"] > 4
    assert found.kinds["hard"] == pytest.approx(1.0, abs=0.02)
    assert found.by_kind["easy"].first == 1
    assert found.trips[0.05] < found.trips[0.0]


def test_many_sessions_need_more_drafters_than_one():
    dear = Costs({1: Curve.straight(VERIFY, 0.0)}, Curve.straight(0.02, 0.9), 0.0, 0.0)
    found = predictor(0.9, dear)
    assert found.drafters(A, 1, 0.0, 8) == 1
    assert found.drafters(A, 4, 0.0, 8) > 1
    chosen = forecast(found, A, (0.0,), (4,))
    one, four = loads(found, chosen, 0.0, (1, 4))
    assert (one.sessions, four.sessions) == (1, 4)


@pytest.mark.parametrize(
    ("device", "gpus", "most"), [("cuda", 1, 1), ("cuda", 2, 1), ("cuda", 4, 3), ("cuda", 0, 8), ("cpu", 4, 8)]
)
def test_no_more_drafters_are_asked_for_than_gpus_are_left(monkeypatch, device, gpus, most):
    monkeypatch.setattr(main, "here", lambda: gpus)
    assert main.most_drafters(FitOptions(device=device)) == most
    dear = Costs({1: Curve.straight(VERIFY, 0.0)}, Curve.straight(0.02, 0.9), 0.0, 0.0)
    found = replace(predictor(0.9, dear), most_drafters=most)
    assert 1 <= found.drafters(A, 4, 0.0, 8) <= most


def test_the_best_depth_is_the_smallest_that_is_as_good_as_the_best():
    assert best_depth({1: 1.4, 2: 1.9, 3: 1.97, 4: 2.0, 8: 1.99}) == 3
    assert best_depth({1: 1.0, 2: 1.0}) == 1
    assert best_depth({4: 2.6, 8: 3.0, 9: 2.9, 16: 3.03}) == 8, "chance has made 9 slower than 8"
    assert best_depth({1: 1.2, 2: 1.1, 8: 0.8}) == 1, "nothing is gained by any"


def test_distance_to_the_best_decides_and_of_equals_the_simpler():
    assert recommended([one(LOOKUP, 2.0), one(A, 2.05), one(B, 1.5)]).way == LOOKUP
    assert recommended([one(LOOKUP, 1.9), one(A, 2.05), one(B, 2.1)]).way == A
    assert recommended([one(LOOKUP, 1.02)]) is None


def one(way: Way, speedup: float, kinds: dict[str, float] | None = None) -> Forecast:
    nothing = Agreement((DraftRun(1, 1),))
    kinds = kinds or {"text": speedup}
    return Forecast(way, nothing, dict.fromkeys(kinds, nothing), {3: speedup}, {0.0: speedup}, kinds, 100.0)


def loaded(*speedups: float) -> list[Loaded]:
    return [Loaded(4**i, i + 1, speedup * 10, 10.0) for i, speedup in enumerate(speedups)]


@pytest.mark.parametrize(
    ("speedups", "until"), [((2.0, 1.5, 1.3), None), ((2.0, 1.15, 0.95), 8), ((2.0, 1.05, 1.0), 4), ((1.0, 0.9), 0)]
)
def test_where_drafting_stops_to_pay(speedups, until):
    assert pays_until(loaded(*speedups)) == until


def test_the_advice_is_one_line():
    kinds = {"code": 3.5, "json": 3.2, "prose": 2.4}
    chosen = one(Way("models/a", frozenset({Source.LOOKUP})), 2.9, kinds)
    said = report.advice(chosen, [chosen], loaded(2.9, 1.15, 0.95))
    kinds_said = "code and json gain most"
    assert said == f"a + lookup: 2.9 x plain decoding; {kinds_said}; switch off above 8 concurrent requests"
    assert "all kinds of text gain alike" in report.advice(one(A, 2.0, {"x": 2.0, "y": 2.0}), [], loaded(2.0))
    assert report.advice(None, [one(A, 1.02)], ()).startswith(
        "plain decoding: the best way to draft, a, makes it 1.02 x"
    )


def pasted(folder: Path, options: FitOptions, chosen: Forecast | None, found: list[Loaded]) -> tuple[Config, str]:
    """The configuration as a server reads it, and as it is written."""
    file = folder / "paceline.yaml"
    file.write_text(report.configuration(options, chosen, found))
    return load(file), file.read_text()


@pytest.mark.parametrize(
    ("chosen", "expected"),
    [
        (one(Way("Org/a", frozenset({Source.LOOKUP})), 2.0), (True, True, True, 3, 2)),
        (one(LOOKUP, 2.0), (True, False, True, 3, 1)),
        (None, (False, True, True, 32, 1)),
    ],
)
def test_the_configuration_can_be_pasted(chosen, expected, tmp_path):
    options = FitOptions(target="Org/t", drafts=("Org/a",), sources=("none",), dtype="bfloat16", threads=2)
    config, text = pasted(tmp_path, options, chosen, loaded(2.0, 1.2, 1.0))
    found = config.speculation
    assert (found.enabled, found.drafters, found.lookup, found.max_depth, config.draft.replicas) == expected
    assert (config.target.model, config.target.dtype, config.target.threads) == ("Org/t", "bfloat16", 2)
    assert "device" not in yaml.safe_load(text)["target"], "only what differs from the defaults"
    if chosen is not None and chosen.way.draft:
        assert config.draft.model == "Org/a"


@pytest.mark.parametrize(
    ("way", "eagle", "kept"),
    [
        (LOOKUP, "", 0),
        (HEAD, "/models/head", 0),
        (SUFFIX, "", 65536),
        (Way("Org/a", HEAD.local), "/models/head", 0),
    ],
)
def test_the_configuration_has_what_the_way_needs_at_the_target_and_no_more(way, eagle, kept, tmp_path):
    options = FitOptions(target="Org/t", drafts=("Org/a",), sources=("lookup", "eagle", "suffix"), eagle="/models/head")
    config, _ = pasted(tmp_path, options, one(way, 2.0), loaded(2.0))
    assert (config.target.eagle, config.target.suffix_tokens) == (eagle, kept)
    assert config.speculation.lookup == (way == LOOKUP)
    unasked = report.configuration(replace(options, sources=("lookup",)), one(LOOKUP, 2.0), loaded(2.0))
    assert "suffix_tokens" not in unasked, "where it was not compared, nothing is known against it"


@pytest.mark.parametrize(
    ("at", "way"), [("target", Way(None, frozenset({Source.EAGLE}))), ("drafter", Way("/models/eagle")), ("drafter", A)]
)
def test_the_configuration_says_where_an_eagle_head_drafts(at, way, tmp_path):
    options = FitOptions(target="Org/t", drafts=("a",), sources=("eagle",), eagle="/models/eagle", eagle_at=at)
    (config, _), used = pasted(tmp_path, options, one(way, 2.0), loaded(2.0)), way != A
    assert (config.target.eagle, config.target.eagle_at) == ("/models/eagle" * used, at if used else "target")
    assert config.draft.eagle == ("/models/eagle" if used and at == "drafter" else "")


def test_sources_are_compared_in_every_combination():
    options = FitOptions(target="t", drafts=("a",), sources=("none", "lookup", "eagle"), eagle="head")
    alone = ["lookup", "eagle", "eagle + lookup"]
    assert [str(way) for way in options.ways] == [*alone, "a", *(f"a + {local}" for local in alone)]
    assert [str(way) for way in replace(options, sources=("suffix",)).ways] == ["suffix", "a + suffix"]


def test_the_configuration_names_the_tokenizer_that_a_draft_translates_into():
    options = FitOptions(target="Org/t", drafts=("Org/a", "Org/b"), sources=("none",))
    written = [
        yaml.safe_load(report.configuration(options, one(Way(draft), 2.0), loaded(2.0), frozenset({"Org/a"})))["draft"]
        for draft in options.drafts
    ]
    assert [draft.get("target_tokenizer") for draft in written] == ["Org/t", None]


def test_a_draft_that_translates_has_no_second_level():
    same = predictor(0.5, tokens=40)
    other = Predictor(replace(same.known, translated=frozenset({"a"})), SEED, 40)
    assert (same.report(A).setting.guesses, other.report(A).setting.guesses) == (True, False)


def test_load_is_part_of_what_is_remembered():
    found = predictor(0.9)
    assert found.report(A, TargetLoad(1)) is found.report(A, TargetLoad(1))
    assert found.report(A, TargetLoad(2)).setting.sessions == 2


def validation(*depths: tuple[int, float, float]) -> Validation:
    return Validation(Way("a"), tuple(Checked(*one, 2.0, 2.0) for one in depths), 40.0, 41.0, 1.0)


def test_the_best_is_told_by_one_rule_for_both():
    found = validation((3, 1.7, 1.6), (4, 1.99, 1.9), (5, 2.0, 2.0), (16, 2.01, 2.02))
    assert found.best == (4, 5)
    assert found.lost == pytest.approx(1 - 1.9 / 2.02)
    assert found.worst == pytest.approx(1.7 / 1.6 - 1)
    assert [round(100 * one.error) for one in found.depths] == [6, 5, 0, 0]


@pytest.mark.parametrize(
    ("best", "tried"), [(1, [1, 2, 32]), (2, [1, 2, 3, 32]), (7, [3, 6, 7, 8, 32]), (DEPTH, [16, 31, 32])]
)
def test_neighbours_and_what_is_far_off_are_tried(best, tried):
    assert depths_around(best) == tried
