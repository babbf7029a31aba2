"""Texts in their own words: simulated as fast as made-up words are, and with what can be found in the words besides."""

from dataclasses import replace
from random import Random

import pytest

from simulation.agreement import AgreementPassage, Passages, made_up
from simulation.costs import Costs, Curve
from simulation.simulate import SimulationSettings, simulate, simulate_texts
from speculation.drafting.draft_session import Candidate, Outcome
from speculation.messages import Schedule, Source

SEED = 7
VOCABULARY = 4000
LENGTH = 100
VERIFY = {1: Curve.straight(0.030, 0.01)}
COSTS = Costs(VERIFY, Curve.straight(0.002, 0.04), to_target=0.0014, to_draft=0.0014, heads=VERIFY)
LOOKUP, SUFFIX = (frozenset({source}) for source in (Source.LOOKUP, Source.SUFFIX))


def spoken(outcomes: list[Outcome], rng: Random) -> AgreementPassage:
    """Words at random on which the models agree as in ``outcomes``."""
    tokens = tuple(rng.randrange(VOCABULARY) for _ in outcomes)
    places = tuple(
        tuple(
            Candidate(token if rank == outcome.right else (token + 1 + rank) % VOCABULARY, sure)
            for rank, sure in enumerate(outcome.confidences)
        )
        for token, outcome in zip(tokens, outcomes, strict=True)
    )
    return AgreementPassage((1, 2, 3), tokens, places)


@pytest.mark.parametrize("schedule", [Schedule.TRIE, Schedule.SEQUENTIAL])
def test_whose_words_they_are_does_not_matter_to_a_drafter(schedule):
    outcomes = made_up(Random(SEED), 0.8, length=3 * LENGTH)
    rng = Random(SEED)
    passages = [spoken(outcomes[first : first + LENGTH], rng) for first in range(0, len(outcomes), LENGTH)]
    setting = SimulationSettings(schedule, request_tokens=LENGTH)
    replayed = simulate(setting, COSTS, outcomes, Random(SEED), tokens=300)
    in_words = simulate_texts(setting, COSTS, Passages(passages, VOCABULARY), Random(SEED), tokens=300)
    assert in_words.rate == pytest.approx(replayed.rate, rel=0.08), f"seed {SEED}"


def test_sources_at_the_target_read_the_words():
    rng = Random(SEED)
    verse = tuple(rng.randrange(VOCABULARY) for _ in range(25))
    song = Passages([AgreementPassage((1, 2), verse * 4)], VOCABULARY)
    rates = {
        sources: simulate_texts(
            SimulationSettings(sources=sources, drafters=0), COSTS, song, Random(SEED), tokens=200
        ).rate
        for sources in (LOOKUP, frozenset[Source]())
    }
    assert rates[LOOKUP] > 2 * rates[frozenset()]


def words(rng: Random, length: int = LENGTH) -> tuple[int, ...]:
    return tuple(rng.randrange(VOCABULARY) for _ in range(length))


def aged(tokens: tuple[int, ...], right: int, ages: int = 8) -> AgreementPassage:
    """What an EAGLE head says that is right at so many ages, and wrong at those beyond."""
    wrong = tuple((token + 1) % VOCABULARY for token in tokens)
    by_age = tuple(
        tuple((Candidate(token, 0.95),) for token in (tokens if age < right else wrong)) for age in range(ages)
    )
    return AgreementPassage((1, 2), tokens, by_age=by_age)


EAGLE = SimulationSettings(sources=frozenset({Source.EAGLE}), drafters=0)
AWAY = SimulationSettings(features=True)


@pytest.mark.parametrize(("right", "depth", "expected"), [(0, 16, 1.0), (2, 16, 3.0), (8, 16, 9.0), (8, 2, 3.0)])
def test_a_head_at_the_target_is_asked_as_far_from_its_true_states_as_its_tree_is_deep(right, depth, expected):
    texts = Passages([aged(words(Random(SEED)), right)], VOCABULARY)
    report = simulate_texts(replace(EAGLE, max_depth=depth), COSTS, texts, Random(SEED), tokens=400)
    assert report.tokens_per_verification == pytest.approx(expected, rel=0.08)
    ignored = simulate_texts(SimulationSettings(sources=LOOKUP, drafters=0), COSTS, texts, Random(SEED), tokens=200)
    assert ignored.tokens_per_verification == pytest.approx(1.0, abs=0.02), "requests that do not ask for a head"


