from random import Random

import pytest

from speculation.calibration import Calibration
from speculation.messages import Source
from speculation.trie import Node


def node(confidence: float, rank: int = 0, ahead: int = 0, source: Source = Source.DRAFT) -> Node:
    return Node(1, 1, 0, confidence=confidence, rank=rank, ahead=ahead, source=source)


def train(calibration: Calibration, of: Node, share: float, trials: int = 600, seed: int = 1) -> None:
    rng = Random(seed)
    for _ in range(trials):
        calibration.observe(of, rng.random() < share)


def test_a_source_is_believed_until_it_was_tried():
    assert Calibration()(node(0.85)) == pytest.approx(0.85)


def test_confidence_is_corrected_by_what_was_kept():
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


def test_a_source_that_is_always_wrong_is_found_out_at_every_confidence_at_once():
    calibration = Calibration()
    for i in range(40):
        calibration.observe(node(i % 10 / 10 + 0.05), kept=False)
    assert all(calibration(node(confidence)) < 0.2 for confidence in (0.15, 0.55, 0.95))


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
