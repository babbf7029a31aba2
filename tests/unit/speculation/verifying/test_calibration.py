from random import Random

import pytest

from speculation.messages import Source
from speculation.trie import Node, SpeculationTrie
from speculation.verifying.calibration import BINS, DEPTHS, MAX_ODDS, MIN_ODDS, RANKS, Calibration


def node(claim: float, rank: int = 0, ahead: int = 0, source: Source = Source.DRAFT) -> Node:
    return Node(1, 1, 0, confidence=claim, claim=claim, rank=rank, ahead=ahead, source=source)


def place(*children: Node) -> Node:
    """A committed place with these drafts below it, told apart by tokens 0, 1, ... in their order."""
    for token, child in enumerate(children):
        child.token = token
    return Node(-1, 0, 0, children={child.token: child for child in children})


OTHER = 99
"""A token nobody drafted."""


def train(calibration: Calibration, of: Node, share: float, trials: int = 600, seed: int = 1) -> None:
    """Let the only draft at its place be right this often."""
    rng, committed = Random(seed), place(of)
    for _ in range(trials):
        calibration.observe(committed, of.token if rng.random() < share else OTHER)


def test_a_source_is_believed_until_it_was_tried():
    assert Calibration()(node(0.85)) == pytest.approx(0.85)


def test_the_claim_counts_and_not_the_confidence_that_an_elder_sibling_has_made_small():
    calibration, claimed = Calibration(), Node(1, 1, 0, confidence=0.035, claim=0.35, rank=1)
    assert calibration(claimed) == pytest.approx(0.35)
    train(calibration, claimed, 0.35)
    assert calibration(claimed) == pytest.approx(0.35, abs=0.08)
    assert calibration(node(0.85, rank=1)) == pytest.approx(0.85, abs=0.1)  # it kept its word so far


def test_a_claim_is_corrected_by_what_was_kept():
    calibration = Calibration()
    train(calibration, node(0.85), 0.3)
    assert calibration(node(0.85)) == pytest.approx(0.3, abs=0.08)


def test_ranks_sources_and_distances_are_told_apart():
    calibration = Calibration()
    train(calibration, node(0.5), 0.9)
    train(calibration, node(0.5, rank=1), 0.1)
    train(calibration, node(0.5, ahead=20), 0.4)
    train(calibration, node(0.5, source=Source.LOOKUP), 0.7)
    odds = [
        calibration(node(0.5)),
        calibration(node(0.5, source=Source.LOOKUP)),
        calibration(node(0.5, ahead=20)),
        calibration(node(0.5, rank=1)),
    ]
    assert odds == pytest.approx([0.9, 0.7, 0.4, 0.1], abs=0.12)


def test_a_source_that_is_always_wrong_is_found_out_at_every_claim_at_once():
    calibration = Calibration()
    for i in range(40):
        calibration.observe(place(node(i % 10 / 10 + 0.05)), OTHER)
    assert all(calibration(node(claim)) < 0.2 for claim in (0.15, 0.55, 0.95))


def test_nothing_is_ever_hopeless_and_recovery_is_learned():
    calibration = Calibration()
    train(calibration, node(0.9), 0.0, trials=3000)
    assert calibration(node(0.9)) > 0
    train(calibration, node(0.9), 1.0, trials=600)
    assert calibration(node(0.9)) > 0.6


def test_a_session_starts_from_what_all_have_seen_and_goes_its_own_way():
    worker = Calibration()
    train(worker, node(0.7), 0.7)
    easy, hard = Calibration(worker), Calibration(worker)
    assert easy(node(0.7)) == hard(node(0.7))
    train(easy, node(0.7), 0.95, trials=100, seed=2)
    train(hard, node(0.7), 0.4, trials=100, seed=3)
    assert hard(node(0.7)) < worker(node(0.7)) < easy(node(0.7))


@pytest.mark.parametrize("surprises", [0.05, 0.2, 0.5])
def test_a_second_choice_that_is_right_whenever_the_first_is_wrong_is_believed_however_rarely(surprises):
    calibration, rng = Calibration(), Random(4)
    first, second = node(0.9), node(0.3, rank=1)
    committed = place(first, second)
    for _ in range(1500):
        calibration.observe(committed, second.token if rng.random() < surprises else first.token)
    assert calibration(first) == pytest.approx(1 - surprises, abs=0.08)
    assert calibration(second) > 0.9


def test_a_second_choice_is_not_held_responsible_where_the_first_was_right():
    tried, untried = Calibration(), Calibration()
    committed = place(node(0.9), node(0.3, rank=1))
    for _ in range(500):
        tried.observe(committed, 0)
    assert tried(node(0.3, rank=1)) == untried(node(0.3, rank=1))


def test_where_none_was_right_every_sibling_was_wrong():
    calibration = Calibration()
    committed = place(node(0.6), node(0.5, rank=1), node(0.5, rank=2))
    for _ in range(100):
        calibration.observe(committed, OTHER)
    assert all(calibration(child) < 0.1 for child in committed.children.values())


def test_a_place_without_drafts_teaches_nothing():
    calibration = Calibration()
    calibration.observe(place(), OTHER)
    assert calibration(node(0.85)) == pytest.approx(0.85)


def test_in_a_trie_the_odds_of_a_second_choice_are_what_the_first_leaves_times_its_share_of_that():
    """A first choice that is right 19 times in 20, and a second that catches the rest, all along a text."""
    calibration, rng = Calibration(), Random(5)
    trie = SpeculationTrie((1, 2), vocabulary=10, odds=calibration)
    for _ in range(800):
        trie.add(trie.root, 4, 0.9)
        trie.add(trie.root, 5, 0.03)
        token = 5 if rng.random() < 0.05 else 4
        calibration.observe(trie.root, token)
        trie.advance([token])
    first, second = trie.add(trie.root, 4, 0.9), trie.add(trie.root, 5, 0.03)
    assert first is not None and second is not None
    assert second.claim == pytest.approx(0.3)
    assert first.odds == pytest.approx(0.95, abs=0.03)
    assert second.odds > 0.9 * (1 - first.odds)


def test_as_numbers_it_makes_the_same_of_a_claim():
    """What a device computes from its table, of a worker and of a session, whatever they have seen."""
    rng, wider = Random(3), Calibration()
    session = Calibration(wider)
    for _ in range(300):
        children = [node(rng.random(), rank, rng.choice([0, 3, 9, 30])) for rank in range(rng.randint(1, 4))]
        (session if rng.random() < 0.5 else wider).observe(place(*children), rng.randrange(6))
        if rng.random() < 0.1:
            wider.table(Source.DRAFT)  # which is kept, and has to follow
    table, factors = wider.table(Source.DRAFT), session.factors(Source.DRAFT)
    assert len(set(table.slopes)) > 20 and len(set(factors)) == RANKS
    for _ in range(200):
        one = node(rng.random(), rng.randrange(5), rng.choice([0, 1, 2, 5, 6, 13, 14, 40]))
        rank, tenth = min(one.rank, RANKS - 1), min(int(one.claim * BINS), BINS - 1)
        cell = (rank * BINS + tenth) * (len(DEPTHS) + 1) + sum(one.ahead >= end for end in DEPTHS)
        odds = min(one.claim * table.factors[rank], 1.0) * table.slopes[cell] + table.offsets[cell]
        odds = min(max(odds, MIN_ODDS), MAX_ODDS)
        assert odds == pytest.approx(wider(one), rel=1e-9)
        assert min(max(odds * factors[rank], MIN_ODDS), MAX_ODDS) == pytest.approx(session(one), rel=1e-9)