@pytest.mark.parametrize("acceptance", [0.5, 0.8])
def test_a_head_at_the_target_whose_levels_are_dear_drafts_those_that_pay(acceptance):
    """No number of levels that were always drafted would be much better."""
    outcomes, step, level = made_up(Random(SEED), acceptance), 0.018, 0.006
    setting, verify = replace(EAGLE, retention=0.98), {1: Curve.straight(step, 0.01)}

    def rate(depth: int, costs: Costs) -> float:
        return simulate(replace(setting, max_depth=depth), costs, outcomes, Random(SEED), tokens=400).rate

    in_turn = replace(COSTS, verify=verify, heads=verify, level=Curve.straight(level, 0.0))
    dearer = ({1: Curve.straight(step + n * level, 0.01 * step / (step + n * level))} for n in range(1, 9))
    always = [rate(n, replace(COSTS, verify=verify, heads=heads)) for n, heads in enumerate(dearer, start=1)]
    assert rate(8, in_turn) > 0.9 * max(always)


def test_a_head_elsewhere_reads_features_as_they_come_and_distance_makes_what_it_says_old():
    def tokens_a_step(right: int, costs: Costs = COSTS, rtt: float = 0.0) -> float:
        texts = Passages([aged(words(Random(SEED)), right)], VOCABULARY)
        setting = replace(AWAY, rtt=rtt)
        return simulate_texts(setting, costs, texts, Random(SEED), tokens=400).tokens_per_verification

    assert tokens_a_step(8) > 6, "what does not age is drafted far ahead"
    assert 2 < tokens_a_step(4) <= 5, "no more than it says without true states"
    assert tokens_a_step(4, rtt=0.1) < 0.7 * tokens_a_step(4)
    assert tokens_a_step(8, rtt=0.02) > 1.2 * tokens_a_step(4, rtt=0.02)
    assert tokens_a_step(4, replace(COSTS, feature_seconds=0.1)) < 0.7 * tokens_a_step(4), "features that crawl"
    assert tokens_a_step(4, replace(COSTS, feature_seconds=9.0)) == pytest.approx(1.0, abs=0.02), "or never come"


def test_earlier_outputs_of_a_round_are_known_and_those_of_the_round_before_are_not():
    rng = Random(SEED)
    different = [AgreementPassage((rng.randrange(VOCABULARY), 2), words(rng)) for _ in range(4)]
    alike = [AgreementPassage((1, 2), different[0].tokens)] * 4
    setting = SimulationSettings(sources=SUFFIX, drafters=0)
    found = [
        simulate_texts(setting, COSTS, Passages(passages, VOCABULARY), Random(SEED), tokens=8 * LENGTH, warm_up=0)
        for passages in (different, alike)
    ]
    assert found[0].tokens_per_verification == pytest.approx(1.0, abs=0.02), f"seed {SEED}"
    assert 2.0 < found[1].tokens_per_verification < 4.0, f"one answer in four comes as new; seed {SEED}"


def test_a_step_commits_no_more_than_the_depth_allows():
    song = Passages([AgreementPassage((1, 2), (5, 6, 7, 8) * 25)], VOCABULARY)
    for depth in (1, 3):
        setting = SimulationSettings(sources=LOOKUP, drafters=0, max_depth=depth)
        report = simulate_texts(setting, COSTS, song, Random(SEED), tokens=200)
        assert depth < report.tokens_per_verification <= depth + 1


def test_guesses_let_a_slow_drafter_draft_several_levels_at_once_where_words_come_again():
    rng = Random(SEED)
    verse = tuple(rng.randrange(VOCABULARY) for _ in range(25))
    places = tuple((Candidate(token, 0.95),) for token in verse * 4)
    song = Passages([AgreementPassage((1, 2), verse * 4, places)], VOCABULARY)
    slow = replace(COSTS, draft=Curve.straight(0.015, 0.01))
    without, with_guesses = (
        simulate_texts(SimulationSettings(guesses=guesses), slow, song, Random(SEED), tokens=300)
        for guesses in (False, True)
    )
    assert with_guesses.tokens_per_verification > 1.5 * without.tokens_per_verification
    prose = Passages([spoken(made_up(Random(SEED), 0.8, length=LENGTH), rng)], VOCABULARY)
    without, with_guesses = (
        simulate_texts(SimulationSettings(guesses=guesses), slow, prose, Random(SEED), tokens=100)
        for guesses in (False, True)
    )
    assert with_guesses.rate == pytest.approx(without.rate, rel=0.1), "nothing comes again in words at random"
