"""How far a way would have followed the text: counted on texts for which it is known."""

from random import Random

import pytest

from benchmarks.fit.command import DEPTH, Way
from benchmarks.fit.predict import agreement
from simulation.agreement import AgreementPassage
from speculation.drafting.draft_session import Candidate
from speculation.messages import Source

DRAFT = Way("draft")
LOOKUP = Way(None, frozenset({Source.LOOKUP}))
EAGLE, SUFFIX = (Way(None, frozenset({one})) for one in (Source.EAGLE, Source.SUFFIX))
BOTH = Way("draft", frozenset({Source.LOOKUP}))


def passage(rights: str, tokens=None) -> AgreementPassage:
    """``1``: the first choice is right; ``2``: the second; ``-``: none; a blank: nothing is proposed."""
    tokens = tuple(tokens or range(100, 100 + len(rights)))
    wrong = Candidate(7, 0.5)
    offers = {
        "1": lambda t: (Candidate(t, 0.9), wrong),
        "2": lambda t: (wrong, Candidate(t, 0.3)),
        "-": lambda t: (wrong,),
    }
    places = tuple(offers[mark](token) if mark in offers else () for mark, token in zip(rights, tokens, strict=True))
    return AgreementPassage((1, 2, 3), tokens, places)


def test_a_draft_goes_on_until_its_first_choice_is_wrong():
    found = agreement(DRAFT, [passage("11211-")])
    assert [run.right for run in found.runs] == [2, 1, 0, 2, 1, 0]
    assert [run.offered for run in found.runs] == [6, 5, 4, 3, 2, 1]
    assert found.first == pytest.approx(4 / 6)


def test_by_depth_only_what_was_right_so_far_counts():
    depths = {depth.depth: (depth.tried, depth.kept) for depth in agreement(DRAFT, [passage("11211-")]).depths}
    assert depths == {1: (6, 4), 2: (4, 2), 3: (2, 0)}


def test_no_draft_is_longer_than_a_step_allows_nor_goes_past_a_text():
    found = agreement(DRAFT, [passage("1" * 40), passage("11")])
    assert [run.right for run in found.runs[:2]] == [DEPTH, DEPTH]
    assert [run.right for run in found.runs[-3:]] == [1, 2, 1]


def test_where_nothing_is_proposed_nothing_is_right():
    found = agreement(DRAFT, [passage("1 1-")])
    assert [run.offered > 0 for run in found.runs] == [True, False, True, True]
    assert [run.right for run in found.runs] == [1, 0, 1, 0]


def test_a_head_goes_on_until_it_is_too_far_from_its_true_states():
    tokens = tuple(range(100, 106))
    by_age = tuple(tuple((Candidate(token + (age > 2), 0.9),) for token in tokens) for age in range(4))
    text = AgreementPassage((1, 2, 3), tokens, by_age=by_age)
    for way in (DRAFT, EAGLE):
        rights = [run.right for run in agreement(way, [text]).runs]
        assert rights[1:] == [3, 3, 3, 2, 1], way
    assert rights[0] == 0, "at the target it has read nothing yet"


def test_lookup_copies_what_stood_there_before():
    words = [11, 12, 13, 14, 15, 11, 12, 13, 14, 15]
    found = agreement(LOOKUP, [AgreementPassage((1, 2), tuple(words))])
    assert [run.right for run in found.runs] == [0, 0, 0, 0, 0, 0, 0, 3, 2, 1]
    assert found.runs[7].offered == 3


def test_a_head_is_followed_along_its_first_guesses():
    """At the second place it is right twice, at the third its second guess is, at the fourth nothing is said."""
    by_age = (
        ((), (Candidate(12, 0.9), Candidate(99, 0.05)), (Candidate(99, 0.6), Candidate(13, 0.3)), ()),
        ((), (), (Candidate(13, 0.9), Candidate(98, 0.05)), (Candidate(14, 0.9),)),
        ((),) * 4,
    )
    found = agreement(EAGLE, [AgreementPassage((1, 2), (11, 12, 13, 14), by_age=by_age)])
    assert [run.right for run in found.runs] == [0, 2, 0, 0]
    assert [run.offered > 0 for run in found.runs] == [False, True, True, False]
    assert found.runs[1].offered == 2
    assert found.first == 0.25


def test_earlier_outputs_are_those_of_the_passages_before():
    words = (11, 12, 13, 14, 15, 16)
    same = AgreementPassage((1, 2), words)
    found = agreement(SUFFIX, [same, AgreementPassage((3, 4), (21, 22, 23, 24, 25, 26)), same])
    assert [run.right for run in found.runs[:12]] == [0] * 12
    assert [run.right for run in found.runs[12:]] == [0, 5, 4, 3, 2, 1], "three equal tokens are followed"


def test_of_several_sources_the_one_that_gets_furthest_counts():
    words = [11, 12, 13, 14, 15, 11, 12, 13, 14, 15]
    drafted = passage("1----11---", words)
    both, alone = agreement(BOTH, [drafted]), agreement(DRAFT, [drafted])
    assert [run.right for run in both.runs] == [1, 0, 0, 0, 0, 2, 1, 3, 2, 1]
    assert both.first > alone.first


def test_the_share_of_right_first_choices_is_the_chance_they_were_made_with():
    seed = 5
    rng = Random(seed)
    rights = "".join("1" if rng.random() < 0.8 else "-" for _ in range(4000))
    found = agreement(DRAFT, [passage(rights)])
    assert found.first == pytest.approx(0.8, abs=0.03), f"seed {seed}"
    for depth in found.depths[:6]:
        assert depth.kept / depth.tried == pytest.approx(0.8, abs=0.03), f"seed {seed}"
