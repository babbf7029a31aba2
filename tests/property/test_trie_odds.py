"""At each place the text goes one way: the odds of siblings never add up to more than one, whatever is said of them."""

from hypothesis import given, settings
from hypothesis import strategies as st

from speculation.messages import Source, Token
from speculation.trie import MIN_CONFIDENCE, SpeculationTrie, TrieLimits
from speculation.verifying.calibration import Calibration

CHILDREN = 8
VOCABULARY = CHILDREN + 1

confidences = st.one_of(st.floats(0.0, 1.0), st.sampled_from([0.0, 1.0, 0.999, -1.0, 1e308, 5e-324]))
drafts = st.tuples(st.integers(0, VOCABULARY - 1), confidences, st.sampled_from(Source))
places = st.tuples(
    st.lists(drafts, max_size=CHILDREN, unique_by=lambda draft: draft[0]), st.integers(0, VOCABULARY - 1)
)
"""What is drafted at one place of the text, and what follows there."""


@settings(max_examples=200)
@given(st.lists(places, min_size=1, max_size=40), st.integers(1, 30))
def test_the_odds_of_siblings_never_add_up_to_more_than_one(text, repetitions):
    calibration = Calibration(Calibration())
    limits = TrieLimits(children=CHILDREN)
    trie = SpeculationTrie((0,), vocabulary=VOCABULARY, limits=limits, odds=calibration)
    for drafted, token in text * repetitions:
        for candidate, confidence, source in drafted:
            add(trie, candidate, confidence, source)
        calibration.observe(trie.root, token)
        trie.advance([token])


def add(trie: SpeculationTrie, token: Token, confidence: float, source: Source) -> None:
    node = trie.add(trie.root, token, confidence, source)
    assert node is not None
    assert 0 < node.claim <= 1
    assert 0 < node.odds <= 1
    floor = CHILDREN * MIN_CONFIDENCE  # no token is hopeless
    assert sum(sibling.odds for sibling in trie.root.children.values()) <= 1 + floor
