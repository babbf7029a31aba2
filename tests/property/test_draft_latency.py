"""However commits were answered, what is expected of a wait are chances."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from speculation.verifying.payoff import DEEPEST, TIMES, Answered, DraftLatencyEstimator

answers = st.lists(st.floats(0.0, 2 * TIMES[-1]), max_size=DEEPEST).map(sorted)
"""When a path of 1, 2, ... tokens was there."""


@given(
    st.lists(answers, max_size=40),
    st.one_of(st.sampled_from(TIMES), st.floats(0.0, 2 * TIMES[-1])),
    st.integers(0, DEEPEST + 2),
)
def test_longer_paths_are_less_likely_later_moments_more_and_all_are_chances(commits, age, come):
    draft_latency = DraftLatencyEstimator()
    for reached in commits:
        draft_latency.observe(Answered(0.0, 3, reached))
    moments = draft_latency.moments(age, come)
    for moment in moments:
        assert moment[0] > 0
        assert len(moment[1]) == DEEPEST
        assert all(1.0 >= shorter >= longer >= 0.0 for shorter, longer in pairwise(moment[1]))
    for sooner, later in pairwise(moments):
        assert sooner[0] < later[0]
        assert all(less <= more for less, more in zip(sooner[1], later[1], strict=True))
